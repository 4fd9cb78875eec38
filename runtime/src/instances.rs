//! The live instances of an endpoint, as a client sees them: what discovery says, less those that just failed.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use genset_backend_common::{EngineError, handles::Load};
use parking_lot::Mutex;
use tokio::sync::watch;
use tokio::time::Instant;

use crate::discovery::{Change, Discovery, Entry, InstanceRecord, Records, Watch};
use crate::names::InstanceId;
use crate::plane::RequestPlane;
use crate::selection::Candidate;

/// How long an instance is left out after a call to it failed, unless discovery announces it anew.
const DOWN_TIME: Duration = Duration::from_secs(5);

/// One live instance.
#[derive(Debug)]
pub(crate) struct Instance {
    pub(crate) record: InstanceRecord,
    in_flight: Arc<AtomicUsize>,
    /// Requests of other clients, as of what it told last.
    others: AtomicUsize,
    kv_used_blocks: AtomicU64,
    kv_total_blocks: AtomicU64,
    kv_events: AtomicU64,
    down_until: Mutex<Option<Instant>>,
}

impl Instance {
    fn new(record: InstanceRecord) -> Self {
        Self {
            record,
            in_flight: Arc::default(),
            others: AtomicUsize::new(0),
            kv_used_blocks: AtomicU64::new(0),
            kv_total_blocks: AtomicU64::new(0),
            kv_events: AtomicU64::new(0),
            down_until: Mutex::new(None),
        }
    }

    /// The same instance where it says something else of itself: its requests and its load are what they were.
    fn with_record(&self, record: InstanceRecord) -> Self {
        let copy = |number: &AtomicU64| AtomicU64::new(number.load(Ordering::Relaxed));
        Self {
            record,
            in_flight: Arc::clone(&self.in_flight),
            others: AtomicUsize::new(self.others.load(Ordering::Relaxed)),
            kv_used_blocks: copy(&self.kv_used_blocks),
            kv_total_blocks: copy(&self.kv_total_blocks),
            kv_events: copy(&self.kv_events),
            down_until: Mutex::new(None),
        }
    }

    /// Whether it may be asked under this adapter.
    pub(crate) fn has_adapter(&self, adapter: Option<&str>) -> bool {
        let card = self.record.card.as_ref();
        adapter.is_none_or(|adapter| card.is_some_and(|card| card.has_adapter(adapter)))
    }

    /// Counts a request in until the guard is dropped.
    pub(crate) fn enter(&self) -> InFlightGuard {
        self.in_flight.fetch_add(1, Ordering::Relaxed);
        InFlightGuard(Arc::clone(&self.in_flight))
    }

    /// Takes the load it published.
    pub(crate) fn publish(&self, load: Load) {
        let requests = load.requests();
        let requests = usize::try_from(requests).unwrap_or(usize::MAX);
        let ours = self.in_flight.load(Ordering::Relaxed);
        self.others
            .store(requests.saturating_sub(ours), Ordering::Relaxed);
        let (used, total) = (load.kv_used_blocks, load.kv_total_blocks);
        self.kv_used_blocks.store(used, Ordering::Relaxed);
        self.kv_total_blocks.store(total, Ordering::Relaxed);
        self.kv_events.store(load.kv_events, Ordering::Relaxed);
    }

    /// What it has to do: our requests, which are known at once, and others', which were told a moment ago.
    fn candidate(&self) -> Candidate {
        let ours = self.in_flight.load(Ordering::Relaxed);
        let others = self.others.load(Ordering::Relaxed);
        Candidate {
            instance: self.record.instance,
            ranks: self.record.ranks(),
            load: ours.saturating_add(others),
            others,
            kv_used_blocks: self.kv_used_blocks.load(Ordering::Relaxed),
            kv_total_blocks: self.kv_total_blocks.load(Ordering::Relaxed),
            kv_events: self.kv_events.load(Ordering::Relaxed),
        }
    }

    /// Leaves the instance out for a while.
    pub(crate) fn mark_down(&self) {
        *self.down_until.lock() = Some(Instant::now() + DOWN_TIME);
    }

