//! [`EmbedJob`]: from a validated embeddings request to its embeddings.

use std::sync::Arc;

use futures_util::{StreamExt, TryStreamExt, stream};
use genset_backend_common::{
    EngineError, ErrorKind, GenerateRequest, Input, Output, RequestContext, TokenId,
    config::InputKind,
};
use http::StatusCode;

use super::encode::{Plain, context_tokens};
use super::{Prepared, Room};
use crate::answer::{Account, Meter};
use crate::error::{ApiError, Param};
use crate::model::{Matryoshka, ServedModel};
use crate::openai::{EmbeddingRequest, Prompt};
use crate::work::Owner;

/// The most inputs per engine call: a response must fit one frame of the request plane, even with embeddings of tens of
/// thousands of numbers, and several instances may share a large batch.
const INPUTS_PER_CALL: usize = 64;

/// Calls of one request that run at once.
const CALLS_AT_ONCE: usize = 4;

/// The work of one embeddings request.
#[derive(Debug)]
pub struct EmbedJob {
    model: Arc<ServedModel>,
    inputs: Vec<Vec<TokenId>>,
    dimensions: Option<u32>,
    data_parallel_rank: Option<u32>,
}

impl Prepared for EmbedJob {
    fn held_bytes(&self) -> usize {
        let input = |tokens: &Vec<TokenId>| size_of_val(tokens) + size_of_val(tokens.as_slice());
        self.inputs.iter().map(input).sum()
    }
}

/// The result of an [`EmbedJob`].
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Embedded {
    /// One embedding per input, in order, all of the same length.
    pub embeddings: Vec<Vec<f32>>,
    /// The tokens of all inputs.
    pub prompt_tokens: u32,
}

impl EmbedJob {
    /// Tokenizes the inputs. Only this data-parallel rank may serve them, if one is given.
    ///
    /// # Errors
    /// A 400 that names the field: text for a model without a tokenizer, an input that exceeds the context, or an unsupported
    /// length.
    ///
    /// # Cancel safety
    /// If the future is dropped, work that has not started never starts, and running work stops soon.
    pub async fn prepare(
        model: Arc<ServedModel>,
        request: EmbeddingRequest,
        data_parallel_rank: Option<u32>,
        room: Room,
    ) -> Result<Self, ApiError> {
        let EmbeddingRequest {
            inputs, dimensions, ..
        } = request;
        if !model.card.capabilities.inputs.contains(&InputKind::Embed) {
            let problem = format!("the model '{}' does not embed", model.card.name);
            return Err(ApiError::invalid("model", problem));
        }
        if let Some(dimensions) = dimensions {
            check_dimensions(&model, dimensions)?;
        }
        let bytes = inputs.iter().map(work_bytes).sum();
        let with_model = Arc::clone(&model);
        let work = move |owner: &Owner| {
            let _room = room.memory;
            let mut all = Vec::with_capacity(inputs.len());
            for (index, input) in inputs.into_iter().enumerate() {
                owner.check()?;
                let tokens = tokens_of(&with_model, index, input, owner)?;
                check_input(&with_model, index, &tokens)?;
                all.push(tokens);
            }
            Ok(all)
        };
        let inputs = model.work.run(bytes, room.deadline, work).await?;
        Ok(Self {
            inputs,
            model,
            dimensions,
            data_parallel_rank,
        })
    }

