//! The live instances of an endpoint, as a client sees them: those in discovery, minus those that just failed.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use genset_backend_common::handles::Load;
use parking_lot::Mutex;
use tokio::sync::watch;
use tokio::time::Instant;

use crate::discovery::{Change, Discovery, Entry, InstanceRecord, Records, follow_changes};
use crate::ejection::EjectionConfig;
use crate::names::InstanceId;
use crate::plane::{Reachability, RequestPlane};
use crate::selection::Candidate;

/// How long an instance is skipped after a call to it failed, unless discovery announces it again.
const DOWN_TIME: Duration = Duration::from_secs(5);

/// How long an instance is skipped after it refused a request as full. Other clients' requests may end without notice here.
const FULL_TIME: Duration = Duration::from_millis(100);

/// The number of refusals after which a request no longer goes to an instance that looks full, unless that refused none for
/// [`FULL_TIME`].
const MOST_REFUSALS: usize = 16;

/// The number of full instances after which it goes to no other, not even to one of which nothing is known: they are asked one
/// after another.
const MOST_FULL: usize = 64;

/// The number of failures among the last 32 requests of an instance after which it is ejected, although it answered others.
const OFTEN: u32 = 16;

/// One live instance.
#[derive(Debug)]
pub(crate) struct Instance {
    pub(crate) record: InstanceRecord,
    /// What the request plane knows of its process.
    reachability: Reachability,
    /// Shared with those of its other records: requests under way know the record that they began with.
    facts: Arc<Facts>,
}

/// What is known of an instance, whatever its record says.
#[derive(Debug)]
struct Facts {
    in_flight: AtomicUsize,
    /// Other clients' requests, as last published.
    others: AtomicUsize,
    kv_used_blocks: AtomicU64,
    kv_total_blocks: AtomicU64,
    kv_events: AtomicU64,
    /// Number of our requests at which it is full, as last published; `usize::MAX` if unknown.
    max_ours: AtomicUsize,
    /// Requests that it failed by its own fault since it last answered one.
    failures: AtomicU32,
    /// How its last 32 requests ended, the last one in the lowest bit: 1 for a failure.
    ends: AtomicU32,
    shown: Mutex<Shown>,
    /// Whether `shown` says anything. Each request asks this of every instance, and takes no lock where it is false.
    has_shown: AtomicBool,
}

/// What calls to an instance have revealed.
#[derive(Debug, Clone, Copy, Default)]
struct Shown {
    down_until: Option<Instant>,
    refusal: Option<Refusal>,
    ejection: Option<Ejection>,
}

/// An instance failed one request after another. Kept until it answers one, or 32 in a row if it had answered others.
#[derive(Debug, Clone, Copy)]
struct Ejection {
    until: Instant,
    time: Duration,
    had_answered: bool,
}

/// An instance refused a request as full.
#[derive(Debug, Clone, Copy)]
struct Refusal {
    at: Instant,
    /// The number of our requests it had, without the refused one.
    ours: usize,
}

/// Whether an instance has room for a request, as far as is known. Ordered by likelihood.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Room {
    /// No evidence against it.
    Likely,
    /// It refused a request at this time, and none of our requests there has ended since.
    Refused(Instant),
    /// Its published load says that it is full. The time of its last refusal, if any.
    Full(Option<Instant>),
}

impl Room {
    /// Whether the instance is among those to ask first, for a request that `refusals` instances that looked full have refused.
    fn is_worth_a_try(self, now: Instant, refusals: usize) -> bool {
        match self {
            Self::Likely => true,
            // It costs a request at most one attempt.
            Self::Refused(_) => refusals == 0 && self.is_old(now),
            Self::Full(_) => false,
        }
    }

    /// Whether only an old refusal is known. A request that is refused again makes it new, so few requests come in vain.
    fn is_old(self, now: Instant) -> bool {
        match self {
            Self::Refused(at) => now.duration_since(at) >= FULL_TIME,
            Self::Likely | Self::Full(_) => false,
        }
    }
}

