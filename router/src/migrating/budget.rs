//! [`Budget`]: the memory for kept tokens, which migration needs.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use genset_backend_common::prometheus::metrics::gauge::Gauge;

/// A number of bytes, shared by all requests.
#[derive(Debug)]
pub(super) struct Budget {
    limit: usize,
    taken: AtomicUsize,
    shown: Gauge,
}

impl Budget {
    pub(super) fn new(limit: usize, shown: Gauge) -> Self {
        Self {
            limit,
            taken: AtomicUsize::new(0),
            shown,
        }
    }

    fn try_take(&self, bytes: usize) -> bool {
        let taken = self
            .taken
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |taken| {
                let taken = taken.checked_add(bytes)?;
                (taken <= self.limit).then_some(taken)
            });
        if taken.is_ok() {
            self.shown.inc_by(i64::try_from(bytes).unwrap_or(i64::MAX));
        }
        taken.is_ok()
    }

    fn give_back(&self, bytes: usize) {
        self.taken.fetch_sub(bytes, Ordering::Relaxed);
        self.shown.dec_by(i64::try_from(bytes).unwrap_or(i64::MAX));
    }
}

/// One request's share of a [`Budget`], returned on drop.
#[derive(Debug)]
pub(super) struct Share {
    budget: Arc<Budget>,
    bytes: usize,
}

impl Share {
    /// Creates an empty share.
    pub(super) fn new(budget: &Arc<Budget>) -> Self {
        Self {
            budget: Arc::clone(budget),
            bytes: 0,
        }
    }

    /// Takes `bytes` more; returns false when the budget has too few.
    pub(super) fn try_grow(&mut self, bytes: usize) -> bool {
        let is_taken = self.budget.try_take(bytes);
        if is_taken {
            self.bytes += bytes;
        }
        is_taken
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        self.budget.give_back(self.bytes);
    }
}
