//! `cargo xtask soak`: sends many mixed requests, abandons a third of them midway, and checks that memory stays flat.
//!
//! The server uses the sample engine, which computes nothing, so that everything else is measured.
#![expect(
    clippy::disallowed_types,
    clippy::disallowed_methods,
    reason = "a real process is measured, in real time"
)]

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::io::{self, Write as _};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use clap::Args;
use serde_json::json;

use crate::http::{Connection, Head, Request};
use crate::repo::Repo;
use crate::served::{Port, Served, resident_bytes};

/// Samples of memory over the whole run.
const SAMPLES: u64 = 100;
/// The memory in use fluctuates by this much at any time.
const MIN_TOLERANCE_BYTES: u64 = 16 << 20;

// No doc comment: it would replace the help of the task.
#[derive(Debug, Args)]
pub(crate) struct SoakOptions {
    /// The binary [default: target/release/genset]
    #[arg(long)]
    pub(crate) binary: Option<PathBuf>,
    /// Requests in all
    #[arg(long, default_value_t = 1_000_000, value_parser = clap::value_parser!(u64).range(100..))]
    pub(crate) requests: u64,
    /// Connections at once
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u64).range(1..=256))]
    pub(crate) connections: u64,
    /// Print JSON instead of a table
    #[arg(long)]
    pub(crate) json: bool,
}

/// What one connection saw.
#[derive(Debug, Default)]
struct Seen {
    /// The number of answers by status; 0 for abandoned requests.
    answers: BTreeMap<u16, u64>,
    errors: Vec<String>,
}

/// The memory after a number of requests.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Sample {
    requests: u64,
    bytes: u64,
}

/// Sends requests, watches memory and shows the result.
///
/// # Errors
/// There is no binary, a request fails unexpectedly, or memory grew.
pub(crate) fn run(repo: &Repo, options: &SoakOptions) -> anyhow::Result<()> {
    let release = || repo.target().join("release/genset");
    let binary = options.binary.clone().unwrap_or_else(release);
    let binary = fs::canonicalize(&binary)
        .with_context(|| format!("there is no {}: cargo build --release", binary.display()))?;
    let arguments = [
        "in=http",
        "out=sample",
        "--access-log=false",
        "--tool-parser",
        "hermes",
    ];
    let served = Served::start(&binary, Port::Http, &arguments)?;
    let (begun, sent) = (Instant::now(), AtomicU64::new(0));
    let (seen, samples) = thread::scope(|scope| {
        let clients: Vec<_> = (0..options.connections)
            .map(|_| scope.spawn(|| client(served.address, options.requests, &sent)))
            .collect();
        let samples = watch(&served, options.requests, &sent);
        let mut all = Seen::default();
        for client in clients {
            let seen = client.join().unwrap_or_default();
            for (status, count) in seen.answers {
                *all.answers.entry(status).or_default() += count;
            }
            all.errors.extend(seen.errors);
        }
        (all, samples)
    });
    let report = Report::new(options.requests, begun.elapsed(), seen, samples);
    let shown = if options.json {
        format!("{:#}\n", report.to_json())
    } else {
        report.table()
    };
    io::stdout().write_all(shown.as_bytes())?;
    if !served.is_alive() {
        bail!("the server died: {}", served.log_text());
    }
    report.verdict()
}

/// Samples the server's memory after every hundredth of the requests.
fn watch(served: &Served, requests: u64, sent: &AtomicU64) -> Vec<Sample> {
    let mut samples = Vec::new();
    let mut shown = Instant::now();
    loop {
        let now = sent.load(Ordering::Relaxed).min(requests);
        let due = samples.len() as u64 * requests / SAMPLES;
        if now >= due {
            let bytes = resident_bytes(served.id());
            samples.push(Sample {
                requests: now,
                bytes,
            });
        }
        if now >= requests || !served.is_alive() {
            return samples;
        }
        if shown.elapsed() > Duration::from_secs(30) {
            shown = Instant::now();
            eprintln!(
                "{now} of {requests}, {} MB",
                resident_bytes(served.id()) / 1_000_000
            );
        }
        thread::sleep(Duration::from_millis(5));
    }
}

/// Sends requests on one connection, and reconnects after an abandoned answer.
fn client(address: SocketAddr, requests: u64, sent: &AtomicU64) -> Seen {
    let mut seen = Seen::default();
    let mut connection = None;
    loop {
        let number = sent.fetch_add(1, Ordering::Relaxed);
        // Gives up on a server that is gone: it would refuse a million times.
        if number >= requests || seen.errors.len() > 20 {
            return seen;
        }
        match ask(address, &mut connection, number) {
            Ok(status) => *seen.answers.entry(status).or_default() += 1,
            Err(error) => {
                connection = None;
                seen.errors.push(format!("request {number}: {error}"));
            }
        }
    }
}

