//! Checks with the limits of real time, on a paused clock: correct but slow engines pass, and broken ones fail though slow.

#![cfg(feature = "mutants")]

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use futures_util::{FutureExt, StreamExt, stream};
use genset_backend_common::config::Deviation;
use genset_backend_common::output::TokenChunk;
use genset_backend_common::{
    DrainContext, EngineConfig, EngineError, HealthReporter, Output, OutputStream, StartContext,
    async_trait,
};
use genset_engine_sample::{SampleArgs, SampleEngine};
use tokio::sync::{Mutex, Semaphore, watch};
use tokio::time::{Instant, sleep_until, timeout};

use super::find;
use crate::check::{CheckResult, SkipReason, Stop};
use crate::limits::Limits;
use crate::mutants::capable::capable;
use crate::mutants::fault::{Call, Declares, Fault, Inner, faulty, held_to_end};
use crate::mutants::slotted::slotted;
use crate::mutants::{Clean, corpus};
use crate::subject::{Factory, Probe, Scenario, Subject};
use crate::trial::{Trial, Variation};

/// The time per item.
const ITEM: Duration = Duration::from_millis(30);

/// The time per token of a prompt, of an engine that computes prompts slowly.
const SLOW: Duration = Duration::from_millis(250);

/// How many times longer an item takes under a grammar.
const GUIDED: u32 = 3;

/// Computes one item at a time, however many requests run. Requests beyond the engine's seats wait inside `generate`.
struct Turns {
    seats: Option<u32>,
    free: Arc<Semaphore>,
    device: Arc<Mutex<()>>,
    /// The time per token of a prompt, which its first item takes longer.
    prompt_token: Duration,
}

/// The sample engine, which takes turns.
fn turns(seats: Option<u32>, prompt_token: Duration) -> Subject {
    let args = SampleArgs {
        vocab_size: 1000,
        token_delay_ms: 0,
    };
    taking_turns(SampleEngine::from_args(&args).into(), seats, prompt_token)
}

/// An engine that takes turns.
fn taking_turns(subject: Subject, seats: Option<u32>, prompt_token: Duration) -> Subject {
    let free = seats.and_then(|seats| usize::try_from(seats).ok());
    let turns = Turns {
        seats,
        free: Arc::new(Semaphore::new(free.unwrap_or(Semaphore::MAX_PERMITS))),
        device: Arc::default(),
        prompt_token,
    };
    faulty(subject, turns)
}

#[async_trait]
impl Fault for Turns {
    fn declare(&self, config: &mut EngineConfig) {
        config.max_num_seqs = self.seats;
    }

    async fn generate(&self, inner: &Inner, call: Call) -> Result<OutputStream, EngineError> {
        let seat = Arc::clone(&self.free).acquire_owned().await.ok();
        let prompt = self.prompt_token * call.request.prompt_tokens().unwrap_or(0);
        let item_time = match call.request.guided {
            Some(_) => ITEM * GUIDED,
            None => ITEM,
        };
        let outputs = inner.generate(call.request, call.ctx).await?;
        let device = Arc::clone(&self.device);
        let items = outputs.enumerate().then(move |(place, item)| {
            let device = Arc::clone(&device);
            let time = match place {
                0 => prompt + item_time,
                _ => item_time,
            };
            async move {
                let _turn = device.lock().await;
                tokio::time::sleep(time).await;
                item
            }
        });
        let items = OutputStream::from_raw(Box::pin(items));
        Ok(held_to_end(items, seat))
    }
}

/// The result of a check of an engine that takes turns, with the limits from its warm-up: three answers of four tokens and an
/// end.
async fn tried(id: &str, prompt_token: Duration, factory: impl Factory) -> CheckResult {
    let check = find(id).unwrap();
    let limits = Limits::scaled((prompt_token * 4 + ITEM * 5) * 3);
    let trial = Trial::new(Arc::new(factory), check.id, limits, Variation::default());
    (check.run)(trial).await
}

