//! [`SubprocessConfig`]: the program to run, and how long it may take for what.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use genset_backend_common::EngineError;
use genset_process::{InheritedEnv, LogLimit, RestartPolicy};

/// The least a `Hello` may announce as its largest payload.
pub(crate) const MIN_FRAME_BYTES: u32 = 64 << 10;

/// What a [`SubprocessEngine`](crate::SubprocessEngine) is built from.
///
/// # Examples
/// ```
/// use genset_engine_subprocess::SubprocessConfig;
///
/// let config = SubprocessConfig::new("python3").with_args(["my_engine.py", "--max-tokens", "16"]);
/// assert_eq!(config.command_line(), "python3 my_engine.py --max-tokens 16");
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SubprocessConfig {
    /// The program: a path, or a name to be found in `PATH`.
    pub program: PathBuf,
    /// Its arguments.
    pub args: Vec<String>,
    /// What it gets of this process's environment.
    pub inherited_env: InheritedEnv,
    /// Variables added to that.
    pub env: BTreeMap<String, String>,
    /// The directory it runs in; `None` for this process's.
    pub cwd: Option<PathBuf>,
    /// How long the process may take until it has greeted. Imports count.
    pub hello_timeout: Duration,
    /// How long `start` may take in all, loading the model included.
    pub start_timeout: Duration,
    /// How often the process is asked whether it is there.
    pub heartbeat_interval: Duration,
    /// Silence after which the process counts as hung, once it has started. A step that blocks the process's event loop
    /// must be shorter.
    pub heartbeat_timeout: Duration,
    /// How long the process may take to answer `cleanup`.
    pub cleanup_timeout: Duration,
    /// How long it may take to exit after that, before it is killed.
    pub exit_timeout: Duration,
    /// Items of one response that may be on their way or unread, at least 2: what the process may run ahead of a reader.
    pub window: u32,
    /// The largest payload of a frame in either direction, in bytes; at least 64 KiB.
    pub max_frame_bytes: u32,
    /// How many of the last lines on standard error an error carries.
    pub stderr_lines: usize,
    /// How much of what it prints reaches the log.
    pub log_limit: LogLimit,
    /// Whether a process that ended by itself is started again; `None` for never: then the engine is dead.
    pub restart: Option<RestartPolicy>,
}

impl SubprocessConfig {
    /// A program without arguments, with the default limits.
    #[must_use]
    pub fn new(program: impl Into<PathBuf>) -> Self {
        Self {
            program: program.into(),
            args: Vec::new(),
            inherited_env: InheritedEnv::All,
            env: BTreeMap::new(),
            cwd: None,
            hello_timeout: Duration::from_secs(120),
            start_timeout: Duration::from_secs(1800),
            heartbeat_interval: Duration::from_secs(1),
            heartbeat_timeout: Duration::from_secs(30),
            cleanup_timeout: Duration::from_secs(30),
            exit_timeout: Duration::from_secs(5),
            window: 256,
            max_frame_bytes: 16 << 20,
            stderr_lines: 20,
            log_limit: LogLimit::default(),
            restart: None,
        }
    }

    /// A command line as a shell's words: white space separates; quotes and backslashes keep it. Nothing is expanded.
    ///
    /// # Errors
    /// `InvalidArgument` for the field `program`: no word, or a quote that is not closed.
    ///
    /// # Examples
    /// ```
    /// use genset_engine_subprocess::SubprocessConfig;
    ///
    /// let config = SubprocessConfig::try_from_command_line("python3 'my engine.py' --max-tokens 16")?;
    /// assert_eq!(config.args, ["my engine.py", "--max-tokens", "16"]);
    /// # Ok::<(), genset_backend_common::EngineError>(())
    /// ```
    pub fn try_from_command_line(line: &str) -> Result<Self, EngineError> {
        let Some(words) = words(line) else {
            let problem = format!("a quote or backslash is left open in: {line}");
            return Err(EngineError::invalid_argument("program", problem));
        };
        let mut words = words.into_iter();
        let Some(program) = words.next() else {
            return Err(EngineError::invalid_argument(
                "program",
                "must name a program, with its arguments behind it",
            ));
        };
        Ok(Self::new(program).with_args(words))
    }

    /// Adds arguments.
    #[must_use]
    pub fn with_args<S: Into<String>>(mut self, args: impl IntoIterator<Item = S>) -> Self {
        self.args.extend(args.into_iter().map(Into::into));
        self
    }

    /// Adds a variable to the environment.
    #[must_use]
    pub fn with_env(mut self, name: impl Into<String>, value: impl Into<String>) -> Self {
        self.env.insert(name.into(), value.into());
        self
    }

