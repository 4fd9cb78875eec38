//! Requests of different lengths, and somewhat more of them than run at once.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::{join, join_all};
use genset_backend_common::{ErrorKind, GenerateRequest};
use tokio::task::yield_now;
use tokio::time::Instant;

use super::capacity::send;
use crate::answer::{Answer, Generated};
use crate::check::{CheckResult, Stop, ensure, fail, skip};
use crate::checks::near::{self, Choice};
use crate::checks::pressure::{ensure_complete, one_after_the_other, pace, request, slots};
use crate::checks::words::words_of;
use crate::trial::{Live, Trial};

/// Short requests that differ in everything.
const SHORT: u32 = 5;

fn short_tokens(index: u32) -> u32 {
    2 + index % 3
}

/// The most tokens that one of them has, of its prompt and its answer.
const MOST_SHORT_TOKENS: u32 = 7 + 4;

/// The short requests, and their answers without other requests.
pub(super) struct Known {
    short: Vec<GenerateRequest>,
    alone: Vec<Answer>,
    likeness: Likeness,
}

/// How close an answer beside others must be to the answer alone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Likeness {
    /// It is the same.
    Same,
    /// Differs only where two tokens are almost equally likely: the engine declares that it depends on the batch.
    Near,
    /// Equally long. The engine's answers differ in a batch, which CC04 judges.
    Length,
}

impl Known {
    pub(super) async fn of(live: &Live) -> Result<Self, Stop> {
        let short = (0..SHORT).zip([5, 4, 6, 3, 7]).map(|(index, prompt_len)| {
            let max_tokens = short_tokens(index);
            let short = request(live, prompt_len, 20 + u64::from(index), max_tokens);
            near::rated(live, short)
        });
        let short: Vec<GenerateRequest> = short.collect();
        let mut alone = Vec::new();
        for request in &short {
            alone.push(live.answer(request.clone()).await?);
        }
        let together = live.answers(short.clone()).await?;
        let generated = |answers: &[Answer]| -> Vec<Generated> {
            answers.iter().map(Answer::generated).collect()
        };
        let likeness = if live.varies_with_batch() {
            Likeness::Near
        } else if generated(&together) == generated(&alone) {
            Likeness::Same
        } else {
            Likeness::Length
        };
        if likeness != Likeness::Same {
            live.trial.note_indirect();
        }
        Ok(Self {
            short,
            alone,
            likeness,
        })
    }

    /// The answer to a short request must be complete, and the same as alone.
    fn ensure_right(&self, index: u32, answer: &Answer, when: &str) -> CheckResult {
        let place = usize::try_from(index).unwrap_or_default();
        let max_tokens = short_tokens(index);
        self.ensure_same(answer, max_tokens, &self.alone[place], when)
    }

    /// As [`Self::ensure_right`], for an answer to any request of `max_tokens` tokens.
    pub(super) fn ensure_same(
        &self,
        answer: &Answer,
        max_tokens: u32,
        alone: &Answer,
        when: &str,
    ) -> CheckResult {
        ensure_complete(answer, max_tokens, &format!("an answer {when}"))?;
        match self.likeness {
            Likeness::Length => Ok(()),
            Likeness::Near => near::ensure_near(Choice::Greedy, alone, answer, when),
            Likeness::Same => {
                let (alone, answer) = (alone.generated(), answer.generated());
                ensure!(
                    answer == alone,
                    "alone the answer is {alone:?}, {when} it is {answer:?}"
                );
                Ok(())
            }
        }
    }
}

pub(super) async fn just_over_capacity(trial: Trial) -> CheckResult {
    let live = trial.start().await?;
    let known = Known::of(&live).await?;
    for more in 1..=3 {
        let sent = known
            .short
            .iter()
            .cycle()
            .take(usize::try_from(slots(&live) + more).unwrap_or(1));
        let when = format!("of one of {} requests at once", slots(&live) + more);
        let turn = one_after_the_other(&live, slots(&live) + more, MOST_SHORT_TOKENS);
        let served = join_all(sent.map(|request| send(&live, request.clone(), turn))).await;
        let mut answered = 0;
        for (served, index) in served.into_iter().zip((0..SHORT).cycle()) {
            if let Some(answer) = served? {
                known.ensure_right(index, &answer, &when)?;
                answered += 1;
            }
        }
        ensure!(answered > 0, "all were refused: no answer {when}");
    }
    Ok(())
}

/// The length of a prompt whose prefill takes a moment, in tokens. A slow engine is sent fewer.
const LONG_PROMPT: u32 = 512;

/// The number of tokens in its answer.
const LONG_TOKENS: u32 = 4;

/// The number of words of such a prompt.
async fn long_words(live: &Live) -> Result<usize, Stop> {
    let tokens = live
        .affordable_answer(0, LONG_PROMPT)
        .min(live.config.context_length_tokens / 2)
        .max(1);
    words_of(live, tokens).await
}

fn long(live: &Live, words: usize, seed: u64) -> GenerateRequest {
    near::rated(live, request(live, words, seed, LONG_TOKENS))
}

/// How many attempts an engine has to serve a long prompt in time: a machine may stop for a while.
const TRIES: u64 = 3;

