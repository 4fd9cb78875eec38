//! Sends one request to the server and streams its answer. For a prefill, that is the first token; another server continues.

mod withheld;

use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use genset_backend_common::output::{Finish, OutputWriter};
use genset_backend_common::{
    EngineError, ErrorKind, GenerateRequest, Input, RequestContext, TokenId,
    transfer::{KvBytes, KvTransfers},
};
use serde_json::Value;
use tokio::time::{sleep, timeout};

use crate::apart::{Apart, Leg};
use crate::api::{Api, Call, End, Step, error_of, kept_blocks, unreadable};
use crate::cut::Cut;
use crate::gate::Pass;
use crate::http::{Answer, HttpError};
use crate::load::Counted;
use crate::room::Room;
use crate::server::Server;
use crate::sse::{Event, EventError, Events};

/// How long a request with a broken connection waits to learn whether the server died.
const SETTLE: Duration = Duration::from_secs(1);
/// How long to wait for the usage after the end.
const USAGE_TIMEOUT: Duration = Duration::from_secs(2);

/// The pauses before a request is sent again to a full server that has answered nothing. The server frees the slots of ended
/// and disconnected requests a moment later. As requests reserve room, it is not full for longer.
const FULL_PAUSES: [Duration; 5] = [
    Duration::from_millis(20),
    Duration::from_millis(40),
    Duration::from_millis(80),
    Duration::from_millis(160),
    Duration::from_millis(320),
];

/// The maximum length of an answer to a prefill, in bytes. The answer repeats the prompt.
const MAX_PREFILL_BYTES: usize = 16 << 20;

/// The error for an answer to a prefill without transfer parameters.
const NO_BLOCKS: &str = "the answer to a prefill has no kv_transfer_params; its connector must return them with the \
                         answer, as NixlConnector does";

/// The progress of an exchange.
#[derive(Default)]
struct Progress {
    /// The claim on a prefill instance's blocks, until the server has fetched them.
    claim: Option<KvBytes>,
    /// Whether a part of the answer was sent.
    is_begun: bool,
}

/// A request to a server.
pub(crate) struct Drive {
    pub(crate) api: Arc<dyn Api>,
    pub(crate) server: Arc<Server>,
    /// The gate's permission for this request.
    pub(crate) pass: Pass,
    pub(crate) request: GenerateRequest,
    pub(crate) call: Call,
    pub(crate) leg: Leg,
    pub(crate) apart: Apart,
    pub(crate) ctx: RequestContext,
    pub(crate) max_tokens: Option<u32>,
    pub(crate) vocab_size: Option<NonZeroU32>,
    /// Headers to send.
    pub(crate) headers: Vec<(&'static str, String)>,
    /// Where it waits for room, if the server shares room between requests.
    pub(crate) room: Option<Room>,
    /// Counts the request in the load until it is dropped.
    pub(crate) counted: Counted,
}

impl Drive {
    /// Sends the request and streams the answer. Ends at once if the server dies.
    pub(crate) async fn run(self, out: OutputWriter) -> Result<Finish, EngineError> {
        let server = Arc::clone(&self.server);
        let mut progress = Progress::default();
        let finish = tokio::select! {
            biased;
            failure = server.ended() => Err(failure),
            stopped = self.pass.ended() => Err(stopped),
            finish = self.exchange_until_there_is_room(&out, &mut progress) => finish,
        };
        let error = match finish {
            Ok(finish) => return Ok(finish),
            Err(error) => server.judged(error).await,
        };
        if progress.claim.is_some() && error.kind() == ErrorKind::Internal {
            // The prefill instance's server answered the same request, so the fetch failed.
            return Err(KvTransfers::lost(&error).with_source(error));
        }
        Err(error)
    }

    async fn exchange_until_there_is_room(
        &self,
        out: &OutputWriter,
        progress: &mut Progress,
    ) -> Result<Finish, EngineError> {
        let client = &self.server.client;
        let counted = match self.api.prompt_tokens(client, &self.request).await {
            Ok(counted) => counted,
            Err(error) => return Err(self.lost(error).await),
        };
        if let Some(counted) = counted {
            self.ctx.tell_prompt_tokens(counted);
        }
        let prompt = self.request.prompt_tokens().or(counted).unwrap_or_default();
        let _place = match &self.room {
            Some(room) => {
                // Log probabilities of withheld tokens are computed in a second slot.
                let slots = 1 + u32::from(self.request.output.logprobs.is_some());
                let _waits = self.counted.held_back();
                room.enter(prompt, self.max_tokens, slots).await
            }
            None => return self.exchange(counted, out, progress).await,
        };
        for pause in FULL_PAUSES {
            match self.exchange(counted, out, progress).await {
                Err(full) if full.kind() == ErrorKind::Overloaded && !progress.is_begun => {
                    sleep(pause).await;
                }
                ended => return ended,
            }
        }
        self.exchange(counted, out, progress).await
    }

