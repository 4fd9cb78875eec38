//! What all routes with a JSON body share: reading the body and answering in every case. Also the APIs whose answers are never
//! streamed.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::response::Response;
use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use genset_backend_common::{
    EngineError, RequestContext, card::EndpointType, context::TraceContext,
};
use http::{HeaderMap, StatusCode};
use tokio::time::Instant;

use super::access::Caller;
use super::asked_model::find_model;
use super::completions::WRITTEN_BYTES;
use super::early::{Begin, ERROR_DATA, NAMED_ERROR_DATA, early_response};
use super::handlers::App;
use super::held::held;
use super::messages::anthropic_error;
use super::metrics::RequestGuard;
use super::replies::{whole_response, with_ignored};
use super::request_body::{HeldBody, read_body};
use super::request_id::request_id;
use crate::answer::Answer;
use crate::error::{ApiError, ParamName, shown};
use crate::json::JsonBody;
use crate::model::ServedModel;
use crate::openai::{
    CommonParams, DetokenizeRequest, EmbeddingRequest, ParamLimits, TokenizeInput, TokenizeRequest,
    detokenize_json, embeddings_json, tokenize_json,
};
use crate::pipeline::{self, Answers, EmbedJob, Job, REASONING_EFFORT};

/// The header with the number of seconds after which the client no longer needs the answer.
const REQUEST_TIMEOUT: &str = "x-request-timeout";

/// Bytes of memory for one number of an embedding and its text, including spare capacity.
const EMBEDDED_NUMBER_BYTES: usize = 24;

/// Bytes of memory for the text of one token id, including spare capacity.
const WRITTEN_TOKEN_BYTES: usize = 16;

/// The same if the token's text is shown beside its id: two strings and their containers.
const SHOWN_TOKEN_BYTES: usize = 160;

/// One request in progress.
pub(super) struct Call {
    pub(super) app: App,
    pub(super) request_id: String,
    pub(super) caller: Caller,
    /// The context that the engine receives.
    pub(super) ctx: RequestContext,
    /// Empty once it is parsed.
    pub(super) body: HeldBody,
    pub(super) body_bytes: usize,
    pub(super) guard: RequestGuard,
    /// Lets its stream begin while it waits; `None` if it may not, or has waited.
    begin: Option<Begin>,
}

impl Call {
    /// Returns the model of this name, as [`find_model`] does.
    ///
    /// # Errors
    /// As [`find_model`].
    pub(super) async fn model(
        &self,
        name: &str,
        endpoint: Option<EndpointType>,
    ) -> Result<Arc<ServedModel>, ApiError> {
        find_model(&self.app, name, endpoint, self.ctx.deadline()).await
    }

    /// Waits for a place among the requests to `model`. Returns the context for its engine.
    ///
    /// # Errors
    /// The errors of [`RequestGuard::enter`]; a 503 when the server ends all requests early.
    pub(super) async fn admit(&mut self, model: &ServedModel) -> Result<RequestContext, ApiError> {
        tokio::select! {
            biased;
            () = self.ctx.cancelled() => return Err(ApiError::draining()),
            entered = self.guard.enter(model, self.ctx.deadline()) => entered?,
        }
        Ok(self.ctx.clone())
    }

    /// Like [`Self::admit`], for a request that may be streamed: its stream begins if it waits long.
    ///
    /// # Errors
    /// As [`Self::admit`].
    pub(super) async fn admit_stream(
        &mut self,
        model: &ServedModel,
        is_stream: bool,
    ) -> Result<RequestContext, ApiError> {
        match self.begin.take().filter(|_| is_stream) {
            Some(begin) => begin.unless(self.admit(model)).await,
            None => self.admit(model).await,
        }
    }

    /// Finds the model that the request names, and waits for a place among its requests.
    ///
    /// # Errors
    /// As [`Self::model`] and [`Self::admit`].
    pub(super) async fn enter(
        &mut self,
        name: &str,
        endpoint: Option<EndpointType>,
    ) -> Result<(Arc<ServedModel>, RequestContext), ApiError> {
        self.enter_stream(name, endpoint, false).await
    }

    /// Like [`Self::enter`], for a request that [may be streamed](Self::admit_stream).
    ///
    /// # Errors
    /// As [`Self::enter`].
    pub(super) async fn enter_stream(
        &mut self,
        name: &str,
        endpoint: Option<EndpointType>,
        is_stream: bool,
    ) -> Result<(Arc<ServedModel>, RequestContext), ApiError> {
        self.guard.model(name);
        let model = self.model(name, endpoint).await?;
        let ctx = self.admit_stream(&model, is_stream).await?;
        Ok((model, ctx))
    }

