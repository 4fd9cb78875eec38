//! Models by name: models in the hub's cache are served, listed and deleted. No test here contacts a hub; the crate `genset-hub`
//! tests that with its own server.

use std::fs;
use std::net::TcpListener;
use std::path::Path;

use tempfile::TempDir;
use tokio::process::Command;

use crate::support::{Ended, Server, genset, run_with, tiny_chat};

const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

/// A cache with tiny-chat under the name `org/tiny`, in the layout of the hub's own tools.
fn cache() -> TempDir {
    cache_of(&["org/tiny"])
}

/// A cache with tiny-chat under each of these names.
pub(crate) fn cache_of(names: &[&str]) -> TempDir {
    let cache = tempfile::tempdir().expect("a folder to write to");
    for name in names {
        let folder = format!("models--{}", name.replace('/', "--"));
        let repo = cache.path().join(folder);
        let snapshot = repo.join("snapshots").join(COMMIT);
        for folder in [repo.join("blobs"), repo.join("refs"), snapshot.clone()] {
            fs::create_dir_all(folder).expect("a folder to write to");
        }
        fs::write(repo.join("refs/main"), COMMIT).expect("a folder to write to");
        let files = fs::read_dir(tiny_chat()).expect("a folder to write to");
        for file in files.flatten().filter(|file| !file.path().is_dir()) {
            let name = file.file_name();
            fs::copy(file.path(), repo.join("blobs").join(&name)).expect("a folder to write to");
            let target = Path::new("../../blobs").join(&name);
            std::os::unix::fs::symlink(target, snapshot.join(name)).expect("a folder to write to");
        }
    }
    cache
}

fn offline(words: &[&str], cache: &TempDir) -> Command {
    let mut command = genset(words);
    command
        .env("HF_HUB_CACHE", cache.path())
        .env("HF_HUB_OFFLINE", "1");
    command
}

async fn ended(words: &[&str], cache: &TempDir) -> Ended {
    run_with(offline(words, cache), b"Hello").await
}

#[tokio::test]
async fn a_model_is_served_under_the_name_that_it_has_on_the_hub() {
    let cache = cache();
    let words = ["in=http", "out=sample", "--http-port=0", "org/tiny"];
    let server = Server::spawn(offline(&words, &cache)).await;
    let models = server.get("/v1/models").await.body;
    assert!(models.contains("\"id\":\"org/tiny\""), "{models}");
    server.stop().await;
    for words in [
        &["run", "in=stdin", "hf://org/tiny"][..],
        &[
            "in=stdin",
            "out=echo_core",
            "org/tiny@main",
            "--model-name=x",
        ],
    ] {
        let ended = ended(words, &cache).await;
        assert_eq!(ended.code, Some(0), "{ended:?}");
    }
}

#[tokio::test]
async fn what_is_not_there_is_told_with_the_next_step() {
    let cache = cache();
    let missing = ended(&["in=stdin", "out=sample", "org/other"], &cache).await;
    assert_eq!(missing.code, Some(2));
    assert!(
        missing.stderr.contains("HF_HUB_OFFLINE")
            && missing.stderr.contains("genset pull org/other"),
        "{missing:?}"
    );
    let missing = ended(&["in=stdin", "out=llamacpp", "org/tiny:Q2_K"], &cache).await;
    assert!(
        missing.code == Some(2) && missing.stderr.contains("org/tiny"),
        "{missing:?}"
    );
    let mistyped = ended(&["in=stdin", "folder/qwen.gguf"], &cache).await;
    mistyped.fails(2, "there is no file folder/qwen.gguf here, and ");
    // An unreachable hub may come back: a supervisor retries.
    for words in [
        &["pull", "org/other"][..],
        &["tune", "org/other"],
        &["run", "in=stdin", "out=sample", "org/other"],
    ] {
        let mut unreachable = genset(words);
        unreachable
            .env("HF_HUB_CACHE", cache.path())
            .env("HF_ENDPOINT", "http://127.0.0.1:9");
        let unreachable = run_with(unreachable, b"").await;
        unreachable.fails(1, "http://127.0.0.1:9 cannot be reached");
    }
    // Showing the configuration contacts no hub.
    let shown = ended(&["run", "org/other", "--print-config"], &cache).await;
    assert!(
        shown.code == Some(0) && shown.stdout.contains("model = \"org/other\""),
        "{shown:?}"
    );
}

#[tokio::test]
async fn a_path_that_may_not_be_looked_at_is_no_name() {
    let cache = cache();
    let folder = tempfile::tempdir().expect("a folder to write to");
    fs::create_dir(folder.path().join("org")).expect("a folder to write to");
    // Unlike a folder without permission, such a link also stops the superuser.
    std::os::unix::fs::symlink("tiny", folder.path().join("org/tiny"))
        .expect("a folder to write to");
    let mut command = offline(&["in=stdin", "out=sample", "org/tiny"], &cache);
    command.current_dir(folder.path());
    let refused = run_with(command, b"").await;
    refused.fails(2, "MODEL: cannot read org/tiny");
}

