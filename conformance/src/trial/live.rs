//! [`Live`]: a started engine, and requests to it.

use std::num::NonZeroU32;
use std::pin::pin;
use std::time::Duration;

use futures_util::future::{Either, join_all, select};
use genset_backend_common::{
    Capabilities, DrainContext, EngineConfig, EngineError, ErrorKind, GenerateRequest, Input,
    RequestContext, StartContext, TokenId,
    config::{Deviation, SamplingOption},
};
use tokio::time::Instant;

use super::Trial;
use crate::answer::Answer;
use crate::check::{CheckResult, Stop, fail, skip};
use crate::limits::Limits;
use crate::medium::{Api, Medium};
use crate::patience::LEAST_SHARE;
use crate::rules::Reader;
use crate::running::Running;
use crate::subject::Subject;
use crate::transcript;

/// The minimum pause before a request is sent again to a full engine.
const PAUSE: Duration = Duration::from_millis(20);

/// The prompt length of a long-running request, in tokens: odd, and above 64.
const BUSY_PROMPT_TOKENS: usize = 67;

/// The default size of a KV block, in tokens, for an engine that declares none.
const USUAL_BLOCK_TOKENS: u32 = 16;

/// A started engine.
#[derive(Clone)]
pub struct Live {
    /// The trial it belongs to.
    pub trial: Trial,
    /// The engine.
    pub subject: Subject,
    /// Its declaration at the start.
    pub config: EngineConfig,
    /// The context of its start.
    pub start: StartContext,
}

impl Live {
    /// An engine that is not started but can receive requests: in the medium of its factory's engines, with a vocabulary of two
    /// tokens.
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

    /// Cleans up and releases the engine before the check ends. The result of the cleanup is not judged.
    ///
    /// # Errors
    /// Fails if the cleanup does not return in time.
    pub async fn put_away(&self) -> Result<(), Stop> {
        let cleanup = self.subject.engine.cleanup();
        let _ = self.trial.cleaning("cleanup", cleanup).await?;
        self.trial.release(&self.subject);
        Ok(())
    }

    /// The size of the vocabulary, or the largest possible if the engine does not know it.
    pub(crate) fn vocab_size(&self) -> u32 {
        self.config.vocab_size.map_or(u32::MAX, NonZeroU32::get)
    }