impl Instance {
    fn new(record: InstanceRecord, reachability: Reachability) -> Self {
        Self {
            record,
            reachability,
            facts: Arc::new(Facts {
                in_flight: AtomicUsize::new(0),
                others: AtomicUsize::new(0),
                kv_used_blocks: AtomicU64::new(0),
                kv_total_blocks: AtomicU64::new(0),
                kv_events: AtomicU64::new(0),
                max_ours: AtomicUsize::new(usize::MAX),
                failures: AtomicU32::new(0),
                ends: AtomicU32::new(0),
                shown: Mutex::default(),
                has_shown: AtomicBool::new(false),
            }),
        }
    }

    /// The same instance with a changed record: keeps its requests, its load and its failures, and is no longer skipped.
    fn with_record(&self, record: InstanceRecord, reachability: Reachability) -> Self {
        self.show(|shown| {
            *shown = Shown {
                ejection: shown.ejection,
                ..Shown::default()
            };
        });
        Self {
            record,
            reachability,
            facts: Arc::clone(&self.facts),
        }
    }

    /// Whether requests with this adapter may go to it.
    pub(crate) fn has_adapter(&self, adapter: Option<&str>) -> bool {
        let card = self.record.card.as_ref();
        adapter.is_none_or(|adapter| card.is_some_and(|card| card.has_adapter(adapter)))
    }

    /// Counts a request as in flight until the guard is dropped.
    pub(crate) fn enter(&self) -> InFlightGuard {
        self.facts.in_flight.fetch_add(1, Ordering::Relaxed);
        InFlightGuard(Arc::clone(&self.facts))
    }

    /// Stores the published load; `None` while the instance publishes none.
    pub(crate) fn publish(&self, load: Option<Load>) {
        let Some(load) = load else {
            self.facts.max_ours.store(usize::MAX, Ordering::Relaxed);
            return;
        };
        let requests = load.requests();
        let requests = usize::try_from(requests).unwrap_or(usize::MAX);
        let ours = self.facts.in_flight.load(Ordering::Relaxed);
        self.facts
            .others
            .store(requests.saturating_sub(ours), Ordering::Relaxed);
        let max_ours = match usize::try_from(load.max_requests) {
            Ok(0) | Err(_) => usize::MAX,
            Ok(max) => ours.saturating_add(max.saturating_sub(requests)),
        };
        self.facts.max_ours.store(max_ours, Ordering::Relaxed);
        let (used, total) = (load.kv_used_blocks, load.kv_total_blocks);
        self.facts.kv_used_blocks.store(used, Ordering::Relaxed);
        self.facts.kv_total_blocks.store(total, Ordering::Relaxed);
        self.facts
            .kv_events
            .store(load.kv_events, Ordering::Relaxed);
    }

    /// Its load: our requests, which are exact, and others' requests, as last published.
    pub(crate) fn candidate(&self) -> Candidate {
        let ours = self.facts.in_flight.load(Ordering::Relaxed);
        let others = self.facts.others.load(Ordering::Relaxed);
        Candidate {
            instance: self.record.instance,
            ranks: self.record.ranks(),
            load: ours.saturating_add(others),
            others,
            kv_used_blocks: self.facts.kv_used_blocks.load(Ordering::Relaxed),
            kv_total_blocks: self.facts.kv_total_blocks.load(Ordering::Relaxed),
            kv_events: self.facts.kv_events.load(Ordering::Relaxed),
        }
    }

    /// What calls have revealed.
    fn shown(&self) -> Shown {
        match self.facts.has_shown.load(Ordering::Relaxed) {
            true => *self.facts.shown.lock(),
            false => Shown::default(),
        }
    }

    /// Changes what calls have revealed.
    fn show(&self, change: impl FnOnce(&mut Shown)) {
        let mut shown = self.facts.shown.lock();
        change(&mut shown);
        let says_something =
            shown.down_until.is_some() || shown.refusal.is_some() || shown.ejection.is_some();
        self.facts
            .has_shown
            .store(says_something, Ordering::Relaxed);
    }