    /// `counted` is the prompt's length if only the server knows it.
    async fn exchange(
        &self,
        counted: Option<u32>,
        out: &OutputWriter,
        progress: &mut Progress,
    ) -> Result<Finish, EngineError> {
        if let Leg::Decode(fetch) = &self.leg {
            progress.claim = Some(fetch.claim(&self.ctx).await?);
        }
        let answer = self.send(&self.call).await?;
        if matches!(self.leg, Leg::Prefill) {
            return self.prefilled(answer).await;
        }
        let mut reading = Reading {
            events: Some(Events::new(answer.body)),
            reader: self.api.reader(&self.request),
            cut: Cut::new(&self.request, self.max_tokens),
            prompt_tokens: counted,
            cached_tokens: None,
            completion_tokens: None,
            counted: 0,
            given: Vec::new(),
            given_before: 0,
        };
        let finish = loop {
            if let Some(finish) = self.read(&mut reading, out, progress).await? {
                break finish;
            }
            let longer = self.longer(&reading)?;
            let call = self.api.call(&longer, reading.cut.remaining())?;
            let answer = self.send(&call).await?;
            reading.given_before = reading.given.len();
            reading.events = Some(Events::new(answer.body));
            reading.reader = self.api.reader(&self.request);
        };
        Ok(Finish {
            prompt_tokens: finish
                .prompt_tokens
                .or(reading.own_prompt_tokens(&self.request)),
            cached_tokens: reading.cached_tokens,
            ..finish
        })
    }

    async fn send(&self, call: &Call) -> Result<Answer, EngineError> {
        let headers = self.headers.iter().chain(&call.headers);
        let headers: Vec<_> = headers
            .map(|(name, value)| (*name, value.as_str()))
            .collect();
        let client = &self.server.client;
        match client.post(call.path, call.body.clone(), &headers).await {
            Ok(answer) if answer.status.is_success() => Ok(answer),
            Ok(answer) => Err(refusal(answer).await),
            Err(error) => Err(self.lost(error).await),
        }
    }

    /// The request that continues the answer so far. A seed is shifted deterministically, so that draws do not repeat.
    fn longer(&self, reading: &Reading) -> Result<GenerateRequest, EngineError> {
        let mut request = self.request.clone();
        let tokens = request.tokens()?.iter().chain(&reading.given);
        request.input = Input::Tokens(tokens.copied().collect::<Vec<_>>().into());
        let drawn = u64::try_from(reading.given.len()).unwrap_or(u64::MAX);
        let seed = request.sampling.seed;
        request.sampling.seed = seed.map(|seed| seed.wrapping_add(drawn));
        Ok(request)
    }

    /// Handles the answer to a prefill: the first token and the transfer parameters.
    async fn prefilled(&self, answer: Answer) -> Result<Finish, EngineError> {
        let body = match answer.body.read_up_to(MAX_PREFILL_BYTES).await {
            Ok(body) => body,
            Err(error) => return Err(self.lost(error).await),
        };
        let mut step = self.api.reader(&self.request).read(&body)?;
        let cut = Cut::new(&self.request, self.max_tokens).take(&mut step.tokens);
        self.check_vocabulary(&step)?;
        let given = step.tokens.len();
        let finish = match (cut, step.end) {
            (Some(finish), _) => finish,
            (None, Some(End::Length)) if given == 1 => {
                let params = kept_blocks(&body)?.ok_or_else(|| unreadable(NO_BLOCKS))?;
                let held = self.apart.held(self.ctx.id(), &self.server, params);
                Finish::length().with_transfer(held.map_err(unreadable)?)
            }
            (None, Some(End::Length)) => {
                return Err(unreadable(format!("a prefill gave {given} tokens")));
            }
            (None, Some(end)) => finish_of(end)?,
            (None, None) => return Err(unreadable("a prefill does not say how it ended")),
        };
        Ok(Finish {
            cached_tokens: step.cached_tokens,
            ..finish.with_last(step.tokens)
        })
    }

