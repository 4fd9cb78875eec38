//! [`Memory`]: how much memory a process may use for one purpose, such as what peers send: one budget, and parts of it, such as
//! one for each connection.
//!
//! A holder reserves bytes first, and is refused at once if they do not fit.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use prometheus_client::metrics::gauge::Gauge;

/// A budget of bytes.
#[derive(Debug)]
pub struct Memory {
    limit: usize,
    held: AtomicUsize,
    /// The process's budget, if this is a connection's.
    whole: Option<Arc<Memory>>,
    shown: Gauge,
}

/// Bytes reserved from a budget, returned on drop.
#[derive(Debug)]
pub struct HeldBytes {
    memory: Arc<Memory>,
    bytes: usize,
}

impl Memory {
    /// Returns the budget of a process; the gauge `shown` tracks the bytes held.
    #[must_use]
    pub fn of_process(limit: usize, shown: Gauge) -> Arc<Self> {
        Arc::new(Self {
            limit,
            held: AtomicUsize::new(0),
            whole: None,
            shown,
        })
    }

    /// Returns a connection's part of `self`: at most `limit` bytes.
    #[must_use]
    pub fn of_connection(self: &Arc<Self>, limit: usize) -> Arc<Self> {
        Arc::new(Self {
            limit,
            held: AtomicUsize::new(0),
            whole: Some(Arc::clone(self)),
            shown: Gauge::default(),
        })
    }

    /// Reserves bytes; `None` when they do not fit.
    #[must_use]
    pub fn try_hold(self: &Arc<Self>, bytes: usize) -> Option<HeldBytes> {
        self.take(bytes).then(|| HeldBytes {
            memory: Arc::clone(self),
            bytes,
        })
    }

    /// Returns an empty reservation, which may grow.
    #[must_use]
    pub fn hold_nothing(self: &Arc<Self>) -> HeldBytes {
        HeldBytes {
            memory: Arc::clone(self),
            bytes: 0,
        }
    }

    fn take(&self, bytes: usize) -> bool {
        let more = |held: usize| held.checked_add(bytes).filter(|sum| *sum <= self.limit);
        let order = Ordering::Relaxed;
        if self.held.fetch_update(order, order, more).is_err() {
            return false;
        }
        if self.whole.as_ref().is_some_and(|whole| !whole.take(bytes)) {
            self.held.fetch_sub(bytes, order);
            return false;
        }
        self.shown.inc_by(i64::try_from(bytes).unwrap_or(i64::MAX));
        true
    }

    fn give_back(&self, bytes: usize) {
        self.held.fetch_sub(bytes, Ordering::Relaxed);
        self.shown.dec_by(i64::try_from(bytes).unwrap_or(i64::MAX));
        if let Some(whole) = &self.whole {
            whole.give_back(bytes);
        }
    }
}

impl HeldBytes {
    /// Reserves `more` bytes; returns whether they fit.
    #[must_use]
    pub fn grow_by(&mut self, more: usize) -> bool {
        let is_held = self.memory.take(more);
        if is_held {
            self.bytes += more;
        }
        is_held
    }

    /// Grows the reservation to `bytes` if it is smaller; returns whether it now holds them.
    #[must_use]
    pub fn grow_to(&mut self, bytes: usize) -> bool {
        let more = bytes.saturating_sub(self.bytes);
        more == 0 || self.grow_by(more)
    }
}

impl Drop for HeldBytes {
    fn drop(&mut self) {
        if self.bytes > 0 {
            self.memory.give_back(self.bytes);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_connection_takes_its_part_and_no_more_and_gives_it_back() {
        let process = Memory::of_process(100, Gauge::default());
        let (one, two) = (process.of_connection(60), process.of_connection(60));
        let held = one.try_hold(60).unwrap();
        assert!(one.try_hold(1).is_none());
        assert!(two.try_hold(41).is_none());
        let rest = two.try_hold(40).unwrap();
        assert_eq!(process.shown.get(), 100);
        drop(held);
        assert!(one.try_hold(usize::MAX).is_none());
        drop((one.try_hold(60).unwrap(), rest));
        assert_eq!(process.shown.get(), 0);
        assert_eq!(two.held.load(Ordering::Relaxed), 0);
    }
}
