//! CC: concurrency and isolation.
//!
//! The catalogue's CC11 is a measurement that includes one rule. The rule is checked here, at level 2; PF02 has the numbers.

mod capacity;
mod heartbeat;
mod isolation;
mod memory;
mod mixed;
mod own_options;
mod priority;

use futures_util::future::join_all;
use tokio::task::JoinSet;
use tokio::time::Instant;

use super::pressure::{ensure_complete, request};
use crate::check::{Check, CheckResult, Stop, check, fail};
use crate::trial::{Live, Trial};

pub(super) const CHECKS: &[Check] = &[
    check!("CC01", Core, Tokens, "requests interleaved on one thread all finish",
        clause: "LLMEngine::generate",
        breaks: "a lock held across an await: the first burst of requests stops the engine for good", on_one_thread),
    check!(multi_thread "CC02", Core, Tokens, "requests on several threads all finish, each with all its tokens",
        clause: "LLMEngine::generate",
        breaks: "data races that no test on one thread shows", on_several_threads),
    check!("CC03", Core, Tokens, "each answer belongs to its own prompt",
        clause: "LLMEngine::generate",
        breaks: "cross-talk: clients read each other's answers", isolation::own_answers),
    check!("CC04", Strict, Tokens, "a greedy answer is the same alone and in a batch",
        clause: "LLMEngine::generate",
        breaks: "answers that cannot be reproduced, because they depend on who else was there", isolation::batch_invariant),
    check!("CC05", Core, Tokens, "a short request finishes while a long one runs",
        clause: "LLMEngine::generate",
        breaks: "head-of-line blocking: one long answer makes everybody wait", capacity::short_beside_long),
    check!("CC06", Strict, Tokens, "a waiting request is not overtaken for ever",
        clause: "LLMEngine::generate",
        breaks: "under load some requests starve until their clients give up", capacity::no_starvation),
    check!("CC07", Core, Tokens, "more requests than the engine runs at once are queued or refused as overloaded",
        clause: "LLMEngine::generate, Errors",
        breaks: "requests over capacity hang without an answer", capacity::over_capacity),
    check!(multi_thread "CC08", Core, Tokens, "the async runtime goes on while the engine computes",
        clause: "LLMEngine::generate",
        breaks: "blocking compute on the async runtime: health checks time out and the pod is killed", heartbeat::goes_on),
    check!("CC09", Core, Tokens, "requests that fail leave others alone",
        clause: "LLMEngine::generate",
        breaks: "one bad request poisons shared state, and every later one fails", isolation::failures_stay),
    check!("CC10", Strict, Tokens, "a second request with an id in use is refused or kept apart",
        clause: "RequestContext::new",
        breaks: "two clients share one session: tokens go to the wrong one, or an answer never ends", isolation::same_id),
    check!("CC11", Strict, Tokens, "many requests at once take no longer than one after the other would",
        clause: "LLMEngine::generate",
        breaks: "anti-scaling: the busier the engine, the less it does in all", no_anti_scaling),
    check!("CC12", Strict, Tokens, "of the requests that wait, one of a higher priority runs before those of a lower one",
        clause: "GenerateRequest::priority",
        breaks: "a declared priority that does nothing, or that serves paying clients last", priority::higher_first),
    check!("CC13", Strict, Tokens, "one, two and three requests more than run at once are answered rightly, or refused as overloaded",
        clause: "LLMEngine::generate, Errors",
        breaks: "the first client that has to wait reads what is left in the batch of somebody else", mixed::just_over_capacity),
    check!("CC14", Strict, Tokens, "a long prompt among short ones is answered rightly, and does not starve",
        clause: "LLMEngine::generate",
        breaks: "documents are never summarized while people chat", mixed::long_among_short),
    check!("CC15", Strict, Tokens, "a short prompt that comes while a long one is prefilled is answered rightly",
        clause: "LLMEngine::generate",
        breaks: "a prefill in chunks that mixes up whose tokens it computes", mixed::short_beside_prefill),
    check!(tokens "CC16", Strict, Tokens, "requests at once each keep their own stop tokens, limits and biases",
        clause: "LLMEngine::generate",
        breaks: "one client's stop words end another client's answer", own_options::beside_others),
    check!(tokens "CC17", Strict, Tokens, "requests that need more KV blocks than there are are all answered rightly, or refused as overloaded",
        clause: "LLMEngine::generate, Errors",
        breaks: "long conversations at the same time: answers are lost, cut or mixed up, or nobody goes on", memory::more_than_there_is),
];

/// The number of concurrent requests; a serial engine finishes them within the limits.
const THRONG: u32 = 12;

async fn on_one_thread(trial: Trial) -> CheckResult {
    let live = trial.start().await?;
    let answers = (0..THRONG).map(|index| one_of_several(&live, index));
    join_all(answers).await.into_iter().collect()
}

async fn one_of_several(live: &Live, index: u32) -> CheckResult {
    let max_tokens = 3 + index % 4;
    let answer = live.answer(request(live, 4, u64::from(index), max_tokens));
    ensure_complete(&answer.await?, max_tokens, "one of several answers")
}

async fn on_several_threads(trial: Trial) -> CheckResult {
    let live = trial.start().await?;
    let mut tasks = JoinSet::new();
    for index in 0..THRONG {
        let live = live.clone();
        tasks.spawn(async move { one_of_several(&live, index).await });
    }
    while let Some(joined) = tasks.join_next().await {
        joined.map_err(|error| Stop::Fail(format!("a task that read an answer: {error}")))??;
    }
    Ok(())
}

/// The number of concurrent requests, compared with one request.
const CONCURRENCY: u32 = 8;

/// The factor that noise and bookkeeping may add to the time of serial execution.
const TOLERANCE: u32 = 2;

/// How many attempts an engine has: noise rarely affects all of them.
const TRIES: u32 = 3;

async fn no_anti_scaling(trial: Trial) -> CheckResult {
    let live = trial.start().await?;
    let mut seen = String::new();
    // More would wait, or be refused and pause.
    let concurrency = u32::try_from(live.at_once(CONCURRENCY)).unwrap_or(1);
    for _ in 0..TRIES {
        let one = time_of(&live, 1).await?;
        let many = time_of(&live, concurrency).await?;
        if many <= one * concurrency * TOLERANCE {
            return Ok(());
        }
        seen = format!("one request took {one:?}, and {concurrency} at once took {many:?}");
    }
    fail!(
        "{seen}: more than {TOLERANCE} times as long as one after the other, in each of {TRIES} tries"
    )
}

async fn time_of(live: &Live, concurrency: u32) -> Result<std::time::Duration, Stop> {
    let requests = (0..concurrency).map(|seed| request(live, 4, u64::from(seed), 8));
    let started = Instant::now();
    for answer in live.answers(requests.collect()).await? {
        ensure_complete(&answer, 8, "one of several answers")?;
    }
    Ok(started.elapsed())
}
