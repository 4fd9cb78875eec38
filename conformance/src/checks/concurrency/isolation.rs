//! The state of one request does not affect others.

use std::panic::AssertUnwindSafe;

use futures_util::future::{OptionFuture, join};
use futures_util::{FutureExt, StreamExt};
use genset_backend_common::{
    CancelReason, GenerateRequest, Input, RequestContext, config::InputKind, request::ScorePair,
};
use tokio::time::{Instant, timeout};

use crate::answer::{Answer, Generated};
use crate::check::{CheckResult, Stop, ensure, skip};
use crate::checks::near::{self, Choice, Pair};
use crate::checks::pressure::{Begun, ensure_complete, ensure_room_for, long_request, request};
use crate::trial::{Live, Trial};

/// Prompts that differ in content, length and the number of tokens to generate.
const PROMPTS: u32 = 6;

fn distinct(live: &Live, index: u32) -> GenerateRequest {
    let prompt_len = usize::try_from(4 + index).unwrap_or(4);
    request(live, prompt_len, 10 + u64::from(index), 8 + index)
}

/// Fewer equal tokens than this are chance.
const TELLING: usize = 4;

pub(super) async fn own_answers(trial: Trial) -> CheckResult {
    let live = trial.start().await?;
    let (mut alone, mut lengths) = (Vec::new(), Vec::new());
    for index in 0..PROMPTS {
        let answer = live.answer(distinct(&live, index)).await?;
        // Only the engine knows the length of a text prompt.
        let prompt_tokens = match live.medium().is_tokens() {
            true => Some(4 + index),
            false => answer.usage().map(|usage| usage.prompt_tokens),
        };
        lengths.push(prompt_tokens);
        alone.push(answer.generated());
    }
    let requests = (0..PROMPTS).map(|index| distinct(&live, index));
    let together = live.answers(requests.collect()).await?;
    let expected = lengths.iter().zip(&alone);
    for (index, (answer, (sent, own))) in (0..).zip(together.iter().zip(expected)) {
        ensure_complete(answer, 8 + index, "one of several answers")?;
        let billed = answer.usage().map(|usage| usage.prompt_tokens);
        ensure!(
            billed == *sent,
            "a prompt of {sent:?} tokens was answered as one of {billed:?}"
        );
        ensure_own(&answer.generated(), own, &alone)?;
    }
    Ok(())
}

fn ensure_own(answer: &Generated, own: &Generated, all: &[Generated]) -> CheckResult {
    let own_len = shared_len(answer, own);
    let foreign = all
        .iter()
        .map(|other| shared_len(answer, other))
        .find(|len| *len >= TELLING && *len > own_len);
    ensure!(
        foreign.is_none(),
        "an answer begins with {foreign:?} tokens of another prompt's and {own_len} of its own: {answer:?}"
    );
    Ok(())
}

fn shared_len(left: &Generated, right: &Generated) -> usize {
    left.units()
        .iter()
        .zip(right.units())
        .take_while(|(l, r)| l == r)
        .count()
}

pub(super) async fn batch_invariant(trial: Trial) -> CheckResult {
    let live = trial.start().await?;
    let requests = (0..PROMPTS).map(|index| near::rated(&live, distinct(&live, index)));
    let requests: Vec<GenerateRequest> = requests.collect();
    let mut alone = Vec::new();
    for request in &requests {
        alone.push(live.answer(request.clone()).await?);
    }
    let again = live.answer(requests[0].clone()).await?;
    if again.generated() != alone[0].generated() {
        skip!(
            NotDeclared,
            "the engine's answers vary by themselves; DT01 judges that"
        );
    }
    let together = live.answers(requests).await?;
    let pairs: Vec<Pair> = alone.into_iter().zip(together).collect();
    near::ensure_as_alone(&live, Choice::Greedy, &pairs, "in a batch")
}

/// The number of tokens of each survivor.
const SURVIVOR_TOKENS: u32 = 10;

