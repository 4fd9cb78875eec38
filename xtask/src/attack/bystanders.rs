//! The clients beside an attack: some read streams, one asks `/live`.
#![expect(
    clippy::disallowed_types,
    clippy::disallowed_methods,
    reason = "what clients see is measured in real time"
)]

use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crate::http::{Connection, Request};

/// Concurrent streams.
const CLIENTS: usize = 3;
/// Tokens of each stream.
const TOKENS: usize = 60;

/// The outcome of the bystanders' streams.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Streams {
    pub(super) finished: u32,
    pub(super) broken: u32,
    pub(super) refused: u32,
    pub(super) longest_gap: Duration,
    pub(super) first_error: Option<String>,
}

impl Streams {
    fn add(&mut self, other: Self) {
        self.finished += other.finished;
        self.broken += other.broken;
        self.refused += other.refused;
        self.longest_gap = self.longest_gap.max(other.longest_gap);
        self.first_error = self.first_error.take().or(other.first_error);
    }
}

impl fmt::Display for Streams {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let all = self.finished + self.broken + self.refused;
        let gap = self.longest_gap.as_millis();
        write!(f, "{} of {all}, longest gap {gap} ms", self.finished)?;
        match self.refused {
            0 => Ok(()),
            refused => write!(f, ", {refused} refused"),
        }
    }
}

/// Clients that read one stream after another.
#[derive(Debug)]
pub(super) struct Bystanders {
    address: SocketAddr,
    headers: String,
    body: String,
}

impl Bystanders {
    pub(super) fn new(address: SocketAddr, model: &str, headers: &str) -> Self {
        Self {
            address,
            headers: format!("Content-Type: application/json\r\n{headers}"),
            body: format!(
                r#"{{"model":"{model}","prompt":"other","stream":true,"max_tokens":{TOKENS},"ignore_eos":true}}"#
            ),
        }
    }

    /// Reads streams until `stop`; reads the open ones to their ends.
    pub(super) fn run(&self, stop: &AtomicBool) -> Streams {
        thread::scope(|scope| {
            let clients: Vec<_> = (0..CLIENTS)
                .map(|_| scope.spawn(|| self.client(stop)))
                .collect();
            let mut all = Streams::default();
            for client in clients {
                all.add(client.join().unwrap_or_default());
            }
            all
        })
    }

    fn client(&self, stop: &AtomicBool) -> Streams {
        let mut seen = Streams::default();
        while !stop.load(Ordering::Relaxed) {
            match self.stream(&mut seen.longest_gap) {
                Ok(200) => seen.finished += 1,
                Ok(_status) => {
                    seen.refused += 1;
                    thread::sleep(Duration::from_millis(100));
                }
                Err(error) => {
                    seen.broken += 1;
                    seen.first_error.get_or_insert_with(|| error.to_string());
                    thread::sleep(Duration::from_millis(100));
                }
            }
        }
        seen
    }

    /// Reads one stream to its end; returns the status of its answer.
    fn stream(&self, longest_gap: &mut Duration) -> io::Result<u16> {
        let mut connection = Connection::open(self.address)?;
        connection.send(Request {
            path: "/v1/completions",
            headers: &self.headers,
            body: self.body.as_bytes(),
        })?;
        let head = connection.head()?;
        let mut end = Vec::new();
        let mut latest: Option<Instant> = None;
        connection.body(&head, |piece| {
            if let Some(latest) = latest {
                *longest_gap = (*longest_gap).max(latest.elapsed());
            }
            latest = Some(Instant::now());
            end.extend_from_slice(piece);
            true
        })?;
        let text = String::from_utf8_lossy(&end);
        if head.status == 200 && !text.contains("data: [DONE]") {
            let last = text.lines().rev().find(|line| !line.is_empty());
            return Err(io::Error::other(
                last.unwrap_or("an empty stream").to_owned(),
            ));
        }
        Ok(head.status)
    }
}

/// Asks `/live` repeatedly.
#[derive(Debug)]
pub(super) struct Prober {
    address: SocketAddr,
}

impl Prober {
    pub(super) fn new(address: SocketAddr) -> Self {
        Self { address }
    }

    /// Returns the longest time that an answer took.
    pub(super) fn run(&self, stop: &AtomicBool) -> Duration {
        let mut longest = Duration::ZERO;
        let mut connection = None;
        while !stop.load(Ordering::Relaxed) {
            let asked = Instant::now();
            let answered = self.ask(&mut connection);
            longest = longest.max(asked.elapsed());
            if answered.is_err() {
                connection = None;
            }
            thread::sleep(Duration::from_millis(10));
        }
        longest
    }

    fn ask(&self, connection: &mut Option<Connection>) -> io::Result<()> {
        let connection = match connection {
            Some(connection) => connection,
            None => connection.insert(Connection::open(self.address)?),
        };
        connection.exchange(Request::get("/live")).map(drop)
    }
}
