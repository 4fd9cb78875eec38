//! [`Strangers`]: connections before their greeting. They have places of their own, so that idle connections
//! take no place of a caller. When all places are taken, the oldest connection is evicted: an honest
//! caller greets within milliseconds.

use std::collections::VecDeque;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use parking_lot::Mutex;
use tokio_util::sync::CancellationToken;

use crate::peers::peer_of;

/// The current strangers, oldest first.
pub(crate) struct Strangers {
    limit: usize,
    limit_of_address: usize,
    waiting: Mutex<Waiting>,
}

#[derive(Default)]
struct Waiting {
    next: u64,
    places: VecDeque<Place>,
}

struct Place {
    number: u64,
    address: Option<IpAddr>,
    evicted: CancellationToken,
}

/// A connection being greeted. Dropping it frees its place.
pub(crate) struct Stranger {
    strangers: Arc<Strangers>,
    number: u64,
    evicted: CancellationToken,
}

impl Strangers {
    pub(crate) fn new(limit: usize, limit_of_address: usize) -> Arc<Self> {
        Arc::new(Self {
            limit,
            limit_of_address,
            waiting: Mutex::default(),
        })
    }

    /// Takes a place, if necessary another stranger's: one of the same address if that address has its full share.
    pub(crate) fn enter(self: &Arc<Self>, peer: &str) -> Stranger {
        let address = (peer.parse().ok()).map(|peer: SocketAddr| peer_of(peer.ip()));
        let mut waiting = self.waiting.lock();
        let is_same = |place: &&Place| address.is_some() && place.address == address;
        if waiting.places.iter().filter(is_same).count() >= self.limit_of_address {
            waiting.evict(|place| place.address == address);
        } else if waiting.places.len() >= self.limit {
            waiting.evict(|_| true);
        }
        let (number, evicted) = (waiting.next, CancellationToken::new());
        waiting.next += 1;
        waiting.places.push_back(Place {
            number,
            address,
            evicted: evicted.clone(),
        });
        drop(waiting);
        Stranger {
            strangers: Arc::clone(self),
            number,
            evicted,
        }
    }
}

impl Waiting {
    fn evict(&mut self, which: impl Fn(&Place) -> bool) {
        let oldest = self.places.iter().position(which);
        if let Some(place) = oldest.and_then(|index| self.places.remove(index)) {
            place.evicted.cancel();
        }
    }
}

impl Stranger {
    /// Awaits the greeting; `None` if another connection took the place first.
    pub(crate) async fn until_evicted<T>(&self, greeting: impl Future<Output = T>) -> Option<T> {
        self.evicted.run_until_cancelled(greeting).await
    }
}

impl Drop for Stranger {
    fn drop(&mut self) {
        let mut waiting = self.strangers.waiting.lock();
        waiting.places.retain(|place| place.number != self.number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_goes_first_of_its_own_address() {
        let strangers = Strangers::new(4, 2);
        let first = strangers.enter("10.0.0.1:1");
        let same: Vec<_> = (0..2).map(|_| strangers.enter("10.0.0.2:1")).collect();
        let third = strangers.enter("10.0.0.2:2");
        assert!(same[0].evicted.is_cancelled() && !same[1].evicted.is_cancelled());
        assert!(!first.evicted.is_cancelled());
        let others: Vec<_> = (0..2)
            .map(|_| strangers.enter("a process over NATS"))
            .collect();
        assert!(first.evicted.is_cancelled() && !same[1].evicted.is_cancelled());
        drop((first, same, third, others));
        assert!(strangers.waiting.lock().places.is_empty());
    }

    #[test]
    fn all_addresses_of_a_network_are_one_peer() {
        let strangers = Strangers::new(4, 2);
        let other = strangers.enter("[2001:db8:0:1::1]:1");
        let same: Vec<_> = (1..=3)
            .map(|host| strangers.enter(&format!("[2001:db8::{host}]:1")))
            .collect();
        assert!(same[0].evicted.is_cancelled() && !same[1].evicted.is_cancelled());
        assert!(!other.evicted.is_cancelled());
    }
}
