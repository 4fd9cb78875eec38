//! Watches across gaps.

use std::time::Duration;

use genset_backend_common::ErrorKind;
use genset_runtime::discovery::{Change, Discovery, EtcdConfig, EtcdDiscovery};
use tokio::time::Instant;

use super::network::Network;
use super::server::EtcdServer;
use super::{TTL, connect};
use crate::discovery::suite::{Follower, entry, everything, leased};
use crate::plane::Log;
use crate::support::soon;

/// Long enough that no lease expires within a test.
const LONG: Duration = Duration::from_secs(600);

#[tokio::test]
async fn what_etcd_lost_with_its_data_stays_until_its_owners_had_time_to_put_it_again() {
    let mut server = EtcdServer::start().await;
    let changes = changes_around(&mut server, async |server| {
        server.kill();
        server.restart_empty().await;
    })
    .await;
    let Some(Change::Snapshot(snapshot)) = changes.first() else {
        panic!("a gap needs a snapshot: {changes:?}")
    };
    assert_eq!(snapshot.len(), 2, "nothing vanishes at once: {snapshot:?}");
}

/// The connections stay open, so that only silence shows that it hangs.
#[tokio::test]
async fn leases_that_ended_while_etcd_hung_stay_until_their_owners_had_time_to_take_new_ones() {
    let mut server = EtcdServer::start().await;
    changes_around(&mut server, async |server| {
        server.freeze();
        tokio::time::sleep(TTL * 2).await;
        server.thaw();
    })
    .await;
}

/// The changes that a watcher sees when `fault` ends every lease and the owner of one of two entries acquires a new one: that
/// entry is never removed, and the other is removed last.
async fn changes_around(
    server: &mut EtcdServer,
    fault: impl AsyncFnOnce(&mut EtcdServer),
) -> Vec<Change> {
    let (here, there) = (
        connect(&server.endpoint(), TTL).await,
        connect(&server.endpoint(), TTL).await,
    );
    let lease = here.lease().await.unwrap();
    for key in ["alive", "dead"] {
        lease.put(entry(key, "x")).await.unwrap();
    }
    let mut follower = Follower::of(&there, "").await;
    fault(server).await;
    soon(lease.lost()).await;
    let again = soon(async {
        loop {
            match here.lease().await {
                Ok(lease) => return lease,
                Err(error) => assert_eq!(error.kind(), ErrorKind::Unavailable),
            }
        }
    })
    .await;
    again.put(entry("alive", "y")).await.unwrap();
    let mut changes = Vec::new();
    while follower.entries.contains_key("dead") {
        let change = follower.next().await;
        assert!(follower.entries.contains_key("alive"), "{change:?}");
        changes.push(change);
    }
    assert_eq!(follower.entries["alive"], "y");
    assert_eq!(changes.last(), Some(&Change::Removed("dead".into())));
    changes
}

#[tokio::test]
async fn changes_whose_history_was_compacted_during_a_gap_are_not_missed() {
    let server = EtcdServer::start().await;
    let network = Network::to(server.address()).await;
    let (far, near) = (
        connect(network.endpoint(), TTL).await,
        connect(&server.endpoint(), LONG).await,
    );
    let lease = near.lease().await.unwrap();
    for key in ["gone", "changed"] {
        lease.put(entry(key, "old")).await.unwrap();
    }
    let mut follower = Follower::of(&far, "").await;
    network.cut();
    lease.remove("gone").await.unwrap();
    lease.put(entry("changed", "new")).await.unwrap();
    lease.put(entry("new", "new")).await.unwrap();
    compact(&server).await;
    network.break_connections();
    network.heal();
    let expected = [entry("changed", "new"), entry("new", "new")];
    follower.until_exactly(&expected).await;
    assert!(follower.snapshots >= 2);
    lease.put(entry("after", "x")).await.unwrap();
    assert_eq!(follower.next().await, Change::Put(entry("after", "x")));
}

/// Compacts the history down to the last revision.
async fn compact(server: &EtcdServer) {
    let admin = server.admin();
    admin.compact(admin.revision().await.unwrap()).await;
}

