//! What a check works with: a [`Trial`] builds engines, a [`Live`] one is started, a [`Running`] request is read, an
//! [`Answer`] is what was read. Every wait has a limit; whoever passes it fails the check by name.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::num::NonZeroU32;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use futures_util::future::join_all;
use genset_backend_common::{
    Capabilities, EngineConfig, EngineError, ErrorKind, GenerateRequest, Input, LLMEngine,
    RequestContext, Role, StartContext, TokenId,
    config::{Deviation, SamplingOption},
    transfer::LocalKvCarrier,
};
use parking_lot::Mutex;
use tokio::time::Instant;

use crate::answer::Answer;
use crate::check::{CheckResult, Stop, fail, skip};
use crate::limits::Limits;
use crate::medium::Medium;
use crate::patience::LEAST_SHARE;
use crate::report::Evidence;
use crate::rules::{Breaches, Reader, Rule, Watched};
use crate::running::Running;
use crate::subject::{Factory, Scenario, Subject};
use crate::transcript::{self, Recorder, Transcript};

/// One check's go at an engine. Clones share.
#[derive(Clone)]
pub struct Trial {
    shared: Arc<Shared>,
}

struct Shared {
    factory: Arc<dyn Factory>,
    check: &'static str,
    limits: Limits,
    evidence: Mutex<Evidence>,
    /// Engines to clean up when the check is over.
    built: Mutex<Vec<Arc<dyn LLMEngine>>>,
    /// Engines that were started, and may have been let go of since.
    watched: Mutex<Vec<Watched>>,
    breaches: Breaches,
    requests: AtomicU64,
    /// Whether an engine has started.
    has_started: AtomicBool,
    /// Items of streams that were read and are no errors.
    items_read: AtomicU64,
    /// Times that a wait for a start, or for the process itself, was seen to go on.
    waits_seen: AtomicU64,
    /// Microseconds of real time in which the machine did not let the check run.
    starved_us: AtomicU64,
    /// How engines of one check fetch KV blocks from each other.
    kv_carrier: LocalKvCarrier,
    seed: u64,
    sequences: u32,
    medium: Medium,
    measurements: Mutex<BTreeMap<String, u64>>,
    recorder: Arc<Recorder>,
}

/// How far a check has come.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Progress {
    /// Items of streams that were read and are no errors.
    pub(crate) items: u64,
    /// Times that a wait with a limit of its own was seen to go on.
    pub(crate) waits: u64,
}

/// What varies from run to run.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Variation {
    /// Varies the prompts.
    pub(crate) seed: u64,
    /// Random sequences that SQ01 tries.
    pub(crate) sequences: u32,
    /// The events that a transcript keeps.
    pub(crate) transcript_events: usize,
    /// In what engines are spoken with that have not said yet what they take.
    pub(crate) medium: Medium,
}

impl Trial {
    pub(crate) fn new(
        factory: Arc<dyn Factory>,
        check: &'static str,
        limits: Limits,
        variation: Variation,
    ) -> Self {
        let shared = Shared {
            factory,
            check,
            limits,
            evidence: Mutex::new(Evidence::Direct),
            built: Mutex::default(),
            watched: Mutex::default(),
            breaches: Breaches::default(),
            requests: AtomicU64::new(0),
            has_started: AtomicBool::new(false),
            items_read: AtomicU64::new(0),
            waits_seen: AtomicU64::new(0),
            starved_us: AtomicU64::new(0),
            kv_carrier: LocalKvCarrier::default(),
            seed: variation.seed,
            sequences: variation.sequences,
            medium: variation.medium,
            measurements: Mutex::default(),
            recorder: Arc::new(Recorder::new(variation.transcript_events)),
        };
        Self {
            shared: Arc::new(shared),
        }
    }

    /// How long the engine may take.
    #[must_use]
    pub fn limits(&self) -> Limits {
        self.shared.limits
    }

    /// In what the engines of this factory are spoken with.
    pub(crate) fn medium(&self) -> Medium {
        self.shared.medium
    }

