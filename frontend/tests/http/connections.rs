//! Clients that stall, disappear, or use HTTP in unusual ways.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use genset_frontend::FrontendConfig;
use serde_json::json;

use crate::client::{get, post, request};
use crate::memory::later;
use crate::script::Script;
use crate::support::{CHAT, COMPLETIONS, Site, chat, completion, config, echo, encode, eventually};

/// Short enough to wait for, long enough for a busy machine to answer.
const SHORT: Duration = Duration::from_millis(500);

/// The first bytes of a POST that announces `length` bytes of body.
fn head(path: &str, length: impl std::fmt::Display) -> Vec<u8> {
    format!("POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {length}\r\n\r\n")
        .into_bytes()
}

#[tokio::test]
async fn a_body_over_the_limit_is_refused() {
    let config = FrontendConfig {
        max_body_bytes: 4096,
        ..config()
    };
    let site = Site::with(config, echo()).await;
    for size in [4097, 10_000, 1 << 20, 16 << 20] {
        let response = site.send(post(CHAT, vec![b' '; size])).await;
        let (status, _, _, message) = response.refusal();
        assert_eq!(status, 413, "{size}");
        assert!(message.contains("4096 bytes"), "{message}");
        site.is_well().await;
    }
    // Announced but not sent: the server does not wait for it.
    let response = site.send(head(CHAT, u64::from(u32::MAX))).await;
    assert_eq!(response.status, 413);
    // Chunked, so that no length is announced.
    let mut chunked =
        format!("POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n");
    for _ in 0..20 {
        chunked += &format!("400\r\n{}\r\n", " ".repeat(1024));
    }
    assert_eq!(site.send(chunked).await.status, 413);
    let mut just_fits = chat("Hello", json!({})).to_string();
    just_fits += &" ".repeat(4096 - just_fits.len());
    assert_eq!(site.send(post(CHAT, just_fits)).await.status, 200);
    site.is_well().await;
    site.close().await;
}

#[tokio::test]
async fn half_a_body_is_waited_for_and_then_given_up() {
    let config = FrontendConfig {
        body_timeout: SHORT,
        ..config()
    };
    let site = Site::with(config, echo()).await;
    for sent in ["", "{\"model\": "] {
        let mut client = site.connect().await;
        client.send(head(CHAT, 1000)).await;
        client.send(sent).await;
        let response = client.response().await;
        let (status, _, _, message) = response.refusal();
        assert_eq!(status, 408);
        assert!(message.contains("0.5 s"), "{message}");
        assert!(client.is_closed().await);
        site.is_well().await;
    }
    site.close().await;
}

#[tokio::test]
async fn a_head_that_never_ends_is_given_up() {
    let config = FrontendConfig {
        header_timeout: SHORT,
        ..config()
    };
    let site = Site::with(config, echo()).await;
    for sent in ["", "POST /v1/chat/completions HTTP/1.1\r\nhost: te"] {
        let mut client = site.connect().await;
        client.send(sent).await;
        assert!(client.is_closed().await);
    }
    // An idle keep-alive connection ends the same way.
    let mut client = site.connect().await;
    client.send(get("/live")).await;
    assert_eq!(client.response().await.status, 200);
    assert!(client.is_closed().await);
    site.is_well().await;
    site.close().await;
}

/// The engine is polled only for what the client takes.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_reads_nothing_holds_the_engine_back() {
    let config = FrontendConfig {
        write_timeout: Duration::from_secs(3600),
        ..config()
    };
    let taken = Arc::new(AtomicUsize::new(0));
    let token = *encode(" and").first().expect("a token");
    let counter = Arc::clone(&taken);
    let engine = Script::new(move |_, out| {
        let counter = Arc::clone(&counter);
        async move {
            loop {
                out.token(token).await?;
                counter.fetch_add(1, Ordering::Relaxed);
            }
        }
    });
    engine.widen();
    let site = Site::with(config, engine.clone()).await;
    let body = chat("Hello", json!({"stream": true}));
    let client = site.begin(CHAT, &body).await;
    eventually("tokens are taken", || taken.load(Ordering::Relaxed) > 0).await;
    // The socket buffers on both sides fill up; then nothing is taken for half a second.
    let (mut last, mut same) = (0, 0);
    eventually("no more is taken", || {
        let now = taken.load(Ordering::Relaxed);
        same = if now == last { same + 1 } else { 0 };
        last = now;
        same == 100
    })
    .await;
    assert_eq!(engine.active(), 1);
    drop(client);
    eventually("the engine is freed", || engine.active() == 0).await;
    site.idle().await;
    site.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_reads_nothing_is_disconnected() {
    let config = FrontendConfig {
        write_timeout: SHORT,
        ..config()
    };
    let engine = Script::endless(*encode(" and").first().expect("a token"));
    let site = Site::with(config, engine.clone()).await;
    let body = chat("Hello", json!({"stream": true}));
    let mut client = site.begin(CHAT, &body).await;
    eventually("the engine works", || engine.active() == 1).await;
    eventually("the engine is freed", || engine.active() == 0).await;
    client.drain().await;
    site.idle().await;
    site.close().await;
}

