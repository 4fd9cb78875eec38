//! The contents of the store as one reader sees them, and the watchers that follow them.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use async_trait::async_trait;
use bytes::Bytes;
use tokio::sync::watch;

use super::format::{Entries, Held};
use super::keeper::KeeperOwner;
use super::store::LeaseId;
use crate::discovery::{Change, Entry, Watch};

/// The winner among the leases that put a key.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Shown {
    value: Bytes,
    stamp: u64,
    lease: LeaseId,
}

/// All entries of live leases.
#[derive(Debug, Default)]
pub(super) struct View {
    /// Counts the gaps: after one, a watcher gets a snapshot.
    epoch: u64,
    entries: BTreeMap<String, Shown>,
}

impl View {
    /// For each key the last put wins; among simultaneous puts, all readers choose the same one.
    pub(super) fn of<'a>(epoch: u64, leases: impl Iterator<Item = (LeaseId, &'a Entries)>) -> Self {
        let mut entries = BTreeMap::<String, Shown>::new();
        for (lease, held) in leases {
            for (key, Held { value, stamp }) in held {
                let shown = entries.get(key);
                if shown.is_none_or(|shown| (shown.stamp, shown.lease) < (*stamp, lease)) {
                    let shown = Shown {
                        value: value.clone(),
                        stamp: *stamp,
                        lease,
                    };
                    entries.insert(key.clone(), shown);
                }
            }
        }
        Self { epoch, entries }
    }

    pub(super) fn under(&self, prefix: &str) -> Vec<Entry> {
        let entries = self.range(prefix);
        entries.map(|(key, shown)| entry(key, shown)).collect()
    }

    fn range<'a>(&'a self, prefix: &'a str) -> impl Iterator<Item = (&'a String, &'a Shown)> {
        let from_prefix = self.entries.range(prefix.to_owned()..);
        from_prefix.take_while(move |(key, _)| key.starts_with(prefix))
    }

    /// The changes for a watcher of `prefix` that last received `old`.
    fn changes_since(&self, old: Option<&Self>, prefix: &str) -> VecDeque<Change> {
        let Some(old) = old.filter(|old| old.epoch == self.epoch) else {
            return [Change::Snapshot(self.under(prefix))].into();
        };
        let removed = old
            .range(prefix)
            .filter(|(key, _)| !self.entries.contains_key(*key))
            .map(|(key, _)| Change::Removed(key.clone()));
        // The same value with another stamp was put again, which is a change.
        let put = self
            .range(prefix)
            .filter(|(key, shown)| old.entries.get(*key) != Some(*shown))
            .map(|(key, shown)| Change::Put(entry(key, shown)));
        removed.chain(put).collect()
    }
}

fn entry(key: &str, shown: &Shown) -> Entry {
    Entry {
        key: key.to_owned(),
        value: shown.value.clone(),
    }
}

/// A watch: compares the newest view with the last one it reported. It skips the views in between, so that a slow
/// watcher neither delays others nor fills memory.
#[derive(Debug)]
pub(super) struct FileWatch {
    prefix: String,
    views: watch::Receiver<Arc<View>>,
    told: Option<Arc<View>>,
    pending: VecDeque<Change>,
    /// The thread scans as long as this is held.
    _keeper: Arc<KeeperOwner>,
}

impl FileWatch {
    pub(super) fn new(
        prefix: String,
        views: watch::Receiver<Arc<View>>,
        keeper: Arc<KeeperOwner>,
    ) -> Self {
        Self {
            prefix,
            views,
            told: None,
            pending: VecDeque::new(),
            _keeper: keeper,
        }
    }
}

#[async_trait]
impl Watch for FileWatch {
    async fn next(&mut self) -> Option<Change> {
        loop {
            if let Some(change) = self.pending.pop_front() {
                return Some(change);
            }
            if self.told.is_some() {
                self.views.changed().await.ok()?;
            }
            let view = Arc::clone(&self.views.borrow_and_update());
            self.pending = view.changes_since(self.told.as_deref(), &self.prefix);
            self.told = Some(view);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn held(entries: &[(&str, &'static str, u64)]) -> Entries {
        let entries = entries.iter().map(|&(key, value, stamp)| {
            let value = Bytes::from_static(value.as_bytes());
            (key.to_owned(), Held { value, stamp })
        });
        entries.collect()
    }

    fn view(epoch: u64, leases: &[Entries]) -> View {
        let ids = std::iter::repeat_with(LeaseId::random);
        View::of(epoch, ids.zip(leases))
    }

    #[test]
    fn the_later_put_of_a_key_is_shown_whichever_lease_is_read_first() {
        let (old, new) = (held(&[("k", "old", 1)]), held(&[("k", "new", 2)]));
        for leases in [[old.clone(), new.clone()], [new, old]] {
            let shown = view(0, &leases).under("");
            assert_eq!(shown[0].value, "new");
        }
    }

    #[test]
    fn a_watcher_is_told_the_difference_under_its_prefix() {
        let lease = LeaseId::random();
        let of = |epoch, held| View::of(epoch, std::iter::once((lease, held)));
        let (old, new) = (
            held(&[
                ("a/1", "x", 1),
                ("a/2", "x", 2),
                ("a/3", "x", 3),
                ("b", "x", 4),
            ]),
            held(&[
                ("a/2", "y", 5),
                ("a/3", "x", 6),
                ("a/4", "x", 7),
                ("b", "x", 4),
            ]),
        );
        let put = |key: &str, value: &'static str| {
            let value = Bytes::from_static(value.as_bytes());
            let key = key.to_owned();
            Change::Put(Entry { key, value })
        };
        let changes = of(0, &new).changes_since(Some(&of(0, &old)), "a/");
        let expected = [
            Change::Removed("a/1".into()),
            put("a/2", "y"),
            put("a/3", "x"),
            put("a/4", "x"),
        ];
        assert_eq!(changes, expected);
        let after_a_gap = of(1, &new).changes_since(Some(&of(0, &old)), "b");
        assert_eq!(after_a_gap, [Change::Snapshot(of(0, &new).under("b"))]);
    }
}
