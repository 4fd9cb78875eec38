//! Chats and completions of models whose engines read the whole body and write the API's own objects: both pass through. Only the
//! body's model name, stream flag and affinity key are read; the answer is not read at all.

use std::borrow::Cow;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::{BufMut, BytesMut};
use futures_util::{StreamExt, TryFutureExt};
use genset_backend_common::output::Usage;
use genset_backend_common::{
    EngineError, ErrorKind, GenerateRequest, Output, OutputStream, card::EndpointType,
};
use http::StatusCode;
use serde::Deserialize;

use super::apis::{Call, Reply};
use super::metrics::RequestGuard;
use super::replies::{FRAME_BYTES, WriteEvents, event_response};
use crate::answer::{Meter, Starting};
use crate::error::ApiError;
use crate::json::JsonBody;
use crate::model::{Models, ServedModel};
use crate::openai::{Api, ParamLimits};

/// How an API parses a body.
pub(super) type Parse<T> = fn(JsonBody<'_>, &ParamLimits) -> Result<T, ApiError>;

/// A body, as far as it was read.
enum Read<T> {
    /// The engine reads it, or nobody serves its model now: the model that appears decides who reads it.
    Unread(Whole),
    Known(T),
}

/// A body as received.
struct Whole {
    model: String,
    is_stream: bool,
    body: String,
    affinity: Option<String>,
}

/// The field of a body that names its model.
#[derive(Deserialize)]
struct Named<'a> {
    #[serde(borrow)]
    model: Cow<'a, str>,
}

/// Parses a body with `parse`, unless its model takes whole bodies: then the engine answers, and the request is done. If nobody
/// serves the model now and it may take whole bodies, waits for it first. A batch's line may name a model that is not announced
/// yet.
///
/// # Errors
/// The errors of `parse`, [`Call::model`] and [`answer`].
pub(super) async fn ask<T: Send + 'static>(
    call: &mut Call,
    api: Api,
    parse: Parse<T>,
) -> Result<ControlFlow<Reply, T>, ApiError> {
    if !call.caller.is_local && !call.app.models.may_take_whole_bodies() {
        return call.parse(parse).await.map(ControlFlow::Continue);
    }
    let models = call.app.models.clone();
    let read = move |body: JsonBody<'_>, limits: &ParamLimits| read(body, &models, limits, parse);
    let whole = match call.parse(read).await? {
        Read::Known(request) => return Ok(ControlFlow::Continue(request)),
        Read::Unread(whole) => whole,
    };
    call.guard.model(&whole.model);
    call.guard.memory().grow(whole.body.len())?;
    let endpoint = match api {
        Api::Chat => EndpointType::Chat,
        Api::Completions => EndpointType::Completions,
    };
    let model = call.model(&whole.model, Some(endpoint)).await?;
    if takes_whole(&model) {
        let answered = answer(call, api, &model, whole).await;
        return answered.map(ControlFlow::Break);
    }
    let waited_bytes = whole.body.len();
    call.body.put_back(whole.body);
    let read = call.parse(parse).await;
    // The second copy is gone.
    call.guard.memory().shrink(waited_bytes);
    read.map(ControlFlow::Continue)
}

fn takes_whole(model: &ServedModel) -> bool {
    model.card.capabilities.whole_bodies
}

fn read<T>(
    body: JsonBody<'_>,
    models: &Models,
    limits: &ParamLimits,
    parse: Parse<T>,
) -> Result<Read<T>, ApiError> {
    let is_read_here = |name: &str| models.get(name).is_some_and(|model| !takes_whole(&model));
    // A body that names no model is refused.
    let named = serde_json::from_slice::<Named<'_>>(body.bytes());
    let unread = named.ok().filter(|named| !is_read_here(&named.model));
    let Some(Named { model }) = unread else {
        return parse(body, limits).map(Read::Known);
    };
    let fields = body.fields()?;
    let field = |name: &str| {
        let found = fields.iter().find(|(known, _)| known == name);
        found.map(|(_, text)| *text)
    };
    let text = |name: &str| field(name).and_then(|text| serde_json::from_str(text).ok());
    Ok(Read::Unread(Whole {
        model: model.into_owned(),
        affinity: text("prompt_cache_key").or_else(|| text("user")),
        is_stream: field("stream").is_some_and(|text| text.trim() == "true"),
        // Its fields were found in it, so it is UTF-8.
        body: String::from_utf8_lossy(body.bytes()).into_owned(),
    }))
}

