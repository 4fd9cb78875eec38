//! What a client knows of instances, and which of them it asks.

use async_trait::async_trait;
use bytes::Bytes;
use genset_backend_common::{EngineConfig, EngineError, ModelCard, RequestContext};

use super::*;
use crate::discovery::Address;
use crate::names::EndpointName;
use crate::plane::{ErasedHandler, MemoryPlane, ResponseStream, Served};

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
            let map = instances.all();
            let (_, candidates) = instances.candidates(&map, &Tried::default(), Wanted::default());
            candidates[0].load
        };
        instances.apply(Change::Snapshot(vec![entry("here", 10)]));
        let request = instances.get(InstanceId(1)).unwrap().enter();
        instances.apply(change(entry("here", 20)));
        assert_eq!(load(), 1);
        drop(request);
        assert_eq!(load(), 0);
        // At another address it is another process.
        let _request = instances.get(InstanceId(1)).unwrap().enter();
        instances.apply(change(entry("there", 20)));
        assert_eq!(load(), 0);
    }
}

#[test]
fn a_key_that_writes_an_id_in_another_way_is_another_key() {
    let instances = instances(1);
    let key = entry("here", 10).key;
    let other = key.replace(&InstanceId(1).to_string(), "1");
    instances.apply(Change::Removed(other));
    assert_eq!(candidates(&instances, 0), [1]);
    instances.apply(Change::Removed(key));
    assert!(candidates(&instances, 0).is_empty());
}

/// `count` instances, with ids from 1.
fn instances(count: u64) -> Instances {
    instances_on(Arc::new(MemoryPlane::new()), count)
}

fn instances_on(plane: Arc<dyn RequestPlane>, count: u64) -> Instances {
    let instances = Instances::new(Arc::new(|_| true), Records::default(), plane);
    for id in 1..=count {
        instances.apply(Change::Put(entry_of(id, "here", 10)));
    }
    instances
}

/// The candidates of a request after `refusals` refusals by full instances that looked full.
fn candidates(instances: &Instances, refusals: usize) -> Vec<u64> {
    let tried = Tried {
        refusals,
        full: refusals,
        ..Tried::default()
    };
    let map = instances.all();
    let (_, candidates) = instances.candidates(&map, &tried, Wanted::default());
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
    // A refused request goes to an instance with no evidence against it.
    assert_eq!(candidates(&instances, 1), [2]);
    instances.get(InstanceId(1)).unwrap().took();
    assert_eq!(candidates(&instances, 1), [1, 2]);
}

#[tokio::test(start_paused = true)]
async fn an_instance_that_failed_is_skipped_for_a_while() {
    let instances = instances(2);
    let one = instances.get(InstanceId(1)).unwrap();
    one.mark_down();
    assert_eq!(candidates(&instances, 0), [2]);
    tokio::time::sleep(DOWN_TIME).await;
    assert_eq!(candidates(&instances, 0), [1, 2]);
    assert!(!one.facts.has_shown.load(Ordering::Relaxed));
}

/// Fails once by its own fault, which is enough to be ejected.
fn fail(instances: &Instances, id: u64) -> Option<Duration> {
    let config = EjectionConfig {
        after: 1,
        ..EjectionConfig::default()
    };
    instances.get(InstanceId(id)).unwrap().failed(&config)
}

/// A request that fails wherever it is tried must not leave the rest of the fleet with all the work.
#[test]
fn no_more_than_half_of_the_instances_are_ejected() {
    let fleet = instances(4);
    for (id, left) in [(2, vec![1, 3, 4]), (3, vec![1, 4]), (4, vec![1, 2, 3, 4])] {
        assert!(fail(&fleet, id).is_some());
        assert_eq!(candidates(&fleet, 0), left);
    }
    fleet.get(InstanceId(2)).unwrap().answered();
    assert_eq!(candidates(&fleet, 0), [1, 2]);
    let alone = instances(1);
    assert!(fail(&alone, 1).is_some());
    assert_eq!(candidates(&alone, 0), [1]);
}

