//! MT: metrics and health.
//!
//! Engines publish through the handles in their [`StartContext`](genset_backend_common::StartContext), so the kit reads those.
//! What an engine does not publish is skipped.
//!
//! Changed from the catalogue, with the reason:
//! - MT01: the snapshot is the registry's encoding, which every scrape requests.
//! - MT04: the ranks are declared once, at start; the promise is that equal engines declare the same number.
//! - MT05: the Worker reports that it serves. An engine can only report that it is dead, and must not do so while it is alive
//!   or when it is stopped in order. ER03 covers the other side.
//! - MT06: the Worker's canary, a small request, checks an engine's health.
//! - MT07 (the gauges of a model server): the Worker makes these gauges, with the right names and types, from the load that its
//!   engine publishes. So there is no profile to declare; the engine's load must be true.

use std::collections::BTreeMap;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::sync_channel;
use std::time::Duration;

use futures_util::future::{Either, join_all, select, try_join, try_join_all};
use genset_backend_common::{
    CancelReason, DrainContext, EngineError, ErrorKind, GenerateRequest, MetricsRegistry, Output,
    handles::Load,
};
use tokio::sync::watch;

use super::lifecycle::config_of_a_start;
use super::pressure::{long_request, one_after_the_other};
use crate::check::{Check, CheckResult, Stop, check, ensure, fail, skip};
use crate::running::Running;
use crate::trial::{Live, Trial};

pub(super) const CHECKS: &[Check] = &[
    check!("MT01", Core, Tokens, "a scrape of the metrics asks nothing of the engine",
        clause: "MetricsRegistry",
        breaks: "monitoring slows the engine, and a busy engine looks dead", cheap_scrape),
    check!("MT02", Core, Tokens, "the published load returns to zero when nothing runs",
        clause: "LoadPublisher; Load",
        breaks: "the router avoids an idle worker for ever", load_returns),
    check!("MT03", Core, Tokens, "counters never decrease",
        clause: "MetricsRegistry",
        breaks: "rates on dashboards jump, and alerts fire for nothing", counters_grow),
    check!("MT04", Core, Tokens, "engines built alike have the same data-parallel ranks",
        clause: "EngineConfig::data_parallel_size",
        breaks: "requests are routed to ranks that are not there", stable_ranks),
    check!("MT05", Core, Tokens, "an engine that works, or is stopped in order, does not report itself dead",
        clause: "HealthReporter::report_dead",
        breaks: "a cancelled request or a planned stop counts as a crash", not_dead),
    check!("MT06", Strict, Tokens, "a saturated engine answers the canary, or refuses it as overloaded",
        clause: "EngineConfig::canary",
        breaks: "a busy worker is taken for a dead one and killed", canary_under_load),
    check!("MT07", Core, Tokens, "the published load counts every request, within what the engine has",
        clause: "LoadPublisher; Load",
        breaks: "routers and autoscalers act on gauges that are not so: full workers get more, busy ones are stopped", true_load),
    check!("MT08", Strict, Tokens, "the published load tells requests that run from requests that wait",
        clause: "Load::waiting_requests",
        breaks: "a worker with a queue looks like one that is merely busy, and the queue grows where others are idle", running_or_waiting),
    check!("MT09", Strict, Tokens, "the published load has the KV blocks of the requests that run",
        clause: "Load::kv_used_blocks",
        breaks: "a worker whose memory is full looks empty, and gets the longest prompts", blocks_of_what_runs),
];

/// The limit of a scrape, in real time; far above the time of encoding, far below that of an engine's step.
const CHEAP: Duration = Duration::from_millis(5);
/// The best of this many scrapes counts: the machine may be busy.
const SCRAPES: usize = 10;

/// The families that an engine publishes; empty if there are none.
fn scrape(registry: &MetricsRegistry) -> String {
    let text = registry.encode();
    text.trim_end().trim_end_matches("# EOF").to_owned()
}

