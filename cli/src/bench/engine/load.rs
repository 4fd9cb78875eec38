//! [`Load`]: requests to an engine, and the arrival times of their tokens.

use std::time::Duration;

use futures_util::StreamExt;
use futures_util::future::try_join_all;
use genset_backend_common::output::Output;
use genset_backend_common::{
    EngineConfig, EngineError, GenerateRequest, LLMEngine, MetricsRegistry, RequestContext, TokenId,
};
use tokio::time::Instant;

/// One measurement of sequences that decode concurrently.
#[derive(Debug, Clone, Copy)]
pub(super) struct DecodeFigures {
    pub(super) rate: Rate,
    pub(super) outside_model: f64,
    /// The share of draft tokens that the model accepted; `None` if there were no drafts.
    pub(super) accepted_drafts: Option<f64>,
}

/// How fast sequences decode.
#[derive(Debug, Clone, Copy)]
pub(super) struct Rate {
    pub(super) tokens_per_s: f64,
    /// Whether there was a time in which all sequences decoded. If not, the rate covers the whole time, including prefill of the
    /// later ones.
    pub(super) at_once: bool,
}

/// The engine's counters: seconds of steps, seconds in the model, draft tokens, and those that the model accepted.
const COUNTERS: [&str; 4] = [
    "genset_candle_step_seconds_sum ",
    "genset_candle_forward_seconds_sum ",
    "genset_candle_draft_tokens_total ",
    "genset_candle_accepted_draft_tokens_total ",
];

/// An engine under load.
pub(super) struct Load<'a> {
    engine: &'a dyn LLMEngine,
    metrics: MetricsRegistry,
    vocab_size: u32,
    requests: u64,
    random: u64,
}

/// When tokens arrived, and how many at once.
type Arrivals = Vec<(Instant, usize)>;

impl<'a> Load<'a> {
    pub(super) fn new(
        engine: &'a dyn LLMEngine,
        config: &EngineConfig,
        metrics: MetricsRegistry,
    ) -> Self {
        Self {
            engine,
            metrics,
            vocab_size: config.vocab_size.map_or(1, std::num::NonZeroU32::get),
            requests: 0,
            random: 0x9E37_79B9_7F4A_7C15,
        }
    }

    /// `sequences` sequences, each with its own prompt, decode `new_tokens` each. The rate covers the time in which all of them
    /// decode; the share outside the model covers all their steps.
    pub(super) async fn decode(
        &mut self,
        sequences: u32,
        context_tokens: u32,
        new_tokens: u32,
    ) -> Result<DecodeFigures, EngineError> {
        let prompts: Vec<_> = (0..sequences)
            .map(|_| self.prompt(context_tokens))
            .collect();
        let requests: Vec<_> = prompts
            .into_iter()
            .map(|prompt| self.request(prompt, new_tokens))
            .collect();
        let before = self.counts();
        let engine = self.engine;
        let all = try_join_all(
            requests
                .into_iter()
                .map(|(request, ctx)| arrivals(engine, request, ctx)),
        );
        let all = all.await?;
        let after = self.counts();
        let [step_s, forward_s, drafts, accepted] =
            std::array::from_fn(|counter| after[counter] - before[counter]);
        Ok(DecodeFigures {
            rate: together(&all),
            outside_model: ((step_s - forward_s) / step_s).clamp(0.0, 1.0),
            accepted_drafts: (drafts > 0.0).then(|| accepted / drafts),
        })
    }

    /// The time from a request with a new prompt to its first token.
    pub(super) async fn first_token(
        &mut self,
        prompt_tokens: u32,
    ) -> Result<Duration, EngineError> {
        let prompt = self.prompt(prompt_tokens);
        self.time_first_token(prompt).await
    }

    /// The time from a request to its first token, for the first and the second request with the same prompt.
    pub(super) async fn first_token_twice(
        &mut self,
        prompt_tokens: u32,
    ) -> Result<(Duration, Duration), EngineError> {
        let prompt = self.prompt(prompt_tokens);
        let cold = self.time_first_token(prompt.clone()).await?;
        let cached = self.time_first_token(prompt).await?;
        Ok((cold, cached))
    }

    async fn time_first_token(&mut self, prompt: Vec<TokenId>) -> Result<Duration, EngineError> {
        let (request, ctx) = self.request(prompt, 1);
        let asked = Instant::now();
        let came = arrivals(self.engine, request, ctx).await?;
        let first = came.first().map(|(at, _)| *at - asked);
        first.ok_or_else(|| EngineError::internal("an answer without a token"))
    }