#[tokio::test(start_paused = true)]
async fn who_waits_has_the_time_of_those_before() {
    let fast = Duration::ZERO;
    let clean: Clean = Arc::new(move |_: &Scenario| turns(None, fast));
    let queue = move |scenario: &Scenario| slotted(&clean, scenario);
    assert_eq!(tried("CC12", fast, queue).await, Ok(()));
    let seats = move |_: &Scenario| turns(Some(32), fast);
    assert_eq!(tried("MT06", fast, seats).await, Ok(()));
}

#[tokio::test(start_paused = true)]
async fn who_waits_has_the_time_of_the_prompts_before() {
    for (id, seats) in [
        ("CC07", 32),
        ("CC13", 32),
        ("MT06", 32),
        // All of them begin, and wait in their streams.
        ("CC08", 64),
        ("CC14", 64),
    ] {
        let slow = move |_: &Scenario| turns(Some(seats), SLOW);
        assert_eq!(tried(id, SLOW, slow).await, Ok(()), "{id}");
    }
}

#[tokio::test(start_paused = true)]
async fn guided_requests_do_not_wait_for_the_answers_of_others() {
    let fast = Duration::ZERO;
    let one_seat = move |scenario: &Scenario| taking_turns(capable(scenario), Some(1), fast);
    assert_eq!(tried("GD05", fast, one_seat).await, Ok(()));
}

#[tokio::test(start_paused = true)]
async fn a_cache_that_takes_too_long_to_fill_is_not_filled() {
    let prompt_token = Duration::from_millis(10);
    let filled = |blocks: fn(&mut EngineConfig)| async move {
        let engine = move |scenario: &Scenario| {
            let large = faulty(capable(scenario), Declares(blocks));
            taking_turns(large, None, prompt_token)
        };
        tried("KV09", prompt_token, engine).await
    };
    assert_eq!(filled(|_| {}).await, Ok(()));
    let too_long = "it takes too long to fill the cache with 513 prompts";
    assert_eq!(
        filled(|config| config.kv_total_blocks = Some(4096)).await,
        Err(Stop::Skip(SkipReason::Level, too_long.into()))
    );
}

/// Waits in its drain for the requests that run.
#[derive(Default)]
struct DrainsLast {
    running: Arc<()>,
}

#[async_trait]
impl Fault for DrainsLast {
    fn answer(&self, _call: &Call, outputs: OutputStream) -> OutputStream {
        held_to_end(outputs, Arc::clone(&self.running))
    }

    async fn drain(&self, inner: &Inner, ctx: DrainContext) -> Result<(), EngineError> {
        let ended = async {
            while Arc::strong_count(&self.running) > 1 {
                tokio::time::sleep(ITEM).await;
            }
        };
        let late = |_| EngineError::internal("requests are still running");
        timeout(ctx.deadline, ended).await.map_err(late)?;
        inner.drain(ctx).await
    }
}

#[tokio::test(start_paused = true)]
async fn a_drain_may_wait_for_the_requests_that_run() {
    let fast = Duration::ZERO;
    let patient = move |_: &Scenario| faulty(turns(None, fast), DrainsLast::default());
    assert_eq!(tried("SH06", fast, patient).await, Ok(()));
}

/// Ends its streams as the last step of a cleanup that takes 8 s.
#[derive(Default)]
pub(crate) struct EndsStreamsLast {
    is_over: watch::Sender<bool>,
}

#[async_trait]
impl Fault for EndsStreamsLast {
    fn answer(&self, _call: &Call, outputs: OutputStream) -> OutputStream {
        let mut is_over = self.is_over.subscribe();
        let end = stream::once(async move {
            drop(is_over.wait_for(|is_over| *is_over).await);
            Err(EngineError::engine_shutdown("the engine stops"))
        });
        OutputStream::from_raw(Box::pin(outputs.take(1).chain(end)))
    }

    async fn cleanup(&self, inner: &Inner) -> Result<(), EngineError> {
        tokio::time::sleep(Duration::from_secs(8)).await;
        self.is_over.send_replace(true);
        inner.cleanup().await
    }
}

