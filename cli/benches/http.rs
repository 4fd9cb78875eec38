//! What the server itself costs: CPU time for each token and request, memory, and the time until it is ready.
//!
//! `cargo bench -p genset --bench http` starts the `genset` binary with `out=sample`, drives it over loopback from this
//! process, and reads the server's own CPU time and memory from `/proc`, so the client's work does not count. With
//! `-- --json` it prints JSON. It takes about half a minute; run by `cargo test` it does nothing.

mod support;

use std::fmt::Write as _;
use std::io::{self, Write as _};
use std::net::SocketAddr;
use std::process::ExitCode;
use std::time::Duration;

use rustix::process::Signal;
use serde_json::{Value, json};
use tokio::time::Instant;

use self::support::load::{LOAD_TIME, Load, WARM_UP, drive};
use self::support::process::{Genset, free_address, wait_for};
use self::support::{hardware, per, round};

/// Starts, of which the median is told.
const STARTS: usize = 10;

const LOADS: [Load; 4] = [
    Load {
        name: "64 streams, no delay",
        streams: 64,
        tokens: 128,
        token_delay_ms: 0,
    },
    Load {
        name: "256 streams, no delay",
        streams: 256,
        tokens: 128,
        token_delay_ms: 0,
    },
    Load {
        name: "256 streams, a token every 7 ms",
        streams: 256,
        tokens: 128,
        token_delay_ms: 7,
    },
    Load {
        name: "16 streams of one token",
        streams: 16,
        tokens: 1,
        token_delay_ms: 0,
    },
];

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let has = |word: &str| words.iter().any(|given| given == word);
    if !has("--bench") || has("--test") {
        return ExitCode::SUCCESS;
    }
    let measured = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .and_then(|runtime| runtime.block_on(measure()));
    let shown = measured.and_then(|results| {
        let text = if has("--json") {
            format!("{results:#}\n")
        } else {
            table(&results)
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

async fn measure() -> io::Result<Value> {
    let mut starts = Vec::new();
    for _ in 0..STARTS {
        let mut server = Server::start(0).await?;
        starts.push(server.ready_after);
        server.genset.end(Signal::TERM).await?;
    }
    starts.sort();
    let mut loads = Vec::new();
    for load in &LOADS {
        loads.push(measure_load(load).await?);
    }
    Ok(json!({
        "hardware": hardware(),
        "ready_after_ms": starts.get(STARTS / 2).map(|time| round(time.as_secs_f64() * 1e3, 10.0)),
        "loads": loads,
    }))
}

async fn measure_load(load: &Load) -> io::Result<Value> {
    let mut server = Server::start(load.token_delay_ms).await?;
    let idle = server.genset.memory_mib("VmRSS")?;
    drive(server.address, load, WARM_UP).await?;
    let (cpu, began) = (server.genset.cpu_seconds()?, Instant::now());
    let done = drive(server.address, load, LOAD_TIME).await?;
    let wall = began.elapsed().as_secs_f64();
    let cpu = server.genset.cpu_seconds()? - cpu;
    let result = json!({
        "load": load.name,
        "requests": done.requests,
        "tokens": done.tokens,
        "events_per_token": round(done.events as f64 / done.tokens as f64, 100.0),
        "tokens_per_second": per(done.tokens, wall),
        "tokens_per_cpu_second": per(done.tokens, cpu),
        "cpu_us_per_request": round(cpu * 1e6 / done.requests as f64, 10.0),
        "cpu_us_per_token": round(cpu * 1e6 / done.tokens as f64, 100.0),
        "cpu_seconds": round(cpu, 100.0),
        "wall_seconds": round(wall, 100.0),
        "idle_rss_mib": idle,
        "rss_mib": server.genset.memory_mib("VmRSS")?,
        "peak_rss_mib": server.genset.memory_mib("VmHWM")?,
    });
    server.genset.end(Signal::TERM).await?;
    Ok(result)
}

fn table(results: &Value) -> String {
    let columns = [
        ("requests", "requests"),
        ("tokens/CPU s", "tokens_per_cpu_second"),
        ("tokens/s", "tokens_per_second"),
        ("events/token", "events_per_token"),
        ("CPU us/token", "cpu_us_per_token"),
        ("CPU us/request", "cpu_us_per_request"),
        ("idle MiB", "idle_rss_mib"),
        ("after MiB", "rss_mib"),
        ("peak MiB", "peak_rss_mib"),
    ];
    let mut text = format!(
        "{}\n\n{:<32}",
        results["hardware"].as_str().unwrap_or_default(),
        "load"
    );
    for (title, _) in columns {
        let _ = write!(text, " {title:>14}");
    }
    text.push('\n');
    for load in results["loads"].as_array().into_iter().flatten() {
        let _ = write!(text, "{:<32}", load["load"].as_str().unwrap_or_default());
        for (_, key) in columns {
            let number = load[key].as_f64().unwrap_or(f64::NAN);
            let _ = write!(text, " {number:>14}");
        }
        text.push('\n');
    }
    let _ = writeln!(
        text,
        "\nready after {} ms (median of {STARTS} starts)",
        results["ready_after_ms"]
    );
    text
}

/// The program that is measured.
struct Server {
    genset: Genset,
    address: SocketAddr,
    ready_after: Duration,
}

impl Server {
    /// Starts it and waits until `/ready` says 200.
    async fn start(token_delay_ms: u32) -> io::Result<Self> {
        let address = free_address()?;
        let began = Instant::now();
        let genset = Genset::run(&[
            "in=http",
            "out=sample",
            "--http-port",
            &address.port().to_string(),
            "--token-delay-ms",
            &token_delay_ms.to_string(),
        ])?;
        wait_for(address, "/ready", "").await?;
        Ok(Self {
            genset,
            address,
            ready_after: began.elapsed(),
        })
    }
}