#[tokio::test]
async fn a_client_says_how_long_an_answer_is_of_use() {
    let engine = Script::silent(100);
    let site = Site::start(engine.clone()).await;
    let asked = |seconds: &str, further: serde_json::Value| {
        let headers = format!("x-request-timeout: {seconds}\r\n");
        request("POST", CHAT, &headers, chat("Hello", further).to_string())
    };
    let begun = || site.metric("genset_http_time_to_first_token_seconds_count");
    let late = async |further: serde_json::Value| {
        let before = begun();
        let mut client = site.connect().await;
        client.send(asked("30", further)).await;
        eventually("its first token is there", || begun() > before).await;
        later(30).await;
        client.response().await
    };
    let whole = late(json!({})).await;
    assert_eq!(whole.status, 504);
    assert_eq!(whole.header("x-should-retry"), Some("false"));
    let streamed = late(json!({"stream": true})).await;
    assert_eq!(streamed.status, 200);
    assert!(streamed.text().contains("deadline"), "{}", streamed.text());
    eventually("the engine is freed", || engine.active() == 0).await;
    for wrong in ["0", "-1", "soon", "nan", "inf"] {
        let refused = site.send(asked(wrong, json!({}))).await;
        refused.blames("x-request-timeout");
    }
    site.idle().await;
    let metrics = site.runtime.metrics().encode();
    for line in [
        "genset_http_failures_total{endpoint=\"chat_completions\",kind=\"deadline_exceeded\"} 2",
        "genset_http_failures_total{endpoint=\"chat_completions\",kind=\"invalid_request\"} 5",
        "genset_http_time_to_first_token_seconds_count 2",
        "genset_http_answers_queued 0",
        "genset_frontend_template_seconds_count 2",
    ] {
        assert!(metrics.contains(line), "{line} in {metrics}");
    }
    site.close().await;
}

#[tokio::test]
async fn the_pace_of_answers_is_measured_at_their_tokens() {
    let site = Site::start(Script::tokens(encode("one two three"))).await;
    let tokens = encode("one two three").len();
    for further in [json!({}), json!({"stream": true}), json!({"n": 2})] {
        assert_eq!(site.post(CHAT, &chat("Hello", further)).await.status, 200);
    }
    let metrics = site.runtime.metrics().encode();
    let gaps = 4 * (tokens - 1);
    for line in [
        "genset_http_time_to_first_token_seconds_count 4".to_owned(),
        format!("genset_http_inter_token_latency_seconds_count {gaps}"),
        format!("genset_http_output_length_tokens_sum {}.0", 4 * tokens),
        "genset_http_input_length_tokens_count 3".to_owned(),
        "genset_http_answers_queued 0".to_owned(),
    ] {
        assert!(metrics.contains(&line), "{line} in {metrics}");
    }
    site.close().await;
}

#[tokio::test]
async fn a_client_that_leaves_frees_the_engine() {
    let engine = Script::silent(100);
    let site = Site::start(engine.clone()).await;
    for further in [
        json!({}),
        json!({"stream": true}),
        json!({"n": 4}),
        json!({"n": 4, "stream": true}),
    ] {
        let count = further["n"].as_u64().unwrap_or(1);
        let mut client = site.begin(CHAT, &chat("Hello", further.clone())).await;
        if further["stream"] == true {
            assert_eq!(client.head("POST").await.map(|head| head.status), Some(200));
            client.event().await.expect("the role");
        }
        eventually("the engine works", || engine.active() as u64 == count).await;
        drop(client);
        eventually("the engine is freed", || engine.active() == 0).await;
    }
    site.idle().await;
    let metrics = site.runtime.metrics().encode();
    let left = "genset_http_requests_total{endpoint=\"chat_completions\",status=\"499\"} ";
    assert!(metrics.contains(&format!("{left}4")), "{metrics}");
    site.close().await;
}

