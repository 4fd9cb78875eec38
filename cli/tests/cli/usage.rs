//! Usage errors: one clear line that names the mistake, and exit code 2.

use std::fs;
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt as _;

use crate::support::{genset, run, run_with, tiny_chat};

async fn refused(words: &[&str], expected: &[&str]) {
    let words = [&["run"], words].concat();
    let ended = run(&words).await;
    assert_eq!(ended.code, Some(2), "{words:?}: {ended:?}");
    assert_eq!(ended.stdout, "", "{words:?}");
    let errors: Vec<&str> = ended
        .stderr
        .lines()
        .filter(|line| line.starts_with("error: "))
        .collect();
    let [error] = errors[..] else {
        panic!("{words:?}: not one error in {}", ended.stderr)
    };
    for text in expected {
        assert!(error.contains(text), "{words:?}: {error}");
    }
}

#[tokio::test]
async fn bad_words_are_named_with_what_would_be_good() {
    refused(&["in=foo"], &["in:", "http, text, stdin, batch"]).await;
    refused(&["in=dyn://a.b.c.d"], &["in:", "three parts"]).await;
    refused(&["out=foo"], &["out:", "echo_core, echo_full, sample"]).await;
    refused(&["out=vllm"], &["MODEL:", "out=vllm", "folder"]).await;
    refused(&["in=http", "in=text"], &["in:", "twice"]).await;
    refused(&["out=sample", "out=sample"], &["out:", "twice"]).await;
    // As of other programs, whose second word is a question.
    refused(&["a", "Why?"], &["model:", "twice", "\"Why?\"", "in=stdin"]).await;
    refused(&["out=echo_full", "."], &["echo_full", "--model-name"]).await;
}

#[tokio::test]
async fn bad_flags_are_named() {
    for (flag, value) in [
        ("--http-port", "65536"),
        ("--http-host", "nowhere"),
        ("--router-mode", "best"),
        ("--kv-overlap-score-weight", "-1"),
        ("--router-temperature", "NaN"),
        ("--use-kv-events", "perhaps"),
        ("--kv-approx-ttl", "0"),
        ("--grace", "-1"),
        ("--request-timeout", "soon"),
        ("--canary-timeout", "0"),
        ("--max-running-requests", "0"),
        ("--max-connections", "0"),
        ("--max-choices", "0"),
        ("--header-timeout", "0"),
        ("--max-body-bytes", "16Mb"),
        ("--engine-log-bytes", "0"),
        ("--token-delay-ms", "x"),
        ("--context-length", "many"),
        ("--endpoint-types", "images"),
        ("--print-config", "yaml"),
        ("--no-such-flag", "1"),
    ] {
        refused(&["in=http", &format!("{flag}={value}")], &[flag]).await;
    }
    let ended = run(&["run", "--enable-prefix-caching"]).await;
    assert!(!ended.stderr.contains("as a value"), "{ended:?}");
    refused(&["--namespace", "a b"], &["--namespace"]).await;
    refused(
        &["--discovery-backend", "zookeeper"],
        &["--discovery-backend", "zookeeper", "file"],
    )
    .await;
    refused(
        &["--request-plane", "udp"],
        &["--request-plane", "udp", "tcp"],
    )
    .await;
    refused(&["--context-length", "2049"], &["--context-length", "2048"]).await;
    refused(
        &["out=sample", "--context-length", "2049"],
        &["--context-length"],
    )
    .await;
}

