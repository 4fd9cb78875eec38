//! [`Peers`]: limits the connections of each peer, so that one peer cannot take them all.

use std::collections::HashMap;
use std::net::IpAddr;
use std::num::NonZeroUsize;
use std::sync::Arc;

use genset_runtime::peer_of;
use parking_lot::Mutex;

/// The peers with open connections. Clones share state.
#[derive(Debug, Clone)]
pub(super) struct Peers {
    open: Arc<Mutex<HashMap<IpAddr, usize>>>,
    max: NonZeroUsize,
}

/// One connection's place in its peer's limit.
#[derive(Debug)]
pub(super) struct PeerPlace {
    peers: Peers,
    peer: IpAddr,
}

impl Peers {
    /// Allows each peer `max` connections.
    pub(super) fn new(max: NonZeroUsize) -> Self {
        Self {
            open: Arc::default(),
            max,
        }
    }

    /// Returns a place for a connection from `address`; `None` if its peer is at the limit.
    pub(super) fn enter(&self, address: IpAddr) -> Option<PeerPlace> {
        let peer = peer_of(address);
        let mut open = self.open.lock();
        let count = open.entry(peer).or_default();
        if *count >= self.max.get() {
            return None;
        }
        *count += 1;
        Some(PeerPlace {
            peers: self.clone(),
            peer,
        })
    }
}

impl Drop for PeerPlace {
    fn drop(&mut self) {
        let mut open = self.peers.open.lock();
        if let Some(count) = open.get_mut(&self.peer) {
            *count -= 1;
            if *count == 0 {
                open.remove(&self.peer);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_peer_has_places_of_its_own_and_gives_them_back() {
        let peers = Peers::new(NonZeroUsize::new(2).unwrap());
        let enter = |address: &str| peers.enter(address.parse().unwrap());
        for [first, second, other] in [
            ["192.0.2.1", "::ffff:192.0.2.1", "192.0.2.2"],
            ["2001:db8::1", "2001:db8::ffff:1", "2001:db8:0:1::1"],
        ] {
            let places = [enter(first), enter(second)];
            assert!(places.iter().all(Option::is_some), "{first}");
            assert!(enter(first).is_none() && enter(second).is_none(), "{first}");
            assert!(enter(other).is_some(), "{other}");
            drop(places);
            assert!(enter(first).is_some(), "{first}");
        }
        assert!(peers.open.lock().is_empty(), "nothing is left behind");
    }
}