    /// A token id of the engine's vocabulary that varies with `seed`.
    #[must_use]
    pub fn token(&self, seed: u64) -> TokenId {
        let vocab_size = u64::from(self.config.vocab_size.map_or(100, NonZeroU32::get));
        let seed = seed.wrapping_add(self.trial.seed().wrapping_mul(0xD1B5_4A32_D192_ED03));
        u32::try_from(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) % vocab_size).unwrap_or(0)
    }

    /// A prompt of `len` tokens that varies with `seed`.
    #[must_use]
    pub fn prompt(&self, len: usize, seed: u64) -> Vec<TokenId> {
        (0..)
            .take(len)
            .map(|place: u64| self.token(place.wrapping_add(seed.wrapping_mul(1_000_003))))
            .collect()
    }

    /// The engine's medium.
    #[must_use]
    pub fn medium(&self) -> Medium {
        Medium::of(&self.config.capabilities)
    }

    /// A prompt in the engine's medium: the tokens, or as many words.
    #[must_use]
    pub fn input(&self, prompt: Vec<TokenId>) -> Input {
        let medium = self.medium();
        if medium == Medium::Body {
            return self.body(Api::Chat, &prompt, false);
        }
        medium.input(prompt)
    }

    /// A body for the engine's model.
    pub(crate) fn body(&self, api: Api, prompt: &[TokenId], is_stream: bool) -> Input {
        let mut body = api.body(prompt);
        body["model"] = self.config.model.as_str().into();
        body["stream"] = is_stream.into();
        Input::Text(body.to_string().into())
    }

    /// A plain request without sampling options: `prompt_len` prompt tokens (or words, for an engine that takes text), and
    /// exactly `max_tokens` to generate.
    #[must_use]
    pub fn request(&self, prompt_len: usize, max_tokens: u32) -> GenerateRequest {
        let mut request = GenerateRequest::from_tokens(self.config.model.clone(), Vec::new());
        request.input = self.input(self.prompt(prompt_len, 0));
        request.stop.max_tokens = Some(max_tokens);
        request.stop.ignore_eos = true;
        request
    }

    /// As [`Self::request`], with the tokens (or words) of `prompt`. Always greedy, whatever the engine's default.
    #[must_use]
    pub fn greedy(&self, prompt: Vec<TokenId>, max_tokens: u32) -> GenerateRequest {
        let mut request = self.request(1, max_tokens);
        request.input = self.input(prompt);
        request.sampling.temperature = self.can(SamplingOption::Temperature).then_some(0.0);
        request
    }

    /// Makes the request draw from all tokens. Sets each narrowing option to its neutral value, since an engine's default may
    /// differ.
    pub(crate) fn draw_from_all(&self, request: &mut GenerateRequest) {
        let all = self.vocab_size();
        let sampling = &mut request.sampling;
        sampling.top_k = self.can(SamplingOption::TopK).then_some(all);
        sampling.top_p = self.can(SamplingOption::TopP).then_some(1.0);
        sampling.min_p = self.can(SamplingOption::MinP).then_some(0.0);
    }

    /// The length of an answer, up to `wanted` tokens after a prompt of `prompt_len`: less if the context is small or the
    /// engine slow. After words, it is at most half of what the context holds besides as many tokens: each may be several, and a
    /// template adds more.
    #[must_use]
    pub fn affordable_answer(&self, prompt_len: usize, wanted: u32) -> u32 {
        let prompt = u32::try_from(prompt_len).unwrap_or(u32::MAX);
        let room = self.config.context_length_tokens.saturating_sub(prompt);
        let room = match self.medium().is_tokens() {
            true => room,
            false => room / 2,
        };
        wanted
            .min(room)
            .min(self.trial.limits().answer_tokens)
            .max(1)
    }

    /// A plain request that runs for a while: a prompt of several KV blocks and an answer of up to `wanted` tokens. Both are
    /// shorter if the context is small, so that they fit together. The prompt varies with `seed`.
    #[must_use]
    pub fn busy_request(&self, seed: u64, wanted: u32) -> GenerateRequest {
        let quarter = usize::try_from(self.config.context_length_tokens / 4).unwrap_or(usize::MAX);
        let prompt_len = BUSY_PROMPT_TOKENS.min(quarter).max(1);
        let mut request = self.request(1, self.affordable_answer(prompt_len, wanted));
        request.input = self.input(self.prompt(prompt_len, seed));
        request
    }

    /// The length of a prompt of three KV blocks, or less if the context is small.
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

    /// How many of `wanted` requests the engine runs at once, at least one; others may wait or be refused.
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

    /// Skips a check of a sampling option that the engine does not declare.
    ///
    /// # Errors
    /// The skip.
    pub(crate) fn needs(&self, option: SamplingOption) -> Result<(), Stop> {
        if !self.can(option) {
            skip!(NotDeclared, "the engine does not declare {option}");
        }
        Ok(())
    }

    /// Skips a check of `min_tokens` if the engine declares that it does not keep them. DT09 checks that it refuses them.
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

    /// Whether the engine declares that an answer depends on the rest of the batch.
    pub(crate) fn varies_with_batch(&self) -> bool {
        let can = &self.config.capabilities;
        can.deviates(Deviation::BatchVariant)
    }

    /// Sends a request that will be repeated once before, if the engine declares that an answer depends on how much of its prompt
    /// is cached: what is cached of it from now on is the same each time.
    ///
    /// # Errors
    /// As [`Self::answer`].
    pub(crate) async fn warm(&self, request: &GenerateRequest) -> Result<(), Stop> {
        if self.varies_with_batch() {
            self.answer(request.clone()).await?;
        }
        Ok(())
    }

    /// A context for `request`, as a Worker creates it.
    #[must_use]
    pub fn context(&self, request: &GenerateRequest) -> RequestContext {
        RequestContext::new(self.trial.next_id())
            .with_prompt_tokens(request.prompt_tokens().unwrap_or(0))
    }

    /// Sends a request as a Worker does: undeclared features are refused before the engine receives it.
    ///
    /// # Errors
    /// Outer: fails if `generate` does not return in time. Inner: the engine's refusal.
    pub fn try_generate(
        &self,
        request: GenerateRequest,
        ctx: RequestContext,
    ) -> impl Future<Output = Result<Result<Running, EngineError>, Stop>> {
        let limit = self.trial.limits().call;
        self.try_generate_within(limit, request, ctx)
    }

    /// As [`Self::try_generate`], with its own limit.
    ///
    /// # Errors
    /// As [`Self::try_generate`].
    pub(crate) async fn try_generate_within(
        &self,
        limit: Duration,
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
        let generate = self.subject.engine.generate(request, ctx.clone());
        let generated = self.trial.within("generate", limit, generate).await?;
        if let Err(refusal) = &generated {
            recorder.note(Some(ctx.id()), || {
                format!("refused by the engine: {}", refusal.kind())
            });
        }
        Ok(generated.map(|outputs| Running::new(self.trial.clone(), ctx, outputs, reader)))
    }

    /// Sends a request that must be accepted. If the engine is full and refuses it, sends it again after the pause that the
    /// engine asks for, until the limit for calls has passed.
    ///
    /// # Errors
    /// Fails if it is refused or not accepted in time.
    pub fn generate(
        &self,
        request: GenerateRequest,
    ) -> impl Future<Output = Result<Running, Stop>> {
        self.generate_within(self.trial.limits().call, request)
    }

    /// As [`Self::generate`], with its own limit.
    ///
    /// # Errors
    /// As [`Self::generate`].
    async fn generate_within(
        &self,
        limit: Duration,
        request: GenerateRequest,
    ) -> Result<Running, Stop> {
        let deadline = Instant::now() + limit;
        loop {
            let ctx = self.context(&request);
            let sent = self.try_generate_within(limit, request.clone(), ctx);
            let error = match sent.await? {
                Ok(running) => return Ok(running),
                Err(error) => error,
            };
            self.pause_if_full(&request, &error, deadline).await?;
        }
    }

    /// If the engine is full, waits for the pause that it asks for.
    ///
    /// # Errors
    /// Fails if it is not full, or the deadline has passed.
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

    /// Converts the failure of a request: if it is the check's first request and a plain one, the check's promise was not
    /// tested.
    fn failed(&self, request: &GenerateRequest, what: String) -> Stop {
        let has_served = self.trial.items_read() > 0;
        if has_served || !self.is_plain(request) {
            return Stop::Fail(what);
        }
        Stop::Precondition(what)
    }

    /// Whether a request asks only for a few tokens, like the warm-up's.
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

    /// Sends a request that must be accepted, and reads its whole answer. As with [`Self::generate`], sends it again if its
    /// stream refuses it because the engine is full.
    ///
    /// # Errors
    /// Fails if it is refused, or its stream does not end in time.
    pub fn answer(&self, request: GenerateRequest) -> impl Future<Output = Result<Answer, Stop>> {
        self.answer_within(self.trial.limits().call, request)
    }

    /// As [`Self::answer`], with its own limit for the call and for each item.
    ///
    /// # Errors
    /// As [`Self::answer`].
    pub(crate) async fn answer_within(
        &self,
        limit: Duration,
        request: GenerateRequest,
    ) -> Result<Answer, Stop> {
        let deadline = Instant::now() + limit;
        loop {
            let running = self.generate_within(limit, request.clone()).await?;
            let answer = running.finish_within(limit).await?;
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

    /// Sends a request with its context, which must be accepted at once.
    ///
    /// # Errors
    /// Fails if it is refused.
    pub(crate) async fn begin(
        &self,
        request: GenerateRequest,
        ctx: RequestContext,
    ) -> Result<Running, Stop> {
        match self.try_generate(request, ctx).await? {
            Ok(running) => Ok(running),
            Err(error) => fail!(
                "the {} instance refused a good request: {error} ({})",
                self.start.role,
                error.kind()
            ),
        }
    }

    /// Sends a request with its context, and reads its whole answer. A refusal by `generate` is the only item of an answer.
    ///
    /// # Errors
    /// Fails if the answer does not end in time.
    pub(crate) async fn outcome(
        &self,
        request: GenerateRequest,
        ctx: RequestContext,
    ) -> Result<Answer, Stop> {
        match self.try_generate(request, ctx).await? {
            Ok(running) => running.finish().await,
            Err(error) => Ok(Answer::of(vec![Err(error)])),
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

    /// The error that refuses a request, from `generate` or as the only item of its stream.
    ///
    /// # Errors
    /// Fails if another item comes first, or nothing in time.
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

    /// Calls `abort`, as a Worker does when the client of a request has left.
    ///
    /// # Errors
    /// Fails if it does not return in time.
    pub(crate) async fn abort(&self, ctx: &RequestContext) -> CheckResult {
        let abort = self.subject.engine.abort(ctx);
        self.trial.call("abort", abort).await
    }

    /// Calls `drain` while `reading` reads the running requests. An engine may wait for them in its drain, so the limit of the
    /// call begins when they have ended. The engine gets a later deadline: one that always uses it up is late.
    ///
    /// # Errors
    /// Fails with `what` if the drain does not return in time, or as `reading` does.
    pub(crate) async fn drain_while<T>(
        &self,
        what: &str,
        reading: impl Future<Output = Result<T, Stop>>,
    ) -> Result<(Result<(), EngineError>, T), Stop> {
        let Limits { call, wall, .. } = self.trial.limits();
        let deadline = (wall * LEAST_SHARE).max(call * 2);
        let drain = self.subject.engine.drain(DrainContext { deadline });
        match select(drain, pin!(reading)).await {
            Either::Left((drained, reading)) => Ok((drained, reading.await?)),
            Either::Right((read, drain)) => {
                let read = read?;
                Ok((self.trial.call(what, drain).await?, read))
            }
        }
    }

    /// The number of KV blocks in use now, if the engine's probe reports it.
    pub(crate) fn kv_used(&self) -> Option<u64> {
        self.subject.probe.as_ref()?.kv_used_blocks()
    }

    /// The number of tokens computed so far, if the engine's probe reports it.
    pub(crate) fn produced(&self) -> Option<u64> {
        self.subject.probe.as_ref()?.produced_tokens()
    }

    /// Waits until the engine's probe satisfies `is_done`. Without a probe or that counter, returns `false` at once and marks
    /// the evidence as indirect.
    ///
    /// # Errors
    /// Fails with `what` if the limit for cancellations passes.
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

genset_backend_common::debug_as!(|it| Live {
    config: it.config,
    ..
});
