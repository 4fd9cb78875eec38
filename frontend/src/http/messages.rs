//! `/v1/messages`: a chat for Anthropic's clients, whole or streamed, and the count of its prompt's tokens.

use std::convert::Infallible;
use std::future::poll_fn;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use axum::body::Body as AnyBody;
use axum::response::{IntoResponse, Response};
use bytes::{Bytes, BytesMut};
use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use genset_backend_common::output::Usage;
use genset_backend_common::{EndpointType, EngineError};
use http::StatusCode;
use http_body::{Body, Frame};
use serde_json::{Value, json};

use super::apis::{Call, Reply};
use super::body::FRAME_BYTES;
use super::handlers::{self, event_response, find_model};
use super::metrics::RequestGuard;
use crate::answer::{Answer, AnswerEnd};
use crate::anthropic::{
    Blocks, EventEncoder, MessageHead, MessagesRequest, error_json, in_our_words, message_json,
};
use crate::error::ApiError;
use crate::pipeline::{self, Job};

/// The header in which Anthropic's clients look for the request's id.
const REQUEST_ID: &str = "request-id";

/// Errors as Anthropic's API has them.
pub(super) fn anthropic_error(error: &ApiError, request_id: &str) -> Response {
    let error = in_our_words(error.clone());
    let body = error_json(&error, request_id).to_string();
    // Status and headers are those of any error.
    let mut response = error.into_response();
    *response.body_mut() = AnyBody::from(body);
    response
}

/// Repeats the request's id where Anthropic's clients look for it.
pub(super) fn repeat_request_id(mut response: Response) -> Response {
    if let Some(id) = response.headers().get(handlers::REQUEST_ID).cloned() {
        response.headers_mut().insert(REQUEST_ID, id);
    }
    response
}

pub(super) fn count_tokens(call: &mut Call) -> BoxFuture<'_, Result<Reply, ApiError>> {
    async move {
        let request = MessagesRequest::parse_to_count(&call.body, &call.limits())?;
        let model = find_model(&call.app, &request.chat.params.model, EndpointType::Chat)?;
        let job = Job::chat(model.clone(), request.chat).await?;
        let tokens = job.prompt().ok_or_else(|| pipeline::no_tokenizer(&model))?;
        Ok(Reply::Json(
            json!({"input_tokens": tokens.len()}).to_string(),
        ))
    }
    .boxed()
}

pub(super) fn messages(call: &mut Call) -> BoxFuture<'_, Result<Reply, ApiError>> {
    async move {
        let request = MessagesRequest::parse(&call.body, &call.limits())?;
        let head = MessageHead {
            id: format!("msg_{:032x}", rand::random::<u128>()),
            model: request.chat.params.model.clone(),
            shows_thinking: request.shows_thinking,
            stop_sequences: Arc::clone(&request.chat.params.stop_strings),
        };
        let is_stream = request.chat.params.stream;
        call.guard.model(&head.model);
        let model = find_model(&call.app, &head.model, EndpointType::Chat)?;
        let job = Job::chat(model, request.chat).await?;
        let prompt_tokens = job.prompt().map_or(0, <[_]>::len);
        let ctx = call.context()?;
        let mut answers = job.start(&ctx).await?;
        call.guard.measure(&mut answers);
        // One prompt and one choice have one answer.
        let answer = answers.pop();
        let answer = answer.ok_or_else(|| EngineError::internal("the request has no answer"))?;
        if is_stream {
            let streamed = Streamed {
                encoder: EventEncoder::new(head),
                answer,
                prompt_tokens: u32::try_from(prompt_tokens).unwrap_or(u32::MAX),
                request_id: call.request_id.clone(),
            };
            return Ok(Reply::Streamed(Box::new(|guard| streamed.response(guard))));
        }
        let (message, end) = whole(&head, answer).await?;
        call.guard.text();
        call.guard.usage(&usage_of(&end));
        Ok(Reply::Json(message.to_string()))
    }
    .boxed()
}