    /// Notes that the check looks from outside, for lack of a probe.
    pub fn note_indirect(&self) {
        *self.shared.evidence.lock() = Evidence::Indirect;
    }

    pub(crate) fn evidence(&self) -> Evidence {
        *self.shared.evidence.lock()
    }

    /// Notes what was measured. `name` ends with its unit: `first_token_us`.
    pub fn measured(&self, name: impl Into<String>, value: u64) {
        self.shared.measurements.lock().insert(name.into(), value);
    }

    pub(crate) fn measurements(&self) -> BTreeMap<String, u64> {
        self.shared.measurements.lock().clone()
    }

    pub(crate) fn transcript(&self) -> Transcript {
        self.shared.recorder.transcript()
    }

    pub(crate) fn seed(&self) -> u64 {
        self.shared.seed
    }

    /// Random sequences that SQ01 tries.
    pub(crate) fn sequences(&self) -> u32 {
        self.shared.sequences
    }

    pub(crate) fn factory(&self) -> &Arc<dyn Factory> {
        &self.shared.factory
    }

    pub(crate) fn recorder(&self) -> &Arc<Recorder> {
        &self.shared.recorder
    }

    /// Notes that a request was given anything but an error.
    pub(crate) fn note_served(&self) {
        self.shared.items_read.fetch_add(1, Ordering::Relaxed);
    }

    /// Items of streams that were read and are no errors.
    pub(crate) fn items_read(&self) -> u64 {
        self.shared.items_read.load(Ordering::Relaxed)
    }

    /// Notes that the check waits for what has a limit of its own, and that its thread is not blocked.
    pub(crate) fn note_wait(&self) {
        self.shared.waits_seen.fetch_add(1, Ordering::Relaxed);
    }

    /// How far the check has come, for the watch on the wall clock.
    pub(crate) fn progress(&self) -> Progress {
        Progress {
            items: self.items_read(),
            waits: self.shared.waits_seen.load(Ordering::Relaxed),
        }
    }

    /// How often at least a wait that goes on is noted: several times in what the wall clock allows for silence.
    pub(crate) fn wait_interval(&self) -> Duration {
        self.limits().wall / 8
    }

    /// Notes that the machine did not let the check run for a while.
    pub(crate) fn note_starved(&self, time: Duration) {
        let us = u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
        self.shared.starved_us.fetch_add(us, Ordering::Relaxed);
    }

    /// How long the machine did not let the check run so far.
    fn starved(&self) -> Duration {
        Duration::from_micros(self.shared.starved_us.load(Ordering::Relaxed))
    }

    /// Where a breach of a rule of the reader is noted.
    pub(crate) fn breaches(&self) -> &Breaches {
        &self.shared.breaches
    }

    /// The rules that were seen broken, and how.
    pub(crate) fn broken_rules(&self) -> BTreeMap<Rule, String> {
        self.shared.breaches.seen()
    }

    /// Reads the KV events of every engine up to now.
    pub(crate) fn read_kv_events(&self) {
        for watched in self.shared.watched.lock().iter_mut() {
            watched.read(&self.shared.breaches);
        }
    }

    /// Says that the check kills an engine on purpose.
    pub(crate) fn expect_death(&self, subject: &Subject) {
        for watched in self.shared.watched.lock().iter_mut() {
            if watched.is(&subject.engine) {
                watched.may_die();
            }
        }
    }

    /// A fresh engine, not started.
    #[must_use]
    pub fn build(&self) -> Subject {
        self.build_as(Role::Aggregated)
    }

    /// A fresh engine for a role, not started.
    #[must_use]
    pub fn build_as(&self, role: Role) -> Subject {
        let mut scenario = Scenario::of(self.shared.check);
        scenario.role = role;
        let mut subject = self.shared.factory.build(&scenario);
        subject.engine = transcript::recorded(subject.engine, &self.shared.recorder);
        self.shared.built.lock().push(Arc::clone(&subject.engine));
        subject
    }

    /// A fresh engine, started.
    ///
    /// # Errors
    /// A failure of the check when it does not start in time.
    pub async fn start(&self) -> Result<Live, Stop> {
        self.start_as(Role::Aggregated).await
    }

