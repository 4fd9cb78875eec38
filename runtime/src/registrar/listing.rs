//! [`Listing`]: how an instance stands in discovery, and the task that publishes its adapters there.

use std::sync::Arc;
use std::time::Duration;

use genset_backend_common::{EngineError, ModelCard, controls::Adapter};
use parking_lot::Mutex;
use tokio::sync::{Notify, watch};

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
    /// One lease for all endpoints: they appear, end and are lost together.
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
        loop {
            tokio::select! {
                changed = adapters.changed() => if changed.is_err() {
                    return;
                },
                () = self.is_old.notified() => {}
            }
            while let Err(error) = self.refresh().await {
                tracing::warn!(%error, "the adapters cannot be published in discovery yet");
                tokio::time::sleep(ADAPTERS_PAUSE).await;
            }
        }
    }

    /// Lists the current state again.
    async fn refresh(&self) -> Result<(), EngineError> {
        let lease = self.lease.lock().clone();
        let Some(lease) = lease else { return Ok(()) };
        match self.record().to_entry() {
            Ok(entry) => lease.put(entry).await,
            Err(error) => {
                tracing::error!(%error, "the adapters are not published in discovery");
                Ok(())
            }
        }
    }
}
