//! [`KvHolds`]: what a prefill engine holds for other workers to fetch, each under a name and for a limited time.

use std::collections::HashMap;
use std::fmt;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::{Notify, watch};
use tokio::time::Instant;

/// The holds of an engine; dropping a `T` frees its blocks. Clones share state.
///
/// A hold ends when it is [taken](Self::take), [released](Self::release), when its request is [aborted](Self::abort), or when its
/// lease expires, provided that a task runs [`expire`](Self::expire).
pub struct KvHolds<T> {
    shared: Arc<Shared<T>>,
}

struct Shared<T> {
    lease: Duration,
    holds: Mutex<HashMap<u64, Hold<T>>>,
    /// The number of holds, including those taken and not dropped yet.
    count: watch::Sender<usize>,
    /// Notified when a hold is added.
    begun: Notify,
}

struct Hold<T> {
    held: Held<T>,
    request_id: String,
    expires: Instant,
}

/// A value that was taken, in transit to its receiver. Dropping it frees the blocks.
pub struct Held<T> {
    value: T,
    _counted: Counted,
}

impl<T> Held<T> {
    /// Returns the value.
    #[must_use]
    pub fn value(&self) -> &T {
        &self.value
    }
}

/// Counts as one until dropped.
struct Counted(watch::Sender<usize>);

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.send_modify(|count| *count -= 1);
    }
}

impl<T: Send + 'static> KvHolds<T> {
    /// Creates an empty set, in which each hold lasts `lease`.
    #[must_use]
    pub fn new(lease: Duration) -> Self {
        let shared = Shared {
            lease,
            holds: Mutex::default(),
            count: watch::Sender::new(0),
            begun: Notify::new(),
        };
        Self {
            shared: Arc::new(shared),
        }
    }

    /// Holds `value` for a request; returns an unguessable name.
    #[must_use]
    pub fn hold(&self, request_id: &str, value: T) -> u64 {
        let shared = &self.shared;
        shared.count.send_modify(|count| *count += 1);
        let held = Held {
            value,
            _counted: Counted(shared.count.clone()),
        };
        let hold = Hold {
            held,
            request_id: request_id.to_owned(),
            expires: Instant::now() + shared.lease,
        };
        let mut holds = shared.holds.lock();
        let name = loop {
            let name = RandomState::new().build_hasher().finish();
            if !holds.contains_key(&name) {
                break name;
            }
        };
        holds.insert(name, hold);
        shared.begun.notify_one();
        name
    }

    /// Returns what is held under `name`, and ends the hold.
    #[must_use]
    pub fn take(&self, name: u64) -> Option<Held<T>> {
        let hold = self.shared.holds.lock().remove(&name);
        hold.filter(|hold| Instant::now() < hold.expires)
            .map(|hold| hold.held)
    }

    /// Frees what is held under `name`, if anything.
    pub fn release(&self, name: u64) {
        let hold = self.shared.holds.lock().remove(&name);
        drop(hold);
    }

    /// Frees what is held for a request.
    pub fn abort(&self, request_id: &str) {
        self.remove(|hold| hold.request_id == request_id);
    }

    /// Frees everything that is held.
    pub fn clear(&self) {
        self.remove(|_| true);
    }

    /// Returns the number of holds, including those in transit.
    #[must_use]
    pub fn count(&self) -> usize {
        *self.shared.count.borrow()
    }

    /// Frees each hold when its lease expires. Never ends.
    ///
    /// # Cancel safety
    /// Holds stay until `expire` runs again.
    pub async fn expire(&self) {
        loop {
            let next = self
                .shared
                .holds
                .lock()
                .values()
                .map(|hold| hold.expires)
                .min();
            match next {
                Some(next) => tokio::time::sleep_until(next).await,
                None => self.shared.begun.notified().await,
            }
            let now = Instant::now();
            let over = self.remove(|hold| hold.expires <= now);
            if over > 0 {
                tracing::warn!(
                    over,
                    lease_s = self.shared.lease.as_secs_f64(),
                    "KV blocks that nobody fetched are freed"
                );
            }
        }
    }

    /// Waits until nothing is held or on its way.
    ///
    /// # Cancel safety
    /// Nothing is lost when the future is dropped.
    pub async fn drained(&self) {
        let mut count = self.shared.count.subscribe();
        // `self` owns the sender, so the wait cannot fail.
        let _ = count.wait_for(|count| *count == 0).await;
    }

    fn remove(&self, is_over: impl Fn(&Hold<T>) -> bool) -> usize {
        let mut over = Vec::new();
        let mut holds = self.shared.holds.lock();
        let names: Vec<u64> = holds
            .iter()
            .filter_map(|(name, hold)| is_over(hold).then_some(*name))
            .collect();
        over.extend(names.iter().filter_map(|name| holds.remove(name)));
        // Dropping the values may take other locks.
        drop(holds);
        over.len()
    }
}

impl<T> Clone for KvHolds<T> {
    fn clone(&self) -> Self {
        Self {
            shared: Arc::clone(&self.shared),
        }
    }
}

impl<T> fmt::Debug for KvHolds<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KvHolds")
            .field("count", &*self.shared.count.borrow())
            .finish_non_exhaustive()
    }
}

impl<T> fmt::Debug for Held<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Held").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn holds() -> (KvHolds<Arc<()>>, Arc<()>) {
        (KvHolds::new(Duration::from_secs(30)), Arc::new(()))
    }

    #[tokio::test(start_paused = true)]
    async fn a_hold_ends_once_however_it_ends() {
        let (holds, blocks) = holds();
        let names: Vec<u64> = ["a", "b", "c", "d"]
            .map(|id| holds.hold(id, Arc::clone(&blocks)))
            .into();
        assert_eq!((holds.count(), Arc::strong_count(&blocks)), (4, 5));
        let taken = holds.take(names[0]).unwrap();
        assert!(holds.take(names[0]).is_none());
        holds.release(names[1]);
        holds.release(names[1]);
        holds.abort("c");
        holds.abort("unknown");
        assert_eq!((holds.count(), Arc::strong_count(&blocks)), (2, 3));
        let expire = async {
            tokio::select! {
                () = holds.expire() => {}
                () = tokio::time::sleep(Duration::from_secs(31)) => {}
            }
        };
        expire.await;
        assert!(holds.take(names[3]).is_none());
        // A hold in transit does not expire, and a drain waits for it.
        assert_eq!((holds.count(), Arc::strong_count(&blocks)), (1, 2));
        let drained = tokio::time::timeout(Duration::from_secs(1), holds.drained());
        assert!(drained.await.is_err());
        drop(taken);
        holds.drained().await;
        assert_eq!(Arc::strong_count(&blocks), 1);
    }

    #[tokio::test(start_paused = true)]
    async fn a_hold_that_comes_while_others_expire_has_its_whole_time() {
        let (holds, blocks) = holds();
        let begun = async {
            for _ in 0..3 {
                let _ = holds.hold("a", Arc::clone(&blocks));
                tokio::time::sleep(Duration::from_secs(20)).await;
            }
            holds.count()
        };
        let held = tokio::select! {
            () = holds.expire() => 0,
            held = begun => held,
        };
        // At 60 s, the last one, from 40 s, is still held.
        assert_eq!(held, 1);
    }
}
