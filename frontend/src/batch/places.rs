//! [`Places`]: limits how many requests of all batches run at once, and schedules owners fairly.

use std::collections::HashMap;
use std::num::NonZeroUsize;
use std::sync::{Arc, Weak};

use parking_lot::Mutex;
use tokio::sync::{Semaphore, SemaphorePermit};

/// The slots for requests of all batches. Clones share them.
///
/// Slots are granted in order of arrival, but each owner may have at most as many requests running or in the queue
/// as there are slots. So a request waits for at most that many of each other owner, however many batches they have.
#[derive(Debug, Clone)]
pub(super) struct Places {
    count: NonZeroUsize,
    all: Arc<Semaphore>,
    /// Owners with running batches.
    owners: Arc<Mutex<HashMap<Option<String>, Weak<Semaphore>>>>,
}

impl Places {
    pub(super) fn new(count: NonZeroUsize) -> Self {
        Self {
            count,
            all: Arc::new(semaphore(count)),
            owners: Arc::default(),
        }
    }

    /// The queue of an owner's batches.
    pub(super) fn of(&self, owner: Option<&str>) -> OwnersPlaces {
        let mut owners = self.owners.lock();
        owners.retain(|_, own| own.strong_count() > 0);
        let key = owner.map(str::to_owned);
        let known = owners.get(&key).and_then(Weak::upgrade);
        let own = known.unwrap_or_else(|| {
            let own = Arc::new(semaphore(self.count));
            owners.insert(key, Arc::downgrade(&own));
            own
        });
        OwnersPlaces {
            own,
            all: Arc::clone(&self.all),
        }
    }
}

/// A semaphore panics for more permits than it can count.
fn semaphore(count: NonZeroUsize) -> Semaphore {
    Semaphore::new(count.get().min(Semaphore::MAX_PERMITS))
}

/// The slots as one owner sees them.
#[derive(Debug)]
pub(super) struct OwnersPlaces {
    own: Arc<Semaphore>,
    all: Arc<Semaphore>,
}

impl OwnersPlaces {
    /// Waits for a slot, which is held as long as both permits; never `None`, because nobody closes the queue.
    ///
    /// # Cancel safety
    /// If the future is dropped, the position in the queue is lost.
    pub(super) async fn take(&self) -> Option<[SemaphorePermit<'_>; 2]> {
        let own = self.own.acquire().await.ok()?;
        let all = self.all.acquire().await.ok()?;
        Some([all, own])
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;

    use super::*;

    #[tokio::test]
    async fn any_number_of_requests_may_run_at_once() {
        let places = Places::new(NonZeroUsize::MAX).of(None);
        assert!(places.take().await.is_some());
    }

    #[tokio::test]
    async fn an_owner_of_many_requests_is_in_nobodys_way() {
        let places = Places::new(2.try_into().unwrap());
        let of_batches = [places.of(Some("a")), places.of(Some("a"))];
        let mut held = Vec::new();
        let mut waiting = Vec::new();
        for index in 0..20 {
            let mut taken = Box::pin(of_batches[index % 2].take());
            match (&mut taken).now_or_never() {
                Some(place) => held.push(place.unwrap()),
                None => waiting.push(taken),
            }
        }
        assert_eq!((held.len(), waiting.len()), (2, 18));
        let other = places.of(Some("b"));
        let mut others = Box::pin(other.take());
        assert!((&mut others).now_or_never().is_none());
        held.pop();
        let next = others.now_or_never();
        assert!(next.is_some(), "it is another's turn");
        for taken in &mut waiting {
            assert!(taken.now_or_never().is_none());
        }
        drop(next);
        let first = waiting.first_mut().unwrap();
        assert!(first.now_or_never().is_some());
    }
}