    /// A fresh engine for a role, started.
    ///
    /// # Errors
    /// As [`Self::start`].
    pub async fn start_as(&self, role: Role) -> Result<Live, Stop> {
        let subject = self.build_as(role);
        // The worker's id: no two engines of a check share one.
        let built = u64::try_from(self.shared.built.lock().len()).unwrap_or(1);
        let ctx = StartContext {
            role,
            kv_transfers: self.shared.kv_carrier.join(built),
            ..StartContext::detached(built)
        };
        let mut watched = Watched::new(&subject.engine, &ctx);
        let is_first = !self.shared.has_started.load(Ordering::Relaxed);
        let failed = |what: String| match is_first {
            true => Stop::Precondition(what),
            false => Stop::Fail(what),
        };
        let started = self
            .starting("start", subject.engine.start(ctx.clone()))
            .await
            .map_err(|late| failed(late.to_string()))?;
        match started {
            Ok(config) => {
                self.shared.has_started.store(true, Ordering::Relaxed);
                watched.declares(&config);
                self.shared.watched.lock().push(watched);
                Ok(Live {
                    trial: self.clone(),
                    subject,
                    config,
                    start: ctx,
                })
            }
            Err(error) => Err(failed(format!("start failed: {error} ({})", error.kind()))),
        }
    }

    /// Waits for `future`, at most `limit`, and as long as the machine did not let it run.
    ///
    /// # Errors
    /// A failure that names `what` when the limit passes.
    pub async fn within<T>(
        &self,
        what: &str,
        limit: Duration,
        future: impl Future<Output = T>,
    ) -> Result<T, Stop> {
        if let Some(value) = self.in_time(limit, future).await {
            return Ok(value);
        }
        let late = format!("{what} was not done within {} s", limit.as_secs_f64());
        self.shared.recorder.note(None, || late.clone());
        Err(Stop::Fail(late))
    }

    /// What came of `future`, which is dropped when its time has passed.
    async fn in_time<T>(&self, limit: Duration, future: impl Future<Output = T>) -> Option<T> {
        let mut future = pin!(future);
        let (mut noted, mut waited, mut left) = (self.starved(), Duration::ZERO, limit);
        loop {
            if let Ok(value) = tokio::time::timeout(left, &mut future).await {
                return Some(value);
            }
            waited += left;
            let starved = self.starved();
            let most = (limit * LEAST_SHARE).saturating_sub(waited);
            left = starved.saturating_sub(noted).min(most);
            noted = starved;
            if left.is_zero() {
                return None;
            }
        }
    }

    /// Waits for a start, at most as long as one may take. Nothing can be read meanwhile: that is no silence, unless the start
    /// blocks the check's thread.
    ///
    /// # Errors
    /// A failure that names `what` when the limit passes.
    pub(crate) async fn starting<T>(
        &self,
        what: &str,
        start: impl Future<Output = T>,
    ) -> Result<T, Stop> {
        tokio::select! {
            biased;
            started = self.within(what, self.limits().start, start) => started,
            never = self.note_waits() => match never {},
        }
    }

    async fn note_waits(&self) -> Infallible {
        loop {
            tokio::time::sleep(self.wait_interval()).await;
            self.note_wait();
        }
    }

    /// Calls a method that should return soon.
    ///
    /// # Errors
    /// A failure that names `what` when it does not.
    pub async fn call<T>(&self, what: &str, future: impl Future<Output = T>) -> Result<T, Stop> {
        self.within(what, self.limits().call, future).await
    }

    /// Lets go of an engine: it is not cleaned up after the check, and is dropped with the last of the check's own handles.
    pub fn release(&self, subject: &Subject) {
        let is_other = |built: &Arc<dyn LLMEngine>| !Arc::ptr_eq(built, &subject.engine);
        self.shared.built.lock().retain(is_other);
        let mut watched = self.shared.watched.lock();
        watched.retain(|watched| !watched.is(&subject.engine));
    }

