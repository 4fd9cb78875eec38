//! `--config` and `--print-config`: the sources of a setting, and their precedence.

use serde_json::Value;

use crate::support::{Ended, file, genset, repository, run_with};

async fn with_environment(words: &[&str], environment: &[(&str, &str)]) -> Ended {
    let mut command = genset(&["run"]);
    command.args(words).envs(environment.iter().copied());
    run_with(command, b"").await
}

async fn settings(words: &[&str], environment: &[(&str, &str)]) -> Value {
    let words = [words, &["--print-config=json"]].concat();
    let ended = with_environment(&words, environment).await;
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    serde_json::from_str(&ended.stdout).unwrap()
}

#[track_caller]
fn assert_setting(settings: &Value, name: &str, value: impl Into<Value>, source: &str) {
    let expected = serde_json::json!({"value": value.into(), "source": source});
    assert_eq!(settings[name], expected, "{name}");
}

#[tokio::test]
async fn flags_win_over_environment_over_file_over_defaults() {
    let file = file("http-port = 1\nhttp-host = \"127.0.0.2\"\nmax-choices = 3\ngrace = 2.5\n");
    let path = file.path().to_str().unwrap();
    let environment = [("GENSET_HTTP_PORT", "2"), ("GENSET_HTTP_HOST", "127.0.0.3")];
    let shown = settings(&["--config", path, "--http-port", "3"], &environment).await;
    assert_setting(&shown, "http-port", 3, "flag");
    assert_setting(&shown, "http-host", "127.0.0.3", "environment");
    assert_setting(&shown, "max-choices", 3, "file");
    assert_setting(&shown, "grace", 2.5, "file");
    assert_setting(&shown, "max-connections", 16384, "default");
    assert_setting(&shown, "model-name", Value::Null, "unset");

    let shown = settings(&["--config", path, "--max-choices", "3"], &[]).await;
    assert_setting(&shown, "http-port", 1, "file");
    assert_setting(&shown, "http-host", "127.0.0.2", "file");
    assert_setting(&shown, "max-choices", 3, "flag");
    let from_environment = settings(&[], &[("GENSET_CONFIG", path)]).await;
    assert_setting(&from_environment, "http-port", 1, "file");
}

#[tokio::test]
async fn containers_say_by_their_environment_where_their_status_port_is() {
    let environment = [
        ("GENSET_STATUS_HOST", "0.0.0.0"),
        ("GENSET_STATUS_PORT", "9090"),
    ];
    let shown = settings(&[], &environment).await;
    assert_setting(&shown, "status-host", "0.0.0.0", "environment");
    assert_setting(&shown, "status-port", 9090, "environment");
    let shown = settings(&["--status-port=0"], &[]).await;
    assert_setting(&shown, "status-host", "127.0.0.1", "default");
    assert_setting(&shown, "status-port", 0, "flag");
}

#[tokio::test]
async fn a_list_takes_the_place_of_the_one_in_the_file() {
    let file = file("allowed-hosts = \"*\"\nendpoint-types = \"chat,completions\"\n");
    let path = file.path().to_str().unwrap();
    let words = ["in=http", "--config", path];
    let given = ["--allowed-hosts=a.example", "--allowed-hosts=b.example"];
    let shown = settings(&[&words[..], &given[..]].concat(), &[]).await;
    assert_setting(&shown, "allowed-hosts", "a.example,b.example", "flag");
    assert_setting(&shown, "endpoint-types", "chat,completions", "file");
    let environment = [("GENSET_ALLOWED_HOSTS", "c.example")];
    let shown = settings(&words, &environment).await;
    assert_setting(&shown, "allowed-hosts", "c.example", "environment");
}

#[tokio::test]
async fn an_empty_variable_of_a_list_counts_as_unset() {
    let lists = [
        ("GENSET_ALIASES", "aliases"),
        ("GENSET_ENDPOINT_TYPES", "endpoint-types"),
        ("GENSET_ADAPTER", "adapter"),
        ("GENSET_ALLOWED_HOSTS", "allowed-hosts"),
        ("ETCD_ENDPOINTS", "etcd-endpoints"),
    ];
    let environment = lists.map(|(variable, _)| (variable, ""));
    let shown = settings(&["out=sample"], &environment).await;
    for (_, name) in lists {
        assert_setting(&shown, name, Value::Null, "unset");
    }
    let file = file("aliases = \"a,b\"\n");
    let words = ["out=sample", "--config", file.path().to_str().unwrap()];
    let shown = settings(&words, &environment).await;
    assert_setting(&shown, "aliases", "a,b", "file");
}

