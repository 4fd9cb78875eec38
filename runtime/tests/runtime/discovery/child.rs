//! A real process that holds a lease, to be killed, stopped and starved of disk space.
//!
//! The test binary runs itself again: the test below becomes the child if its environment says so. It reads commands from
//! standard input and answers each with one line.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::process::Stdio;
use std::sync::Arc;

use async_trait::async_trait;
use genset_runtime::discovery::{
    Change, Discovery, Entry, FileDiscovery, FileDiscoveryConfig, Lease,
};
use parking_lot::Mutex;
use rustix::process::{Pid, Resource, Rlimit, Signal, kill_process, setrlimit};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Lines};
use tokio::process::{ChildStdin, ChildStdout, Command};
use tokio::task::JoinSet;
use tokio::time::Duration;

use super::suite::{Follower, Victim, entry};
use crate::support::soon;

/// The store for the child to join: `file:PATH` or `etcd:HOST:PORT`.
const STORE: &str = "GENSET_TEST_DISCOVERY_CHILD";

/// The prefix of the child's answers among the test harness's lines.
const ANSWER: &str = "child answers: ";

/// A child and its lease.
pub(crate) struct Child {
    process: tokio::process::Child,
    commands: ChildStdin,
    output: Lines<BufReader<ChildStdout>>,
}

impl Child {
    /// Starts a child that acquires a lease in `store`.
    pub(crate) async fn start(store: &str) -> Self {
        let test = concat!(module_path!(), "::a_child_process_offers_until_it_ends");
        let (_, test) = test.split_once("::").unwrap();
        // Exceeding the file size limit must be an error and not kill the child: the shell ignores the signal for it.
        let mut process = Command::new("sh")
            .args(["-c", r#"trap '' XFSZ; exec "$0" "$@""#])
            .arg(std::env::current_exe().unwrap())
            .args(["--exact", test, "--nocapture", "--test-threads=1"])
            .env(STORE, store)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .unwrap();
        let commands = process.stdin.take().unwrap();
        let output = BufReader::new(process.stdout.take().unwrap()).lines();
        let mut child = Self {
            process,
            commands,
            output,
        };
        assert_eq!(child.answer().await, "leased");
        child
    }

    /// Sends a command and returns the answer.
    pub(crate) async fn ask(&mut self, command: &str) -> String {
        let line = format!("{command}\n");
        soon(self.commands.write_all(line.as_bytes()))
            .await
            .unwrap();
        self.answer().await
    }

    pub(crate) async fn put(&mut self, key: &str, value: &str) {
        assert_eq!(self.ask(&format!("put {key} {value}")).await, "done");
    }

    async fn answer(&mut self) -> String {
        loop {
            let line = soon(self.output.next_line()).await.unwrap();
            let line = line.expect("the child lives");
            // The harness may have written the start of the line.
            if let Some((_, answer)) = line.split_once(ANSWER) {
                return answer.to_owned();
            }
        }
    }

    pub(crate) fn signal(&self, signal: Signal) {
        let id = self.process.id().expect("the child lives");
        let id = Pid::from_raw(id.try_into().unwrap()).unwrap();
        kill_process(id, signal).unwrap();
    }

    /// Waits for it to exit, and returns whether it succeeded.
    async fn end(mut self) -> bool {
        drop(self.commands);
        soon(self.process.wait()).await.unwrap().success()
    }
}

#[async_trait]
impl Victim for Child {
    async fn kill(mut self: Box<Self>) {
        soon(self.process.kill()).await.unwrap();
    }
}

/// The child's main loop.
async fn serve(store: &str) {
    let discovery = connect(store).await;
    let lease = discovery.lease().await.unwrap();
    tell("leased");
    let seen = Arc::new(Mutex::new(Seen::default()));
    let mut watching = JoinSet::new();
    let mut commands = BufReader::new(tokio::io::stdin()).lines();
    while let Some(command) = commands.next_line().await.unwrap() {
        if command == "watch" {
            watching.spawn(watch(Arc::clone(&discovery), Arc::clone(&seen)));
        }
        tell(&obey(&*lease, &seen, &command).await);
    }
}

/// Sends an answer to the parent.
fn tell(answer: &str) {
    use std::io::Write as _;
    let mut parent = std::io::stdout().lock();
    writeln!(parent, "{ANSWER}{answer}").unwrap();
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
    let mut child = Child::start(store).await;
    for Entry { key, value } in entries {
        child.put(&key, std::str::from_utf8(&value).unwrap()).await;
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
