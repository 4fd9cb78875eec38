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

/// How long an instance is left out after it refused a request as full: what others freed meanwhile is not always told.
const FULL_TIME: Duration = Duration::from_millis(100);

/// Refusals after which a request is sent to no instance that looks full.
const MOST_REFUSALS: usize = 16;

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
    /// Requests of ours with which it is full, as of what it told last; `usize::MAX` where it does not say.
    max_ours: AtomicUsize,
    shown: Mutex<Shown>,
}

/// What calls to an instance have shown.
#[derive(Debug, Clone, Copy, Default)]
struct Shown {
    down_until: Option<Instant>,
    refusal: Option<Refusal>,
}

/// An instance was full.
#[derive(Debug, Clone, Copy)]
struct Refusal {
    at: Instant,
    /// Requests of ours that it had, without the refused one.
    ours: usize,
}

/// Whether an instance has a place for a request, as far as is known. Ordered by how likely it has one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Room {
    /// Nothing speaks against it.
    Likely,
    /// It refused a request then, and none of ours has ended there since.
    Refused(Instant),
    /// It says that it has none. Then it refused a request, too.
    Full(Option<Instant>),
}

impl Room {
    /// Whether it is among those asked first, for a request that so many instances which looked full have refused.
    fn is_worth_a_try(self, now: Instant, refusals: usize) -> bool {
        match self {
            Self::Likely => true,
            // It costs a request one try at most.
            Self::Refused(at) => refusals == 0 && now.duration_since(at) >= FULL_TIME,
            Self::Full(_) => false,
        }
    }
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
            max_ours: AtomicUsize::new(usize::MAX),
            shown: Mutex::default(),
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
            max_ours: AtomicUsize::new(self.max_ours.load(Ordering::Relaxed)),
            shown: Mutex::default(),
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

    /// Takes the load it published; `None` while it is not heard of.
    pub(crate) fn publish(&self, load: Option<Load>) {
        let Some(load) = load else {
            self.max_ours.store(usize::MAX, Ordering::Relaxed);
            return;
        };
        let requests = load.requests();
        let requests = usize::try_from(requests).unwrap_or(usize::MAX);
        let ours = self.in_flight.load(Ordering::Relaxed);
        self.others
            .store(requests.saturating_sub(ours), Ordering::Relaxed);
        let max_ours = match usize::try_from(load.max_requests) {
            Ok(0) | Err(_) => usize::MAX,
            Ok(max) => ours.saturating_add(max.saturating_sub(requests)),
        };
        self.max_ours.store(max_ours, Ordering::Relaxed);
        let (used, total) = (load.kv_used_blocks, load.kv_total_blocks);
        self.kv_used_blocks.store(used, Ordering::Relaxed);
        self.kv_total_blocks.store(total, Ordering::Relaxed);
        self.kv_events.store(load.kv_events, Ordering::Relaxed);
    }

    /// What it has to do: our requests, which are known at once, and others', which were told a moment ago.
    pub(crate) fn candidate(&self) -> Candidate {
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
        self.shown.lock().down_until = Some(Instant::now() + DOWN_TIME);
    }

    fn is_down(&self) -> bool {
        let mut shown = self.shown.lock();
        let is_down = (shown.down_until).is_some_and(|until| Instant::now() < until);
        if !is_down {
            shown.down_until = None;
        }
        is_down
    }

    /// It took a request.
    pub(crate) fn took(&self) {
        self.shown.lock().refusal = None;
    }

    /// It was full for a request, which is still counted in.
    pub(crate) fn refused(&self) {
        let ours = self.in_flight.load(Ordering::Relaxed).saturating_sub(1);
        let at = Instant::now();
        self.shown.lock().refusal = Some(Refusal { at, ours });
    }

    /// Whether something speaks against its having a place.
    pub(crate) fn looks_full(&self) -> bool {
        self.room() != Room::Likely
    }

    /// Whether it has a place, by what it told and what calls have shown.
    fn room(&self) -> Room {
        let ours = self.in_flight.load(Ordering::Relaxed);
        let refusal = self.shown.lock().refusal;
        // Where one of ours has ended since, it has a place.
        let refused = refusal.filter(|refusal| refusal.ours <= ours);
        let refused = refused.map(|refusal| refusal.at);
        if ours >= self.max_ours.load(Ordering::Relaxed) {
            return Room::Full(refused);
        }
        refused.map_or(Room::Likely, Room::Refused)
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

/// Instances that a request is not sent to any more.
#[derive(Debug, Default)]
pub(crate) struct Tried {
    pub(crate) instances: Vec<InstanceId>,
    /// How many of them looked full, and were.
    pub(crate) refusals: usize,
}

impl Tried {
    /// Whether a request is sent to no more instances that look full.
    pub(crate) fn are_enough(&self) -> bool {
        self.refusals >= MOST_REFUSALS
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

    /// The instances of `map` that a request may go to that wants this, less those in `tried`, those marked down and those whose process
    /// is known to be gone. When none is left so, all are tried: a wrong mark must not make an outage.
    pub(crate) fn live<'a>(
        &self,
        map: &'a BTreeMap<InstanceId, Arc<Instance>>,
        tried: &[InstanceId],
        wanted: Wanted<'_>,
    ) -> Vec<&'a Arc<Instance>> {
        let is_wanted = wanted.among(map);
        let untried: Vec<_> = map
            .values()
            .filter(|instance| is_wanted(instance))
            .filter(|instance| !tried.contains(&instance.record.instance))
            .collect();
        let is_live = |instance: &&Arc<Instance>| {
            !instance.is_down() && self.plane.is_reachable(&instance.record.address)
        };
        let live: Vec<_> = untried.iter().copied().filter(is_live).collect();
        if live.is_empty() { untried } else { live }
    }

    /// Those [live](Self::live) that may have a place, ordered by id.
    pub(crate) fn candidates(
        &self,
        tried: &Tried,
        wanted: Wanted<'_>,
    ) -> (Vec<Arc<Instance>>, Vec<Candidate>) {
        let map = self.all();
        let live = with_room(self.live(&map, &tried.instances, wanted), tried.refusals);
        let candidates = live.iter().map(|instance| instance.candidate()).collect();
        (live.into_iter().cloned().collect(), candidates)
    }
}

/// Those that may have a place for a request which so many that looked full have refused, ordered by id. Where all look full, news may be
/// old: as many are left as may still refuse it, those that most likely have a place by now.
fn with_room(live: Vec<&Arc<Instance>>, refusals: usize) -> Vec<&Arc<Instance>> {
    let now = Instant::now();
    let rooms = live.into_iter().map(|instance| (instance.room(), instance));
    let mut rooms: Vec<_> = rooms.collect();
    let is_worth_a_try = |(room, _): &(Room, &Arc<Instance>)| room.is_worth_a_try(now, refusals);
    if rooms.iter().any(is_worth_a_try) {
        rooms.retain(is_worth_a_try);
    } else {
        rooms.sort_by_key(|(room, _)| *room);
        rooms.truncate(MOST_REFUSALS.saturating_sub(refusals));
        rooms.sort_by_key(|(_, instance)| instance.record.instance);
    }
    rooms.into_iter().map(|(_, instance)| instance).collect()
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
        entry_of(1, location, context_length_tokens)
    }

