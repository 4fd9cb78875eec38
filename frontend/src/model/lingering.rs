//! [`Lingering`]: models that lost their last worker a moment ago. Replaced workers are back soon, so clients are asked to
//! retry instead of hearing that the model does not exist.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use genset_backend_common::ModelCard;
use parking_lot::Mutex;
use tokio::time::Instant;

/// The most names that are kept. Workers choose them.
const MAX_NAMES: usize = 1024;

/// The names of models that were ready and are gone. Clones share them.
#[derive(Debug, Clone)]
pub(super) struct Lingering {
    time: Duration,
    until: Arc<Mutex<BTreeMap<String, Instant>>>,
}

impl Lingering {
    /// Each model lingers for `time`.
    pub(super) fn new(time: Duration) -> Self {
        Self {
            time,
            until: Arc::default(),
        }
    }

    /// Notes that the last worker of a model has gone.
    pub(super) fn gone(&self, card: &ModelCard) {
        let now = Instant::now();
        let mut until = self.until.lock();
        until.retain(|_, ends| now < *ends);
        for name in std::iter::once(&card.name).chain(&card.aliases) {
            if until.len() < MAX_NAMES {
                until.insert(name.clone(), now + self.time);
            }
        }
    }

    /// Until when the model with this name or alias is expected back, if it still is.
    pub(super) fn expected_until(&self, name: &str) -> Option<Instant> {
        let until = self.until.lock().get(name).copied()?;
        (Instant::now() < until).then_some(until)
    }

    /// Whether any model is expected back.
    pub(super) fn any(&self) -> bool {
        let now = Instant::now();
        let mut until = self.until.lock();
        until.retain(|_, ends| now < *ends);
        !until.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use genset_backend_common::EngineConfig;

    use super::*;

    fn card(name: &str, aliases: &[&str]) -> ModelCard {
        let mut card = ModelCard::from_config(&EngineConfig::new(name, 8));
        card.aliases = aliases.iter().map(|alias| (*alias).to_owned()).collect();
        card
    }

    #[tokio::test(start_paused = true)]
    async fn a_model_lingers_by_each_of_its_names_and_for_its_time() {
        let lingering = Lingering::new(Duration::from_secs(2));
        lingering.gone(&card("m", &["alias"]));
        let ends = Instant::now() + Duration::from_secs(2);
        for name in ["m", "alias"] {
            assert_eq!(lingering.expected_until(name), Some(ends));
        }
        assert!(lingering.any());
        assert_eq!(lingering.expected_until("other"), None);
        tokio::time::advance(Duration::from_secs(2)).await;
        assert_eq!(lingering.expected_until("m"), None);
        assert!(!lingering.any());
    }

    #[tokio::test(start_paused = true)]
    async fn workers_cannot_fill_it_with_names() {
        let lingering = Lingering::new(Duration::from_secs(2));
        for number in 0..2 * MAX_NAMES {
            lingering.gone(&card(&format!("m{number}"), &[]));
        }
        assert_eq!(lingering.until.lock().len(), MAX_NAMES);
        tokio::time::advance(Duration::from_secs(2)).await;
        lingering.gone(&card("m", &[]));
        assert_eq!(lingering.until.lock().len(), 1);
    }
}