async fn cheap_scrape(trial: Trial) -> CheckResult {
    let live = trial.start().await?;
    let mut running = live.generate(live.busy_request(0, 64)).await?;
    running.read_tokens(1).await?;
    let metrics = live.start.metrics.clone();
    // On a thread of its own, where time is real, and where a scrape that waits for the engine can be given up.
    let (done, is_done) = sync_channel::<()>(1);
    let thread = std::thread::Builder::new()
        .name("conformance-scrape".into())
        .spawn(move || {
            let best = (0..SCRAPES)
                .map(|_| {
                    let started = tokio::time::Instant::now();
                    drop(metrics.encode());
                    started.elapsed()
                })
                .min();
            let _ = done.send(());
            best
        });
    let Ok(thread) = thread else {
        fail!("the kit cannot start a thread");
    };
    ensure!(
        is_done.recv_timeout(trial.limits().wall / 4).is_ok(),
        "a scrape of the metrics waits for the engine"
    );
    if scrape(&live.start.metrics).is_empty() {
        skip!(NotDeclared, "the engine publishes no metrics");
    }
    let best = thread.join().ok().flatten().unwrap_or_default();
    ensure!(
        best < CHEAP,
        "the fastest of {SCRAPES} scrapes took {:.1} ms",
        best.as_secs_f64() * 1e3
    );
    Ok(())
}

/// Requests that end in every possible way: finished, cancelled, dropped, refused.
async fn every_end(live: &Live) -> CheckResult {
    let limit = live.trial.limits().call;
    drop(live.answer(live.request(4, 4)).await?);
    let mut cancelled = live.generate(live.busy_request(0, 64)).await?;
    cancelled.read_tokens(1).await?;
    cancelled.ctx.cancel(CancelReason::Client);
    drop(cancelled.finish_within(limit).await?);
    let mut dropped = live.generate(live.busy_request(0, 64)).await?;
    dropped.read_tokens(1).await?;
    drop(dropped);
    let mut refused = live.request(4, 4);
    refused.stop.max_tokens = Some(0);
    let ctx = live.context(&refused);
    drop(live.try_generate(refused, ctx).await?);
    Ok(())
}

/// Whether the published load satisfies `is_so` soon.
async fn becomes(
    trial: &Trial,
    load: &mut watch::Receiver<Load>,
    is_so: impl FnMut(&Load) -> bool,
) -> bool {
    let wait = async { load.wait_for(is_so).await.is_ok() };
    let limit = trial.limits().cancel;
    trial.within("a change of the load", limit, wait).await == Ok(true)
}

/// Skips a check of the load if none is published.
async fn ensure_published(trial: &Trial, load: &mut watch::Receiver<Load>) -> CheckResult {
    let wait = async { load.changed().await.is_ok() };
    let limit = trial.limits().cancel;
    if trial.within("the first load", limit, wait).await != Ok(true) {
        skip!(NotDeclared, "the engine publishes no load");
    }
    Ok(())
}

async fn load_returns(trial: Trial) -> CheckResult {
    let live = trial.start().await?;
    let mut load = live.start.load.subscribe();
    let mut running = live.generate(live.busy_request(0, 64)).await?;
    running.read_tokens(1).await?;
    ensure_published(&trial, &mut load).await?;
    drop(running.finish().await?);
    every_end(&live).await?;
    let is_idle = |load: &Load| load.running_requests == 0 && load.waiting_requests == 0;
    let waited = becomes(&trial, &mut load, is_idle).await;
    let last = *load.borrow();
    ensure!(
        waited,
        "nothing runs, and the published load is {} running, {} waiting",
        last.running_requests,
        last.waiting_requests
    );
    Ok(())
}

/// The number of requests that must all be counted; a "busy" flag would count one.
const COUNTED: u32 = 3;