/// The result of a check of an engine whose cleanup took 8 s the first time.
async fn cleaned(id: &str, factory: impl Factory) -> CheckResult {
    let check = find(id).unwrap();
    let limits = Limits {
        cleanup: Duration::from_secs(16),
        ..Limits::default()
    };
    let trial = Trial::new(Arc::new(factory), check.id, limits, Variation::default());
    (check.run)(trial).await
}

#[tokio::test(start_paused = true)]
async fn a_slow_cleanup_may_end_the_streams_last() {
    let factory = |_: &Scenario| faulty(turns(None, Duration::ZERO), EndsStreamsLast::default());
    for id in ["SH05", "SH14", "SH16"] {
        assert_eq!(cleaned(id, factory).await, Ok(()), "{id}");
    }
}

/// Needs 8 s until its device is free.
struct Frees;

#[async_trait]
impl Fault for Frees {
    async fn cleanup(&self, inner: &Inner) -> Result<(), EngineError> {
        tokio::time::sleep(Duration::from_secs(8)).await;
        inner.cleanup().await
    }
}

#[tokio::test(start_paused = true)]
async fn a_slow_cleanup_may_follow_the_drain_of_a_prefill_instance() {
    let factory = |scenario: &Scenario| faulty(capable(scenario), Frees);
    assert_eq!(cleaned("DG05", factory).await, Ok(()));
}

/// Loads for 20 s on a thread that cannot be stopped: the cleanup waits for it.
#[derive(Default)]
struct LoadsToItsEnd(Mutex<Option<Instant>>);

#[async_trait]
impl Fault for LoadsToItsEnd {
    async fn start(&self, inner: &Inner, ctx: StartContext) -> Result<EngineConfig, EngineError> {
        let end = Instant::now() + Duration::from_secs(20);
        *self.0.lock().await = Some(end);
        sleep_until(end).await;
        inner.start(ctx).await
    }

    async fn cleanup(&self, inner: &Inner) -> Result<(), EngineError> {
        let end = *self.0.lock().await;
        if let Some(end) = end {
            sleep_until(end).await;
        }
        inner.cleanup().await
    }
}

#[tokio::test(start_paused = true)]
async fn a_cleanup_may_wait_for_a_load_whose_start_was_dropped() {
    let factory = |scenario: &Scenario| faulty(capable(scenario), LoadsToItsEnd::default());
    assert_eq!(cleaned("LC05", factory).await, Ok(()));
}

/// Sends the tokens of an answer as one item.
struct AtOnce;

impl Fault for AtOnce {
    fn answer(&self, _call: &Call, outputs: OutputStream) -> OutputStream {
        let whole = outputs.collect::<Vec<_>>().map(|items| {
            let (mut tokens, mut rest) = (TokenChunk::default(), Vec::new());
            for item in items {
                match item {
                    Ok(Output::Tokens(chunk)) => tokens.token_ids.extend(chunk.token_ids),
                    other => rest.push(other),
                }
            }
            stream::iter([Ok(Output::Tokens(tokens))].into_iter().chain(rest))
        });
        OutputStream::from_raw(Box::pin(whole.flatten_stream()))
    }
}

/// A device that can be lost.
#[derive(Default)]
struct Device {
    health: parking_lot::Mutex<HealthReporter>,
    is_lost: AtomicBool,
}

impl Probe for Device {
    fn crash(&self) -> bool {
        self.is_lost.store(true, Ordering::Relaxed);
        self.health.lock().report_dead("the device is lost");
        true
    }
}

/// Has computed an answer whole when its first item comes.
struct ComputesAhead(Arc<Device>);

impl Fault for ComputesAhead {
    fn begin(&self, ctx: &StartContext) {
        *self.0.health.lock() = ctx.health.clone();
    }

    fn ask(&self, _call: &mut Call) -> Result<(), EngineError> {
        match self.0.is_lost.load(Ordering::Relaxed) {
            true => Err(EngineError::engine_shutdown("the device is lost")),
            false => Ok(()),
        }
    }

    fn answer(&self, call: &Call, outputs: OutputStream) -> OutputStream {
        AtOnce.answer(call, outputs)
    }
}

