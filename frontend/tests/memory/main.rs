//! The most memory that one request takes in a whole server: 8 times its body plus 16 MB, whatever it contains.
//!
//! A separate binary, for its allocator, which counts the memory of all threads of the process. The tests run one at a time.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    reason = "a test says what failed by panicking"
)]

mod counting;
mod random;
#[path = "../counted/site.rs"]
mod site;
mod worst;

use std::sync::Arc;
use std::time::Duration;

use genset_engine_echo::{EchoArgs, EchoCore};
use genset_frontend::FrontendConfig;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

#[global_allocator]
static ALLOCATOR: counting::Counting = counting::Counting;

/// One test at a time, because the whole process is counted.
static TURN: tokio::sync::Mutex<()> = tokio::sync::Mutex::const_new(());

/// A test fails after this much silence.
const PATIENCE: Duration = Duration::from_secs(60);

/// How many times its body's size a request may take.
const TIMES: usize = 8;

/// What it may take in addition.
const FREE_BYTES: usize = 16_000_000;

/// A server of the echo engine.
struct Site(site::Site);

impl Site {
    async fn start() -> Self {
        let args = EchoArgs {
            token_echo_delay_ms: 0,
        };
        let engine = Arc::new(EchoCore::from_args(&args, 2048, 2048));
        let config = FrontendConfig {
            max_stored_bytes: 1 << 20,
            ..FrontendConfig::default()
        };
        let site = Self(site::Site::start(engine, config).await);
        // The first request makes what is made once.
        let body = br#"{"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}"#;
        assert_eq!(site.post("/v1/chat/completions", body).await.0, 200);
        site
    }

    /// Returns the status and the answer.
    async fn post(&self, path: &str, body: &[u8]) -> (u16, Vec<u8>) {
        let mut stream = TcpStream::connect(self.0.server.address()).await.unwrap();
        let head = format!(
            "POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n\
             connection: close\r\ncontent-length: {}\r\n\r\n",
            body.len()
        );
        let exchange = async {
            stream.write_all(head.as_bytes()).await.unwrap();
            stream.write_all(body).await.unwrap();
            let mut answer = Vec::new();
            stream.read_to_end(&mut answer).await.unwrap();
            answer
        };
        let answer = tokio::time::timeout(PATIENCE, exchange).await.unwrap();
        let status = String::from_utf8_lossy(answer.get(9..12).unwrap()).parse();
        (status.unwrap(), answer)
    }

    /// Like [`Self::post`]. Also returns the peak of the process's memory beyond what it had before.
    async fn measure(&self, path: &str, body: &[u8]) -> (u16, Vec<u8>, usize) {
        let before = counting::begin();
        let (status, answer) = self.post(path, body).await;
        let peak = usize::try_from(counting::peak() - before).unwrap_or(0);
        (status, answer, peak)
    }

    /// Waits until no request holds any of the budget.
    async fn is_whole(&self) {
        for _ in 0..12_000 {
            if self.metric("genset_http_memory_used_bytes") == 0.0
                && self.metric("genset_http_requests_in_flight") == 0.0
            {
                return;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        panic!("the budget is not whole");
    }

    fn metric(&self, name: &str) -> f64 {
        let text = self.0.runtime.metrics().encode();
        let mut lines = text.lines();
        let value = lines.find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        value.unwrap().parse().unwrap()
    }

    async fn close(self) {
        self.0.close().await;
    }
}

fn bound(body: &[u8]) -> usize {
    TIMES * body.len() + FREE_BYTES
}