    fn request(
        &mut self,
        prompt: Vec<TokenId>,
        max_tokens: u32,
    ) -> (GenerateRequest, RequestContext) {
        self.requests += 1;
        let mut request = GenerateRequest::from_tokens("bench", prompt);
        request.stop.max_tokens = Some(max_tokens);
        request.stop.ignore_eos = true;
        request.sampling.temperature = Some(0.0);
        (
            request,
            RequestContext::new(format!("bench-{}", self.requests)),
        )
    }

    /// Tokens from a linear congruential generator: no two prompts share a beginning.
    fn prompt(&mut self, tokens: u32) -> Vec<TokenId> {
        (0..tokens)
            .map(|_| {
                self.random = self
                    .random
                    .wrapping_mul(6_364_136_223_846_793_005)
                    .wrapping_add(1_442_695_040_888_963_407);
                u32::try_from((self.random >> 33) % u64::from(self.vocab_size)).unwrap_or(0)
            })
            .collect()
    }

    /// The counters so far.
    fn counts(&self) -> [f64; 4] {
        let text = self.metrics.encode();
        COUNTERS.map(|name| {
            let line = text.lines().find_map(|line| line.strip_prefix(name));
            line.and_then(|value| value.trim().parse().ok())
                .unwrap_or(0.0)
        })
    }
}

async fn arrivals(
    engine: &dyn LLMEngine,
    request: GenerateRequest,
    ctx: RequestContext,
) -> Result<Arrivals, EngineError> {
    let mut stream = engine.generate(request, ctx).await?;
    let mut came = Vec::new();
    while let Some(output) = stream.next().await {
        let tokens = match output? {
            Output::Tokens(chunk) => chunk.token_ids.len(),
            Output::Finished(finished) => finished.last.token_ids.len(),
            Output::Text(_) | Output::Embeddings(_) | Output::Scores(_) => 0,
        };
        if tokens > 0 {
            came.push((Instant::now(), tokens));
        }
    }
    Ok(came)
}

/// Tokens per second, from the moment the last sequence has begun to the moment the first one ends. If one ends before another
/// begins (short sequences, busy machine), from the first token to the last.
#[expect(clippy::cast_precision_loss, reason = "thousands of tokens")]
fn together(all: &[Arrivals]) -> Rate {
    let first = || all.iter().filter_map(|came| came.first()).map(|it| it.0);
    let last = || all.iter().filter_map(|came| came.last()).map(|it| it.0);
    let all_decode = first().max().zip(last().min());
    let one_decodes = first().min().zip(last().max());
    let span = all_decode.filter(|(begun, ended)| begun < ended);
    let at_once = span.is_some();
    let Some((begun, ended)) = span.or(one_decodes) else {
        return Rate {
            tokens_per_s: f64::NAN,
            at_once,
        };
    };
    let within = |(at, _): &&(Instant, usize)| *at > begun && *at <= ended;
    let tokens: usize = all
        .iter()
        .flatten()
        .filter(within)
        .map(|(_, tokens)| *tokens)
        .sum();
    Rate {
        tokens_per_s: tokens as f64 / ended.saturating_duration_since(begun).as_secs_f64(),
        at_once,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rate_is_of_the_time_in_which_all_decode() {
        let zero = Instant::now();
        let at = |ms: u64| zero + Duration::from_millis(ms);
        let early: Arrivals = (0..=4).map(|n| (at(n * 100), 1)).collect();
        let late: Arrivals = (2..=6).map(|n| (at(n * 100), 1)).collect();
        // From 200 ms, when the later one begins, to 400 ms, when the earlier one ends: two tokens each.
        let rate = together(&[early, late]);
        assert!(rate.at_once);
        assert!((rate.tokens_per_s - 20.0).abs() < 1e-6);
        assert!(together(&[]).tokens_per_s.is_nan());
    }

    #[test]
    fn sequences_that_never_meet_have_the_rate_of_the_whole_time() {
        let zero = Instant::now();
        let arrivals = |from: u64| -> Arrivals {
            let at = |n: u64| zero + Duration::from_millis(from + n * 100);
            (0..=2).map(|n| (at(n), 1)).collect()
        };
        // Five tokens after the first, in 500 ms.
        let rate = together(&[arrivals(0), arrivals(300)]);
        assert!(!rate.at_once);
        assert!((rate.tokens_per_s - 10.0).abs() < 1e-6);
    }
}