#[tokio::test(start_paused = true)]
async fn an_answer_that_was_whole_before_a_crash_may_come_to_its_end() {
    let fast = Duration::ZERO;
    let ahead = |_: &Scenario| {
        let args = SampleArgs {
            vocab_size: 1000,
            token_delay_ms: 0,
        };
        let device = Arc::<Device>::default();
        let sample = SampleEngine::from_args(&args).into();
        faulty(sample, ComputesAhead(Arc::clone(&device))).with_probe(device)
    };
    assert_eq!(tried("ER03", fast, ahead).await, Ok(()));
}

#[tokio::test(start_paused = true)]
async fn a_slow_engine_may_not_hold_its_answers_back_either() {
    let slow = |_: &Scenario| turns(None, SLOW);
    assert_eq!(tried("ST12", SLOW, slow).await, Ok(()));
    let held_back = |_: &Scenario| faulty(turns(None, SLOW), AtOnce);
    let seen = "the first item came with 96 of 96 tokens";
    assert_eq!(
        tried("ST12", SLOW, held_back).await,
        Err(Stop::Fail(seen.into()))
    );
}

#[tokio::test(start_paused = true)]
async fn requests_that_slow_each_other_down_are_told_with_the_bound() {
    let args = SampleArgs {
        vocab_size: 1000,
        token_delay_ms: 1,
    };
    let clean: Clean = Arc::new(move |_: &Scenario| SampleEngine::from_args(&args));
    let mutant = corpus().find(|mutant| mutant.name == "anti-scaling");
    let broken = mutant.unwrap().factory(clean);
    let tried = tried("CC11", Duration::ZERO, broken).await;
    let bound = ": more than 2 times as long as one after the other, in each of 3 tries";
    assert!(
        matches!(&tried, Err(Stop::Fail(seen)) if seen.ends_with(bound)),
        "{tried:?}"
    );
}

#[tokio::test(start_paused = true)]
async fn a_long_prompt_has_the_time_that_an_engine_needs_for_it() {
    let slow = |_: &Scenario| turns(None, SLOW);
    assert_eq!(tried("US08", SLOW, slow).await, Ok(()));
}

/// Computes a prompt of which nothing is cached in another order.
#[derive(Default)]
struct ColdOtherwise(parking_lot::Mutex<BTreeSet<String>>);

impl Fault for ColdOtherwise {
    fn declare(&self, config: &mut EngineConfig) {
        let deviations = &mut config.capabilities.deviations;
        deviations.insert(Deviation::BatchVariant);
    }

    fn answer(&self, call: &Call, outputs: OutputStream) -> OutputStream {
        let (input, rank) = (&call.request.input, call.request.data_parallel_rank);
        let is_cold = self.0.lock().insert(format!("{rank:?} {input:?}"));
        let items = outputs.map(move |mut item| {
            if let (Ok(Output::Tokens(chunk)), true) = (&mut item, is_cold) {
                chunk.token_ids.iter_mut().for_each(|token| *token ^= 1);
            }
            item
        });
        OutputStream::from_raw(Box::pin(items))
    }
}

#[tokio::test(start_paused = true)]
async fn an_engine_that_depends_on_its_cache_repeats_what_it_has_answered_before() {
    let fast = Duration::ZERO;
    let capable = |scenario: &Scenario| faulty(capable(scenario), ColdOtherwise::default());
    for id in ["DT01", "DT02", "DT04", "DT05", "DT11"] {
        assert_eq!(tried(id, fast, capable).await, Ok(()), "{id}");
    }
}

/// Ends each answer with an error.
struct FailsInStreams;

impl Fault for FailsInStreams {
    fn answer(&self, _call: &Call, _outputs: OutputStream) -> OutputStream {
        let error = Err(EngineError::internal("the device is out of memory"));
        OutputStream::from_raw(Box::pin(stream::iter([error])))
    }
}

#[tokio::test(start_paused = true)]
async fn a_check_of_events_tells_the_error_of_its_request() {
    let fails = |scenario: &Scenario| faulty(capable(scenario), FailsInStreams);
    let seen = tried("KV12", Duration::ZERO, fails).await;
    assert!(
        matches!(&seen, Err(Stop::Fail(seen)) if seen.contains("the device is out of memory")),
        "{seen:?}"
    );
}
