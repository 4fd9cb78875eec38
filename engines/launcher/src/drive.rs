//! One request to the server, and its answer as a stream; or the first token of one, where another server goes on.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use genset_backend_common::output::{Finish, OutputWriter, TokenChunk};
use genset_backend_common::{
    EngineError, ErrorKind, GenerateRequest, KvBytes, KvTransfers, RequestContext,
};
use serde_json::Value;
use tokio::sync::Semaphore;
use tokio::time::timeout;

use crate::apart::{Apart, Leg};
use crate::api::{Api, Call, End, Step, Withheld, error_of, unreadable};
use crate::cut::Cut;
use crate::http::{Answer, HttpError};
use crate::server::Server;
use crate::sse::{Event, EventError, Events};

/// How long a connection that broke waits for the news that its server died.
const SETTLE: Duration = Duration::from_secs(1);
/// How long the usage may take after the end.
const USAGE_TIMEOUT: Duration = Duration::from_secs(2);

/// The longest answer to a prefill, in bytes. It repeats the prompt.
const MAX_PREFILL_BYTES: usize = 16 << 20;

/// What is wrong with an answer to a prefill that says nothing of KV blocks.
const NO_BLOCKS: &str = "the answer to a prefill has no kv_transfer_params; its connector must be one that tells them with the \
                         answer, as NixlConnector does";

/// A request on its way.
pub(crate) struct Drive {
    pub(crate) api: Arc<dyn Api>,
    pub(crate) server: Arc<Server>,
    pub(crate) request: GenerateRequest,
    pub(crate) call: Call,
    pub(crate) leg: Leg,
    pub(crate) apart: Apart,
    pub(crate) ctx: RequestContext,
    pub(crate) max_tokens: Option<u32>,
    pub(crate) vocab_size: Option<NonZeroU32>,
    /// Headers to send along.
    pub(crate) headers: Vec<(&'static str, String)>,
    /// The places of a server that serves so many at once.
    pub(crate) places: Option<Arc<Semaphore>>,
}

impl Drive {
    /// Sends the request and streams the answer; ends at once when the server does.
    pub(crate) async fn run(self, out: OutputWriter) -> Result<Finish, EngineError> {
        let server = Arc::clone(&self.server);
        let mut claim = None;
        let finish = tokio::select! {
            biased;
            failure = server.ended() => Err(failure),
            finish = self.exchange(&out, &mut claim) => finish,
        };
        let error = match finish {
            Ok(finish) => return Ok(finish),
            Err(error) => server.judged(error).await,
        };
        if claim.is_some() && error.kind() == ErrorKind::Internal {
            // The prefill instance's server answered the same request: what is at fault is the fetch.
            return Err(KvTransfers::lost(&error).with_source(error));
        }
        Err(error)
    }

    /// `claim` holds the blocks of a prefill instance until the server has them.
    async fn exchange(
        &self,
        out: &OutputWriter,
        claim: &mut Option<KvBytes>,
    ) -> Result<Finish, EngineError> {
        let _place = match &self.places {
            // It is never closed; were it, there would be nothing to wait for.
            Some(places) => places.acquire().await.ok(),
            None => None,
        };
        let counted = self
            .api
            .prompt_tokens(&self.server.client, &self.request)
            .await;
        let counted = match counted {
            Ok(counted) => counted,
            Err(error) => return Err(self.lost(error).await),
        };
        if let Leg::Decode(fetch) = &self.leg {
            *claim = Some(fetch.claim(&self.ctx).await?);
        }
        let headers: Vec<_> = self
            .headers
            .iter()
            .chain(&self.call.headers)
            .map(|(name, value)| (*name, value.as_str()))
            .collect();
        let sent = self
            .server
            .client
            .post(self.call.path, self.call.body.clone(), &headers)
            .await;
        let answer = match sent {
            Ok(answer) => answer,
            Err(error) => return Err(self.lost(error).await),
        };
        if !answer.status.is_success() {
            return Err(refusal(answer).await);
        }
        if matches!(self.leg, Leg::Prefill) {
            return self.prefilled(answer).await;
        }
        let mut reading = Reading {
            events: Events::new(answer.body),
            reader: self.api.reader(&self.request),
            cut: Cut::new(&self.request, self.max_tokens),
            prompt_tokens: counted,
            cached_tokens: None,
            completion_tokens: None,
            counted: 0,
        };
        let finish = self.read(&mut reading, out, claim).await?;
        Ok(Finish {
            prompt_tokens: finish
                .prompt_tokens
                .or(reading.own_prompt_tokens(&self.request)),
            cached_tokens: reading.cached_tokens,
            ..finish
        })
    }