    /// Like [`Self::enter_stream`], for the model that `params` name. Completes `params`.
    ///
    /// # Errors
    /// As [`Self::enter`].
    pub(super) async fn begin(
        &mut self,
        params: &mut CommonParams,
        endpoint: EndpointType,
    ) -> Result<(Arc<ServedModel>, RequestContext), ApiError> {
        self.guard.complete(params);
        let is_stream = params.stream.is_some();
        self.enter_stream(&params.model, Some(endpoint), is_stream)
            .await
    }

    /// Waits for the beginning of an answer. `None` if the answer is streamed and has not begun after the silence that a stream
    /// may have: then its stream begins before it. Over the wire an engine accepts a request with its first token, so this may be
    /// the time of a whole prefill.
    pub(super) async fn until_silent<T>(
        &self,
        is_stream: bool,
        begun: impl Future<Output = T>,
    ) -> Option<T> {
        let limit = self.app.config.stream_keep_alive;
        if !is_stream || limit.is_zero() {
            return Some(begun.await);
        }
        tokio::time::timeout(limit, begun).await.ok()
    }

    /// Starts the first of `answers`, and waits until its engine has accepted it or [its stream must
    /// begin](Self::until_silent).
    ///
    /// # Errors
    /// The engine's refusal.
    pub(super) async fn start(
        &self,
        answers: &mut Answers,
        is_stream: bool,
    ) -> Result<(), ApiError> {
        self.guard.measure(answers);
        let begun = self.until_silent(is_stream, answers.begin()).await;
        begun.transpose()?;
        Ok(())
    }

    /// Returns the answer of a request with one prompt and one choice, once it is [started](Self::start).
    ///
    /// # Errors
    /// The engine's refusal.
    pub(super) async fn sole_answer(
        &self,
        mut answers: Answers,
        is_stream: bool,
    ) -> Result<Answer, ApiError> {
        self.start(&mut answers, is_stream).await?;
        let answer = answers.next();
        Ok(answer.ok_or_else(|| EngineError::internal("the request has no answer"))?)
    }

    pub(super) fn limits(&self) -> ParamLimits {
        ParamLimits::from(&*self.app.config)
    }

    /// Parses the body as a request. A long body is parsed where it delays no other request.
    ///
    /// # Errors
    /// The errors of `parse`.
    pub(super) async fn parse<T: Send + 'static>(
        &mut self,
        parse: impl FnOnce(JsonBody<'_>, &ParamLimits) -> Result<T, ApiError> + Send + 'static,
    ) -> Result<T, ApiError> {
        self.parse_further(0, parse).await
    }

    /// Like [`Self::parse`], for `further_bytes` of text besides the body, such as what remains of an earlier parse.
    ///
    /// # Errors
    /// The errors of `parse`.
    pub(super) async fn parse_further<T: Send + 'static>(
        &mut self,
        further_bytes: usize,
        parse: impl FnOnce(JsonBody<'_>, &ParamLimits) -> Result<T, ApiError> + Send + 'static,
    ) -> Result<T, ApiError> {
        let (body, limits) = (self.body.take(), self.limits());
        let parse = move |body: JsonBody<'_>| parse(body, &limits);
        let (work, deadline) = (self.app.models.work(), self.ctx.deadline());
        let memory = self.guard.memory();
        body.read(work, deadline, further_bytes, memory, parse)
            .await
    }

    /// Writes a whole answer, which takes about as long as parsing `bytes` of text, where it delays no other request.
    ///
    /// # Errors
    /// The error of `write`; a 504 if the deadline passes first.
    pub(super) async fn reply(
        &self,
        bytes: usize,
        write: impl FnOnce() -> Result<String, ApiError> + Send + 'static,
    ) -> Result<Reply, ApiError> {
        let (work, deadline) = (self.app.models.work(), self.ctx.deadline());
        let json = work.run(bytes, deadline, |_: &_| write()).await?;
        Ok(Reply::Json(json))
    }
}

/// A successful answer.
pub(super) enum Reply {
    /// A whole JSON body.
    Json(String),
    /// A body that is not written yet. It owns the request's guard from here on.
    Streamed(Box<dyn FnOnce(RequestGuard) -> Response + Send>),
}

/// The function that answers a request.
pub(super) type Work = for<'a> fn(&'a mut Call) -> BoxFuture<'a, Result<Reply, ApiError>>;

/// The format in which an API writes its errors.
#[derive(Debug, Clone, Copy)]
pub(super) enum WriteError {
    /// The format of OpenAI's API, which writes places in a request this way.
    OpenAi(ParamName),
    Anthropic,
}

