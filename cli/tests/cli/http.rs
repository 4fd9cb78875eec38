//! `in=http`: the command in the banner works, and the engines answer.

use serde_json::{Value, json};

use rustix::process::Signal;

use crate::fleet::Fleet;
use crate::support::{Server, base_model, done_events, finish_reason, run, text_of, tiny_chat};

/// The banner's `curl` command, as the address, path and body that it would send.
async fn command_shown(server: &mut Server) -> (String, String) {
    server.line_with("Try:").await;
    let url = server.line_with("curl -N http://").await;
    let body = server.line_with("-d '").await;
    let url = url
        .trim()
        .trim_start_matches("curl -N http://")
        .trim_end_matches(" \\");
    let (address, path) = url.split_once('/').expect("a path");
    assert_eq!(address, server.address.to_string());
    let body = body
        .trim()
        .trim_start_matches("-d '")
        .trim_end_matches('\'');
    (format!("/{path}"), body.to_owned())
}

#[tokio::test]
async fn the_command_that_the_banner_shows_gets_a_streamed_answer() {
    for (engine, reason) in [
        ("out=echo_core", "stop"),
        ("out=echo_full", "stop"),
        ("out=sample", "length"),
    ] {
        let mut server = Server::start(&[engine, "--token-echo-delay-ms", "0"]).await;
        let (path, body) = command_shown(&mut server).await;
        let response = server.post(&path, &body).await.response().await;
        assert_eq!(response.status, 200, "{}", response.body);
        let events = done_events(&response.body);
        assert_eq!(finish_reason(&events), Some(reason), "{engine}");
        let text = text_of(&events);
        let is_echo = engine != "out=sample";
        assert_eq!(text.contains("the capital of France"), is_echo, "{text}");
        server.stop().await;
    }
}

#[tokio::test]
async fn the_command_that_the_banner_shows_suits_a_base_model_and_a_server_with_keys() {
    let folder = tempfile::tempdir().unwrap();
    let base = base_model(folder.path());
    let words = [
        "out=echo_core",
        base.to_str().unwrap(),
        "--token-echo-delay-ms=0",
    ];
    let mut server = Server::start(&words).await;
    let (path, body) = command_shown(&mut server).await;
    assert_eq!(path, "/v1/completions");
    let response = server.post(&path, &body).await.response().await;
    assert_eq!(response.status, 200, "{}", response.body);
    server.stop().await;

    let made = run(&["key", "app"]).await.stdout;
    let (_, lines) = made.split_once("--api-keys:\n\n").unwrap();
    let keys = folder.path().join("keys.toml");
    std::fs::write(&keys, lines).unwrap();
    let words = ["out=sample", "--api-keys", keys.to_str().unwrap()];
    let mut server = Server::start(&words).await;
    server
        .line_with("    -H 'Authorization: Bearer KEY' \\")
        .await;
    server.stop().await;
}

#[tokio::test]
async fn the_worker_that_the_banner_shows_meets_the_frontend() {
    let fleet = Fleet::new();
    let words = ["run", "in=http", "out=dyn"];
    let mut command = fleet.command(&words, &[]);
    command.args(["--http-port=0", "--wire-port=0"]);
    let mut server = Server::spawn(command).await;
    let shown = server.line_with("genset run in=dyn").await;
    let expected = "  genset run in=dyn out=sample --discovery-path=/";
    assert!(shown.starts_with(expected), "{shown}");
    assert!(shown.ends_with("/discovery"), "{shown}");
    server.stop().await;
}

#[tokio::test]
async fn the_readme_command_names_the_built_in_model() {
    let mut command = crate::support::genset(&["run", "in=http", "--http-port", "0"]);
    command.env("GENSET_LOG", "info");
    let server = Server::spawn(command).await;
    assert!(server.log().contains("model ready"));
    let models: Value = serde_json::from_str(&server.get("/v1/models").await.body).unwrap();
    assert_eq!(models["data"][0]["id"], "tiny-chat");
    assert_eq!(server.get("/ready").await.status, 200);
    server.stop().await;
}

#[tokio::test]
async fn a_model_folder_is_served_under_the_name_it_is_given() {
    let folder = tiny_chat();
    let mut server = Server::start(&[
        "out=sample",
        folder.to_str().unwrap(),
        "--model-name",
        "mine",
        "--context-length",
        "512",
    ])
    .await;
    let (path, body) = command_shown(&mut server).await;
    let body: Value = serde_json::from_str(&body).unwrap();
    assert_eq!(body["model"], "mine");
    let response = server.ask(&path, &body).await;
    assert_eq!(finish_reason(&done_events(&response.body)), Some("length"));
    let models: Value = serde_json::from_str(&server.get("/v1/models").await.body).unwrap();
    assert_eq!(models["data"][0]["max_model_len"], 512);
    server.stop().await;
}

