//! Uses the context up to its last token.

use genset_backend_common::output::FinishReason;

use super::context_to_fill;
use crate::check::{CheckResult, ensure, fail};
use crate::trial::{Live, Trial};

/// More than the default limits of engines for answers without a limit.
const ROOM_TOKENS: u32 = 40;

pub(super) async fn used_to_the_last_token(trial: Trial) -> CheckResult {
    let live = trial.start().await?;
    let context = context_to_fill(&live)?;
    let room = ROOM_TOKENS.min(context / 2).max(1);
    for (room, max_tokens) in [
        (room, None),
        (room, Some(room)),
        (room, Some(room + 1)),
        (1, Some(1)),
        (1, None),
    ] {
        fills(&live, context, room, max_tokens).await?;
    }
    Ok(())
}

/// A prompt that leaves `room` tokens must get exactly that many, whether or not it asks for them.
async fn fills(live: &Live, context: u32, room: u32, max_tokens: Option<u32>) -> CheckResult {
    let prompt_len = usize::try_from(context - room).unwrap_or(usize::MAX);
    let mut request = live.request(prompt_len, 1);
    request.stop.max_tokens = max_tokens;
    let ctx = live.context(&request);
    let what =
        format!("a prompt that leaves room for {room} tokens, with max_tokens = {max_tokens:?},");
    let answer = match live.try_generate(request, ctx).await? {
        Ok(running) => running.finish_within(live.trial.limits().start).await?,
        Err(error) => fail!("{what} was refused: {error} ({})", error.kind()),
    };
    let tokens = answer.generated().len();
    ensure!(
        u32::try_from(tokens) == Ok(room) && answer.reason() == Some(FinishReason::Length),
        "{what} got {tokens} tokens and ended as {:?} ({:?})",
        answer.reason(),
        answer.error()
    );
    Ok(())
}
