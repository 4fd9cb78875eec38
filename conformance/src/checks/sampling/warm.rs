//! Answers to prompts that the prefix cache contains, whole or in part.

use genset_backend_common::TokenId;

use super::generated;
use crate::answer::Generated;
use crate::check::{CheckResult, Stop, fail, skip};
use crate::trial::{Live, Trial};

/// The number of tokens that distinguishes two answers.
const ANSWER_TOKENS: u32 = 12;

async fn ask(live: &Live, prompt: &[TokenId]) -> Result<Generated, Stop> {
    let room = live.affordable_answer(prompt.len(), ANSWER_TOKENS);
    generated(live, live.greedy(prompt.to_vec(), room)).await
}

/// The answer of a new engine. Engines run one after another: a device may have room for only one.
async fn ask_a_fresh_one(trial: &Trial, prompt: &[TokenId]) -> Result<Generated, Stop> {
    let fresh = trial.start().await?;
    let answer = ask(&fresh, prompt).await?;
    fresh.put_away().await?;
    Ok(answer)
}

pub(super) async fn warm_is_cold(trial: Trial) -> CheckResult {
    let shape = trial.start().await?;
    let prompts = prompts(&shape);
    shape.put_away().await?;
    let mut cold = Vec::new();
    for prompt in &prompts {
        cold.push(ask_a_fresh_one(&trial, prompt).await?);
    }
    let live = trial.start().await?;
    for (prompt, cold) in prompts.iter().zip(&cold) {
        for when in ["after others", "once more"] {
            let warm = ask(&live, prompt).await?;
            if warm == *cold {
                continue;
            }
            live.put_away().await?;
            if ask_a_fresh_one(&trial, prompt).await? != *cold {
                skip!(
                    NotDeclared,
                    "engines built alike answer one request in different ways"
                );
            }
            fail!(
                "a prompt of {} tokens is answered by {cold:?} in a fresh engine, and {when} by {warm:?}",
                prompt.len()
            );
        }
    }
    Ok(())
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
