//! The rules of the reader: what must hold for every item of every stream, in every check. A breach is recorded where it is
//! seen; each check of RD reports one rule.

use std::num::NonZeroU32;
use std::sync::{Arc, Weak};
use std::time::Duration;

use genset_backend_common::kv::KvEventPublisher;
use genset_backend_common::output::{Finished, TokenChunk};
use genset_backend_common::{
    EngineConfig, GenerateRequest, HealthReporter, LLMEngine, Output, StartContext, TokenId,
};
use parking_lot::Mutex;
use tokio::time::Instant;

use crate::kv_index::Index;

/// A rule of the reader.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Rule {
    /// Token ids are below the vocabulary size, in every field.
    TokenIds,
    /// Usage agrees with the answer and the prompt.
    Usage,
    /// There are as many log probabilities as tokens, or none if none were requested.
    Logprobs,
    /// No request of a check kills the engine.
    Alive,
    /// The events of the prefix cache do not contradict earlier ones.
    KvEvents,
    /// No more tokens come than the engine's pace explains.
    Pace,
}

impl Rule {
    const ALL: [Self; 6] = [
        Self::TokenIds,
        Self::Usage,
        Self::Logprobs,
        Self::Alive,
        Self::KvEvents,
        Self::Pace,
    ];

    /// The check that reports it.
    pub(crate) const fn check(self) -> &'static str {
        match self {
            Self::TokenIds => "RD01",
            Self::Usage => "RD02",
            Self::Logprobs => "RD03",
            Self::Alive => "RD04",
            Self::KvEvents => "RD05",
            Self::Pace => "RD06",
        }
    }

    /// The rule that a check reports, if it is one of RD.
    pub(crate) fn of(check: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|rule| rule.check() == check)
    }
}

/// The breaches that a check saw: the first one for each rule.
#[derive(Debug, Default)]
pub(crate) struct Breaches(Mutex<Vec<(Rule, String)>>);

impl Breaches {
    fn note(&self, rule: Rule, what: impl FnOnce() -> String) {
        let mut seen = self.0.lock();
        if !seen.iter().any(|(known, _)| *known == rule) {
            seen.push((rule, what()));
        }
    }

    pub(crate) fn seen(&self) -> Vec<(Rule, String)> {
        self.0.lock().clone()
    }
}

/// Checks the items of one stream.
#[derive(Debug)]
pub(crate) struct Reader {
    vocab_size: u32,
    prompt_tokens: Option<u32>,
    wants_logprobs: bool,
    delivered: u32,
    /// The time per token, if it limits the number of tokens.
    token: Option<Duration>,
    /// When the first item came, and the tokens in it.
    first: Option<(Instant, u32)>,
}

/// How many tokens may come sooner than a plain answer's pace explains: a step of several, or tokens from a draft.
pub(crate) const AHEAD_TOKENS: u32 = 64;

/// How many times faster than a plain answer another answer may be.
pub(crate) const FASTER: u32 = 4;

impl Reader {
    /// `token` is the time per token of a plain answer, if known.
    pub(crate) fn new(
        config: &EngineConfig,
        request: &GenerateRequest,
        token: Option<Duration>,
    ) -> Self {
        Self {
            // A grammar may determine many tokens at once.
            token: token.filter(|token| !token.is_zero() && request.guided.is_none()),
            first: None,
            vocab_size: config.vocab_size.map_or(u32::MAX, NonZeroU32::get),
            prompt_tokens: request.prompt_tokens(),
            wants_logprobs: request.output.logprobs.is_some(),
            delivered: 0,
        }
    }

    pub(crate) fn judge(&mut self, output: &Output, breaches: &Breaches) {
        let place = self.delivered;
        self.delivered = place.saturating_add(output.token_count());
        self.judge_pace(breaches);
        match output {
            Output::Tokens(chunk) => self.judge_chunk(chunk, place, breaches),
            Output::Finished(finished) => {
                self.judge_chunk(&finished.last, place, breaches);
                self.judge_end(finished, breaches);
            }
            Output::Text(_) | Output::Embeddings(_) | Output::Scores(_) => {}
        }
    }

