//! ST: the shape of a stream.

use genset_backend_common::output::Violation;

use crate::check::{Check, CheckResult, check, ensure};
use crate::trial::Trial;

pub(super) const CHECKS: &[Check] = &[
    check!("ST01", Core, Tokens, "a stream has at least one item",
        clause: "LLMEngine::generate, Contract",
        breaks: "silent empty answers", at_least_one_item),
    check!("ST03", Core, Tokens, "nothing follows the terminal item, and an ended stream stays ended",
        clause: "LLMEngine::generate, Contract",
        breaks: "tokens after [DONE], which break client SDKs", nothing_after_terminal),
];

async fn at_least_one_item(trial: Trial) -> CheckResult {
    let live = trial.start().await?;
    let answer = live.answer(live.request(4, 4)).await?;
    ensure!(!answer.items.is_empty(), "the stream had no item at all");
    Ok(())
}

async fn nothing_after_terminal(trial: Trial) -> CheckResult {
    let live = trial.start().await?;
    let answer = live.answer(live.request(4, 4)).await?;
    ensure!(
        answer.violation != Some(Violation::ItemAfterTerminal),
        "an item followed the terminal one"
    );
    ensure!(answer.is_fused, "the stream went on after its end");
    Ok(())
}