#[tokio::test]
async fn a_wrong_value_of_a_variable_is_told_by_the_variables_name() {
    let told = async |words: &[&str], name: &str, value: &str| {
        let mut command = genset(words);
        command.env(name, value);
        let ended = run_with(command, b"").await;
        assert_eq!(ended.code, Some(2), "{ended:?}");
        ended.stderr
    };
    for (words, name, flag) in [
        (&["run", "in=http"][..], "GENSET_HTTP_PORT", "--http-port"),
        (&["run", "in=http"], "GENSET_ROUTER_MODE", "--router-mode"),
        (&["doctor"], "GENSET_HTTP_PORT", "--http-port"),
    ] {
        let stderr = told(words, name, "none").await;
        let expected = format!("error: {name}: invalid value 'none' for '{flag} ");
        assert!(stderr.starts_with(&expected), "{stderr}");
        assert_eq!(stderr.lines().count(), 1, "{stderr}");
    }
    // The flag takes precedence over the variable, and is invalid.
    let words = ["run", "in=http", "--http-port=bad"];
    let stderr = told(&words, "GENSET_HTTP_PORT", "none").await;
    let expected = "error: invalid value 'bad' for '--http-port ";
    assert!(stderr.starts_with(expected), "{stderr}");
}

/// Detected only when the engine starts, but still a usage error.
#[tokio::test]
async fn flags_that_the_engine_refuses_are_named() {
    for input in ["in=http", "in=stdin"] {
        let words = |flag, value| [input, "out=candle", "--http-port", "0", flag, value];
        for (flag, value) in [("--kv-cache-memory", "1B"), ("--threads", "0")] {
            refused(&words(flag, value), &[flag]).await;
        }
    }
    // A worker alone writes errors to its log.
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().to_str().unwrap();
    let words = ["run", "in=dyn", "out=candle", "--threads", "0"];
    let ended = run(&[&words[..], &["--discovery-path", path]].concat()).await;
    ended.fails(2, "--threads");
}

#[tokio::test]
async fn a_port_in_use_is_named() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    refused(&["in=http", "--http-port", &port], &["--http-port", &port]).await;
    let words = ["in=http", "--http-port", "0", "--status-port", &port];
    refused(&words, &["--status-port", &port]).await;
    refused(
        &["in=stdin", "--status-port", &port],
        &["--status-port", &port],
    )
    .await;
    let folder = tempfile::tempdir().unwrap();
    let discovery = folder.path().to_str().unwrap();
    let words = ["in=stdin", "out=dyn", "--discovery-path", discovery];
    let words = [&words[..], &["--status-port", &port]].concat();
    refused(&words, &["--status-port", &port]).await;
    // A worker alone writes errors to its log, whose last line names what ended it.
    let words = ["run", "in=dyn", "out=sample", "--discovery-path", discovery];
    let ended = run(&[&words[..], &["--status-port", &port]].concat()).await;
    assert_eq!(ended.code, Some(2), "{ended:?}");
    let last = ended.stderr.lines().last().unwrap_or_default();
    assert!(last.contains("--status-port"), "{ended:?}");
}

#[tokio::test]
async fn what_a_server_cannot_use_is_no_fault_of_its_port() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let path = file.path().to_str().unwrap();
    for (flag, expected) in [
        ("--api-keys", "--api-keys: the file of API keys"),
        ("--batch-folder", "the folder of batches"),
    ] {
        let words = ["run", "in=http", "out=sample", "--http-port=0", flag, path];
        let ended = run(&words).await;
        assert_eq!(ended.code, Some(2), "{ended:?}");
        let error = ended.stderr.lines().last().unwrap_or_default();
        let is_named = error.starts_with("error: ") && error.contains(expected);
        assert!(is_named && error.contains(path), "{error}");
        assert!(!error.contains("--http-port"), "{error}");
    }
}

#[tokio::test]
async fn a_model_that_cannot_be_loaded_is_named() {
    refused(&["/no/such/folder"], &["MODEL", "/no/such/folder"]).await;
    refused(&["Qwen/Qwen3-0.6B"], &["MODEL", "HF_HOME"]).await;
    refused(
        &["--model-path", "model.gguf"],
        &["neither a folder nor a file"],
    )
    .await;
    refused(
        &["/dev/null"],
        &["/dev/null", "neither a GGUF file nor a folder"],
    )
    .await;

    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().to_str().unwrap();
    refused(&[path], &["config.json"]).await;
    for file in ["config.json", "tokenizer_config.json"] {
        fs::copy(tiny_chat().join(file), dir.path().join(file)).unwrap();
    }
    refused(&[path], &["tokenizer.json", path]).await;
    fs::write(dir.path().join("tokenizer.json"), "{\"cut").unwrap();
    refused(&[path], &["tokenizer.json", "not valid JSON"]).await;
    fs::write(dir.path().join("config.json"), "{}").unwrap();
    fs::write(dir.path().join("tokenizer.json"), "{}").unwrap();
    refused(&["out=sample", path], &["vocab_size"]).await;
}

