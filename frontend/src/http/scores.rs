//! The APIs of cross-encoders: reranked documents, and scores of pairs.

use genset_backend_common::card::EndpointType;

use super::apis::{Call, Reply, new_id};
use crate::clock::now;
use crate::error::ApiError;
use crate::json::JsonBody;
use crate::openai::{
    ParamLimits, RerankRequest, RerankedDocuments, ScoreRequest, TextPairs, scores_json,
};
use crate::pipeline::{REASONING_EFFORT, ScoreJob, Scored};

/// Bytes of memory for a score and its text, including spare capacity.
const WRITTEN_SCORE_BYTES: usize = 128;

pub(super) async fn rerank(call: &mut Call) -> Result<Reply, ApiError> {
    let most = call.app.config.max_score_pairs;
    let parse = move |body: JsonBody<'_>, _: &ParamLimits| RerankRequest::parse(body, most);
    let request = call.parse(parse).await?;
    call.guard.ignores(&request.hints, REASONING_EFFORT);
    let scored = scored(call, &request.model, request.pairs.clone()).await?;
    let bytes = if request.return_documents {
        request.pairs.second().bytes()
    } else {
        0
    };
    let rank = move |_: &_| {
        let ranked = RerankedDocuments::of(&request, &scored.scores, scored.prompt_tokens);
        Ok((ranked.json_bytes(), ranked, request.model))
    };
    let (work, deadline) = (call.app.models.work(), call.ctx.deadline());
    let (json_bytes, ranked, model) = work.run(bytes, deadline, rank).await?;
    // A growing string may reserve as much again.
    (call.guard.memory()).grow(json_bytes.saturating_mul(2))?;
    let id = new_id("rerank-");
    let write = move || Ok(ranked.json(&id, &model));
    call.reply(json_bytes, write).await
}

pub(super) async fn score(call: &mut Call) -> Result<Reply, ApiError> {
    let most = call.app.config.max_score_pairs;
    let parse = move |body: JsonBody<'_>, _: &ParamLimits| ScoreRequest::parse(body, most);
    let ScoreRequest {
        model,
        pairs,
        hints,
    } = call.parse(parse).await?;
    call.guard.ignores(&hints, REASONING_EFFORT);
    let scored = scored(call, &model, pairs).await?;
    let (scores, prompt_tokens) = (scored.scores, scored.prompt_tokens);
    let bytes = scores.len().saturating_mul(WRITTEN_SCORE_BYTES);
    call.guard.memory().grow(bytes)?;
    let (id, created) = (new_id("score-"), now());
    let write = move || Ok(scores_json(&id, created, &model, &scores, prompt_tokens));
    call.reply(bytes, write).await
}

/// Returns the scores of `pairs` by the model of this name.
async fn scored(call: &mut Call, model: &str, pairs: TextPairs) -> Result<Scored, ApiError> {
    let (model, ctx) = call.enter(model, Some(EndpointType::Scores)).await?;
    let rank = call.guard.rank();
    let job = |room| ScoreJob::prepare(model, pairs, rank, room);
    let job = call.guard.prepare(&ctx, job).await?;
    let scored = job.run(&ctx, call.guard.account()).await?;
    call.guard.input_length(scored.prompt_tokens);
    Ok(scored)
}
