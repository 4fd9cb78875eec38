//! `/v1/messages`: a chat for Anthropic's clients, whole or streamed, and the count of its prompt's tokens.

use std::future::poll_fn;
use std::sync::Arc;

use axum::body::Body as AnyBody;
use axum::response::{IntoResponse, Response};
use bytes::BytesMut;
use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use genset_backend_common::{EndpointType, EngineError};
use serde_json::{Value, json};

use super::apis::{Call, Reply};
use super::handlers::find_model;
use super::stream::{AnswerEvents, stream};
use crate::answer::{Answer, AnswerEnd, Ending, RatedToken, Spent};
use crate::anthropic::{
    Blocks, EventEncoder, MessageHead, MessagesRequest, error_json, in_our_words, message_json,
};
use crate::error::ApiError;
use crate::markup::Delta;
use crate::pipeline::{self, Job};

/// Errors as Anthropic's API has them.
pub(super) fn anthropic_error(error: &ApiError, request_id: &str) -> Response {
    let error = in_our_words(error.clone());
    let body = error_json(&error, request_id).to_string();
    // Status and headers are those of any error.
    let mut response = error.into_response();
    *response.body_mut() = AnyBody::from(body);
    response
}

pub(super) fn count_tokens(call: &mut Call) -> BoxFuture<'_, Result<Reply, ApiError>> {
    async move {
        let request = call.parse(MessagesRequest::parse_to_count).await?;
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
        let request = call.parse(MessagesRequest::parse).await?;
        let head = MessageHead {
            id: format!("msg_{:032x}", rand::random::<u128>()),
            model: request.chat.params.model.clone(),
            shows_thinking: request.shows_thinking,
            stop_sequences: Arc::clone(&request.chat.params.stop_strings),
        };
        let is_stream = request.chat.params.stream;
        call.guard.model(&head.model);
        let model = find_model(&call.app, &head.model, EndpointType::Chat)?;
        let ctx = call.admit(&model).await?;
        let job = Job::chat(model, request.chat).await?;
        let prompt_tokens = job.prompt().map_or(0, <[_]>::len);
        let mut answers = job.answers(&ctx)?;
        call.guard.measure(&mut answers);
        pipeline::begin(&mut answers).await?;
        // One prompt and one choice have one answer.
        let answer = answers.pop();
        let answer = answer.ok_or_else(|| EngineError::internal("the request has no answer"))?;
        if is_stream {
            let events = MessageEvents {
                encoder: EventEncoder::new(head),
                prompt_tokens: u32::try_from(prompt_tokens).unwrap_or(u32::MAX),
                request_id: call.request_id.clone(),
            };
            return Ok(Reply::Streamed(Box::new(|guard| {
                stream(events, answer, guard)
            })));
        }
        let (message, spent) = whole(&head, answer).await?;
        call.guard.text();
        call.guard.spent(&spent);
        Ok(Reply::Json(message.to_string()))
    }
    .boxed()
}

/// Reads an answer to its end.
async fn whole(head: &MessageHead, mut answer: Answer) -> Result<(Value, Spent), EngineError> {
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
    let ending = answer.end(|delta, _| blocks.add(delta));
    let message = message_json(head, blocks, &end, ending.has_calls);
    Ok((message, ending.spent(&end)))
}

/// The events of one message.
struct MessageEvents {
    encoder: EventEncoder,
    prompt_tokens: u32,
    request_id: String,
}

impl AnswerEvents for MessageEvents {
    fn start(&mut self, out: &mut BytesMut) {
        self.encoder.start(self.prompt_tokens, out);
    }

    fn delta(&mut self, delta: Delta<'_>, _rated: &[RatedToken], out: &mut BytesMut) {
        self.encoder.delta(delta, out);
    }

    fn finish(mut self, end: &AnswerEnd, ending: Ending, out: &mut BytesMut) {
        self.encoder.finish(end, ending.has_calls, out);
    }

    fn fail(self, error: ApiError, out: &mut BytesMut) {
        self.encoder.error(error, &self.request_id, out);
    }
}