/// Sends one request; returns the status of its answer, or 0 if it was abandoned.
fn ask(address: SocketAddr, connection: &mut Option<Connection>, number: u64) -> io::Result<u16> {
    let open = match connection {
        Some(open) => open,
        None => connection.insert(Connection::open(address)?),
    };
    let (path, body) = request(number);
    let request = if body.is_empty() {
        Request::get(path)
    } else {
        Request::post(path, body.as_bytes())
    };
    open.send(request)?;
    if number.is_multiple_of(3) {
        leave(open, number)?;
        *connection = None;
        return Ok(0);
    }
    let head = open.head()?;
    let mut end = Vec::new();
    open.body(&head, |piece| {
        end.clear();
        end.extend_from_slice(piece);
        true
    })?;
    let text = String::from_utf8_lossy(&end);
    if head.status == 200 && text.contains("\"error\":{") {
        return Err(io::Error::other(text.into_owned()));
    }
    if head.closes {
        *connection = None;
    }
    Ok(head.status)
}

/// Abandons an answer: reads nothing, the head, or some of it.
fn leave(open: &mut Connection, number: u64) -> io::Result<()> {
    if number.is_multiple_of(2) {
        return Ok(());
    }
    let head: Head = open.head()?;
    let mut pieces = number % 5;
    open.body(&head, |_| {
        pieces = pieces.saturating_sub(1);
        pieces > 0
    })
    .map(drop)
}