/// Long requests, as many as the engine accepts. An engine with enough seats may still lack memory for all of them.
async fn long_ones(live: &Live) -> Result<Vec<Running>, Stop> {
    let mut all = vec![live.generate(long_request(live, 0)).await?];
    for seed in 1..u64::from(COUNTED) {
        if all.len() >= live.at_once(COUNTED) {
            break;
        }
        let request = long_request(live, seed);
        let ctx = live.context(&request);
        match live.try_generate(request, ctx).await? {
            Ok(running) => all.push(running),
            Err(error) if error.kind() == ErrorKind::Overloaded => break,
            Err(error) => fail!("a good request was refused: {error} ({})", error.kind()),
        }
    }
    Ok(all)
}

async fn true_load(trial: Trial) -> CheckResult {
    let live = trial.start().await?;
    let mut load = live.start.load.subscribe();
    let all = long_ones(&live).await?;
    let counted = u32::try_from(all.len()).unwrap_or(COUNTED);
    ensure_published(&trial, &mut load).await?;
    // More is correct too: a live worker may have other clients.
    let is_all =
        |load: &Load| load.running_requests.saturating_add(load.waiting_requests) >= counted;
    let is_counted = becomes(&trial, &mut load, is_all).await;
    let last = *load.borrow();
    ensure!(
        is_counted,
        "{counted} requests run or wait, and the published load is {} running, {} waiting",
        last.running_requests,
        last.waiting_requests
    );
    within_limits(&live, last)
}

/// Requests beyond those that run at once.
const QUEUED: u32 = 2;

/// The maximum number of sequences sent to fill an engine.
const MOST_SEQUENCES: u32 = 64;

async fn running_or_waiting(trial: Trial) -> CheckResult {
    let live = trial.start().await?;
    let most = live.config.max_num_seqs;
    let Some(most) = most.filter(|most| *most <= MOST_SEQUENCES) else {
        skip!(
            NotDeclared,
            "the engine does not say how many sequences it runs at once, or they are more than {MOST_SEQUENCES}"
        );
    };
    let mut load = live.start.load.subscribe();
    let mut first = live.generate(long_request(&live, 0)).await?;
    first.read_tokens(1).await?;
    ensure_published(&trial, &mut load).await?;
    // Read the streams meanwhile: an engine may compute only what is read, and let the others wait inside `generate`.
    let is_refused = AtomicBool::new(false);
    let others = (1..most + QUEUED).map(|seed| read_long(&live, u64::from(seed), &is_refused));
    let read = try_join(first.finish(), try_join_all(others));
    // One of each is enough: earlier requests may have ended before the last was counted.
    let is_told = |load: &Load| load.waiting_requests >= 1 && load.running_requests >= 1;
    let mut last = load.clone();
    let told = becomes(&trial, &mut load, is_told);
    let is_told = match select(pin!(read), pin!(told)).await {
        Either::Left((read, _)) => {
            read?;
            skip!(
                NotDeclared,
                "all was over before the load could be looked at"
            );
        }
        Either::Right((is_told, _)) => is_told,
    };
    if is_refused.load(Ordering::Relaxed) {
        skip!(NotDeclared, "the engine refuses what it has no place for");
    }
    let last = *last.borrow_and_update();
    ensure!(
        is_told,
        "{} requests were sent to an engine that runs {most} at once, and the published load is {} running, {} waiting",
        most + QUEUED,
        last.running_requests,
        last.waiting_requests
    );
    within_limits(&live, last)
}

/// Sends a long request and reads it to its end. Records a refusal by a full engine.
async fn read_long(live: &Live, seed: u64, is_refused: &AtomicBool) -> CheckResult {
    let request = long_request(live, seed);
    let ctx = live.context(&request);
    let error = match live.try_generate(request, ctx).await? {
        Ok(running) => running.finish().await?.error().map(EngineError::kind),
        Err(error) if error.kind() == ErrorKind::Overloaded => Some(error.kind()),
        Err(error) => fail!("a good request was refused: {error} ({})", error.kind()),
    };
    is_refused.fetch_or(error == Some(ErrorKind::Overloaded), Ordering::Relaxed);
    Ok(())
}

