//! Correct but unusual engines, which the kit must not fail, at every level and with six seeds. The mocker's tests have more:
//! with a queue, KV blocks and steps of any length.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    reason = "a test fails by panicking"
)]

mod in_real_time;
#[path = "in_real_time/tests.rs"]
mod real_time;

use std::collections::BTreeMap;
use std::ops::RangeInclusive;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use futures_util::{StreamExt, stream};
use genset_backend_common::output::{self, Finish, TokenChunk};
use genset_backend_common::{
    EngineConfig, EngineError, ErrorKind, GenerateRequest, Input, LLMEngine, Output, OutputStream,
    RequestContext, RequestField, Role, StartContext, TokenId, async_trait,
    config::SamplingOption,
    handles::{Load, LoadPublisher},
};
use genset_conformance::mutants::capable::capable;
use genset_conformance::mutants::text::spelled;
use genset_conformance::mutants::{Clean, controls};
use genset_conformance::{
    Factory, Level, Options, Scenario, Subject, Verdict, find, run_check, run_conformance_with,
};
use genset_engine_sample::{CONTEXT_LENGTH, SampleArgs, SampleEngine};
use parking_lot::Mutex;
use tokio::sync::Semaphore;

use self::in_real_time::InRealTime;

const SEEDS: RangeInclusive<u64> = 0..=5;

/// With this variable, engines in real time also run all checks with every seed, which takes most of an hour.
const ALL_VARIABLE: &str = "GENSET_TEST_ALL_IN_REAL_TIME";

