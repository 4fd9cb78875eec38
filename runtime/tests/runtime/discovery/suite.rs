//! The required behaviour of every discovery backend, tested through the trait alone.
//!
//! A backend implements [`Backend`], to reach and to disturb one store, and `discovery_suite!` creates a test for each case:
//! `discovery_suite!(behaviour, FileBackend::start().await);`. Every case gets its own store.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use futures_util::future::join_all;
use genset_backend_common::ErrorKind;
use genset_runtime::discovery::{Change, Discovery, Entry, Lease, Watch};
use genset_runtime::plane::MemoryPlane;
use genset_runtime::{EndpointName, Runtime};
use tokio::time::timeout;

use crate::support::{PATIENCE, record, soon, until};

/// The delay that a loaded machine may add to the removal of a dead lease.
const LOAD: Duration = Duration::from_secs(12);

/// One store, initially empty, and the ways to reach and to disturb it.
#[async_trait]
pub(crate) trait Backend: Send + Sync {
    /// A new connection, like that of another process.
    async fn connect(&self) -> Arc<dyn Discovery>;

    /// Another process that has put `entries` under a lease and keeps it alive.
    async fn victim(&self, entries: Vec<Entry>) -> Box<dyn Victim>;

    /// Whether the store can be unreachable.
    fn can_be_away(&self) -> bool {
        true
    }

    /// Makes the store unreachable for everybody. Does nothing if the backend cannot be unreachable.
    async fn begin_outage(&self);

    /// Makes it reachable again, soon enough for leases to survive.
    async fn end_outage(&self);

    /// Ends every lease without its holder's action.
    async fn take_leases_away(&self);

    /// How long the entries of a killed process may stay.
    fn dead_lease_stays(&self) -> Duration;
}

/// A process for the test to kill.
#[async_trait]
pub(crate) trait Victim: Send {
    /// Kills it without notice.
    async fn kill(self: Box<Self>);
}

/// Creates a module with one test for each case: `discovery_suite!(name, backend)`; `backend` may await.
macro_rules! discovery_suite {
    ($name:ident, $backend:expr) => {
        $crate::discovery::suite::discovery_suite!(@cases $name, $backend,
            a_watch_begins_with_a_snapshot,
            puts_replacements_and_removals_come_in_order,
            a_prefix_hides_what_it_does_not_match,
            what_was_put_is_seen_at_once_by_get_elsewhere,
            a_dropped_lease_takes_its_entries_along,
            removing_what_is_not_there_is_no_error,
            a_lease_removes_only_what_is_its_own,
            the_last_put_of_a_key_wins_and_outlives_the_other_lease,
            a_killed_process_loses_its_entries_and_nobody_else_does,
            a_lost_lease_is_noticed_and_takes_no_more,
            a_lease_that_nobody_took_is_not_lost,
            entries_are_put_again_under_a_new_lease,
            writers_at_the_same_time_lose_nothing,
            a_watcher_under_churn_never_goes_back_and_ends_at_what_is_there,
            an_outage_keeps_what_is_known_and_ends_in_a_snapshot,
            a_big_value_arrives_whole,
            many_watchers_see_the_same,
            a_cancelled_wait_loses_no_change,
            a_record_under_anothers_key_is_nobody_and_leaves_no_ghost,
        );
    };
    (@cases $name:ident, $backend:expr, $($case:ident,)*) => {
        mod $name {
            use super::*;

            $(
                #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
                async fn $case() {
                    let backend = $backend;
                    $crate::discovery::suite::$case(&backend).await;
                }
            )*
        }
    };
}
pub(crate) use discovery_suite;

pub(crate) fn entry(key: &str, value: impl Into<Bytes>) -> Entry {
    Entry {
        key: key.into(),
        value: value.into(),
    }
}

/// A new lease that has put this entry.
pub(crate) async fn leased(discovery: &dyn Discovery, key: &str, value: &str) -> Box<dyn Lease> {
    let lease = soon(discovery.lease()).await.unwrap();
    lease.put(entry(key, value.to_owned())).await.unwrap();
    lease
}

