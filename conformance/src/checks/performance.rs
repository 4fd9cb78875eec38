//! PF: measurements of speed. They are recorded and never judged, since they depend on the model and the machine. Comparing two
//! reports of one engine on one machine shows what has become slower.
//!
//! They run in real time on several threads, whatever clock the other checks use. A build without optimizations has other
//! numbers.
//!
//! Changed from the catalogue, with the reason:
//! - Allocations per token: counting them needs the process's global allocator, which a library must not set.
//! - Tokens per second and core: an engine's cores may belong to a device or another process, so tokens are measured by
//!   concurrency (PF02), which is the catalogue's CC11 too.

use std::time::Duration;

use genset_backend_common::output::{self, Finish};
use genset_backend_common::{GenerateRequest, Output, RequestContext};
use tokio::time::Instant;

use futures_util::StreamExt;

use super::pressure::{ensure_complete, request};
use crate::check::{Check, CheckResult, Stop, check, ensure};
use crate::trial::{Live, Trial};

pub(super) const CHECKS: &[Check] = &[
    check!(multi_thread "PF01", Info, Tokens, "the time to the first token, and between tokens, of a request alone",
        clause: "LLMEngine::generate",
        breaks: "nothing by itself: a growth between two reports is what users wait for", one_alone),
    check!(multi_thread "PF02", Info, Tokens, "the tokens per second of 1, 4, 16 and 32 requests at once",
        clause: "LLMEngine::generate",
        breaks: "nothing by itself: a fall between two reports is devices to buy", throughput),
    check!(multi_thread "PF03", Info, Tokens, "the framework's own time per stream and per token, without an engine",
        clause: "output::stream",
        breaks: "nothing by itself: it is the part of the other measurements that no engine can help", framework),
];

/// The number of requests to measure, unless together they exceed the time budget.
const SAMPLES: usize = 9;
const BUDGET: Duration = Duration::from_millis(300);
/// The number of tokens of a measured answer, and of its prompt.
const TOKENS: u32 = 16;
const PROMPT: usize = 16;
/// The numbers of concurrent requests.
const CONCURRENCIES: [u32; 4] = [1, 4, 16, 32];
/// The number of tokens through a stream without an engine.
const FRAMEWORK_TOKENS: u32 = 10_000;

/// Times of several requests.
#[derive(Default)]
pub(super) struct Times {
    pub(super) first: Vec<Duration>,
    pub(super) between: Vec<Duration>,
}

impl Times {
    /// Sends a request and records its times.
    pub(super) async fn take(&mut self, live: &Live, request: GenerateRequest) -> CheckResult {
        let started = Instant::now();
        let mut running = live.generate(request).await?;
        running.read_tokens(1).await?;
        let first = started.elapsed();
        let answer = running.finish().await?;
        ensure!(
            answer.finished().is_some(),
            "the answer ended with {:?}",
            answer.error()
        );
        let rest = u32::try_from(answer.generated().len()).unwrap_or(u32::MAX);
        self.first.push(first);
        self.between
            .push(started.elapsed().saturating_sub(first) / rest.max(1));
        Ok(())
    }

    /// Whether there is time for another sample.
    pub(super) fn wants_more(&self, begun: Instant) -> bool {
        self.first.is_empty() || (self.first.len() < SAMPLES && begun.elapsed() < BUDGET)
    }
}

pub(super) fn median(mut times: Vec<Duration>) -> Duration {
    times.sort_unstable();
    times.get(times.len() / 2).copied().unwrap_or_default()
}

pub(super) fn ns(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

fn us(time: Duration) -> u64 {
    ns(time) / 1000
}

async fn one_alone(trial: Trial) -> CheckResult {
    let live = trial.start().await?;
    let (begun, mut times) = (Instant::now(), Times::default());
    for seed in 0.. {
        if !times.wants_more(begun) {
            break;
        }
        times
            .take(&live, request(&live, PROMPT, seed, TOKENS))
            .await?;
    }
    trial.measured("first_token_us", us(median(times.first)));
    trial.measured("between_tokens_us", us(median(times.between)));
    Ok(())
}

async fn throughput(trial: Trial) -> CheckResult {
    let live = trial.start().await?;
    let most = live.config.max_num_seqs.unwrap_or(u32::MAX);
    for concurrency in CONCURRENCIES.into_iter().filter(|count| *count <= most) {
        let requests = (0..concurrency).map(|seed| request(&live, PROMPT, u64::from(seed), TOKENS));
        let started = Instant::now();
        for answer in live.answers(requests.collect()).await? {
            ensure_complete(&answer, TOKENS, "one of several answers")?;
        }
        let seconds = started.elapsed().as_secs_f64().max(1e-9);
        let per_second = f64::from(concurrency * TOKENS) / seconds;
        trial.measured(
            format!("at_{concurrency:02}_tokens_per_s"),
            whole(per_second),
        );
    }
    Ok(())
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "a float becomes the nearest integer there is"
)]
fn whole(value: f64) -> u64 {
    value.round() as u64
}

async fn framework(trial: Trial) -> CheckResult {
    let (mut first, mut each) = (Vec::new(), Vec::new());
    for _ in 0..SAMPLES {
        let (to_first, in_all) = empty_stream().await?;
        first.push(to_first);
        each.push(in_all / FRAMEWORK_TOKENS);
    }
    trial.measured("first_token_ns", ns(median(first)));
    trial.measured("per_token_ns", ns(median(each)));
    Ok(())
}

/// A stream whose tokens cost nothing: the time to its first token, and to its end.
async fn empty_stream() -> Result<(Duration, Duration), Stop> {
    let started = Instant::now();
    let ctx = RequestContext::new("framework");
    let mut outputs = output::stream(ctx, |out| async move {
        for token in 0..FRAMEWORK_TOKENS {
            out.token(token).await?;
        }
        Ok(Finish::length())
    });
    let (mut first, mut count) = (None, 0);
    while let Some(item) = outputs.next().await {
        first.get_or_insert_with(|| started.elapsed());
        count += item.as_ref().map_or(0, Output::token_count);
    }
    ensure!(
        count == FRAMEWORK_TOKENS,
        "{count} of {FRAMEWORK_TOKENS} tokens came through"
    );
    Ok((first.unwrap_or_default(), started.elapsed()))
}
