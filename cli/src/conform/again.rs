//! The command that repeats a part of this run, with the same engine, found in the same way.

use clap::{Arg, Args, Command};
use genset_hub::without_password;

use super::SubjectArgs;
use crate::args::quoted;

/// The beginning of a command line that does `what` with the subject of this process.
pub(super) fn replay_line(what: &str) -> String {
    // A file's name may not be valid UTF-8.
    let words = std::env::args_os().skip(1);
    line_of(what, words.map(|word| word.to_string_lossy().into_owned()))
}

/// Keeps only the words that select the subject.
fn line_of(what: &str, words: impl Iterator<Item = String>) -> String {
    let subject = SubjectArgs::augment_args(Command::new("subject"));
    let mut line = format!("genset conform {what}");
    let mut words = words.peekable();
    while let Some(word) = words.next() {
        let name = word.strip_prefix("--").unwrap_or_default();
        let (name, value) = match name.split_once('=') {
            Some((name, value)) => (name, Some(value)),
            None => (name, None),
        };
        let mut known = subject.get_arguments();
        // Reports contain no secrets.
        let is_kept = |arg: &&Arg| is_called(arg, name) && !arg.is_hide_env_values_set();
        let Some(arg) = known.find(is_kept) else {
            continue;
        };
        // A server's URL may contain one.
        let shown = |value: &str| match arg.get_id().as_str() {
            "url" => without_password(value),
            _ => value.to_owned(),
        };
        let mut kept = match value {
            Some(value) => vec![format!("--{name}={}", shown(value))],
            None => vec![word.clone()],
        };
        if arg.get_action().takes_values() && value.is_none() {
            // If a flag's value is optional, the next word may be another flag.
            let next = words.next_if(|next| !next.starts_with("--"));
            kept.extend(next.map(|value| shown(&value)));
        }
        for word in kept {
            line.push(' ');
            line.push_str(&quoted(&word));
        }
    }
    line
}

fn is_called(arg: &Arg, name: &str) -> bool {
    let aliases = arg.get_all_aliases().unwrap_or_default();
    !name.is_empty() && (arg.get_long() == Some(name) || aliases.contains(&name))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(words: &[&str]) -> String {
        line_of("replay", words.iter().map(|word| (*word).to_owned()))
    }

    #[test]
    fn what_says_which_engine_is_kept_and_nothing_else() {
        let words = [
            "conform", "run", "--only", "ST,US", "--engine", "sample", "--seed=3", "--json", "-",
        ];
        assert_eq!(line(&words), "genset conform replay --engine sample");
        let slow = ["--engine-cmd", "./engine", "--start-timeout=300"];
        assert_eq!(
            line(&slow),
            "genset conform replay --engine-cmd ./engine --start-timeout=300"
        );
        let words = [
            "conform",
            "run",
            "--endpoint=dyn://a.b.c",
            "--discovery-shared",
            "--discovery-path",
            "/srv/a b",
            "--level",
            "soak",
        ];
        assert_eq!(
            line(&words),
            "genset conform replay --endpoint=dyn://a.b.c --discovery-shared --discovery-path '/srv/a b'"
        );
    }

    #[test]
    fn no_secret_is_kept() {
        assert_eq!(
            line(&["--url", "http://user:secret@host/v1", "--api-key=secret"]),
            "genset conform replay --url http://host/v1"
        );
        assert_eq!(
            line(&["--url=user:secret@host:8000"]),
            "genset conform replay --url=http://host:8000"
        );
    }

    #[test]
    fn a_word_survives_a_shell() {
        assert_eq!(
            line(&["--engine-cmd", "python 'x y.py' $HOME"]),
            r"genset conform replay --engine-cmd 'python '\''x y.py'\'' $HOME'"
        );
    }
}
