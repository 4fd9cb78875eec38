//! `/v1/messages`: a chat for Anthropic's clients, whole or streamed, and the count of its prompt tokens.

use std::sync::Arc;

use axum::response::Response;
use bytes::BytesMut;
use genset_backend_common::card::EndpointType;
use http::{HeaderMap, HeaderName};
use serde_json::json;

use super::apis::{Call, Reply, new_id};
use super::request_id::request_id;
use super::stream::{AnswerEvents, stream};
use crate::answer::{AnswerEnd, Ending, TokenLogprobs};
use crate::anthropic::{
    Blocks, MessageEncoder, MessageHead, MessagesRequest, error_json, message_json,
};
use crate::error::{ApiError, Param};
use crate::markup::Delta;
use crate::pipeline::{self, Job};

/// This API's name for a chat's `reasoning_effort`.
const EFFORT: &str = "output_config.effort";

/// The header that Anthropic's clients send with every request.
const VERSION: HeaderName = HeaderName::from_static("anthropic-version");

/// Whether a request's client reads Anthropic's format: it asks this API, or says so in a header.
pub(super) fn reads_anthropics(path: &str, headers: &HeaderMap) -> bool {
    path.starts_with("/v1/messages") || headers.contains_key(VERSION)
}

/// The response to a request that no route answers, in the format that its client reads.
pub(super) fn refusal(path: &str, headers: &HeaderMap, error: &ApiError) -> Response {
    if reads_anthropics(path, headers) {
        anthropic_error(error, &request_id(headers))
    } else {
        error.response(Param::plain)
    }
}

/// Formats errors as Anthropic's API does.
pub(super) fn anthropic_error(error: &ApiError, request_id: &str) -> Response {
    error.response_with(error_json(error, request_id).to_string())
}

pub(super) async fn count_tokens(call: &mut Call) -> Result<Reply, ApiError> {
    let request = call
        .parse(|body, limits| MessagesRequest::parse_to_count(body, limits))
        .await?;
    let name = &request.chat.params.model;
    let (model, ctx) = call.enter(name, Some(EndpointType::Chat)).await?;
    let of_model = Arc::clone(&model);
    let job = (call.guard).prepare(&ctx, |room| Job::chat(of_model, request.chat, room));
    let job = job.await?;
    call.guard.ignores(&job.params().hints, EFFORT);
    let tokens = job.prompt().ok_or_else(|| pipeline::no_tokenizer(&model))?;
    call.guard.account().charge_counted(tokens.len());
    Ok(Reply::Json(
        json!({"input_tokens": tokens.len()}).to_string(),
    ))
}

pub(super) async fn messages(call: &mut Call) -> Result<Reply, ApiError> {
    let mut request = call
        .parse(|body, limits| MessagesRequest::parse(body, limits))
        .await?;
    let head = MessageHead {
        id: new_id("msg_"),
        model: request.chat.params.model.clone(),
        shows_thinking: request.shows_thinking,
        stop_sequences: Arc::clone(&request.chat.params.stop_strings),
    };
    let is_stream = request.chat.params.stream.is_some();
    let params = &mut request.chat.params;
    let (model, ctx) = call.begin(params, EndpointType::Chat).await?;
    let job = (call.guard).prepare(&ctx, |room| Job::chat(model, request.chat, room));
    let job = job.await?;
    call.guard.ignores(&job.params().hints, EFFORT);
    let prompt_tokens = job.prompt().map_or(0, <[_]>::len);
    let answers = job.answers(&ctx).await?;
    let answer = call.sole_answer(answers, is_stream).await?;
    if is_stream {
        let events = MessageEvents {
            encoder: MessageEncoder::new(head),
            prompt_tokens: u32::try_from(prompt_tokens).unwrap_or(u32::MAX),
            request_id: call.request_id.clone(),
        };
        let keep_alive = call.app.config.stream_keep_alive;
        return Ok(Reply::Streamed(Box::new(move |guard| {
            stream(events, answer, guard, None, keep_alive)
        })));
    }
    let mut memory = call.guard.memory().another();
    let mut blocks = Blocks::new(head.shows_thinking);
    let add = |delta: Delta<'_>, _: &[TokenLogprobs]| blocks.add(delta);
    let (end, ending) = answer.read_all(&mut memory, add).await?;
    let total = ending.total_usage(&end);
    let message = message_json(&head, blocks, &end, &ending);
    call.guard.text();
    call.guard.add_usage(&total);
    Ok(Reply::Json(message.to_string()))
}

/// The events of one message.
struct MessageEvents {
    encoder: MessageEncoder,
    prompt_tokens: u32,
    request_id: String,
}

impl AnswerEvents for MessageEvents {
    const KEEP_ALIVE: &'static [u8] = MessageEncoder::PING;

    fn start(&mut self, out: &mut BytesMut) {
        self.encoder.start(self.prompt_tokens, out);
    }

    fn delta(&mut self, delta: Delta<'_>, _rated: &[TokenLogprobs], out: &mut BytesMut) {
        self.encoder.delta(delta, out);
    }

    fn finish(mut self, end: &AnswerEnd, ending: Ending, out: &mut BytesMut) {
        self.encoder.finish(end, &ending, out);
    }

    fn fail(self, error: ApiError, out: &mut BytesMut) {
        self.encoder.error(&error, &self.request_id, out);
    }
}