    /// Reads an answer; `None` if the server ended it but the request continues.
    async fn read(
        &self,
        reading: &mut Reading,
        out: &OutputWriter,
        progress: &mut Progress,
    ) -> Result<Option<Finish>, EngineError> {
        loop {
            let Some(mut step) = self.step(reading).await? else {
                let message = "the server's answer ended without saying how the request finished";
                return Err(EngineError::new(ErrorKind::StreamIncomplete, message));
            };
            let may_go_on = self.api.goes_on() && self.request.guided.is_none();
            let mut is_drawn_again = false;
            let is_withheld = step.withheld.is_some();
            if let Some(withheld) = step.withheld.take() {
                step.tokens = match self.found(&withheld).await {
                    Err(problem) if may_go_on => {
                        is_drawn_again = true;
                        // The rest of the server's stream is useless, and would hold a slot.
                        reading.events = None;
                        let behind = self.longer(reading)?;
                        let drawn = self.drawn_again(&behind, withheld.count).await?;
                        if drawn.is_empty() {
                            return Err(problem);
                        }
                        drawn
                    }
                    found => found?,
                };
            }
            // A server that answers has fetched the blocks.
            progress.claim = None;
            if !std::mem::replace(&mut progress.is_begun, true) {
                self.counted.begun();
            }
            let cut = reading.cut.take(&mut step.tokens);
            self.check_vocabulary(&step)?;
            let Step {
                mut tokens,
                text,
                end,
                ..
            } = step;
            if let (true, Some(asked)) = (is_withheld, self.request.output.logprobs) {
                let behind = self.longer(reading)?;
                tokens.logprobs = self.rated(behind, &tokens, asked).await?;
            }
            if self.api.goes_on() {
                reading.given.extend_from_slice(&tokens.token_ids);
            }
            out.tokens(tokens).await?;
            if !text.is_empty() {
                let count = reading.uncounted().unwrap_or(1);
                reading.counted = reading.counted.saturating_add(count);
                out.text(text, count).await?;
            }
            let is_new = reading.given.len() > reading.given_before;
            let goes_on = may_go_on && is_new && reading.cut.goes_on();
            let is_whole = end.is_some() || reading.cut.is_full();
            let finish = match (cut, end) {
                (Some(finish), _) => finish,
                (None, Some(End::Stop(None))) if goes_on && reading.cut.is_full() => {
                    Finish::length()
                }
                (None, Some(End::Stop(None))) if goes_on => return Ok(None),
                (None, Some(end)) => finish_of(end)?,
                (None, None) if is_whole => Finish::length(),
                // The rest of the stream belonged to the discarded answer.
                (None, None) if is_drawn_again => return Ok(None),
                (None, None) => continue,
            };
            if is_whole && self.api.tells_usage_later(&self.request) {
                // The answer is complete, so a missing usage is no error.
                drop(timeout(USAGE_TIMEOUT, self.read_usage(reading)).await);
            }
            if let Some(count) = reading.uncounted().filter(|count| *count > 0) {
                out.text(String::new(), count).await?;
            }
            return Ok(Some(finish));
        }
    }

    async fn read_usage(&self, reading: &mut Reading) -> Result<(), EngineError> {
        while self
            .step(reading)
            .await?
            .is_some_and(|step| step.prompt_tokens.is_none())
        {}
        Ok(())
    }

    /// The next event; `None` at the end.
    async fn step(&self, reading: &mut Reading) -> Result<Option<Step>, EngineError> {
        let Some(events) = &mut reading.events else {
            return Ok(None);
        };
        let next = events.next().await;
        if let Ok(Some(_)) = &next {
            self.server.hear();
        }
        let data = match next {
            Ok(Some(Event::Data(data))) if data == b"[DONE]" => return Ok(None),
            Ok(Some(Event::Data(data))) => data,
            Ok(Some(Event::Error(data))) => {
                let body = serde_json::from_slice(&data).unwrap_or(Value::Null);
                return Err(error_of(None, &body));
            }
            Ok(None) => return Ok(None),
            Err(EventError::Http(error)) => return Err(self.lost(error).await),
            Err(error @ (EventError::TooLong | EventError::Half)) => {
                return Err(self.broken(error.to_string()).await);
            }
        };
        let step = reading.reader.read(&data)?;
        if let (None, Some(tokens)) = (reading.prompt_tokens, step.prompt_tokens)
            && self.request.prompt_tokens().is_none()
        {
            // Keeps the usage right if the request is cancelled.
            self.ctx.tell_prompt_tokens(tokens);
        }
        reading.prompt_tokens = step.prompt_tokens.or(reading.prompt_tokens);
        if reading.given_before == 0 {
            // Cached tokens of later calls include the answer, so only the first call counts.
            reading.cached_tokens = step.cached_tokens.or(reading.cached_tokens);
        }
        reading.completion_tokens = step.completion_tokens.or(reading.completion_tokens);
        Ok(Some(step))
    }