#[tokio::test]
async fn what_a_setting_requires_may_come_from_another_layer() {
    let file = file("wire-tls-ca = \"ca.pem\"\n");
    let path = file.path().to_str().unwrap();
    let words = ["in=dyn", "out=sample", "--wire-tls-cert=n.pem"];
    let environment = [("GENSET_WIRE_TLS_KEY", "n.key")];
    let shown = settings(&[&words[..], &["--config", path]].concat(), &environment).await;
    assert_setting(&shown, "wire-tls-ca", "ca.pem", "file");
    assert_setting(&shown, "wire-tls-cert", "n.pem", "flag");
    assert_setting(&shown, "wire-tls-key", "n.key", "environment");
    let without = with_environment(&words, &environment).await;
    without.fails(2, "--wire-tls-ca");
}

#[tokio::test]
async fn a_user_and_a_password_at_etcd_require_each_other() {
    for (alone, missing) in [
        ("ETCD_USERNAME", "--etcd-password-file"),
        ("ETCD_PASSWORD_FILE", "--etcd-username"),
    ] {
        let ended = with_environment(&["out=sample"], &[(alone, "x")]).await;
        ended.fails(2, missing);
    }
}

#[tokio::test]
async fn words_are_settings_and_win_over_the_file() {
    let models = crate::support::tiny_chat();
    let model = models.to_str().unwrap();
    let file = file(&format!(
        "in = \"http\"\nout = \"sample\"\nmodel = {model:?}\n"
    ));
    let path = file.path().to_str().unwrap();
    let shown = settings(&[], &[]).await;
    assert_setting(&shown, "in", "text", "default");
    assert_setting(&shown, "out", "candle", "default");
    assert_setting(&shown, "model", Value::Null, "unset");

    let shown = settings(&["--config", path], &[]).await;
    assert_setting(&shown, "in", "http", "file");
    assert_setting(&shown, "out", "sample", "file");
    assert_setting(&shown, "model", model, "file");

    let words = ["--config", path, "in=stdin", ".", "out=echo_core"];
    let shown = settings(&words, &[("GENSET_MODEL_PATH", model)]).await;
    assert_setting(&shown, "in", "stdin", "flag");
    assert_setting(&shown, "out", "echo_core", "flag");
    assert_setting(&shown, "model", ".", "flag");

    let shown = settings(&["--model-path", "."], &[("GENSET_MODEL_PATH", model)]).await;
    assert_setting(&shown, "model", ".", "flag");
    let shown = settings(&[], &[("GENSET_MODEL_PATH", model)]).await;
    assert_setting(&shown, "model", model, "environment");
}

#[tokio::test]
async fn a_file_alone_says_what_runs() {
    let file = file("in = \"stdin\"\nout = \"echo_full\"\ntoken-echo-delay-ms = 0\n");
    let command = genset(&["run", "--config", file.path().to_str().unwrap()]);
    let ended = run_with(command, b"hello").await;
    assert_eq!(
        (ended.code, ended.stdout.as_str()),
        (Some(0), "hello\n"),
        "{}",
        ended.stderr
    );
}

#[tokio::test]
async fn what_is_printed_can_be_read_again() {
    let words = [
        "in=http",
        "out=sample",
        "--model-name=007",
        "--endpoint-types=chat,completions",
        "--namespace=nan",
        "--grace=1e1",
        "--http-port=0",
        "--print-config",
    ];
    let first = with_environment(&words, &[]).await;
    assert_eq!(first.code, Some(0), "{}", first.stderr);
    let file = file(&first.stdout);
    let words = [
        "--config",
        file.path().to_str().unwrap(),
        "--print-config=toml",
    ];
    let second = with_environment(&words, &[]).await;
    assert_eq!(second.code, Some(0), "{}", second.stderr);
    let values = |text: &str| text.parse::<toml::Table>().unwrap();
    assert_eq!(values(&second.stdout), values(&first.stdout));
    assert_eq!(values(&first.stdout)["model-name"].as_str(), Some("007"));
    assert!(
        second
            .stdout
            .lines()
            .all(|line| line.ends_with("# file") || line.ends_with("# unset"))
    );
}

#[tokio::test]
async fn a_variable_that_the_engine_does_not_read_is_printed_as_a_comment() {
    let environment = [("GENSET_DEVICE", "cuda"), ("GENSET_GRACE", "3")];
    let printed = async |engine: &str| {
        let ended = with_environment(&[engine, "--print-config"], &environment).await;
        assert_eq!(ended.code, Some(0), "{}", ended.stderr);
        ended.stdout
    };
    let values = |text: &str| text.parse::<toml::Table>().unwrap();
    let by_candle = values(&printed("out=candle").await);
    assert_eq!(by_candle["device"].as_str(), Some("cuda"));
    let by_sample = printed("out=sample").await;
    assert!(by_sample.contains("\n# device = \"cuda\" "), "{by_sample}");
    assert_eq!(values(&by_sample)["grace"].as_integer(), Some(3));
    let file = file(&by_sample);
    let words = ["--config", file.path().to_str().unwrap(), "--print-config"];
    let again = with_environment(&words, &[]).await;
    assert_eq!(again.code, Some(0), "{}", again.stderr);
    let words = ["in=dyn", "out=sample", "--print-config"];
    let by_worker = with_environment(&words, &[("GENSET_HTTP_PORT", "9000")]).await;
    let expected = "\n# http-port = 9000 ";
    assert!(by_worker.stdout.contains(expected), "{by_worker:?}");
}