    /// Looks at what the check has started once more, and cleans up what it has built; how that goes is not judged here.
    pub(crate) async fn tidy(&self) {
        self.shared.recorder.close();
        for mut watched in std::mem::take(&mut *self.shared.watched.lock()) {
            watched.end(&self.shared.breaches);
        }
        let built = std::mem::take(&mut *self.shared.built.lock());
        for engine in built {
            let _ = tokio::time::timeout(Duration::from_secs(1), engine.cleanup()).await;
        }
    }

    /// Takes an engine that the check made by itself: it is cleaned up after the check.
    pub(crate) fn adopt(&self, engine: &Arc<dyn LLMEngine>) {
        self.shared.built.lock().push(Arc::clone(engine));
    }

    fn next_id(&self) -> String {
        let number = self.shared.requests.fetch_add(1, Ordering::Relaxed);
        format!("{}-{number}", self.shared.check)
    }
}

/// The shortest pause before a request is sent again to an engine that is full.
const PAUSE: Duration = Duration::from_millis(20);

/// Tokens of the prompt of a request that is not soon over: odd, and past 64.
const BUSY_PROMPT_TOKENS: usize = 67;

/// Tokens of a KV block of an engine that does not say.
const USUAL_BLOCK_TOKENS: u32 = 16;

/// A started engine.
#[derive(Clone)]
pub struct Live {
    /// The trial it belongs to.
    pub trial: Trial,
    /// The engine.
    pub subject: Subject,
    /// What it declared at start.
    pub config: EngineConfig,
    /// The handles it was given at start.
    pub start: StartContext,
}

impl Live {
    /// An engine that is not started, ready to be asked all the same: in the medium that its factory's engines declare, with
    /// a vocabulary of two tokens.
    pub(crate) fn unstarted(trial: Trial, context_length_tokens: u32) -> Self {
        let can = Capabilities {
            inputs: [trial.medium().kind()].into(),
            ..Capabilities::default()
        };
        let config = EngineConfig::new("not-started", context_length_tokens)
            .with_vocab_size(2)
            .with_capabilities(can);
        Self {
            subject: trial.build(),
            trial,
            config,
            start: StartContext::detached(1),
        }
    }

    /// Cleans up and lets go of the engine before the check is over. How the cleanup goes is not judged.
    ///
    /// # Errors
    /// A failure when it does not return in time.
    pub async fn put_away(&self) -> Result<(), Stop> {
        let cleanup = self.subject.engine.cleanup();
        let _ = self.trial.call("cleanup", cleanup).await?;
        self.trial.release(&self.subject);
        Ok(())
    }

