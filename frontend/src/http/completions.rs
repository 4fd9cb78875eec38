//! Chats and completions: their choices, whole or streamed side by side.

use std::ops::ControlFlow;

use bytes::BytesMut;
use futures_util::{StreamExt, TryStreamExt, stream};
use genset_backend_common::{RequestContext, card::EndpointType};

use super::apis::{Call, Reply, new_id};
use super::body::ChoiceEvents;
use super::replies::event_response;
use super::whole::{self, Parse};
use crate::answer::{Completed, TotalUsage};
use crate::budget::MemoryShare;
use crate::clock::now;
use crate::error::ApiError;
use crate::openai::{
    Api, ChatRequest, ChunkEncoder, CompletionHead, CompletionRequest, Streaming, completed_choice,
    explanation_json, response_json,
};
use crate::pipeline::{Answers, Job, REASONING_EFFORT};

/// How many bytes of an answer's text are written in the time in which a tokenizer encodes one byte.
pub(super) const WRITTEN_BYTES: usize = 16;

pub(super) async fn chat(call: &mut Call) -> Result<Reply, ApiError> {
    let parse: Parse<ChatRequest> = |body, limits| ChatRequest::parse(body, limits);
    let mut request = match whole::ask(call, Api::Chat, parse).await? {
        ControlFlow::Break(reply) => return Ok(reply),
        ControlFlow::Continue(request) => request,
    };
    let (model, ctx) = call.begin(&mut request.params, EndpointType::Chat).await?;
    let job = (call.guard).prepare(&ctx, |room| Job::chat(model, request, room));
    let job = job.await?;
    answer(call, Api::Chat, &ctx, job).await
}

pub(super) async fn completions(call: &mut Call) -> Result<Reply, ApiError> {
    let parse: Parse<CompletionRequest> = |body, limits| CompletionRequest::parse(body, limits);
    let mut request = match whole::ask(call, Api::Completions, parse).await? {
        ControlFlow::Break(reply) => return Ok(reply),
        ControlFlow::Continue(request) => request,
    };
    let endpoint = EndpointType::Completions;
    let (model, ctx) = call.begin(&mut request.params, endpoint).await?;
    let job = (call.guard).prepare(&ctx, |room| Job::completion(model, request, room));
    let job = job.await?;
    answer(call, Api::Completions, &ctx, job).await
}

async fn answer(
    call: &mut Call,
    api: Api,
    ctx: &RequestContext,
    job: Job,
) -> Result<Reply, ApiError> {
    call.guard.ignores(&job.params().hints, REASONING_EFFORT);
    let head = CompletionHead {
        api,
        id: new_id(api.id_prefix()),
        created: now(),
        model: job.params().model.clone(),
    };
    let streaming = job.params().stream;
    let mut answers = job.answers(ctx).await?;
    call.start(&mut answers, streaming.is_some()).await?;
    if let Some(Streaming { has_usage }) = streaming {
        let encoder = ChunkEncoder::new(&head, has_usage);
        let keep_alive = call.app.config.stream_keep_alive;
        return Ok(Reply::Streamed(Box::new(move |guard| {
            let events = ChoiceEvents::new(encoder, answers, has_usage, guard);
            event_response(events, BytesMut::new(), keep_alive)
        })));
    }
    let guard = &mut call.guard;
    let explanation = answers.explanation().cloned();
    let (answers, memory) = collect(answers, guard.memory().another()).await?;
    let mut total = TotalUsage::default();
    for answer in &answers {
        total.add(&answer.end, answer.reasoning_tokens);
    }
    guard.text();
    guard.add_usage(&total);
    // Writing a token takes about as long as tokenizing a byte.
    let text: usize = answers
        .iter()
        .map(|answer| answer.message.content.len())
        .sum();
    let tokens = usize::try_from(total.usage.completion_tokens).unwrap_or(usize::MAX);
    let bytes = tokens.saturating_add(text / WRITTEN_BYTES);
    let write = move || {
        let _memory = memory;
        let choices = answers.iter().enumerate();
        let choices = choices.map(|(index, answer)| completed_choice(api, index, answer));
        let mut response = response_json(&head, choices.collect(), &total);
        if let Some(explanation) = &explanation {
            response["genset"] = explanation_json(explanation);
        }
        Ok(response.to_string())
    };
    call.reply(bytes, write).await
}

/// Collects all answers, up to their limit at once, each on its own account beside `memory`.
async fn collect(
    answers: Answers,
    memory: MemoryShare,
) -> Result<(Vec<Completed>, Vec<MemoryShare>), ApiError> {
    let (at_once, count) = (answers.at_once().get(), answers.len());
    let collected = answers.enumerate().map(move |(index, answer)| {
        let memory = memory.another();
        async move { Ok::<_, ApiError>((index, answer.collect_on(memory).await?)) }
    });
    let mut collected = stream::iter(collected).buffer_unordered(at_once);
    let mut all = Vec::with_capacity(count);
    while let Some(answer) = collected.try_next().await? {
        all.push(answer);
    }
    all.sort_unstable_by_key(|(index, _)| *index);
    Ok(all.into_iter().map(|(_, answer)| answer).unzip())
}
