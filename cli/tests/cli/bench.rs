//! `genset bench`: measures real servers and the engine, as a user does.

use std::path::Path;
use std::process::Stdio;

use rustix::process::Signal;
use serde_json::Value;
use tokio::process::Child;

use crate::support::{
    Ended, Server, ended_after, genset, run, send_signal, soon, tiny_chat, until,
};

/// Starts a mocker that takes 20 ms per prompt and 2 ms per token; returns its server and URL.
async fn mocker(folder: &Path) -> (Server, String) {
    let settings = folder.join("mocker.json");
    let text = r#"{"prefill_ms": {"constant": 20}, "decode_ms": 2}"#;
    std::fs::write(&settings, text).unwrap();
    let settings = settings.display().to_string();
    let server = Server::start(&["out=mocker", "--extra-engine-args", &settings]).await;
    let url = format!("http://{}", server.address);
    (server, url)
}

async fn bench(words: &[&str]) -> Ended {
    run(&[&["bench", "serve"], words].concat()).await
}

fn row(ended: &Ended) -> Value {
    let report: Value =
        serde_json::from_str(&ended.stdout).unwrap_or_else(|error| panic!("{error}: {ended:?}"));
    report["rows"][0].clone()
}

/// A running measurement, once the server has generated tokens for it.
async fn under_way(server: &Server, url: &str, words: &[&str]) -> Child {
    let mut command = genset(&[&["bench", "serve", url, "--json"], words].concat());
    command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let bench = command.spawn().expect("the binary starts");
    until(async || {
        let metrics = server.get("/metrics").await.body;
        let given = metrics.lines().find_map(|line| {
            let count = line.strip_prefix("genset_http_completion_tokens_total ")?;
            count.parse::<f64>().ok()
        });
        // The requests that probe the server generate only two tokens.
        given.is_some_and(|tokens| tokens > 300.0)
    })
    .await;
    bench
}

async fn end_of(bench: Child) -> Ended {
    let output = soon(bench.wait_with_output()).await.expect("it ends");
    Ended::of(&output)
}

#[tokio::test]
async fn requests_are_counted_and_timed_at_their_client() {
    let folder = tempfile::tempdir().unwrap();
    let (server, url) = mocker(folder.path()).await;
    let closed = [
        url.as_str(),
        "--requests=12",
        "--concurrency=4",
        "--input-tokens=64",
        "--output-tokens=16",
    ];
    let ids = bench(&[&closed[..], &["--api=completions", "--json"]].concat()).await;
    assert_eq!(ids.code, Some(0), "{ids:?}");
    let row = row(&ids);
    assert_eq!(row["requests"], 12);
    assert_eq!(row["prompt_tokens"], 64.0, "token ids are exact");
    assert_eq!(row["completion_tokens"], 16.0);
    let ttft = row["ttft_p50_ms"].as_f64().unwrap();
    assert!(ttft > 19.7, "{ttft}: the mocker takes 20 ms for a prompt");
    let latency = row["latency_p50_ms"].as_f64().unwrap();
    assert!(latency > 49.0, "{latency}: and 2 ms for a token");
    assert!(row["tokens_per_s"].as_f64().unwrap() > 0.0);

    let chat = bench(&[&closed[..], &["--slo-ttft-ms=1"]].concat()).await;
    assert_eq!(chat.code, Some(0), "{chat:?}");
    for expected in [
        "load single, 4 at once, /v1/chat/completions",
        "TTFT p50",
        "good/s",
        "TTFT, ms",
        "█",
        &url,
    ] {
        assert!(
            chat.stdout.contains(expected),
            "{expected}: {}",
            chat.stdout
        );
    }
    let last = chat
        .stdout
        .lines()
        .find(|line| line.starts_with(&url))
        .unwrap();
    assert!(
        last.ends_with(" 0.00"),
        "no first token comes within a millisecond: {last}"
    );
    server.stop().await;
}