    /// Checks that the engine computed no more tokens since the first one than the time allows, however long nobody read.
    fn judge_pace(&mut self, breaches: &Breaches) {
        let Some(token) = self.token else { return };
        let now = Instant::now();
        let (begun, at_first) = *self.first.get_or_insert((now, self.delivered));
        let since = now.saturating_duration_since(begun);
        let explained = since.as_micros() / token.as_micros().max(1);
        let explained = u32::try_from(explained).unwrap_or(u32::MAX);
        let most = at_first
            .saturating_add(explained.saturating_mul(FASTER))
            .saturating_add(AHEAD_TOKENS);
        let delivered = self.delivered;
        if delivered > most {
            breaches.note(Rule::Pace, || {
                format!(
                    "{delivered} tokens came within {since:?} of the first, and one takes {token:?}"
                )
            });
        }
    }

    fn judge_chunk(&self, chunk: &TokenChunk, place: u32, breaches: &Breaches) {
        self.judge_ids("token", &chunk.token_ids, place, breaches);
        for ranked in &chunk.logprobs {
            let ids: Vec<TokenId> = ranked.top.iter().map(|top| top.token_id).collect();
            self.judge_ids("a candidate for token", &ids, place, breaches);
        }
        let (tokens, logprobs) = (chunk.token_ids.len(), chunk.logprobs.len());
        let wanted = if self.wants_logprobs { tokens } else { 0 };
        if logprobs != wanted {
            breaches.note(Rule::Logprobs, || {
                let asked = if self.wants_logprobs { "" } else { "not " };
                format!(
                    "log probabilities were {asked}asked for, and an item of {tokens} tokens, from place {place} on, has \
                     {logprobs}"
                )
            });
        }
    }

    fn judge_ids(&self, what: &str, ids: &[TokenId], place: u32, breaches: &Breaches) {
        let vocab_size = self.vocab_size;
        if let Some(id) = ids.iter().find(|id| **id >= vocab_size) {
            breaches.note(Rule::TokenIds, || {
                format!("{what} {place} has the id {id}, but the vocabulary has {vocab_size}")
            });
        }
    }

    fn judge_end(&self, finished: &Finished, breaches: &Breaches) {
        if let Some(token) = finished.stop_token {
            self.judge_ids("the token that stopped", &[token], self.delivered, breaches);
        }
        let (usage, reason) = (finished.usage, finished.reason);
        let delivered = self.delivered;
        if usage.completion_tokens != delivered {
            breaches.note(Rule::Usage, || {
                let counted = usage.completion_tokens;
                format!("{delivered} tokens came and {counted} are counted ({reason:?})")
            });
        }
        let prompt = self.prompt_tokens.unwrap_or(usage.prompt_tokens);
        if usage.prompt_tokens != prompt {
            breaches.note(Rule::Usage, || {
                let counted = usage.prompt_tokens;
                format!("a prompt of {prompt} tokens is counted as {counted} ({reason:?})")
            });
        }
        if let Some(cached) = usage.cached_tokens.filter(|cached| *cached > prompt) {
            breaches.note(Rule::Usage, || {
                format!("of a prompt of {prompt} tokens, {cached} are said to be cached")
            });
        }
    }
}

/// Watches a started engine besides its streams.
pub(crate) struct Watched {
    engine: Weak<dyn LLMEngine>,
    publisher: KvEventPublisher,
    health: HealthReporter,
    /// The index of its prefix cache, if it declares KV events.
    kv_events: Option<Index>,
    may_die: bool,
}

impl Watched {
    /// Watches an engine from before its start.
    pub(crate) fn new(engine: &Arc<dyn LLMEngine>, start: &StartContext) -> Self {
        Self {
            engine: Arc::downgrade(engine),
            publisher: start.kv_events.clone(),
            health: start.health.clone(),
            kv_events: Some(Index::following(&start.kv_events)),
            may_die: false,
        }
    }

    /// Sets the declaration from its start.
    pub(crate) fn declares(&mut self, config: &EngineConfig) {
        if !config.capabilities.kv_events {
            self.kv_events = None;
        }
    }

    pub(crate) fn is(&self, engine: &Arc<dyn LLMEngine>) -> bool {
        std::ptr::addr_eq(self.engine.as_ptr(), Arc::as_ptr(engine))
    }

