//! Answers to prompts that the prefix cache contains, whole or in part.

use genset_backend_common::TokenId;

use super::answered;
use crate::answer::Answer;
use crate::check::{CheckResult, Stop, skip};
use crate::checks::near::{self, Choice, Pair};
use crate::trial::{Live, Trial};

/// The number of tokens that distinguishes two answers.
const ANSWER_TOKENS: u32 = 12;

async fn ask(live: &Live, prompt: &[TokenId]) -> Result<Answer, Stop> {
    let room = live.affordable_answer(prompt.len(), ANSWER_TOKENS);
    let request = live.greedy(prompt.to_vec(), room);
    answered(live, near::rated(live, request)).await
}

/// The answer of a new engine. Engines run one after another: a device may have room for only one.
async fn ask_a_fresh_one(trial: &Trial, prompt: &[TokenId]) -> Result<Answer, Stop> {
    let fresh = trial.start().await?;
    let answer = ask(&fresh, prompt).await?;
    fresh.put_away().await?;
    Ok(answer)
}

/// What is cached is not computed again, so the rest of the prompt is another batch.
pub(super) async fn warm_is_cold(trial: Trial) -> CheckResult {
    let shape = trial.start().await?;
    let prompts = prompts(&shape);
    shape.put_away().await?;
    let mut cold = Vec::new();
    for prompt in &prompts {
        cold.push(ask_a_fresh_one(&trial, prompt).await?);
    }
    let live = trial.start().await?;
    let mut pairs: Vec<Pair> = Vec::new();
    for (prompt, cold) in prompts.iter().zip(&cold) {
        // After others, and once more.
        for _ in 0..2 {
            pairs.push((cold.clone(), ask(&live, prompt).await?));
        }
    }
    live.put_away().await?;
    let when = "in an engine that has answered such prompts before";
    let Err(differs) = near::ensure_as_alone(&live, Choice::Greedy, &pairs, when) else {
        return Ok(());
    };
    let mut fresh: Vec<Pair> = Vec::new();
    for (prompt, cold) in prompts.iter().zip(cold) {
        fresh.push((cold, ask_a_fresh_one(&trial, prompt).await?));
    }
    if near::ensure_as_alone(&live, Choice::Greedy, &fresh, "in another fresh engine").is_err() {
        skip!(
            NotDeclared,
            "engines built alike answer one request in different ways"
        );
    }
    Err(differs)
}

/// Two prompts with the same end, and two that differ only in one more token at the end.
fn prompts(live: &Live) -> [Vec<TokenId>; 4] {
    let len = live.several_blocks();
    let tail = live.prompt(len * 2 / 3, 1);
    let whole = live.prompt(len, 2);
    [
        [live.prompt(len / 3, 3), tail.clone()].concat(),
        [live.prompt(len / 3, 4), tail].concat(),
        [whole.clone(), live.prompt(1, 5)].concat(),
        whole,
    ]
}