/// A request as received.
pub(super) struct Given {
    /// The route's name in metrics.
    pub(super) endpoint: &'static str,
    pub(super) caller: Caller,
    pub(super) headers: HeaderMap,
    pub(super) body: Body,
}

/// Answers a request in every case, also after a panic. The response of a stream [begins](early_response) before its answer if the
/// request waits long for a place.
pub(super) async fn answer(
    app: App,
    given: Given,
    work: Work,
    write_error: WriteError,
) -> Response {
    let limit = app.config.stream_keep_alive;
    let error_data = match write_error {
        WriteError::OpenAi(_) => ERROR_DATA,
        WriteError::Anthropic => NAMED_ERROR_DATA,
    };
    let (begin, begun) = Begin::new(limit);
    let begin = (!limit.is_zero()).then_some(begin);
    let mut answer = answer_within(app, given, work, write_error, begin).boxed();
    tokio::select! {
        biased;
        response = &mut answer => response,
        Ok(()) = begun => early_response(answer, error_data, limit),
    }
}

async fn answer_within(
    app: App,
    given: Given,
    work: Work,
    write_error: WriteError,
    begin: Option<Begin>,
) -> Response {
    let Given {
        endpoint,
        caller,
        headers,
        body,
    } = given;
    let request_id = request_id(&headers);
    let mut guard = app.metrics.request(endpoint, &request_id);
    let mut call = Call {
        body: HeldBody::empty(guard.memory().another()),
        guard,
        ctx: context(&app, &request_id, &headers),
        request_id,
        caller,
        app,
        body_bytes: 0,
        begin,
    };
    let answered = AssertUnwindSafe(read_and_work(&mut call, &headers, body, work))
        .catch_unwind()
        .await
        .unwrap_or_else(|_panic| {
            tracing::error!(request_id = call.request_id, "a handler panicked");
            Err(EngineError::internal("the server failed on this request").into())
        });
    let Call {
        request_id,
        mut guard,
        ..
    } = call;
    // A client may take its answer long after the request has ended.
    let answered = answered.and_then(|reply| {
        Ok(match reply {
            Reply::Json(json) => Ok(held(json, guard.memory().another())?),
            Reply::Streamed(write) => Err(write),
        })
    });
    let ignored = guard.ignored();
    let response = match answered {
        Ok(Ok(json)) => {
            guard.set_status(StatusCode::OK);
            whole_response(json)
        }
        Ok(Err(write)) => write(guard),
        Err(error) => {
            guard.fail(&error);
            let status = error.status.as_u16();
            tracing::debug!(request_id, status, error = %shown(&error.to_string()), "refused");
            match write_error {
                WriteError::OpenAi(name) => error.response(name),
                WriteError::Anthropic => anthropic_error(&error, &request_id),
            }
        }
    };
    with_ignored(response, ignored)
}

async fn read_and_work(
    call: &mut Call,
    headers: &HeaderMap,
    body: Body,
    work: Work,
) -> Result<Reply, ApiError> {
    call.guard.admit(call.caller.clone())?;
    if let Some(deadline) = deadline_of(headers)? {
        call.ctx = call.ctx.clone().with_deadline(deadline);
    }
    call.guard.read_rank(headers)?;
    let memory = call.guard.memory().another();
    call.body = read_body(&call.app.config, memory, headers, body).await?;
    call.body_bytes = call.body.len();
    call.guard.body_read();
    if call.app.draining.is_cancelled() {
        return Err(ApiError::draining());
    }
    call.ctx = call.guard.trace(call.ctx.clone());
    work(call).await
}

/// The time after which the client no longer needs the answer to a request that has just arrived, if it sets one.
///
/// # Errors
/// A 400 that names the header.
fn deadline_of(headers: &HeaderMap) -> Result<Option<Instant>, ApiError> {
    let Some(value) = headers.get(REQUEST_TIMEOUT) else {
        return Ok(None);
    };
    let seconds = value.to_str().ok().and_then(|value| value.parse().ok());
    let timeout = seconds.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
    let timeout = timeout.filter(|timeout| !timeout.is_zero());
    let timeout = timeout.ok_or_else(|| {
        let problem = "expected seconds, more than 0, as in \"2.5\"";
        ApiError::invalid(REQUEST_TIMEOUT, problem)
    })?;
    // A deadline too far away to be represented is no deadline.
    Ok(Instant::now().checked_add(timeout))
}