#[tokio::test]
async fn open_arrivals_and_traces_go_to_several_servers() {
    let folder = tempfile::tempdir().unwrap();
    let (one, url) = mocker(folder.path()).await;
    let other = Server::start(&["out=sample"]).await;
    let other_url = format!("{}/v1", other.address);
    let open = [
        "--rate=50",
        "--requests=20",
        "--input-tokens=20-40",
        "--output-tokens=4",
        "--json",
    ];
    let plot = folder.path().join("ttft.svg").display().to_string();
    let both = bench(&[&[url.as_str(), &other_url, "--plot", &plot][..], &open].concat()).await;
    assert_eq!(both.code, Some(0), "{both:?}");
    let report: Value = serde_json::from_str(&both.stdout).unwrap();
    let svg = std::fs::read_to_string(&plot).unwrap();
    assert_eq!(svg.matches("<polyline").count(), 2, "{svg}");
    assert_eq!(report["arrivals"], "50 a second");
    assert_eq!(report["rows"].as_array().unwrap().len(), 2);
    assert_eq!(
        report["rows"][1]["server"],
        format!("http://{}", other.address)
    );
    for row in report["rows"].as_array().unwrap() {
        assert_eq!(
            (&row["requests"], &row["completion_tokens"]),
            (&20.into(), &4.0.into())
        );
        assert!(row["lag_p99_ms"].is_number());
        assert!(
            row["duration_s"].as_f64().unwrap() > 0.1,
            "they come one after the other"
        );
    }

    let trace = folder.path().join("trace.jsonl");
    let lines: String = [(0, 600, 5), (30, 600, 7), (60, 100, 9)]
        .iter()
        .map(|(at, input, output)| {
            format!("{{\"timestamp\": {at}, \"input_length\": {input}, \"output_length\": {output}, \"hash_ids\": [1, {at}]}}\n")
        })
        .collect();
    std::fs::write(&trace, lines).unwrap();
    let trace = trace.display().to_string();
    let recorded = bench(&[&url, "--api=completions", "--json", "--trace", &trace]).await;
    assert_eq!(recorded.code, Some(0), "{recorded:?}");
    let row = row(&recorded);
    assert_eq!(
        (&row["requests"], &row["completion_tokens"]),
        (&3.into(), &7.0.into())
    );
    assert_eq!(row["prompt_tokens"], 433.333);
    one.stop().await;
    other.stop().await;
}

#[tokio::test]
async fn a_turn_that_would_come_too_late_is_neither_waited_for_nor_measured() {
    let server = Server::start(&["out=echo_full", "--token-echo-delay-ms=0"]).await;
    let url = format!("http://{}", server.address);
    // A user in a conversation thinks for ten seconds on average.
    let load = ["--load=chat", "--rate=20", "--duration=1", "--warm-up=0"];
    let ended = bench(&[&[url.as_str(), "--json"][..], &load].concat()).await;
    assert_eq!(ended.code, Some(0), "{ended:?}");
    let row = row(&ended);
    assert!(row["requests"].as_u64().unwrap() > 5, "{row}");
    assert!(row["duration_s"].as_f64().unwrap() < 8.0, "{row}");
    server.stop().await;
}

#[tokio::test]
async fn a_server_that_dies_midway_is_told_and_what_was_measured_is_shown() {
    let folder = tempfile::tempdir().unwrap();
    let (mut server, url) = mocker(folder.path()).await;
    let load = [
        "--warm-up=0",
        // Twenty seconds of answers: the server is killed long before the last of them.
        "--requests=400",
        "--concurrency=4",
        "--input-tokens=16",
        "--output-tokens=100",
    ];
    let bench = under_way(&server, &url, &load).await;
    server.signal(Signal::KILL);
    assert_eq!(server.exit_code().await, None);
    let ended = end_of(bench).await;
    assert_eq!(ended.code, Some(1), "{ended:?}");
    let row = row(&ended);
    assert_eq!(row["requests"], 400);
    assert!(row["lost"]["connect"].as_u64().unwrap() > 0, "{row}");
    assert!(row["lost"]["broken"].as_u64().unwrap() > 0, "{row}");
}

#[tokio::test]
async fn ctrl_c_shows_what_was_measured_so_far() {
    let folder = tempfile::tempdir().unwrap();
    let (server, url) = mocker(folder.path()).await;
    let load = [
        "--warm-up=0",
        "--duration=3000",
        "--concurrency=4",
        "--input-tokens=16",
        "--output-tokens=20",
    ];
    let bench = under_way(&server, &url, &load).await;
    send_signal(&bench, Signal::INT);
    let ended = end_of(bench).await;
    assert_eq!(ended.code, Some(3), "{ended:?}");
    let row = row(&ended);
    assert_eq!(row["is_cut"], true);
    assert!(row["requests"].as_u64().unwrap() > 0, "{row}");
    server.stop().await;
}

#[tokio::test]
async fn what_warms_up_is_in_no_figure() {
    let folder = tempfile::tempdir().unwrap();
    let (server, url) = mocker(folder.path()).await;
    let bench = under_way(&server, &url, &["--warm-up=1000000"]).await;
    send_signal(&bench, Signal::INT);
    let ended = end_of(bench).await;
    assert_eq!(ended.code, Some(3), "{ended:?}");
    let row = row(&ended);
    assert_eq!(row["is_cut"], true);
    assert_eq!(row["requests"], 0, "{row}");
    assert!(row["ttft_p50_ms"].is_null(), "{row}");
    server.stop().await;
}