fn is_sound<F: Factory>(factory: impl Fn() -> F) {
    // This level includes the checks of all others.
    for seed in SEEDS {
        is_sound_at(Level::Soak, seed, factory());
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
fn is_sound_in_real_time<E: LLMEngine>(engine: impl Fn() -> E + Clone + Send + Sync + 'static) {
    let factory = || {
        let engine = engine.clone();
        move |_: &Scenario| in_real_time(Subject::new(engine()))
    };
    if std::env::var_os(ALL_VARIABLE).is_some() {
        is_sound(factory);
    } else {
        is_sound_at(Level::Strict, 0, factory());
    }
}

/// The same engine, without the declaration that its waits follow tokio's clock.
fn in_real_time(subject: Subject) -> Subject {
    Subject {
        engine: Arc::new(InRealTime(subject.engine)),
        ..subject
    }
}

fn sample(vocab_size: u32, token_delay_ms: u64) -> SampleEngine {
    SampleEngine::from_args(&SampleArgs {
        vocab_size,
        token_delay_ms,
    })
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
struct Biased(SampleEngine);

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
impl LLMEngine for Biased {
    async fn start(&self, ctx: StartContext) -> Result<EngineConfig, EngineError> {
        let mut config = self.0.start(ctx).await?;
        let can = &mut config.capabilities;
        can.sampling.insert(SamplingOption::LogitBias);
        can.roles = [Role::Aggregated].into();
        Ok(config)
    }

    async fn generate(
        &self,
        request: GenerateRequest,
        ctx: RequestContext,
    ) -> Result<OutputStream, EngineError> {
        let plain = self.0.generate(request.clone(), ctx.clone()).await?;
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

    async fn cleanup(&self) -> Result<(), EngineError> {
        self.0.cleanup().await
    }
}

#[test]
fn a_vocabulary_of_which_every_answer_has_all_tokens() {
    is_sound(|| |_: &Scenario| Biased(sample(FEW_TOKENS, 1)));
}

/// How a full engine refuses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Full {
    AtOnce,
    InTheStream,
}

/// An engine with a few seats and no queue.
struct Seats {
    inner: SampleEngine,
    seats: usize,
    full: Full,
    taken: Arc<AtomicUsize>,
}

impl Seats {
    fn new(seats: usize, full: Full) -> Self {
        Self {
            inner: sample(1000, 1),
            seats,
            full,
            taken: Arc::default(),
        }
    }
}

struct Seat(Arc<AtomicUsize>);

impl Drop for Seat {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

#[async_trait]
impl LLMEngine for Seats {
    async fn start(&self, ctx: StartContext) -> Result<EngineConfig, EngineError> {
        let mut config = self.inner.start(ctx).await?;
        config.max_num_seqs = u32::try_from(self.seats).ok();
        Ok(config)
    }

    async fn generate(
        &self,
        request: GenerateRequest,
        ctx: RequestContext,
    ) -> Result<OutputStream, EngineError> {
        let outputs = self.inner.generate(request, ctx).await?;
        let taken = self.taken.fetch_add(1, Ordering::AcqRel);
        let mut seat = Some(Seat(Arc::clone(&self.taken)));
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
        let seated = outputs.inspect(move |item| {
            if !matches!(item, Ok(output) if !output.is_terminal()) {
                drop(seat.take());
            }
        });
        Ok(OutputStream::from_raw(Box::pin(seated)))
    }

    async fn cleanup(&self) -> Result<(), EngineError> {
        self.inner.cleanup().await
    }
}

#[test]
fn one_seat_and_the_others_are_refused() {
    is_sound(|| |_: &Scenario| Seats::new(1, Full::AtOnce));
}

/// The same engine on a device that the kit can take away.
fn on_a_device(clean: Clean) -> impl Factory {
    let crashes = controls().find(|control| control.name == "crashes-in-order");
    crashes.unwrap().factory(clean)
}

#[test]
fn one_seat_on_a_device_that_is_lost() {
    is_sound(|| on_a_device(Arc::new(|_: &Scenario| Seats::new(1, Full::AtOnce))));
}

#[test]
fn two_seats_and_the_others_are_refused_in_their_streams() {
    is_sound(|| |_: &Scenario| Seats::new(2, Full::InTheStream));
}

/// An engine with a few seats. Requests wait for one inside `generate`, and the engine computes only what is read.
struct Waits {
    inner: SampleEngine,
    seats: u32,
    free: Arc<Semaphore>,
    told: Arc<Told>,
}

impl Waits {
    fn new(seats: u32) -> Self {
        Self {
            inner: sample(1000, 1),
            seats,
            free: Arc::new(Semaphore::new(usize::try_from(seats).unwrap())),
            told: Arc::default(),
        }
    }
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
impl LLMEngine for Waits {
    async fn start(&self, ctx: StartContext) -> Result<EngineConfig, EngineError> {
        self.told.load.lock().1 = ctx.load.clone();
        let mut config = self.inner.start(ctx).await?;
        config.max_num_seqs = Some(self.seats);
        config.capabilities.roles = [Role::Aggregated].into();
        Ok(config)
    }

    async fn generate(
        &self,
        request: GenerateRequest,
        ctx: RequestContext,
    ) -> Result<OutputStream, EngineError> {
        let waiting = Counted::new(&self.told, |load| &mut load.waiting_requests);
        let seat = tokio::select! {
            () = ctx.cancelled() => None,
            seat = Arc::clone(&self.free).acquire_owned() => seat.ok(),
        };
        drop(waiting);
        let outputs = self.inner.generate(request, ctx).await?;
        let running = Counted::new(&self.told, |load| &mut load.running_requests);
        let mut seat = seat.map(|seat| (seat, running));
        let seated = outputs.inspect(move |item| {
            if !matches!(item, Ok(output) if !output.is_terminal()) {
                drop(seat.take());
            }
        });
        Ok(OutputStream::from_raw(Box::pin(seated)))
    }

    async fn cleanup(&self) -> Result<(), EngineError> {
        self.inner.cleanup().await?;
        // The inner engine refuses requests that still wait.
        self.free.close();
        Ok(())
    }
}

#[test]
fn one_seat_and_the_others_wait_inside_generate() {
    is_sound(|| |_: &Scenario| Waits::new(1));
}

#[test]
fn two_seats_and_the_others_wait_inside_generate() {
    is_sound(|| |_: &Scenario| Waits::new(2));
}

/// An engine whose steps produce up to 32 tokens, and take the same time for one or all.
struct Blocks(SampleEngine);

const BLOCK_TOKENS: u32 = 32;
const STEP: Duration = Duration::from_millis(32);

#[async_trait]
impl LLMEngine for Blocks {
    async fn start(&self, ctx: StartContext) -> Result<EngineConfig, EngineError> {
        self.0.start(ctx).await
    }

    async fn generate(
        &self,
        request: GenerateRequest,
        ctx: RequestContext,
    ) -> Result<OutputStream, EngineError> {
        let mut outputs = self.0.generate(request, ctx.clone()).await?;
        Ok(output::stream(ctx, move |out| async move {
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

    async fn cleanup(&self) -> Result<(), EngineError> {
        self.0.cleanup().await
    }
}

#[test]
fn answers_in_blocks_of_32_tokens() {
    is_sound(|| |_: &Scenario| Blocks(sample(1000, 0)));
}

/// An engine that refuses a large penalty in its stream, like one in a separate process.
struct MildPenalties(Arc<dyn LLMEngine>);

#[async_trait]
impl LLMEngine for MildPenalties {
    async fn start(&self, ctx: StartContext) -> Result<EngineConfig, EngineError> {
        self.0.start(ctx).await
    }

    async fn generate(
        &self,
        request: GenerateRequest,
        ctx: RequestContext,
    ) -> Result<OutputStream, EngineError> {
        if request.sampling.repetition_penalty <= Some(2.0) {
            return self.0.generate(request, ctx).await;
        }
        let at = RequestField::RepetitionPenalty;
        let error = EngineError::invalid_argument(at, "must be at most 2");
        let refused = stream::once(std::future::ready(Err(error)));
        Ok(OutputStream::from_raw(Box::pin(refused)))
    }

    async fn cleanup(&self) -> Result<(), EngineError> {
        self.0.cleanup().await
    }
}

#[test]
fn a_large_penalty_is_refused_in_the_stream() {
    let penalties = find("DT08").unwrap();
    let mild = run_check(penalties, |scenario: &Scenario| {
        let capable = capable(scenario);
        Subject {
            engine: Arc::new(MildPenalties(Arc::clone(&capable.engine))),
            ..capable
        }
    });
    assert_eq!(mild.verdict, Verdict::Pass);
}

/// An engine with a small context.
struct Short(SampleEngine);

const SHORT_CONTEXT: u32 = 1024;

#[async_trait]
impl LLMEngine for Short {
    async fn start(&self, ctx: StartContext) -> Result<EngineConfig, EngineError> {
        let mut config = self.0.start(ctx).await?;
        config.context_length_tokens = SHORT_CONTEXT;
        Ok(config)
    }

    async fn generate(
        &self,
        mut request: GenerateRequest,
        ctx: RequestContext,
    ) -> Result<OutputStream, EngineError> {
        request.stop.max_tokens = Some(request.max_tokens(SHORT_CONTEXT));
        self.0.generate(request, ctx).await
    }

    async fn cleanup(&self) -> Result<(), EngineError> {
        self.0.cleanup().await
    }
}

/// An engine of text that counts each word as three tokens.
struct Wordy(Arc<dyn LLMEngine>);

fn tripled(text: &str) -> String {
    let words = text.split_whitespace();
    let words: Vec<String> = words.map(|word| [word; 3].join(" ")).collect();
    words.join(" ")
}

#[async_trait]
impl LLMEngine for Wordy {
    async fn start(&self, ctx: StartContext) -> Result<EngineConfig, EngineError> {
        self.0.start(ctx).await
    }

    async fn generate(
        &self,
        mut request: GenerateRequest,
        ctx: RequestContext,
    ) -> Result<OutputStream, EngineError> {
        request.input = match request.input {
            Input::Text(text) => Input::Text(tripled(&text).into()),
            Input::Chat(chat) => {
                let mut chat = chat.into_inner();
                for message in &mut chat.messages {
                    if let Some(text) = message["content"].as_str() {
                        message["content"] = tripled(text).into();
                    }
                }
                Input::Chat(chat.into())
            }
            other @ (Input::Tokens(_) | Input::Embed(_) | Input::Score(_)) => other,
        };
        self.0.generate(request, ctx).await
    }

    async fn cleanup(&self) -> Result<(), EngineError> {
        self.0.cleanup().await
    }
}

#[test]
fn an_engine_of_text_to_which_a_word_is_three_tokens() {
    is_sound(|| {
        |_: &Scenario| {
            let words = spelled(Subject::new(Short(sample(1000, 1))));
            Subject {
                engine: Arc::new(Wordy(Arc::clone(&words.engine))),
                ..words
            }
        }
    });
}

/// An engine that has served requests before, like a worker that runs already.
struct Veteran {
    engine: Arc<dyn LLMEngine>,
    asked: Arc<Mutex<Vec<GenerateRequest>>>,
}

#[async_trait]
impl LLMEngine for Veteran {
    async fn start(&self, ctx: StartContext) -> Result<EngineConfig, EngineError> {
        let config = self.engine.start(ctx).await?;
        let asked = self.asked.lock().clone();
        for request in asked {
            let ctx = RequestContext::new("before")
                .with_prompt_tokens(request.prompt_tokens().unwrap_or(0));
            let mut outputs = self.engine.generate(request, ctx).await?;
            while outputs.next().await.is_some() {}
        }
        Ok(config)
    }

    async fn generate(
        &self,
        request: GenerateRequest,
        ctx: RequestContext,
    ) -> Result<OutputStream, EngineError> {
        self.asked.lock().push(request.clone());
        self.engine.generate(request, ctx).await
    }

    async fn abort(&self, ctx: &RequestContext) {
        self.engine.abort(ctx).await;
    }

    async fn cleanup(&self) -> Result<(), EngineError> {
        self.engine.cleanup().await
    }
}

#[test]
fn an_engine_whose_cache_has_what_it_was_asked_in_an_earlier_run() {
    let asked = Arc::new(Mutex::new(Vec::new()));
    for _ in 0..2 {
        let asked = Arc::clone(&asked);
        let veteran = move |scenario: &Scenario| {
            let fresh = capable(scenario);
            Subject {
                engine: Arc::new(Veteran {
                    engine: fresh.engine,
                    asked: Arc::clone(&asked),
                }),
                ..fresh
            }
        };
        let report = run_check(find("KV12").unwrap(), veteran);
        assert_eq!(report.verdict, Verdict::Pass);
    }
}
