//! Tokens a second through the boundary, at 64 streams, and what they cost this side in CPU time.
//!
//! `cargo bench -p genset-engine-subprocess --bench throughput`. The engine makes a token for every stream in each step and does
//! nothing else, so what is measured is the package and the crate. Linux only: CPU time is read from /proc.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::print_stdout,
    unreachable_pub,
    reason = "a benchmark fails by panicking and prints its figures"
)]

#[path = "../tests/support/mod.rs"]
mod support;

use std::path::Path;

use futures_util::StreamExt;
use futures_util::future::join_all;
use genset_backend_common::{GenerateRequest, LLMEngine, RequestContext, StartContext};
use genset_engine_subprocess::SubprocessEngine;
use tokio::time::Instant;

const STREAMS: u32 = 64;
const TOKENS_A_STREAM: u32 = 8192;
/// Of /proc: a hundredth of a second, on every Linux there is.
const TICK_S: f64 = 0.01;

fn main() {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    for tokens_a_chunk in [1, 4] {
        runtime.block_on(measure(tokens_a_chunk));
    }
}

async fn measure(tokens_a_chunk: u32) {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("benches/stepping.py");
    let config = support::program(&script).with_args([tokens_a_chunk.to_string()]);
    let engine = SubprocessEngine::new(config);
    engine.start(StartContext::detached(1)).await.unwrap();
    read_all(&engine, TOKENS_A_STREAM / 16).await;
    let (began, cpu) = (Instant::now(), cpu_s());
    let tokens = f64::from(read_all(&engine, TOKENS_A_STREAM).await);
    let (wall, cpu) = (began.elapsed().as_secs_f64(), cpu_s() - cpu);
    println!(
        "{tokens_a_chunk} tokens a chunk: {:.0} tokens/s, {:.2} us CPU a token on this side",
        tokens / wall,
        cpu / tokens * 1e6
    );
    engine.cleanup().await.unwrap();
}

/// Reads the answers to one request on each stream; the number of tokens.
async fn read_all(engine: &SubprocessEngine, max_tokens: u32) -> u32 {
    let answers = (0..STREAMS).map(async |stream| {
        let mut request = GenerateRequest::from_tokens("stepping", vec![1]);
        request.stop.max_tokens = Some(max_tokens);
        let ctx = RequestContext::new(stream.to_string());
        let outputs = engine.generate(request, ctx).await.unwrap();
        let counts = outputs.map(|output| output.unwrap().token_count());
        counts.fold(0, async |sum, count| sum + count).await
    });
    join_all(answers).await.into_iter().sum()
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