    /// Embeds the inputs, and charges `account` as the engine takes them.
    ///
    /// # Errors
    /// A refusal by the model's card or an engine; `Internal` if an engine does not return one embedding of finite numbers
    /// per input.
    ///
    /// # Cancel safety
    /// If the future is dropped, running calls are cancelled.
    pub async fn run(
        self,
        ctx: &RequestContext,
        account: &Arc<Account>,
    ) -> Result<Embedded, ApiError> {
        let Self {
            model,
            mut inputs,
            dimensions,
            data_parallel_rank: rank,
        } = self;
        let mut calls = Vec::with_capacity(inputs.len().div_ceil(INPUTS_PER_CALL));
        while !inputs.is_empty() {
            let rest = inputs.split_off(inputs.len().min(INPUTS_PER_CALL));
            let inputs = std::mem::replace(&mut inputs, rest);
            let meter = Meter::new(Arc::clone(account));
            let ctx = ctx.sibling(calls.len());
            calls.push(call(&model, inputs, rank, ctx, meter));
        }
        let parts: Vec<Embedded> = stream::iter(calls)
            .buffered(CALLS_AT_ONCE)
            .try_collect()
            .await?;
        let mut all = Embedded::default();
        for part in parts {
            all.embeddings.extend(part.embeddings);
            all.prompt_tokens = all.prompt_tokens.saturating_add(part.prompt_tokens);
        }
        let Some(dimensions) = dimensions else {
            return Ok(all);
        };
        let numbers = all.embeddings.iter().map(Vec::len).sum();
        let cut = move |_: &Owner| {
            cut(&mut all.embeddings, dimensions)?;
            Ok(all)
        };
        model.work.run(numbers, ctx.deadline(), cut).await
    }
}

async fn call(
    model: &ServedModel,
    inputs: Vec<Vec<TokenId>>,
    data_parallel_rank: Option<u32>,
    ctx: RequestContext,
    mut meter: Meter,
) -> Result<Embedded, EngineError> {
    let expected = inputs.len();
    let tokens = inputs.iter().map(Vec::len).sum::<usize>();
    let mut request = GenerateRequest::from_tokens(model.card.name.clone(), Vec::new());
    request.adapter = model.adapter_name();
    request.data_parallel_rank = data_parallel_rank;
    request.input = Input::Embed(inputs.into());
    // Each input was checked; this checks whether the engine embeds.
    model.card.capabilities.check(&request)?;
    let mut outputs = model.engine.generate(request, ctx).await?;
    meter.reach(u32::try_from(tokens).unwrap_or(u32::MAX), 0);
    let mut embedded = Embedded::default();
    while let Some(output) = outputs.next().await {
        match output? {
            Output::Embeddings(embeddings) => embedded.embeddings.extend(embeddings),
            Output::Finished(finished) => embedded.prompt_tokens = finished.usage.prompt_tokens,
            Output::Tokens(_) | Output::Text(_) | Output::Scores(_) => {
                let problem = "the engine answered inputs to embed with something else";
                return Err(EngineError::internal(problem));
            }
        }
    }
    meter.reach(embedded.prompt_tokens, 0);
    check_embeddings(&embedded.embeddings, expected)?;
    Ok(embedded)
}

fn check_input(model: &ServedModel, index: usize, tokens: &[TokenId]) -> Result<(), ApiError> {
    let card = &model.card;
    let name = || format!("input[{index}]");
    let context = context_tokens(model);
    // An input may fill the context, because nothing is generated.
    if tokens.len() > context {
        return Err(too_long(name(), tokens.len(), context));
    }
    let is_unknown = |token: &&TokenId| card.vocab_size.is_some_and(|size| **token >= size.get());
    match tokens.iter().find(is_unknown) {
        None => Ok(()),
        Some(token) => {
            let problem = format!("token id {token} is not in the model's vocabulary");
            Err(ApiError::invalid(name(), problem))
        }
    }
}

fn too_long(name: String, tokens: usize, context: usize) -> ApiError {
    let message =
        format!("{name} has {tokens} tokens, but the model's context holds {context}; shorten it");
    ApiError {
        param: Some(name.into()),
        code: Some("context_length_exceeded"),
        ..ApiError::new(StatusCode::BAD_REQUEST, message)
    }
}

/// The bytes of text whose processing takes about as long.
fn work_bytes(input: &Prompt) -> usize {
    match input {
        Prompt::Text(text) => text.len(),
        // Tokens are only checked.
        Prompt::Tokens(tokens) => tokens.len() / 64,
    }
}

