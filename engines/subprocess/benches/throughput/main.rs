//! Measures the cost of the process boundary: tokens per second at 64 streams and the CPU time of this process per token, the
//! time to first token, and the memory of this process. The engines are one on the Python package that answers each request
//! separately, one whose steps answer all requests, and one in Rust.
//!
//! `cargo bench -p genset-engine-subprocess --bench throughput`. The engines make a chunk for every stream in each step and do
//! nothing else, so this measures the package and the crate. Prints medians of five. Linux only: CPU time and memory are read
//! from /proc.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::print_stdout,
    clippy::wildcard_enum_match_arm,
    unreachable_pub,
    reason = "a benchmark fails by panicking and prints its figures"
)]

mod rust_child;
#[path = "../../tests/support/mod.rs"]
mod support;

use std::path::Path;

use futures_util::StreamExt;
use futures_util::future::join_all;
use genset_backend_common::{GenerateRequest, LLMEngine, RequestContext, StartContext};
use genset_engine_subprocess::{SubprocessConfig, SubprocessEngine};
use tokio::time::Instant;

const STREAMS: u32 = 64;
const TOKENS_A_STREAM: u32 = 8192;
const REPEATS: usize = 5;
const FIRST_TOKENS: usize = 400;
/// The clock tick of /proc: a hundredth of a second on Linux.
const TICK_S: f64 = 0.01;

fn main() {
    if let Ok(fd) = std::env::var("GENSET_ENGINE_FD") {
        let tokens_a_chunk = std::env::args().nth(1).unwrap();
        return rust_child::serve(fd.parse().unwrap(), tokens_a_chunk.parse().unwrap());
    }
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    println!("memory of this side before: {:.1} MiB", memory_mib("VmRSS"));
    for child in [Child::PythonEach, Child::PythonBatch, Child::Rust] {
        for tokens_a_chunk in [1, 4] {
            runtime.block_on(measure(child, tokens_a_chunk));
        }
    }
    println!(
        "memory of this side: {:.1} MiB, at most {:.1} MiB",
        memory_mib("VmRSS"),
        memory_mib("VmHWM")
    );
}

/// The engine that the process runs.
#[derive(Debug, Clone, Copy)]
enum Child {
    PythonEach,
    PythonBatch,
    Rust,
}

/// The process of the engine.
fn process(child: Child, tokens_a_chunk: u32) -> SubprocessConfig {
    let script = |name: &str| {
        let benches = Path::new(env!("CARGO_MANIFEST_DIR")).join("benches");
        support::program(&benches.join(name))
    };
    let config = match child {
        Child::PythonEach => script("stepping.py"),
        Child::PythonBatch => script("batching.py"),
        Child::Rust => SubprocessConfig::new(std::env::current_exe().unwrap()),
    };
    config.with_args([tokens_a_chunk.to_string()])
}

async fn measure(child: Child, tokens_a_chunk: u32) {
    let engine = SubprocessEngine::new(process(child, tokens_a_chunk));
    engine.start(StartContext::detached(1)).await.unwrap();
    read_all(&engine, TOKENS_A_STREAM / 16).await;
    let (mut rates, mut costs) = (Vec::new(), Vec::new());
    for _ in 0..REPEATS {
        let (began, cpu) = (Instant::now(), cpu_s());
        let tokens = f64::from(read_all(&engine, TOKENS_A_STREAM).await);
        let (wall, cpu) = (began.elapsed().as_secs_f64(), cpu_s() - cpu);
        rates.push(tokens / wall);
        costs.push(cpu / tokens * 1e6);
    }
    let mut delays = Vec::new();
    for _ in 0..FIRST_TOKENS {
        delays.push(first_token_us(&engine).await);
    }
    println!(
        "{child:?}, {tokens_a_chunk} tokens a chunk: {:.0} tokens/s, {:.2} us CPU a token on this side, first token after {:.0} us",
        median(rates),
        median(costs),
        median(delays)
    );
    engine.cleanup().await.unwrap();
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn request(max_tokens: u32) -> GenerateRequest {
    let mut request = GenerateRequest::from_tokens("stepping", vec![1]);
    request.stop.max_tokens = Some(max_tokens);
    request
}

/// Reads the answers to one request on each stream; returns the number of tokens.
async fn read_all(engine: &SubprocessEngine, max_tokens: u32) -> u32 {
    let answers = (0..STREAMS).map(async |stream| {
        let ctx = RequestContext::new(stream.to_string());
        let outputs = engine.generate(request(max_tokens), ctx).await.unwrap();
        let counts = outputs.map(|output| output.unwrap().token_count());
        counts.fold(0, async |sum, count| sum + count).await
    });
    join_all(answers).await.into_iter().sum()
}

/// The time from a request to its first token while nothing else runs. The engine's own share is negligible.
async fn first_token_us(engine: &SubprocessEngine) -> f64 {
    let began = Instant::now();
    let ctx = RequestContext::new("one");
    let mut outputs = engine.generate(request(4), ctx).await.unwrap();
    outputs.next().await.unwrap().unwrap();
    let delay = began.elapsed();
    while outputs.next().await.is_some() {}
    delay.as_secs_f64() * 1e6
}

/// CPU seconds of this process, user and system.
fn cpu_s() -> f64 {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap();
    let fields: Vec<&str> = stat
        .rsplit(')')
        .next()
        .unwrap()
        .split_whitespace()
        .collect();
    let ticks: f64 = fields[11..13]
        .iter()
        .map(|f| f.parse::<f64>().unwrap())
        .sum();
    ticks * TICK_S
}

/// Memory of this process by its name in /proc, in MiB.
fn memory_mib(name: &str) -> f64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with(name)).unwrap();
    let kib: f64 = line.split_whitespace().nth(1).unwrap().parse().unwrap();
    kib / 1024.0
}