/// The failures: an input that the engine does not take and that a Worker would have refused, an expired deadline, a cancel, a
/// dropped stream. Other checks judge how each of them ends.
pub(super) async fn failures_stay(trial: Trial) -> CheckResult {
    let live = trial.start().await?;
    ensure_room_for(&live, 3)?;
    let mut survivors = Vec::new();
    for seed in [1, 2] {
        survivors.push(Begun::new(&live, request(&live, 4, seed, SURVIVOR_TOKENS)).await?);
    }
    if let Some(untaken) = untaken_input(&live) {
        let ctx = live.context(&untaken);
        send_and_leave(&live, untaken, ctx).await;
    }
    let late = request(&live, 4, 3, 4);
    let ctx = live.context(&late).with_deadline(Instant::now());
    send_and_leave(&live, late, ctx).await;
    let cancelled = long_request(&live, 4);
    let ctx = live.context(&cancelled);
    ctx.cancel(CancelReason::Client);
    send_and_leave(&live, cancelled, ctx).await;

    for survivor in survivors {
        let answer = survivor.finish().await?;
        ensure_complete(&answer, SURVIVOR_TOKENS, "the neighbour of failures")?;
    }
    let next = live.answer(request(&live, 4, 5, 4)).await?;
    ensure_complete(&next, 4, "the answer after failures")
}

/// A request with an input kind that the engine does not declare.
fn untaken_input(live: &Live) -> Option<GenerateRequest> {
    let inputs = &live.config.capabilities.inputs;
    let mut request = live.request(4, 4);
    request.input = if !inputs.contains(&InputKind::Text) {
        Input::Text("a text".into())
    } else if !inputs.contains(&InputKind::Tokens) {
        Input::Tokens(vec![0].into())
    } else if !inputs.contains(&InputKind::Embed) {
        Input::Embed(vec![vec![0]].into())
    } else if !inputs.contains(&InputKind::Score) {
        let pair = ScorePair {
            token_ids: vec![0],
            first_tokens: 1,
        };
        Input::Score([pair].into())
    } else {
        return None;
    };
    Some(request)
}

/// Sends a request without the Worker's checks, and contains panics as a Worker does. Waits a moment for the first item.
async fn send_and_leave(live: &Live, request: GenerateRequest, ctx: RequestContext) {
    let engine = &live.subject.engine;
    let first = async {
        match engine.generate(request, ctx).await {
            Ok(mut outputs) => drop(outputs.next().await),
            Err(error) => drop(error),
        }
    };
    let moment = live.trial.limits().cancel / 8;
    // A timeout, an error and a panic are the same here: the request has ended.
    drop(timeout(moment, AssertUnwindSafe(first).catch_unwind()).await);
}

pub(super) async fn same_id(trial: Trial) -> CheckResult {
    let live = trial.start().await?;
    ensure_room_for(&live, 2)?;
    let (first, second) = (distinct(&live, 0), distinct(&live, 1));
    let alone = [
        live.answer(first.clone()).await?.generated(),
        live.answer(second.clone()).await?.generated(),
    ];
    let ctx = live.context(&first);
    let twin =
        RequestContext::new(ctx.id()).with_prompt_tokens(second.prompt_tokens().unwrap_or(0));
    let first = Begun::of(live.begin(first, ctx).await?).await?;
    // It is sent before the first continues.
    let second = match live.try_generate(second, twin).await? {
        Ok(running) => Some(running.finish()),
        Err(_refused) => None,
    };
    let (first, second) = join(first.finish(), OptionFuture::from(second)).await;
    ensure_apart(&first?, 8, &alone[0], &alone)?;
    let Some(second) = second.transpose()? else {
        return Ok(());
    };
    let is_refused = second.items.len() == 1 && second.error().is_some();
    if is_refused {
        return Ok(());
    }
    ensure_apart(&second, 9, &alone[1], &alone)
}

fn ensure_apart(
    answer: &Answer,
    max_tokens: u32,
    own: &Generated,
    all: &[Generated],
) -> Result<(), Stop> {
    ensure_complete(answer, max_tokens, "one of two requests with one id")?;
    ensure_own(&answer.generated(), own, all)
}
