//! [`SubprocessConfig`]: the program to run, its environment and its time limits.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use genset_backend_common::EngineError;
use genset_process::{InheritedEnv, LogLimit, RestartPolicy};

/// The least a `Hello` may announce as its largest payload.
pub(crate) const MIN_FRAME_BYTES: u32 = 64 << 10;

/// The configuration of a [`SubprocessEngine`](crate::SubprocessEngine).
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
    /// The program: a path, or a name to look up in `PATH`.
    pub program: PathBuf,
    /// Its arguments.
    pub args: Vec<String>,
    /// Which of this process's environment variables it inherits.
    pub inherited_env: InheritedEnv,
    /// Variables to set in addition.
    pub env: BTreeMap<String, String>,
    /// The directory it runs in; `None` for this process's.
    pub cwd: Option<PathBuf>,
    /// How long the process may take to send its Hello, imports included.
    pub hello_timeout: Duration,
    /// How long `start` may take in total, including loading the model.
    pub start_timeout: Duration,
    /// The interval between heartbeats.
    pub heartbeat_interval: Duration,
    /// The silence after which a started process counts as hung. A step that blocks the process's event loop must be shorter.
    pub heartbeat_timeout: Duration,
    /// How long the process may take to answer `cleanup`.
    pub cleanup_timeout: Duration,
    /// How long it may take to exit after that before it is killed.
    pub exit_timeout: Duration,
    /// The maximum number of items of one response in flight or unread, at least 2: the process's lead over the reader.
    pub window: u32,
    /// The largest payload of a frame in either direction, in bytes; at least 64 KiB.
    pub max_frame_bytes: u32,
    /// The maximum number of last lines of standard error in an error.
    pub stderr_lines: usize,
    /// How much of its output is logged.
    pub log_limit: LogLimit,
    /// Whether and when a process that ended by itself is restarted; with `None`, never: the engine is dead then.
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

    /// Parses a command line as a shell does: white space separates words, quotes and backslashes keep it. Nothing is expanded.
    ///
    /// # Errors
    /// `InvalidArgument` for the field `program` if there is no word or a quote is not closed.
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

    /// Restarts a process that ended, as [`RestartPolicy::new`] says; 0 for never.
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

    /// Checks what the types do not enforce.
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
            ("heartbeat_interval", "must be more than 0")
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

/// The words of a command line by the rules of a POSIX shell, without expansions; `None` if a quote is not closed.
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

/// Reads up to the closing quote. Within double quotes, a backslash escapes only a quote or another backslash.
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
            // The output of Python's shlex.join for `it's`.
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