/// Path and body of a request. The kinds take turns, and no two requests are the same.
fn request(number: u64) -> (&'static str, String) {
    const CHAT: &str = "/v1/chat/completions";
    const COMPLETIONS: &str = "/v1/completions";
    let messages = format!(
        r#""model":"tiny-chat","messages":[{{"role":"user","content":"request {number}"}}]"#
    );
    let prompt = format!(r#""model":"tiny-chat","prompt":"request {number}""#);
    let input = format!(r#""model":"tiny-chat","input":"request {number}","max_output_tokens":5"#);
    // Not a multiple of three, so that every kind is abandoned at times.
    match number % 16 {
        0 => (CHAT, format!(r#"{{{messages},"max_tokens":5}}"#)),
        1 => (
            CHAT,
            format!(
                r#"{{{messages},"max_tokens":30,"stream":true,"stream_options":{{"include_usage":true}}}}"#
            ),
        ),
        2 => (COMPLETIONS, format!(r#"{{{prompt},"max_tokens":5}}"#)),
        3 => (
            COMPLETIONS,
            format!(r#"{{{prompt},"max_tokens":200,"stream":true}}"#),
        ),
        4 => (COMPLETIONS, format!(r#"{{{prompt},"max_tokens":5,"n":2}}"#)),
        5 => (
            CHAT,
            format!(r#"{{{messages},"max_tokens":9,"n":2,"stream":true}}"#),
        ),
        6 => (
            CHAT,
            format!(
                r#"{{{messages},"max_tokens":20,"stream":true,"tools":[{{"type":"function","function":{{"name":"now","parameters":{{"type":"object"}}}}}}]}}"#
            ),
        ),
        // The engine has no guided decoding, so the request is refused.
        7 => (
            CHAT,
            format!(r#"{{{messages},"max_tokens":5,"response_format":{{"type":"json_object"}}}}"#),
        ),
        8 => (CHAT, format!(r#"{{{messages},"max_tokens":5"#)),
        9 => (
            COMPLETIONS,
            format!(r#"{{{prompt},"no_such_field":{number}}}"#),
        ),
        10 => ("/v1/responses", format!("{{{input}}}")),
        11 => ("/v1/responses", format!(r#"{{{input},"stream":true}}"#)),
        12 => (
            "/v1/messages",
            format!(r#"{{{messages},"max_tokens":5,"stream":true}}"#),
        ),
        13 => ("/tokenize", format!("{{{prompt}}}")),
        14 => (
            COMPLETIONS,
            format!(r#"{{{prompt},"max_tokens":5,"stop":["a","bc"],"echo":true}}"#),
        ),
        _ => ("/v1/models", String::new()),
    }
}

/// The results of a run.
#[derive(Debug)]
struct Report {
    requests: u64,
    seconds: f64,
    seen: Seen,
    samples: Vec<Sample>,
}

impl Report {
    fn new(requests: u64, elapsed: Duration, seen: Seen, samples: Vec<Sample>) -> Self {
        Self {
            requests,
            seconds: elapsed.as_secs_f64(),
            seen,
            samples,
        }
    }

    /// The samples after the first tenth: by then, the state kept for requests has its full size.
    fn settled(&self) -> Vec<Sample> {
        let after = |sample: &&Sample| sample.requests >= self.requests / 10;
        self.samples.iter().filter(after).copied().collect()
    }

    /// Medians of the first and the last fifth of the settled samples.
    fn ends(&self) -> (u64, u64) {
        let settled = self.settled();
        let fifth = (settled.len() / 5).max(1);
        let first = median(settled.iter().take(fifth));
        let last = median(settled.iter().rev().take(fifth));
        (first, last)
    }

    /// Growth in bytes per 100 000 requests, by least squares over the settled samples.
    fn slope(&self) -> f64 {
        let settled = self.settled();
        let count = settled.len().max(1) as f64;
        let mean = |of: fn(&Sample) -> f64| settled.iter().map(of).sum::<f64>() / count;
        let (x, y) = (mean(|it| it.requests as f64), mean(|it| it.bytes as f64));
        let (mut both, mut square) = (0.0, 0.0);
        for sample in &settled {
            let away = sample.requests as f64 - x;
            both += away * (sample.bytes as f64 - y);
            square += away * away;
        }
        if square > 0.0 {
            100_000.0 * both / square
        } else {
            0.0
        }
    }

    /// # Errors
    /// A request failed, or memory grew by more than a tenth and 16 MiB.
    fn verdict(&self) -> anyhow::Result<()> {
        let (first, last) = self.ends();
        let failed = self.seen.answers.iter().find(|(status, _)| **status >= 500);
        if let Some((status, count)) = failed {
            bail!("{count} requests were answered {status}");
        }
        if let Some(error) = self.seen.errors.first() {
            bail!(
                "{} requests failed; the first: {error}",
                self.seen.errors.len()
            );
        }
        if last > first + MIN_TOLERANCE_BYTES.max(first / 10) {
            bail!(
                "memory grew from {} to {} MB",
                first / 1_000_000,
                last / 1_000_000
            );
        }
        Ok(())
    }

    fn to_json(&self) -> serde_json::Value {
        let (first, last) = self.ends();
        let samples: Vec<_> = self
            .samples
            .iter()
            .map(|it| json!([it.requests, it.bytes]))
            .collect();
        let answers: BTreeMap<String, u64> = self
            .seen
            .answers
            .iter()
            .map(|(status, count)| (status.to_string(), *count))
            .collect();
        json!({
            "requests": self.requests,
            "seconds": self.seconds,
            "answers": answers,
            "errors": self.seen.errors,
            "rss_first_bytes": first,
            "rss_last_bytes": last,
            "slope_bytes_per_100000_requests": self.slope(),
            "samples": samples,
        })
    }

    fn table(&self) -> String {
        let mut text = "| requests | RSS, MB |\n|---|---|\n".to_owned();
        let step = (self.samples.len() / 10).max(1);
        for sample in self.samples.iter().step_by(step) {
            // Writing to a string cannot fail.
            let _ = writeln!(
                text,
                "| {} | {:.1} |",
                sample.requests,
                sample.bytes as f64 / 1e6
            );
        }
        let answers: Vec<String> = self
            .seen
            .answers
            .iter()
            .map(|(status, count)| match status {
                0 => format!("{count} left"),
                status => format!("{count} x {status}"),
            })
            .collect();
        let (first, last) = self.ends();
        let _ = writeln!(
            text,
            "\n{} requests in {:.0} s, {:.0} a second: {}.\nBehind the first tenth RSS went from {:.1} to {:.1} MB, {:+.2} MB for 100 000 requests.",
            self.requests,
            self.seconds,
            self.requests as f64 / self.seconds.max(0.001),
            answers.join(", "),
            first as f64 / 1e6,
            last as f64 / 1e6,
            self.slope() / 1e6,
        );
        text
    }
}

fn median<'a>(samples: impl Iterator<Item = &'a Sample>) -> u64 {
    let mut bytes: Vec<u64> = samples.map(|sample| sample.bytes).collect();
    bytes.sort_unstable();
    bytes.get(bytes.len() / 2).copied().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(bytes: impl Fn(u64) -> u64) -> Report {
        let samples = (0..100).map(|step| Sample {
            requests: step * 10_000,
            bytes: bytes(step),
        });
        Report::new(
            1_000_000,
            Duration::from_secs(100),
            Seen::default(),
            samples.collect(),
        )
    }

    #[test]
    fn memory_may_rise_in_the_first_tenth() {
        let flat = report(|step| 40_000_000 + step.min(9) * 10_000_000);
        assert!(flat.slope().abs() < 1.0);
        flat.verdict().unwrap();
        assert!(flat.table().contains("10000 a second"), "{}", flat.table());
    }

    #[test]
    fn memory_that_grows_is_an_error() {
        let leak = report(|step| 40_000_000 + step * 400_000);
        assert!((leak.slope() - 4_000_000.0).abs() < 1_000.0);
        let error = leak.verdict().unwrap_err().to_string();
        assert!(error.starts_with("memory grew from 4"), "{error}");
    }

    #[test]
    fn requests_that_fail_are_an_error() {
        let mut report = report(|_| 40_000_000);
        report.seen.answers.insert(400, 7);
        report.verdict().unwrap();
        report.seen.answers.insert(503, 1);
        let error = report.verdict().unwrap_err().to_string();
        assert_eq!(error, "1 requests were answered 503");
    }

    #[test]
    fn a_third_is_left_of_every_kind() {
        let left: std::collections::BTreeSet<u64> =
            (0..48).filter(|it| it % 3 == 0).map(|it| it % 16).collect();
        assert_eq!(left.len(), 16);
        for number in 0..48 {
            let (path, body) = request(number);
            assert!(path.starts_with('/'));
            assert!(body.is_empty() == (number % 16 == 15));
        }
    }
}