async fn blocks_of_what_runs(trial: Trial) -> CheckResult {
    let live = trial.start().await?;
    let mut load = live.start.load.subscribe();
    let request = long_request(&live, 0);
    let prompt_tokens = u64::from(request.prompt_tokens().unwrap_or(0));
    let mut running = live.generate(request).await?;
    running.read_tokens(1).await?;
    let is_counted = |load: &Load| load.running_requests > 0 && load.kv_total_blocks > 0;
    if !becomes(&trial, &mut load, is_counted).await {
        skip!(NotDeclared, "the engine publishes no KV blocks");
    }
    // Counts only the computed prompt; if the block size is unknown, one block.
    let size = live.config.kv_block_size.map(|size| u64::from(size.get()));
    let least = size.map_or(1, |size| (prompt_tokens / size).max(1));
    let is_enough = |load: &Load| load.kv_used_blocks >= least || load.running_requests == 0;
    let is_enough = becomes(&trial, &mut load, is_enough).await;
    let last = *load.borrow();
    ensure!(
        is_enough,
        "a request runs with a prompt of {prompt_tokens} tokens, and the published load is {} KV blocks of {}, not at least {least}",
        last.kv_used_blocks,
        last.kv_total_blocks
    );
    Ok(())
}

fn within_limits(live: &Live, load: Load) -> CheckResult {
    if let Some(most) = live.config.max_num_seqs {
        ensure!(
            load.running_requests <= most,
            "the published load is {} running, of {most} sequences that the engine runs at once",
            load.running_requests
        );
    }
    let (used, total) = (load.kv_used_blocks, load.kv_total_blocks);
    ensure!(
        used <= total,
        "the published load is {used} KV blocks of {total}"
    );
    if let Some(declared) = live.config.kv_total_blocks.filter(|_| total > 0) {
        ensure!(
            total == declared,
            "the published load says {total} KV blocks in all, the config {declared}"
        );
    }
    Ok(())
}

/// The samples that may only grow: counters, and the counts, sums and buckets of histograms.
fn growing(text: &str) -> BTreeMap<String, f64> {
    let mut counters = Vec::new();
    let mut histograms = Vec::new();
    for line in text.lines() {
        match line.split_whitespace().collect::<Vec<_>>()[..] {
            ["#", "TYPE", name, "counter"] => counters.push(name.to_owned()),
            ["#", "TYPE", name, "histogram"] => histograms.push(name.to_owned()),
            _ => {}
        }
    }
    let may_only_grow = |sample: &str| {
        let name = sample.split('{').next().unwrap_or(sample);
        let is_of = |families: &[String], suffixes: &[&str]| {
            suffixes.iter().any(|suffix| {
                name.strip_suffix(suffix)
                    .is_some_and(|family| families.iter().any(|known| known == family))
            })
        };
        is_of(&counters, &["_total"]) || is_of(&histograms, &["_count", "_sum", "_bucket"])
    };
    text.lines()
        .filter(|line| !line.starts_with('#'))
        .filter_map(|line| {
            // An exemplar may follow the value.
            let line = line.split(" # ").next().unwrap_or(line);
            let (sample, value) = line.rsplit_once(' ')?;
            may_only_grow(sample).then_some((sample.to_owned(), value.parse().ok()?))
        })
        .collect()
}

async fn counters_grow(trial: Trial) -> CheckResult {
    let live = trial.start().await?;
    let mut before = growing(&scrape(&live.start.metrics));
    for round in 1..=4 {
        every_end(&live).await?;
        let now = growing(&scrape(&live.start.metrics));
        for (sample, value) in &before {
            let Some(later) = now.get(sample) else {
                fail!("after round {round} of requests, {sample} is gone");
            };
            let has_fallen = later < value;
            ensure!(
                !has_fallen,
                "after round {round} of requests, {sample} went from {value} to {later}"
            );
        }
        before = now;
    }
    if before.is_empty() {
        skip!(NotDeclared, "the engine publishes no counters");
    }
    Ok(())
}