    /// A token id that the engine's vocabulary has, varying with `seed`.
    #[must_use]
    pub fn token(&self, seed: u64) -> TokenId {
        let vocab_size = u64::from(self.config.vocab_size.map_or(100, NonZeroU32::get));
        let seed = seed.wrapping_add(self.trial.shared.seed.wrapping_mul(0xD1B5_4A32_D192_ED03));
        u32::try_from(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) % vocab_size).unwrap_or(0)
    }

    /// A prompt of `len` tokens, varying with `seed`.
    #[must_use]
    pub fn prompt(&self, len: usize, seed: u64) -> Vec<TokenId> {
        (0..)
            .take(len)
            .map(|place: u64| self.token(place.wrapping_add(seed.wrapping_mul(1_000_003))))
            .collect()
    }

    /// In what the engine is spoken with.
    #[must_use]
    pub fn medium(&self) -> Medium {
        Medium::of(&self.config.capabilities)
    }

    /// A prompt in the engine's medium: the tokens, or as many words.
    #[must_use]
    pub fn input(&self, prompt: Vec<TokenId>) -> Input {
        self.medium().input(prompt)
    }

    /// A plain request: `prompt_len` prompt tokens (or words, for an engine that takes text), exactly `max_tokens` to
    /// generate, no sampling options.
    #[must_use]
    pub fn request(&self, prompt_len: usize, max_tokens: u32) -> GenerateRequest {
        let mut request = GenerateRequest::from_tokens(self.config.model.clone(), Vec::new());
        request.input = self.input(self.prompt(prompt_len, 0));
        request.stop.max_tokens = Some(max_tokens);
        request.stop.ignore_eos = true;
        request
    }

    /// As [`Self::request`], on the tokens (or words) of `prompt`, and greedy whatever the engine's default is.
    #[must_use]
    pub fn greedy(&self, prompt: Vec<TokenId>, max_tokens: u32) -> GenerateRequest {
        let mut request = self.request(1, max_tokens);
        request.input = self.input(prompt);
        request.sampling.temperature = self.can(SamplingOption::Temperature).then_some(0.0);
        request
    }

    /// The tokens of an answer of up to `wanted`, after a prompt of `prompt_len`: fewer where the context is small or the
    /// engine slow.
    #[must_use]
    pub fn affordable_answer(&self, prompt_len: usize, wanted: u32) -> u32 {
        let prompt = u32::try_from(prompt_len).unwrap_or(u32::MAX);
        let room = self.config.context_length_tokens.saturating_sub(prompt);
        wanted
            .min(room)
            .min(self.trial.limits().answer_tokens)
            .max(1)
    }

    /// A plain request that is not soon over: a prompt of more than a few KV blocks and an answer of up to `wanted` tokens,
    /// both shorter where the context is small, so that they fit in it together. The prompt varies with `seed`.
    #[must_use]
    pub fn busy_request(&self, seed: u64, wanted: u32) -> GenerateRequest {
        let quarter = usize::try_from(self.config.context_length_tokens / 4).unwrap_or(usize::MAX);
        let prompt_len = BUSY_PROMPT_TOKENS.min(quarter).max(1);
        let mut request = self.request(1, self.affordable_answer(prompt_len, wanted));
        request.input = self.input(self.prompt(prompt_len, seed));
        request
    }

    /// The length of a prompt of three KV blocks, or of as much as the context has room for.
    #[must_use]
    pub fn several_blocks(&self) -> usize {
        let block = self
            .config
            .kv_block_size
            .map_or(USUAL_BLOCK_TOKENS, NonZeroU32::get);
        let most = self.config.context_length_tokens / 2 / 3;
        let len = block.min(most).max(1).saturating_mul(3);
        usize::try_from(len).unwrap_or(usize::MAX)
    }

    /// How many of `wanted` requests the engine runs at once, one at least: others may wait for these, or be refused.
    #[must_use]
    pub fn at_once(&self, wanted: u32) -> usize {
        let most = self.config.max_num_seqs.unwrap_or(wanted);
        usize::try_from(wanted.min(most).max(1)).unwrap_or(1)
    }

    /// Whether the engine declares a sampling option.
    #[must_use]
    pub fn can(&self, option: SamplingOption) -> bool {
        self.config.capabilities.sampling.contains(&option)
    }

    /// Skips a check of `min_tokens`, for an engine that declares that it cannot keep them. That it refuses them is DT09's.
    ///
    /// # Errors
    /// The skip.
    pub(crate) fn needs_min_tokens(&self) -> Result<(), Stop> {
        let can = &self.config.capabilities;
        if can.deviates(Deviation::NoMinTokens) {
            skip!(
                NotDeclared,
                "the engine declares that it cannot keep min_tokens"
            );
        }
        Ok(())
    }

    /// Whether the engine declares that an answer depends on what else is in its batch.
    pub(crate) fn varies_with_batch(&self) -> bool {
        let can = &self.config.capabilities;
        can.deviates(Deviation::BatchVariant)
    }

    /// A context for `request`, as a Worker makes it.
    #[must_use]
    pub fn context(&self, request: &GenerateRequest) -> RequestContext {
        RequestContext::new(self.trial.next_id())
            .with_prompt_tokens(request.prompt_tokens().unwrap_or(0))
    }

    /// Sends a request the way a Worker does: what is not declared is refused before the engine sees it.
    ///
    /// # Errors
    /// Outer: a failure when `generate` does not return in time. Inner: the engine's refusal.
    pub async fn try_generate(
        &self,
        request: GenerateRequest,
        ctx: RequestContext,
    ) -> Result<Result<Running, EngineError>, Stop> {
        let recorder = &self.trial.shared.recorder;
        let reader = Reader::new(&self.config, &request, self.trial.limits().token);
        recorder.note(Some(ctx.id()), || transcript::summary(&request));
        if !self.subject.checks_itself
            && let Err(refusal) = self.config.check(&request)
        {
            recorder.note(Some(ctx.id()), || {
                format!("refused by the declaration: {}", refusal.kind())
            });
            return Ok(Err(refusal));
        }
        let generated = self
            .trial
            .call(
                "generate",
                self.subject.engine.generate(request, ctx.clone()),
            )
            .await?;
        if let Err(refusal) = &generated {
            recorder.note(Some(ctx.id()), || {
                format!("refused by the engine: {}", refusal.kind())
            });
        }
        Ok(generated.map(|outputs| Running::new(self.trial.clone(), ctx, outputs, reader)))
    }

    /// Sends a request that must be accepted. An engine that is full may refuse it for a while: it is sent again after the
    /// pause that the engine asks for, until the limit for calls has passed.
    ///
    /// # Errors
    /// A failure when it is refused or not accepted in time.
    pub async fn generate(&self, request: GenerateRequest) -> Result<Running, Stop> {
        let deadline = Instant::now() + self.trial.limits().call;
        loop {
            let ctx = self.context(&request);
            let error = match self.try_generate(request.clone(), ctx).await? {
                Ok(running) => return Ok(running),
                Err(error) => error,
            };
            self.pause_if_full(&request, &error, deadline).await?;
        }
    }

    /// Waits as long as an engine asks for that is full.
    ///
    /// # Errors
    /// A failure when it is not full, or the deadline has passed.
    async fn pause_if_full(
        &self,
        request: &GenerateRequest,
        error: &EngineError,
        deadline: Instant,
    ) -> CheckResult {
        if error.kind() != ErrorKind::Overloaded || Instant::now() >= deadline {
            let kind = error.kind();
            let refused = format!("generate refused a good request: {error} ({kind})");
            return Err(self.failed(request, refused));
        }
        let asked = error.details().retry_after.unwrap_or(PAUSE);
        tokio::time::sleep(asked.clamp(PAUSE, self.trial.limits().call)).await;
        Ok(())
    }

    /// What the failure of a request means: of the first one that a check sends, where it is a plain one, that nothing is
    /// known of what the check is about.
    fn failed(&self, request: &GenerateRequest, what: String) -> Stop {
        let has_served = self.trial.items_read() > 0;
        if has_served || !self.is_plain(request) {
            return Stop::Fail(what);
        }
        Stop::Precondition(what)
    }

    /// Whether a request asks for a few tokens and nothing else, as those of the warm-up do.
    fn is_plain(&self, request: &GenerateRequest) -> bool {
        let mut plain = self.request(1, 1);
        plain.input = request.input.clone();
        plain.stop.max_tokens = request.stop.max_tokens;
        plain.sampling.temperature = request.sampling.temperature.filter(|heat| *heat == 0.0);
        let is_short = request.prompt_tokens().is_none_or(|tokens| {
            usize::try_from(tokens).is_ok_and(|len| len <= BUSY_PROMPT_TOKENS)
        });
        is_short && plain == *request
    }

    /// Sends a request that must be accepted, and reads all of its answer. As with [`Self::generate`], one that is refused in
    /// its stream because the engine is full is sent again.
    ///
    /// # Errors
    /// A failure when it is refused, or its stream does not end in time.
    pub async fn answer(&self, request: GenerateRequest) -> Result<Answer, Stop> {
        let deadline = Instant::now() + self.trial.limits().call;
        loop {
            let answer = self.generate(request.clone()).await?.finish().await?;
            match answer.error() {
                Some(error) if answer.items.len() == 1 && error.kind() == ErrorKind::Overloaded => {
                    self.pause_if_full(&request, error, deadline).await?;
                }
                Some(error) => {
                    let what = format!("a request ended with {error} ({})", error.kind());
                    match self.failed(&request, what) {
                        Stop::Fail(_) => return Ok(answer),
                        stop @ (Stop::Precondition(_) | Stop::Skip(..)) => return Err(stop),
                    }
                }
                None => return Ok(answer),
            }
        }
    }

    /// Sends all requests at once and reads all answers, in order.
    ///
    /// # Errors
    /// As [`Self::answer`].
    pub async fn answers(&self, requests: Vec<GenerateRequest>) -> Result<Vec<Answer>, Stop> {
        join_all(requests.into_iter().map(|request| self.answer(request)))
            .await
            .into_iter()
            .collect()
    }

    /// The error a request is refused with, by `generate` or as the only item of its stream.
    ///
    /// # Errors
    /// A failure when a token or another item comes first, or nothing in time.
    pub async fn refusal(&self, request: GenerateRequest) -> Result<EngineError, Stop> {
        let ctx = self.context(&request);
        let mut running = match self.try_generate(request, ctx).await? {
            Err(error) => return Ok(error),
            Ok(running) => running,
        };
        match running.next().await? {
            Some(Err(error)) => Ok(error),
            other => fail!("expected a refusal before any token, got {other:?}"),
        }
    }

    /// Waits until the engine's probe says `is_done`; without a probe (or that counter) returns `false` at once and marks
    /// the evidence as indirect.
    ///
    /// # Errors
    /// A failure that names `what` when the limit for cancellations passes.
    pub async fn await_probe(
        &self,
        what: &str,
        is_done: impl Fn(&dyn crate::subject::Probe) -> Option<bool>,
    ) -> Result<bool, Stop> {
        let Some(probe) = self
            .subject
            .probe
            .clone()
            .filter(|probe| is_done(&**probe).is_some())
        else {
            self.trial.note_indirect();
            return Ok(false);
        };
        let wait = async {
            while is_done(&*probe) == Some(false) {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        self.trial
            .within(what, self.trial.limits().cancel, wait)
            .await?;
        Ok(true)
    }
}

impl std::fmt::Debug for Trial {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Trial")
            .field("check", &self.shared.check)
            .finish_non_exhaustive()
    }
}