    /// Skips the instance for a while.
    pub(crate) fn mark_down(&self) {
        let until = Instant::now() + DOWN_TIME;
        self.show(|shown| shown.down_until = Some(until));
    }

    fn is_down(&self) -> bool {
        let Some(until) = self.shown().down_until else {
            return false;
        };
        let is_down = Instant::now() < until;
        if !is_down {
            // Unless it was marked again meanwhile.
            self.show(|shown| shown.down_until = shown.down_until.filter(|it| *it > until));
        }
        is_down
    }

    /// Whether it is skipped while there are others, because a call failed or its process is known to be gone.
    pub(crate) fn is_marked(&self) -> bool {
        self.is_down() || !self.reachability.is_reachable()
    }

    /// It answered a request, or a part of it that was enough.
    pub(crate) fn answered(&self) {
        let ends = self.note_end(0);
        if self.facts.failures.load(Ordering::Relaxed) > 0 {
            self.facts.failures.store(0, Ordering::Relaxed);
        }
        if self.shown().ejection.is_some() {
            let is_kept = |ejection: &Ejection| ejection.had_answered && ends != 0;
            self.show(|shown| shown.ejection = shown.ejection.filter(is_kept));
        }
    }

    /// Notes how a request ended; returns how the last 32 did.
    fn note_end(&self, failure: u32) -> u32 {
        let noted = |before: u32| (before << 1) | failure;
        // An answer of an instance that fails none only reads.
        let change = |before: u32| Some(noted(before)).filter(|now| *now != before);
        let ends = &self.facts.ends;
        match ends.fetch_update(Ordering::Relaxed, Ordering::Relaxed, change) {
            Ok(before) | Err(before) => noted(before),
        }
    }

    /// It failed a request by its own fault. Returns for how long it is ejected from now on, if it is.
    pub(crate) fn failed(&self, config: &EjectionConfig) -> Option<Duration> {
        let before = self.facts.failures.fetch_add(1, Ordering::Relaxed);
        let had_answered = before.saturating_add(1) < config.after;
        let is_often = self.note_end(1).count_ones() >= OFTEN.max(config.after);
        if had_answered && !is_often {
            return None;
        }
        let now = Instant::now();
        let mut ejected = None;
        self.show(|shown| {
            // While it is ejected, requests fail there that were sent before.
            if shown.ejection.is_none_or(|ejection| ejection.until <= now) {
                let time = config.time_after(shown.ejection.map(|ejection| ejection.time));
                let until = now + time;
                shown.ejection = Some(Ejection {
                    until,
                    time,
                    had_answered,
                });
                ejected = Some(time);
            }
        });
        ejected
    }

    fn is_ejected(&self) -> bool {
        let ejection = self.shown().ejection;
        ejection.is_some_and(|ejection| Instant::now() < ejection.until)
    }

    /// It accepted a request.
    pub(crate) fn took(&self) {
        if self.shown().refusal.is_some() {
            self.show(|shown| shown.refusal = None);
        }
    }

    /// It refused a request as full; the request is still counted in.
    pub(crate) fn refused(&self) {
        let ours = self
            .facts
            .in_flight
            .load(Ordering::Relaxed)
            .saturating_sub(1);
        let at = Instant::now();
        self.show(|shown| shown.refusal = Some(Refusal { at, ours }));
    }

    /// Whether there is evidence that it has no room.
    pub(crate) fn looks_full(&self) -> bool {
        self.room() != Room::Likely
    }

    /// Whether it has room, by its published load and by the results of calls.
    fn room(&self) -> Room {
        let ours = self.facts.in_flight.load(Ordering::Relaxed);
        let refusal = self.shown().refusal;
        // If one of our requests has ended since, it has room.
        let refused = refusal.filter(|refusal| refusal.ours <= ours);
        let refused = refused.map(|refusal| refusal.at);
        if ours >= self.facts.max_ours.load(Ordering::Relaxed) {
            return Room::Full(refused);
        }
        refused.map_or(Room::Likely, Room::Refused)
    }
}

