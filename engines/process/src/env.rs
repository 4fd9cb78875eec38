//! [`InheritedEnv`]: which environment variables a child inherits.

use std::ffi::{OsStr, OsString};
use std::fmt;
use std::process::Command;
use std::str::FromStr;

/// The word for the names in [`MINIMAL`].
const MINIMAL_WORD: &str = "minimal";
/// The word for all names.
const INHERIT_WORD: &str = "inherit";

/// Variables that a program needs to start and to find its libraries and the GPUs. None of them holds credentials.
const MINIMAL: [&str; 17] = [
    "PATH",
    "HOME",
    "USER",
    "LOGNAME",
    "SHELL",
    "TMPDIR",
    "TZ",
    "LANG",
    "LANGUAGE",
    "LC_*",
    "LD_LIBRARY_PATH",
    "PYTHONPATH",
    "VIRTUAL_ENV",
    "CONDA_PREFIX",
    "CUDA_*",
    "NVIDIA_*",
    "OMP_*",
];

/// Which variables of this process's environment a child inherits.
///
/// # Examples
/// ```
/// use genset_process::InheritedEnv;
///
/// let inherited: InheritedEnv = "minimal,HF_*,NCCL_DEBUG".parse().unwrap();
/// assert!(inherited.has("PATH") && inherited.has("HF_HOME"));
/// assert!(!inherited.has("AWS_SECRET_ACCESS_KEY"));
/// ```
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum InheritedEnv {
    /// All variables, the usual default. Servers read dozens of variables and do not report a missing one.
    #[default]
    All,
    /// The variables with these names. A name that ends with `*` matches all names with that prefix.
    Named(Vec<String>),
}

/// Why a text is not a list of variable names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InvalidEnv(String);

impl fmt::Display for InvalidEnv {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for InvalidEnv {}

impl FromStr for InheritedEnv {
    type Err = InvalidEnv;

    /// Parses `inherit`, or names separated by commas. The word `minimal` adds the variables that a program needs to start.
    fn from_str(text: &str) -> Result<Self, InvalidEnv> {
        if text == INHERIT_WORD {
            return Ok(Self::All);
        }
        let mut names = Vec::new();
        for word in text.split(',').map(str::trim) {
            match word {
                MINIMAL_WORD => names.extend(MINIMAL.map(str::to_owned)),
                _ if is_name(word) => names.push(word.to_owned()),
                _ => {
                    return Err(InvalidEnv(format!(
                        "{word:?} is no variable; give {INHERIT_WORD}, or names with commas between them, such as \
                         {MINIMAL_WORD},HF_*,NCCL_DEBUG"
                    )));
                }
            }
        }
        Ok(Self::Named(names))
    }
}

/// Whether the word is a variable name, or a prefix followed by `*`.
fn is_name(word: &str) -> bool {
    let name = word.strip_suffix('*').unwrap_or(word);
    let is_letter = |c: char| c.is_ascii_alphanumeric() || c == '_';
    !name.is_empty() && name != INHERIT_WORD && name.chars().all(is_letter)
}

impl InheritedEnv {
    /// Whether a child inherits the variable with this name.
    #[must_use]
    pub fn has(&self, name: impl AsRef<OsStr>) -> bool {
        let Self::Named(names) = self else {
            return true;
        };
        let name = name.as_ref().as_encoded_bytes();
        names.iter().any(|named| match named.strip_suffix('*') {
            Some(beginning) => name.starts_with(beginning.as_bytes()),
            None => name == named.as_bytes(),
        })
    }

    /// Removes from `command` the variables that the child must not inherit. Call this before setting variables on it.
    pub fn apply(&self, command: &mut Command) {
        for name in self.withheld(std::env::vars_os().map(|(name, _)| name)) {
            command.env_remove(name);
        }
    }

    fn withheld(&self, names: impl Iterator<Item = OsString>) -> impl Iterator<Item = OsString> {
        names.filter(|name| !self.has(name))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(text: &str) -> InheritedEnv {
        text.parse().unwrap()
    }

    #[test]
    fn the_words_and_names_say_what_is_inherited() {
        let cases = [
            ("inherit", "HF_TOKEN", true),
            ("minimal", "PATH", true),
            ("minimal", "LC_ALL", true),
            ("minimal", "CUDA_VISIBLE_DEVICES", true),
            ("minimal", "HF_TOKEN", false),
            ("minimal", "AWS_SECRET_ACCESS_KEY", false),
            ("minimal", "OTEL_EXPORTER_OTLP_HEADERS", false),
            ("minimal, HF_TOKEN", "HF_TOKEN", true),
            ("HF_*", "HF_TOKEN", true),
            ("HF_*", "PATH", false),
            ("HF", "HF_TOKEN", false),
        ];
        for (text, name, expected) in cases {
            assert_eq!(parsed(text).has(name), expected, "{text}: {name}");
        }
    }

    #[test]
    fn what_is_no_name_is_refused() {
        for text in ["", "minimal,", "*", "A=1", "inherit,HF_TOKEN", "A B"] {
            assert!(text.parse::<InheritedEnv>().is_err(), "{text}");
        }
    }

    #[test]
    fn a_process_gets_what_is_named_and_what_is_set_for_it() {
        let printed = |inherited: InheritedEnv| {
            let mut command = Command::new("/usr/bin/env");
            inherited.apply(&mut command);
            let output = command.env("SET", "1").output().unwrap();
            let text = String::from_utf8_lossy(&output.stdout).into_owned();
            let mut names: Vec<_> = text
                .lines()
                .filter_map(|line| line.split_once('='))
                .map(|(name, _)| name.to_owned())
                .collect();
            names.sort();
            names
        };
        // Cargo sets this variable for tests.
        let mine = "CARGO_MANIFEST_DIR";
        let all = printed(InheritedEnv::All);
        assert!(all.contains(&mine.to_owned()) && all.len() > 2, "{all:?}");
        assert_eq!(printed(parsed(mine)), [mine, "SET"]);
    }
}