impl std::fmt::Debug for Live {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Live")
            .field("config", &self.config)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn trial() -> Trial {
        let factory = |_: &Scenario| -> Subject { unreachable!("no engine is built") };
        Trial::new(
            Arc::new(factory),
            "LC01",
            Limits::default(),
            Variation::default(),
        )
    }

    /// Waits 8 s for what may take 5 s, on a machine that stops the check for so long after a second.
    async fn eight_seconds(stopped_s: u64) -> (Result<(), Stop>, Duration) {
        let (trial, begun) = (trial(), Instant::now());
        let work = async {
            tokio::time::sleep(Duration::from_secs(1)).await;
            trial.note_starved(Duration::from_secs(stopped_s));
            tokio::time::sleep(Duration::from_secs(7)).await;
        };
        let done = trial.within("work", Duration::from_secs(5), work).await;
        (done, begun.elapsed())
    }

    #[tokio::test(start_paused = true)]
    async fn time_in_which_the_machine_did_not_let_it_run_is_not_held_against_an_engine() {
        let late = Stop::Fail("work was not done within 5 s".into());
        let seconds = Duration::from_secs;
        assert_eq!(eight_seconds(0).await, (Err(late.clone()), seconds(5)));
        assert_eq!(eight_seconds(2).await, (Err(late), seconds(7)));
        assert_eq!(eight_seconds(4).await, (Ok(()), seconds(8)));
    }

    #[tokio::test(start_paused = true)]
    async fn no_wait_is_without_end() {
        let (trial, begun) = (trial(), Instant::now());
        let starving = async {
            loop {
                trial.note_starved(Duration::from_secs(10));
                tokio::time::sleep(Duration::from_secs(1)).await;
            }
        };
        let limit = Duration::from_secs(2);
        let done: Result<(), Stop> = trial.within("it", limit, starving).await;
        assert_eq!(done, Err(Stop::Fail("it was not done within 2 s".into())));
        assert_eq!(begun.elapsed(), limit * LEAST_SHARE);
    }
}
