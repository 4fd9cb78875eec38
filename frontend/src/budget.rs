//! [`MemoryBudget`]: the memory that all requests of a server may take together, and [`MemoryShare`], one request's part of
//! it.
//!
//! It counts what is made from requests, not their bytes on the wire: values, prompts, tokens, collected answers. It
//! allocates nothing and relies on its callers: code that keeps much for a request holds a share for it.
//!
//! Requests that do not fit are refused at once: if they waited here, they would hold memory that others wait for. The last
//! part of the budget is reserved for small requests, so that large ones never starve them.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use genset_backend_common::{ErrorKind, MetricsRegistry};
use http::StatusCode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::gauge::Gauge;

use crate::error::ApiError;

/// A request that holds at most this is small: a body of 64 KiB with all that is made from it, and its copies.
const SMALL_REQUEST_BYTES: usize = 1 << 20;

/// The reserve for small requests is one part in this many of the budget.
const RESERVE_DIVISOR: usize = 8;

/// The memory that all requests may take together. Clones share it.
#[derive(Debug, Clone)]
pub struct MemoryBudget {
    ledger: Arc<Ledger>,
}

#[derive(Debug)]
struct Ledger {
    bytes: usize,
    used: AtomicUsize,
    /// Mirrors `used` for the metrics.
    shown: Gauge,
    refused: Counter,
}

impl MemoryBudget {
    /// A budget of `bytes`.
    #[must_use]
    pub fn new(bytes: usize) -> Self {
        let ledger = Ledger {
            bytes,
            used: AtomicUsize::new(0),
            shown: Gauge::default(),
            refused: Counter::default(),
        };
        Self {
            ledger: Arc::new(ledger),
        }
    }

    /// Registers its metrics.
    pub(crate) fn register(&self, registry: &MetricsRegistry) {
        let budget: Gauge = Gauge::default();
        budget.set(i64::try_from(self.ledger.bytes).unwrap_or(i64::MAX));
        registry.register(
            "genset_http_memory_budget_bytes",
            "Memory that all requests may take together",
            budget,
        );
        registry.register(
            "genset_http_memory_used_bytes",
            "Memory that requests take of the budget",
            self.ledger.shown.clone(),
        );
        registry.register(
            "genset_http_memory_refusals",
            "Times that a request did not fit into the memory budget",
            self.ledger.refused.clone(),
        );
    }

    /// An empty share, for a new request.
    #[must_use]
    pub fn share(&self) -> MemoryShare {
        MemoryShare {
            request: Arc::new(Request {
                budget: self.clone(),
                held: AtomicUsize::new(0),
            }),
            bytes: 0,
        }
    }

    /// The bytes in use.
    #[must_use]
    pub fn used(&self) -> usize {
        self.ledger.used.load(Ordering::Relaxed)
    }

    /// Whether more than half of it is in use.
    pub(crate) fn is_short(&self) -> bool {
        self.used() > self.ledger.bytes / 2
    }

    /// The total that a request which holds `held` bytes may fill the budget to.
    fn limit(&self, held: usize) -> usize {
        let bytes = self.ledger.bytes;
        if held <= SMALL_REQUEST_BYTES {
            bytes
        } else {
            bytes - bytes / RESERVE_DIVISOR
        }
    }

    /// Takes `bytes` for a request that holds `held` with them, if the budget is then filled to at most `limit`.
    fn take(&self, bytes: usize, held: usize, limit: usize) -> Result<(), ApiError> {
        let add = |used: usize| used.checked_add(bytes).filter(|&used| used <= limit);
        let added = (self.ledger.used).fetch_update(Ordering::Relaxed, Ordering::Relaxed, add);
        if added.is_err() {
            self.ledger.refused.inc();
            return Err(self.refusal(held, limit));
        }
        self.ledger
            .shown
            .inc_by(i64::try_from(bytes).unwrap_or(i64::MAX));
        Ok(())
    }

    fn give_back(&self, bytes: usize) {
        self.ledger.used.fetch_sub(bytes, Ordering::Relaxed);
        self.ledger
            .shown
            .dec_by(i64::try_from(bytes).unwrap_or(i64::MAX));
    }