/// A watch and the entries it has reported so far.
pub(crate) struct Follower {
    watch: Box<dyn Watch>,
    pub(crate) entries: BTreeMap<String, Bytes>,
    /// The number of snapshots so far.
    pub(crate) snapshots: usize,
}

impl Follower {
    /// Watches `prefix`, past the first snapshot.
    pub(crate) async fn of(discovery: &dyn Discovery, prefix: &str) -> Self {
        let mut follower = Self {
            watch: soon(discovery.watch(prefix)).await.unwrap(),
            entries: BTreeMap::new(),
            snapshots: 0,
        };
        let first = follower.next().await;
        assert!(matches!(first, Change::Snapshot(_)), "{first:?}");
        follower
    }

    /// Applies the next change and returns it.
    pub(crate) async fn next(&mut self) -> Change {
        let change = soon(self.watch.next()).await.expect("a live store");
        match change.clone() {
            Change::Snapshot(entries) => {
                let pairs = entries.into_iter().map(|entry| (entry.key, entry.value));
                self.entries = pairs.collect();
                self.snapshots += 1;
            }
            Change::Put(entry) => drop(self.entries.insert(entry.key, entry.value)),
            Change::Removed(key) => {
                assert!(self.entries.remove(&key).is_some(), "{key} was not known");
            }
        }
        change
    }

    /// Follows until the known entries satisfy `holds`.
    pub(crate) async fn until(&mut self, holds: impl Fn(&BTreeMap<String, Bytes>) -> bool) {
        soon(async {
            while !holds(&self.entries) {
                self.next().await;
            }
        })
        .await;
    }

    /// Follows until exactly these entries are known.
    pub(crate) async fn until_exactly(&mut self, expected: &[Entry]) {
        let expected = as_map(expected.to_vec());
        self.until(|entries| *entries == expected).await;
    }
}

fn as_map(entries: Vec<Entry>) -> BTreeMap<String, Bytes> {
    let pairs = entries.into_iter().map(|entry| (entry.key, entry.value));
    pairs.collect()
}

pub(crate) async fn everything(discovery: &dyn Discovery) -> BTreeMap<String, Bytes> {
    as_map(soon(discovery.get("")).await.unwrap())
}

pub(crate) async fn a_watch_begins_with_a_snapshot(backend: &dyn Backend) {
    let (here, there) = (backend.connect().await, backend.connect().await);
    let empty = Follower::of(&*there, "a/").await;
    assert!(empty.entries.is_empty());
    let lease = leased(&*here, "a/1", "x").await;
    lease.put(entry("a/2", "y")).await.unwrap();
    // A connection made after the puts has them in its first snapshot; the earlier one has them eventually.
    for reader in [backend.connect().await, there] {
        let mut follower = Follower::of(&*reader, "a/").await;
        follower
            .until_exactly(&[entry("a/1", "x"), entry("a/2", "y")])
            .await;
    }
}

pub(crate) async fn puts_replacements_and_removals_come_in_order(backend: &dyn Backend) {
    let (here, there) = (backend.connect().await, backend.connect().await);
    let mut follower = Follower::of(&*there, "a/").await;
    let lease = leased(&*here, "a/1", "x").await;
    assert_eq!(follower.next().await, Change::Put(entry("a/1", "x")));
    lease.put(entry("a/1", "y")).await.unwrap();
    assert_eq!(follower.next().await, Change::Put(entry("a/1", "y")));
    lease.remove("a/1").await.unwrap();
    assert_eq!(follower.next().await, Change::Removed("a/1".into()));
    // The same value again is a change: its owner has restarted.
    lease.put(entry("a/1", "y")).await.unwrap();
    assert_eq!(follower.next().await, Change::Put(entry("a/1", "y")));
    lease.put(entry("a/1", "y")).await.unwrap();
    assert_eq!(follower.next().await, Change::Put(entry("a/1", "y")));
}