/// How often each client of short prompts may be served while a long one waits, and how many times longer than in serial
/// execution the long one may take. The check fails if both are exceeded.
const PATIENCE: u32 = 8;

pub(super) async fn long_among_short(trial: Trial) -> CheckResult {
    let live = trial.start().await?;
    let known = Known::of(&live).await?;
    let words = long_words(&live).await?;
    let begun = Instant::now();
    let alone = live.answer(long(&live, words, 1)).await?;
    let took = begun.elapsed();
    let mut batch = known.short.clone();
    batch.insert(batch.len() / 2, long(&live, words, 1));
    let answers = live.answers(batch).await?;
    let when = "of a long prompt among short ones";
    known.ensure_same(&answers[known.short.len() / 2], LONG_TOKENS, &alone, when)?;

    let clients = slots(&live) + 4;
    let bounds = Bounds {
        fair: (took + pace(&live).await? * clients) * PATIENCE,
        turn: took + one_after_the_other(&live, clients, MOST_SHORT_TOKENS),
    };
    let mut overtaken = 0;
    for seed in 2..2 + TRIES {
        match starved(&live, &known, long(&live, words, seed), bounds).await? {
            None => return Ok(()),
            Some(served) => overtaken = served,
        }
    }
    fail!(
        "a long prompt did not begin while {overtaken} short ones of {clients} clients were served, and not in any of {TRIES} tries"
    )
}

/// How long a request may wait beside a long prompt and the clients of short ones.
#[derive(Clone, Copy)]
struct Bounds {
    /// The long one, beside clients that are served again and again.
    fair: Duration,
    /// The last of all requests.
    turn: Duration,
}

/// State shared between the clients of short prompts and the client of a long one.
#[derive(Default)]
struct Seen {
    served: AtomicU32,
    /// The long prompt has its first token or was refused.
    has_begun: AtomicBool,
    /// The others gave up before that.
    is_over: AtomicBool,
}

/// The number of short prompts that were served while the long one waited, if it was too high.
async fn starved(
    live: &Live,
    known: &Known,
    long: GenerateRequest,
    bounds: Bounds,
) -> Result<Option<u32>, Stop> {
    let Bounds { fair, turn } = bounds;
    let (seen, begun) = (Seen::default(), Instant::now());
    let clients = slots(live) + 4;
    let others = (0..clients)
        .zip(known.short.iter().cycle())
        .map(|(_, short)| {
            let seen = &seen;
            async move {
                while !seen.has_begun.load(Ordering::Relaxed)
                    && !seen.is_over.load(Ordering::Relaxed)
                {
                    drop(send(live, short.clone(), turn).await?);
                    let served = seen.served.fetch_add(1, Ordering::Relaxed);
                    let is_over = served > clients * PATIENCE && begun.elapsed() > fair;
                    seen.is_over.fetch_or(is_over, Ordering::Relaxed);
                    yield_now().await;
                }
                Ok::<_, Stop>(())
            }
        });
    // The others are polled first, so they have been sent before the long one.
    let (others, starved) = join(
        join_all(others),
        first_token(live, long, &seen, fair + turn),
    )
    .await;
    others.into_iter().collect::<CheckResult>()?;
    starved
}

/// `limit` is the time after which the others have given up and all of them are served.
async fn first_token(
    live: &Live,
    long: GenerateRequest,
    seen: &Seen,
    limit: Duration,
) -> Result<Option<u32>, Stop> {
    let ctx = live.context(&long);
    let first = match live.try_generate_within(limit, long, ctx).await? {
        Ok(mut running) => {
            let first = running.next_within(limit).await;
            first.map(|first| (first, Some(running)))
        }
        Err(error) => Ok((Some(Err(error)), None)),
    };
    let served = seen.served.load(Ordering::Relaxed);
    seen.has_begun.store(true, Ordering::Relaxed);
    match first? {
        (Some(Ok(_)), running) => {
            if let Some(running) = running {
                drop(running.finish().await?);
            }
            Ok(seen.is_over.load(Ordering::Relaxed).then_some(served))
        }
        // An engine that refuses has no queue.
        (Some(Err(error)), _) if error.kind() == ErrorKind::Overloaded => {
            skip!(
                NotDeclared,
                "the engine refuses what it does not run at once"
            )
        }
        (other, _) => fail!("a long prompt was answered by {other:?}"),
    }
}

pub(super) async fn short_beside_prefill(trial: Trial) -> CheckResult {
    let live = trial.start().await?;
    let known = Known::of(&live).await?;
    let words = long_words(&live).await?;
    for (index, short) in (0..).zip(&known.short) {
        let long = long(&live, words, u64::from(index));
        let mut running = live.generate(long).await?;
        // The engine has begun it, or is about to.
        let first = running.next().now_or_never().transpose()?.flatten();
        if index > 0 {
            yield_now().await;
        }
        let (answer, rest) = join(live.answer(short.clone()), running.finish()).await;
        known.ensure_right(index, &answer?, "of a prompt that came during a prefill")?;
        let rest = rest?;
        ensure!(
            rest.finished().is_some() || matches!(first, Some(Err(_))),
            "a long prompt beside a short one was answered by {:?}",
            rest.items.last()
        );
    }
    Ok(())
}
