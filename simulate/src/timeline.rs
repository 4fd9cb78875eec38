//! [`Timeline`]: how long clients waited, over the time of a run, in bounded memory.

use std::time::Duration;

use serde::Serialize;

use crate::quantiles::Quantiles;

/// The most spans that are kept. When there are more, pairs of spans are merged.
const MAX_SPANS: usize = 240;

/// Waiting times, by when they ended.
#[derive(Debug)]
pub(crate) struct Timeline {
    span: Duration,
    spans: Vec<Span>,
}

#[derive(Debug, Clone, Default)]
struct Span {
    ttft: Quantiles,
    pause: Duration,
    prompt_tokens: u64,
    cached_tokens: u64,
}

/// A span of a run. Times are in milliseconds.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Moment {
    /// When it began, in seconds from the beginning.
    pub at_s: f64,
    /// The 90th percentile of the times to first tokens that came in the span; `None` if none came.
    pub ttft_p90_ms: Option<f64>,
    /// The longest time between two tokens of an answer, assigned to the span of the second token.
    pub longest_pause_ms: f64,
    /// Prompt tokens of the requests that were sent in the span and answered.
    pub prompt_tokens: u64,
    /// Those of them that were in a prefix cache.
    pub cached_tokens: u64,
}

impl Default for Timeline {
    fn default() -> Self {
        Self {
            span: Duration::from_secs(1),
            spans: Vec::new(),
        }
    }
}

impl Timeline {
    /// Notes a first token at time `at`, `ttft` after its request.
    pub(crate) fn first_token(&mut self, at: Duration, ttft: Duration) {
        self.span_at(at).ttft.add(ttft);
    }

    /// Notes a further token, `pause` after the previous one.
    pub(crate) fn token(&mut self, at: Duration, pause: Duration) {
        let span = self.span_at(at);
        span.pause = span.pause.max(pause);
    }

    /// Notes a request sent at time `at`, and how much of its prompt was cached.
    pub(crate) fn prompt(&mut self, at: Duration, tokens: u64, cached: u64) {
        let span = self.span_at(at);
        span.prompt_tokens += tokens;
        span.cached_tokens += cached;
    }

    fn span_at(&mut self, at: Duration) -> &mut Span {
        while self.place_of(at) >= MAX_SPANS {
            self.halve();
        }
        let place = self.place_of(at);
        if self.spans.len() <= place {
            self.spans.resize_with(place + 1, Span::default);
        }
        &mut self.spans[place]
    }

    fn place_of(&self, at: Duration) -> usize {
        usize::try_from(at.as_nanos() / self.span.as_nanos()).unwrap_or(usize::MAX)
    }

    fn halve(&mut self) {
        self.span *= 2;
        let spans = std::mem::take(&mut self.spans);
        let joined = spans.chunks(2).map(|pair| {
            let mut whole = Span::default();
            for span in pair {
                whole.ttft.merge(&span.ttft);
                whole.pause = whole.pause.max(span.pause);
                whole.prompt_tokens += span.prompt_tokens;
                whole.cached_tokens += span.cached_tokens;
            }
            whole
        });
        self.spans = joined.collect();
    }

    /// All spans in order.
    pub(crate) fn moments(&self) -> Vec<Moment> {
        let spans = (0_u32..).zip(&self.spans);
        let moment = |(place, span): (u32, &Span)| Moment {
            at_s: (self.span * place).as_secs_f64(),
            ttft_p90_ms: span.ttft.ms(0.9),
            longest_pause_ms: span.pause.as_secs_f64() * 1e3,
            prompt_tokens: span.prompt_tokens,
            cached_tokens: span.cached_tokens,
        };
        spans.map(moment).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_run_has_wider_spans_and_loses_no_wait() {
        let mut timeline = Timeline::default();
        let seconds = Duration::from_secs;
        timeline.token(seconds(1), seconds(7));
        for at in 0..1000 {
            timeline.first_token(seconds(at), Duration::from_millis(100));
        }
        timeline.first_token(seconds(999), seconds(3));
        let moments = timeline.moments();
        assert_eq!(moments.len(), 125);
        assert_eq!(
            (moments[1].at_s, moments[0].longest_pause_ms),
            (8.0, 7000.0)
        );
        let last = moments[124].ttft_p90_ms.unwrap();
        assert!(last > 2900.0, "{last}");
        assert!(moments[3].ttft_p90_ms.unwrap() < 110.0);
    }
}