/// Each of them may be a name on the hub: a cached model is used, and a missing one is reported with its setting.
#[tokio::test]
async fn draft_models_benches_and_tokenizers_are_named_as_models_are() {
    let cache = cache();
    let drafted = ["in=stdin", "org/tiny", "--draft-model=org/tiny"];
    let drafted = ended(&drafted, &cache).await;
    assert_eq!(drafted.code, Some(0), "{drafted:?}");
    let short = [
        "--sequences=1",
        "--context-tokens=8",
        "--new-tokens=8",
        "--prefill-tokens=8",
        "--prefix-tokens=32",
        "--repeats=1",
        "--draft-model=org/tiny",
    ];
    let measured = [&["bench", "engine", "org/tiny"][..], &short].concat();
    let measured = ended(&measured, &cache).await;
    assert_eq!(measured.code, Some(0), "{measured:?}");
    let endpoint = "--endpoint=dyn://a.b.c";
    let cases: [(&[&str], &str); 4] = [
        (
            &["in=stdin", "org/tiny", "--draft-model=org/other"],
            "--draft-model: ",
        ),
        (&["bench", "engine", "org/other"], "MODEL: "),
        (
            &["bench", "engine", "org/tiny", "--draft-model=org/other"],
            "--draft-model: ",
        ),
        (
            &["conform", "run", endpoint, "--tokenizer=org/other"],
            "--tokenizer: ",
        ),
    ];
    for (words, setting) in cases {
        let missing = ended(words, &cache).await;
        let expected = format!("error: {setting}org/other is not in the cache");
        missing.fails(2, &expected);
    }
}

/// `org/other` is not in the cache, so it would be fetched from the hub.
#[tokio::test]
async fn flags_that_do_not_go_together_are_refused_before_a_model_is_fetched() {
    let cache = cache();
    let cases: [(&[&str], &str); 4] = [
        (&["out=vllm", "--speculate=ngram"], "--speculate: "),
        (&["out=scripted"], "--script: "),
        (
            &["out=sample", "--tensor-parallel-size=2"],
            "has no use for it",
        ),
        (&["out=echo_full"], "name it with --model-name"),
    ];
    for (flags, expected) in cases {
        let words = [&["run", "in=http", "org/other"][..], flags].concat();
        let shown = [&words[..], &["--print-config"]].concat();
        for words in [words, shown] {
            let ended = ended(&words, &cache).await;
            ended.fails(2, expected);
        }
    }
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = format!("--http-port={}", taken.local_addr().unwrap().port());
    let words = [
        "run",
        "in=http",
        "org/other",
        "--http-host=127.0.0.1",
        &port,
    ];
    ended(&words, &cache).await.fails(2, "--http-port: ");
    let file = cache.path().join("genset.toml");
    let settings = "out = \"vllm\"\nmodel = \"org/other\"\nspeculate = \"ngram\"\n";
    fs::write(&file, settings).unwrap();
    let checked = ended(&["config", "check", file.to_str().unwrap()], &cache).await;
    checked.fails(2, "--speculate: ");
}

#[tokio::test]
async fn models_are_listed_and_deleted() {
    let cache = cache();
    let listed = ended(&["list"], &cache).await;
    assert!(
        listed.stdout.starts_with("MODEL ") && listed.stdout.contains("org/tiny "),
        "{listed:?}"
    );
    let listed = ended(&["list", "--json"], &cache).await;
    let listed: serde_json::Value = serde_json::from_str(&listed.stdout).unwrap();
    assert_eq!(listed[0]["model"], "org/tiny");
    assert!(
        listed[0]["bytes"].as_u64().unwrap() > 1000 && listed[0]["is_partial"] == false,
        "{listed}"
    );
    let pulled = ended(&["pull", "org/tiny"], &cache).await;
    let path = Path::new(pulled.stdout.trim_end());
    assert!(
        path.ends_with(COMMIT) && path.join("config.json").exists(),
        "{pulled:?}"
    );
    let part = ended(&["rm", "org/tiny", "org/tiny:Q8_0"], &cache).await;
    assert_eq!((part.code, part.stdout.as_str()), (Some(2), ""), "{part:?}");
    let removed = ended(&["rm", "org/none", "hf://org/tiny"], &cache).await;
    assert_eq!(removed.code, Some(1), "one was not there: {removed:?}");
    assert!(
        removed.stdout.starts_with("deleted org/tiny, "),
        "{removed:?}"
    );
    assert!(
        removed.stderr.contains("the cache has org/tiny"),
        "{removed:?}"
    );
    let listed = ended(&["list"], &cache).await;
    assert!(listed.stdout.contains("genset pull ORG/NAME"), "{listed:?}");
}
