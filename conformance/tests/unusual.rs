//! Correct but unusual engines, which the kit must not fail, at every level and with six seeds: the seed varies the prompts, so
//! the two checks that only repeat until a leak would show run with one. The mocker's tests have more engines: with a queue, KV
//! blocks and steps of any length.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    reason = "a test fails by panicking"
)]

mod in_real_time;
#[path = "in_real_time/tests.rs"]
mod real_time;

use std::collections::{BTreeMap, BTreeSet};
use std::ops::RangeInclusive;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use futures_util::{StreamExt, stream};
use genset_backend_common::output::{self, Finish, TokenChunk};
use genset_backend_common::{
    EngineConfig, EngineError, ErrorKind, GenerateRequest, Input, Output, OutputStream,
    RequestContext, RequestField, Role, StartContext, TokenId, async_trait,
    config::{Deviation, SamplingOption},
    handles::{Load, LoadPublisher},
};
use genset_conformance::mutants::capable::capable;
use genset_conformance::mutants::fault::{Call, Fault, Inner, faulty, held_to_end};
use genset_conformance::mutants::text::spelled;
use genset_conformance::mutants::{Clean, controls};
use genset_conformance::{
    Factory, Level, Options, Scenario, Subject, Verdict, find, run_check, run_conformance_with,
};
use genset_engine_sample::{CONTEXT_LENGTH, SampleArgs, SampleEngine};
use parking_lot::Mutex;
use tokio::sync::Semaphore;

use self::in_real_time::in_real_time;

/// Those besides 0.
const MORE_SEEDS: RangeInclusive<u64> = 1..=5;

/// With this variable, engines in real time also run all checks with every seed, which takes most of an hour.
const ALL_VARIABLE: &str = "GENSET_TEST_ALL_IN_REAL_TIME";

fn is_sound<F: Factory>(factory: impl Fn() -> F) {
    // This level includes the checks of all others.
    is_sound_at(Level::Soak, 0, factory());
    // The sample engine has no KV events, which the other soak check is about.
    for seed in MORE_SEEDS {
        is_sound_at(Level::Strict, seed, factory());
    }
}

fn is_sound_at(level: Level, seed: u64, factory: impl Factory) {
    let options = Options {
        level,
        seed,
        is_measuring: false,
        ..Options::default()
    };
    run_conformance_with(factory, &options).assert_conformant();
}

/// As [`is_sound`], for the same engine on a running clock.
fn is_sound_in_real_time(subject: impl Fn() -> Subject + Clone + Send + Sync + 'static) {
    let factory = || {
        let subject = subject.clone();
        move |_: &Scenario| in_real_time(subject())
    };
    if std::env::var_os(ALL_VARIABLE).is_some() {
        is_sound(factory);
    } else {
        is_sound_at(Level::Strict, 0, factory());
    }
}

fn sample(vocab_size: u32, token_delay_ms: u64) -> Subject {
    Subject::new(SampleEngine::from_args(&SampleArgs {
        vocab_size,
        token_delay_ms,
    }))
}

#[test]
fn an_engine_of_ten_tokens() {
    is_sound(|| |_: &Scenario| sample(10, 1));
}

#[test]
fn an_engine_that_takes_a_fifth_of_a_second_for_a_token() {
    is_sound(|| |_: &Scenario| sample(1000, 200));
}

/// An engine of ten tokens that takes biases: its answers have all of them.
struct Biased;

const FEW_TOKENS: u32 = 10;

/// The token with the highest bias; of several, the next one.
fn biased_after(last: TokenId, biases: &BTreeMap<TokenId, f32>) -> TokenId {
    let bias = |token: TokenId| biases.get(&token).copied().unwrap_or(0.0);
    (1..=FEW_TOKENS)
        .map(|step| (last + step) % FEW_TOKENS)
        .reduce(|best, token| match bias(token) > bias(best) {
            true => token,
            false => best,
        })
        .unwrap_or(last)
}

#[async_trait]
impl Fault for Biased {
    fn declare(&self, config: &mut EngineConfig) {
        let can = &mut config.capabilities;
        can.sampling.insert(SamplingOption::LogitBias);
        can.roles = [Role::Aggregated].into();
    }

