//! [`Affinity`]: where each key was last served. A key is what a client's requests have in common, such as a conversation or a
//! user.

use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};
use std::num::NonZeroUsize;

use genset_backend_common::{GenerateRequest, RequestContext};
use parking_lot::Mutex;

use super::fleet::Place;

/// A key, hashed with the request's cache salt and adapter: requests that cannot share KV blocks do not share keys.
pub(super) type Key = u64;

/// Where each key was last served. Bounded: the least recently used keys are dropped.
#[derive(Debug)]
pub(super) struct Affinity {
    hasher: RandomState,
    /// The maximum number of keys in a generation.
    most: usize,
    keys: Mutex<Generations>,
}

/// Two generations approximate an LRU order: a served key enters the young one; when that is full, the old one is dropped.
#[derive(Debug, Default)]
struct Generations {
    young: HashMap<Key, Place>,
    old: HashMap<Key, Place>,
}

impl Affinity {
    /// Creates a map of at most `max_keys` keys.
    pub(super) fn new(max_keys: NonZeroUsize) -> Self {
        Self {
            hasher: RandomState::new(),
            most: max_keys.get().div_ceil(2),
            keys: Mutex::default(),
        }
    }

    /// Returns the request's key, if it has one.
    pub(super) fn key(&self, request: &GenerateRequest, ctx: &RequestContext) -> Option<Key> {
        let key = ctx.affinity()?;
        Some(
            self.hasher
                .hash_one((&request.cache_salt, &request.adapter, key)),
        )
    }

    /// Returns the place that last served the key.
    pub(super) fn last(&self, key: Key) -> Option<Place> {
        let keys = self.keys.lock();
        let place = keys.young.get(&key).or_else(|| keys.old.get(&key));
        place.copied()
    }

    /// Records that the place serves the key.
    pub(super) fn serves(&self, key: Key, place: Place) {
        let mut keys = self.keys.lock();
        if keys.young.len() >= self.most && !keys.young.contains_key(&key) {
            keys.old = std::mem::take(&mut keys.young);
        }
        keys.young.insert(key, place);
    }
}

#[cfg(test)]
mod tests {
    use genset_runtime::InstanceId;

    use super::*;

    fn place(id: u64) -> Place {
        Place {
            instance: InstanceId(id),
            rank: 0,
        }
    }

    #[test]
    fn the_last_instance_of_a_key_is_known_until_many_others_came() {
        let affinity = Affinity::new(NonZeroUsize::new(8).unwrap());
        affinity.serves(1, place(10));
        affinity.serves(1, place(11));
        for key in 100..104 {
            affinity.serves(key, place(12));
            assert_eq!(affinity.last(1), Some(place(11)));
        }
        for key in 200..208 {
            affinity.serves(key, place(12));
        }
        assert_eq!(affinity.last(1), None);
        assert_eq!(affinity.last(207), Some(place(12)));
        let keys = affinity.keys.lock();
        assert!(keys.young.len() + keys.old.len() <= 8);
    }

    #[test]
    fn requests_that_share_no_blocks_share_no_key() {
        let affinity = Affinity::new(NonZeroUsize::MIN);
        let ctx = RequestContext::new("r").with_affinity("me");
        let ours = GenerateRequest::from_tokens("m", vec![1]);
        let mut theirs = ours.clone();
        theirs.cache_salt = Some("theirs".into());
        assert_eq!(affinity.key(&ours, &RequestContext::new("r")), None);
        assert_eq!(affinity.key(&ours, &ctx), affinity.key(&ours, &ctx));
        assert_ne!(affinity.key(&ours, &ctx), affinity.key(&theirs, &ctx));
        let mut adapted = ours.clone();
        adapted.adapter = Some("theirs".into());
        assert_ne!(affinity.key(&ours, &ctx), affinity.key(&adapted, &ctx));
        assert_ne!(affinity.key(&theirs, &ctx), affinity.key(&adapted, &ctx));
    }
}
