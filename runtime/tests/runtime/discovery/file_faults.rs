//! Faults of a directory and of the processes that share it: death, suspension, full disks, clocks, garbage.

use std::fs::{self, File};
use std::os::unix::fs::{DirBuilderExt, PermissionsExt, symlink};
use std::path::Path;
use std::time::{Duration, SystemTime};

use genset_backend_common::ErrorKind;
use genset_runtime::discovery::{
    Change, DirectoryAccess, Discovery, FileDiscovery, FileDiscoveryConfig,
};
use rustix::process::Signal;
use tokio::time::timeout;

use super::child::{offering, start};
use super::file::FileBackend;
use super::suite::{Backend, Follower, entry, everything, leased};
use crate::support::soon;

/// Polls until a condition holds that nothing announces.
async fn until(holds: impl AsyncFn() -> bool) {
    soon(async {
        while !holds().await {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    })
    .await;
}

fn config() -> FileDiscoveryConfig {
    FileDiscoveryConfig::default()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_killed_process_leaves_a_file_that_somebody_removes_later() {
    let store = FileBackend::new();
    let quick = FileDiscoveryConfig {
        heartbeat_interval: Duration::from_millis(50),
        time_to_live: Duration::from_millis(300),
        scan_interval: Duration::from_millis(50),
        ..config()
    };
    let here = FileDiscovery::open(store.path(), quick).unwrap();
    let mut follower = Follower::of(&here, "").await;
    let mut child = offering(&store.name(), vec![entry("a", "x")]).await;
    fs::write(store.path().join("0123456789abcdef.tmp"), "cut sho").unwrap();
    follower.until(|entries| entries.len() == 1).await;
    child.kill().await;
    follower.until_exactly(&[]).await;
    until(async || fs::read_dir(store.path()).unwrap().count() == 1).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stopped_process_loses_its_entries_and_has_them_again_when_it_goes_on() {
    let store = FileBackend::new();
    let here = store.open();
    let mut follower = Follower::of(&here, "").await;
    let mut child = offering(&store.name(), vec![entry("a", "x")]).await;
    follower.until_exactly(&[entry("a", "x")]).await;
    child.signal(Signal::STOP);
    follower.until_exactly(&[]).await;
    child.signal(Signal::CONT);
    follower.until_exactly(&[entry("a", "x")]).await;
    assert_eq!(child.ask("lost?").await, "no");
    // It slept for so long that another process removed its file.
    child.signal(Signal::STOP);
    store.take_leases_away().await;
    follower.until_exactly(&[]).await;
    child.signal(Signal::CONT);
    soon(async { while child.ask("lost?").await == "no" {} }).await;
    assert!(child.ask("put a y").await.starts_with("unavailable "));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_watching_process_that_was_stopped_believes_nobody_dead() {
    let store = FileBackend::new();
    let here = store.open();
    let lease = leased(&here, "a", "x").await;
    let mut child = start(&store.name()).await;
    assert_eq!(child.ask("watch").await, "done");
    soon(async { while child.ask("knows? a").await == "no" {} }).await;
    for key in ["b", "c"] {
        child.signal(Signal::STOP);
        // Longer than the time to live of every lease it knows.
        let stopped = timeout(Duration::from_secs(3), lease.lost()).await;
        assert!(stopped.is_err());
        child.signal(Signal::CONT);
        lease.put(entry(key, "x")).await.unwrap();
        let knows = format!("knows? {key}");
        soon(async { while child.ask(&knows).await == "no" {} }).await;
    }
    assert_eq!(child.ask("removals?").await, "0");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_full_disk_refuses_puts_and_ends_no_lease() {
    let store = FileBackend::new();
    let here = store.open();
    let mut follower = Follower::of(&here, "").await;
    let mut child = offering(&store.name(), vec![entry("a", "x")]).await;
    assert_eq!(child.ask("fill").await, "done");
    let refused = child.ask("put a y").await;
    assert!(
        refused.starts_with("unavailable discovery cannot write "),
        "{refused}"
    );
    assert!(
        refused.contains(store.path().to_str().unwrap()),
        "{refused}"
    );
    follower.until_exactly(&[entry("a", "x")]).await;
    // Its heartbeats need no disk space.
    let longer = timeout(Duration::from_secs(4), follower.next()).await;
    assert!(longer.is_err(), "{longer:?}");
    assert_eq!(child.ask("lost?").await, "no");
    assert_eq!(everything(&here).await.len(), 1);
    let files = fs::read_dir(store.path()).unwrap().count();
    assert_eq!(files, 2, "what could not be written is not left behind");
}

/// Sets a lease file's time as a wrong clock would.
fn set_clock(file: &Path, time: SystemTime) {
    let file = File::options().write(true).open(file).unwrap();
    file.set_modified(time).unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn clocks_that_jump_end_no_lease_and_revive_none() {
    let store = FileBackend::new();
    let (here, there) = (store.open(), store.open());
    let lease = leased(&here, "live", "x").await;
    let [live] = &*store.lease_files() else {
        panic!("one lease")
    };
    let mut child = offering(&store.name(), vec![entry("dead", "x")]).await;
    let mut follower = Follower::of(&there, "").await;
    follower.until(|entries| entries.len() == 2).await;
    child.kill().await;
    follower.until_exactly(&[entry("live", "x")]).await;
    let day = Duration::from_secs(24 * 3600);
    for time in [
        SystemTime::now() - 1000 * day,
        SystemTime::now() + 1000 * day,
    ] {
        set_clock(live, time);
        let heard = timeout(Duration::from_secs(3), follower.next()).await;
        assert!(heard.is_err(), "{heard:?}");
    }
    // A late reader sees the living lease beat, whatever its file's time.
    set_clock(live, SystemTime::now() + 1000 * day);
    assert!(everything(&store.open()).await.keys().eq(["live"]));
    assert!(timeout(Duration::ZERO, lease.lost()).await.is_err());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dead_lease_from_the_future_is_never_shown() {
    let store = FileBackend::new();
    let mut child = offering(&store.name(), vec![entry("dead", "x")]).await;
    child.kill().await;
    let [dead] = &*store.lease_files() else {
        panic!("one lease")
    };
    set_clock(dead, SystemTime::now() + Duration::from_secs(3600));
    let here = store.open();
    assert!(Follower::of(&here, "").await.entries.is_empty());
    assert!(everything(&here).await.is_empty());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn garbage_in_the_directory_harms_nobody() {
    let store = FileBackend::new();
    let here = store.open();
    let mut follower = Follower::of(&here, "").await;
    let path = |name: &str| store.path().join(name);
    fs::write(path("README"), "not ours").unwrap();
    fs::write(path("0.lease"), "not a lease's name").unwrap();
    fs::write(path("0000000000000001.lease"), "").unwrap();
    fs::write(path("0000000000000002.lease"), [0xff; 5000]).unwrap();
    fs::create_dir(path("0000000000000003.lease")).unwrap();
    symlink("/dev/zero", path("0000000000000004.lease")).unwrap();
    symlink("nowhere", path("0000000000000005.lease")).unwrap();
    let endless = File::create(path("0000000000000006.lease")).unwrap();
    endless.set_len(1 << 40).unwrap();
    let lease = leased(&here, "a", "x").await;
    follower.until_exactly(&[entry("a", "x")]).await;
    assert_eq!(everything(&store.open()).await.len(), 1);
    // A known lease whose file is corrupted keeps its entries until its holder writes it again.
    for file in store.lease_files().iter().filter(|file| file.is_file()) {
        fs::write(file, "spoilt").unwrap();
    }
    lease.put(entry("b", "x")).await.unwrap();
    follower
        .until_exactly(&[entry("a", "x"), entry("b", "x")])
        .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_directory_that_is_removed_is_made_again_by_the_leases() {
    let store = FileBackend::new();
    let (here, there) = (store.open(), store.open());
    let leases = [here.lease().await.unwrap(), there.lease().await.unwrap()];
    let both = [entry("0", "x"), entry("1", "x")];
    for (lease, entry) in leases.iter().zip(&both) {
        lease.put(entry.clone()).await.unwrap();
    }
    let mut follower = Follower::of(&store.open(), "").await;
    follower.until_exactly(&both).await;
    for round in 1..=3 {
        // A lease may write into it at the same time.
        until(async || fs::remove_dir_all(store.path()).is_ok()).await;
        if round == 2 {
            fs::DirBuilder::new()
                .mode(0o700)
                .create(store.path())
                .unwrap();
        }
        while follower.snapshots <= round {
            let change = follower.next().await;
            assert!(matches!(change, Change::Snapshot(_)), "{change:?}");
            assert_eq!(follower.entries.len(), 2, "nothing is forgotten");
        }
        until(async || store.path().is_dir() && store.lease_files().len() == 2).await;
        assert_eq!(everything(&store.open()).await.len(), 2);
    }
    for lease in &leases {
        assert!(timeout(Duration::ZERO, lease.lost()).await.is_err());
    }
    let [first, second] = leases;
    drop(first);
    follower.until_exactly(&both[1..]).await;
    drop(second);
    follower.until_exactly(&[]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_mount_that_goes_and_comes_back_loses_nobody() {
    let store = FileBackend::new();
    let here = store.open();
    let lease = leased(&here, "a", "x").await;
    let mut follower = Follower::of(&store.open(), "").await;
    follower.until_exactly(&[entry("a", "x")]).await;
    // While unmounted, the mount point is an empty directory.
    let mounted = store.path().with_extension("mounted");
    fs::rename(store.path(), &mounted).unwrap();
    let plain = fs::DirBuilder::new().mode(0o700).create(store.path());
    plain.unwrap();
    while follower.snapshots < 2 {
        follower.next().await;
    }
    assert!(follower.entries.keys().eq(["a"]));
    until(async || lease.put(entry("a", "y")).await.is_ok()).await;
    follower.until_exactly(&[entry("a", "y")]).await;
    // The mount comes back with its earlier contents.
    fs::remove_dir_all(store.path()).unwrap();
    fs::rename(&mounted, store.path()).unwrap();
    while follower.snapshots < 3 {
        follower.next().await;
        assert_eq!(follower.entries["a"], "y", "not what it was before");
    }
    until(async || lease.put(entry("a", "y")).await.is_ok()).await;
    lease.put(entry("a", "z")).await.unwrap();
    follower.until_exactly(&[entry("a", "z")]).await;
    assert!(timeout(Duration::ZERO, lease.lost()).await.is_err());
}

/// Whoever opens it tries again, and counts itself meanwhile.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_watch_that_could_not_begin_is_not_counted_by_the_store() {
    let store = FileBackend::new();
    let here = store.open();
    store.begin_outage().await;
    assert!(here.get("").await.is_err());
    assert!(here.watch("").await.is_err());
    assert_eq!(here.outages().get(), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_process_that_dies_during_an_outage_is_gone_after_it() {
    let store = FileBackend::new();
    let here = store.open();
    let mut child = offering(&store.name(), vec![entry("dead", "x")]).await;
    let lease = leased(&here, "live", "x").await;
    let mut follower = Follower::of(&here, "").await;
    follower.until(|entries| entries.len() == 2).await;
    store.begin_outage().await;
    child.kill().await;
    let refused = soon(here.get("")).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Unavailable);
    assert!(refused.message().contains(store.path().to_str().unwrap()));
    let refused = soon(lease.put(entry("live", "y"))).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Unavailable);
    store.end_outage().await;
    follower.until_exactly(&[entry("live", "x")]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_value_over_the_limit_is_refused_and_the_old_one_stays() {
    let store = FileBackend::new();
    let small = FileDiscoveryConfig {
        max_lease_bytes: 10,
        ..config()
    };
    let here = FileDiscovery::open(store.path(), small).unwrap();
    let lease = leased(&here, "k", "123456789").await;
    let refused = lease.put(entry("k", "1234567890")).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::InvalidArgument);
    assert_eq!(refused.at().map(|at| at.name()), Some("value"));
    assert_eq!(everything(&here).await["k"], "123456789");
}

#[tokio::test]
async fn a_directory_that_cannot_be_made_is_a_clear_error() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("file");
    fs::write(&file, "").unwrap();
    for path in [file.clone(), file.join("below")] {
        let refused = FileDiscovery::open(path.clone(), config()).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::Unavailable);
        assert!(
            refused.message().contains(path.to_str().unwrap()),
            "{refused}"
        );
    }
}

#[tokio::test]
async fn a_new_directory_is_private_and_one_that_others_can_write_to_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("a/b");
    drop(FileDiscovery::open(path.clone(), config()).unwrap());
    let mode = fs::metadata(&path).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o700);
    for open in [0o720, 0o702, 0o1777] {
        fs::set_permissions(&path, PermissionsExt::from_mode(open)).unwrap();
        let refused = FileDiscovery::open(path.clone(), config()).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::InvalidArgument);
        assert_eq!(refused.at().map(|at| at.name()), Some("path"));
        assert!(
            refused.message().contains(&format!("{open:04o}")),
            "{refused}"
        );
    }
    // Users trusted to write to it are not trusted to replace the entries of others.
    let shared = || FileDiscoveryConfig {
        access: DirectoryAccess::Shared,
        ..config()
    };
    for open in [0o777, 0o770] {
        fs::set_permissions(&path, PermissionsExt::from_mode(open)).unwrap();
        let refused = FileDiscovery::open(path.clone(), shared()).unwrap_err();
        assert!(refused.message().contains("chmod +t"), "{refused}");
    }
    for closed in [0o1777, 0o1770, 0o755] {
        fs::set_permissions(&path, PermissionsExt::from_mode(closed)).unwrap();
        drop(FileDiscovery::open(path.clone(), shared()).unwrap());
    }
}

/// Links and pipes in the directory are neither followed nor waited for.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn links_and_pipes_are_neither_followed_nor_waited_for() {
    let store = FileBackend::new();
    let here = store.open();
    let lease = leased(&here, "a", "x").await;
    // A predictable name for a temporary file: the lease's name with another suffix.
    let precious = store.path().with_file_name("precious");
    fs::write(&precious, "untouched").unwrap();
    for file in store.lease_files() {
        symlink(&precious, file.with_extension("tmp")).unwrap();
    }
    lease.put(entry("b", "y")).await.unwrap();
    assert_eq!(fs::read_to_string(&precious).unwrap(), "untouched");
    // A lease elsewhere, and one that nobody writes to.
    let other = FileBackend::new();
    let there = other.open();
    let _elsewhere = leased(&there, "c", "z").await;
    let link = store.path().join("00000000000000aa.lease");
    symlink(&other.lease_files()[0], link).unwrap();
    let pipe = store.path().join("00000000000000bb.lease");
    let mode = rustix::fs::Mode::RWXU;
    rustix::fs::mkfifoat(rustix::fs::CWD, &pipe, mode).unwrap();
    let known = soon(everything(&store.open())).await;
    let keys: Vec<_> = known.keys().map(String::as_str).collect();
    assert_eq!(keys, ["a", "b"]);
}

#[tokio::test]
async fn a_store_of_another_version_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    fs::write(directory.path().join("genset-discovery"), "2 other\n").unwrap();
    let refused = FileDiscovery::open(directory.path().to_owned(), config()).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::InvalidArgument);
    assert!(refused.message().contains("version"), "{refused}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lease_alone_keeps_its_file_fresh_and_removes_it_at_once() {
    let store = FileBackend::new();
    let here = store.open();
    let lease = leased(&here, "a", "x").await;
    drop(here);
    let there = store.open();
    let mut follower = Follower::of(&there, "").await;
    let heard = timeout(Duration::from_secs(3), follower.next()).await;
    assert!(heard.is_err(), "{heard:?}");
    assert!(follower.entries.contains_key("a"));
    assert_eq!(store.lease_files().len(), 1);
    drop(lease);
    // At once; or when the thread that keeps it fresh releases the file.
    until(async || store.lease_files().is_empty()).await;
}