/// As one whose memory has errors: what it answers in between does not show that it is well.
#[tokio::test(start_paused = true)]
async fn an_instance_that_fails_half_of_its_requests_is_ejected_until_it_fails_fewer() {
    let instances = instances(2);
    let one = instances.get(InstanceId(1)).unwrap();
    let fail = || one.failed(&EjectionConfig::default());
    let ejected = (0..OFTEN).filter_map(|_| {
        one.answered();
        fail()
    });
    let time = EjectionConfig::default().time;
    assert_eq!(ejected.collect::<Vec<_>>(), [time]);
    one.answered();
    assert_eq!(candidates(&instances, 0), [2]);
    tokio::time::sleep(time).await;
    assert_eq!(candidates(&instances, 0), [1, 2]);
    assert_eq!(fail(), Some(2 * time));
    tokio::time::sleep(2 * time).await;
    (0..32).for_each(|_| one.answered());
    assert_eq!(fail(), None);
    assert!(one.shown().ejection.is_none());
}

#[test]
fn an_ejected_instance_is_not_asked_for_want_of_room_elsewhere() {
    let instances = instances(2);
    fail(&instances, 1);
    let map = instances.all();
    let is_asked = |full: usize| {
        let tried = Tried {
            instances: vec![InstanceId(2)],
            full,
            ..Tried::default()
        };
        let (_, candidates) = instances.candidates(&map, &tried, Wanted::default());
        !candidates.is_empty()
    };
    // Where the others are lost, it may work after all.
    assert_eq!([0, 1].map(is_asked), [true, false]);
}

#[tokio::test(start_paused = true)]
async fn an_ejection_outlasts_a_changed_record_and_ends_with_the_instance() {
    let instances = instances(2);
    let time = fail(&instances, 1).unwrap();
    // Requests that were sent before fail too.
    assert_eq!(fail(&instances, 1), None);
    instances.apply(Change::Put(entry_of(1, "here", 20)));
    assert_eq!(candidates(&instances, 0), [2]);
    tokio::time::sleep(time).await;
    assert_eq!(candidates(&instances, 0), [1, 2]);
    assert_eq!(fail(&instances, 1), Some(2 * time));
    assert_eq!(candidates(&instances, 0), [2]);
    instances.apply(Change::Removed(entry("here", 20).key));
    instances.apply(Change::Put(entry("here", 20)));
    assert_eq!(candidates(&instances, 0), [1, 2]);
    assert_eq!(fail(&instances, 1), Some(time));
}

/// As when an adapter is loaded there while requests run.
#[tokio::test(start_paused = true)]
async fn requests_that_began_before_a_record_changed_still_say_how_they_ended() {
    let instances = instances(2);
    let before = instances.get(InstanceId(1)).unwrap();
    instances.apply(Change::Put(entry_of(1, "here", 20)));
    let config = EjectionConfig {
        after: 1,
        ..EjectionConfig::default()
    };
    assert!(before.failed(&config).is_some());
    assert_eq!(candidates(&instances, 0), [2]);
    before.answered();
    assert_eq!(candidates(&instances, 0), [1, 2]);
    before.mark_down();
    assert_eq!(candidates(&instances, 0), [2]);
    // It says again that it is there.
    instances.apply(Change::Put(entry_of(1, "here", 30)));
    assert_eq!(candidates(&instances, 0), [1, 2]);
}

/// A plane that has lost the process at one location.
#[derive(Default)]
struct Lossy {
    memory: MemoryPlane,
    lost: Arc<Mutex<&'static str>>,
    /// The number of announcements it heard.
    announced: Arc<AtomicUsize>,
}

#[async_trait]
impl RequestPlane for Lossy {
    async fn serve(
        &self,
        endpoint: &EndpointName,
        instance: InstanceId,
        handler: Arc<ErasedHandler>,
    ) -> Result<Served, EngineError> {
        self.memory.serve(endpoint, instance, handler).await
    }

    fn local(&self, address: &Address, endpoint: &EndpointName) -> Option<Arc<ErasedHandler>> {
        self.memory.local(address, endpoint)
    }

    async fn call(
        &self,
        address: &Address,
        endpoint: &EndpointName,
        body: Bytes,
        ctx: RequestContext,
    ) -> Result<ResponseStream<Bytes>, EngineError> {
        self.memory.call(address, endpoint, body, ctx).await
    }

    fn prepare(&self, _address: &Address, _endpoint: &EndpointName) {
        self.announced.fetch_add(1, Ordering::Relaxed);
    }

