//! Groups instances into models, from the records of discovery. Pure.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use genset_backend_common::{ModelCard, Role, controls::Adapter};
use serde_json::{Map, Value};

use crate::discovery::InstanceRecord;
use crate::names::{EndpointName, InstanceId};

/// A model with at least one live instance.
#[derive(Debug, Clone, PartialEq)]
pub struct LiveModel {
    /// The card that its workers publish, as an aggregated worker would: the pools hold the roles.
    pub card: ModelCard,
    /// The instances that serve it with this card, by role; at least one pool.
    pub pools: BTreeMap<Role, Pool>,
    /// LoRA adapters of the instances that finish responses, by name. Not every instance has each.
    pub adapters: BTreeMap<String, Adapter>,
    /// Workers of this name that are kept apart because their card differs.
    pub left_out: Vec<LeftOutWorker>,
    /// What those workers serve, by card and endpoint: a request that began on one of these may continue there.
    pub others: Vec<LiveModel>,
}

/// The instances of a model that play one role.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pool {
    /// The endpoint that generates.
    pub endpoint: EndpointName,
    /// The instances, by id; at least one.
    pub instances: Vec<InstanceId>,
}

impl LiveModel {
    /// Whether both are the same service, whichever instances serve it. If prefill and decode can be separate, pools may come and
    /// go.
    #[must_use]
    pub fn is_same_service(&self, other: &Self) -> bool {
        let can_be_apart = self.card.capabilities.can_be_apart();
        self.card == other.card && (can_be_apart || self.endpoint() == other.endpoint())
    }

    /// Whether there are instances that take whole requests: prefill instances alone yield one token.
    #[must_use]
    pub fn is_servable(&self) -> bool {
        self.whole_role() != Role::Prefill
    }

    /// The role of the instances that finish responses.
    #[must_use]
    pub fn whole_role(&self) -> Role {
        let order = [Role::Aggregated, Role::Decode];
        let found = order.into_iter().find(|role| self.pools.contains_key(role));
        found.unwrap_or(Role::Prefill)
    }

    /// The endpoint of the instances that finish responses.
    #[must_use]
    pub fn endpoint(&self) -> EndpointName {
        let pool = self.pools.get(&self.whole_role());
        pool.map(|pool| pool.endpoint.clone()).unwrap_or_default()
    }

    /// The service with `card`: this one, or that of left-out workers.
    #[must_use]
    pub fn by_card(&self, card: &ModelCard) -> Option<&Self> {
        let mut all = std::iter::once(self).chain(&self.others);
        all.find(|service| service.card == *card)
    }

    /// All instances, whatever their role, by id.
    #[must_use]
    pub fn instances(&self) -> Vec<InstanceId> {
        let pools = self.pools.values();
        let mut all: Vec<InstanceId> = pools.flat_map(|pool| pool.instances.clone()).collect();
        all.sort_unstable();
        all
    }

    /// Adds the instances of a group to the pool of its role.
    fn take(&mut self, group: Group) {
        // A prefill instance yields one token, so an adapter that only it has cannot serve a response.
        if group.role != Role::Prefill {
            self.adapters.extend(group.adapters);
        }
        self.pools.insert(group.role, group.pool);
    }

    /// The total number of its instances.
    pub(super) fn size(&self) -> usize {
        self.pools.values().map(|pool| pool.instances.len()).sum()
    }
}

/// A worker whose card differs from the model's: it gets no new requests once clients are ready for that card.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LeftOutWorker {
    /// The worker.
    pub instance: InstanceId,
    /// The endpoint it serves.
    pub endpoint: EndpointName,
    /// The differing fields, each as `context_length_tokens: 4096, in use: 2048` or `capabilities.adapters: true, in use: false`.
    pub differences: Vec<String>,
}

/// The models, by name.
pub(super) type ModelMap = BTreeMap<String, LiveModel>;

/// Instances of one endpoint that publish the same card, except for the role.
#[derive(Debug)]
struct Group {
    card: ModelCard,
    role: Role,
    pool: Pool,
    /// Adapters of any of the instances.
    adapters: BTreeMap<String, Adapter>,
    /// When the first of the instances started to serve, according to its record.
    started_ms: u64,
}

