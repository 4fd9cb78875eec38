//! Clients that send requests one after another, and many at once.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::task::JoinSet;

use crate::answers::{End, Stream, chat};
use crate::support::{Exchange, Server};

/// Requests one token.
///
/// # Errors
/// Anything but a complete answer.
pub(crate) async fn ask(address: SocketAddr) -> Result<(), String> {
    let body = chat(1, false).to_string();
    let exchange = Exchange::try_begin(address, "POST", "/v1/chat/completions", &body)
        .await
        .map_err(|error| error.to_string())?;
    let response = exchange.response().await;
    if response.status == 200 && response.body.contains("\"finish_reason\":\"length\"") {
        return Ok(());
    }
    Err(format!("{} {}", response.status, response.body))
}

/// Sends `count` requests at once; returns the failures.
pub(crate) async fn burst(frontend: &Server, count: usize) -> Vec<String> {
    let address = frontend.address;
    let requests: JoinSet<_> = (0..count).map(|_| ask(address)).collect();
    let answers = requests.join_all().await;
    answers.into_iter().filter_map(Result::err).collect()
}

/// Begins `count` streams at once and waits until each has text.
pub(crate) async fn streams(frontend: &Server, count: usize, max_tokens: u64) -> Vec<Stream> {
    let address = frontend.address;
    let begun: JoinSet<_> = (0..count)
        .map(|_| async move {
            let mut stream = Stream::begin(address, max_tokens).await.expect("a stream");
            stream.until_text().await;
            stream
        })
        .collect();
    begun.join_all().await
}

/// Reads the streams to their ends.
pub(crate) async fn ends(streams: Vec<Stream>) -> Vec<End> {
    let ends: JoinSet<_> = streams.into_iter().map(Stream::end).collect();
    ends.join_all().await
}

/// Reads the streams to their ends; returns the text. All must be complete answers with the same text.
pub(crate) async fn same_text(streams: Vec<Stream>) -> String {
    let texts: JoinSet<_> = streams.into_iter().map(Stream::whole_text).collect();
    let mut texts = texts.join_all().await;
    let first = texts.pop().expect("streams");
    for text in texts {
        assert_eq!(text, first);
    }
    first
}

/// Clients that send requests continuously.
pub(crate) struct Hammer {
    stop: Arc<AtomicBool>,
    clients: JoinSet<Tally>,
}

#[derive(Debug, Default)]
struct Tally {
    answered: usize,
    failures: Vec<String>,
}

impl Hammer {
    /// `count` clients, each with one request at a time.
    pub(crate) fn start(frontend: &Server, count: usize) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let address = frontend.address;
        let clients = (0..count)
            .map(|_| hammer(address, Arc::clone(&stop)))
            .collect();
        Self { stop, clients }
    }

    /// Stops the clients. There must have been requests, and none may have failed.
    pub(crate) async fn expect_no_failure(self) {
        self.stop.store(true, Ordering::Relaxed);
        let tallies = self.clients.join_all().await;
        let failures: Vec<_> = tallies.iter().flat_map(|tally| &tally.failures).collect();
        assert!(failures.is_empty(), "{failures:#?}");
        let answered: usize = tallies.iter().map(|tally| tally.answered).sum();
        assert!(answered > 0, "nothing was asked");
    }
}

/// The pause of a client between two requests. Requests still come every few milliseconds, and leave time to the processes that
/// start and stop.
const PAUSE: Duration = Duration::from_millis(20);

async fn hammer(address: SocketAddr, stop: Arc<AtomicBool>) -> Tally {
    let mut tally = Tally::default();
    while !stop.load(Ordering::Relaxed) {
        match ask(address).await {
            Ok(()) => tally.answered += 1,
            Err(failure) => tally.failures.push(failure),
        }
        tokio::time::sleep(PAUSE).await;
    }
    tally
}