/// On one thread: an engine that is always ready must not occupy it, even if its tokens have no text.
#[tokio::test]
async fn an_endless_answer_leaves_room_for_others() {
    for text in [" and", "<|im_start|>"] {
        let engine = Script::endless(encode(text)[0]);
        let site = Site::start(engine.clone()).await;
        for further in [json!({"stream": true}), json!({})] {
            let client = site.begin(CHAT, &chat("Hello", further)).await;
            eventually("the engine works", || engine.active() == 1).await;
            assert_eq!(site.get("/live").await.status, 200);
            drop(client);
            eventually("the engine is freed", || engine.active() == 0).await;
        }
        site.close().await;
    }
}

#[tokio::test]
async fn requests_in_a_row_are_answered_in_order() {
    let site = Site::start(echo()).await;
    let mut client = site.connect().await;
    let words = ["one", "two", "three"];
    let stream = json!({"stream": true});
    for further in [json!({}), stream] {
        let requests =
            words.map(|word| post(COMPLETIONS, completion(word, further.clone()).to_string()));
        client.send(requests.concat()).await;
        for word in words {
            let response = client.response().await;
            let text = if further["stream"] == true {
                response.streamed(0).0
            } else {
                response.content()
            };
            assert_eq!(text, word);
        }
    }
    site.close().await;
}

