//! A real process that holds a lease, to be killed, stopped and starved of disk space.
//!
//! The test below becomes the child if its environment says so. It answers each command with one line.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::Arc;

use async_trait::async_trait;
use genset_runtime::discovery::{
    Change, Discovery, Entry, FileDiscovery, FileDiscoveryConfig, Lease,
};
use parking_lot::Mutex;
use rustix::process::{Resource, Rlimit, setrlimit};
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::task::JoinSet;
use tokio::time::Duration;

use super::suite::{Follower, Victim, entry};
use crate::child::{Child, say};

/// The store for the child to join: `file:PATH` or `etcd:HOST:PORT`.
const STORE: &str = "GENSET_TEST_DISCOVERY_CHILD";

/// Starts a child that acquires a lease in `store`.
pub(crate) async fn start(store: &str) -> Child {
    let test = "a_child_process_offers_until_it_ends";
    let mut child = Child::start(module_path!(), test, (STORE, store));
    assert_eq!(child.said().await, "leased");
    child
}

#[async_trait]
impl Victim for Child {
    async fn kill(mut self: Box<Self>) {
        Child::kill(&mut self).await;
    }
}

/// The child's main loop.
async fn serve(store: &str) {
    let discovery = connect(store).await;
    let lease = discovery.lease().await.unwrap();
    say("leased");
    let seen = Arc::new(Mutex::new(Seen::default()));
    let mut watching = JoinSet::new();
    let mut commands = BufReader::new(tokio::io::stdin()).lines();
    while let Some(command) = commands.next_line().await.unwrap() {
        if command == "watch" {
            watching.spawn(watch(Arc::clone(&discovery), Arc::clone(&seen)));
        }
        say(&obey(&*lease, &seen, &command).await);
    }
}

/// The changes a watching child has seen.
#[derive(Default)]
struct Seen {
    keys: BTreeSet<String>,
    removals: usize,
}

async fn watch(discovery: Arc<dyn Discovery>, seen: Arc<Mutex<Seen>>) {
    let mut watch = discovery.watch("").await.unwrap();
    while let Some(change) = watch.next().await {
        let mut seen = seen.lock();
        match change {
            Change::Snapshot(entries) => {
                seen.keys = entries.into_iter().map(|entry| entry.key).collect();
            }
            Change::Put(entry) => drop(seen.keys.insert(entry.key)),
            Change::Removed(key) => {
                seen.removals += 1;
                seen.keys.remove(&key);
            }
        }
    }
}

async fn connect(store: &str) -> Arc<dyn Discovery> {
    let (kind, place) = store.split_once(':').unwrap();
    match kind {
        "file" => {
            let config = FileDiscoveryConfig::default();
            Arc::new(FileDiscovery::open(PathBuf::from(place), config).unwrap())
        }
        #[cfg(feature = "etcd")]
        "etcd" => Arc::new(super::etcd::connect(place, super::etcd::TTL).await),
        other => panic!("no such store: {other}"),
    }
}

async fn obey(lease: &dyn Lease, seen: &Mutex<Seen>, command: &str) -> String {
    let yes_or_no = |is_so| if is_so { "yes" } else { "no" }.to_owned();
    let words: Vec<_> = command.split(' ').collect();
    match *words {
        ["put", key, value] => match lease.put(entry(key, value.to_owned())).await {
            Ok(()) => "done".into(),
            Err(error) => format!("{} {error}", error.kind()),
        },
        // From now on no file can be written, as on a full disk.
        ["fill"] => {
            let limit = Rlimit {
                current: Some(0),
                maximum: None,
            };
            setrlimit(Resource::Fsize, limit).unwrap();
            "done".into()
        }
        ["lost?"] => {
            let lost = tokio::time::timeout(Duration::from_millis(1), lease.lost()).await;
            yes_or_no(lost.is_ok())
        }
        ["watch"] => "done".into(),
        ["knows?", key] => yes_or_no(seen.lock().keys.contains(key)),
        ["removals?"] => seen.lock().removals.to_string(),
        _ => panic!("no such command: {command}"),
    }
}

/// A child that has put `entries` in `store`.
pub(crate) async fn offering(store: &str, entries: Vec<Entry>) -> Child {
    let mut child = start(store).await;
    for Entry { key, value } in entries {
        let put = format!("put {key} {}", std::str::from_utf8(&value).unwrap());
        assert_eq!(child.ask(&put).await, "done");
    }
    child
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_child_process_offers_until_it_ends() {
    if let Ok(store) = std::env::var(STORE) {
        return serve(&store).await;
    }
    let directory = tempfile::tempdir().unwrap();
    let store = format!("file:{}", directory.path().display());
    let here = connect(&store).await;
    let child = offering(&store, vec![entry("a", "x")]).await;
    let mut follower = Follower::of(&*here, "").await;
    follower.until_exactly(&[entry("a", "x")]).await;
    assert!(child.end().await);
    follower.until_exactly(&[]).await;
    assert_eq!(
        std::fs::read_dir(directory.path()).unwrap().count(),
        1,
        "nothing but the marker is left"
    );
}