/// Supervisors start it again after 1, and not after 2.
#[tokio::test]
async fn what_may_be_well_at_the_next_start_ends_with_code_1() {
    let mut command = genset(&["run", "in=stdin"]);
    command.env("TMPDIR", "/dev/null/tmp");
    run_with(command, b"hello").await.fails(1, "TMPDIR");
    let directory = "/dev/null/discovery";
    let words = ["run", "in=dyn", "out=sample", "--discovery-path", directory];
    run(&words).await.fails(1, directory);
}

/// The file of keys also refuses a key without a name.
#[tokio::test]
async fn a_key_without_a_name_is_refused() {
    let ended = run(&["key", ""]).await;
    assert_eq!((ended.code, ended.stdout.as_str()), (Some(2), ""));
    assert!(ended.stderr.contains("<NAME>"), "{ended:?}");
}

#[tokio::test]
async fn without_a_command_the_help_is_shown() {
    let ended = run(&[]).await;
    ended.fails(2, "Usage: genset <COMMAND>");
    let ended = run(&["run", "--help"]).await;
    assert_eq!(ended.code, Some(0));
    for text in [
        "in=http",
        "out=sample",
        "--http-port",
        "--print-config",
        "Exit codes",
    ] {
        assert!(ended.stdout.contains(text), "{text} in {}", ended.stdout);
    }
    assert_eq!(run(&["--version"]).await.code, Some(0));
}

#[tokio::test]
async fn a_bad_log_filter_is_told_and_ends_nothing() {
    let mut command = crate::support::genset(&["run", "in=stdin", "out=echo_full"]);
    command.env("GENSET_LOG", "((");
    let ended = crate::support::run_with(command, b"hello").await;
    assert_eq!((ended.code, ended.stdout.as_str()), (Some(0), "hello\n"));
    assert!(
        ended.stderr.contains("GENSET_LOG cannot be read"),
        "{}",
        ended.stderr
    );
}

#[tokio::test]
async fn commands_of_the_python_package_say_where_it_is_missing() {
    for command in ["serve", "deploy"] {
        let mut genset = genset(&[command, "--help"]);
        genset.env("GENSET_PYTHON", "/bin/false");
        let ended = run_with(genset, b"").await;
        assert_eq!(ended.code, Some(2), "{ended:?}");
        for part in ["Python package genset", "/bin/false", "cargo xtask wheel"] {
            assert!(ended.stderr.contains(part), "{part}: {ended:?}");
        }
    }
    // An interpreter that has the package receives the command.
    let mut genset = genset(&["serve", "--help"]);
    genset.env("GENSET_PYTHON", "/bin/echo");
    let ended = run_with(genset, b"").await;
    assert_eq!(ended.stdout, "-m genset.serve --help\n", "{ended:?}");
}

#[tokio::test]
async fn an_empty_variable_names_no_interpreter() {
    let environment = tempfile::tempdir().unwrap();
    let python = environment.path().join("bin/python3");
    fs::create_dir(environment.path().join("bin")).unwrap();
    fs::write(&python, "#!/bin/sh\necho \"$@\"\n").unwrap();
    fs::set_permissions(&python, fs::Permissions::from_mode(0o755)).unwrap();
    let mut genset = genset(&["serve", "--help"]);
    genset.env("GENSET_PYTHON", "");
    genset.env("VIRTUAL_ENV", environment.path());
    let ended = run_with(genset, b"").await;
    assert_eq!(ended.stdout, "-m genset.serve --help\n", "{ended:?}");
}
