//! The content of discovery: one [`InstanceRecord`] for each routable instance, and [`Records`], which reads them.
//!
//! A writer to discovery may write anything, so readers check a record against its key and against limits before they trust it.
//! An invalid record is ignored.

use std::fmt;

use genset_backend_common::log_limit::OncePerMinute;
use genset_backend_common::prometheus::metrics::counter::Counter;
use genset_backend_common::prometheus::metrics::family::Family;
use genset_backend_common::{
    EngineError, MetricsRegistry, ModelCard, config::MAX_DATA_PARALLEL_SIZE, error::At,
};
use serde::{Deserialize, Serialize};

use super::{Entry, prefix_of};
use crate::names::{EndpointName, InstanceId};

/// The maximum size of a record in bytes, its card included.
pub const MAX_RECORD_BYTES: usize = 1 << 20;

/// The address of an instance.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Address {
    /// The request plane, by name.
    pub plane: String,
    /// The plane's locator of the instance.
    pub location: String,
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}://{}", self.plane, self.location)
    }
}

/// A routable instance, as discovery holds it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct InstanceRecord {
    /// The endpoint it serves.
    pub endpoint: EndpointName,
    /// The id of the instance.
    pub instance: InstanceId,
    /// Its address.
    pub address: Address,
    /// The model it serves, for endpoints that generate.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub card: Option<ModelCard>,
    /// When it started to serve, in milliseconds since the Unix epoch by its own clock; 0 if unknown.
    #[serde(default)]
    pub started_ms: u64,
}

impl InstanceRecord {
    /// The number of its data-parallel ranks, from its card: 1 to [`MAX_DATA_PARALLEL_SIZE`].
    #[must_use]
    pub fn ranks(&self) -> u32 {
        let ranks = self.card.as_ref().map_or(1, |card| card.data_parallel_size);
        ranks.clamp(1, MAX_DATA_PARALLEL_SIZE)
    }
}

