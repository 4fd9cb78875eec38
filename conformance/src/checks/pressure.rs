//! Requests that fill an engine, and whether it still serves others afterwards. For the groups CN and CC, which test from
//! outside what a request holds: a slot that was not freed is not available to others.

use std::time::Duration;

use futures_util::future::join_all;
use genset_backend_common::{EngineError, ErrorKind, FinishReason, GenerateRequest, Output};
use tokio::time::{Instant, timeout};

use crate::answer::Answer;
use crate::check::{CheckResult, Stop, ensure, fail, skip};
use crate::running::Running;
use crate::trial::Live;

/// The maximum length of a long request: enough to exceed every limit, little enough for a check that reads it all.
const LONG_TOKENS: u32 = 20_000;

/// The number of sequences to fill an engine that does not declare how many it runs.
const USUAL_SLOTS: u32 = 16;

/// An engine with more slots is not filled: that would take a slow engine too long.
const MOST_SLOTS: u32 = 32;

/// The maximum number of requests to try in turn.
const MOST_IN_TURN: u32 = 1024;

/// A greedy request with a prompt that varies with `seed`.
pub(super) fn request(
    live: &Live,
    prompt_len: usize,
    seed: u64,
    max_tokens: u32,
) -> GenerateRequest {
    live.greedy(live.prompt(prompt_len, seed), max_tokens)
}

/// A request that does not end by itself during a check.
pub(super) fn long_request(live: &Live, seed: u64) -> GenerateRequest {
    let room = live.config.context_length_tokens.saturating_sub(4);
    request(live, 4, seed, room.clamp(1, LONG_TOKENS))
}

/// The number of sequences that fill the engine.
pub(super) fn slots(live: &Live) -> u32 {
    live.config
        .max_num_seqs
        .unwrap_or(USUAL_SLOTS)
        .clamp(1, MOST_SLOTS)
}

/// Whether the engine's own counter shows how many requests hold resources.
fn counts_requests(live: &Live) -> bool {
    let probe = live.subject.probe.as_ref();
    probe.is_some_and(|probe| probe.active_requests().is_some())
}

/// How many requests to run in turn so that a leaked slot per request shows: from outside, only when no slot is left. Limited
/// to as many as fit into a part of a check's time at `pace` each.
pub(super) fn in_turn(live: &Live, pace: Duration) -> u32 {
    let few = slots(live);
    let all = live.config.max_num_seqs.unwrap_or(few).min(MOST_IN_TURN);
    if counts_requests(live) {
        return few;
    }
    if live.trial.keeps_virtual_time() {
        return all.max(few);
    }
    let time = live.trial.limits().wall / 8;
    let affordable = time.as_micros() / pace.as_micros().max(1);
    all.min(u32::try_from(affordable).unwrap_or(u32::MAX))
        .max(few)
}

/// Skips the check if the engine has more slots than requests were tried, and no counter of its own.
pub(super) fn ensure_all_tried(live: &Live, tried: u32) -> CheckResult {
    match live.config.max_num_seqs {
        Some(most) if most > tried && !counts_requests(live) => skip!(
            NoProbe,
            "{tried} requests left, one after the other: that none keeps one of {most} slots shows once more have left, or to a probe"
        ),
        Some(_) | None => Ok(()),
    }
}

/// Skips the check for an engine that declares that it cannot run `count` sequences at once.
pub(super) fn ensure_room_for(live: &Live, count: u32) -> Result<(), Stop> {
    match live.config.max_num_seqs {
        Some(most) if most < count => {
            skip!(
                NotDeclared,
                "the engine runs {most} sequences at once, the check takes {count}"
            )
        }
        _ => Ok(()),
    }
}

/// The time of a request for one token while nothing else runs.
pub(super) async fn pace(live: &Live) -> Result<Duration, Stop> {
    let started = Instant::now();
    let answer = live.answer(request(live, 4, 0, 1)).await?;
    ensure!(
        answer.finished().is_some(),
        "a plain request failed: {:?}",
        answer.error()
    );
    Ok(started.elapsed())
}

/// The time limit for an engine to free a request's resources and yield the next request's first token.
pub(super) fn patience(live: &Live, pace: Duration) -> Duration {
    live.trial.limits().cancel + pace * 8
}

/// The number of tokens, of prompts and answers, that an engine computes within the limit of a call, at the pace of its warm-up.
const CALL_TOKENS: u32 = 100;

/// The time limit for the last of `count` requests, each with `tokens` tokens of its prompt and its answer: an engine may gain
/// nothing from batching.
pub(super) fn one_after_the_other(live: &Live, count: u32, tokens: u32) -> Duration {
    live.trial.limits().call * (2 + count.saturating_mul(tokens) / CALL_TOKENS)
}

