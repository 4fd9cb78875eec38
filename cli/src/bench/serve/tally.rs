//! [`Tally`]: the results of the requests so far.

use std::collections::BTreeMap;
use std::time::Duration;

use genset_simulate::Quantiles;
use tokio::time::Instant;

use super::client::{Answer, Failure, FailureKind};

/// If an answer has more pieces per token than this, a piece is a token.
const ONE_EACH: f64 = 0.8;

/// The limits that a good answer meets.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Slo {
    pub(super) ttft: Option<Duration>,
    /// For the mean of the answer's times between tokens.
    pub(super) itl: Option<Duration>,
}

impl Slo {
    pub(super) fn is_some(&self) -> bool {
        self.ttft.is_some() || self.itl.is_some()
    }
}

/// Requests that failed in one way.
#[derive(Debug, Default)]
pub(super) struct Lost {
    pub(super) count: u64,
    /// The error message of the first one.
    pub(super) problem: String,
}

/// The time span in which requests were answered.
#[derive(Debug, Clone, Copy, Default)]
struct Span {
    /// When the first request was made.
    began: Option<Instant>,
    /// When the last answer ended.
    ended: Option<Instant>,
}

/// The results of the requests so far.
#[derive(Debug, Default)]
pub(super) struct Tally {
    slo: Slo,
    span: Span,
    pub(super) answered: u64,
    pub(super) lost: BTreeMap<FailureKind, Lost>,
    /// Answers that met the SLO.
    pub(super) good: u64,
    pub(super) ttft: Quantiles,
    /// Times between two tokens.
    pub(super) itl: Quantiles,
    /// The mean of those times for each answer.
    pub(super) answer_itl: Quantiles,
    pub(super) latency: Quantiles,
    /// From the time a request was due to the time it was sent.
    pub(super) lag: Quantiles,
    /// Requested prompt tokens of the answered requests.
    pub(super) asked_prompt_tokens: u64,
    pub(super) asked_tokens: u64,
    pub(super) prompt_tokens: u64,
    /// `None` until an answer reports it.
    pub(super) cached_tokens: Option<u64>,
    pub(super) completion_tokens: u64,
}

/// A request's intended lengths.
#[derive(Debug, Clone, Copy)]
pub(super) struct Asked {
    pub(super) prompt_tokens: u64,
    pub(super) max_tokens: u32,
}

impl Tally {
    pub(super) fn new(slo: Slo) -> Self {
        Self {
            slo,
            ..Self::default()
        }
    }

    /// Records that a request is made.
    pub(super) fn asked(&mut self, now: Instant) {
        self.span.began.get_or_insert(now);
    }

    /// From the first request to the end of the last answer; `None` without an answer.
    pub(super) fn took(&self) -> Option<Duration> {
        let Span { began, ended } = self.span;
        Some(ended?.saturating_duration_since(began?))
    }

    pub(super) fn lost(&mut self, failure: Failure) {
        let lost = self.lost.entry(failure.kind).or_default();
        if lost.count == 0 {
            lost.problem = failure.problem;
        }
        lost.count += 1;
    }