#[tokio::test]
async fn the_status_port_answers_beside_the_api() {
    let server = Server::start(&["--status-port", "0"]).await;
    let log = server.log();
    let address = log.split("status on http://").nth(1).expect("a log line");
    let address = address.lines().next().unwrap().parse().unwrap();
    let mut exchange = crate::support::Exchange::begin(address, "GET", "/metrics", "").await;
    let metrics = exchange.rest().await;
    assert!(metrics.contains("genset_worker_") && metrics.contains("genset_http_"));
    server.stop().await;
}

#[tokio::test]
async fn a_bad_request_is_refused_and_the_server_goes_on() {
    let server = Server::start(&[]).await;
    let refused = server.post("/v1/chat/completions", "{").await;
    assert_eq!(refused.status, 400);
    let unknown = json!({"model": "nobody", "messages": [{"role": "user", "content": "x"}]});
    let refused = server
        .post("/v1/chat/completions", &unknown.to_string())
        .await;
    assert_eq!(refused.status, 404);
    assert_eq!(server.get("/health").await.status, 200);
    server.stop().await;
}

/// Whatever a client sends, a log event is one line of bounded length, even at `-vv`.
#[tokio::test]
async fn clients_write_no_lines_of_their_own_into_the_log() {
    let mut server = Server::start(&["out=echo_core", "-vv", "--max-header-bytes", "65536"]).await;
    let forged = "x\n2026-01-01T00:00:00Z  INFO genset::access: forged";
    let long = "y".repeat(8 << 20);
    for name in [forged, &long] {
        let chat = json!({"model": name, "messages": [{"role": "user", "content": "Hi"}]});
        let input = json!({"model": name, "input": "Hi"});
        let field = json!({"model": "tiny-chat", "input": "Hi", name: 1});
        for (path, body) in [
            ("/v1/chat/completions", &chat),
            ("/v1/messages", &chat),
            ("/v1/responses", &input),
            ("/v1/responses", &field),
            ("/v1/embeddings", &input),
            ("/tokenize", &input),
        ] {
            let response = server.ask(path, body).await;
            assert!((400..500).contains(&response.status), "{}", response.body);
        }
    }
    let long = long.get(..60_000).unwrap_or_default();
    assert_eq!(server.get(&format!("/{long}")).await.status, 404);
    assert_eq!(server.get(&format!("/v1/models/{long}")).await.status, 404);
    server.signal(Signal::TERM);
    assert_eq!(server.exit_code().await, Some(0));
    let log = server.log();
    assert!(log.contains("forged"), "at debug level a refusal is logged");
    for line in log.lines() {
        assert!(!line.starts_with("2026-01-01"), "{line}");
        assert!(line.len() < 20_000, "{} bytes", line.len());
    }
    assert!(log.len() < 1 << 20, "{} bytes", log.len());
}

/// The access log has one line with the model for each request, whatever its outcome, and none for requests without a model.
#[tokio::test]
async fn every_request_has_one_line_in_the_access_log() {
    let mut command =
        crate::support::genset(&["run", "in=http", "out=echo_core", "--http-port", "0"]);
    command.args(["--token-echo-delay-ms", "0"]);
    command.env("GENSET_LOG", "info");
    let mut server = Server::spawn(command).await;
    let body = json!({"model": "tiny-chat", "messages": [{"role": "user", "content": "Hi"}], "stream": true});
    let counted = json!({"model": "tiny-chat", "messages": body["messages"]});
    let requests = [
        ("/v1/chat/completions", body.to_string(), "status=200"),
        ("/v1/chat/completions", "{}".to_owned(), "status=400"),
        (
            "/v1/responses",
            json!({"model": "nobody", "input": "Hi"}).to_string(),
            "status=404",
        ),
        (
            "/tokenize",
            json!({"model": "tiny-chat", "prompt": "Hi"}).to_string(),
            "status=200",
        ),
        (
            "/detokenize",
            json!({"model": "nobody", "tokens": [5]}).to_string(),
            "status=404",
        ),
        (
            "/v1/messages/count_tokens",
            counted.to_string(),
            "status=200",
        ),
    ];
    let mut ids = Vec::new();
    for (path, body, _) in &requests {
        let response = server.post(path, body).await.response().await;
        let id = response.head.split("x-request-id: ").nth(1);
        let id = id.and_then(|rest| rest.lines().next()).expect("an id");
        ids.push(id.to_owned());
    }
    assert_eq!(server.get("/health").await.status, 200);
    server.signal(Signal::TERM);
    assert_eq!(server.exit_code().await, Some(0));
    let log = server.log();
    let lines: Vec<&str> = log
        .lines()
        .filter(|line| line.contains("genset::access"))
        .collect();
    assert_eq!(lines.len(), requests.len(), "{log}");
    for ((id, (_, body, status)), line) in ids.iter().zip(&requests).zip(lines) {
        assert!(
            line.contains(id.as_str()) && line.contains(status),
            "{line}"
        );
        for model in ["tiny-chat", "nobody"] {
            assert_eq!(line.contains(model), body.contains(model), "{line}");
        }
    }
}