    fn refusal(&self, held: usize, limit: usize) -> ApiError {
        let bytes = self.ledger.bytes;
        if held > limit {
            let message = format!(
                "This request takes more memory than this server's --memory-budget of {bytes} bytes has for one. Send \
                 less."
            );
            return ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, message);
        }
        let message = format!(
            "All requests together are over this server's memory budget of {bytes} bytes. Send the request again."
        );
        ApiError {
            retry_after: Some(Duration::from_secs(1)),
            cause: Some(ErrorKind::Overloaded),
            ..ApiError::new(StatusCode::SERVICE_UNAVAILABLE, message)
        }
    }
}

/// The bytes that all shares of one request hold.
#[derive(Debug)]
struct Request {
    budget: MemoryBudget,
    held: AtomicUsize,
}

/// A part of the budget, released on drop. A request may have several: state that may outlive the request has its own.
///
/// # Examples
/// ```
/// use genset_frontend::MemoryBudget;
///
/// let budget = MemoryBudget::new(1 << 20);
/// let mut share = budget.share();
/// share.grow(1000)?;
/// let mut of_the_prompt = share.another();
/// of_the_prompt.grow(24)?;
/// assert_eq!(budget.used(), 1024);
/// drop(of_the_prompt);
/// share.shrink(900);
/// assert_eq!(budget.used(), 100);
/// assert_eq!(share.grow(1 << 20).unwrap_err().status, 413);
/// drop(share);
/// assert_eq!(budget.used(), 0);
/// # Ok::<(), genset_frontend::ApiError>(())
/// ```
#[derive(Debug)]
pub struct MemoryShare {
    request: Arc<Request>,
    bytes: usize,
}

impl MemoryShare {
    /// An empty share of the same request.
    #[must_use]
    pub fn another(&self) -> Self {
        Self {
            request: Arc::clone(&self.request),
            bytes: 0,
        }
    }

    /// The bytes it holds.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// The budget that it belongs to.
    #[must_use]
    pub fn budget(&self) -> &MemoryBudget {
        &self.request.budget
    }

    /// Takes `bytes` more.
    ///
    /// # Errors
    /// A 503 with `Retry-After` if there is no room now, a 413 if the request alone is too large. Nothing is taken then.
    pub fn grow(&mut self, bytes: usize) -> Result<(), ApiError> {
        self.grow_within(bytes, MemoryBudget::limit)
    }

    /// Like [`Self::grow`], but leaves half of the budget to others.
    ///
    /// # Errors
    /// Like [`Self::grow`].
    pub(crate) fn grow_below_half(&mut self, bytes: usize) -> Result<(), ApiError> {
        self.grow_within(bytes, |budget, _| budget.ledger.bytes / 2)
    }

    /// Takes `bytes` more. `limit` returns the total that a request with this many bytes may fill the budget to.
    fn grow_within(
        &mut self,
        bytes: usize,
        limit: impl FnOnce(&MemoryBudget, usize) -> usize,
    ) -> Result<(), ApiError> {
        let Request { budget, held } = &*self.request;
        let before = held.fetch_add(bytes, Ordering::Relaxed);
        let holds = before.saturating_add(bytes);
        let taken = budget.take(bytes, holds, limit(budget, holds));
        match taken {
            Ok(()) => self.bytes += bytes,
            Err(_) => {
                held.fetch_sub(bytes, Ordering::Relaxed);
            }
        }
        taken
    }

    /// Releases `bytes`, or all that it holds if that is less.
    pub fn shrink(&mut self, bytes: usize) {
        let bytes = bytes.min(self.bytes);
        self.bytes -= bytes;
        self.request.held.fetch_sub(bytes, Ordering::Relaxed);
        self.request.budget.give_back(bytes);
    }

    /// Takes over what `other` holds.
    pub fn absorb(&mut self, mut other: Self) {
        if Arc::ptr_eq(&self.request, &other.request) {
            self.bytes += std::mem::take(&mut other.bytes);
        }
    }

