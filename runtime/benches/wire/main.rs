//! The cost of the request plane over TCP: CPU time per item, latency, memory per stream, and time to detect a death.
//!
//! `cargo bench -p genset-runtime --bench wire` measures each case between two fresh processes. Both run this program, in the
//! roles `worker` and `caller`, and both are measured. `-- --quick` shortens each case and is less exact. `-- --json` prints the
//! figures as JSON. It takes about a minute; under `cargo test` it does nothing.
//!
//! - `worker`: responds. - `caller`: sends requests and measures. - `process`: the two processes, and their figures in `/proc`.

mod caller;
mod process;
mod worker;

use std::error::Error;
use std::fmt::Write as _;
use std::io::Write as _;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;

use genset_backend_common::MetricsRegistry;
use genset_runtime::discovery::{FileDiscovery, FileDiscoveryConfig};
use genset_runtime::plane::{TcpConfig, WireConfig, WirePlane};
use genset_runtime::{Component, Runtime};
use serde_json::{Value, json};

use self::caller::Case;

/// The allocator of the `genset` binary.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

type Outcome<T> = Result<T, Box<dyn Error + Send + Sync>>;

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let done = match words[..] {
        ["worker", directory] => in_runtime(worker::serve(Path::new(directory))),
        ["caller", directory, pid, case] => in_runtime(caller::run(directory, pid, case)),
        _ if !words.contains(&"--bench") || words.contains(&"--test") => Ok(()),
        _ => in_runtime(measure(
            words.contains(&"--quick"),
            words.contains(&"--json"),
        )),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            #[expect(clippy::print_stderr, reason = "a benchmark says why it failed")]
            {
                eprintln!("error: {error}");
            }
            ExitCode::FAILURE
        }
    }
}

fn in_runtime(role: impl Future<Output = Outcome<()>>) -> Outcome<()> {
    tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()?
        .block_on(role)
}

/// The component that both processes use, in a directory of their own.
fn component(directory: &Path) -> Outcome<Component> {
    let metrics = MetricsRegistry::default();
    let discovery = FileDiscovery::open(directory.into(), FileDiscoveryConfig::default())?;
    let plane = WirePlane::tcp(TcpConfig::default(), WireConfig::default(), &metrics)?;
    let runtime = Runtime::on(None, Arc::new(discovery), Arc::new(plane), metrics);
    Ok(runtime.namespace("bench")?.component("wire")?)
}

async fn measure(is_quick: bool, is_json: bool) -> Outcome<()> {
    let (ms, streams, samples) = if is_quick {
        (300, 1000, 200)
    } else {
        (4000, 10_000, 3000)
    };
    let mut cases = [1, 64, 256, 1024]
        .map(|streams| Case::items(streams, 0, ms))
        .to_vec();
    cases.push(Case::items(256, 7000, ms));
    cases.push(Case::RoundTrip { samples });
    cases.push(Case::OneWay { samples });
    cases.push(Case::Idle { streams });
    cases.push(Case::Active { streams });
    cases.extend(vec![Case::Kill; if is_quick { 1 } else { 5 }]);
    let mut results = Vec::new();
    for case in &cases {
        let figures = process::run(case).await?;
        results.push(json!({"case": case.to_string(), "figures": figures}));
    }
    let text = if is_json {
        format!(
            "{:#}\n",
            json!({"hardware": process::hardware(), "cases": results})
        )
    } else {
        list(&results)
    };
    std::io::stdout().write_all(text.as_bytes())?;
    Ok(())
}

fn list(results: &[Value]) -> String {
    let mut text = format!("{}\n\n", process::hardware());
    for result in results {
        let _ = write!(text, "{:<44}", result["case"].as_str().unwrap_or_default());
        for (name, figure) in result["figures"].as_object().into_iter().flatten() {
            let _ = write!(text, "  {} {figure}", name.replace('_', " "));
        }
        text.push('\n');
    }
    text
}
