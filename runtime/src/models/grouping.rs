//! Which instances serve which model: pure, from what discovery lists.

use std::collections::BTreeMap;

use genset_backend_common::ModelCard;
use serde_json::Value;

use crate::discovery::InstanceRecord;
use crate::names::{EndpointName, InstanceId};

/// A model that at least one live instance serves.
#[derive(Debug, Clone, PartialEq)]
pub struct LiveModel {
    /// What its workers publish.
    pub card: ModelCard,
    /// The endpoint that generates.
    pub endpoint: EndpointName,
    /// The instances that serve it so, by id.
    pub instances: Vec<InstanceId>,
    /// Workers of this name that are kept apart, since they publish something else.
    pub left_out: Vec<LeftOutWorker>,
}

impl LiveModel {
    /// Whether both are served alike, whoever serves them.
    #[must_use]
    pub fn is_same_service(&self, other: &Self) -> bool {
        self.card == other.card && self.endpoint == other.endpoint
    }
}

/// A worker that gets no requests, because its card is not the one in use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LeftOutWorker {
    /// The worker.
    pub instance: InstanceId,
    /// The endpoint it serves.
    pub endpoint: EndpointName,
    /// What differs, field by field, as `context_length_tokens: 4096, in use: 2048`.
    pub differences: Vec<String>,
}

/// The models, by name.
pub(super) type ModelMap = BTreeMap<String, LiveModel>;

/// The models of `records`. Where cards of one name disagree, the one that is in use stays while anybody publishes it;
/// otherwise the one most workers publish is used.
pub(super) fn by_model<'a>(
    records: impl Iterator<Item = &'a InstanceRecord>,
    in_use: &ModelMap,
) -> ModelMap {
    let mut services: BTreeMap<String, Vec<LiveModel>> = BTreeMap::new();
    for record in records {
        if let Some(card) = &record.card {
            let services = services.entry(card.name.clone()).or_default();
            join(services, record, card);
        }
    }
    services
        .into_iter()
        .filter_map(|(name, services)| {
            let chosen = choose(services, in_use.get(&name))?;
            Some((name, chosen))
        })
        .collect()
}

/// Adds an instance to the service that it is part of.
fn join(services: &mut Vec<LiveModel>, record: &InstanceRecord, card: &ModelCard) {
    let same = services
        .iter_mut()
        .find(|service| service.card == *card && service.endpoint == record.endpoint);
    match same {
        Some(service) => service.instances.push(record.instance),
        None => services.push(LiveModel {
            card: card.clone(),
            endpoint: record.endpoint.clone(),
            instances: vec![record.instance],
            left_out: Vec::new(),
        }),
    }
}

fn choose(mut services: Vec<LiveModel>, in_use: Option<&LiveModel>) -> Option<LiveModel> {
    let known = in_use.and_then(|in_use| {
        services
            .iter()
            .position(|service| service.is_same_service(in_use))
    });
    // Of equals, the first: records come in the order of their keys, so every frontend chooses alike.
    let largest = || {
        let sizes = services.iter().map(|service| service.instances.len());
        sizes
            .enumerate()
            .rev()
            .max_by_key(|(_, size)| *size)
            .map(|(index, _)| index)
    };
    let index = known.or_else(largest)?;
    let mut chosen = services.swap_remove(index);
    chosen.instances.sort_unstable();
    for other in &services {
        let differences = differences(other, &chosen);
        let left_out = other.instances.iter().map(|instance| LeftOutWorker {
            instance: *instance,
            endpoint: other.endpoint.clone(),
            differences: differences.clone(),
        });
        chosen.left_out.extend(left_out);
    }
    chosen
        .left_out
        .sort_unstable_by_key(|worker| worker.instance);
    Some(chosen)
}

/// What `other` publishes that `chosen` does not, or otherwise.
fn differences(other: &LiveModel, chosen: &LiveModel) -> Vec<String> {
    let mut differences = Vec::new();
    if other.endpoint != chosen.endpoint {
        differences.push(format!(
            "endpoint: {}, in use: {}",
            other.endpoint, chosen.endpoint
        ));
    }
    let fields = |card: &ModelCard| match serde_json::to_value(card) {
        Ok(Value::Object(fields)) => fields,
        Ok(_) | Err(_) => serde_json::Map::new(),
    };
    let (theirs, ours) = (fields(&other.card), fields(&chosen.card));
    let null = Value::Null;
    let names: std::collections::BTreeSet<&String> = theirs.keys().chain(ours.keys()).collect();
    for name in names {
        let (their, our) = (
            theirs.get(name).unwrap_or(&null),
            ours.get(name).unwrap_or(&null),
        );
        if their != our {
            differences.push(format!("{name}: {their}, in use: {our}"));
        }
    }
    differences
}

#[cfg(test)]
mod tests {
    use genset_backend_common::EngineConfig;

    use super::*;
    use crate::discovery::Address;

    fn record(instance: u64, context: u32) -> InstanceRecord {
        InstanceRecord {
            endpoint: EndpointName::default(),
            instance: InstanceId(instance),
            address: Address {
                plane: "memory".into(),
                location: instance.to_string(),
            },
            card: Some(ModelCard::from_config(&EngineConfig::new("m", context))),
        }
    }

    fn the_model(records: &[InstanceRecord], in_use: &ModelMap) -> LiveModel {
        by_model(records.iter(), in_use).remove("m").unwrap()
    }

    #[test]
    fn workers_that_agree_serve_together() {
        let model = the_model(&[record(1, 10), record(2, 10)], &ModelMap::new());
        assert_eq!(model.instances, [InstanceId(1), InstanceId(2)]);
        assert!(model.left_out.is_empty());
    }

    #[test]
    fn the_majority_is_used_and_the_others_are_named_with_what_differs() {
        let records = [record(1, 20), record(2, 10), record(3, 10)];
        let model = the_model(&records, &ModelMap::new());
        assert_eq!(model.card.context_length_tokens, 10);
        let [left_out] = &model.left_out[..] else {
            panic!("one is left out")
        };
        assert_eq!(left_out.instance, InstanceId(1));
        assert_eq!(
            left_out.differences,
            ["context_length_tokens: 20, in use: 10"]
        );
    }

    #[test]
    fn what_is_in_use_stays_while_anybody_publishes_it() {
        let first = by_model([record(9, 10)].iter(), &ModelMap::new());
        let records = [record(1, 20), record(2, 20), record(9, 10)];
        assert_eq!(the_model(&records, &first).card.context_length_tokens, 10);
        let without = the_model(&records[..2], &first);
        assert_eq!(without.card.context_length_tokens, 20);
        assert!(without.left_out.is_empty());
    }

    #[test]
    fn equals_are_chosen_alike_everywhere() {
        let model = the_model(&[record(1, 20), record(2, 10)], &ModelMap::new());
        assert_eq!(model.card.context_length_tokens, 20);
    }
}
