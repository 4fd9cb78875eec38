//! Leases through disconnections, outages and losses.

use std::sync::Arc;
use std::time::Duration;

use genset_backend_common::ErrorKind;
use genset_runtime::VitalRuntime;
use genset_runtime::discovery::{Change, Discovery, EtcdConfig, EtcdDiscovery, VitalDiscovery};
use tokio::net::TcpSocket;
use tokio::time::timeout;

use super::network::Network;
use super::server::EtcdServer;
use super::{TTL, connect};
use crate::busy::{Occupied, busy_process};
use crate::discovery::suite::{Follower, entry, everything, leased};
use crate::support::soon;

#[tokio::test]
async fn a_disconnection_shorter_than_the_time_to_live_is_seen_by_nobody() {
    let server = EtcdServer::start().await;
    let network = Network::to(server.address()).await;
    let (far, near) = (
        connect(network.endpoint(), Duration::from_secs(20)).await,
        connect(&server.endpoint(), TTL).await,
    );
    let lease = leased(&far, "a", "x").await;
    let mut follower = Follower::of(&near, "").await;
    network.cut();
    assert!(timeout(TTL, lease.lost()).await.is_err());
    network.heal();
    soon(async { while lease.put(entry("b", "y")).await.is_err() {} }).await;
    assert_eq!(follower.next().await, Change::Put(entry("b", "y")));
    network.break_connections();
    soon(async { while lease.put(entry("c", "z")).await.is_err() {} }).await;
    assert_eq!(follower.next().await, Change::Put(entry("c", "z")));
    assert!(timeout(Duration::ZERO, lease.lost()).await.is_err());
}

#[tokio::test]
async fn a_lease_that_expired_while_cut_off_is_lost_once_etcd_says_so() {
    let server = EtcdServer::start().await;
    let network = Network::to(server.address()).await;
    let far = connect(network.endpoint(), Duration::from_secs(2)).await;
    let near = connect(&server.endpoint(), TTL).await;
    let lease = leased(&far, "a", "x").await;
    let mut follower = Follower::of(&near, "").await;
    network.cut();
    assert_eq!(follower.next().await, Change::Removed("a".into()));
    assert!(timeout(Duration::ZERO, lease.lost()).await.is_err());
    network.heal();
    soon(lease.lost()).await;
    let error = lease.put(entry("a", "x")).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    lease.remove("a").await.unwrap();
}

/// As after somebody cleaned up by hand. Nothing reconnects.
#[tokio::test]
async fn an_entry_that_is_deleted_under_a_living_lease_is_put_again() {
    let server = EtcdServer::start().await;
    let discovery = connect(&server.endpoint(), TTL).await;
    let lease = leased(&discovery, "a", "x").await;
    lease.put(entry("b", "x")).await.unwrap();
    lease.put(entry("taken", "mine")).await.unwrap();
    lease.remove("b").await.unwrap();
    let _other = leased(&discovery, "taken", "theirs").await;
    let mut follower = Follower::of(&discovery, "").await;
    server.admin().delete("a").await;
    assert_eq!(follower.next().await, Change::Removed("a".into()));
    assert_eq!(follower.next().await, Change::Put(entry("a", "x")));
    // Neither removed entries nor entries of another lease come back.
    let all = everything(&discovery).await;
    assert_eq!(all.keys().collect::<Vec<_>>(), ["a", "taken"]);
    assert_eq!(all["taken"], "theirs");
}

/// As after it restarts with older data.
#[tokio::test]
async fn an_entry_whose_value_etcd_lost_is_put_again_after_a_reconnection() {
    let server = EtcdServer::start().await;
    let network = Network::to(server.address()).await;
    let far = connect(network.endpoint(), TTL).await;
    let near = connect(&server.endpoint(), TTL).await;
    let lease = far.lease().await.unwrap();
    lease.put(entry("a", "old")).await.unwrap();
    lease.put(entry("a", "new")).await.unwrap();
    let mut follower = Follower::of(&near, "").await;
    server.admin().overwrite("a", "old").await;
    assert_eq!(follower.next().await, Change::Put(entry("a", "old")));
    network.break_connections();
    assert_eq!(follower.next().await, Change::Put(entry("a", "new")));
}

#[tokio::test]
async fn a_lease_is_lost_when_etcd_comes_back_without_its_data() {
    let mut server = EtcdServer::start().await;
    let discovery = connect(&server.endpoint(), TTL).await;
    let lease = leased(&discovery, "a", "x").await;
    server.kill();
    server.restart_empty().await;
    soon(lease.lost()).await;
}