    async fn generate(&self, inner: &Inner, call: Call) -> Result<OutputStream, EngineError> {
        let (request, ctx) = (call.request, call.ctx);
        let plain = inner.generate(request.clone(), ctx.clone()).await?;
        if request.sampling.logit_bias.is_empty() {
            return Ok(plain);
        }
        let mut token = request.tokens()?.last().copied().unwrap_or(0);
        let max_tokens = request.max_tokens(CONTEXT_LENGTH);
        Ok(output::stream(ctx, move |out| async move {
            for generated in 0..max_tokens {
                tokio::time::sleep(Duration::from_millis(1)).await;
                token = biased_after(token, &request.sampling.logit_bias);
                if request.stop.is_stop(token, generated) {
                    return Ok(Finish::stop_token(token));
                }
                out.token(token).await?;
            }
            Ok(Finish::length())
        }))
    }
}

#[test]
fn a_vocabulary_of_which_every_answer_has_all_tokens() {
    is_sound(|| |_: &Scenario| faulty(sample(FEW_TOKENS, 1), Biased));
}

/// How a full engine refuses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Full {
    AtOnce,
    InTheStream,
}

/// An engine with a few seats and no queue.
struct Seats {
    seats: usize,
    full: Full,
    taken: Arc<AtomicUsize>,
}

fn seats(seats: usize, full: Full) -> Subject {
    let taken = Arc::default();
    faulty(sample(1000, 1), Seats { seats, full, taken })
}

struct Seat(Arc<AtomicUsize>);

impl Drop for Seat {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

#[async_trait]
impl Fault for Seats {
    fn declare(&self, config: &mut EngineConfig) {
        config.max_num_seqs = u32::try_from(self.seats).ok();
    }

    async fn generate(&self, inner: &Inner, call: Call) -> Result<OutputStream, EngineError> {
        let outputs = inner.generate(call.request, call.ctx).await?;
        let taken = self.taken.fetch_add(1, Ordering::AcqRel);
        let seat = Seat(Arc::clone(&self.taken));
        if taken >= self.seats {
            drop(seat);
            let error = EngineError::new(ErrorKind::Overloaded, "every seat is taken")
                .with_retry_after(Duration::from_millis(5));
            return match self.full {
                Full::AtOnce => Err(error),
                Full::InTheStream => {
                    let refused = stream::once(std::future::ready(Err(error)));
                    Ok(OutputStream::from_raw(Box::pin(refused)))
                }
            };
        }
        Ok(held_to_end(outputs, seat))
    }
}

#[test]
fn one_seat_and_the_others_are_refused() {
    is_sound(|| |_: &Scenario| seats(1, Full::AtOnce));
}

/// The same engine on a device that the kit can take away.
fn on_a_device(clean: Clean) -> impl Factory {
    let crashes = controls().find(|control| control.name == "crashes-in-order");
    crashes.unwrap().factory(clean)
}

#[test]
fn one_seat_on_a_device_that_is_lost() {
    is_sound(|| on_a_device(Arc::new(|_: &Scenario| seats(1, Full::AtOnce))));
}

#[test]
fn two_seats_and_the_others_are_refused_in_their_streams() {
    is_sound(|| |_: &Scenario| seats(2, Full::InTheStream));
}

/// An engine with a few seats. Requests wait for one inside `generate`, and the engine computes only what is read.
struct Waits {
    seats: u32,
    free: Arc<Semaphore>,
    told: Arc<Told>,
}

fn waits(seats: u32) -> Subject {
    let waits = Waits {
        seats,
        free: Arc::new(Semaphore::new(usize::try_from(seats).unwrap())),
        told: Arc::default(),
    };
    faulty(sample(1000, 1), waits)
}

/// The load and its publisher.
#[derive(Default)]
struct Told {
    load: Mutex<(Load, LoadPublisher)>,
}

impl Told {
    fn change(&self, change: impl FnOnce(&mut Load)) {
        let mut told = self.load.lock();
        change(&mut told.0);
        told.1.publish(told.0);
    }
}

/// Increments a counter of the load while it lives.
struct Counted {
    told: Arc<Told>,
    which: fn(&mut Load) -> &mut u32,
}

impl Counted {
    fn new(told: &Arc<Told>, which: fn(&mut Load) -> &mut u32) -> Self {
        told.change(|load| *which(load) += 1);
        Self {
            told: Arc::clone(told),
            which,
        }
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        let which = self.which;
        self.told.change(|load| *which(load) -= 1);
    }
}

#[async_trait]
impl Fault for Waits {
    fn begin(&self, ctx: &StartContext) {
        self.told.load.lock().1 = ctx.load.clone();
    }