#[derive(Debug)]
pub(crate) struct InFlightGuard(Arc<Facts>);

impl Drop for InFlightGuard {
    fn drop(&mut self) {
        self.0.in_flight.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Selects the instances of an endpoint that a client may call.
pub(crate) type Accepts = Arc<dyn Fn(&InstanceRecord) -> bool + Send + Sync>;

type InstanceMap = Arc<BTreeMap<InstanceId, Arc<Instance>>>;

/// A request's requirements on its instance.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Wanted<'a> {
    /// The adapter named in the request.
    pub(crate) adapter: Option<&'a str>,
    /// The data-parallel rank named in the request.
    pub(crate) rank: Option<u32>,
}

impl Wanted<'_> {
    /// A predicate for the instances of `all` that satisfy it. If none has the rank, the rank is ignored, and the chosen instance
    /// refuses the request.
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

/// Instances that a request no longer goes to.
#[derive(Debug, Default)]
pub(crate) struct Tried {
    pub(crate) instances: Vec<InstanceId>,
    /// How many of them looked full and refused.
    pub(crate) refusals: usize,
    /// How many of them refused because they were full.
    pub(crate) full: usize,
    /// Whether one of them could not read the request's KV blocks.
    pub(crate) has_refused_blocks: bool,
}

/// The live instances; clones share state. The map is replaced as a whole, so readers hold no lock.
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

    /// Follows discovery until the future is dropped.
    pub(crate) async fn follow(self, discovery: Arc<dyn Discovery>, prefix: String) {
        // One by one: readers of the map wait meanwhile.
        let apply = move |changes: Vec<Change>| changes.into_iter().for_each(|it| self.apply(it));
        follow_changes(&*discovery, &prefix, apply).await;
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
                    let old = take(map, &entry.key);
                    if let Some(record) = self.read(&entry) {
                        let instance = self.renew(old.as_ref(), record);
                        map.insert(instance.record.instance, instance);
                    }
                }
                Change::Removed(key) => drop(take(map, &key)),
            }
        });
    }

    /// The instance of a changed record. If the address is unchanged, it keeps the known instance's state.
    fn renew(&self, known: Option<&Arc<Instance>>, record: InstanceRecord) -> Arc<Instance> {
        let reachability = self.plane.reachability(&record.address);
        // The plane may connect to it before the first request, and forgets that it said that it leaves.
        self.plane.prepare(&record.address, &record.endpoint);
        let known = known.filter(|known| known.record.address == record.address);
        Arc::new(match known {
            Some(known) => known.with_record(record, reachability),
            None => Instance::new(record, reachability),
        })
    }

    /// The record in an entry, if the client may call its instance.
    fn read(&self, entry: &Entry) -> Option<InstanceRecord> {
        self.records
            .read(entry)
            .filter(|record| (self.accepts)(record))
    }

    /// All listed instances that the client may call.
    pub(crate) fn all(&self) -> InstanceMap {
        Arc::clone(&self.map.borrow())
    }

    pub(crate) fn get(&self, id: InstanceId) -> Option<Arc<Instance>> {
        self.map.borrow().get(&id).cloned()
    }

    /// Whether there are instances, but none of them has this adapter.
    pub(crate) fn lack_adapter(&self, adapter: &str) -> bool {
        let map = self.map.borrow();
        let mut instances = map.values();
        !map.is_empty() && !instances.any(|instance| instance.has_adapter(Some(adapter)))
    }

    pub(crate) fn subscribe(&self) -> watch::Receiver<InstanceMap> {
        self.map.subscribe()
    }

    /// The instances of `map` that satisfy `wanted`, except those in `tried`, those ejected or marked down and those whose process
    /// is known to be gone. If this leaves none, ignores the marks: a wrong mark must not cause an outage. But if one was full,
    /// processes that are gone and ejected instances stay out: their error would hide that there will be room.
    ///
    /// Ignores ejections if more than half of those that satisfy `wanted` are ejected: rather the requests are at fault.
    pub(crate) fn live<'a>(
        &self,
        map: &'a BTreeMap<InstanceId, Arc<Instance>>,
        tried: &Tried,
        wanted: Wanted<'_>,
    ) -> Vec<&'a Arc<Instance>> {
        let is_wanted = wanted.among(map);
        let is_wanted = |instance: &&Arc<Instance>| is_wanted(instance);
        let is_untried =
            |instance: &&Arc<Instance>| !tried.instances.contains(&instance.record.instance);
        let is_reachable = |instance: &&Arc<Instance>| instance.reachability.is_reachable();
        let is_live = |instance: &&Arc<Instance>| is_untried(instance) && !instance.is_marked();
        let mut live: Vec<&'a Arc<Instance>> = Vec::with_capacity(map.len());
        let (mut count, mut ejected) = (0_usize, 0_usize);
        live.extend(map.values().filter(is_wanted).filter(|instance| {
            let is_ejected = instance.is_ejected();
            count += 1;
            ejected += usize::from(is_ejected);
            !is_ejected && is_live(instance)
        }));
        let are_too_many = ejected > count / 2;
        if are_too_many {
            live.clear();
            live.extend(map.values().filter(is_wanted).filter(is_live));
        }
        if live.is_empty() {
            let may_be_there = |instance: &&Arc<Instance>| {
                let is_ejected = instance.is_ejected() && !are_too_many;
                tried.full == 0 || (is_reachable(instance) && !is_ejected)
            };
            let untried = map.values().filter(is_wanted).filter(is_untried);
            live.extend(untried.filter(may_be_there));
        }
        live
    }

    /// The [live](Self::live) instances of `map` that may have room, ordered by id, and what is known of each. None if
    /// [`MOST_FULL`] were full.
    pub(crate) fn candidates<'a>(
        &self,
        map: &'a BTreeMap<InstanceId, Arc<Instance>>,
        tried: &Tried,
        wanted: Wanted<'_>,
    ) -> (Vec<&'a Arc<Instance>>, Vec<Candidate>) {
        if tried.full >= MOST_FULL {
            return (Vec::new(), Vec::new());
        }
        let live = with_room(self.live(map, tried, wanted), tried.refusals);
        let candidates = live.iter().map(|instance| instance.candidate()).collect();
        (live, candidates)
    }
}

