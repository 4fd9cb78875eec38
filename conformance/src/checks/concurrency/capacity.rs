//! An engine that is full, or busy with one long request.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use futures_util::future::{Either, join_all, select};
use genset_backend_common::{ErrorKind, GenerateRequest};
use tokio::task::{unconstrained, yield_now};

use crate::answer::Answer;
use crate::check::{CheckResult, Stop, ensure, fail};
use crate::checks::pressure::{
    ensure_complete, ensure_room_for, long_request, one_after_the_other, request, slots,
};
use crate::trial::{Live, Trial};

pub(super) async fn short_beside_long(trial: Trial) -> CheckResult {
    let live = trial.start().await?;
    ensure_room_for(&live, 2)?;
    let mut long = live.generate(long_request(&live, 1)).await?;
    long.read_tokens(1).await?;
    let short = live.answer(request(&live, 4, 2, 4));
    let long = async move { while matches!(long.next().await, Ok(Some(Ok(_)))) {} };
    // Poll the short one first: both may be ready.
    match select(Box::pin(short), Box::pin(long)).await {
        Either::Left((short, _)) => ensure_complete(&short?, 4, "the short answer"),
        Either::Right(_) => fail!("the long answer ended before the short one did"),
    }
}

/// Sends a request to an engine that may be full. Returns its answer, or `None` if it was refused as overloaded; the caller
/// judges any other failure. `turn` is the time limit for the last of all requests: it may wait for those before it inside
/// `generate`, and in its stream.
pub(super) async fn send(
    live: &Live,
    request: GenerateRequest,
    turn: Duration,
) -> Result<Option<Answer>, Stop> {
    let ctx = live.context(&request);
    let is_overloaded = |kind| kind == ErrorKind::Overloaded;
    match live.try_generate_within(turn, request, ctx).await? {
        Ok(running) => {
            let answer = running.finish_within(turn).await?;
            let is_refused =
                answer.items.len() == 1 && answer.error().is_some_and(|e| is_overloaded(e.kind()));
            Ok(Some(answer).filter(|_| !is_refused))
        }
        Err(error) if is_overloaded(error.kind()) => Ok(None),
        Err(error) => fail!(
            "over capacity a request was refused as {}: {error}",
            error.kind()
        ),
    }
}

pub(super) async fn over_capacity(trial: Trial) -> CheckResult {
    let live = trial.start().await?;
    let count = slots(&live) * 2 + 4;
    let turn = one_after_the_other(&live, count, 4 + 2);
    let mut answered = 0;
    let sent = (0..u64::from(count)).map(|seed| send(&live, request(&live, 4, seed, 2), turn));
    for served in join_all(sent).await {
        if let Some(answer) = served? {
            ensure_complete(&answer, 2, "the answer of a full engine")?;
            answered += 1;
        }
    }
    ensure!(answered > 0, "all of {count} requests were refused");
    let next = live.answer(request(&live, 4, 0, 2)).await?;
    ensure_complete(&next, 2, "the answer after the rush")
}

/// The number of requests that each client sends in turn.
const TURNS: u32 = 6;

/// How often each of the others may be served while one request waits. Once is fair; the rest is for queues that are only
/// roughly fair.
const FAIR_TURNS: u32 = 3;

/// How many attempts an engine has to be fair: a busy machine may delay one thread once.
const TRIES: usize = 3;

/// More clients than slots, each with one request at a time. An engine that refuses has no queue.
pub(super) async fn no_starvation(trial: Trial) -> CheckResult {
    let live = trial.start().await?;
    let clients = slots(&live) + 4;
    let mut most = u32::MAX;
    for _ in 0..TRIES {
        most = most.min(most_overtaken(&live, clients).await?);
        if most <= clients * FAIR_TURNS {
            return Ok(());
        }
    }
    fail!(
        "{most} requests of {clients} clients were served while one waited, and no fewer in {TRIES} tries"
    )
}

/// The maximum number of other requests that were served while one waited.
async fn most_overtaken(live: &Live, clients: u32) -> Result<u32, Stop> {
    let served = AtomicU32::new(0);
    let turn = one_after_the_other(live, clients, 4 + 1);
    let turns = (0..clients).map(|seed| {
        let served = &served;
        async move {
            let mut most_overtaken = 0;
            for _ in 0..TURNS {
                let before = served.load(Ordering::Relaxed);
                let request = request(live, 4, u64::from(seed), 1);
                if let Some(answer) = send(live, request, turn).await? {
                    ensure!(
                        answer.finished().is_some(),
                        "a full engine failed: {:?}",
                        answer.error()
                    );
                    let overtaken = served.load(Ordering::Relaxed) - before;
                    most_overtaken = most_overtaken.max(overtaken);
                    // A refused request has overtaken nobody.
                    served.fetch_add(1, Ordering::Relaxed);
                }
                // The others may have answers too; these count as waiting until they are read.
                yield_now().await;
            }
            Ok::<_, Stop>(most_overtaken)
        }
    });
    // If all have an answer at once, tokio's budget would delay the last ones.
    let overtaken: Vec<u32> = unconstrained(join_all(turns))
        .await
        .into_iter()
        .collect::<Result<_, _>>()?;
    Ok(overtaken.into_iter().max().unwrap_or(0))
}