    fn declare(&self, config: &mut EngineConfig) {
        config.max_num_seqs = Some(self.seats);
        config.capabilities.roles = [Role::Aggregated].into();
    }

    async fn generate(&self, inner: &Inner, call: Call) -> Result<OutputStream, EngineError> {
        let waiting = Counted::new(&self.told, |load| &mut load.waiting_requests);
        let seat = tokio::select! {
            () = call.ctx.cancelled() => None,
            seat = Arc::clone(&self.free).acquire_owned() => seat.ok(),
        };
        drop(waiting);
        let outputs = inner.generate(call.request, call.ctx).await?;
        let running = Counted::new(&self.told, |load| &mut load.running_requests);
        Ok(held_to_end(outputs, seat.map(|seat| (seat, running))))
    }

    async fn cleanup(&self, inner: &Inner) -> Result<(), EngineError> {
        inner.cleanup().await?;
        // The inner engine refuses requests that still wait.
        self.free.close();
        Ok(())
    }
}

#[test]
fn one_seat_and_the_others_wait_inside_generate() {
    is_sound(|| |_: &Scenario| waits(1));
}

#[test]
fn two_seats_and_the_others_wait_inside_generate() {
    is_sound(|| |_: &Scenario| waits(2));
}

/// An engine whose steps produce up to 32 tokens, and take the same time for one or all.
struct Blocks;

const BLOCK_TOKENS: u32 = 32;
const STEP: Duration = Duration::from_millis(32);

#[async_trait]
impl Fault for Blocks {
    async fn generate(&self, inner: &Inner, call: Call) -> Result<OutputStream, EngineError> {
        let mut outputs = inner.generate(call.request, call.ctx.clone()).await?;
        Ok(output::stream(call.ctx, move |out| async move {
            loop {
                tokio::time::sleep(STEP).await;
                let mut block = TokenChunk::default();
                let mut end = None;
                while block.len() < BLOCK_TOKENS && end.is_none() {
                    match outputs.next().await {
                        Some(Ok(Output::Tokens(chunk))) => block.token_ids.extend(chunk.token_ids),
                        Some(Ok(Output::Finished(finished))) => end = Some(finished),
                        Some(Err(error)) => return Err(error),
                        other => panic!("the sample engine gave {other:?}"),
                    }
                }
                out.tokens(block).await?;
                if let Some(end) = end {
                    return Ok(Finish {
                        reason: end.reason,
                        last: end.last,
                        stop_token: end.stop_token,
                        transfer: end.transfer,
                        ..Finish::stop()
                    });
                }
            }
        }))
    }
}

#[test]
fn answers_in_blocks_of_32_tokens() {
    is_sound(|| |_: &Scenario| faulty(sample(1000, 0), Blocks));
}

/// An engine that refuses a large penalty in its stream, like one in a separate process.
struct MildPenalties;

#[async_trait]
impl Fault for MildPenalties {
    async fn generate(&self, inner: &Inner, call: Call) -> Result<OutputStream, EngineError> {
        if call.request.sampling.repetition_penalty <= Some(2.0) {
            return inner.generate(call.request, call.ctx).await;
        }
        let at = RequestField::RepetitionPenalty;
        let error = EngineError::invalid_argument(at, "must be at most 2");
        let refused = stream::once(std::future::ready(Err(error)));
        Ok(OutputStream::from_raw(Box::pin(refused)))
    }
}

#[test]
fn a_large_penalty_is_refused_in_the_stream() {
    let penalties = find("DT08").unwrap();
    let mild = run_check(penalties, |scenario: &Scenario| {
        faulty(capable(scenario), MildPenalties)
    });
    assert_eq!(mild.verdict, Verdict::Pass);
}

/// An engine whose answers have one token, which is the same in nine of ten draws. The first eight seeds give no other.
struct NearlyCertain;

impl Fault for NearlyCertain {
    fn ask(&self, call: &mut Call) -> Result<(), EngineError> {
        call.request.stop.max_tokens = Some(1);
        let sampling = &mut call.request.sampling;
        sampling.logit_bias = [(7, 10.0)].into();
        sampling.seed = sampling.seed.map(|seed| seed + 24);
        Ok(())
    }
}

#[test]
fn an_engine_that_is_nearly_certain_of_its_token() {
    let seeds = find("DT03").unwrap();
    let certain = run_check(seeds, |scenario: &Scenario| {
        faulty(capable(scenario), NearlyCertain)
    });
    assert_eq!(certain.verdict, Verdict::Pass);
}

/// An engine whose sums depend on how much of a prompt is cached: its answers then become others after their beginning.
#[derive(Default)]
struct RoundsWarm {
    cached: Mutex<BTreeSet<Vec<TokenId>>>,
}

/// How many tokens of its answer are the same.
const SAME_TOKENS: usize = 6;

impl Fault for RoundsWarm {
    fn declare(&self, config: &mut EngineConfig) {
        let can = &mut config.capabilities;
        can.deviations.insert(Deviation::BatchVariant);
    }

