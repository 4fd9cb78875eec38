//! Workers on the runtime: when they are listed, and the endpoints beside `generate`.

use std::collections::BTreeSet;
use std::sync::Arc;

use futures_util::StreamExt;
use genset_backend_common::kv::{BlockHash, KvEvent, KvEventData, StoredBlock};
use genset_backend_common::output::OutputStream;
use genset_backend_common::worker::WorkerHandle;
use genset_backend_common::{
    CancelReason, ErrorKind, GenerateRequest, MetricsRegistry, Output, RequestContext,
    controls::{ControlReply, ControlRequest, SleepLevel},
    handles::Load,
};
use genset_runtime::discovery::{Change, Discovery, InstanceRecord, MemoryDiscovery};
use genset_runtime::plane::{Payload, RequestPlane, WireConfig, WirePlane};
use genset_runtime::{
    ArtifactRequest, Client, EndpointName, InstanceId, KvItem, Runtime, endpoints,
};
use genset_wire::encode_payload;

use crate::support::{
    Answering, PATIENCE, Publishing, ctx, endpoint, finish, listed, over_tcp, request, runtime,
    sample, soon, start, until, worker_config,
};

const ID: u64 = 42;

async fn listed_endpoints(discovery: &MemoryDiscovery) -> BTreeSet<String> {
    let entries = discovery.get("").await.unwrap();
    let records = entries
        .iter()
        .map(|entry| InstanceRecord::try_from_entry(entry).unwrap());
    let name = |record: InstanceRecord| {
        assert_eq!(record.instance.0, ID);
        record.endpoint.endpoint
    };
    records.map(name).collect()
}

fn all_endpoints() -> BTreeSet<String> {
    use endpoints::{ARTIFACTS, CONTROL, KV_EVENTS, LOAD, LOAD_METRICS};
    [
        "generate",
        ARTIFACTS,
        CONTROL,
        KV_EVENTS,
        LOAD,
        LOAD_METRICS,
    ]
    .map(String::from)
    .into()
}

async fn client<Req: Payload, Resp: Payload>(runtime: &Runtime, name: &str) -> Client<Req, Resp> {
    let name = EndpointName::default().sibling(name).unwrap();
    let client = runtime.endpoint(name).client();
    soon(client.wait_for_instances(PATIENCE)).await.unwrap();
    client
}

#[tokio::test]
async fn a_worker_is_listed_while_it_serves_and_gone_after() {
    let (runtime, discovery) = runtime();
    let worker = start(&runtime, ID, sample(0), worker_config(Vec::new())).await;
    assert_eq!(listed_endpoints(&discovery).await, all_endpoints());
    let report = soon(worker.shutdown()).await;
    assert_eq!(report.outcome.exit_code(), 0);
    assert_eq!(listed_endpoints(&discovery).await, BTreeSet::new());
    soon(runtime.shutdown()).await;
    assert_eq!(runtime.tasks(), 0);
}

#[tokio::test]
async fn a_draining_worker_is_unlisted_and_finishes_what_it_has() {
    let (runtime, discovery) = runtime();
    let worker = start(&runtime, ID, sample(2), worker_config(Vec::new())).await;
    let client = client::<GenerateRequest, _>(&runtime, "generate").await;
    let mut items = client.random(request(100), ctx()).await.unwrap();
    soon(items.next()).await.unwrap().unwrap();
    let mut watch = discovery.watch("").await.unwrap();
    worker.stop();
    while !listed_endpoints(&discovery).await.is_empty() {
        soon(watch.next()).await.unwrap();
    }
    let usage = finish(OutputStream::from_raw(items)).await.unwrap();
    assert_eq!(usage.completion_tokens, 100);
    assert_eq!(soon(worker.shutdown()).await.outcome.exit_code(), 0);
}

