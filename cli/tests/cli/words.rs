//! The words as users of other tools type them.

use crate::support::{genset, run, run_with, tiny_chat};

#[tokio::test]
async fn run_may_be_left_out() {
    let mut command = genset(&["in=stdin", "out=echo_full", "--model-name=m"]);
    command.env("DYN_TOKEN_ECHO_DELAY_MS", "0");
    let ended = run_with(command, b"Hello there").await;
    assert_eq!(
        (ended.code, ended.stdout.trim()),
        (Some(0), "Hello there"),
        "{ended:?}"
    );
    let ended = run(&["rnu", "in=stdin"]).await;
    ended.fails(2, "'rnu'");
}

#[tokio::test]
async fn a_command_or_a_flag_of_others_is_told_what_takes_its_place() {
    let ended = run(&["llmctl", "http", "add", "chat-model", "m", "a.b.c"]).await;
    ended.fails(2, "`genset offer");
    for (flag, instead) in [
        ("--port", "--http-port"),
        ("--router-ttl=60", "--kv-approx-ttl"),
        ("--no-kv-events", "--use-kv-events=false"),
    ] {
        let ended = run(&["in=http", "out=dyn", flag]).await;
        ended.fails(2, instead);
    }
}

/// The usage line of `dynamo-run`, with the values in it.
#[tokio::test]
async fn values_that_choose_nothing_are_taken_by_every_engine() {
    let usual = [
        "--tensor-parallel-size=1",
        "--num-nodes=1",
        "--node-rank=0",
        "--leader-addr=127.0.0.1:9876",
        "--base-gpu-id=0",
        "--verbosity",
    ];
    for engine in ["out=echo_full", "out=sample"] {
        let words = ["in=stdin", engine, "--model-name=m", "--print-config"];
        let ended = run(&[&words[..], &usual[..]].concat()).await;
        assert_eq!(ended.code, Some(0), "{engine}: {ended:?}");
    }
    let ended = run(&["in=stdin", "out=sample", "--base-gpu-id=1"]).await;
    ended.fails(2, "--base-gpu-id");
}

#[tokio::test]
async fn another_engines_word_is_told_who_answers() {
    let model = tiny_chat();
    let words = ["in=stdin", "out=mistralrs", model.to_str().expect("UTF-8")];
    let ended = run_with(genset(&words), b"What is the capital of France?").await;
    assert_eq!(ended.code, Some(0), "{ended:?}");
    assert!(ended.stdout.contains("Paris"), "{ended:?}");
    assert!(ended.stderr.contains("no mistral.rs"), "{ended:?}");
    let how = "cargo build --release --manifest-path engines/mistralrs/Cargo.toml";
    assert!(ended.stderr.contains(how), "{ended:?}");
    let ended = run(&["in=stdin", "--custom-jinja-template=/no/such.jinja"]).await;
    ended.fails(2, "/no/such.jinja");
}

#[tokio::test]
async fn mistralrs_is_its_program_where_that_is_in_the_path() {
    use std::os::unix::fs::PermissionsExt as _;
    let folder = tempfile::tempdir().expect("a folder");
    let program = folder.path().join("genset-mistralrs");
    let script = "#!/bin/sh\necho \"ERROR it is to load $*\" >&2\nexit 7\n";
    std::fs::write(&program, script).expect("a program");
    let executable = std::fs::Permissions::from_mode(0o755);
    std::fs::set_permissions(&program, executable).expect("a program");
    let path = std::env::var_os("PATH").unwrap_or_default();
    let folders = [folder.path().to_owned()].into_iter();
    let path = std::env::join_paths(folders.chain(std::env::split_paths(&path)));
    let model = tiny_chat();
    let model = model.to_str().expect("UTF-8");
    let own = folder.path().join("own.yaml");
    std::fs::write(&own, "prefix_cache: 4\n").expect("a file");
    let own = own.to_str().expect("UTF-8");
    let mut command = genset(&["in=stdin", "out=mistralrs", model]);
    command.args(["--max-num-seqs=8", "--extra-engine-args", own]);
    command.env("PATH", path.expect("folders"));
    let ended = run_with(command, b"Hello").await;
    let asked = format!("it is to load {model} --max-num-seqs 8 --prefix-cache 4");
    ended.fails(1, &asked);
    assert!(!ended.stderr.contains("no mistral.rs"), "{ended:?}");
}

#[tokio::test]
async fn libllama_takes_a_gguf_file_and_says_how_to_have_its_program() {
    let folder = tiny_chat();
    let file = folder.join("tiny-chat-q8_0.gguf");
    let asked = |model: &std::path::Path| {
        let model = model.to_str().expect("UTF-8").to_owned();
        async move { run(&["run", "in=stdin", "out=libllama", &model]).await }
    };
    let ended = asked(&file).await;
    ended.fails(
        2,
        "cargo build --release --manifest-path engines/llamacpp/Cargo.toml",
    );
    let ended = asked(&folder).await;
    ended.fails(2, "takes a GGUF file");
}

#[tokio::test]
async fn the_log_is_set_by_either_name() {
    let words = ["in=stdin", "out=echo_full", "--model-name=m"];
    let log = |variables: &'static [(&str, &str)]| async move {
        let mut command = genset(&words);
        command.envs(variables.iter().copied());
        run_with(command, b"Hello").await.stderr
    };
    let quiet = log(&[]).await;
    let loud = log(&[("DYN_LOG", "debug")]).await;
    assert!(
        loud.lines().count() > quiet.lines().count(),
        "{quiet} {loud}"
    );
    let ours = log(&[("GENSET_LOG", "error"), ("DYN_LOG", "debug")]).await;
    assert!(ours.lines().count() < loud.lines().count(), "{ours} {loud}");
}

#[tokio::test]
async fn an_empty_variable_does_not_silence_the_log() {
    let words = ["in=dyn", "out=candle", "--threads=0"];
    for variables in [
        &[("GENSET_LOG", "")][..],
        &[("DYN_LOG", "")],
        &[("GENSET_LOG", ""), ("DYN_LOG", "info")],
    ] {
        let folder = tempfile::tempdir().expect("a folder");
        let mut command = genset(&words);
        command.arg("--discovery-path").arg(folder.path());
        command.envs(variables.iter().copied());
        // A worker alone says in its log why it ends.
        let ended = run_with(command, b"").await;
        ended.fails(2, "--threads");
    }
}

#[cfg(not(feature = "tokio-console"))]
#[tokio::test]
async fn a_build_without_tokio_console_says_how_to_have_it() {
    for words in [&["--tokio-console"][..], &["--tokio-console=127.0.0.1:1"]] {
        let ended = run(&[&["run", "in=stdin"], words].concat()).await;
        ended.fails(
            2,
            "RUSTFLAGS=\"--cfg tokio_unstable\" cargo build -p genset --features tokio-console",
        );
    }
}