pub(crate) async fn a_prefix_hides_what_it_does_not_match(backend: &dyn Backend) {
    let (here, there) = (backend.connect().await, backend.connect().await);
    let lease = soon(here.lease()).await.unwrap();
    let mut follower = Follower::of(&*there, "a/").await;
    for key in ["a", "a0", "b/1", "a/1", "a/1/x", "a/é \"quoted\"\n"] {
        lease.put(entry(key, "x")).await.unwrap();
    }
    follower.until(|entries| entries.len() == 3).await;
    assert!(follower.entries.keys().all(|key| key.starts_with("a/")));
    let found = soon(there.get("a/")).await.unwrap();
    assert_eq!(as_map(found), follower.entries);
    assert_eq!(everything(&*there).await.len(), 6);
    lease.remove("b/1").await.unwrap();
    lease.remove("a/1/x").await.unwrap();
    assert_eq!(follower.next().await, Change::Removed("a/1/x".into()));
}

pub(crate) async fn what_was_put_is_seen_at_once_by_get_elsewhere(backend: &dyn Backend) {
    let (here, there) = (backend.connect().await, backend.connect().await);
    let lease = soon(here.lease()).await.unwrap();
    for round in 0..20 {
        let value = round.to_string();
        lease.put(entry("k", value.clone())).await.unwrap();
        let found = soon(there.get("k")).await.unwrap();
        assert_eq!(found, [entry("k", value)]);
    }
    lease.remove("k").await.unwrap();
    assert_eq!(soon(there.get("k")).await.unwrap(), []);
}

pub(crate) async fn a_dropped_lease_takes_its_entries_along(backend: &dyn Backend) {
    let (here, there) = (backend.connect().await, backend.connect().await);
    let (leaving, staying) = (here.lease().await.unwrap(), here.lease().await.unwrap());
    leaving.put(entry("a", "x")).await.unwrap();
    leaving.put(entry("b", "x")).await.unwrap();
    staying.put(entry("c", "x")).await.unwrap();
    let mut follower = Follower::of(&*there, "").await;
    follower.until(|entries| entries.len() == 3).await;
    drop(leaving);
    follower.until_exactly(&[entry("c", "x")]).await;
}

pub(crate) async fn removing_what_is_not_there_is_no_error(backend: &dyn Backend) {
    let here = backend.connect().await;
    let lease = soon(here.lease()).await.unwrap();
    lease.remove("a").await.unwrap();
    lease.put(entry("a", "x")).await.unwrap();
    lease.remove("a").await.unwrap();
    lease.remove("a").await.unwrap();
    assert!(everything(&*here).await.is_empty());
}

pub(crate) async fn a_lease_removes_only_what_is_its_own(backend: &dyn Backend) {
    let (here, there) = (backend.connect().await, backend.connect().await);
    let (mine, yours) = (here.lease().await.unwrap(), there.lease().await.unwrap());
    mine.put(entry("a", "x")).await.unwrap();
    yours.remove("a").await.unwrap();
    drop(yours);
    assert_eq!(
        everything(&*there).await,
        as_map(vec![entry("a", "x")]),
        "only its holder removes an entry"
    );
}

pub(crate) async fn the_last_put_of_a_key_wins_and_outlives_the_other_lease(backend: &dyn Backend) {
    let (here, there) = (backend.connect().await, backend.connect().await);
    for round in 0..10 {
        let (old, new) = (here.lease().await.unwrap(), there.lease().await.unwrap());
        let (before, after) = (format!("{round} old"), format!("{round} new"));
        old.put(entry("k", before)).await.unwrap();
        new.put(entry("k", after.clone())).await.unwrap();
        let expected = as_map(vec![entry("k", after)]);
        assert_eq!(everything(&*here).await, expected);
        drop(old);
        let mut follower = Follower::of(&*backend.connect().await, "").await;
        follower.until(|entries| *entries == expected).await;
        assert_eq!(everything(&*there).await, expected);
        drop(new);
        follower.until(BTreeMap::is_empty).await;
    }
}

