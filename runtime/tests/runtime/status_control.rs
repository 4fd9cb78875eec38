//! `/control` on the status port: which requests reach the worker, which are refused, and who has access.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;

use async_trait::async_trait;
use genset_backend_common::ports::Control;
use genset_backend_common::{
    EngineError,
    controls::{ControlReply, ControlRequest},
    error::At,
};
use genset_runtime::plane::WireSecret;
use genset_runtime::{ControlDoor, Readiness, Runtime, StatusServer};
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::support::soon;

const SECRET: &str = "correct horse battery staple";

/// Performs requests and records them; it cannot wake.
#[derive(Default)]
struct Noting(Mutex<Vec<ControlRequest>>);

#[async_trait]
impl Control for Noting {
    async fn control(&self, request: ControlRequest) -> Result<ControlReply, EngineError> {
        if request == ControlRequest::Wake {
            return Err(EngineError::unsupported(At::other("op"), "no wake"));
        }
        self.0.lock().push(request);
        Ok(ControlReply::Done)
    }
}

struct Site {
    runtime: Runtime,
    server: StatusServer,
    control: Arc<Noting>,
}

impl Site {
    async fn new(host: Ipv4Addr, secret: Option<&str>) -> Self {
        let runtime = Runtime::in_process();
        let control = Arc::new(Noting::default());
        let secret = secret.map(|text| WireSecret::try_new(text.as_bytes()).unwrap());
        let door = ControlDoor::new(control.clone(), secret);
        let ready: Readiness = Arc::new(|| true);
        let address = SocketAddr::new(IpAddr::V4(host), 0);
        let server = StatusServer::bind(address, &runtime, ready.into(), Some(door)).await;
        Self {
            runtime,
            server: server.unwrap(),
            control,
        }
    }

    /// The status and the body.
    async fn ask(&self, method: &str, path: &str, headers: &str, body: &str) -> (u16, Value) {
        let at = SocketAddr::from((Ipv4Addr::LOCALHOST, self.server.address().port()));
        soon(exchange(at, method, path, headers, body)).await
    }

    async fn close(self) {
        soon(self.runtime.shutdown()).await;
    }
}

pub(crate) async fn exchange(
    at: SocketAddr,
    method: &str,
    path: &str,
    headers: &str,
    body: &str,
) -> (u16, Value) {
    let mut stream = TcpStream::connect(at).await.unwrap();
    let length = body.len();
    let head = format!("{method} {path} HTTP/1.1\r\nhost: {at}\r\nconnection: close\r\n");
    let request = format!("{head}{headers}content-length: {length}\r\n\r\n{body}");
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    let status = head.split(' ').nth(1).unwrap().parse().unwrap();
    (status, serde_json::from_str(body).unwrap_or_default())
}

#[tokio::test]
async fn what_is_listed_can_be_asked() {
    let site = Site::new(Ipv4Addr::LOCALHOST, None).await;
    let (status, listed) = site.ask("GET", "/control", "", "").await;
    assert_eq!(status, 200);
    let operations = listed["operations"].as_array().unwrap();
    assert_eq!(operations.len(), 10, "{listed:#}");
    let engines = |operation: &&Value| {
        !["wake", "log_level"]
            .iter()
            .any(|op| operation["op"] == *op)
    };
    for operation in operations.iter().filter(engines) {
        let path = format!("/control/{}", operation["op"].as_str().unwrap());
        let takes = operation["takes"].to_string();
        let answer = site.ask("POST", &path, "", &takes);
        assert_eq!(answer.await, (200, json!({"result": "done"})), "{path}");
        assert_eq!(operation["op"], site.control.0.lock().last().unwrap().op());
    }
    site.ask("POST", "/control/clear-prefix-cache", "", "")
        .await;
    let last = site.control.0.lock().last().cloned();
    assert_eq!(last, Some(ControlRequest::ClearPrefixCache));
    site.close().await;
}

#[tokio::test]
async fn a_refusal_says_why() {
    let site = Site::new(Ipv4Addr::LOCALHOST, None).await;
    for (method, path, body, status, kind, part) in [
        (
            "POST",
            "/control/slep",
            "",
            404,
            "not_found",
            "did you mean sleep?",
        ),
        ("POST", "/control/wake", "", 400, "unsupported", "no wake"),
        (
            "POST",
            "/control/unload_adapter",
            "{}",
            400,
            "invalid_argument",
            "name",
        ),
        (
            "POST",
            "/control/sleep",
            "{",
            400,
            "invalid_argument",
            "body",
        ),
        (
            "GET",
            "/control/sleep",
            "",
            405,
            "invalid_argument",
            "POST /control/sleep",
        ),
    ] {
        let (answered, body) = site.ask(method, path, "", body).await;
        assert_eq!((answered, &body["error"]["kind"]), (status, &json!(kind)));
        let message = body["error"]["message"].as_str().unwrap();
        assert!(message.contains(part), "{path}: {message}");
    }
    assert_eq!(*site.control.0.lock(), []);
    site.close().await;
}

#[tokio::test]
async fn who_has_the_right_may_ask_and_nobody_else() {
    let bearer = format!("authorization: Bearer {SECRET}\r\n");
    let lower = format!("authorization: bearer  {SECRET}\r\n");
    let other = format!("authorization: Basic {SECRET}\r\n");
    let wrong = "authorization: Bearer another secret, as long\r\n";
    let page = format!("{bearer}origin: http://127.0.0.1\r\n");
    let (all, own) = (Ipv4Addr::UNSPECIFIED, Ipv4Addr::LOCALHOST);
    for (host, secret, headers, status) in [
        (own, None, "", 200),
        (own, None, "origin: http://evil.example\r\n", 403),
        (all, None, "", 403),
        (all, None, &bearer, 403),
        (own, Some(SECRET), "", 401),
        (all, Some(SECRET), wrong, 401),
        (all, Some(SECRET), &other, 401),
        (all, Some(SECRET), "authorization: Bearer\r\n", 401),
        (all, Some(SECRET), &bearer, 200),
        (all, Some(SECRET), &lower, 200),
        (all, Some(SECRET), &page, 403),
    ] {
        let site = Site::new(host, secret).await;
        for (method, path) in [("GET", "/control"), ("POST", "/control/sleep")] {
            let (answered, body) = site.ask(method, path, headers, "").await;
            assert_eq!(
                answered, status,
                "{method} {host} {secret:?} {headers:?}: {body}"
            );
        }
        let asked = usize::from(status == 200);
        assert_eq!(site.control.0.lock().len(), asked, "{headers:?}");
        site.close().await;
    }
}

#[tokio::test]
async fn a_process_without_a_worker_says_so() {
    let runtime = Runtime::in_process();
    let ready: Readiness = Arc::new(|| true);
    let address = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
    let server = StatusServer::bind(address, &runtime, ready.into(), None)
        .await
        .unwrap();
    let asked = exchange(server.address(), "POST", "/control/wake", "", "");
    let (status, body) = soon(asked).await;
    assert_eq!((status, &body["error"]["kind"]), (404, &json!("not_found")));
    soon(runtime.shutdown()).await;
}