#[tokio::test]
async fn a_watch_behind_a_dead_connection_starts_over_by_itself() {
    let server = EtcdServer::start().await;
    let network = Network::to(server.address()).await;
    let config = EtcdConfig {
        endpoints: vec![network.endpoint().into(), server.endpoint()],
        request_timeout: Duration::from_secs(1),
        ..EtcdConfig::default()
    };
    let far = EtcdDiscovery::connect(config).await.unwrap();
    let near = connect(&server.endpoint(), LONG).await;
    let lease = near.lease().await.unwrap();
    let mut follower = Follower::of(&far, "").await;
    // Never healed: the other endpoint must help.
    network.cut();
    lease.put(entry("a", "x")).await.unwrap();
    follower.until_exactly(&[entry("a", "x")]).await;
    assert_eq!(follower.snapshots, 2);
}

#[tokio::test]
async fn a_frozen_server_fails_reads_in_time_and_ends_no_watch() {
    let server = EtcdServer::start().await;
    let config = EtcdConfig {
        endpoints: vec![server.endpoint()],
        request_timeout: Duration::from_secs(1),
        lease_ttl: LONG,
        ..EtcdConfig::default()
    };
    let discovery = EtcdDiscovery::connect(config).await.unwrap();
    let lease = leased(&discovery, "a", "x").await;
    let mut follower = Follower::of(&discovery, "").await;
    server.freeze();
    let refused = soon(discovery.get("")).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Unavailable);
    assert!(
        refused.to_string().contains(&server.endpoint()),
        "{refused}"
    );
    server.thaw();
    soon(async { while lease.put(entry("b", "y")).await.is_err() {} }).await;
    follower
        .until_exactly(&[entry("a", "x"), entry("b", "y")])
        .await;
}

#[tokio::test]
async fn a_slow_watcher_misses_nothing() {
    const PUTS: usize = 3000;
    let server = EtcdServer::start().await;
    let discovery = connect(&server.endpoint(), LONG).await;
    let lease = discovery.lease().await.unwrap();
    let mut watch = discovery.watch("").await.unwrap();
    for round in 0..PUTS {
        let key = format!("k{}", round % 7);
        lease.put(entry(&key, round.to_string())).await.unwrap();
    }
    assert_eq!(soon(watch.next()).await, Some(Change::Snapshot(vec![])));
    for round in 0..PUTS {
        let expected = entry(&format!("k{}", round % 7), round.to_string());
        assert_eq!(soon(watch.next()).await, Some(Change::Put(expected)));
    }
}

#[tokio::test]
async fn a_restart_with_its_data_removes_nothing_and_ends_no_lease() {
    let mut server = EtcdServer::start().await;
    let discovery = connect(&server.endpoint(), TTL).await;
    let _lease = leased(&discovery, "a", "x").await;
    let mut follower = Follower::of(&discovery, "").await;
    for round in 1..=3 {
        server.kill();
        server.restart().await;
        let next = soon(follower.next()).await;
        assert_eq!(next, Change::Snapshot(vec![entry("a", "x")]), "{round}");
    }
    // The lease outlives the time it would have without keep-alives.
    let end = Instant::now() + TTL + TTL;
    while Instant::now() < end {
        assert!(everything(&discovery).await.contains_key("a"));
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

/// Each watch tries again every second or sooner.
#[tokio::test]
async fn an_outage_is_a_few_lines_of_the_log_however_many_watches_there_are() {
    const WATCHES: usize = 20;
    let log = Log::watched();
    let mut server = EtcdServer::start().await;
    let discovery = connect(&server.endpoint(), TTL).await;
    let _lease = leased(&discovery, "a", "x").await;
    let mut followers = Vec::new();
    for _ in 0..WATCHES {
        followers.push(Follower::of(&discovery, "").await);
    }
    server.kill();
    server.restart().await;
    for follower in &mut followers {
        let again = soon(follower.next()).await;
        assert_eq!(again, Change::Snapshot(vec![entry("a", "x")]));
    }
    // The first end, failure and return of a watch, and the failure and return of the lease.
    let lines = log.lines();
    assert!((3..=5).contains(&lines), "{lines}");
}