/// Takes the instance with this key, which ends with its id.
fn take(map: &mut BTreeMap<InstanceId, Arc<Instance>>, key: &str) -> Option<Arc<Instance>> {
    let (_, id) = key.rsplit_once('/')?;
    let id = InstanceId(u64::from_str_radix(id, 16).ok()?);
    // Another key may have the same number, written in another way.
    let is_its_key = map.get(&id)?.record.key() == key;
    is_its_key.then(|| map.remove(&id)).flatten()
}

/// The instances that may have room for a request after `refusals` refusals by instances that looked full, ordered by id. If all
/// look full, the data may be stale: returns as many as may still refuse, more if their refusals are old, those most likely to have
/// room by now.
fn with_room(live: Vec<&Arc<Instance>>, refusals: usize) -> Vec<&Arc<Instance>> {
    if live.iter().all(|instance| instance.room() == Room::Likely) {
        return live;
    }
    let now = Instant::now();
    let rooms = live.into_iter().map(|instance| (instance.room(), instance));
    let mut rooms: Vec<_> = rooms.collect();
    let is_worth_a_try = |(room, _): &(Room, &Arc<Instance>)| room.is_worth_a_try(now, refusals);
    if rooms.iter().any(is_worth_a_try) {
        rooms.retain(is_worth_a_try);
    } else {
        rooms.sort_by_key(|(room, _)| *room);
        let old = rooms.iter().filter(|(room, _)| room.is_old(now)).count();
        rooms.truncate(MOST_REFUSALS.saturating_sub(refusals).max(old));
        rooms.sort_by_key(|(_, instance)| instance.record.instance);
    }
    rooms.into_iter().map(|(_, instance)| instance).collect()
}

#[cfg(test)]
mod tests;
