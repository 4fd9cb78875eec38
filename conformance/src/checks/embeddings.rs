//! EM: embeddings, for engines that declare that they embed token sequences.

use futures_util::future::try_join_all;
use genset_backend_common::{GenerateRequest, Input, Output, TokenId};

use crate::check::{Check, CheckResult, Stop, check, ensure, fail};
use crate::trial::{Live, Trial};

pub(super) const CHECKS: &[Check] = &[
    check!("EM01", Core, Embeddings, "each input has one embedding, in the order of the inputs, and the same alone as among others",
        clause: "Output::Embeddings",
        breaks: "search indexes that hold one document's vector under another's name", one_each_in_order),
    check!("EM02", Core, Embeddings, "embeddings are of one length, and their numbers are finite and not all zero",
        clause: "Output::Embeddings",
        breaks: "vector stores that refuse a batch, or find everything equally near", sane_numbers),
    check!("EM03", Strict, Embeddings, "embeddings are all of length 1, or none is",
        clause: "Output::Embeddings",
        breaks: "searches by dot product that always find the same few documents", one_norm),
];

/// The tolerance between the embeddings of an input alone and in a batch, relative to the largest number, if the engine
/// declares that it depends on the batch.
const TOLERANCE: f32 = 0.02;

/// Inputs of different lengths; the first and the last are equal.
fn inputs(live: &Live) -> Vec<Vec<TokenId>> {
    let context = usize::try_from(live.config.context_length_tokens).unwrap_or(usize::MAX);
    let longest = 100.min(context);
    [(7, 1), (1, 2), (longest, 3), (33.min(context), 4), (7, 1)]
        .map(|(len, seed)| live.prompt(len.min(context), seed))
        .to_vec()
}

async fn embed(live: &Live, inputs: Vec<Vec<TokenId>>) -> Result<Vec<Vec<f32>>, Stop> {
    let count = inputs.len();
    let mut request = GenerateRequest::from_tokens(live.config.model.clone(), Vec::new());
    request.input = Input::Embed(inputs.into());
    let answer = live.answer(request).await?;
    if answer.finished().is_none() {
        fail!("{count} inputs to embed ended with {:?}", answer.error());
    }
    let mut embeddings = Vec::new();
    for output in answer.items.into_iter().flatten() {
        match output {
            Output::Embeddings(some) => embeddings.extend(some),
            Output::Finished(_) => {}
            Output::Tokens(_) | Output::Text(_) | Output::Scores(_) => {
                fail!("inputs to embed were answered with something else")
            }
        }
    }
    ensure!(
        embeddings.len() == count,
        "{count} inputs have {} embeddings",
        embeddings.len()
    );
    Ok(embeddings)
}

async fn one_each_in_order(trial: Trial) -> CheckResult {
    let live = trial.start().await?;
    let inputs = inputs(&live);
    let together = embed(&live, inputs.clone()).await?;
    let (mut alone, mut beside) = (Vec::new(), Vec::new());
    for input in &inputs {
        alone.extend(embed(&live, vec![input.clone()]).await?);
    }
    for some in inputs.chunks(live.at_once(u32::MAX)) {
        let asked = some.iter().map(|input| embed(&live, vec![input.clone()]));
        beside.extend(try_join_all(asked).await?.into_iter().flatten());
    }
    for (embeddings, when) in [(together, "of a batch"), (beside, "of requests at once")] {
        for (place, (alone, embedding)) in alone.iter().zip(embeddings).enumerate() {
            ensure!(
                is_same(alone, &embedding)
                    || (live.varies_with_batch() && is_near(alone, &embedding)),
                "input {place} {when} has another embedding than alone"
            );
        }
    }
    Ok(())
}

/// Bitwise equality.
fn is_same(one: &[f32], other: &[f32]) -> bool {
    let bits = |number: &f32| number.to_bits();
    one.iter().map(bits).eq(other.iter().map(bits))
}

fn is_near(one: &[f32], other: &[f32]) -> bool {
    let largest = one
        .iter()
        .fold(0.0_f32, |most, number| most.max(number.abs()));
    let is_near = |(one, other): (&f32, &f32)| (one - other).abs() <= largest * TOLERANCE;
    one.len() == other.len() && one.iter().zip(other).all(is_near)
}

async fn sane_numbers(trial: Trial) -> CheckResult {
    let live = trial.start().await?;
    let inputs = inputs(&live);
    let lengths: Vec<usize> = inputs.iter().map(Vec::len).collect();
    let embeddings = embed(&live, inputs).await?;
    let dimension = embeddings[0].len();
    for (embedding, len) in embeddings.iter().zip(lengths) {
        ensure!(
            embedding.len() == dimension,
            "one embedding has {dimension} numbers, another {}",
            embedding.len()
        );
        ensure!(
            embedding.iter().all(|number| number.is_finite()),
            "the embedding of {len} tokens has a number that is not finite"
        );
        ensure!(
            embedding.iter().any(|number| *number != 0.0),
            "the embedding of {len} tokens is all zeros"
        );
    }
    Ok(())
}

/// The tolerance for the length of a normalized embedding.
const NORM_TOLERANCE: f32 = 0.01;

async fn one_norm(trial: Trial) -> CheckResult {
    let live = trial.start().await?;
    let inputs = inputs(&live);
    let mut norms = Vec::new();
    for input in &inputs {
        let alone = embed(&live, vec![input.clone()]).await?.remove(0);
        norms.push((input.len(), norm(&alone)));
    }
    for (input, embedding) in inputs.iter().zip(embed(&live, inputs.clone()).await?) {
        norms.push((input.len(), norm(&embedding)));
    }
    let is_unit = |norm: f32| (norm - 1.0).abs() <= NORM_TOLERANCE;
    let unit = norms.iter().find(|(_, norm)| is_unit(*norm));
    let other = norms.iter().find(|(_, norm)| !is_unit(*norm));
    if let (Some((unit, _)), Some((other, norm))) = (unit, other) {
        fail!(
            "an embedding of {unit} tokens is of length 1, one of {other} tokens of length {norm}"
        );
    }
    Ok(())
}

fn norm(embedding: &[f32]) -> f32 {
    let squares = embedding.iter().map(|number| number * number);
    squares.sum::<f32>().sqrt()
}
