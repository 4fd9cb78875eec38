//! The behaviour suite on discovery inside one process.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use genset_runtime::discovery::{Discovery, Entry, Lease, MemoryDiscovery};

use super::suite::{Backend, Victim, discovery_suite};

discovery_suite!(behaviour, MemoryBackend(MemoryDiscovery::new()));

/// Every connection is a clone, since there is only one process.
struct MemoryBackend(MemoryDiscovery);

#[async_trait]
impl Backend for MemoryBackend {
    async fn connect(&self) -> Arc<dyn Discovery> {
        Arc::new(self.0.clone())
    }

    async fn victim(&self, entries: Vec<Entry>) -> Box<dyn Victim> {
        let lease = self.0.lease().await.unwrap();
        for entry in entries {
            lease.put(entry).await.unwrap();
        }
        Box::new(MemoryVictim(lease))
    }

    fn can_be_away(&self) -> bool {
        false
    }

    async fn begin_outage(&self) {}

    async fn end_outage(&self) {}

    async fn take_leases_away(&self) {
        self.0.expire_leases();
    }

    fn dead_lease_stays(&self) -> Duration {
        Duration::ZERO
    }
}

/// The nearest to a crash inside one process: the lease is dropped without notice.
struct MemoryVictim(Box<dyn Lease>);

#[async_trait]
impl Victim for MemoryVictim {
    async fn kill(self: Box<Self>) {
        drop(self.0);
    }
}