    fn is_down(&self) -> bool {
        let mut down_until = self.down_until.lock();
        let is_down = down_until.is_some_and(|until| Instant::now() < until);
        if !is_down {
            *down_until = None;
        }
        is_down
    }
}

#[derive(Debug)]
pub(crate) struct InFlightGuard(Arc<AtomicUsize>);

impl Drop for InFlightGuard {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Which of an endpoint's instances a client may call.
pub(crate) type Accepts = Arc<dyn Fn(&InstanceRecord) -> bool + Send + Sync>;

type InstanceMap = Arc<BTreeMap<InstanceId, Arc<Instance>>>;

/// What a request asks of the instance that it goes to.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Wanted<'a> {
    /// The adapter that it names.
    pub(crate) adapter: Option<&'a str>,
    /// The data-parallel rank that it names.
    pub(crate) rank: Option<u32>,
}

impl Wanted<'_> {
    /// Whether it may go to an instance that is one of `all`. A rank that none of them has is for one of them to refuse.
    pub(crate) fn among(
        self,
        all: &BTreeMap<InstanceId, Arc<Instance>>,
    ) -> impl Fn(&Instance) -> bool {
        let fits = move |instance: &Instance, rank: Option<u32>| {
            instance.has_adapter(self.adapter)
                && rank.is_none_or(|rank| rank < instance.record.ranks())
        };
        let is_there = self.rank.is_some() && all.values().any(|known| fits(known, self.rank));
        let rank = self.rank.filter(|_| is_there);
        move |instance| fits(instance, rank)
    }
}

/// The live instances; clones share. The map is replaced as a whole, so readers hold no lock.
#[derive(Clone)]
pub(crate) struct Instances {
    map: Arc<watch::Sender<InstanceMap>>,
    accepts: Accepts,
    records: Records,
    plane: Arc<dyn RequestPlane>,
}

impl Instances {
    pub(crate) fn new(accepts: Accepts, records: Records, plane: Arc<dyn RequestPlane>) -> Self {
        let map = Arc::new(watch::Sender::new(InstanceMap::default()));
        Self {
            map,
            accepts,
            records,
            plane,
        }
    }

    /// Follows discovery until it is gone or the future is dropped.
    pub(crate) async fn follow(self, discovery: Arc<dyn Discovery>, prefix: String) {
        while let Some(mut watch) = watch_patiently(&*discovery, &prefix).await {
            while let Some(change) = watch.next().await {
                self.apply(change);
            }
        }
    }

    fn apply(&self, change: Change) {
        self.map.send_modify(|map| {
            let map = Arc::make_mut(map);
            match change {
                Change::Snapshot(entries) => {
                    let old = std::mem::take(map);
                    for record in entries.iter().filter_map(|entry| self.read(entry)) {
                        let instance = match old.get(&record.instance) {
                            Some(known) if known.record == record => Arc::clone(known),
                            known => self.renew(known, record),
                        };
                        map.insert(instance.record.instance, instance);
                    }
                }
                Change::Put(entry) => {
                    let old = map.extract_if(.., |_, known| known.record.key() == entry.key);
                    let old = old.map(|(_, known)| known).last();
                    if let Some(record) = self.read(&entry) {
                        let instance = self.renew(old.as_ref(), record);
                        map.insert(instance.record.instance, instance);
                    }
                }
                Change::Removed(key) => map.retain(|_, instance| instance.record.key() != key),
            }
        });
    }

    /// The instance of a record that is new. At its former address it is the one that was known.
    fn renew(&self, known: Option<&Arc<Instance>>, record: InstanceRecord) -> Arc<Instance> {
        match known.filter(|known| known.record.address == record.address) {
            Some(known) => Arc::new(known.with_record(record)),
            None => self.meet(record),
        }
    }

    /// An instance that is new here. The plane may reach out for it before a request does.
    fn meet(&self, record: InstanceRecord) -> Arc<Instance> {
        self.plane.prepare(&record.address, &record.endpoint);
        Arc::new(Instance::new(record))
    }