#[tokio::test]
async fn a_worker_whose_lease_is_lost_is_listed_again_under_its_id() {
    let (runtime, discovery) = runtime();
    let worker = start(&runtime, ID, sample(1), worker_config(Vec::new())).await;
    let client = client::<GenerateRequest, _>(&runtime, "generate").await;
    let mut held = client.random(request(500), ctx()).await.unwrap();
    soon(held.next()).await.unwrap().unwrap();
    for _ in 0..3 {
        let mut watch = discovery.watch("").await.unwrap();
        assert!(matches!(
            soon(watch.next()).await,
            Some(Change::Snapshot(_))
        ));
        discovery.expire_leases();
        while listed_endpoints(&discovery).await != all_endpoints() {
            soon(watch.next()).await.unwrap();
        }
    }
    // The request in progress was not affected.
    let usage = finish(OutputStream::from_raw(held)).await.unwrap();
    assert_eq!(usage.completion_tokens, 500);
    soon(worker.shutdown()).await;
    assert_eq!(listed_endpoints(&discovery).await, BTreeSet::new());
}

/// A runtime on TCP with its own discovery.
fn on_tcp() -> (Runtime, Arc<WirePlane>, MemoryDiscovery) {
    let plane = over_tcp(WireConfig::default(), &MetricsRegistry::default());
    let discovery = MemoryDiscovery::new();
    let runtime = Runtime::new(Arc::new(discovery.clone()), plane.clone());
    (runtime, plane, discovery)
}

/// The client's discovery never reports that the worker leaves: the worker itself does.
#[tokio::test]
async fn a_worker_that_leaves_tells_its_clients_before_discovery_does() {
    let (runtime, plane, discovery) = on_tcp();
    let lease = discovery.lease().await.unwrap();
    let mut sites = Vec::new();
    for id in [ID, ID + 1] {
        let (site, _, listed) = on_tcp();
        let worker = start(&site, id, sample(1), worker_config(Vec::new())).await;
        for entry in listed.get("").await.unwrap() {
            lease.put(entry).await.unwrap();
        }
        sites.push((site, worker));
    }
    let client = client::<GenerateRequest, Output>(&runtime, "generate").await;
    until(|| client.instances().len() == 2).await;
    let leaving = client
        .instances()
        .into_iter()
        .find(|it| it.instance.0 == ID);
    let leaving = leaving.unwrap();
    let mut held = client
        .direct(leaving.instance, request(100_000), ctx())
        .await
        .unwrap();
    soon(held.next()).await.unwrap().unwrap();
    sites[0].1.stop();
    until(|| !plane.is_reachable(&leaving.address)).await;
    for _ in 0..10 {
        // The leaving one would refuse.
        let items = client.random(request(1), ctx()).await.unwrap();
        soon(finish(OutputStream::from_raw(items))).await.unwrap();
    }
    // Its requests in progress continue.
    soon(held.next()).await.unwrap().unwrap();
    drop(held);
    lease.put(leaving.to_entry().unwrap()).await.unwrap();
    until(|| plane.is_reachable(&leaving.address)).await;
    for (site, worker) in sites {
        soon(worker.shutdown()).await;
        soon(site.shutdown()).await;
    }
    soon(runtime.shutdown()).await;
}

