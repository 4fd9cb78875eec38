//! What people expect of any command: short help, completions, man pages, files that are checked, and the nearest spelling.

use std::fs;

use crate::support::{genset, run, run_with};

#[tokio::test]
async fn help_is_short_unless_all_is_asked_for() {
    for words in [&["run", "--help"][..], &["run", "-h"]] {
        let short = run(words).await;
        assert_eq!(short.code, Some(0));
        assert!(
            short.stdout.contains("--help-all") && short.stdout.contains("--http-port"),
            "{short:?}"
        );
        assert!(!short.stdout.contains("--kv-approx-ttl"), "{short:?}");
    }
    let whole = run(&["run", "--help-all"]).await;
    assert_eq!(whole.code, Some(0));
    for flag in ["--http-port", "--kv-approx-ttl", "--wire-tls-ca"] {
        assert!(whole.stdout.contains(flag), "{flag}: {whole:?}");
    }
}

#[tokio::test]
async fn completions_and_man_pages_know_every_flag() {
    for shell in ["bash", "zsh", "fish"] {
        let script = run(&["completions", shell]).await;
        assert_eq!(script.code, Some(0), "{script:?}");
        for word in ["kv-approx-ttl", "doctor"] {
            assert!(script.stdout.contains(word), "{shell}: {word}");
        }
    }
    let folder = tempfile::tempdir().unwrap();
    let pages = folder.path().join("man");
    let written = run(&["man", pages.to_str().unwrap()]).await;
    assert_eq!(written.code, Some(0), "{written:?}");
    let page = fs::read_to_string(pages.join("genset-run.1")).unwrap();
    assert!(page.contains("kv\\-approx\\-ttl"), "{page}");
    assert!(pages.join("genset.1").exists() && pages.join("genset-doctor.1").exists());
}

#[tokio::test]
async fn a_file_of_settings_is_checked() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("genset.toml");
    let check = async |content: &str| {
        fs::write(&file, content).unwrap();
        run(&["config", "check", file.to_str().unwrap()]).await
    };
    let good = check("in = \"http\"\nout = \"sample\"\nhttp-port = 9000\n").await;
    assert_eq!(good.code, Some(0), "{good:?}");
    assert!(
        good.stdout.ends_with("genset.toml: 3 settings, all well\n"),
        "{good:?}"
    );
    for (content, expected) in [
        ("http-prot = 1\n", "did you mean \"http-port\"?"),
        ("http-port = \"x\"\n", "--http-port"),
        (
            "out = \"sample\"\nserver-cmd = \"x\"\n",
            "has no use for it",
        ),
        ("http-port = \n", "genset.toml"),
    ] {
        let bad = check(content).await;
        bad.fails(2, expected);
    }
}

#[tokio::test]
async fn a_file_of_settings_is_checked_without_the_environment() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("genset.toml");
    let check = async |content: &str| {
        fs::write(&file, content).unwrap();
        let mut command = genset(&["config", "check", file.to_str().unwrap()]);
        command.env("GENSET_HTTP_PORT", "9");
        run_with(command, b"").await
    };
    let good = check("http-port = 9000\n").await;
    assert!(good.stdout.contains(": 1 settings"), "{good:?}");
    let bad = check("http-port = \"x\"\n").await;
    bad.fails(2, "--http-port");
}

#[tokio::test]
async fn a_word_that_is_none_is_answered_with_the_nearest() {
    for (words, expected) in [
        (&["in=htpp"][..], "did you mean \"http\"?"),
        (&["out=vlm", "."], "did you mean \"vllm\"?"),
        (&["run", "--http-prot=1"], "--http-port"),
        (&["run", "--router-mode=kvv"], "did you mean \"kv\"?"),
        (&["run", "--role=prefil"], "did you mean \"prefill\"?"),
        (&["run", "--endpoint-types=chatt"], "did you mean \"chat\"?"),
        (&["run", "--quantize=q4k"], "did you mean \"q4_k\"?"),
        (
            &["run", "--discovery-backend=fil"],
            "did you mean \"file\"?",
        ),
        (
            &["run", "--tool-parser=herms"],
            "error: --tool-parser: \"herms\" is none of ",
        ),
        (&["run", "--tool-parser=herms"], "did you mean \"hermes\"?"),
        (
            &["conform", "run", "--engine=sampel"],
            "did you mean \"sample\"?",
        ),
        (&["doktor"], "doctor"),
    ] {
        let ended = run(words).await;
        ended.fails(2, expected);
    }
}
