//! What the server itself costs: CPU time for each token and request, memory, and the time until it is ready.
//!
//! `cargo bench -p genset --bench http` starts the `genset` binary with `out=sample`, drives it over loopback from this
//! process, and reads the server's own CPU time and memory from `/proc`, so the client's work does not count. It has parts:
//! `starts`, `loads`, `prompts`, `health` and `memory`; `-- loads health` runs two of them, and without a name all run, which
//! takes about a minute. With `-- --json` it prints JSON. Run by `cargo test` it does nothing.

#[path = "../support/mod.rs"]
mod support;

mod health;
mod loads;
mod memory;
mod prompts;
mod server;
mod tables;

use std::io::{self, Write as _};
use std::process::ExitCode;

use serde_json::{Map, Value, json};

use self::server::Server;
use self::support::{hardware, round};

/// Starts, of which the median is told.
const STARTS: usize = 10;

const PARTS: [&str; 5] = ["starts", "loads", "prompts", "health", "memory"];

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let has = |word: &str| words.iter().any(|given| given == word);
    if !has("--bench") || has("--test") {
        return ExitCode::SUCCESS;
    }
    let named = PARTS.into_iter().filter(|part| has(part)).collect();
    let measured = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .and_then(|runtime| runtime.block_on(measure(named)));
    let shown = measured.and_then(|results| {
        let text = if has("--json") {
            format!("{results:#}\n")
        } else {
            tables::all(&results)
        };
        io::stdout().write_all(text.as_bytes())
    });
    match shown {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Measures the parts that are named, or all.
async fn measure(named: Vec<&str>) -> io::Result<Value> {
    let mut results = Map::new();
    results.insert("hardware".into(), hardware().into());
    for part in PARTS {
        if !named.is_empty() && !named.contains(&part) {
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