/// The models of `records`, which arrive in key order. If cards of one name differ, the one that most workers publish
/// is used; among equals, the one published first. One that cannot be served yields to one that can. The previous choice
/// does not count: all readers of the same records choose alike.
pub(super) fn by_model<'a>(records: impl Iterator<Item = &'a InstanceRecord>) -> ModelMap {
    let mut groups: BTreeMap<String, Vec<Group>> = BTreeMap::new();
    for record in records {
        if let Some(card) = &record.card {
            let groups = groups.entry(card.name.clone()).or_default();
            join(groups, record, card);
        }
    }
    groups
        .into_iter()
        .filter_map(|(name, groups)| {
            let chosen = choose(groups)?;
            Some((name, chosen))
        })
        .collect()
}

/// Adds an instance to its group.
fn join(groups: &mut Vec<Group>, record: &InstanceRecord, card: &ModelCard) {
    let role = card.role;
    let named = |adapter: &Adapter| (adapter.name.clone(), adapter.clone());
    let adapters = card.adapters.iter().map(named);
    let card = card.in_common();
    let same = groups.iter_mut().find(|group| {
        (group.role, &group.card, &group.pool.endpoint) == (role, &card, &record.endpoint)
    });
    match same {
        Some(group) => {
            group.pool.instances.push(record.instance);
            group.adapters.extend(adapters);
            group.started_ms = group.started_ms.min(record.started_ms);
        }
        None => groups.push(Group {
            card,
            role,
            pool: Pool {
                endpoint: record.endpoint.clone(),
                instances: vec![record.instance],
            },
            adapters: adapters.collect(),
            started_ms: record.started_ms,
        }),
    }
}

/// Groups of one card; the largest of each role serves.
struct Service {
    model: LiveModel,
    rest: Vec<Group>,
    started_ms: u64,
}

fn choose(mut groups: Vec<Group>) -> Option<LiveModel> {
    let mut services: Vec<Service> = Vec::new();
    // Largest first: the first group of a role becomes its pool.
    groups.sort_by_key(|group| Reverse((group.pool.instances.len(), Reverse(group.started_ms))));
    for group in groups {
        let mut known = services.iter_mut();
        let known = known.find(|service| service.model.card == group.card);
        match known {
            Some(service) if service.model.pools.contains_key(&group.role) => {
                service.rest.push(group);
            }
            Some(service) => service.take(group),
            None => services.push(Service::of(group)),
        }
    }
    let rank = |service: &Service| {
        let model = &service.model;
        let first = Reverse(service.started_ms);
        (model.is_servable(), model.size(), first)
    };
    let ranks = services.iter().map(rank).enumerate();
    let (index, _) = ranks.rev().max_by_key(|(_, rank)| *rank)?;
    let Service {
        model: mut chosen,
        rest,
        ..
    } = services.swap_remove(index);
    for pool in chosen.pools.values_mut() {
        pool.instances.sort_unstable();
    }
    let alone = |group: Group| Service::of(group).model;
    let mut others: Vec<LiveModel> = rest.into_iter().map(alone).collect();
    for Service { model, rest, .. } in services {
        others.push(model);
        others.extend(rest.into_iter().map(alone));
    }
    chosen.left_out = others
        .iter()
        .flat_map(|other| left_out(other, &chosen))
        .collect();
    chosen
        .left_out
        .sort_unstable_by_key(|worker| worker.instance);
    chosen.others = others;
    Some(chosen)
}

impl Service {
    fn of(group: Group) -> Self {
        let model = LiveModel {
            card: group.card.clone(),
            pools: BTreeMap::new(),
            adapters: BTreeMap::new(),
            left_out: Vec::new(),
            others: Vec::new(),
        };
        let mut service = Self {
            model,
            rest: Vec::new(),
            started_ms: group.started_ms,
        };
        service.take(group);
        service
    }

    fn take(&mut self, group: Group) {
        self.started_ms = self.started_ms.min(group.started_ms);
        self.model.take(group);
    }
}