/// Sends `request` until it is not refused as `Overloaded`, and reads its first item, which must not be that either.
async fn admitted(
    live: &Live,
    request: &GenerateRequest,
) -> Result<(Running, Option<Result<Output, EngineError>>), Stop> {
    loop {
        let ctx = live.context(request);
        match live.try_generate(request.clone(), ctx).await? {
            Ok(mut running) => match running.next().await? {
                Some(Err(error)) if error.kind() == ErrorKind::Overloaded => {}
                first => return Ok((running, first)),
            },
            Err(error) if error.kind() == ErrorKind::Overloaded => {}
            Err(error) => fail!("a good request was refused: {error} ({})", error.kind()),
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Sends a long request, and reads its first token.
pub(super) async fn serve_first_token(
    live: &Live,
    seed: u64,
    limit: Duration,
    when: &str,
) -> Result<Running, Stop> {
    let request = long_request(live, seed);
    let what = format!("the first token {when}");
    let (running, first) = live
        .trial
        .within(&what, limit, admitted(live, &request))
        .await??;
    ensure!(
        matches!(first, Some(Ok(Output::Tokens(_) | Output::Text(_)))),
        "a request {when} did not begin with a token: {first:?}"
    );
    Ok(running)
}

/// A new request must get its first token as soon as that can be expected.
pub(super) async fn ensure_serves_again(
    live: &Live,
    pace: Duration,
    when: &str,
) -> Result<(), Stop> {
    drop(serve_first_token(live, 0, patience(live, pace), when).await?);
    Ok(())
}

/// A request whose answer has begun.
pub(super) struct Begun {
    /// The rest of the answer.
    pub running: Running,
    first: Option<Result<Output, EngineError>>,
}

impl Begun {
    /// Sends a request and reads its first item, which may have any number of tokens.
    pub(super) async fn new(live: &Live, request: GenerateRequest) -> Result<Self, Stop> {
        Self::of(live.generate(request).await?).await
    }

    /// Reads the first item.
    pub(super) async fn of(mut running: Running) -> Result<Self, Stop> {
        let first = running.next().await?;
        Ok(Self { running, first })
    }

    /// The whole answer, including its beginning.
    pub(super) async fn finish(self) -> Result<Answer, Stop> {
        let mut answer = self.running.finish().await?;
        answer.items.splice(0..0, self.first);
        Ok(answer)
    }
}

/// Long requests, kept open.
pub(super) struct Crowd {
    /// Those whose first token has come.
    pub running: Vec<Running>,
    /// Those that were accepted and have yielded nothing yet.
    pub waiting: Vec<Running>,
}

/// Sends `count` long requests. Drops those refused as `Overloaded`, and those that wait inside `generate`.
pub(super) async fn crowd(live: &Live, count: u32) -> Result<Crowd, Stop> {
    let moment = live.trial.limits().cancel / 4;
    let sent = (0..u64::from(count)).map(|seed| async move {
        let request = long_request(live, seed);
        let ctx = live.context(&request);
        timeout(moment, live.try_generate(request, ctx)).await
    });
    let mut accepted = Vec::new();
    for sent in join_all(sent).await.into_iter().flatten() {
        match sent? {
            Ok(running) => accepted.push(running),
            Err(error) if error.kind() == ErrorKind::Overloaded => {}
            Err(error) => fail!("a good request was refused: {error} ({})", error.kind()),
        }
    }
    let mut crowd = Crowd {
        running: Vec::new(),
        waiting: accepted,
    };
    // Beside running requests, a moment decides which ones wait. If none runs yet, the machine may be busy: the first has the
    // limit of a call.
    let give_up = Instant::now() + live.trial.limits().call;
    while crowd.running.is_empty() && !crowd.waiting.is_empty() && Instant::now() < give_up {
        look(&mut crowd, moment).await?;
    }
    ensure!(
        !crowd.running.is_empty(),
        "of {count} requests not one got its first token"
    );
    Ok(crowd)
}

/// Gives each waiting request a moment to begin. Drops those refused as `Overloaded`.
async fn look(crowd: &mut Crowd, moment: Duration) -> Result<(), Stop> {
    let looked = crowd.waiting.drain(..).map(|mut running| async move {
        let first = timeout(moment, running.next()).await;
        (running, first)
    });
    for (running, first) in join_all(looked).await {
        match first {
            Err(_) => crowd.waiting.push(running),
            Ok(first) => match first? {
                Some(Ok(Output::Tokens(_) | Output::Text(_))) => crowd.running.push(running),
                Some(Err(error)) if error.kind() == ErrorKind::Overloaded => {}
                other => fail!("a long request did not begin with a token: {other:?}"),
            },
        }
    }
    Ok(())
}

/// Reads a cancelled request to its end, which must come soon.
pub(super) async fn end_of_cancelled(live: &Live, running: Running) -> Result<Answer, Stop> {
    let limit = live.trial.limits().cancel;
    live.trial
        .within("the end of a cancelled request", limit, running.finish())
        .await?
}

/// The answer must have ended as cancelled.
pub(super) fn ensure_cancelled(answer: &Answer) -> Result<(), Stop> {
    let is_cancelled = answer.reason() == Some(FinishReason::Cancelled);
    ensure!(
        is_cancelled,
        "a cancelled request ended otherwise: {:?}",
        answer.items.last()
    );
    Ok(())
}

/// The answer must be complete, with the requested length.
pub(super) fn ensure_complete(answer: &Answer, max_tokens: u32, whose: &str) -> Result<(), Stop> {
    let count = answer.generated().len();
    ensure!(
        answer.finished().is_some() && u32::try_from(count) == Ok(max_tokens),
        "{whose} has {count} of {max_tokens} tokens and ends with {:?}",
        answer.items.last()
    );
    Ok(())
}

/// Waits until the engine's counters show that no request holds anything; without a probe the evidence is indirect.
pub(super) async fn ensure_nothing_held(live: &Live, kv_before: Option<u64>) -> Result<(), Stop> {
    live.await_probe("freeing what the requests held", |probe| {
        probe.active_requests().map(|active| active == 0)
    })
    .await?;
    if let Some(before) = kv_before {
        live.await_probe("freeing KV blocks", |probe| {
            probe.kv_used_blocks().map(|used| used <= before)
        })
        .await?;
    }
    Ok(())
}
