//! [`ScoreJob`]: from pairs of texts to their scores.

use std::ops::Range;
use std::sync::Arc;

use futures_util::{StreamExt, TryStreamExt, stream};
use genset_backend_common::{
    EngineError, GenerateRequest, Input, Output, RequestContext, TokenId, config::InputKind,
    request::ScorePair,
};
use http::StatusCode;

use super::encode::{Plain, context_tokens};
use super::{Prepared, Room};
use crate::answer::{Account, Meter};
use crate::error::{ApiError, Param};
use crate::model::{ServedModel, TextFiles};
use crate::openai::{TextList, TextPairs};
use crate::text::PairTemplate;
use crate::work::Owner;

/// The most pairs per engine call: several instances may share a large request.
const PAIRS_PER_CALL: usize = 64;

/// Calls of one request that run at once.
const CALLS_AT_ONCE: usize = 4;

/// The work of one score request.
#[derive(Debug)]
pub struct ScoreJob {
    model: Arc<ServedModel>,
    /// Kept until the scores are ready, because responses may contain the texts.
    texts: TextPairs,
    tokens: Arc<PairTokens>,
    data_parallel_rank: Option<u32>,
}

/// The tokens of both sides; each text is stored once.
#[derive(Debug)]
struct PairTokens {
    /// One text for all pairs, or one for each.
    first: Vec<Vec<TokenId>>,
    second: Vec<Vec<TokenId>>,
    template: PairTemplate,
}

impl PairTokens {
    fn first(&self, pair: usize) -> &[TokenId] {
        let own = self.first.get(pair).filter(|_| self.first.len() > 1);
        own.or(self.first.first()).map_or(&[], Vec::as_slice)
    }

    fn second(&self, pair: usize) -> &[TokenId] {
        self.second.get(pair).map_or(&[], Vec::as_slice)
    }

    /// The length of a pair in tokens, with the tokens that the tokenizer adds.
    fn len(&self, pair: usize) -> usize {
        self.first(pair).len() + self.second(pair).len() + self.template.added_tokens()
    }

    fn pair(&self, pair: usize) -> ScorePair {
        let joined = self.template.join(self.first(pair), self.second(pair));
        ScorePair {
            token_ids: joined.ids,
            first_tokens: u32::try_from(joined.first_tokens).unwrap_or(u32::MAX),
        }
    }
}

impl Prepared for ScoreJob {
    /// Pairs are assembled only for running calls.
    fn held_bytes(&self) -> usize {
        let tokens = &self.tokens;
        let alone = |tokens: &Vec<TokenId>| size_of_val(tokens) + size_of_val(tokens.as_slice());
        let alone: usize = tokens.first.iter().chain(&tokens.second).map(alone).sum();
        let count = tokens.second.len();
        let longest = (0..count).map(|pair| tokens.len(pair)).max().unwrap_or(0);
        let a_pair = size_of::<ScorePair>() + longest * size_of::<TokenId>();
        let together = count.min(PAIRS_PER_CALL * CALLS_AT_ONCE) * a_pair;
        self.texts.first().bytes() + self.texts.second().bytes() + alone + together
    }
}

/// The result of a [`ScoreJob`].
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Scored {
    /// One score per pair, in order.
    pub scores: Vec<f32>,
    /// The tokens of all pairs.
    pub prompt_tokens: u32,
}

impl ScoreJob {
    /// Tokenizes the texts. Only this data-parallel rank may serve them, if one is given.
    ///
    /// # Errors
    /// A 400 that names the field: a model that does not score or has no tokenizer, or a pair that exceeds the context.
    ///
    /// # Cancel safety
    /// If the future is dropped, work that has not started never starts, and running work stops soon.
    pub async fn prepare(
        model: Arc<ServedModel>,
        texts: TextPairs,
        data_parallel_rank: Option<u32>,
        room: Room,
    ) -> Result<Self, ApiError> {
        let name = &model.card.name;
        if !model.card.capabilities.inputs.contains(&InputKind::Score) {
            let problem = format!("the model '{name}' does not score pairs of texts");
            return Err(ApiError::invalid("model", problem));
        }
        let bytes = texts.first().bytes() + texts.second().bytes();
        let (with_model, with_texts) = (Arc::clone(&model), texts.clone());
        let work = move |owner: &Owner| {
            let _room = room.memory;
            tokens_of(&with_model, &with_texts, room.salt.as_deref(), owner)
        };
        let tokens = Arc::new(model.work.run(bytes, room.deadline, work).await?);
        Ok(Self {
            model,
            texts,
            tokens,
            data_parallel_rank,
        })
    }

    /// Scores the pairs, and charges `account` as the engine takes them.
    ///
    /// # Errors
    /// A refusal by the model's card or an engine; `Internal` if an engine does not return one finite score per pair.
    ///
    /// # Cancel safety
    /// If the future is dropped, running calls are cancelled.
    pub async fn run(
        &self,
        ctx: &RequestContext,
        account: &Arc<Account>,
    ) -> Result<Scored, ApiError> {
        let count = self.tokens.second.len();
        let mut calls = Vec::with_capacity(count.div_ceil(PAIRS_PER_CALL));
        for start in (0..count).step_by(PAIRS_PER_CALL) {
            let pairs = start..count.min(start + PAIRS_PER_CALL);
            let (ctx, meter) = (ctx.sibling(calls.len()), Meter::new(Arc::clone(account)));
            calls.push(self.call(pairs, ctx, meter));
        }
        let parts: Vec<Scored> = stream::iter(calls)
            .buffered(CALLS_AT_ONCE)
            .try_collect()
            .await?;
        let mut all = Scored::default();
        for part in parts {
            all.scores.extend(part.scores);
            all.prompt_tokens = all.prompt_tokens.saturating_add(part.prompt_tokens);
        }
        Ok(all)
    }