    /// The record in an entry, if it is one the client may call.
    fn read(&self, entry: &Entry) -> Option<InstanceRecord> {
        self.records
            .read(entry)
            .filter(|record| (self.accepts)(record))
    }

    /// Every instance discovery lists that the client may call.
    pub(crate) fn all(&self) -> InstanceMap {
        Arc::clone(&self.map.borrow())
    }

    pub(crate) fn get(&self, id: InstanceId) -> Option<Arc<Instance>> {
        self.map.borrow().get(&id).cloned()
    }

    /// Whether there are any, and none of them may be asked under this adapter.
    pub(crate) fn lack_adapter(&self, adapter: &str) -> bool {
        let map = self.map.borrow();
        let mut instances = map.values();
        !map.is_empty() && !instances.any(|instance| instance.has_adapter(Some(adapter)))
    }

    pub(crate) fn subscribe(&self) -> watch::Receiver<InstanceMap> {
        self.map.subscribe()
    }

    /// The instances a request may go to that wants this, less those in `tried`, those marked down and those whose process is known to be
    /// gone. When none is left so, all are tried: a wrong mark must not make an outage.
    pub(crate) fn candidates(
        &self,
        tried: &[InstanceId],
        wanted: Wanted<'_>,
    ) -> (Vec<Arc<Instance>>, Vec<Candidate>) {
        let map = self.all();
        let is_wanted = wanted.among(&map);
        let untried: Vec<_> = map
            .values()
            .filter(|instance| is_wanted(instance))
            .filter(|instance| !tried.contains(&instance.record.instance))
            .cloned()
            .collect();
        let mut live: Vec<_> = untried
            .iter()
            .filter(|instance| {
                !instance.is_down() && self.plane.is_reachable(&instance.record.address)
            })
            .cloned()
            .collect();
        if live.is_empty() {
            live = untried;
        }
        let candidates = live.iter().map(|instance| instance.candidate()).collect();
        (live, candidates)
    }
}

/// A watch, however long discovery takes to answer.
pub(crate) async fn watch_patiently(
    discovery: &dyn Discovery,
    prefix: &str,
) -> Option<Box<dyn Watch>> {
    let mut pause = Duration::from_millis(50);
    loop {
        match discovery.watch(prefix).await {
            Ok(watch) => return Some(watch),
            Err(error) => log_outage(&error),
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(Duration::from_secs(5));
    }
}

fn log_outage(error: &EngineError) {
    tracing::warn!(%error, "discovery cannot be watched; known instances stay in use");
}

#[cfg(test)]
mod tests {
    use genset_backend_common::{EngineConfig, ModelCard};

    use super::*;
    use crate::discovery::Address;
    use crate::names::EndpointName;
    use crate::plane::MemoryPlane;

    fn entry(location: &str, context_length_tokens: u32) -> Entry {
        let config = EngineConfig::new("m", context_length_tokens);
        let record = InstanceRecord {
            endpoint: EndpointName::default(),
            instance: InstanceId(1),
            address: Address {
                plane: "memory".into(),
                location: location.into(),
            },
            card: Some(ModelCard::from_config(&config)),
            started_ms: 0,
        };
        record.to_entry().unwrap()
    }

    #[test]
    fn an_instance_that_says_something_else_of_itself_keeps_its_requests() {
        let snapshot: fn(Entry) -> Change = |entry| Change::Snapshot(vec![entry]);
        for change in [snapshot, Change::Put] {
            let plane = Arc::new(MemoryPlane::new());
            let instances = Instances::new(Arc::new(|_| true), Records::default(), plane);
            let load = || instances.candidates(&[], Wanted::default()).1[0].load;
            instances.apply(Change::Snapshot(vec![entry("here", 10)]));
            let request = instances.get(InstanceId(1)).unwrap().enter();
            instances.apply(change(entry("here", 20)));
            assert_eq!(load(), 1);
            drop(request);
            assert_eq!(load(), 0);
            // Elsewhere it is another process.
            let _request = instances.get(InstanceId(1)).unwrap().enter();
            instances.apply(change(entry("there", 20)));
            assert_eq!(load(), 0);
        }
    }
}