/// The context that the engine receives for a request: a unique id and its trace.
fn context(app: &App, request_id: &str, headers: &HeaderMap) -> RequestContext {
    let text = |name: &str| headers.get(name).and_then(|value| value.to_str().ok());
    // A client may send the same id twice; this id is unique among the requests in flight.
    let id = format!("{request_id}.{:08x}", rand::random::<u32>());
    let mut ctx = app.all_requests.child().with_id(id);
    let key = app.config.affinity_header.as_ref();
    if let Some(key) = key.and_then(|name| text(name.as_str())) {
        ctx = ctx.with_affinity(key);
    }
    let (parent, state) = (text("traceparent"), text("tracestate"));
    let trace = TraceContext::parse(parent.unwrap_or_default(), state.unwrap_or_default());
    match trace {
        Some(trace) => ctx.with_trace(trace),
        None => ctx,
    }
}

/// A unique id for an answer.
pub(super) fn new_id(prefix: &str) -> String {
    format!("{prefix}{:032x}", rand::random::<u128>())
}

pub(super) async fn embeddings(call: &mut Call) -> Result<Reply, ApiError> {
    let max_inputs = call.app.config.max_embedding_inputs;
    let parse =
        move |body: JsonBody<'_>, _: &ParamLimits| EmbeddingRequest::parse(body, max_inputs);
    let request = call.parse(parse).await?;
    call.guard.ignores(&request.hints, REASONING_EFFORT);
    let (name, encoding) = (request.model.clone(), request.encoding);
    let (model, ctx) = call.enter(&name, Some(EndpointType::Embeddings)).await?;
    let rank = call.guard.rank();
    let job = |room| EmbedJob::prepare(model, request, rank, room);
    let job = call.guard.prepare(&ctx, job).await?;
    let embedded = job.run(&ctx, call.guard.account()).await?;
    call.guard.input_length(embedded.prompt_tokens);
    let numbers = embedded.embeddings.iter().map(Vec::len).sum::<usize>();
    call.guard
        .memory()
        .grow(numbers.saturating_mul(EMBEDDED_NUMBER_BYTES))?;
    // A number takes about ten bytes.
    let write = move || {
        let (embeddings, tokens) = (&embedded.embeddings, embedded.prompt_tokens);
        Ok(embeddings_json(&name, embeddings, encoding, tokens))
    };
    call.reply(numbers.saturating_mul(10), write).await
}

pub(super) async fn tokenize(call: &mut Call) -> Result<Reply, ApiError> {
    let request = call
        .parse(|body, limits| TokenizeRequest::parse(body, limits))
        .await?;
    let (model, ctx) = call.enter(&request.model, None).await?;
    let tokens = match request.input {
        TokenizeInput::Prompt {
            text,
            add_special_tokens,
        } => {
            let model = Arc::clone(&model);
            let tokens = |room| pipeline::tokenize_prompt(model, text, add_special_tokens, room);
            call.guard.prepare(&ctx, tokens).await?
        }
        TokenizeInput::Chat(chat) => {
            let of_model = Arc::clone(&model);
            let job = (call.guard).prepare(&ctx, |room| Job::chat(of_model, *chat, room));
            let job = job.await?;
            let prompt = job.prompt().map(<[_]>::to_vec);
            prompt.ok_or_else(|| pipeline::no_tokenizer(&model))?
        }
    };
    call.guard.account().charge_counted(tokens.len());
    let shows_strings = request.return_token_strs;
    let count = tokens.len();
    let a_token = if shows_strings {
        SHOWN_TOKEN_BYTES
    } else {
        WRITTEN_TOKEN_BYTES
    };
    let room = count.saturating_mul(a_token);
    call.guard.memory().grow(room)?;
    let write = move || {
        let strings = shows_strings.then(|| pipeline::token_strings(&model, &tokens));
        let context = model.card.context_length_tokens;
        Ok(tokenize_json(
            context,
            &tokens,
            strings.transpose()?.as_deref(),
        ))
    };
    // A token takes about ten bytes.
    call.reply(count.saturating_mul(10), write).await
}

pub(super) async fn detokenize(call: &mut Call) -> Result<Reply, ApiError> {
    let request = call.parse(|body, _| DetokenizeRequest::parse(body)).await?;
    let (model, ctx) = call.enter(&request.model, None).await?;
    let count = request.tokens.len();
    let text = |room| pipeline::detokenize(model, request.tokens, room);
    let prompt = call.guard.prepare(&ctx, text).await?;
    call.guard.account().charge_counted(count);
    let bytes = prompt.len();
    // A growing string may reserve as much again.
    call.guard.memory().grow(bytes.saturating_mul(2))?;
    let write = move || Ok(detokenize_json(&prompt));
    call.reply(bytes / WRITTEN_BYTES, write).await
}