    async fn call(
        &self,
        pairs: Range<usize>,
        ctx: RequestContext,
        mut meter: Meter,
    ) -> Result<Scored, ApiError> {
        let Self { model, tokens, .. } = self;
        let expected = pairs.len();
        let together: usize = pairs.clone().map(|pair| tokens.len(pair)).sum();
        let (bytes, request) = (together * size_of::<TokenId>(), self.request(pairs));
        let request = model.work.run(bytes, ctx.deadline(), request).await?;
        let prompt_tokens = request.prompt_tokens().unwrap_or(u32::MAX);
        let mut outputs = model.engine.generate(request, ctx).await?;
        meter.reach(prompt_tokens, 0);
        let mut scored = Scored::default();
        while let Some(output) = outputs.next().await {
            match output? {
                Output::Scores(scores) => scored.scores.extend(scores),
                Output::Finished(finished) => scored.prompt_tokens = finished.usage.prompt_tokens,
                Output::Tokens(_) | Output::Text(_) | Output::Embeddings(_) => {
                    let problem = "the engine answered pairs to score with something else";
                    return Err(EngineError::internal(problem).into());
                }
            }
        }
        meter.reach(scored.prompt_tokens, 0);
        check_scores(&scored.scores, expected)?;
        Ok(scored)
    }

    /// Returns the work that assembles a call's pairs. It is long: each pair has its own copy of the query.
    fn request(
        &self,
        pairs: Range<usize>,
    ) -> impl FnOnce(&Owner) -> Result<GenerateRequest, ApiError> + Send + use<> {
        let (model, tokens) = (Arc::clone(&self.model), Arc::clone(&self.tokens));
        let data_parallel_rank = self.data_parallel_rank;
        move |_| {
            let pairs: Vec<ScorePair> = pairs.map(|pair| tokens.pair(pair)).collect();
            let mut request = GenerateRequest::from_tokens(model.card.name.clone(), Vec::new());
            request.adapter = model.adapter_name();
            request.data_parallel_rank = data_parallel_rank;
            request.input = Input::Score(pairs.into());
            model.card.check(&request)?;
            Ok(request)
        }
    }
}

fn check_scores(scores: &[f32], expected: usize) -> Result<(), EngineError> {
    if scores.len() != expected {
        let got = scores.len();
        let problem = format!("the engine gave {got} scores for {expected} pairs");
        return Err(EngineError::internal(problem));
    }
    if scores.iter().all(|score| score.is_finite()) {
        return Ok(());
    }
    let problem = "the engine gave scores that are not finite";
    Err(EngineError::internal(problem))
}

fn tokens_of(
    model: &ServedModel,
    texts: &TextPairs,
    salt: Option<&str>,
    owner: &Owner,
) -> Result<PairTokens, ApiError> {
    let Some(files) = &model.text else {
        let why = "this server has no tokenizer for the model, and needs one to build pairs";
        return Err(ApiError::unsupported("model", why));
    };
    let Some(template) = files.tokenizer.pair_template() else {
        let why = "the post_processor of its tokenizer.json has no template for a pair of texts, so it cannot score pairs";
        return Err(ApiError::unsupported("model", why));
    };
    let tokens = PairTokens {
        first: list_tokens(model, files, texts.first(), salt, owner)?,
        second: list_tokens(model, files, texts.second(), salt, owner)?,
        template: template.clone(),
    };
    let context = context_tokens(model);
    match (0..tokens.second.len()).find(|pair| tokens.len(*pair) > context) {
        None => Ok(tokens),
        Some(pair) => Err(too_long(&tokens, texts, pair, context)),
    }
}

fn list_tokens(
    model: &ServedModel,
    files: &TextFiles,
    list: &TextList,
    salt: Option<&str>,
    owner: &Owner,
) -> Result<Vec<Vec<TokenId>>, ApiError> {
    let mut all = Vec::with_capacity(list.texts().len());
    for (index, text) in list.texts().iter().enumerate() {
        owner.check()?;
        let plain = Plain {
            for_answer: false,
            text,
            add_special: false,
            salt,
            param: &Param::Path(list.name(index)),
        };
        let encode = || plain.encode(model, files, owner);
        all.push(model.timings.tokenize(encode)?);
    }
    Ok(all)
}

/// Names the second text, or the first if no second text would fit next to it.
fn too_long(tokens: &PairTokens, texts: &TextPairs, pair: usize, context: usize) -> ApiError {
    let (first, second) = (tokens.first(pair).len(), tokens.second(pair).len());
    let added = tokens.template.added_tokens();
    let of_first = texts.first().name(if texts.first().texts().len() > 1 {
        pair
    } else {
        0
    });
    let of_second = texts.second().name(pair);
    let name = if first + added >= context {
        &of_first
    } else {
        &of_second
    };
    let message = format!(
        "{of_first} has {first} tokens, {of_second} has {second}, and the tokenizer adds {added}; \
         the model's context holds {context}; shorten {name}"
    );
    ApiError {
        param: Some(name.clone().into()),
        code: Some("context_length_exceeded"),
        ..ApiError::new(StatusCode::BAD_REQUEST, message)
    }
}

#[cfg(test)]
mod tests {
    use genset_backend_common::ErrorKind;

    use super::*;

    #[test]
    fn what_is_not_one_finite_score_each_is_the_engines_fault() {
        assert!(check_scores(&[1.0, -2.0], 2).is_ok());
        for bad in [vec![1.0], vec![1.0; 3], vec![1.0, f32::NAN]] {
            let error = check_scores(&bad, 2).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Internal, "{bad:?}");
        }
    }
}