    fn answer(&self, call: &Call, outputs: OutputStream) -> OutputStream {
        let prompt = call.request.tokens();
        let is_warm = prompt.is_ok_and(|prompt| !self.cached.lock().insert(prompt.to_vec()));
        let mut place = 0;
        let items = outputs.map(move |mut item| {
            if let Ok(Output::Tokens(chunk)) = &mut item {
                for token in &mut chunk.token_ids {
                    if is_warm && place >= SAME_TOKENS {
                        *token ^= 1;
                    }
                    place += 1;
                }
            }
            item
        });
        OutputStream::from_raw(Box::pin(items))
    }
}

#[test]
fn an_engine_whose_sums_depend_on_what_is_cached() {
    let warm = find("DT10").unwrap();
    let rounding = run_check(warm, |_: &Scenario| {
        faulty(sample(1000, 1), RoundsWarm::default())
    });
    assert_eq!(rounding.verdict, Verdict::Pass);
}

/// An engine with a small context.
struct Short(u32);

impl Fault for Short {
    fn declare(&self, config: &mut EngineConfig) {
        config.context_length_tokens = self.0;
    }

    fn ask(&self, call: &mut Call) -> Result<(), EngineError> {
        let room = call.request.max_tokens(self.0);
        call.request.stop.max_tokens = Some(room);
        Ok(())
    }
}

/// An engine of text that counts each word as three tokens.
struct Wordy;

fn tripled(text: &str) -> String {
    let words = text.split_whitespace();
    let words: Vec<String> = words.map(|word| [word; 3].join(" ")).collect();
    words.join(" ")
}

impl Fault for Wordy {
    fn ask(&self, call: &mut Call) -> Result<(), EngineError> {
        match &mut call.request.input {
            Input::Text(text) => *text = tripled(text).into(),
            Input::Chat(chat) => {
                for message in &mut chat.messages {
                    if let Some(text) = message["content"].as_str() {
                        message["content"] = tripled(text).into();
                    }
                }
            }
            Input::Tokens(_) | Input::Embed(_) | Input::Score(_) => {}
        }
        Ok(())
    }
}

#[test]
fn an_engine_of_text_to_which_a_word_is_three_tokens() {
    let wordy = |context| faulty(spelled(faulty(sample(1000, 1), Short(context))), Wordy);
    is_sound(|| move |_: &Scenario| wordy(1024));
    // Too small for the longest answer, and the prompt takes more of it than it has words.
    let long = run_check(find("US08").unwrap(), move |_: &Scenario| wordy(512));
    assert_eq!(long.verdict, Verdict::Pass);
}

/// An engine that has served requests before, like a worker that runs already.
struct Veteran {
    asked: Arc<Mutex<Vec<GenerateRequest>>>,
}

#[async_trait]
impl Fault for Veteran {
    async fn start(&self, inner: &Inner, ctx: StartContext) -> Result<EngineConfig, EngineError> {
        let config = inner.start(ctx).await?;
        let asked = self.asked.lock().clone();
        for request in asked {
            let ctx = RequestContext::new("before")
                .with_prompt_tokens(request.prompt_tokens().unwrap_or(0));
            let mut outputs = inner.generate(request, ctx).await?;
            while outputs.next().await.is_some() {}
        }
        Ok(config)
    }

    fn ask(&self, call: &mut Call) -> Result<(), EngineError> {
        self.asked.lock().push(call.request.clone());
        Ok(())
    }
}

#[test]
fn an_engine_whose_cache_has_what_it_was_asked_in_an_earlier_run() {
    let asked = Arc::new(Mutex::new(Vec::new()));
    for _ in 0..2 {
        let asked = Arc::clone(&asked);
        let veteran = move |scenario: &Scenario| {
            let asked = Arc::clone(&asked);
            faulty(capable(scenario), Veteran { asked })
        };
        let report = run_check(find("KV12").unwrap(), veteran);
        assert_eq!(report.verdict, Verdict::Pass);
    }
}