/// Why an entry of discovery is ignored.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RecordProblem {
    /// It has more than [`MAX_RECORD_BYTES`].
    #[error("it has {bytes} bytes, and may have {MAX_RECORD_BYTES}")]
    TooLong {
        /// Its length.
        bytes: usize,
    },
    /// It is not a record.
    #[error("it cannot be read: {0}")]
    Unreadable(#[source] serde_json::Error),
    /// It names another endpoint or instance than its key: a writer of one key must not speak for others.
    #[error("it names {named}, but its key names another endpoint or instance")]
    OtherKey {
        /// The key of what it names.
        named: String,
    },
    /// Its card has a name or an alias that no model may have.
    #[error("its card is refused: {0}")]
    Names(#[source] EngineError),
    /// Its card names more artifacts than a model may have.
    #[error("its card is refused: {0}")]
    Artifacts(#[source] EngineError),
    /// Its card names adapters that are not allowed.
    #[error("its card is refused: {0}")]
    Adapters(#[source] EngineError),
}

impl RecordProblem {
    /// All labels in metrics.
    const LABELS: [&'static str; 6] = [
        "too_long",
        "unreadable",
        "other_key",
        "names",
        "artifacts",
        "adapters",
    ];

    fn label(&self) -> &'static str {
        match self {
            Self::TooLong { .. } => "too_long",
            Self::Unreadable(_) => "unreadable",
            Self::OtherKey { .. } => "other_key",
            Self::Names(_) => "names",
            Self::Artifacts(_) => "artifacts",
            Self::Adapters(_) => "adapters",
        }
    }
}

impl InstanceRecord {
    /// The entry to put.
    ///
    /// # Errors
    /// `InvalidArgument` if readers would ignore the entry because of its length or its card; `Internal` if the card
    /// holds values that JSON cannot.
    pub fn to_entry(&self) -> Result<Entry, EngineError> {
        if let Some(card) = &self.card {
            card.check_names()?;
            card.check_artifacts()?;
            card.check_adapters()?;
        }
        let value = serde_json::to_vec(self).map_err(|error| {
            EngineError::internal("the model card cannot be written as JSON").with_source(error)
        })?;
        if value.len() > MAX_RECORD_BYTES {
            let problem = format!(
                "makes a record of {} bytes, and one may have {MAX_RECORD_BYTES}; make its user_data smaller",
                value.len()
            );
            return Err(EngineError::invalid_argument(
                At::other("model card"),
                problem,
            ));
        }
        Ok(Entry {
            key: self.key(),
            value: value.into(),
        })
    }

    /// Reads the record in an entry.
    ///
    /// # Errors
    /// [`RecordProblem`], for an entry to ignore.
    pub fn try_from_entry(entry: &Entry) -> Result<Self, RecordProblem> {
        let bytes = entry.value.len();
        if bytes > MAX_RECORD_BYTES {
            return Err(RecordProblem::TooLong { bytes });
        }
        let record: Self =
            serde_json::from_slice(&entry.value).map_err(RecordProblem::Unreadable)?;
        let named = record.key();
        if named != entry.key {
            return Err(RecordProblem::OtherKey { named });
        }
        if let Some(card) = &record.card {
            card.check_names().map_err(RecordProblem::Names)?;
            card.check_artifacts().map_err(RecordProblem::Artifacts)?;
            card.check_adapters().map_err(RecordProblem::Adapters)?;
        }
        Ok(record)
    }

    /// The key of the record.
    #[must_use]
    pub fn key(&self) -> String {
        format!("{}{}", prefix_of(&self.endpoint), self.instance)
    }
}

/// Reads records for the clients of a process and counts the ignored ones. Clones share state.
#[derive(Debug, Clone, Default)]
pub(crate) struct Records {
    refused: Family<[(&'static str, &'static str); 1], Counter>,
    logged: OncePerMinute,
}

impl Records {
    pub(crate) fn register(registry: &MetricsRegistry) -> Self {
        let records = Self::default();
        for label in RecordProblem::LABELS {
            drop(records.refused.get_or_create(&[("reason", label)]));
        }
        registry.register(
            "genset_discovery_refused_records",
            "Entries of discovery that were left out",
            records.refused.clone(),
        );
        records
    }

    /// The record in an entry; `None` for an entry to ignore, which is logged at most once a minute.
    pub(crate) fn read(&self, entry: &Entry) -> Option<InstanceRecord> {
        let problem = match InstanceRecord::try_from_entry(entry) {
            Ok(record) => return Some(record),
            Err(problem) => problem,
        };
        let reason = problem.label();
        self.refused.get_or_create(&[("reason", reason)]).inc();
        if self.logged.may_log(reason) {
            tracing::warn!(key = entry.key, %problem, "an entry of discovery is left out; further ones for this reason are counted only");
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use genset_backend_common::{EngineConfig, card::ArtifactRef};
    use proptest::prelude::*;

    use super::*;

    fn name() -> impl Strategy<Value = EndpointName> {
        // Few names, so that records collide with the keys of others.
        ("[ab]", "[ab]", "[ab]").prop_map(|(namespace, component, endpoint)| {
            EndpointName::try_new(&namespace, &component, &endpoint).unwrap()
        })
    }

    fn record() -> impl Strategy<Value = InstanceRecord> {
        (name(), 1..3_u64).prop_map(|(endpoint, instance)| InstanceRecord {
            endpoint,
            instance: InstanceId(instance),
            address: Address {
                plane: "tcp".into(),
                location: "127.0.0.1:1/1".into(),
            },
            card: None,
            started_ms: 0,
        })
    }

    fn artifact(size: u64) -> ArtifactRef {
        ArtifactRef {
            name: "tokenizer.json".into(),
            blake3: "0".repeat(64),
            size,
        }
    }

    fn with_artifacts(artifacts: Vec<ArtifactRef>) -> Entry {
        let mut card = ModelCard::from_config(&EngineConfig::new("m", 10));
        card.artifacts = artifacts;
        with_card(card)
    }

    fn with_card(card: ModelCard) -> Entry {
        let record = InstanceRecord {
            endpoint: EndpointName::default(),
            instance: InstanceId(1),
            address: Address {
                plane: "tcp".into(),
                location: "127.0.0.1:1/1".into(),
            },
            card: Some(card),
            started_ms: 0,
        };
        Entry {
            key: record.key(),
            value: serde_json::to_vec(&record).unwrap().into(),
        }
    }

    proptest! {
        /// A record is accepted under its own key and under no other.
        #[test]
        fn a_record_is_believed_under_its_own_key_alone(written in record(), place in record()) {
            let entry = Entry { key: place.key(), ..written.to_entry().unwrap() };
            let believed = InstanceRecord::try_from_entry(&entry);
            if written.key() == place.key() {
                prop_assert_eq!(believed.unwrap(), written);
            } else {
                let is_refused = matches!(believed, Err(RecordProblem::OtherKey { .. }));
                prop_assert!(is_refused);
            }
        }

        #[test]
        fn any_value_is_refused_without_a_panic(value in any::<Vec<u8>>()) {
            let entry = Entry { key: "genset/v1/instances/a/b/c/00000000000001".into(), value: value.into() };
            prop_assert!(InstanceRecord::try_from_entry(&entry).is_err());
        }
    }

    #[test]
    fn cards_that_name_too_much_to_fetch_are_refused() {
        for (artifacts, reason) in [
            (vec![artifact(u64::MAX)], "18446744073709551615 bytes"),
            (vec![artifact((64 << 20) + 1)], "67108865 bytes"),
            (vec![artifact(0); 17], "are 17"),
            (vec![artifact(64 << 20); 3], "201326592 bytes together"),
        ] {
            let refused = InstanceRecord::try_from_entry(&with_artifacts(artifacts)).unwrap_err();
            assert!(refused.to_string().contains(reason), "{refused}");
        }
        let most = with_artifacts(vec![artifact(64 << 20); 2]);
        InstanceRecord::try_from_entry(&most).unwrap();
    }

    #[test]
    fn cards_with_a_name_that_no_log_should_show_are_refused() {
        let card = ModelCard::from_config(&EngineConfig::new("m", 10));
        for name in ["", "\u{1b}[31m\n", "a".repeat(100_000).as_str()] {
            let named = ModelCard {
                name: name.into(),
                ..card.clone()
            };
            let also_named = ModelCard {
                aliases: vec![name.into()],
                ..card.clone()
            };
            for card in [named, also_named] {
                let refused = InstanceRecord::try_from_entry(&with_card(card)).unwrap_err();
                assert!(matches!(refused, RecordProblem::Names(_)), "{refused}");
            }
        }
    }

    #[test]
    fn refusals_are_counted_by_reason() {
        let registry = MetricsRegistry::default();
        let records = Records::register(&registry);
        let long = Entry {
            key: "k".into(),
            value: vec![b' '; MAX_RECORD_BYTES + 1].into(),
        };
        for _ in 0..100 {
            assert_eq!(records.read(&long), None);
        }
        let text = registry.encode();
        let counted = "genset_discovery_refused_records_total{reason=\"too_long\"} 100";
        assert!(text.contains(counted), "{text}");
    }
}