    /// Changes the share to hold `bytes`.
    ///
    /// # Errors
    /// As [`Self::grow`]; the share is unchanged then.
    pub fn resize(&mut self, bytes: usize) -> Result<(), ApiError> {
        match bytes.checked_sub(self.bytes) {
            Some(more) => self.grow(more),
            None => {
                self.shrink(self.bytes - bytes);
                Ok(())
            }
        }
    }
}

impl Drop for MemoryShare {
    fn drop(&mut self) {
        self.shrink(self.bytes);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn small_requests_are_refused_last() {
        let budget = MemoryBudget::new(16 << 20);
        let mut large = budget.share();
        large.grow(14 << 20).unwrap();
        let refused = large.another().grow(1).unwrap_err();
        assert_eq!(refused.status, StatusCode::PAYLOAD_TOO_LARGE);
        let mut second = budget.share();
        let refused = second.grow((1 << 20) + 1).unwrap_err();
        assert_eq!(refused.status, StatusCode::SERVICE_UNAVAILABLE);
        assert_eq!(refused.retry_after, Some(Duration::from_secs(1)));
        assert_eq!(refused.failure(), "overloaded");
        second.grow(1 << 20).unwrap();
        assert!(second.grow(1).is_err(), "it is large from here on");
        budget.share().grow(1 << 20).unwrap();
        drop((large, second));
        assert_eq!(budget.used(), 0);
    }

    #[test]
    fn all_shares_of_a_request_decide_whether_it_is_small() {
        let budget = MemoryBudget::new(16 << 20);
        let mut others = budget.share();
        others.grow(14 << 20).unwrap();
        let mut first = budget.share();
        let mut second = first.another();
        first.grow(1 << 20).unwrap();
        assert!(second.grow(1).is_err());
        drop(first);
        second.grow(1).unwrap();
    }

    #[derive(Debug, Clone)]
    enum Step {
        Request,
        Another(usize),
        Grow(usize, usize),
        Shrink(usize, usize),
        Resize(usize, usize),
        Drop(usize),
    }

    fn step() -> impl Strategy<Value = Step> {
        let (share, bytes) = (0_usize..6, 0_usize..3 << 20);
        prop_oneof![
            Just(Step::Request),
            share.clone().prop_map(Step::Another),
            (share.clone(), bytes.clone()).prop_map(|(share, bytes)| Step::Grow(share, bytes)),
            (share.clone(), bytes.clone()).prop_map(|(share, bytes)| Step::Shrink(share, bytes)),
            (share.clone(), bytes).prop_map(|(share, bytes)| Step::Resize(share, bytes)),
            share.prop_map(Step::Drop),
        ]
    }

    proptest! {
        /// After any steps, the budget's use is the sum of the shares, within the limit, and zero in the end.
        #[test]
        fn the_budget_is_the_sum_of_its_shares(steps in prop::collection::vec(step(), 0..60)) {
            const BYTES: usize = 8 << 20;
            let budget = MemoryBudget::new(BYTES);
            let mut shares = vec![budget.share()];
            for step in steps {
                let at = |index: usize, shares: &[MemoryShare]| index % shares.len();
                match step {
                    Step::Request => shares.push(budget.share()),
                    Step::Another(index) => shares.push(shares[at(index, &shares)].another()),
                    Step::Grow(index, bytes) => {
                        let at = at(index, &shares);
                        let _ = shares[at].grow(bytes);
                    }
                    Step::Shrink(index, bytes) => {
                        let at = at(index, &shares);
                        shares[at].shrink(bytes);
                    }
                    Step::Resize(index, bytes) => {
                        let at = at(index, &shares);
                        let _ = shares[at].resize(bytes);
                    }
                    Step::Drop(index) if shares.len() > 1 => {
                        let at = at(index, &shares);
                        shares.remove(at);
                    }
                    Step::Drop(_) => {}
                }
                let held: usize = shares.iter().map(MemoryShare::bytes).sum();
                prop_assert_eq!(budget.used(), held);
                prop_assert!(held <= BYTES);
                prop_assert_eq!(budget.ledger.shown.get(), i64::try_from(held).unwrap());
            }
            drop(shares);
            prop_assert_eq!(budget.used(), 0);
        }
    }
}
