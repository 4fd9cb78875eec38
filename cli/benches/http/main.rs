//! The cost of the server itself: CPU time for each token and request, memory, and the time until it is ready.
//!
//! `cargo bench -p genset --bench http` starts the `genset` binary with `out=sample`, drives it over loopback from this process,
//! and reads the server's own CPU time and memory from `/proc`, so the client's work does not count. Its parts are `starts`,
//! `loads`, `prompts`, `health` and `memory`; `-- loads health` runs two of them. Without a name all run, which takes about a
//! minute. With `-- --json` it prints JSON. Run by `cargo test` it does nothing.

#[path = "../support/mod.rs"]
mod support;

mod health;
mod loads;
mod memory;
mod prompts;
mod server;
mod tables;

use std::io;
use std::process::ExitCode;

use serde_json::{Map, Value, json};

use self::server::Server;
use self::support::{Words, hardware, round};

/// The number of starts for the median.
const STARTS: usize = 10;

const PARTS: [&str; 5] = ["starts", "loads", "prompts", "health", "memory"];

fn main() -> ExitCode {
    support::main(measure, tables::all)
}

/// Measures the named parts, or all.
async fn measure(words: Words) -> io::Result<Value> {
    let are_named = PARTS.iter().any(|part| words.has(part));
    let mut results = Map::new();
    results.insert("hardware".into(), hardware().into());
    for part in PARTS {
        if are_named && !words.has(part) {
            continue;
        }
        let result = match part {
            "starts" => starts().await?,
            "loads" => loads::measure().await?,
            "prompts" => prompts::measure().await?,
            "health" => health::measure().await?,
            _ => memory::measure().await?,
        };
        results.insert(part.into(), result);
    }
    Ok(results.into())
}

async fn starts() -> io::Result<Value> {
    let mut starts = Vec::new();
    for _ in 0..STARTS {
        let server = Server::start(&[]).await?;
        starts.push(server.ready_after);
        server.end().await?;
    }
    starts.sort();
    let median = starts.get(STARTS / 2);
    let median = median.map(|time| round(time.as_secs_f64() * 1e3, 10.0));
    Ok(json!({"starts": STARTS, "ready_after_ms": median}))
}
