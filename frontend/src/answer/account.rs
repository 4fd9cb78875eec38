//! [`Account`]: what a request costs, counted as it is given and not when it ends, so that a client who leaves early, or an
//! answer that breaks off, has paid for what it took. `http` opens one for each request; its answers charge it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use prometheus_client::metrics::counter::Counter;

use crate::keys::Key;

/// The tokens of all requests together. Clones share.
#[derive(Debug, Clone, Default)]
pub struct TokenCounters {
    /// Of prompts.
    pub prompt: Counter,
    /// Of answers.
    pub completion: Counter,
}

/// What one request has cost so far. Its key's quota pays at once.
#[derive(Debug)]
pub struct Account {
    key: Option<Arc<Key>>,
    counters: TokenCounters,
    prompt_tokens: AtomicU64,
    completion_tokens: AtomicU64,
}

impl Account {
    /// An account of `key`'s, or of nobody's where there are no keys.
    #[must_use]
    pub fn new(key: Option<Arc<Key>>, counters: TokenCounters) -> Self {
        Self {
            key,
            counters,
            prompt_tokens: AtomicU64::new(0),
            completion_tokens: AtomicU64::new(0),
        }
    }

    /// Charges tokens that were counted, shown or turned back, and not given to an engine: to the key alone.
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

    /// Charges tokens that an engine took and gave: to the key, and to the counters of all.
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

/// One answer's part of an account: it charges each token once.
#[derive(Debug)]
pub(crate) struct Meter {
    account: Arc<Account>,
    prompt_tokens: u32,
    completion_tokens: u32,
}

impl Meter {
    pub(crate) fn new(account: Arc<Account>) -> Self {
        Self {
            account,
            prompt_tokens: 0,
            completion_tokens: 0,
        }
    }

    /// So many tokens were given in all; charges those that it has not charged yet. What was charged stays charged.
    pub(crate) fn reach(&mut self, prompt_tokens: u32, completion_tokens: u32) {
        let prompt = prompt_tokens.saturating_sub(self.prompt_tokens);
        let completion = completion_tokens.saturating_sub(self.completion_tokens);
        self.prompt_tokens += prompt;
        self.completion_tokens += completion;
        self.account.charge(prompt, completion);
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
}