#[tokio::test]
async fn a_server_that_comes_later_is_found_and_until_then_errors_name_it() {
    // Bound, so that the port stays ours, but nobody listens yet.
    let socket = TcpSocket::new_v4().unwrap();
    socket.bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let address = socket.local_addr().unwrap();
    let config = EtcdConfig {
        endpoints: vec![address.to_string()],
        request_timeout: Duration::from_millis(500),
        ..EtcdConfig::default()
    };
    let discovery = soon(EtcdDiscovery::connect(config)).await.unwrap();
    let name = format!("http://{address}");
    let refused = soon(discovery.lease()).await.err().unwrap();
    assert_eq!(refused.kind(), ErrorKind::Unavailable);
    assert!(refused.to_string().contains(&name), "{refused}");
    let refused = soon(discovery.get("")).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Unavailable);
    let refused = soon(discovery.watch("")).await.err().unwrap();
    assert_eq!(refused.kind(), ErrorKind::Unavailable);
    let server = EtcdServer::start().await;
    let network = Network::at(socket.listen(16).unwrap(), server.address());
    soon(async { while discovery.lease().await.is_err() {} }).await;
    drop(network);
}

#[tokio::test]
async fn a_frozen_server_costs_no_more_than_the_request_timeout_and_the_next_one_is_used() {
    let (frozen, live) = (EtcdServer::start().await, EtcdServer::start().await);
    let config = EtcdConfig {
        endpoints: vec![frozen.endpoint(), live.endpoint()],
        // A third of it per attempt.
        request_timeout: Duration::from_secs(6),
        ..EtcdConfig::default()
    };
    let discovery = EtcdDiscovery::connect(config).await.unwrap();
    discovery.get("").await.unwrap();
    frozen.freeze();
    let mut refusals = 0;
    let lease = soon(async {
        loop {
            match discovery.lease().await {
                Ok(lease) => return lease,
                Err(_) => refusals += 1,
            }
        }
    })
    .await;
    assert!(refusals <= 1, "refused {refusals} times");
    lease.put(entry("a", "x")).await.unwrap();
    let direct = connect(&live.endpoint(), TTL).await;
    assert!(everything(&direct).await.contains_key("a"));
    live.freeze();
    let refused = soon(discovery.get("")).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Unavailable);
    for server in [&frozen, &live] {
        assert!(
            refused.to_string().contains(&server.endpoint()),
            "{refused}"
        );
    }
}

#[tokio::test]
async fn shutdown_revokes_leases_ends_watches_and_leaves_no_task() {
    let server = EtcdServer::start().await;
    let discovery = connect(&server.endpoint(), Duration::from_secs(600)).await;
    let lease = leased(&discovery, "a", "x").await;
    let mut watch = discovery.watch("").await.unwrap();
    assert!(matches!(watch.next().await, Some(Change::Snapshot(_))));
    assert_eq!(discovery.tasks(), 2);
    soon(discovery.shutdown()).await;
    assert_eq!(discovery.tasks(), 0);
    soon(lease.lost()).await;
    assert_eq!(soon(watch.next()).await, None);
    let closed = discovery.lease().await.err().unwrap();
    assert_eq!(closed.kind(), ErrorKind::Unavailable);
    let other = connect(&server.endpoint(), TTL).await;
    assert!(everything(&other).await.is_empty());
}

#[tokio::test]
async fn dropping_handles_ends_their_tasks() {
    let server = EtcdServer::start().await;
    let discovery = connect(&server.endpoint(), Duration::from_secs(600)).await;
    let (lease, watch) = (
        discovery.lease().await.unwrap(),
        discovery.watch("").await.unwrap(),
    );
    assert_eq!(discovery.tasks(), 2);
    drop((lease, watch));
    crate::support::until(|| discovery.tasks() == 0).await;
}

#[tokio::test]
async fn an_entry_too_big_for_etcd_is_refused_and_costs_nobody_the_lease() {
    let server = EtcdServer::start().await;
    let discovery = connect(&server.endpoint(), TTL).await;
    let lease = leased(&discovery, "a", "x").await;
    // Beyond our own limit, and beyond the server's.
    for bytes in [2 << 20, (1536 << 10) - 10] {
        let big = entry("a", vec![0; bytes]);
        let refused = lease.put(big).await.unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::InvalidArgument, "{refused}");
    }
    lease.put(entry("b", "x")).await.unwrap();
    assert_eq!(everything(&discovery).await["a"], "x");
}

/// Requests keep every thread of a process busy for longer than its lease lives.
#[tokio::test]
async fn a_busy_process_keeps_its_lease() {
    const TTL: Duration = Duration::from_secs(2);
    let server = EtcdServer::start().await;
    let config = EtcdConfig {
        endpoints: vec![server.endpoint()],
        lease_ttl: TTL,
        ..EtcdConfig::default()
    };
    let process = busy_process();
    let listed = process.spawn(async move {
        let vital = VitalRuntime::start().unwrap();
        let etcd = vital.run(EtcdDiscovery::connect(config)).await.unwrap();
        let discovery = VitalDiscovery::new(Arc::new(etcd), vital);
        let lease = leased(&discovery, "a", "x").await;
        (discovery, lease)
    });
    let (_discovery, lease) = soon(listed).await.unwrap();
    let mut follower = Follower::of(&connect(&server.endpoint(), TTL).await, "").await;
    let occupied = Occupied::by_requests(&process).await;
    let heard = timeout(3 * TTL, follower.next()).await;
    assert!(heard.is_err(), "{heard:?}");
    assert!(timeout(Duration::ZERO, lease.lost()).await.is_err());
    drop(occupied);
    process.shutdown_background();
}