/// The workers of `other`, each with its differences.
fn left_out(other: &LiveModel, chosen: &LiveModel) -> Vec<LeftOutWorker> {
    let workers = other.pools.iter().flat_map(|(role, pool)| {
        let differences = differences(&other.card, *role, pool, chosen);
        pool.instances.iter().map(move |instance| LeftOutWorker {
            instance: *instance,
            endpoint: pool.endpoint.clone(),
            differences: differences.clone(),
        })
    });
    workers.collect()
}

/// The fields of a pool's card that differ from those of `chosen`.
fn differences(card: &ModelCard, role: Role, pool: &Pool, chosen: &LiveModel) -> Vec<String> {
    let mut differences = Vec::new();
    let endpoint = chosen.pools.get(&role).map(|pool| &pool.endpoint);
    if let Some(endpoint) = endpoint.filter(|endpoint| **endpoint != pool.endpoint) {
        differences.push(format!("endpoint: {}, in use: {endpoint}", pool.endpoint));
    }
    let fields = |card: &ModelCard| match serde_json::to_value(card) {
        Ok(Value::Object(fields)) => fields,
        Ok(_) | Err(_) => Map::new(),
    };
    compare("", &fields(card), &fields(&chosen.card), &mut differences);
    differences
}

/// Adds the fields under `path` that differ, those of objects one by one.
fn compare(
    path: &str,
    theirs: &Map<String, Value>,
    ours: &Map<String, Value>,
    differences: &mut Vec<String>,
) {
    let null = Value::Null;
    let names: BTreeSet<&String> = theirs.keys().chain(ours.keys()).collect();
    for name in names {
        let (their, our) = (
            theirs.get(name).unwrap_or(&null),
            ours.get(name).unwrap_or(&null),
        );
        match (their, our) {
            (their, our) if their == our => {}
            (Value::Object(their), Value::Object(our)) => {
                compare(&format!("{path}{name}."), their, our, differences);
            }
            (their, our) => differences.push(format!("{path}{name}: {their}, in use: {our}")),
        }
    }
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
            started_ms: instance,
        }
    }

    fn the_model(records: &[InstanceRecord]) -> LiveModel {
        by_model(records.iter()).remove("m").unwrap()
    }

    #[test]
    fn workers_that_agree_serve_together() {
        let model = the_model(&[record(1, 10), record(2, 10)]);
        assert_eq!(model.instances(), [InstanceId(1), InstanceId(2)]);
        assert!(model.left_out.is_empty());
    }

    #[test]
    fn the_majority_is_used_and_the_others_are_named_with_what_differs() {
        let records = [record(1, 20), record(2, 10), record(3, 10)];
        let model = the_model(&records);
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
    fn of_capabilities_those_that_differ_are_named() {
        let mut other = record(3, 10);
        other.card.as_mut().unwrap().capabilities.max_logprobs = Some(20);
        let model = the_model(&[record(1, 10), record(2, 10), other]);
        let [left_out] = &model.left_out[..] else {
            panic!("one is left out")
        };
        assert_eq!(
            left_out.differences,
            ["capabilities.max_logprobs: 20, in use: null"]
        );
    }

    #[test]
    fn workers_that_differ_in_their_adapters_alone_serve_together() {
        let having = |instance, role, names: &[&str]| {
            let mut record = record_as(role, instance, 10);
            let adapter = |name: &&str| Adapter {
                name: (*name).into(),
                source: format!("adapters/{name}"),
            };
            record.card.as_mut().unwrap().adapters = names.iter().map(adapter).collect();
            record
        };
        let records = [
            having(1, Role::Aggregated, &["a", "b"]),
            having(2, Role::Aggregated, &[]),
            having(3, Role::Aggregated, &["b", "c"]),
            having(4, Role::Prefill, &["d"]),
        ];
        let model = the_model(&records);
        assert!(model.left_out.is_empty() && model.card.adapters.is_empty());
        assert_eq!(model.pools[&Role::Aggregated].instances.len(), 3);
        let names: Vec<&String> = model.adapters.keys().collect();
        assert_eq!(names, ["a", "b", "c"]);
        let fewer = the_model(&records[1..3]);
        assert!(fewer.is_same_service(&model) && fewer != model);
    }

    #[test]
    fn workers_that_differ_in_their_user_data_alone_serve_together() {
        let mut records = [record(1, 10), record(2, 10)];
        let card = records[1].card.as_mut().unwrap();
        card.user_data = serde_json::json!({"team": "a"});
        let model = the_model(&records);
        assert!(model.left_out.is_empty() && model.card.user_data.is_null());
        assert_eq!(model.instances().len(), 2);
    }

    /// During a rollout, workers with the new card take over once they are the majority: at least half of all workers serve at
    /// any time.
    #[test]
    fn a_new_card_is_used_once_more_workers_publish_it() {
        let all = [4, 5, 6].map(|instance| record(instance, 20));
        let old = [1, 2, 3].map(|instance| record(instance, 10));
        for (new, left, expected) in [(1, 3, 10), (2, 2, 10), (2, 1, 20), (3, 0, 20)] {
            let records = [&old[..left], &all[..new]].concat();
            let model = the_model(&records);
            assert_eq!(model.card.context_length_tokens, expected, "{new} {left}");
            assert_eq!(model.left_out.len(), new.min(left));
            // Those with the other card finish what they have begun.
            let serving = |context: u32| {
                let config = EngineConfig::new("m", context);
                let service = model.by_card(&ModelCard::from_config(&config));
                service.map_or(0, LiveModel::size)
            };
            assert_eq!((serving(10), serving(20)), (left, new));
        }
    }

    #[test]
    fn of_equals_the_first_to_serve_is_used() {
        let mut records = [record(1, 20), record(2, 10)];
        assert_eq!(the_model(&records).card.context_length_tokens, 20);
        records[0].started_ms = 3;
        assert_eq!(the_model(&records).card.context_length_tokens, 10);
        // Records without a start time come first; then key order decides.
        records[0].started_ms = 0;
        assert_eq!(the_model(&records).card.context_length_tokens, 20);
        records[1].started_ms = 0;
        assert_eq!(the_model(&records).card.context_length_tokens, 20);
    }

    fn record_as(role: Role, instance: u64, context: u32) -> InstanceRecord {
        let mut record = record(instance, context);
        record.endpoint.component = role.to_string();
        record.card.as_mut().unwrap().role = role;
        record
    }

    #[test]
    fn workers_that_differ_in_their_role_alone_serve_together() {
        use Role::{Aggregated, Decode, Prefill};
        let records = [
            record_as(Prefill, 1, 10),
            record_as(Decode, 2, 10),
            record_as(Decode, 3, 10),
            record(4, 10),
        ];
        let all = the_model(&records);
        assert!(all.left_out.is_empty());
        assert_eq!(all.pools[&Prefill].instances, [InstanceId(1)]);
        assert_eq!(all.pools[&Decode].instances, [InstanceId(2), InstanceId(3)]);
        assert_eq!(all.pools[&Aggregated].instances, [InstanceId(4)]);
        assert_eq!(all.endpoint(), EndpointName::default());
        let apart = the_model(&records[..3]);
        assert_eq!(apart.endpoint().component, "decode");
        assert!(apart.is_servable());
        assert!(!the_model(&records[..1]).is_servable());
    }

    #[test]
    fn what_cannot_be_served_yields_to_what_can() {
        let prefill = record_as(Role::Prefill, 1, 20);
        let model = the_model(&[prefill, record(2, 10)]);
        assert_eq!(model.card.context_length_tokens, 10);
        assert_eq!(model.left_out[0].instance, InstanceId(1));
    }

    #[test]
    fn a_second_endpoint_of_a_role_is_left_out_by_name() {
        let mut other = record_as(Role::Decode, 3, 10);
        other.endpoint.component = "other".into();
        let records = [
            record_as(Role::Prefill, 1, 10),
            record_as(Role::Decode, 2, 10),
            other,
        ];
        let model = the_model(&records);
        let [left_out] = &model.left_out[..] else {
            panic!("one is left out")
        };
        assert_eq!(
            left_out.differences,
            ["endpoint: genset.other.generate, in use: genset.decode.generate"]
        );
    }
}