    fn reachability(&self, address: &Address) -> Reachability {
        let (lost, location) = (Arc::clone(&self.lost), address.location.clone());
        let doubt = Arc::new(AtomicBool::new(true));
        Reachability::new(doubt, move || *lost.lock() != location)
    }
}

#[test]
fn an_instance_is_left_out_while_its_process_is_lost() {
    let plane = Lossy::default();
    let lost = Arc::clone(&plane.lost);
    let instances = instances_on(Arc::new(plane), 1);
    instances.apply(Change::Put(entry_of(2, "there", 10)));
    assert_eq!(candidates(&instances, 0), [1, 2]);
    *lost.lock() = "here";
    assert_eq!(candidates(&instances, 0), [2]);
    // It says something else of itself, and then where else it is.
    instances.apply(Change::Put(entry_of(1, "here", 20)));
    assert_eq!(candidates(&instances, 0), [2]);
    instances.apply(Change::Put(entry_of(1, "elsewhere", 20)));
    assert_eq!(candidates(&instances, 0), [1, 2]);
    *lost.lock() = "elsewhere";
    assert_eq!(candidates(&instances, 0), [2]);
    // If all are lost, one of them may be there after all.
    instances.apply(Change::Put(entry_of(2, "elsewhere", 10)));
    assert_eq!(candidates(&instances, 0), [1, 2]);
}

/// It may have said that it leaves, before it was listed again within one look at discovery.
#[test]
fn the_plane_hears_of_an_instance_that_is_announced_again() {
    let plane = Lossy::default();
    let announced = Arc::clone(&plane.announced);
    let instances = instances_on(Arc::new(plane), 1);
    for context_length_tokens in [10, 20] {
        let again = entry_of(1, "here", context_length_tokens);
        instances.apply(Change::Put(again));
    }
    assert_eq!(announced.load(Ordering::Relaxed), 3);
    // This is no announcement.
    instances.apply(Change::Snapshot(vec![entry_of(1, "here", 20)]));
    assert_eq!(announced.load(Ordering::Relaxed), 3);
}

/// The error of an instance that is gone would keep the request from waiting for a place.
#[test]
fn after_one_that_is_full_none_is_asked_that_is_gone() {
    let plane = Lossy::default();
    let lost = Arc::clone(&plane.lost);
    let instances = instances_on(Arc::new(plane), 1);
    instances.apply(Change::Put(entry_of(2, "there", 10)));
    let map = instances.all();
    let asks_the_other = |full: usize| {
        let tried = Tried {
            instances: vec![InstanceId(1)],
            full,
            ..Tried::default()
        };
        let (_, candidates) = instances.candidates(&map, &tried, Wanted::default());
        !candidates.is_empty()
    };
    *lost.lock() = "there";
    assert_eq!([0, 1].map(asks_the_other), [true, false]);
    // One that failed a moment ago may have room.
    *lost.lock() = "";
    instances.get(InstanceId(2)).unwrap().mark_down();
    assert_eq!([0, 1].map(asks_the_other), [true, true]);
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
    // Nothing is known about an instance that publishes no load or no limit.
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
    // The one with room is found, however many are full.
    instances.get(InstanceId(20)).unwrap().took();
    assert_eq!(candidates(&instances, MOST_REFUSALS), [20]);
}

/// Its free place would otherwise be found by chance in a large fleet.
#[tokio::test(start_paused = true)]
async fn of_instances_that_all_look_full_each_is_asked_that_refused_none_for_a_while() {
    let instances = instances(20);
    (1..=20).for_each(|id| refuse(&instances, id));
    tokio::time::sleep(FULL_TIME).await;
    assert_eq!(candidates(&instances, MOST_REFUSALS).len(), 20);
    (3..=20).for_each(|id| refuse(&instances, id));
    assert_eq!(candidates(&instances, MOST_REFUSALS), [1, 2]);
    assert_eq!(candidates(&instances, MOST_FULL - 1), [1, 2]);
    assert!(candidates(&instances, MOST_FULL).is_empty());
}

/// As those of a frontend that has just started.
#[test]
fn of_instances_of_which_nothing_is_known_a_request_asks_so_many_until_they_are_full() {
    let instances = instances(100);
    assert_eq!(candidates(&instances, MOST_FULL - 1).len(), 100);
    assert!(candidates(&instances, MOST_FULL).is_empty());
}
