//! What a server of OpenAI's API may answer, and how the kit takes it.

use std::future::pending;

use futures_util::StreamExt as _;
use genset_backend_common::request::ChatInput;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, copy, sink};
use tokio::net::TcpListener;

use super::*;

fn server(base: &str) -> Server {
    Server {
        base: base_of(base),
        key: None,
        model: None,
    }
}

fn engine(base: &str) -> UrlEngine {
    UrlEngine {
        server: Arc::new(server(base)),
        model: "m".into(),
        context: 8,
        max_num_seqs: None,
        http: EngineState::new(),
    }
}

fn chat() -> GenerateRequest {
    let messages = vec![json!({"role": "user", "content": "7"})];
    let tools = Vec::new();
    GenerateRequest::from_chat("m", ChatInput { messages, tools })
}

#[test]
fn every_group_and_every_exception_is_in_the_catalogue() {
    for group in GROUPS {
        assert!(
            catalogue().any(|check| check.id.starts_with(group)),
            "{group}"
        );
    }
    for id in UNSEEN.iter().map(|(id, _)| *id).chain(FILLING) {
        assert!(catalogue().any(|check| check.id == id), "{id}");
    }
    assert!(askable(&["SP01".into()]).is_err());
    assert_eq!(askable(&["FN01".into()]).unwrap(), ["FN01"]);
}

#[test]
fn refusals_have_the_kind_that_their_status_and_code_say() {
    for (status, code, kind) in [
        (400, "", ErrorKind::InvalidArgument),
        (
            400,
            "context_length_exceeded",
            ErrorKind::ContextLengthExceeded,
        ),
        (400, "unsupported_parameter", ErrorKind::Unsupported),
        (401, "", ErrorKind::InvalidArgument),
        (404, "", ErrorKind::NotFound),
        (429, "", ErrorKind::Overloaded),
        (500, "", ErrorKind::Internal),
        (501, "", ErrorKind::Unsupported),
        (502, "", ErrorKind::Disconnected),
        (503, "", ErrorKind::Unavailable),
        (504, "", ErrorKind::DeadlineExceeded),
    ] {
        let body = json!({"error": {"message": "no", "code": code}});
        let refused = refusal(StatusCode::from_u16(status).ok(), &body);
        assert_eq!(refused.kind(), kind, "{status} {code}");
    }
}

/// An answer over HTTP whose body lacks its last `missing` bytes.
fn reply(status: u16, body: &str, missing: usize) -> String {
    let length = body.len() + missing;
    format!("HTTP/1.1 {status} Said\r\nconnection: close\r\ncontent-length: {length}\r\n\r\n{body}")
}

fn refused(status: u16, message: &str) -> String {
    let body = json!({"error": {"message": message}});
    reply(status, &body.to_string(), 0)
}

/// The result of `ask` with the URL of a server that answers each request with the next reply.
async fn served<T>(replies: &[String], ask: impl AsyncFnOnce(String) -> T) -> T {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let serve = async {
        for reply in replies {
            let (mut peer, _) = listener.accept().await.unwrap();
            let mut head = Vec::new();
            while !head.ends_with(b"\r\n\r\n") {
                head.push(peer.read_u8().await.unwrap());
            }
            peer.write_all(reply.as_bytes()).await.unwrap();
            peer.shutdown().await.unwrap();
            // If the rest of the request were not read, the connection would be reset.
            drop(copy(&mut peer, &mut sink()).await);
        }
        pending::<T>().await
    };
    tokio::select! {
        result = ask(url) => result,
        never = serve => never,
    }
}

#[tokio::test]
async fn a_server_that_cannot_be_tested_is_refused_with_the_reason() {
    let one_model = reply(200, r#"{"data": [{"id": "a"}]}"#, 0);
    let two_models = reply(200, r#"{"data": [{"id": "a"}, {"id": "b"}]}"#, 0);
    for (replies, problem) in [
        (
            vec![reply(200, "<html>", 0)],
            ": expected value at line 1 column 1",
        ),
        (vec![refused(401, "a key is needed")], ": a key is needed"),
        (
            vec![two_models],
            "--url-model: name one of the server's models: a, b",
        ),
        (
            vec![one_model, refused(400, "ignore_eos is unknown")],
            ", which this server refuses: ignore_eos is unknown",
        ),
    ] {
        let met = served(&replies, async |url| server(&url).meet().await).await;
        let error = met.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
        assert!(error.to_string().ends_with(problem), "{problem}: {error}");
    }
}

/// The error that ends a server's answer to a chat.
async fn error_of(url: String) -> EngineError {
    let engine = engine(&url);
    engine.start(StartContext::detached(1)).await.unwrap();
    let answer = engine.generate(chat(), RequestContext::new("r")).await;
    let items: Vec<_> = answer.unwrap().collect().await;
    items.into_iter().find_map(Result::err).unwrap()
}

#[tokio::test]
async fn an_answer_that_is_none_ends_with_an_error() {
    for (reply, kind, problem) in [
        (refused(429, "full"), ErrorKind::Overloaded, "full"),
        (
            reply(200, "data: {\"error\": {\"message\": \"lost\"}}\n\n", 0),
            ErrorKind::Internal,
            "lost",
        ),
        (
            reply(200, "data: {\n\n", 0),
            ErrorKind::Disconnected,
            "an event that cannot be read: ",
        ),
        (
            reply(200, "data: {}\n\n", 1),
            ErrorKind::Disconnected,
            "the stream broke off",
        ),
        (
            reply(200, "data: {}\n\n", 0),
            ErrorKind::StreamIncomplete,
            "the stream ended without [DONE]",
        ),
        (
            reply(200, "data: [DONE]\n\n", 0),
            ErrorKind::StreamIncomplete,
            "the stream ended without a finish_reason",
        ),
        (
            reply(
                200,
                "data: {\"choices\": [{\"finish_reason\": \"stop\"}]}\ndata: [DONE]\n",
                0,
            ),
            ErrorKind::StreamIncomplete,
            "the stream has no usage, ",
        ),
    ] {
        let error = served(&[reply], error_of).await;
        assert_eq!(error.kind(), kind, "{problem}: {error}");
        assert!(error.message().starts_with(problem), "{problem}: {error}");
    }
}

#[tokio::test]
async fn what_cannot_be_sent_is_refused() {
    let engine = engine("http://a:1");
    engine.start(StartContext::detached(1)).await.unwrap();
    let (mut no_number, mut no_mass, mut undeclared) = (chat(), chat(), chat());
    no_number.sampling.temperature = Some(f32::NAN);
    no_mass.sampling.top_p = Some(0.0);
    undeclared.sampling.seed = Some(1);
    for (request, kind) in [
        (no_number, ErrorKind::InvalidArgument),
        (no_mass, ErrorKind::InvalidArgument),
        (undeclared, ErrorKind::Unsupported),
    ] {
        let answer = engine.generate(request, RequestContext::new("r")).await;
        assert_eq!(answer.unwrap_err().kind(), kind);
    }
}

#[tokio::test]
async fn a_server_has_the_seats_that_were_told() {
    let engine = UrlEngine {
        max_num_seqs: Some(1),
        ..engine("http://a:1")
    };
    let config = engine.start(StartContext::detached(1)).await.unwrap();
    assert_eq!(config.max_num_seqs, Some(1));
}

#[test]
fn a_password_in_the_url_is_not_told() {
    let server = server("user:secret@host:8000/v1");
    let told = server.unusable(&"no").to_string();
    assert_eq!(told, "--url: http://host:8000: no");
}