/// The same for an endpoint: the client's discovery never reports that it leaves.
#[tokio::test]
async fn an_endpoint_that_leaves_tells_its_clients_before_discovery_does() {
    let (runtime, plane, discovery) = on_tcp();
    let lease = discovery.lease().await.unwrap();
    let mut sites = Vec::new();
    for id in [ID, ID + 1] {
        let (site, _, _) = on_tcp();
        let answering = Answering::new(move |(): ()| Ok(vec![id]));
        let serving = listed(&endpoint(&site, "who"), id, answering).await;
        let entry = serving.record(None).to_entry().unwrap();
        lease.put(entry).await.unwrap();
        sites.push((site, serving));
    }
    let client: Client<(), u64> = endpoint(&runtime, "who").client();
    until(|| client.instances().len() == 2).await;
    let who = async |instance: InstanceId| {
        let mut items = client.direct(instance, (), ctx()).await.unwrap();
        soon(items.next()).await.unwrap().unwrap()
    };
    // Only connected clients are notified.
    assert_eq!(who(InstanceId(ID)).await, ID);
    let (site, leaving) = &sites[0];
    let address = leaving.record(None).address;
    // Unlist only the other endpoint: a notice would reach the client before the next response.
    let answering = Answering::new(|(): ()| Ok(vec![0_u64]));
    let beside = listed(&endpoint(site, "beside"), ID, answering).await;
    beside.unlist().await.unwrap();
    assert_eq!(who(InstanceId(ID)).await, ID);
    assert!(plane.is_reachable(&address));
    leaving.unlist().await.unwrap();
    until(|| !plane.is_reachable(&address)).await;
    for _ in 0..10 {
        let mut items = client.random((), ctx()).await.unwrap();
        assert_eq!(soon(items.next()).await.unwrap().unwrap(), ID + 1);
    }
    // It responds to direct requests.
    assert_eq!(who(InstanceId(ID)).await, ID);
    for (site, serving) in sites {
        drop(serving);
        soon(site.shutdown()).await;
    }
    soon(runtime.shutdown()).await;
}

#[tokio::test]
async fn an_endpoint_beside_a_worker_leaves_alone() {
    let (runtime, plane, discovery) = on_tcp();
    let (site, _, of_site) = on_tcp();
    let worker = start(&site, ID, sample(0), worker_config(Vec::new())).await;
    let answering = Answering::new(|(): ()| Ok(vec![0_u64]));
    let beside = listed(&endpoint(&site, "beside"), ID, answering).await;
    let lease = discovery.lease().await.unwrap();
    for entry in of_site.get("").await.unwrap() {
        lease.put(entry).await.unwrap();
    }
    let client = client::<GenerateRequest, Output>(&runtime, "generate").await;
    let address = client.instances()[0].address.clone();
    let ask = async || {
        let items = client.direct(InstanceId(ID), request(1), ctx()).await;
        let outputs = OutputStream::from_raw(items.unwrap());
        soon(finish(outputs)).await.unwrap();
    };
    // Only connected clients are notified, before their next response.
    ask().await;
    beside.unlist().await.unwrap();
    ask().await;
    assert!(plane.is_reachable(&address));
    worker.stop();
    until(|| !plane.is_reachable(&address)).await;
    soon(worker.shutdown()).await;
    drop(beside);
    soon(site.shutdown()).await;
    soon(runtime.shutdown()).await;
}

#[tokio::test]
async fn a_worker_beside_an_endpoint_leaves_alone() {
    let (runtime, plane, discovery) = on_tcp();
    let (site, _, of_site) = on_tcp();
    let worker = start(&site, ID, sample(0), worker_config(Vec::new())).await;
    let answering = Answering::new(|(): ()| Ok(vec![7_u64]));
    let beside = listed(&endpoint(&site, "beside"), ID, answering).await;
    let lease = discovery.lease().await.unwrap();
    for entry in of_site.get("").await.unwrap() {
        lease.put(entry).await.unwrap();
    }
    let client: Client<(), u64> = endpoint(&runtime, "beside").client();
    soon(client.wait_for_instances(PATIENCE)).await.unwrap();
    let address = client.instances()[0].address.clone();
    let ask = async || {
        let items = client.direct(InstanceId(ID), (), ctx()).await;
        soon(items.unwrap().next()).await.unwrap().unwrap()
    };
    // Only connected clients are notified, before their next response.
    assert_eq!(ask().await, 7);
    soon(worker.shutdown()).await;
    assert_eq!(ask().await, 7);
    assert!(plane.is_reachable(&address));
    drop(beside);
    soon(site.shutdown()).await;
    soon(runtime.shutdown()).await;
}

