//! [`Known`]: the entries a watcher knows and the changes it receives next. Pure: no I/O, and the time is an argument.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use bytes::Bytes;
use tokio::time::Instant;

use crate::discovery::{Change, Entry};

/// The entries that the watcher knows.
///
/// After a gap, an entry that etcd no longer has stays for a grace period. etcd may have lost its data, or the owner may have
/// been cut off from etcd as we were, and needs time to put it again. The same holds for an entry that etcd removes after it
/// hung: its clock kept running, and leases expired that nobody could keep alive.
#[derive(Debug)]
pub(super) struct Known {
    grace: Duration,
    entries: BTreeMap<String, Bytes>,
    /// The `entries` that were missing after a gap, each with the end of its grace period.
    missing: BTreeMap<String, Instant>,
    /// Not later than the first of these ends: it is asked before every change, and after an outage all entries may be missing.
    next_end: Option<Instant>,
    /// Until this time, entries that etcd removes get a grace period.
    lenient_until: Option<Instant>,
}

impl Known {
    pub(super) fn new(grace: Duration) -> Self {
        Self {
            grace,
            entries: BTreeMap::new(),
            missing: BTreeMap::new(),
            next_end: None,
            lenient_until: None,
        }
    }

    /// etcd hung and responds again.
    pub(super) fn stalled(&mut self, now: Instant) {
        self.lenient_until = Some(now + self.grace);
    }

    /// Takes in all of etcd's entries after a gap of length `gap`, zero for the first time. The snapshot also holds entries in
    /// their grace period. The gap does not count against a running grace period: owners may not have reached etcd either.
    pub(super) fn resynced(&mut self, entries: Vec<Entry>, now: Instant, gap: Duration) -> Change {
        let present: BTreeSet<&str> = entries.iter().map(|entry| entry.key.as_str()).collect();
        let missing = self
            .entries
            .keys()
            .filter(|key| !present.contains(key.as_str()))
            .map(|key| {
                let ends = self
                    .missing
                    .get(key)
                    .map_or(now + self.grace, |&ends| ends + gap);
                (key.clone(), ends)
            })
            .collect();
        self.missing = missing;
        self.find_next_end();
        for Entry { key, value } in entries {
            self.entries.insert(key, value);
        }
        Change::Snapshot(self.all())
    }

    pub(super) fn put(&mut self, entry: Entry) -> Change {
        self.missing.remove(&entry.key);
        self.entries.insert(entry.key.clone(), entry.value.clone());
        Change::Put(entry)
    }

    /// `None` for an entry that the watcher does not know and for one with a grace period.
    pub(super) fn removed(&mut self, key: String, now: Instant) -> Option<Change> {
        let is_lenient = self.lenient_until.is_some_and(|until| now < until);
        if is_lenient && self.entries.contains_key(&key) {
            let ends = now + self.grace;
            self.missing.entry(key).or_insert(ends);
            // Graces that began earlier end earlier.
            self.next_end.get_or_insert(ends);
            return None;
        }
        self.forget(key)
    }

    fn find_next_end(&mut self) {
        self.next_end = self.missing.values().min().copied();
    }

    fn forget(&mut self, key: String) -> Option<Change> {
        self.missing.remove(&key);
        self.entries.remove(&key)?;
        Some(Change::Removed(key))
    }

    /// When to [end graces](Self::end_graces), if there are any.
    pub(super) fn next_end_of_grace(&self) -> Option<Instant> {
        self.next_end
    }

    /// The removals of entries whose grace period has ended.
    pub(super) fn end_graces(&mut self, now: Instant) -> Vec<Change> {
        let ended: Vec<String> = self
            .missing
            .iter()
            .filter(|(_, ends)| **ends <= now)
            .map(|(key, _)| key.clone())
            .collect();
        let removed = ended.into_iter().filter_map(|key| self.forget(key));
        let removed = removed.collect();
        self.find_next_end();
        removed
    }