    fn entry_of(id: u64, location: &str, context_length_tokens: u32) -> Entry {
        let config = EngineConfig::new("m", context_length_tokens);
        let record = InstanceRecord {
            endpoint: EndpointName::default(),
            instance: InstanceId(id),
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
            let instances = instances(0);
            let load = || {
                let (_, candidates) = instances.candidates(&Tried::default(), Wanted::default());
                candidates[0].load
            };
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

    /// So many instances, by the ids from 1 on.
    fn instances(count: u64) -> Instances {
        let plane = Arc::new(MemoryPlane::new());
        let instances = Instances::new(Arc::new(|_| true), Records::default(), plane);
        for id in 1..=count {
            instances.apply(Change::Put(entry_of(id, "here", 10)));
        }
        instances
    }

    /// The candidates of a request that so many which looked full have refused.
    fn candidates(instances: &Instances, refusals: usize) -> Vec<u64> {
        let tried = Tried {
            refusals,
            ..Tried::default()
        };
        let (_, candidates) = instances.candidates(&tried, Wanted::default());
        candidates.iter().map(|it| it.instance.0).collect()
    }

    fn refuse(instances: &Instances, id: u64) {
        let instance = instances.get(InstanceId(id)).unwrap();
        let _refused = instance.enter();
        instance.refused();
    }

    #[tokio::test(start_paused = true)]
    async fn an_instance_that_refused_is_left_out_until_it_may_have_a_place() {
        let instances = instances(2);
        let running = instances.get(InstanceId(1)).unwrap().enter();
        refuse(&instances, 1);
        assert_eq!(candidates(&instances, 0), [2]);
        drop(running);
        assert_eq!(candidates(&instances, 0), [1, 2]);

        refuse(&instances, 1);
        assert_eq!(candidates(&instances, 0), [2]);
        tokio::time::sleep(FULL_TIME).await;
        assert_eq!(candidates(&instances, 0), [1, 2]);
        // Whoever was refused so goes where nothing speaks against it.
        assert_eq!(candidates(&instances, 1), [2]);
        instances.get(InstanceId(1)).unwrap().took();
        assert_eq!(candidates(&instances, 1), [1, 2]);
    }

    #[test]
    fn an_instance_that_says_it_is_full_is_left_out_until_it_may_have_a_place() {
        let instances = instances(2);
        let one = instances.get(InstanceId(1)).unwrap();
        let told = |running_requests, max_requests| {
            one.publish(Some(Load {
                running_requests,
                max_requests,
                ..Load::default()
            }));
        };
        let ours = one.enter();
        told(4, 4);
        assert_eq!(candidates(&instances, 0), [2]);
        drop(ours);
        assert_eq!(candidates(&instances, 0), [1, 2]);

        told(4, 4);
        assert_eq!(candidates(&instances, 0), [2]);
        told(3, 4);
        assert_eq!(candidates(&instances, 0), [1, 2]);
        let _ours = one.enter();
        assert_eq!(candidates(&instances, 0), [2]);
        // Nothing is known of one that is not heard of, or does not say how many it takes.
        one.publish(None);
        assert_eq!(candidates(&instances, 0), [1, 2]);
        told(4, 0);
        assert_eq!(candidates(&instances, 0), [1, 2]);
    }

    #[tokio::test(start_paused = true)]
    async fn of_instances_that_all_look_full_a_few_are_asked_the_longest_refused_first() {
        let instances = instances(20);
        for id in 1..=20 {
            refuse(&instances, id);
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        let ids = |range: std::ops::RangeInclusive<u64>| range.collect::<Vec<_>>();
        assert_eq!(candidates(&instances, 0), ids(1..=16));
        for id in 1..=4 {
            refuse(&instances, id);
        }
        assert_eq!(candidates(&instances, 0), ids(5..=20));
        assert_eq!(candidates(&instances, MOST_REFUSALS - 1), [5]);
        assert!(candidates(&instances, MOST_REFUSALS).is_empty());
        // One that has a place is found, however many had none.
        instances.get(InstanceId(20)).unwrap().took();
        assert_eq!(candidates(&instances, MOST_REFUSALS), [20]);
    }
}