/// A worker of an engine that publishes, and the engine.
async fn publishing() -> (Runtime, WorkerHandle, Arc<Publishing>) {
    let (runtime, _) = runtime();
    let engine = Arc::new(Publishing::default());
    let worker = start(&runtime, ID, engine.clone(), worker_config(Vec::new())).await;
    (runtime, worker, engine)
}

fn stored(parent: Option<u64>, block: u64) -> KvEventData {
    KvEventData::Stored {
        parent: parent.map(BlockHash),
        blocks: vec![BlockHash(block)],
    }
}

#[tokio::test]
async fn kv_events_are_a_snapshot_and_then_every_change() {
    let (runtime, worker, engine) = publishing().await;
    let publisher = &engine.start.get().unwrap().kv_events;
    let first = publisher.publish(stored(None, 1));

    let client = client::<(), KvItem>(&runtime, endpoints::KV_EVENTS).await;
    let mut items = client.random((), ctx()).await.unwrap();
    let KvItem::Snapshot(snapshot) = soon(items.next()).await.unwrap().unwrap() else {
        panic!("no snapshot first")
    };
    assert_eq!(snapshot.last_event_id, first);
    let block = StoredBlock {
        hash: BlockHash(1),
        parent: None,
    };
    assert_eq!(snapshot.blocks, [block]);
    for data in [stored(Some(1), 2), KvEventData::Cleared] {
        let id = publisher.publish(data.clone());
        let change = soon(items.next()).await.unwrap().unwrap();
        assert_eq!(change, KvItem::Change(KvEvent { id, data }));
    }
    soon(worker.shutdown()).await;
}

#[tokio::test]
async fn streams_without_an_end_end_when_they_are_cancelled_and_with_their_worker() {
    let (runtime, worker, engine) = publishing().await;
    let events = client::<(), KvItem>(&runtime, endpoints::KV_EVENTS).await;
    let loads = client::<(), Load>(&runtime, endpoints::LOAD).await;
    let open = async |ctx: RequestContext| {
        let mut events = events.random((), ctx.clone()).await.unwrap();
        let mut loads = loads.random((), ctx).await.unwrap();
        soon(events.next()).await.unwrap().unwrap();
        soon(loads.next()).await.unwrap().unwrap();
        (events, loads)
    };
    let ctx = ctx();
    let (mut cancelled_events, mut cancelled_loads) = open(ctx.clone()).await;
    let (mut events, mut loads) = open(RequestContext::new("kept")).await;
    ctx.cancel(CancelReason::Client);
    assert!(soon(cancelled_events.next()).await.is_none());
    assert!(soon(cancelled_loads.next()).await.is_none());
    // The other streams continue.
    let publisher = &engine.start.get().unwrap().kv_events;
    publisher.publish(stored(None, 1));
    soon(events.next()).await.unwrap().unwrap();
    soon(worker.shutdown()).await;
    assert!(soon(events.next()).await.is_none());
    assert!(soon(loads.next()).await.is_none());
}

/// More blocks than fit into one frame.
#[tokio::test]
async fn a_snapshot_of_very_many_blocks_comes_in_parts() {
    const BLOCKS: u64 = 600_000;
    let (runtime, worker, engine) = publishing().await;
    let publisher = &engine.start.get().unwrap().kv_events;
    for first in (0..BLOCKS).step_by(1000) {
        let blocks = (first..first + 1000).map(BlockHash).collect();
        let parent = first.checked_sub(1).map(BlockHash);
        publisher.publish(KvEventData::Stored { parent, blocks });
    }
    let client = client::<(), KvItem>(&runtime, endpoints::KV_EVENTS).await;
    let mut items = client.random((), ctx()).await.unwrap();
    let (mut blocks, mut last) = (0, 0);
    while blocks < 600_000 {
        let item = soon(items.next()).await.unwrap().unwrap();
        let bytes = encode_payload(&item).unwrap().len();
        assert!(bytes < 16 << 20, "{bytes}");
        match item {
            KvItem::Snapshot(snapshot) => {
                blocks += snapshot.blocks.len();
                last = snapshot.last_event_id;
            }
            KvItem::Change(KvEvent { id, data }) => {
                last += 1;
                assert_eq!(id, last);
                let KvEventData::Stored { blocks: more, .. } = data else {
                    panic!("blocks are stored")
                };
                blocks += more.len();
            }
        }
    }
    // Later events are changes.
    let id = publisher.publish(KvEventData::Cleared);
    let change = soon(items.next()).await.unwrap().unwrap();
    let data = KvEventData::Cleared;
    assert_eq!(
        (change, id),
        (KvItem::Change(KvEvent { id, data }), last + 1)
    );
    soon(worker.shutdown()).await;
}