    /// Notes that the check is going to kill it.
    pub(crate) fn may_die(&mut self) {
        self.may_die = true;
    }

    /// Reads the events published so far.
    pub(crate) fn read(&mut self, breaches: &Breaches) {
        let Some(index) = &mut self.kv_events else {
            return;
        };
        // Too many events came at once, so some were missed; start again from here.
        if index.read().is_err() {
            *index = Index::following(&self.publisher);
        }
        let (orphans, removals) = (&index.orphans, &index.unknown_removals);
        if let Some(block) = orphans.first() {
            breaches.note(Rule::KvEvents, || {
                format!("{block:?} was stored after a block that is not there")
            });
        }
        if let Some(block) = removals.first() {
            breaches.note(Rule::KvEvents, || {
                format!("{block:?} was removed, which was not there")
            });
        }
    }

    /// Checks the engine a last time, at the end of the check.
    pub(crate) fn end(&mut self, breaches: &Breaches) {
        self.read(breaches);
        if let Some(reason) = self.health.dead_reason().filter(|_| !self.may_die) {
            breaches.note(Rule::Alive, || {
                format!("the engine reported itself dead: {reason}")
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use genset_backend_common::output::TokenLogprob;
    use genset_backend_common::{Finish, output::TopLogprob};

    use super::*;

    /// The ids of the checks that fail for a stream of these items.
    fn broken(asks: fn(&mut GenerateRequest), items: &[Output]) -> Vec<&'static str> {
        let config = EngineConfig::new("m", 16).with_vocab_size(10);
        let mut request = GenerateRequest::from_tokens("m", vec![1, 2]);
        asks(&mut request);
        let breaches = Breaches::default();
        let mut reader = Reader::new(&config, &request, None);
        for item in items {
            reader.judge(item, &breaches);
        }
        let seen = breaches.seen().into_iter();
        seen.map(|(rule, _)| rule.check()).collect()
    }

    fn end(finish: Finish, prompt_tokens: u32, streamed: u32) -> Output {
        Output::Finished(Box::new(finish.into_finished(prompt_tokens, streamed)))
    }

    fn rated(token: TokenId, candidate: TokenId) -> Output {
        let top = vec![TopLogprob {
            token_id: candidate,
            logprob: -1.0,
        }];
        let mut chunk = TokenChunk::from(token);
        chunk.logprobs = vec![TokenLogprob { logprob: -1.0, top }];
        Output::Tokens(chunk)
    }

    #[test]
    fn a_sound_stream_breaks_nothing() {
        let items = [Output::from(9), end(Finish::stop_token(3), 2, 1)];
        assert!(broken(|_| {}, &items).is_empty());
        let items = [
            rated(9, 0),
            end(Finish::length().with_cached_tokens(2), 2, 1),
        ];
        assert!(broken(|r| r.output.logprobs = Some(1), &items).is_empty());
    }

    #[test]
    fn ids_are_looked_at_wherever_they_are() {
        let asks: fn(&mut GenerateRequest) = |r| r.output.logprobs = Some(1);
        assert_eq!(broken(|_| {}, &[Output::from(10)]), ["RD01"]);
        assert_eq!(broken(asks, &[rated(9, 10)]), ["RD01"]);
        assert_eq!(
            broken(|_| {}, &[end(Finish::stop_token(10), 2, 0)]),
            ["RD01"]
        );
        let last = end(Finish::length().with_last(10), 2, 0);
        assert_eq!(broken(|_| {}, &[last]), ["RD01"]);
    }

    #[test]
    fn usage_is_what_came_and_what_was_sent() {
        for wrong in [
            end(Finish::length(), 2, 1),
            end(Finish::length(), 3, 0),
            end(Finish::length().with_cached_tokens(3), 2, 0),
        ] {
            assert_eq!(broken(|_| {}, &[wrong]), ["RD02"]);
        }
    }

    #[test]
    fn each_token_has_its_log_probability_and_only_where_it_was_asked_for() {
        let asks: fn(&mut GenerateRequest) = |r| r.output.logprobs = Some(0);
        assert_eq!(broken(asks, &[Output::from(1)]), ["RD03"]);
        assert_eq!(broken(|_| {}, &[rated(1, 1)]), ["RD03"]);
    }
}