/// Reads an answer to its end.
async fn whole(head: &MessageHead, mut answer: Answer) -> Result<(Value, AnswerEnd), EngineError> {
    let mut text = String::new();
    let end = loop {
        if let Some(end) = poll_fn(|cx| answer.poll_text(cx, &mut text)).await? {
            break end;
        }
    };
    let mut blocks = Blocks::new(head.shows_thinking);
    if !text.is_empty() {
        answer.deliver(&text, |delta, _| blocks.add(delta));
    }
    let has_calls = answer.end(|delta, _| blocks.add(delta)).has_calls;
    Ok((message_json(head, blocks, &end, has_calls), end))
}

fn usage_of(end: &AnswerEnd) -> Usage {
    let mut usage = Usage::default();
    end.add_to(&mut usage);
    usage
}

/// A message that is to be streamed.
struct Streamed {
    encoder: EventEncoder,
    answer: Answer,
    prompt_tokens: u32,
    request_id: String,
}

impl Streamed {
    fn response(self, guard: RequestGuard) -> Response {
        let mut buffer = BytesMut::new();
        self.encoder.start(self.prompt_tokens, &mut buffer);
        event_response(MessageBody {
            encoder: self.encoder,
            answer: Some(self.answer),
            request_id: self.request_id,
            guard,
            buffer,
            text: String::new(),
            has_sent_text: false,
        })
    }
}

/// The events of one message, written as the tokens come. Dropping it cancels what still runs.
struct MessageBody {
    encoder: EventEncoder,
    /// Gone when it has ended.
    answer: Option<Answer>,
    request_id: String,
    guard: RequestGuard,
    buffer: BytesMut,
    /// Text of the present item; empty between two.
    text: String,
    has_sent_text: bool,
}

impl MessageBody {
    /// Writes what is ready, until nothing is or the frame is full. The first text leaves at once.
    fn fill(&mut self, cx: &mut Context<'_>) {
        while self.buffer.len() < FRAME_BYTES {
            let Some(answer) = &mut self.answer else {
                return;
            };
            let Poll::Ready(result) = answer.poll_text(cx, &mut self.text) else {
                return;
            };
            let before = self.buffer.len();
            if !self.text.is_empty() {
                let (encoder, buffer) = (&mut self.encoder, &mut self.buffer);
                answer.deliver(&self.text, |delta, _| encoder.delta(delta, buffer));
                self.text.clear();
                self.guard.text();
            }
            let has_text = self.buffer.len() > before;
            match result {
                Ok(None) => {}
                Ok(Some(end)) => self.end(end),
                Err(error) => self.fail(error),
            }
            if has_text && !std::mem::replace(&mut self.has_sent_text, true) {
                return;
            }
        }
    }

    fn end(&mut self, end: AnswerEnd) {
        let (encoder, buffer) = (&mut self.encoder, &mut self.buffer);
        let ending = self
            .answer
            .take()
            .map(|answer| answer.end(|delta, _| encoder.delta(delta, buffer)));
        let has_calls = ending.is_some_and(|ending| ending.has_calls);
        self.encoder.finish(&end, has_calls, &mut self.buffer);
        self.guard.set_status(StatusCode::OK);
        self.guard.usage(&usage_of(&end));
    }

    fn fail(&mut self, error: EngineError) {
        self.answer = None;
        let error = ApiError::from(error);
        self.guard.fail(&error);
        self.encoder
            .error(error, &self.request_id, &mut self.buffer);
    }
}

impl Body for MessageBody {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let this = &mut *self;
        this.fill(cx);
        if !this.buffer.is_empty() {
            return Poll::Ready(Some(Ok(Frame::data(this.buffer.split().freeze()))));
        }
        if this.answer.is_some() {
            Poll::Pending
        } else {
            Poll::Ready(None)
        }
    }

    fn is_end_stream(&self) -> bool {
        self.answer.is_none() && self.buffer.is_empty()
    }
}