    /// The first token, and where its KV blocks are.
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
                let params = self.api.kept_blocks(&body)?;
                let params = params.ok_or_else(|| unreadable(NO_BLOCKS))?;
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

    async fn read(
        &self,
        reading: &mut Reading,
        out: &OutputWriter,
        claim: &mut Option<KvBytes>,
    ) -> Result<Finish, EngineError> {
        loop {
            let Some(mut step) = self.step(reading).await? else {
                let message = "the server's answer ended without saying how the request finished";
                return Err(EngineError::new(ErrorKind::StreamIncomplete, message));
            };
            if let Some(withheld) = step.withheld.take() {
                step.tokens = self.found(&withheld).await?;
            }
            // A server that answers has the blocks.
            *claim = None;
            let cut = reading.cut.take(&mut step.tokens);
            self.check_vocabulary(&step)?;
            let Step {
                tokens, text, end, ..
            } = step;
            out.tokens(tokens).await?;
            if !text.is_empty() {
                let count = reading.uncounted().unwrap_or(1);
                reading.counted = reading.counted.saturating_add(count);
                out.text(text, count).await?;
            }
            let is_whole = end.is_some() || reading.cut.is_full();
            let finish = match (cut, end) {
                (Some(finish), _) => finish,
                (None, Some(end)) => finish_of(end)?,
                (None, None) if is_whole => Finish::length(),
                (None, None) => continue,
            };
            if is_whole && self.api.tells_usage_later() {
                // A usage that does not come is not waited for; the answer is there.
                drop(timeout(USAGE_TIMEOUT, self.read_usage(reading)).await);
            }
            if let Some(count) = reading.uncounted().filter(|count| *count > 0) {
                out.text(String::new(), count).await?;
            }
            return Ok(finish);
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

    /// What the next event says; `None` at the end.
    async fn step(&self, reading: &mut Reading) -> Result<Option<Step>, EngineError> {
        let data = match reading.events.next().await {
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
        reading.prompt_tokens = step.prompt_tokens.or(reading.prompt_tokens);
        reading.cached_tokens = step.cached_tokens.or(reading.cached_tokens);
        reading.completion_tokens = step.completion_tokens.or(reading.completion_tokens);
        Ok(Some(step))
    }

    /// The tokens that the server's own tokenizer makes of a text of which it did not name them all.
    async fn found(&self, withheld: &Withheld) -> Result<TokenChunk, EngineError> {
        let asked = self.api.pieces(&self.server.client, &withheld.text).await;
        match asked {
            Ok(pieces) => Ok(withheld.fill(&pieces)?.into_iter().collect()),
            Err(error) => Err(self.lost(error).await),
        }
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

    /// What a lost connection means: mostly that the server died, of which the news is on its way.
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
    events: Events,
    reader: Box<dyn crate::api::Reader>,
    cut: Cut,
    prompt_tokens: Option<u32>,
    cached_tokens: Option<u32>,
    /// Tokens of text generated so far, where the server counts them.
    completion_tokens: Option<u32>,
    /// Tokens of text that were told.
    counted: u32,
}

impl Reading {
    /// Tokens of text that were not told yet, where the server counts them.
    fn uncounted(&self) -> Option<u32> {
        let total = self.completion_tokens?;
        Some(total.saturating_sub(self.counted))
    }

    /// The prompt's length where only the server knows it.
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

/// What the server says against the request.
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
