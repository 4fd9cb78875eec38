//! [`Listing`]: how an instance stands in discovery, and the task that publishes its adapters there.

use std::sync::Arc;
use std::time::Duration;

use genset_backend_common::{EngineError, ModelCard, controls::Adapter, log_limit::OncePerMinute};
use tokio::sync::{Mutex, Notify, watch};

use crate::discovery::{InstanceRecord, Lease};

/// Pause before retrying to list adapters.
const ADAPTERS_PAUSE: Duration = Duration::from_secs(1);

/// The records and the lease of an instance.
pub(super) struct Listing {
    /// Without a card.
    pub(super) record: InstanceRecord,
    /// Without adapters.
    pub(super) card: ModelCard,
    pub(super) adapters: watch::Receiver<Vec<Adapter>>,
    /// One lease for all endpoints: they appear, end and are lost together. Locked while adapters are published, so that an
    /// instance that was unlisted is not listed again.
    pub(super) lease: Mutex<Option<Arc<dyn Lease>>>,
    /// Notified when the instance was listed with outdated adapters.
    pub(super) is_old: Notify,
}

impl Listing {
    /// The record of `generate`, with the current adapters.
    pub(super) fn record(&self) -> InstanceRecord {
        let card = ModelCard {
            adapters: self.adapters.borrow().clone(),
            ..self.card.clone()
        };
        InstanceRecord {
            card: Some(card),
            ..self.record.clone()
        }
    }

    /// Updates discovery whenever adapters come and go, while the instance is listed.
    pub(super) async fn follow_adapters(self: Arc<Self>) {
        let mut adapters = self.adapters.clone();
        let logged = OncePerMinute::default();
        loop {
            tokio::select! {
                changed = adapters.changed() => if changed.is_err() {
                    return;
                },
                () = self.is_old.notified() => {}
            }
            while let Err(error) = self.refresh().await {
                if let Some(unlogged) = logged.unlogged("not published") {
                    tracing::warn!(%error, unlogged, "the adapters cannot be published in discovery yet; further failures are only counted for a minute");
                }
                tokio::time::sleep(ADAPTERS_PAUSE).await;
            }
        }
    }

    /// Lists the current state again.
    async fn refresh(&self) -> Result<(), EngineError> {
        let lease = self.lease.lock().await;
        let Some(lease) = &*lease else { return Ok(()) };
        match self.record().to_entry() {
            Ok(entry) => lease.put(entry).await,
            Err(error) => {
                tracing::error!(%error, "the adapters are not published in discovery");
                Ok(())
            }
        }
    }

    /// Unlists `records`, the last one first.
    pub(super) async fn unlist(&self, records: &[InstanceRecord]) -> Result<(), EngineError> {
        let lease = self.lease.lock().await.take();
        let Some(lease) = lease else { return Ok(()) };
        for record in records.iter().rev() {
            lease.remove(&record.key()).await?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use futures_util::future;
    use genset_backend_common::EngineConfig;

    use super::*;
    use crate::discovery::gated::GatedDiscovery;
    use crate::discovery::{Address, Discovery};
    use crate::names::{EndpointName, InstanceId};

    #[tokio::test]
    async fn an_instance_that_is_unlisted_while_its_adapters_are_published_does_not_stay_listed() {
        let discovery = GatedDiscovery::new();
        let lease: Arc<dyn Lease> = Arc::from(discovery.lease().await.unwrap());
        let record = InstanceRecord {
            endpoint: EndpointName::default(),
            instance: InstanceId(1),
            address: Address {
                plane: "memory".into(),
                location: "1".into(),
            },
            card: None,
            started_ms: 0,
        };
        let listing = Listing {
            record: record.clone(),
            card: ModelCard::from_config(&EngineConfig::new("m", 10)),
            adapters: watch::channel(Vec::new()).1,
            lease: Mutex::new(Some(Arc::clone(&lease))),
            is_old: Notify::new(),
        };
        let records = [record];
        let open = async { discovery.open() };
        let all = future::join3(listing.refresh(), listing.unlist(&records), open);
        let (refreshed, unlisted, ()) = all.await;
        refreshed.unwrap();
        unlisted.unwrap();
        assert!(discovery.get("").await.unwrap().is_empty());
    }
}