#[tokio::test]
async fn expect_continue_is_answered_before_the_body() {
    let site = Site::start(echo()).await;
    let body = chat("Hello", json!({})).to_string();
    let mut client = site.connect().await;
    let head = format!(
        "POST {CHAT} HTTP/1.1\r\nhost: localhost\r\nexpect: 100-continue\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    client.send(head).await;
    assert_eq!(client.head("POST").await.map(|head| head.status), Some(100));
    client.send(body).await;
    assert_eq!(client.response().await.status, 200);
    site.close().await;
}

#[tokio::test]
async fn connections_over_the_limit_wait_their_turn() {
    let config = FrontendConfig {
        max_connections: 1,
        ..config()
    };
    let site = Site::with(config, echo()).await;
    let mut first = site.connect().await;
    first.send(get("/live")).await;
    assert_eq!(first.response().await.status, 200);
    let mut second = site.connect().await;
    second.send(get("/live")).await;
    // The first is served alone: the second is not accepted yet.
    first.send(get("/live")).await;
    assert_eq!(first.response().await.status, 200);
    assert_eq!(site.metric("genset_http_connections"), 1.0);
    drop(first);
    assert_eq!(second.response().await.status, 200);
    drop(second);
    site.close().await;
}

/// Input that is not HTTP gets an error or no answer; other clients do not notice.
#[tokio::test]
async fn noise_is_not_served() {
    let site = Site::start(echo()).await;
    let long_uri = format!(
        "GET /{} HTTP/1.1\r\nhost: localhost\r\n\r\n",
        "a".repeat(70_000)
    );
    let many_headers = format!("GET /live HTTP/1.1\r\n{}\r\n", "a: b\r\n".repeat(200));
    let big_header = format!("GET /live HTTP/1.1\r\na: {}\r\n\r\n", "b".repeat(1 << 20));
    let noise: Vec<Vec<u8>> = vec![
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03".to_vec(),
        b"\r\n\r\n\r\n\r\nnonsense\r\n\r\n".to_vec(),
        b"GET /live HTTP/9.9\r\n\r\n".to_vec(),
        b"GET /live HTTP/1.1\r\ncontent-length: -1\r\n\r\n".to_vec(),
        b"POST /v1/completions HTTP/1.1\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n{}"
            .to_vec(),
        b"POST /v1/completions HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n".to_vec(),
        b"GET /\xff HTTP/1.1\r\n\r\n".to_vec(),
        long_uri.into_bytes(),
        many_headers.into_bytes(),
        big_header.into_bytes(),
    ];
    for bytes in noise {
        let mut client = site.connect().await;
        client.send(&bytes).await;
        let response = client.response_to("GET").await;
        let status = response.as_ref().map(|response| response.status);
        assert!(
            status.is_none_or(|status| (400..500).contains(&status)),
            "{:?}: {status:?}",
            String::from_utf8_lossy(bytes.get(..40.min(bytes.len())).unwrap_or(&bytes))
        );
        site.is_well().await;
    }
    site.close().await;
}

/// Ways to declare two ends of a request. A proxy in front of this server may have used the other one, so nothing after such a
/// head is read as a request.
#[tokio::test]
async fn a_request_with_two_ends_is_the_last_of_its_connection() {
    let site = Site::start(echo()).await;
    let hidden = "GET /live HTTP/1.1\r\nhost: localhost\r\n\r\n";
    let line = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n";
    let refused = [
        "content-length: 1\r\ncontent-length: 2\r\n\r\n{}",
        "content-length: 1, 2\r\n\r\n{}",
        "content-length: 2, 2\r\n\r\n{}",
        "content-length: +2\r\n\r\n{}",
        "content-length: -2\r\n\r\n{}",
        "content-length: 0x2\r\n\r\n{}",
        "content-length: 2 2\r\n\r\n{}",
        "content-length:\r\n\r\n{}",
        "content-length: 18446744073709551616\r\n\r\n{}",
        "content-length : 2\r\n\r\n{}",
        "transfer-encoding: gzip\r\n\r\n0\r\n\r\n",
        "transfer-encoding: identity\r\n\r\n0\r\n\r\n",
        "transfer-encoding: chunked, identity\r\n\r\n0\r\n\r\n",
        "transfer-encoding: xchunked\r\n\r\n0\r\n\r\n",
        "transfer-encoding: \u{b}chunked\r\n\r\n0\r\n\r\n",
        "transfer-encoding : chunked\r\n\r\n0\r\n\r\n",
        "transfer-encoding\t: chunked\r\n\r\n0\r\n\r\n",
        "transfer-encoding:\r\n chunked\r\n\r\n0\r\n\r\n",
        "x: y\r\n folded\r\n\r\n",
        "content\u{0}length: 2\r\n\r\n{}",
        "no colon\r\n\r\n",
        "transfer-encoding: chunked\r\n\r\nzz\r\n",
        "transfer-encoding: chunked\r\n\r\n-1\r\n{}\r\n0\r\n\r\n",
        "transfer-encoding: chunked\r\n\r\n+2\r\n{}\r\n0\r\n\r\n",
        "transfer-encoding: chunked\r\n\r\n0x2\r\n{}\r\n0\r\n\r\n",
        "transfer-encoding: chunked\r\n\r\n2\r\n{}x\r\n0\r\n\r\n",
        "transfer-encoding: chunked\r\n\r\n2\n{}\n0\n\n",
        "transfer-encoding: chunked\r\n\r\nffffffffffffffffff\r\n{}",
    ];
    for shape in refused {
        let mut client = site.connect().await;
        client.send(format!("{line}{shape}{hidden}")).await;
        let response = client.response_to("POST").await;
        let status = response.map(|response| response.status);
        assert_eq!(status, Some(400), "{shape:?}");
        assert!(client.is_closed().await, "{shape:?}");
        site.is_well().await;
    }
    // HTTP/1.0 has no chunks.
    let mut client = site.connect().await;
    let old = "POST /v1/completions HTTP/1.0\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n";
    client.send(format!("{old}{hidden}")).await;
    assert_eq!(client.response().await.status, 400);
    assert!(client.is_closed().await);
    site.close().await;
}

/// If there are both a length and chunks, the chunks count, as in RFC 9112, and nothing follows them.
#[tokio::test]
async fn of_a_length_and_chunks_the_chunks_count_and_the_connection_ends() {
    let site = Site::start(echo()).await;
    let body = completion("Hello", json!({})).to_string();
    let chunks = format!("{:x}\r\n{body}\r\n0\r\n\r\n", body.len());
    let hidden = "GET /live HTTP/1.1\r\nhost: localhost\r\n\r\n";
    for heads in [
        "content-length: 5\r\ntransfer-encoding: chunked\r\n",
        "transfer-encoding: chunked\r\ncontent-length: 5\r\n",
        "transfer-encoding: chunked\r\ncontent-length: 0\r\nconnection: keep-alive\r\n",
    ] {
        let mut client = site.connect().await;
        let head = format!("POST {COMPLETIONS} HTTP/1.1\r\nhost: localhost\r\n{heads}\r\n");
        client.send(format!("{head}{chunks}{hidden}")).await;
        assert_eq!(client.response().await.content(), "Hello", "{heads}");
        assert!(client.is_closed().await, "{heads}");
    }
    // The same length given twice is one length.
    let mut client = site.connect().await;
    let twice = format!("content-length: {}\r\n", body.len());
    client
        .send(request("POST", COMPLETIONS, &twice, &body))
        .await;
    assert_eq!(client.response().await.content(), "Hello");
    client.send(get("/live")).await;
    assert_eq!(client.response().await.status, 200);
    site.close().await;
}

/// A body shorter than announced is not a request; surplus bytes are read as another request, which is invalid.
#[tokio::test]
async fn lengths_that_lie() {
    let site = Site::start(echo()).await;
    let body = completion("Hello", json!({})).to_string();
    let mut client = site.connect().await;
    client.send(head(COMPLETIONS, body.len() - 1)).await;
    client.send(&body).await;
    let (status, _, _, message) = client.response().await.refusal();
    assert_eq!(status, 400);
    assert!(message.contains("not valid JSON"), "{message}");
    assert_eq!(client.response().await.status, 400);
    assert!(client.is_closed().await);
    for (announced, sent) in [(100_000, body.as_str()), (31 << 20, "{\"prompt\": \"")] {
        let mut client = site.connect().await;
        client.send(head(COMPLETIONS, announced)).await;
        client.send(sent).await;
        drop(client);
        site.is_well().await;
    }
    site.idle().await;
    site.close().await;
}

/// A client must not choose how far a few bytes expand.
#[tokio::test]
async fn a_body_in_an_encoding_is_refused_unread() {
    let site = Site::start(echo()).await;
    let bomb = vec![0x1f_u8; 20 << 20];
    for path in [
        CHAT,
        COMPLETIONS,
        "/v1/embeddings",
        "/v1/rerank",
        "/v1/score",
        "/v1/responses",
        "/v1/messages",
        "/tokenize",
        "/detokenize",
    ] {
        for encoding in [
            "gzip",
            "deflate",
            "br",
            "zstd",
            "GZip",
            "identity, gzip",
            "x-gzip",
            "\u{e9}",
        ] {
            let headers = format!("content-encoding: {encoding}\r\n");
            let body = if encoding == "gzip" {
                bomb.as_slice()
            } else {
                b"\x1f\x8b"
            };
            let response = site.send(request("POST", path, &headers, body)).await;
            assert_eq!(response.status, 415, "{path} {encoding}");
            let error = &response.json()["error"];
            let message = error["message"].as_str().unwrap_or_default();
            assert!(message.starts_with("The content-encoding"), "{message}");
            if path != "/v1/messages" {
                assert_eq!(error["param"], "content-encoding");
            }
        }
    }
    let chunked = format!(
        "POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n"
    );
    let response = site.send(chunked).await;
    assert_eq!(response.status, 415);
    assert_eq!(response.json()["error"]["param"], "transfer-encoding");
    let plain = completion("Hello", json!({})).to_string();
    for encoding in ["identity", "", "identity, identity"] {
        let headers = format!("content-encoding: {encoding}\r\n");
        let response = site
            .send(request("POST", COMPLETIONS, &headers, &plain))
            .await;
        assert_eq!(response.content(), "Hello");
    }
    site.is_well().await;
    site.idle().await;
    site.close().await;
}

/// One peer cannot take all connections: those above its limit are closed, and each that ends frees a place.
#[tokio::test]
async fn a_peer_has_a_limit_of_its_own() {
    let config = FrontendConfig {
        max_connections_per_peer: std::num::NonZeroUsize::new(3).expect("more than 0"),
        ..config()
    };
    let site = Site::with(config, echo()).await;
    let mut held = Vec::new();
    for _ in 0..3 {
        let mut client = site.connect().await;
        client.send(get("/live")).await;
        assert_eq!(client.response().await.status, 200);
        held.push(client);
    }
    assert!(site.connect().await.is_closed().await);
    let refused = || site.metric("genset_http_refused_connections_total");
    assert_eq!(refused(), 1.0);
    held.pop();
    eventually("its place is free", || {
        site.metric("genset_http_connections") == 2.0
    })
    .await;
    assert_eq!(site.get("/live").await.status, 200);
    assert_eq!(refused(), 1.0);
    site.close().await;
}