#[tokio::test]
async fn a_bad_file_is_refused_by_name() {
    for (content, expected) in [
        ("http-prot = 1\n", "\"http-prot\" is no setting"),
        ("config = \"x\"\n", "\"config\" is no setting"),
        ("[http]\nport = 1\n", "\"http\" is no setting"),
        (
            "http-port = [1]\n",
            "http-port must be a string or a number",
        ),
        ("http-port = 70000\n", "--http-port"),
        ("in = \"nowhere\"\n", "in:"),
        ("model = \"/no/such/folder\"\n", "/no/such/folder"),
        ("http-port = \n", "line 1"),
    ] {
        let file = file(content);
        let path = file.path().to_str().unwrap();
        let ended = with_environment(&["--config", path, "--print-config"], &[]).await;
        ended.fails(2, expected);
    }
    // A variable may name the file: then no flag shows where the value is.
    let file = file("http-port = 70000\n");
    let path = file.path().to_str().unwrap();
    let ended = with_environment(&["--print-config"], &[("GENSET_CONFIG", path)]).await;
    let expected = format!("error: --config: {path}: invalid value '70000' for '--http-port ");
    ended.fails(2, &expected);
    assert_eq!(ended.stderr.lines().count(), 1, "{ended:?}");
    let ended = with_environment(&["--config", "/no/such/file"], &[]).await;
    ended.fails(2, "--config: /no/such/file");
}

#[tokio::test]
async fn a_value_that_the_environment_shadows_is_not_checked() {
    let file = file("http-port = \"not a port\"\n");
    let path = file.path().to_str().unwrap();
    let shown = settings(&["--config", path], &[("GENSET_HTTP_PORT", "9")]).await;
    assert_setting(&shown, "http-port", 9, "environment");
}

#[tokio::test]
async fn sizes_have_units_in_every_layer() {
    let file = file("max-body-bytes = \"32MiB\"\nmax-stored-bytes = 0\n");
    let path = file.path().to_str().unwrap();
    let environment = [("GENSET_MEMORY_BUDGET", "4GiB")];
    let words = ["in=http", "--config", path, "--max-file-bytes=1GB"];
    let shown = settings(&words, &environment).await;
    assert_setting(&shown, "max-body-bytes", "32MiB", "file");
    assert_setting(&shown, "max-stored-bytes", 0, "file");
    assert_setting(&shown, "memory-budget", "4GiB", "environment");
    assert_setting(&shown, "max-file-bytes", "1GB", "flag");
    assert_setting(&shown, "wire-memory-budget", "1GiB", "default");
}

/// The fields of a server's config that are not settings themselves, and the settings that they are made of.
const MADE_OF: [(&str, &[&str]); 5] = [
    ("address", &["http-host", "http-port"]),
    ("tls", &["http-tls-cert", "http-tls-key"]),
    ("workers", &["out"]),
    ("parsers", &["tool-parser", "reasoning-parser"]),
    ("api_keys", &["api-keys"]),
];

/// Every limit of the server has a visible setting.
#[tokio::test]
async fn everything_that_the_server_is_configured_with_is_shown() {
    let source = repository("frontend/src/config.rs");
    let source = std::fs::read_to_string(source).unwrap();
    let fields = source.split("pub struct FrontendConfig {").nth(1).unwrap();
    let fields = fields.split("\n}").next().unwrap();
    let skipped = fields.split("arg(skip").skip(1).filter_map(|rest| {
        let (_, field) = rest.split_once("pub ")?;
        Some(field.split_once(':')?.0)
    });
    assert_eq!(skipped.collect::<Vec<_>>(), MADE_OF.map(|(field, _)| field));
    let shown = settings(&["in=http"], &[]).await;
    for name in MADE_OF.iter().flat_map(|(_, names)| *names) {
        assert!(!shown[name].is_null(), "no setting {name}");
    }
}

#[tokio::test]
async fn limits_of_a_model_are_settings() {
    let environment = [("GENSET_MAX_MODEL_RUNNING_REQUESTS", "5")];
    let words = ["--max-model-waiting-requests=0", "--model-timeout=1.5"];
    let shown = settings(&words, &environment).await;
    assert_setting(&shown, "max-model-running-requests", 5, "environment");
    assert_setting(&shown, "max-model-waiting-requests", 0, "flag");
    assert_setting(&shown, "model-timeout", 1.5, "flag");
    assert_setting(&shown, "max-stop-bytes", "1KiB", "default");
    let none = with_environment(&["--max-model-running-requests=0"], &[]).await;
    none.fails(2, "--max-model-running-requests");
}