fn tokens_of(
    model: &ServedModel,
    index: usize,
    input: Prompt,
    owner: &Owner,
) -> Result<Vec<TokenId>, ApiError> {
    let name = format!("input[{index}]");
    let tokens = match (input, &model.text) {
        (Prompt::Tokens(tokens), _) => tokens,
        (Prompt::Text(text), Some(files)) => {
            let text = match files.embed_prompt.as_str() {
                "" => text,
                prompt => format!("{prompt}{text}"),
            };
            let plain = Plain {
                for_answer: false,
                text: &text,
                add_special: true,
                salt: None,
                param: &Param::Path(name.clone()),
            };
            model
                .timings
                .tokenize(|| plain.encode(model, files, owner))?
        }
        (Prompt::Text(_), None) => {
            let why = "this server has no tokenizer for the model; send token ids";
            return Err(ApiError::unsupported(name, why));
        }
    };
    if tokens.is_empty() {
        return Err(ApiError::invalid(name, "has no tokens"));
    }
    Ok(tokens)
}

fn check_dimensions(model: &ServedModel, dimensions: u32) -> Result<(), ApiError> {
    let allowed = model.text.as_ref().map(|text| &text.matryoshka);
    match allowed {
        Some(Matryoshka::Any) => Ok(()),
        Some(Matryoshka::Lengths(lengths)) if lengths.contains(&dimensions) => Ok(()),
        Some(Matryoshka::Lengths(lengths)) => Err(ApiError::invalid(
            "dimensions",
            format!("expected one of {lengths:?}, got {dimensions}"),
        )),
        Some(Matryoshka::No) | None => Err(ApiError::unsupported(
            "dimensions",
            "the model's config.json does not say that its embeddings may be cut; leave the field out",
        )),
    }
}

fn check_embeddings(embeddings: &[Vec<f32>], expected: usize) -> Result<(), EngineError> {
    let problem = |problem: String| Err(EngineError::new(ErrorKind::Internal, problem));
    if embeddings.len() != expected {
        let got = embeddings.len();
        return problem(format!(
            "the engine gave {got} embeddings for {expected} inputs"
        ));
    }
    let length = embeddings.first().map_or(0, Vec::len);
    if length == 0 || embeddings.iter().any(|numbers| numbers.len() != length) {
        return problem("the engine gave embeddings that are empty or differ in length".into());
    }
    if embeddings
        .iter()
        .flatten()
        .any(|number| !number.is_finite())
    {
        return problem("the engine gave embeddings with numbers that are not finite".into());
    }
    Ok(())
}

/// Cuts each embedding and normalizes it to length 1 again.
fn cut(embeddings: &mut [Vec<f32>], dimensions: u32) -> Result<(), ApiError> {
    let length = usize::try_from(dimensions).unwrap_or(usize::MAX);
    for numbers in embeddings {
        if length > numbers.len() {
            let problem = format!("the model's embeddings have {} numbers", numbers.len());
            return Err(ApiError::invalid("dimensions", problem));
        }
        if length == numbers.len() {
            continue;
        }
        numbers.truncate(length);
        let norm = numbers.iter().map(|number| number * number).sum::<f32>();
        let norm = norm.sqrt();
        if norm > 0.0 {
            numbers.iter_mut().for_each(|number| *number /= norm);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cut_embedding_has_length_one_and_a_whole_one_is_left_alone() {
        let mut embeddings = vec![vec![3.0, 4.0, 12.0], vec![0.0, 0.0, 1.0]];
        cut(&mut embeddings, 2).unwrap();
        assert_eq!(embeddings, [[0.6, 0.8], [0.0, 0.0]]);
        let mut embeddings = vec![vec![3.0, 4.0]];
        cut(&mut embeddings, 2).unwrap();
        assert_eq!(embeddings, [[3.0, 4.0]]);
        let error = cut(&mut embeddings, 3).unwrap_err();
        assert_eq!(error.param, Some("dimensions".into()));
    }

    #[test]
    fn what_is_not_one_finite_embedding_each_is_the_engines_fault() {
        assert!(check_embeddings(&[vec![1.0], vec![2.0]], 2).is_ok());
        for bad in [
            vec![vec![1.0]],
            vec![vec![], vec![]],
            vec![vec![1.0], vec![1.0, 2.0]],
            vec![vec![1.0], vec![f32::NAN]],
        ] {
            let error = check_embeddings(&bad, 2).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Internal, "{bad:?}");
        }
    }
}
