//! Chats and completions of models whose engines read the whole body and write the API's own objects: both pass through. The body is
//! looked at for the model's name and whether it is to be streamed, the answer not at all.

use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::{BufMut, Bytes, BytesMut};
use futures_util::StreamExt;
use genset_backend_common::output::Usage;
use genset_backend_common::{
    EngineError, ErrorKind, GenerateRequest, Output, OutputStream, card::EndpointType,
};
use http::StatusCode;
use http_body::{Body, Frame};

use super::apis::{Call, Reply};
use super::body::{FRAME_BYTES, next_frame};
use super::metrics::RequestGuard;
use super::replies::event_response;
use crate::error::ApiError;
use crate::json::JsonBody;
use crate::model::Models;
use crate::openai::Api;

/// A body, as it is to be answered.
pub(super) enum Asked<T> {
    /// The engine reads it.
    Whole(Whole),
    /// It was read here.
    Known(T),
}

/// A body that passes through.
pub(super) struct Whole {
    model: String,
    is_stream: bool,
    body: String,
    affinity: Option<String>,
}

/// Reads a body with `parse`, unless the model that it names takes it whole.
///
/// # Errors
/// What `parse` refuses.
pub(super) fn read<T>(
    body: JsonBody<'_>,
    models: &Models,
    parse: impl FnOnce(JsonBody<'_>) -> Result<T, ApiError>,
) -> Result<Asked<T>, ApiError> {
    let takes_whole = |model: &crate::model::ServedModel| model.card.capabilities.whole_bodies;
    if !models.all().iter().any(|model| takes_whole(model)) {
        return parse(body).map(Asked::Known);
    }
    let fields = body.fields()?;
    let field = |name: &str| {
        let found = fields.iter().find(|(known, _)| known == name);
        found.map(|(_, text)| *text)
    };
    let model: Option<String> = field("model").and_then(|text| serde_json::from_str(text).ok());
    let is_taken_whole = |name: &String| models.get(name).is_some_and(|model| takes_whole(&model));
    let text = |name: &str| field(name).and_then(|text| serde_json::from_str(text).ok());
    let Some(model) = model.filter(is_taken_whole) else {
        return parse(body).map(Asked::Known);
    };
    Ok(Asked::Whole(Whole {
        model,
        affinity: text("prompt_cache_key").or_else(|| text("user")),
        is_stream: field("stream").is_some_and(|text| text.trim() == "true"),
        // Its fields were found in it, so it is UTF-8.
        body: String::from_utf8_lossy(body.bytes()).into_owned(),
    }))
}

/// Passes a body to the model's engine.
///
/// # Errors
/// What the engine refuses with, before anything was answered; a 503 where there is no memory for the body or the answer.
pub(super) async fn answer(call: &mut Call, api: Api, asked: Whole) -> Result<Reply, ApiError> {
    call.guard.model(&asked.model);
    let endpoint = match api {
        Api::Chat => EndpointType::Chat,
        Api::Completions => EndpointType::Completions,
    };
    let model = call.model(&asked.model, endpoint).await?;
    let ctx = call.admit(&model).await?;
    let guard = &mut call.guard;
    guard.memory().grow(asked.body.len())?;
    let mut request = GenerateRequest::from_text(asked.model, asked.body);
    request.adapter = model.adapter_name();
    request.cache_salt = guard.callers_salt();
    request.data_parallel_rank = guard.rank();
    let ctx = match (ctx.affinity(), asked.affinity) {
        (None, Some(key)) => ctx.with_affinity(key),
        (Some(_), _) | (None, None) => ctx,
    };
    let mut outputs = model.engine.generate(request, ctx.child()).await?;
    if asked.is_stream {
        return Ok(Reply::Streamed(Box::new(move |guard| {
            event_response(WholeBody::new(api, outputs, guard))
        })));
    }
    let mut answered = None;
    while let Some(output) = outputs.next().await {
        match output? {
            Output::Text(chunk) => {
                if answered.replace(chunk.text).is_some() {
                    return Err(several());
                }
            }
            Output::Finished(finished) => spend(guard, &finished.usage),
            Output::Tokens(_) | Output::Embeddings(_) | Output::Scores(_) => {
                return Err(no_object());
            }
        }
    }
    guard.text();
    Ok(Reply::Json(answered.ok_or_else(no_object)?))
}

fn spend(guard: &RequestGuard, usage: &Usage) {
    guard.usage(usage);
    let account = guard.account();
    account.charge(usage.prompt_tokens, usage.completion_tokens);
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

/// The events of an answer as its engine writes them. Dropping it cancels what still runs.
struct WholeBody {
    api: Api,
    /// Gone when it has ended.
    outputs: Option<OutputStream>,
    guard: RequestGuard,
    buffer: BytesMut,
}

impl WholeBody {
    fn new(api: Api, outputs: OutputStream, guard: RequestGuard) -> Self {
        Self {
            api,
            outputs: Some(outputs),
            guard,
            buffer: BytesMut::new(),
        }
    }

    /// Writes what is ready, until nothing is or the frame is full.
    fn fill(&mut self, cx: &mut Context<'_>) {
        while self.buffer.len() < FRAME_BYTES {
            let Some(outputs) = &mut self.outputs else {
                return;
            };
            let Poll::Ready(output) = outputs.poll_next_unpin(cx) else {
                return;
            };
            match output {
                Some(Ok(Output::Text(chunk))) => {
                    self.event(chunk.text.as_bytes());
                    self.guard.text();
                }
                Some(Ok(Output::Finished(finished))) => {
                    spend(&self.guard, &finished.usage);
                    self.guard.set_status(StatusCode::OK);
                    self.event(b"[DONE]");
                    self.outputs = None;
                }
                Some(Ok(Output::Tokens(_) | Output::Embeddings(_) | Output::Scores(_))) | None => {
                    self.fail(&no_object());
                }
                Some(Err(error)) => self.fail(&error.into()),
            }
        }
    }

    fn event(&mut self, data: &[u8]) {
        self.buffer.put_slice(b"data: ");
        // In JSON a line's end is space, and in an event the end of its data.
        let is_end = |byte: u8| matches!(byte, b'\n' | b'\r');
        let in_a_line = data
            .iter()
            .map(|byte| if is_end(*byte) { b' ' } else { *byte });
        self.buffer.extend(in_a_line);
        self.buffer.put_slice(b"\n\n");
    }

    fn fail(&mut self, error: &ApiError) {
        self.guard.fail(error);
        self.outputs = None;
        let json = error.to_json(self.api.param_name()).to_string();
        self.event(json.as_bytes());
    }
}

impl Body for WholeBody {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let this = &mut *self;
        this.fill(cx);
        next_frame(&mut this.buffer, this.outputs.is_none())
    }

    fn is_end_stream(&self) -> bool {
        self.outputs.is_none() && self.buffer.is_empty()
    }
}