#[tokio::test]
async fn the_load_is_told_at_once_and_when_it_changes() {
    let (runtime, worker, engine) = publishing().await;
    let limits = worker_config(Vec::new()).limits;
    let load = |kv_used_blocks| Load {
        kv_used_blocks,
        kv_total_blocks: 10,
        max_requests: (limits.max_running + limits.max_waiting)
            .try_into()
            .unwrap(),
        ..Load::default()
    };
    let publisher = &engine.start.get().unwrap().load;
    publisher.publish(load(1));
    let client = client::<(), Load>(&runtime, endpoints::LOAD).await;
    let mut items = client.random((), ctx()).await.unwrap();
    assert_eq!(soon(items.next()).await.unwrap().unwrap(), load(1));
    publisher.publish(load(2));
    assert_eq!(soon(items.next()).await.unwrap().unwrap(), load(2));
    let by_other_name = self::client::<(), Load>(&runtime, endpoints::LOAD_METRICS).await;
    let mut items = by_other_name.random((), ctx()).await.unwrap();
    assert_eq!(soon(items.next()).await.unwrap().unwrap(), load(2));
    soon(worker.shutdown()).await;
}

#[tokio::test]
async fn controls_reach_the_engine_and_missing_ones_are_refused() {
    let (runtime, worker, _) = publishing().await;
    let client = client::<ControlRequest, ControlReply>(&runtime, endpoints::CONTROL).await;
    let sleep = ControlRequest::Sleep {
        level: SleepLevel::Weights,
    };
    let mut reply = client.random(sleep, ctx()).await.unwrap();
    assert_eq!(
        soon(reply.next()).await.unwrap().unwrap(),
        ControlReply::Done
    );
    assert!(soon(reply.next()).await.is_none());
    let refused = client.random(ControlRequest::StartProfile, ctx()).await;
    assert_eq!(refused.err().unwrap().kind(), ErrorKind::Unsupported);
    soon(worker.shutdown()).await;
}

#[tokio::test]
async fn every_endpoint_answers_through_bytes_too() {
    let (runtime, worker, _) = publishing().await;
    // Types of the same shape that the handlers do not have, which forces the path of another process.
    let kv = client::<Option<()>, KvItem>(&runtime, endpoints::KV_EVENTS).await;
    let mut items = kv.random(None, ctx()).await.unwrap();
    assert!(matches!(
        soon(items.next()).await.unwrap().unwrap(),
        KvItem::Snapshot(_)
    ));
    let generate = client::<Box<GenerateRequest>, Output>(&runtime, "generate").await;
    let items = generate.random(Box::new(request(1)), ctx()).await.unwrap();
    let usage = finish(OutputStream::from_raw(items)).await.unwrap();
    assert_eq!((usage.prompt_tokens, usage.completion_tokens), (3, 1));
    let artifacts = client::<Box<ArtifactRequest>, Vec<u8>>(&runtime, endpoints::ARTIFACTS).await;
    let request = ArtifactRequest {
        blake3: String::new(),
    };
    let refused = artifacts.random(Box::new(request), ctx()).await;
    assert_eq!(refused.err().unwrap().kind(), ErrorKind::NotFound);
    soon(worker.shutdown()).await;
}
