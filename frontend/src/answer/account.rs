//! [`Account`] counts a request's tokens as they are produced, not when the request ends: a client that disconnects
//! early, or whose answer breaks off, still pays for what it received. `http` opens one per request; the request's
//! answers charge it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use prometheus_client::metrics::counter::Counter;

use crate::keys::Key;

/// The tokens of all requests together. Clones share the counters.
#[derive(Debug, Clone, Default)]
pub struct TokenCounters {
    /// Prompt tokens.
    pub prompt: Counter,
    /// Completion tokens.
    pub completion: Counter,
}

/// The tokens of one request so far. They are charged to its key's quota at once.
#[derive(Debug)]
pub struct Account {
    key: Option<Arc<Key>>,
    counters: TokenCounters,
    prompt_tokens: AtomicU64,
    completion_tokens: AtomicU64,
}

impl Account {
    /// An account of `key`; `None` on a server without keys.
    #[must_use]
    pub fn new(key: Option<Arc<Key>>, counters: TokenCounters) -> Self {
        Self {
            key,
            counters,
            prompt_tokens: AtomicU64::new(0),
            completion_tokens: AtomicU64::new(0),
        }
    }

    /// Charges tokens that were only tokenized (counted, shown or rejected), not sent to an engine. They count for the
    /// key alone.
    pub fn charge_counted(&self, tokens: usize) {
        self.spend(u64::try_from(tokens).unwrap_or(u64::MAX));
    }

    /// The prompt tokens charged so far.
    #[must_use]
    pub fn prompt_tokens(&self) -> u64 {
        self.prompt_tokens.load(Ordering::Relaxed)
    }

    /// The completion tokens charged so far.
    #[must_use]
    pub fn completion_tokens(&self) -> u64 {
        self.completion_tokens.load(Ordering::Relaxed)
    }

    /// Charges tokens that an engine processed: to the key and to the server's counters.
    pub fn charge(&self, prompt: u32, completion: u32) {
        let (prompt, completion) = (u64::from(prompt), u64::from(completion));
        if prompt > 0 {
            self.prompt_tokens.fetch_add(prompt, Ordering::Relaxed);
            self.counters.prompt.inc_by(prompt);
        }
        if completion > 0 {
            self.completion_tokens
                .fetch_add(completion, Ordering::Relaxed);
            self.counters.completion.inc_by(completion);
        }
        self.spend(prompt + completion);
    }

    fn spend(&self, tokens: u64) {
        if let Some(key) = self.key.as_ref().filter(|_| tokens > 0) {
            key.spend(tokens);
        }
    }
}

/// One answer's part of an account. It charges each token once. Dropping it charges tokens that were noted and not
/// charged yet.
#[derive(Debug)]
pub(crate) struct Meter {
    account: Arc<Account>,
    noted: Tokens,
    charged: Tokens,
}

#[derive(Debug, Clone, Copy, Default)]
struct Tokens {
    prompt: u32,
    completion: u32,
}

impl Meter {
    pub(crate) fn new(account: Arc<Account>) -> Self {
        Self {
            account,
            noted: Tokens::default(),
            charged: Tokens::default(),
        }
    }

    /// Notes the answer's totals so far without charging them: all threads share the counters, and updating them per
    /// token would cause contention.
    pub(crate) fn note(&mut self, prompt_tokens: u32, completion_tokens: u32) {
        self.noted.prompt = self.noted.prompt.max(prompt_tokens);
        self.noted.completion = self.noted.completion.max(completion_tokens);
    }

    /// Notes further completion tokens of an answer whose engine counts them chunk by chunk.
    pub(crate) fn note_further(&mut self, completion_tokens: u32) {
        self.noted.completion = self.noted.completion.saturating_add(completion_tokens);
    }

    /// Charges tokens that were noted and not charged yet. Charged tokens stay charged.
    pub(crate) fn settle(&mut self) {
        let prompt = self.noted.prompt - self.charged.prompt;
        let completion = self.noted.completion - self.charged.completion;
        self.charged = self.noted;
        self.account.charge(prompt, completion);
    }

    /// Notes tokens and charges them at once.
    pub(crate) fn reach(&mut self, prompt_tokens: u32, completion_tokens: u32) {
        self.note(prompt_tokens, completion_tokens);
        self.settle();
    }
}

impl Drop for Meter {
    fn drop(&mut self) {
        self.settle();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_is_charged_once_and_what_is_charged_stays() {
        let account = Arc::new(Account::new(None, TokenCounters::default()));
        let mut first = Meter::new(Arc::clone(&account));
        first.reach(10, 0);
        first.reach(10, 3);
        first.reach(0, 2);
        first.reach(12, 3);
        let mut second = Meter::new(Arc::clone(&account));
        second.reach(0, 5);
        assert_eq!(account.prompt_tokens(), 12);
        assert_eq!(account.completion_tokens(), 8);
        assert_eq!(account.counters.completion.get(), 8);
    }

    #[test]
    fn what_is_noted_is_charged_by_the_end() {
        let account = Arc::new(Account::new(None, TokenCounters::default()));
        let mut meter = Meter::new(Arc::clone(&account));
        meter.note(10, 2);
        assert_eq!(account.completion_tokens(), 0);
        meter.settle();
        assert_eq!(account.completion_tokens(), 2);
        meter.note(10, 5);
        drop(meter);
        assert_eq!(
            (account.prompt_tokens(), account.completion_tokens()),
            (10, 5)
        );
    }
}