    /// Has a process that ended started again, as [`RestartPolicy::new`] says; 0 for never.
    #[must_use]
    pub fn with_restarts(mut self, max_restarts: u32) -> Self {
        self.restart = RestartPolicy::of(max_restarts);
        self
    }

    /// The command as one line, for logs and errors.
    #[must_use]
    pub fn command_line(&self) -> String {
        let program = self.program.display().to_string();
        let words = std::iter::once(program.as_str()).chain(self.args.iter().map(String::as_str));
        words.collect::<Vec<_>>().join(" ")
    }

    /// Checks what a type cannot hold.
    ///
    /// # Errors
    /// `InvalidArgument`, naming the field at fault.
    pub fn validate(&self) -> Result<(), EngineError> {
        let problem = if self.program.as_os_str().is_empty() {
            ("program", "must name a program")
        } else if self.window < 2 {
            ("window", "must be at least 2 items")
        } else if self.max_frame_bytes < MIN_FRAME_BYTES {
            ("max_frame_bytes", "must be at least 65536")
        } else if self.heartbeat_interval.is_zero() {
            ("heartbeat_interval", "must be longer than nothing")
        } else if self.heartbeat_timeout <= self.heartbeat_interval {
            (
                "heartbeat_timeout",
                "must be longer than heartbeat_interval",
            )
        } else {
            return self.restart.map_or(Ok(()), |policy| policy.validate());
        };
        Err(EngineError::invalid_argument(problem.0, problem.1))
    }
}

/// The words of a command line by the rules of a POSIX shell, without expansions; `None` where a quote is left open.
fn words(line: &str) -> Option<Vec<String>> {
    let mut words = Vec::new();
    let mut word: Option<String> = None;
    let mut rest = line.chars();
    while let Some(c) = rest.next() {
        if c.is_whitespace() {
            words.extend(word.take());
            continue;
        }
        let word = word.get_or_insert_default();
        match c {
            '\'' => read_quoted(&mut rest, '\'', word)?,
            '"' => read_quoted(&mut rest, '"', word)?,
            '\\' => word.push(rest.next()?),
            other => word.push(other),
        }
    }
    words.extend(word);
    Some(words)
}

/// Reads up to the closing quote. Within double quotes a backslash keeps its character only before a quote or another.
fn read_quoted(rest: &mut std::str::Chars<'_>, quote: char, word: &mut String) -> Option<()> {
    loop {
        match rest.next()? {
            c if c == quote => return Some(()),
            '\\' if quote == '"' => {
                let next = rest.next()?;
                if !matches!(next, '"' | '\\') {
                    word.push('\\');
                }
                word.push(next);
            }
            c => word.push(c),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn command_lines_are_split_as_a_shell_does() {
        let cases: [(&str, Option<&[&str]>); 8] = [
            (
                "python3  -m my.engine",
                Some(&["python3", "-m", "my.engine"]),
            ),
            ("'a b' \"c d\" e\\ f ''", Some(&["a b", "c d", "e f", ""])),
            // What Python's shlex.join makes of `it's`.
            (r#"'it'"'"'s'"#, Some(&["it's"])),
            (r#""a\"b\n""#, Some(&[r#"a"b\n"#])),
            ("a'b'c", Some(&["abc"])),
            ("", Some(&[])),
            ("'open", None),
            ("open\\", None),
        ];
        for (line, expected) in cases {
            let expected = expected.map(|words| words.iter().map(ToString::to_string).collect());
            assert_eq!(words(line), expected, "{line}");
        }
        for bad in ["", "  ", "'open"] {
            let error = SubprocessConfig::try_from_command_line(bad).unwrap_err();
            assert_eq!(error.at().map(|at| at.name()), Some("program"));
        }
    }

    #[test]
    fn impossible_values_are_refused_by_name() {
        let good = SubprocessConfig::new("true");
        good.validate().unwrap();
        type Break = fn(&mut SubprocessConfig);
        let cases: [(&str, Break); 5] = [
            ("program", |c| c.program = PathBuf::new()),
            ("window", |c| c.window = 1),
            ("max_frame_bytes", |c| c.max_frame_bytes = 1024),
            ("heartbeat_interval", |c| {
                c.heartbeat_interval = Duration::ZERO;
            }),
            ("heartbeat_timeout", |c| {
                c.heartbeat_timeout = c.heartbeat_interval;
            }),
        ];
        for (field, break_it) in cases {
            let mut config = good.clone();
            break_it(&mut config);
            let error = config.validate().unwrap_err();
            assert_eq!(error.at().map(|at| at.name()), Some(field));
        }
    }
}