pub(crate) async fn a_killed_process_loses_its_entries_and_nobody_else_does(backend: &dyn Backend) {
    let (here, there) = (backend.connect().await, backend.connect().await);
    let lease = leased(&*here, "live", "x").await;
    let dying = vec![entry("dying/1", "x"), entry("dying/2", "x")];
    let victim = backend.victim(dying).await;
    let mut followers = vec![
        Follower::of(&*here, "").await,
        Follower::of(&*there, "").await,
    ];
    for follower in &mut followers {
        follower.until(|entries| entries.len() == 3).await;
    }
    victim.kill().await;
    // A late reader must not see the entries for longer than the others.
    followers.push(Follower::of(&*backend.connect().await, "").await);
    let patience = backend.dead_lease_stays() + LOAD;
    for follower in &mut followers {
        let gone = follower.until(|entries| entries.keys().eq(["live"]));
        timeout(patience, gone).await.expect("it goes in time");
    }
    assert!(timeout(Duration::ZERO, lease.lost()).await.is_err());
}

pub(crate) async fn a_lost_lease_is_noticed_and_takes_no_more(backend: &dyn Backend) {
    let (here, there) = (backend.connect().await, backend.connect().await);
    let lease = leased(&*here, "a", "x").await;
    let mut follower = Follower::of(&*there, "").await;
    follower.until(|entries| entries.len() == 1).await;
    backend.take_leases_away().await;
    soon(lease.lost()).await;
    let refused = lease.put(entry("a", "y")).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Unavailable);
    follower.until(BTreeMap::is_empty).await;
    drop(lease);
    assert!(everything(&*here).await.is_empty());
}

pub(crate) async fn a_lease_that_nobody_took_is_not_lost(backend: &dyn Backend) {
    let here = backend.connect().await;
    let lease = leased(&*here, "a", "x").await;
    let longer = backend.dead_lease_stays() + Duration::from_secs(1);
    assert!(timeout(longer, lease.lost()).await.is_err());
    lease.put(entry("a", "y")).await.unwrap();
    assert_eq!(everything(&*here).await, as_map(vec![entry("a", "y")]));
}

pub(crate) async fn entries_are_put_again_under_a_new_lease(backend: &dyn Backend) {
    let (here, there) = (backend.connect().await, backend.connect().await);
    let mut lease = soon(here.lease()).await.unwrap();
    let mut follower = Follower::of(&*there, "").await;
    for round in 0..3 {
        let value = round.to_string();
        lease.put(entry("a", value.clone())).await.unwrap();
        follower.until_exactly(&[entry("a", value)]).await;
        backend.take_leases_away().await;
        soon(lease.lost()).await;
        lease = soon(here.lease()).await.unwrap();
    }
    lease.put(entry("a", "end")).await.unwrap();
    follower.until_exactly(&[entry("a", "end")]).await;
}

/// Puts `keys` keys of this writer, counting each up to `rounds`; then removes every third.
async fn write(
    discovery: Arc<dyn Discovery>,
    writer: usize,
    keys: usize,
    rounds: usize,
) -> Box<dyn Lease> {
    let lease = soon(discovery.lease()).await.unwrap();
    for round in 1..=rounds {
        for key in 0..keys {
            let key = format!("w{writer}/{key}");
            lease.put(entry(&key, round.to_string())).await.unwrap();
        }
    }
    for key in (0..keys).step_by(3) {
        lease.remove(&format!("w{writer}/{key}")).await.unwrap();
    }
    lease
}

fn written(writers: usize, keys: usize, rounds: usize) -> Vec<Entry> {
    let left = |writer| {
        let kept = (0..keys).filter(|key| key % 3 != 0);
        kept.map(move |key| entry(&format!("w{writer}/{key}"), rounds.to_string()))
    };
    (0..writers).flat_map(left).collect()
}