/// Passes a body, whose memory the caller has counted, to the model's engine.
///
/// # Errors
/// The errors of [`Call::admit_stream`]; the engine's refusal, or for a whole answer any error of the engine; `Internal` if the engine
/// does not write one object.
async fn answer(
    call: &mut Call,
    api: Api,
    model: &ServedModel,
    asked: Whole,
) -> Result<Reply, ApiError> {
    let ctx = call.admit_stream(model, asked.is_stream).await?;
    let guard = &call.guard;
    let mut request = GenerateRequest::from_text(asked.model, asked.body);
    request.adapter = model.adapter_name();
    request.cache_salt = guard.callers_salt();
    request.data_parallel_rank = guard.rank();
    let ctx = match (ctx.affinity(), asked.affinity) {
        (None, Some(key)) => ctx.with_affinity(key),
        (Some(_), _) | (None, None) => ctx,
    };
    let engine = Arc::clone(&model.engine);
    let mut starting: Starting =
        Box::pin(async move { engine.generate(request, ctx.child()).await });
    if asked.is_stream {
        let started = call.until_silent(true, &mut starting).await;
        let outputs = match started {
            Some(started) => started?,
            None => OutputStream::from_raw(Box::pin(starting.try_flatten_stream())),
        };
        let keep_alive = call.app.config.stream_keep_alive;
        return Ok(Reply::Streamed(Box::new(move |guard| {
            let events = WholeEvents::new(api, outputs, guard);
            event_response(events, BytesMut::new(), keep_alive)
        })));
    }
    let mut outputs = starting.await?;
    let guard = &mut call.guard;
    let mut meter = Meter::new(Arc::clone(guard.account()));
    let mut answered = None;
    while let Some(output) = outputs.next().await {
        match output? {
            Output::Text(chunk) => {
                meter.note_further(chunk.token_count);
                meter.settle();
                if answered.replace(chunk.text).is_some() {
                    return Err(several());
                }
            }
            Output::Finished(finished) => spend(guard, &mut meter, &finished.usage),
            Output::Tokens(_) | Output::Embeddings(_) | Output::Scores(_) => {
                return Err(no_object());
            }
        }
    }
    guard.text();
    Ok(Reply::Json(answered.ok_or_else(no_object)?))
}

/// Ends the accounting of an answer. Its tokens are charged as its objects arrive, its prompt's only here: only the engine counts
/// them.
fn spend(guard: &RequestGuard, meter: &mut Meter, usage: &Usage) {
    guard.usage(usage);
    meter.reach(usage.prompt_tokens, usage.completion_tokens);
}

fn no_object() -> ApiError {
    EngineError::new(
        ErrorKind::StreamIncomplete,
        "the model's engine answered without an object of the API",
    )
    .into()
}

fn several() -> ApiError {
    EngineError::internal(
        "the model's engine answered a request that is not streamed with several objects",
    )
    .into()
}

/// The events of an answer as its engine writes them.
struct WholeEvents {
    api: Api,
    /// `None` once it has ended.
    outputs: Option<OutputStream>,
    /// Declared before the guard, which logs what the meter has charged.
    meter: Meter,
    guard: RequestGuard,
}

impl WholeEvents {
    fn new(api: Api, outputs: OutputStream, guard: RequestGuard) -> Self {
        Self {
            api,
            outputs: Some(outputs),
            meter: Meter::new(Arc::clone(guard.account())),
            guard,
        }
    }

    fn fail(&mut self, error: &ApiError, frame: &mut BytesMut) {
        self.guard.fail(error);
        self.outputs = None;
        let json = error.to_json(self.api.param_name()).to_string();
        put_event(json.as_bytes(), frame);
    }
}

fn put_event(data: &[u8], frame: &mut BytesMut) {
    frame.put_slice(b"data: ");
    // In JSON a line break is whitespace, but in an event it ends the data.
    let is_end = |byte: u8| matches!(byte, b'\n' | b'\r');
    let in_a_line = data
        .iter()
        .map(|byte| if is_end(*byte) { b' ' } else { *byte });
    frame.extend(in_a_line);
    frame.put_slice(b"\n\n");
}

impl WriteEvents for WholeEvents {
    fn fill(&mut self, cx: &mut Context<'_>, frame: &mut BytesMut) {
        while frame.len() < FRAME_BYTES {
            let Some(outputs) = &mut self.outputs else {
                return;
            };
            let Poll::Ready(output) = outputs.poll_next_unpin(cx) else {
                self.meter.settle();
                return;
            };
            match output {
                Some(Ok(Output::Text(chunk))) => {
                    self.meter.note_further(chunk.token_count);
                    put_event(chunk.text.as_bytes(), frame);
                    self.guard.text();
                }
                Some(Ok(Output::Finished(finished))) => {
                    spend(&self.guard, &mut self.meter, &finished.usage);
                    self.guard.set_status(StatusCode::OK);
                    put_event(b"[DONE]", frame);
                    self.outputs = None;
                }
                Some(Ok(Output::Tokens(_) | Output::Embeddings(_) | Output::Scores(_))) | None => {
                    self.fail(&no_object(), frame);
                }
                Some(Err(error)) => self.fail(&error.into(), frame),
            }
        }
    }

    fn has_ended(&self) -> bool {
        self.outputs.is_none()
    }
}
