//! `genset WORD...` is short for `genset run WORD...`.

use std::ffi::{OsStr, OsString};
use std::path::Path;

use genset_backend_common::EngineError;

use super::is_gguf;

/// The program name that scripts may use, followed directly by the words of `run`.
const RUN_ALONE: &str = "dynamo-run";

/// Inserts `run` before the words if it was left out.
pub(super) fn with_run(command: &clap::Command, given: Vec<OsString>) -> Vec<OsString> {
    let Some((program, rest)) = given.split_first() else {
        return given;
    };
    let is_run_alone = Path::new(program).file_stem() == Some(OsStr::new(RUN_ALONE));
    let lacks_run = match rest.first() {
        None => is_run_alone,
        // Its users look for flags of `run`.
        Some(word) if is_run_alone && (word == "-h" || word == "--help") => true,
        Some(word) if is_command(command, word) => false,
        Some(word) => is_run_alone || is_word_of_run(word),
    };
    if !lacks_run {
        return given;
    }
    let run = OsString::from("run");
    [std::slice::from_ref(program), &[run], rest].concat()
}

/// Flags of NVIDIA Dynamo's frontend, and of servers that are launched, with their replacements. What is spelt alike here is
/// something else.
const FOREIGN_FLAGS: [(&str, &str); 10] = [
    ("--host", "here it is --http-host"),
    ("--port", "here it is --http-port"),
    ("--max-model-len", "here it is --context-length"),
    ("--ctx-size", "here it is --context-length"),
    ("--tls-cert-path", "here it is --http-tls-cert"),
    ("--tls-key-path", "here it is --http-tls-key"),
    ("--router-ttl", "here it is --kv-approx-ttl"),
    ("--kv-events", "here it is --use-kv-events=true"),
    ("--no-kv-events", "here it is --use-kv-events=false"),
    (
        "--busy-threshold",
        "requests wait while every worker is full (--router-queue); workers have --max-running-requests and --max-waiting-requests",
    ),
];

/// Refuses a command or a flag of other programs that does not exist here, and names its replacement.
///
/// # Errors
/// `Unsupported`, naming the command or the flag.
pub(super) fn refuse_foreign(given: &[OsString]) -> Result<(), EngineError> {
    let (command, words) = match given {
        [_, command, words @ ..] => (command, words),
        [] | [_] => return Ok(()),
    };
    if command == "llmctl" {
        let instead = "frontends find models by themselves, and `genset models` lists them; `genset offer NAME ENDPOINT` offers a running \
            endpoint behind HTTP for as long as it runs";
        return Err(EngineError::unsupported("llmctl", instead));
    }
    let is_given = |name: &str| {
        let mut words = words.iter().map(|word| word.to_string_lossy());
        command == "run" && words.any(|word| word.split('=').next() == Some(name))
    };
    match FOREIGN_FLAGS.into_iter().find(|(name, _)| is_given(name)) {
        Some((name, instead)) => Err(EngineError::unsupported(name, instead)),
        None => Ok(()),
    }
}

fn is_command(command: &clap::Command, word: &OsStr) -> bool {
    let of_all = ["help", "-h", "--help", "-V", "--version"];
    of_all.iter().any(|known| word == *known)
        || command.get_subcommands().any(|known| {
            let mut names = known.get_all_aliases().chain([known.get_name()]);
            names.any(|name| word == name)
        })
}

/// Whether it is a flag, `in=`, `out=`, or a model. A misspelt command is none of them.
fn is_word_of_run(word: &OsStr) -> bool {
    let text = word.to_string_lossy();
    let path = Path::new(word);
    text.starts_with("in=")
        || text.starts_with("out=")
        || text.starts_with('-')
        || text.contains(std::path::MAIN_SEPARATOR)
        || is_gguf(path)
        || path.is_dir()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(words: &[&str]) -> Vec<String> {
        let given = words.iter().map(OsString::from).collect();
        let told = with_run(&super::super::command(), given);
        let told = told.into_iter().map(|word| word.into_string().unwrap());
        told.collect()
    }

    #[test]
    fn run_may_be_left_out() {
        for word in [
            "in=http",
            "out=sample",
            "--http-port=1",
            "-v",
            "./m",
            "Qwen/Qwen3-0.6B",
            "m.gguf",
            "src",
        ] {
            assert_eq!(told(&["genset", word]), ["genset", "run", word]);
        }
        for word in [
            "run",
            "conform",
            "bench",
            "key",
            "help",
            "--help",
            "-V",
            "--version",
            "rnu",
        ] {
            assert_eq!(told(&["genset", word, "x"]), ["genset", word, "x"]);
        }
        assert_eq!(told(&["genset"]), ["genset"]);
    }

    #[test]
    fn flags_of_others_are_none_of_ours_and_their_replacements_are() {
        let whole = super::super::command();
        let run = whole.find_subcommand("run").unwrap();
        let is_ours = |flag: &str| {
            let mut flags = run.get_arguments().filter_map(clap::Arg::get_long);
            flags.any(|ours| flag.strip_prefix("--") == Some(ours))
        };
        for (name, instead) in FOREIGN_FLAGS {
            assert!(!is_ours(name), "{name}");
            let mut replacements = instead.split([' ', '=', '(', ')']);
            assert!(replacements.all(|word| !word.starts_with("--") || is_ours(word)));
        }
    }

    #[test]
    fn under_the_other_name_it_is_never_needed() {
        let program = "/usr/bin/dynamo-run";
        assert_eq!(told(&[program]), [program, "run"]);
        assert_eq!(told(&[program, "model"]), [program, "run", "model"]);
        assert_eq!(
            told(&[program, "run", "in=http"]),
            [program, "run", "in=http"]
        );
        for help in ["-h", "--help"] {
            assert_eq!(told(&[program, help]), [program, "run", help]);
        }
        assert_eq!(told(&[program, "--version"]), [program, "--version"]);
        // Another name of `list`.
        assert_eq!(told(&[program, "ls"]), [program, "ls"]);
    }
}
