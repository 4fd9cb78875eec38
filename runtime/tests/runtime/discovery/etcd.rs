//! Discovery in etcd, against real servers that each test starts, kills, freezes and cuts off.

mod admin;
mod leases;
mod network;
mod security;
mod server;
mod watches;
mod workers;

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use genset_runtime::discovery::{Discovery, Entry, EtcdConfig, EtcdDiscovery};
use tokio::sync::Mutex;

use self::server::EtcdServer;
use super::child::offering;
use super::suite::{Backend, Victim, discovery_suite};

/// Long enough for a loaded machine to send its keep-alives in time.
pub(super) const TTL: Duration = Duration::from_secs(5);

discovery_suite!(suite, EtcdBackend::start().await);

/// A discovery of its own on `endpoint`.
pub(super) async fn connect(endpoint: &str, lease_ttl: Duration) -> EtcdDiscovery {
    let config = EtcdConfig {
        endpoints: vec![endpoint.into()],
        lease_ttl,
        ..EtcdConfig::default()
    };
    EtcdDiscovery::connect(config).await.unwrap()
}

struct EtcdBackend(Mutex<EtcdServer>);

impl EtcdBackend {
    async fn start() -> Self {
        Self(Mutex::new(EtcdServer::start().await))
    }
}

#[async_trait]
impl Backend for EtcdBackend {
    async fn connect(&self) -> Arc<dyn Discovery> {
        Arc::new(connect(&self.0.lock().await.endpoint(), TTL).await)
    }

    async fn victim(&self, entries: Vec<Entry>) -> Box<dyn Victim> {
        let store = format!("etcd:{}", self.0.lock().await.address());
        Box::new(offering(&store, entries).await)
    }

    async fn begin_outage(&self) {
        self.0.lock().await.kill();
    }

    async fn end_outage(&self) {
        self.0.lock().await.restart().await;
    }

    async fn take_leases_away(&self) {
        self.0.lock().await.admin().revoke_all_leases().await;
    }

    fn dead_lease_stays(&self) -> Duration {
        // Servers check for expired leases twice a second.
        TTL + Duration::from_millis(500)
    }
}
