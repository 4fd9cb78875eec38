//! The real time that a thousand streams cost: `cargo bench -p genset-engine-mocker`.
//!
//! One engine with the default time models at `speedup_ratio` 1, a runtime of one thread, and a reader per stream. It prints
//! the CPU time of the whole process, readers included, divided by the elapsed time.

#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "a benchmark prints, and fails by panicking"
)]

use std::time::Duration;

use futures_util::StreamExt;
use futures_util::future::join_all;
use genset_backend_common::{GenerateRequest, LLMEngine, RequestContext, StartContext};
use genset_engine_mocker::{MockerArgs, MockerEngine, MockerModel};
use tokio::time::Instant;

const STREAMS: u32 = 1000;
const PROMPT_TOKENS: u32 = 128;
const ANSWER_TOKENS: u32 = 400;

fn main() {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    runtime.block_on(measure());
}

async fn measure() {
    let args = MockerArgs {
        max_num_seqs: STREAMS,
        num_gpu_blocks: 65_536,
        ..MockerArgs::default()
    };
    let engine = MockerEngine::try_new(args, MockerModel::new(32_000, 8192)).unwrap();
    engine.start(StartContext::detached(1)).await.unwrap();
    let (began, cpu) = (Instant::now(), cpu_time());
    let tokens: u32 = join_all((0..STREAMS).map(|number| read(&engine, number)))
        .await
        .into_iter()
        .sum();
    let (passed, cpu) = (began.elapsed(), cpu_time() - cpu);
    engine.cleanup().await.unwrap();
    println!(
        "{STREAMS} streams, {tokens} tokens in {:.1} s: {:.1} % of a core, {:.2} us a token",
        passed.as_secs_f64(),
        100.0 * cpu.as_secs_f64() / passed.as_secs_f64(),
        1e6 * cpu.as_secs_f64() / f64::from(tokens),
    );
}

async fn read(engine: &MockerEngine, number: u32) -> u32 {
    let prompt = (0..PROMPT_TOKENS).map(|place| (number + place) % 32_000);
    let mut request = GenerateRequest::from_tokens("m", prompt.collect());
    request.stop.max_tokens = Some(ANSWER_TOKENS);
    let ctx = RequestContext::new(number.to_string());
    let mut outputs = engine.generate(request, ctx).await.unwrap();
    let mut tokens = 0;
    while let Some(item) = outputs.next().await {
        tokens += item.unwrap().token_count();
    }
    tokens
}

/// The CPU time of this process so far, in user space and in the kernel.
fn cpu_time() -> Duration {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap();
    // The name, in parentheses, may contain spaces, so fields are counted after it. A tick is a hundredth of a second.
    let fields = stat.rsplit(')').next().unwrap();
    let ticks = fields.split_whitespace().skip(11).take(2);
    let ticks: u64 = ticks.map(|field| field.parse::<u64>().unwrap()).sum();
    Duration::from_millis(ticks * 10)
}