    fn all(&self) -> Vec<Entry> {
        let entries = self.entries.iter();
        entries
            .map(|(key, value)| Entry {
                key: key.clone(),
                value: value.clone(),
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GRACE: Duration = Duration::from_secs(10);

    fn entries(text: &str) -> Vec<Entry> {
        let words = text.split_whitespace();
        words
            .map(|word| {
                let (key, value) = word.split_once('=').unwrap();
                Entry {
                    key: key.into(),
                    value: value.as_bytes().to_vec().into(),
                }
            })
            .collect()
    }

    fn snapshot(text: &str) -> Change {
        Change::Snapshot(entries(text))
    }

    fn removed(key: &str) -> Change {
        Change::Removed(key.into())
    }

    /// What watchers are told when these entries are seen again after a gap.
    fn seen(known: &mut Known, text: &str, at: Instant) -> Change {
        known.resynced(entries(text), at, Duration::ZERO)
    }

    #[test]
    fn what_is_missing_after_a_gap_is_removed_when_its_grace_ends() {
        let start = Instant::now();
        let mut known = Known::new(GRACE);
        assert_eq!(seen(&mut known, "a=1 b=1", start), snapshot("a=1 b=1"));
        assert_eq!(seen(&mut known, "b=2 c=1", start), snapshot("a=1 b=2 c=1"));
        assert_eq!(known.next_end_of_grace(), Some(start + GRACE));
        assert_eq!(known.end_graces(start + GRACE / 2), []);
        assert_eq!(known.end_graces(start + GRACE), [removed("a")]);
        assert_eq!(known.next_end_of_grace(), None);
    }

    #[test]
    fn what_is_put_again_in_its_grace_stays() {
        let start = Instant::now();
        let mut known = Known::new(GRACE);
        known.resynced(entries("a=1 b=1 c=1"), start, Duration::ZERO);
        known.resynced(vec![], start, Duration::ZERO);
        known.put(entries("a=2").remove(0));
        assert_eq!(seen(&mut known, "a=2 b=1", start), snapshot("a=2 b=1 c=1"));
        assert_eq!(known.end_graces(start + GRACE), [removed("c")]);
        assert_eq!(known.next_end_of_grace(), None);
    }

    #[test]
    fn a_second_gap_stops_the_clock_of_a_grace_and_does_not_wind_it_back() {
        let start = Instant::now();
        let mut known = Known::new(GRACE);
        known.resynced(entries("a=1"), start, Duration::ZERO);
        known.resynced(vec![], start, Duration::ZERO);
        let gap = Duration::from_secs(60);
        known.resynced(vec![], start + gap, gap);
        assert_eq!(known.next_end_of_grace(), Some(start + gap + GRACE));
        known.resynced(vec![], start + gap + GRACE / 2, Duration::ZERO);
        assert_eq!(known.next_end_of_grace(), Some(start + gap + GRACE));
    }

    #[test]
    fn a_removal_that_etcd_reports_needs_no_grace() {
        let start = Instant::now();
        let mut known = Known::new(GRACE);
        known.resynced(entries("a=1 b=1"), start, Duration::ZERO);
        known.resynced(entries("a=1"), start, Duration::ZERO);
        assert_eq!(known.removed("a".into(), start), Some(removed("a")));
        assert_eq!(known.removed("a".into(), start), None);
        assert_eq!(seen(&mut known, "", start), snapshot("b=1"));
    }

    #[test]
    fn what_etcd_removes_after_it_hung_has_a_grace() {
        let start = Instant::now();
        let mut known = Known::new(GRACE);
        known.resynced(entries("a=1 b=1"), start, Duration::ZERO);
        known.stalled(start);
        for key in ["a", "b", "c"] {
            assert_eq!(known.removed(key.into(), start), None);
        }
        assert_eq!(
            known.put(entries("a=1").remove(0)),
            Change::Put(entries("a=1").remove(0))
        );
        assert_eq!(known.end_graces(start + GRACE), [removed("b")]);
        assert_eq!(known.removed("a".into(), start + GRACE), Some(removed("a")));
    }
}