    fn check_vocabulary(&self, step: &Step) -> Result<(), EngineError> {
        let Some(vocab_size) = self.vocab_size else {
            return Ok(());
        };
        match step
            .tokens
            .token_ids
            .iter()
            .find(|token| **token >= vocab_size.get())
        {
            None => Ok(()),
            Some(token) => Err(EngineError::new(
                ErrorKind::Disconnected,
                format!(
                    "the server gave token {token}, but the model's vocabulary ends at {}",
                    vocab_size.get() - 1
                ),
            )),
        }
    }

    /// The error for a lost connection. Usually the server died, and that becomes known a moment later.
    async fn lost(&self, error: HttpError) -> EngineError {
        match error {
            HttpError::Status(status) => error_of(
                Some(status.as_u16()),
                &Value::String("no reason given".into()),
            ),
            HttpError::Connect(_) => {
                let kind = ErrorKind::CannotConnect;
                self.settled(
                    EngineError::new(kind, format!("the server: {error}")).with_source(error),
                )
                .await
            }
            HttpError::Broken(_)
            | HttpError::TooLarge { .. }
            | HttpError::Unreadable(_)
            | HttpError::Request(_) => self.broken(error.to_string()).await,
        }
    }

    async fn broken(&self, how: String) -> EngineError {
        let message = format!("the server broke its answer off: {how}");
        self.settled(EngineError::new(ErrorKind::Disconnected, message))
            .await
    }

    async fn settled(&self, error: EngineError) -> EngineError {
        timeout(SETTLE, self.server.ended()).await.unwrap_or(error)
    }
}

struct Reading {
    /// `None` once the remaining events are useless.
    events: Option<Events>,
    reader: Box<dyn crate::api::Reader>,
    cut: Cut,
    prompt_tokens: Option<u32>,
    cached_tokens: Option<u32>,
    /// The number of tokens in the text so far, if the server counts them.
    completion_tokens: Option<u32>,
    /// The number of tokens in the text that was sent.
    counted: u32,
    /// The answer so far, from a server whose answers can be continued.
    given: Vec<TokenId>,
    /// The length of `given` before the last call.
    given_before: usize,
}

impl Reading {
    /// The number of tokens in unsent text, if the server counts them.
    fn uncounted(&self) -> Option<u32> {
        let total = self.completion_tokens?;
        Some(total.saturating_sub(self.counted))
    }

    /// The prompt's length, if only the server knows it.
    fn own_prompt_tokens(&self, request: &GenerateRequest) -> Option<u32> {
        match request.prompt_tokens() {
            Some(_) => None,
            None => self.prompt_tokens,
        }
    }
}

fn finish_of(end: End) -> Result<Finish, EngineError> {
    match end {
        End::Stop(Some(token)) => Ok(Finish::stop_token(token)),
        End::Stop(None) => Ok(Finish::stop()),
        End::Length => Ok(Finish::length()),
        End::Aborted(why) => {
            let message = format!("the server gave up on the request: {why}");
            Err(EngineError::new(ErrorKind::Disconnected, message))
        }
    }
}

/// The server's error for a refused request.
async fn refusal(answer: Answer) -> EngineError {
    let (status, retry_after) = (answer.status.as_u16(), answer.retry_after());
    let body = answer.body.read_all().await.unwrap_or_default();
    let body = serde_json::from_slice(&body)
        .unwrap_or_else(|_| Value::String(String::from_utf8_lossy(&body).into_owned()));
    let error = error_of(Some(status), &body);
    match retry_after {
        Some(after) => error.with_retry_after(after),
        None => error,
    }
}