    pub(super) fn answered(&mut self, asked: Asked, answer: &Answer) {
        self.answered += 1;
        self.span.ended = self.span.ended.max(Some(answer.ended));
        // A server chose these counts: a sum that overflows stays at the maximum.
        let add = |sum: &mut u64, count: u64| *sum = sum.saturating_add(count);
        add(&mut self.asked_prompt_tokens, asked.prompt_tokens);
        add(&mut self.asked_tokens, u64::from(asked.max_tokens));
        let pieces = answer.pieces.len() as u64;
        let tokens = match &answer.usage {
            Some(usage) => {
                add(&mut self.prompt_tokens, usage.prompt_tokens);
                if let Some(cached) = usage.cached_tokens() {
                    add(self.cached_tokens.get_or_insert(0), cached);
                }
                usage.completion_tokens
            }
            None => pieces,
        };
        add(&mut self.completion_tokens, tokens);
        self.latency.add(answer.ended - answer.sent);
        let (Some(first), Some(last)) = (answer.pieces.first(), answer.pieces.last()) else {
            // An answer without visible content.
            self.good += u64::from(!self.slo.is_some());
            return;
        };
        let ttft = *first - answer.sent;
        self.ttft.add(ttft);
        // A piece counts as the average number of tokens, which share the time before it. If there are slightly more tokens than
        // pieces, the extra tokens have no text and each piece is one token.
        #[expect(clippy::cast_precision_loss, reason = "counts are far below 2^52")]
        let share = match pieces as f64 / tokens.max(1) as f64 {
            share if share > ONE_EACH => 1.0,
            share => share,
        };
        for pair in answer.pieces.windows(2) {
            if let [before, after] = pair {
                self.itl.add((*after - *before).mul_f64(share));
            }
        }
        let itl = (tokens > 1 && pieces > 1).then(|| {
            let steps = u32::try_from(tokens - 1).unwrap_or(u32::MAX);
            (*last - *first) / steps
        });
        if let Some(itl) = itl {
            self.answer_itl.add(itl);
        }
        let keeps = |limit: Option<Duration>, time: Duration| limit.is_none_or(|it| time <= it);
        let is_good = keeps(self.slo.ttft, ttft) && itl.is_none_or(|itl| keeps(self.slo.itl, itl));
        self.good += u64::from(is_good);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(first_ms: u64, gaps_ms: &[u64]) -> Answer {
        let sent = Instant::now();
        let mut at = sent + Duration::from_millis(first_ms);
        let mut pieces = vec![at];
        for gap in gaps_ms {
            at += Duration::from_millis(*gap);
            pieces.push(at);
        }
        Answer {
            sent,
            pieces,
            ended: at,
            text: "x".into(),
            usage: None,
        }
    }

    const ASKED: Asked = Asked {
        prompt_tokens: 9,
        max_tokens: 4,
    };

    fn near(value: Option<f64>, ms: f64) {
        let value = value.unwrap();
        assert!((value / ms - 1.0).abs() < 0.011, "{value} is not {ms}");
    }

    #[test]
    fn times_are_those_of_tokens_however_they_are_packed() {
        let mut tally = Tally::new(Slo::default());
        let mut packed = answer(50, &[20, 20]);
        let usage = r#"{"prompt_tokens": 9, "completion_tokens": 6}"#;
        packed.usage = serde_json::from_str(usage).unwrap();
        tally.answered(ASKED, &packed);
        near(tally.ttft.ms(0.5), 50.0);
        near(tally.itl.ms(0.5), 10.0);
        near(tally.answer_itl.ms(0.5), 8.0);
        near(tally.latency.ms(0.5), 90.0);
        assert_eq!((tally.completion_tokens, tally.asked_tokens), (6, 4));
        assert_eq!(tally.cached_tokens, None);
    }

    #[test]
    fn a_token_without_text_shortens_no_times() {
        let mut tally = Tally::new(Slo::default());
        let mut answer = answer(50, &[20; 9]);
        let usage = r#"{"prompt_tokens": 9, "completion_tokens": 11}"#;
        answer.usage = serde_json::from_str(usage).unwrap();
        tally.answered(ASKED, &answer);
        near(tally.itl.ms(0.5), 20.0);
    }

    #[test]
    fn counts_without_end_stay_the_largest_number() {
        let mut tally = Tally::new(Slo::default());
        let mut answer = answer(50, &[20]);
        let most = u64::MAX;
        let usage = format!(
            r#"{{"prompt_tokens": {most}, "completion_tokens": {most}, "prompt_tokens_details": {{"cached_tokens": {most}}}}}"#
        );
        answer.usage = serde_json::from_str(&usage).unwrap();
        for _ in 0..2 {
            tally.answered(ASKED, &answer);
        }
        assert_eq!((tally.prompt_tokens, tally.completion_tokens), (most, most));
        assert_eq!(tally.cached_tokens, Some(most));
    }

    #[test]
    fn the_time_is_that_from_the_first_request_to_the_end_of_the_last_answer() {
        let mut tally = Tally::new(Slo::default());
        assert_eq!(tally.took(), None);
        let began = Instant::now();
        tally.asked(began);
        tally.asked(began + Duration::from_millis(30));
        assert_eq!(tally.took(), None, "there is no answer");
        // The request that was sent last need not end last.
        for ended_ms in [90, 70] {
            let mut answer = answer(1, &[]);
            answer.sent = began;
            answer.pieces.clear();
            answer.ended = began + Duration::from_millis(ended_ms);
            tally.answered(ASKED, &answer);
        }
        assert_eq!(tally.took(), Some(Duration::from_millis(90)));
    }

    #[test]
    fn a_good_answer_keeps_both_limits() {
        let slo = Slo {
            ttft: Some(Duration::from_millis(50)),
            itl: Some(Duration::from_millis(10)),
        };
        for (first, gaps, is_good) in [
            (50, &[10, 10][..], true),
            (50, &[1, 19], true),
            (51, &[10], false),
            (50, &[11], false),
            (50, &[], true),
        ] {
            let mut tally = Tally::new(slo);
            tally.answered(ASKED, &answer(first, gaps));
            assert_eq!(tally.good, u64::from(is_good), "{first} {gaps:?}");
        }
    }

    #[test]
    fn failures_are_counted_by_kind_with_the_first_problem() {
        let mut tally = Tally::default();
        let full = FailureKind::Status(503);
        for (kind, problem) in [
            (full, "full"),
            (full, "fuller"),
            (FailureKind::Connect, "refused"),
        ] {
            tally.lost(Failure {
                kind,
                problem: problem.into(),
            });
        }
        let lost = &tally.lost[&full];
        assert_eq!((lost.count, lost.problem.as_str()), (2, "full"));
        assert_eq!(tally.lost.len(), 2);
    }
}