pub(crate) async fn writers_at_the_same_time_lose_nothing(backend: &dyn Backend) {
    const WRITERS: usize = 3;
    const KEYS: usize = 60;
    let connections = join_all((0..WRITERS).map(|_| backend.connect())).await;
    let mut follower = Follower::of(&*connections[0], "").await;
    let writing = connections.iter().cloned().enumerate();
    let writers = writing.map(|(writer, connection)| write(connection, writer, KEYS, 1));
    let _leases = join_all(writers).await;
    let expected = written(WRITERS, KEYS, 1);
    follower.until_exactly(&expected).await;
    assert_eq!(everything(&*connections[1]).await, as_map(expected));
}

pub(crate) async fn a_watcher_under_churn_never_goes_back_and_ends_at_what_is_there(
    backend: &dyn Backend,
) {
    const WRITERS: usize = 2;
    const KEYS: usize = 5;
    const ROUNDS: usize = 100;
    let connections = join_all((0..WRITERS).map(|_| backend.connect())).await;
    let reader = backend.connect().await;
    let mut follower = Follower::of(&*reader, "").await;
    let writing = connections.iter().cloned().enumerate();
    let writers = writing.map(|(writer, connection)| write(connection, writer, KEYS, ROUNDS));
    let expected = written(WRITERS, KEYS, ROUNDS);
    let watching = async {
        let mut newest = BTreeMap::<String, u64>::new();
        let end = as_map(expected.clone());
        while follower.entries != end {
            follower.next().await;
            for (key, value) in &follower.entries {
                let value: u64 = std::str::from_utf8(value).unwrap().parse().unwrap();
                let newest = newest.entry(key.clone()).or_default();
                assert!(value >= *newest, "{key} went from {newest} to {value}");
                *newest = value;
            }
        }
    };
    let (_leases, ()) = tokio::join!(join_all(writers), soon(watching));
    assert_eq!(everything(&*reader).await, follower.entries);
}