async fn stable_ranks(trial: Trial) -> CheckResult {
    let first = config_of_a_start(&trial).await?.data_parallel_size;
    let second = config_of_a_start(&trial).await?.data_parallel_size;
    ensure!(first >= 1, "the engine declares no rank");
    ensure!(
        first == second,
        "two engines built alike declare {first} and {second} ranks"
    );
    Ok(())
}

async fn not_dead(trial: Trial) -> CheckResult {
    let live = trial.start().await?;
    let lives = |when: &str| match live.start.health.dead_reason() {
        None => Ok(()),
        Some(reason) => fail!("{when} the engine reported itself dead: {reason}"),
    };
    lives("after start")?;
    every_end(&live).await?;
    lives("after ordinary requests")?;
    let deadline = trial.limits().call;
    let drain = live.subject.engine.drain(DrainContext { deadline });
    drop(trial.call("drain", drain).await?);
    lives("after drain")?;
    live.put_away().await?;
    // A thread that ends a little later must not mistake its end for a crash.
    tokio::time::sleep(Duration::from_millis(50)).await;
    lives("after an orderly cleanup")
}

/// The Worker's canary: the engine's own, or one token in and one out.
fn canary(live: &Live) -> GenerateRequest {
    match &live.config.canary {
        Some(request) => (**request).clone(),
        None => live.request(1, 1),
    }
}

/// The number of tokens of each prompt and answer that keep an engine busy during its canary.
const LOAD_PROMPT_TOKENS: u32 = 15;
const LOAD_TOKENS: u32 = 8;

async fn canary_under_load(trial: Trial) -> CheckResult {
    let live = trial.start().await?;
    // As many as it declares to run, and some that wait.
    let sequences = live.config.max_num_seqs.unwrap_or(8).clamp(1, 64) + 4;
    // The canary may be served after all of them.
    let turn = one_after_the_other(&live, sequences + 1, LOAD_PROMPT_TOKENS + LOAD_TOKENS);
    let prompt_len = usize::try_from(LOAD_PROMPT_TOKENS).unwrap_or(1);
    let others = join_all((0..sequences).map(|_| async {
        let request = live.request(prompt_len, LOAD_TOKENS);
        let ctx = live.context(&request);
        match live.try_generate_within(turn, request, ctx).await? {
            // CC07 judges how an engine behaves above its capacity.
            Err(_refused) => Ok(()),
            Ok(running) => running.finish_within(turn).await.map(drop),
        }
    }));
    let probe = async {
        let request = canary(&live);
        let ctx = live.context(&request);
        let mut running = match live.try_generate_within(turn, request, ctx).await? {
            Err(error) => return Ok(Some(error)),
            Ok(running) => running,
        };
        loop {
            match running.next_within(turn).await? {
                Some(Err(error)) => return Ok(Some(error)),
                Some(Ok(Output::Finished(_))) | None => return Ok(None),
                Some(Ok(_)) => {}
            }
        }
    };
    let probe = trial.within("the canary of a saturated engine", turn, probe);
    let (_others, probed) = futures_util::future::join(others, probe).await;
    match probed?? {
        None => Ok(()),
        Some(error) if error.kind() == ErrorKind::Overloaded => Ok(()),
        Some(error) => fail!(
            "a saturated engine fails its canary with {}: {error}",
            error.kind()
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_and_histograms_may_only_grow_and_gauges_may_not_only() {
        let text = "# HELP a Help.\n# TYPE a counter\na_total{x=\"1 2\"} 3 # {trace=\"t\"} 1\n\
            # TYPE b gauge\nb 4\n# TYPE c histogram\nc_sum 0.5\nc_count 1\nc_bucket{le=\"+Inf\"} 1\n";
        let samples = growing(text);
        let names: Vec<&str> = samples.keys().map(String::as_str).collect();
        assert_eq!(
            names,
            [
                "a_total{x=\"1 2\"}",
                "c_bucket{le=\"+Inf\"}",
                "c_count",
                "c_sum"
            ]
        );
        assert_eq!(samples["a_total{x=\"1 2\"}"], 3.0);
    }
}