#[tokio::test]
async fn what_cannot_be_measured_is_named_with_what_to_do() {
    let folder = tempfile::tempdir().unwrap();
    let made = run(&["key", "bench"]).await.stdout;
    let mut parts = made.split("\n\n").skip(1);
    let key = parts.next().unwrap();
    let keys = folder.path().join("keys.toml");
    std::fs::write(&keys, parts.nth(1).unwrap()).unwrap();
    let server = Server::start(&["out=sample", "--api-keys", keys.to_str().unwrap()]).await;
    let url = format!("http://{}", server.address);
    let few = ["--requests=2", "--output-tokens=2", "--input-tokens=8"];

    let allowed = bench(&[&[url.as_str(), "--api-key", key][..], &few].concat()).await;
    assert_eq!(allowed.code, Some(0), "{allowed:?}");
    let cases: [(&[&str], &str); 8] = [
        (&["127.0.0.1:1", "--plot=/no/such/folder/x.svg"], "--plot: "),
        (&[&url], "--api-key: "),
        (&[&url, "--api-key=wrong"], "OPENAI_API_KEY"),
        (&[&url, "--api-key=cut\n"], "--api-key: has a character"),
        (
            &[&url, "--api-key", key, "--model=nobody"],
            "but: tiny-chat",
        ),
        (&["127.0.0.1:1"], "nobody answers at http://127.0.0.1:1"),
        (&["ftp://127.0.0.1:1"], "no HTTP URL"),
        (&[&url, "--load=chat", "--input-tokens=7"], "--input-tokens"),
    ];
    for (words, expected) in cases {
        let ended = bench(words).await;
        ended.fails(2, expected);
    }
    server.stop().await;
}

/// The words of a short measurement of the smallest model's engine.
fn engine() -> Vec<String> {
    let model = tiny_chat().join("tiny-chat-q8_0.gguf");
    let model = model.display().to_string();
    let words = ["bench", "engine", &model, "--json", "--sequences=1"];
    let lengths = [
        "--context-tokens=8",
        "--new-tokens=32",
        "--prefill-tokens=16",
    ];
    let all = words.into_iter().chain(lengths);
    let all = all.chain(["--prefix-tokens=16", "--kv-cache-memory=16M"]);
    all.map(str::to_owned).collect()
}

#[tokio::test]
async fn an_engine_is_measured_and_compared_with_an_earlier_run() {
    let folder = tempfile::tempdir().unwrap();
    let earlier = folder.path().join("earlier.json");
    let against = format!("--against={}", earlier.display());
    let words = engine();
    let mut words: Vec<&str> = words.iter().map(String::as_str).collect();
    words.push("--repeats=1");

    let once = run(&words).await;
    assert_eq!(once.code, Some(0), "{once:?}");
    let measured: Value = serde_json::from_str(&once.stdout).unwrap();
    assert!(measured["setup"]["threads"].as_u64().unwrap() > 0);
    assert_eq!(measured["is_cut"], false);
    // A busy machine may deliver all tokens at once, so that no step was timed.
    if measured["decode"][0]["rounds_apart"] == 0 {
        let kinds = measured["steps"][0]["kinds"].as_array().unwrap();
        let names: Vec<&str> = kinds
            .iter()
            .filter_map(|kind| kind["kind"].as_str())
            .collect();
        assert!(names.contains(&"gate, up (Q8_0)"), "{names:?}");
        assert!(
            kinds
                .iter()
                .all(|kind| kind["weight_bytes"].as_u64() > Some(0))
        );
    }

    std::fs::write(&earlier, &once.stdout).unwrap();
    words.push(&against);
    let again = run(&words).await;
    assert_eq!(again.code, Some(0), "{again:?}");
    let again: Value = serde_json::from_str(&again.stdout).unwrap();
    let compared = &again["against"];
    assert_eq!(compared["earlier"]["setup"], measured["setup"]);
    assert_eq!(compared["differs"], serde_json::json!([]));
    let figures = compared["figures"].as_array().unwrap();
    assert!(
        figures
            .iter()
            .any(|figure| figure["figure"] == "prefill, 16 tokens, tokens/s")
    );

    std::fs::write(&earlier, "{}").unwrap();
    run(&words).await.fails(2, "--against: ");
}

#[tokio::test]
async fn ctrl_c_shows_the_rounds_of_an_engine_so_far() {
    let words = engine();
    let mut words: Vec<&str> = words.iter().map(String::as_str).collect();
    words.push("--repeats=200");
    let ended = ended_after(&words, "measuring: 10 %").await;
    assert_eq!(ended.code, Some(3), "{ended:?}");
    let measured: Value = serde_json::from_str(&ended.stdout).unwrap();
    assert_eq!(measured["is_cut"], true);
    assert!(measured["prefill_tokens_per_s"].as_f64().unwrap() > 0.0);
}