pub(crate) async fn an_outage_keeps_what_is_known_and_ends_in_a_snapshot(backend: &dyn Backend) {
    let (here, there) = (backend.connect().await, backend.connect().await);
    let lease = leased(&*here, "a", "x").await;
    let mut follower = Follower::of(&*there, "").await;
    follower.until(|entries| entries.len() == 1).await;
    backend.begin_outage().await;
    // Longer than a dead lease stays: an outage is not a death.
    let outage = backend.dead_lease_stays() + Duration::from_secs(1);
    let heard = timeout(outage, follower.watch.next()).await;
    assert!(heard.is_err(), "an outage is silent: {heard:?}");
    // Metrics show it: of the lease, and of the watch.
    let away = i64::from(backend.can_be_away());
    let outages = || [here.outages().get(), there.outages().get()];
    assert_eq!(outages(), [away, away]);
    backend.end_outage().await;
    // Puts fail until the store is reachable again; the lease survives.
    soon(async {
        while lease.put(entry("b", "y")).await.is_err() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    })
    .await;
    let expected = as_map(vec![entry("a", "x"), entry("b", "y")]);
    soon(async {
        while follower.entries != expected {
            follower.next().await;
            assert!(follower.entries.contains_key("a"), "what was known stays");
        }
    })
    .await;
    soon(async {
        while outages() != [0, 0] {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    })
    .await;
    assert!(timeout(Duration::ZERO, lease.lost()).await.is_err());
    drop(lease);
    follower.until(BTreeMap::is_empty).await;
}

pub(crate) async fn a_big_value_arrives_whole(backend: &dyn Backend) {
    let (here, there) = (backend.connect().await, backend.connect().await);
    let lease = soon(here.lease()).await.unwrap();
    let mut follower = Follower::of(&*there, "").await;
    // About 1 MB, and no two parts alike.
    let big: Bytes = (0..250_000_u32).flat_map(u32::to_le_bytes).collect();
    lease.put(entry("big", big.clone())).await.unwrap();
    lease.put(entry("small", "")).await.unwrap();
    let expected = [entry("big", big), entry("small", "")];
    follower.until_exactly(&expected).await;
    assert_eq!(everything(&*there).await, as_map(expected.to_vec()));
}

pub(crate) async fn many_watchers_see_the_same(backend: &dyn Backend) {
    const WATCHERS: usize = 100;
    let (here, there) = (backend.connect().await, backend.connect().await);
    let lease = leased(&*here, "k", "0").await;
    let mut followers = join_all((0..WATCHERS).map(|_| Follower::of(&*there, "k"))).await;
    for round in 1..=20 {
        lease.put(entry("k", round.to_string())).await.unwrap();
    }
    for follower in &mut followers {
        follower.until_exactly(&[entry("k", "20")]).await;
    }
}

pub(crate) async fn a_cancelled_wait_loses_no_change(backend: &dyn Backend) {
    let (here, there) = (backend.connect().await, backend.connect().await);
    let lease = soon(here.lease()).await.unwrap();
    let mut watch = there.watch("").await.unwrap();
    let mut known = BTreeMap::new();
    soon(async {
        for round in 0.. {
            if round < 20 {
                let key = round.to_string();
                lease.put(entry(&key, key.clone())).await.unwrap();
            }
            // Cancelled at varying points of the wait.
            let Ok(change) = timeout(Duration::from_micros(round * 50), watch.next()).await else {
                continue;
            };
            match change.expect("a live store") {
                Change::Snapshot(entries) => known = as_map(entries),
                Change::Put(put) => drop(known.insert(put.key, put.value)),
                Change::Removed(key) => panic!("{key} was never removed"),
            }
            if known.len() == 20 {
                break;
            }
        }
    })
    .await;
    assert_eq!(everything(&*there).await, known);
}

/// A writer of one endpoint's keys speaks only for that endpoint.
pub(crate) async fn a_record_under_anothers_key_is_nobody_and_leaves_no_ghost(
    backend: &dyn Backend,
) {
    let runtime = Runtime::new(backend.connect().await, Arc::new(MemoryPlane::new()));
    let record = |endpoint: &str, instance, location: &str| {
        let endpoint = EndpointName::try_new("test", "c", endpoint).unwrap();
        record(&endpoint, instance, "memory", location.into())
    };
    let honest = record("theirs", 1, "honest");
    let there = backend.connect().await;
    let lease = soon(there.lease()).await.unwrap();
    lease.put(honest.to_entry().unwrap()).await.unwrap();
    let theirs = runtime.endpoint(honest.endpoint.clone()).client::<(), ()>();
    let ours = record("ours", 1, "liar");
    let of_ours = runtime.endpoint(ours.endpoint.clone()).client::<(), ()>();
    soon(theirs.wait_for_instances(PATIENCE)).await.unwrap();
    // Under our keys: another endpoint's instance, another instance, and formerly valid content.
    lease.put(ours.to_entry().unwrap()).await.unwrap();
    soon(of_ours.wait_for_instances(PATIENCE)).await.unwrap();
    let forged = [
        (ours.key(), record("theirs", 1, "forged")),
        (record("ours", 2, "").key(), record("ours", 1, "forged")),
        (record("ours", 3, "").key(), record("theirs", 9, "forged")),
    ];
    for (key, record) in &forged {
        let entry = Entry {
            key: key.clone(),
            ..record.to_entry().unwrap()
        };
        lease.put(entry).await.unwrap();
    }
    let last = record("ours", 4, "honest");
    lease.put(last.to_entry().unwrap()).await.unwrap();
    until(|| of_ours.instances() == std::slice::from_ref(&last)).await;
    assert_eq!(theirs.instances(), std::slice::from_ref(&honest));
    for (key, _) in &forged {
        lease.remove(key).await.unwrap();
    }
    lease.remove(&last.key()).await.unwrap();
    until(|| of_ours.instances().is_empty()).await;
    assert_eq!(theirs.instances(), [honest]);
}
