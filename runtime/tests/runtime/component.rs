//! Endpoints of any types: passed unchanged inside a process, as MessagePack between types.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use futures_util::{StreamExt, TryStreamExt};
use genset_backend_common::prometheus::metrics::gauge::Gauge;
use genset_backend_common::{EngineError, ErrorKind, async_trait};
use genset_runtime::discovery::{Discovery, Entry, Lease, MemoryDiscovery, Watch};
use genset_runtime::plane::MemoryPlane;
use genset_runtime::{Client, EndpointName, InstanceId, ModelDirectory, Runtime, StatusServer};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::plane::Log;
use crate::support::{Answering, PATIENCE, ctx, endpoint, listed, runtime, soon, until};

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
enum Shape {
    Point,
    Circle { radius: f64 },
    Named(String, Option<Box<Shape>>),
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Drawing {
    title: String,
    shapes: Vec<Shape>,
    tags: BTreeMap<String, u64>,
}

fn drawing() -> Drawing {
    Drawing {
        title: "über".into(),
        shapes: vec![
            Shape::Point,
            Shape::Circle { radius: 0.5 },
            Shape::Named("box".into(), Some(Box::new(Shape::Point))),
        ],
        tags: BTreeMap::from([("a".into(), u64::MAX)]),
    }
}

fn shapes(drawing: Drawing) -> Result<Vec<Shape>, EngineError> {
    Ok(drawing.shapes)
}

async fn answer<Req, Resp>(
    client: &Client<Req, Resp>,
    request: Req,
) -> Result<Vec<Resp>, EngineError>
where
    Req: genset_runtime::plane::Payload,
    Resp: genset_runtime::plane::Payload,
{
    soon(client.wait_for_instances(PATIENCE)).await?;
    let items = soon(client.random(request, ctx())).await?;
    soon(items.try_collect()).await
}

/// A type that cannot be serialized or deserialized.
#[derive(Debug, PartialEq)]
struct Opaque(u32);

impl Serialize for Opaque {
    fn serialize<S: Serializer>(&self, _serializer: S) -> Result<S::Ok, S::Error> {
        panic!("serialized inside one process");
    }
}

impl<'de> Deserialize<'de> for Opaque {
    fn deserialize<D: Deserializer<'de>>(_deserializer: D) -> Result<Self, D::Error> {
        panic!("deserialized inside one process");
    }
}

#[tokio::test]
async fn a_typed_call_inside_one_process_serializes_nothing() {
    let (runtime, _) = runtime();
    let endpoint = endpoint(&runtime, "opaque");
    let double = |Opaque(number)| Ok(vec![Opaque(number), Opaque(2 * number)]);
    let _serving = listed(&endpoint, 1, Answering::new(double)).await;
    let client = endpoint.client::<Opaque, Opaque>();
    let answer = answer(&client, Opaque(21)).await.unwrap();
    assert_eq!(answer, [Opaque(21), Opaque(42)]);
}

/// A newer client's [`Drawing`], with one more field.
#[derive(Serialize, Deserialize)]
struct NewerDrawing {
    title: String,
    shapes: Vec<Shape>,
    tags: BTreeMap<String, u64>,
    since: u32,
}

#[tokio::test]
async fn a_client_of_other_types_is_understood_where_they_agree() {
    let (runtime, _) = runtime();
    let endpoint = endpoint(&runtime, "shapes");
    let _serving = listed(&endpoint, 1, Answering::new(shapes)).await;
    let client = endpoint.client::<NewerDrawing, Shape>();
    let Drawing {
        title,
        shapes,
        tags,
    } = drawing();
    let request = NewerDrawing {
        title,
        shapes,
        tags,
        since: 7,
    };
    assert_eq!(answer(&client, request).await.unwrap(), drawing().shapes);
}

#[tokio::test(start_paused = true)]
async fn waiting_for_instances_has_a_deadline_that_names_the_endpoint() {
    let (runtime, _) = runtime();
    let endpoint = endpoint(&runtime, "nobody");
    let client = endpoint.client::<u8, u8>();
    let error = client.wait_for_instances(PATIENCE).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    assert!(error.message().contains("test.c.nobody"), "{error}");
    let error = client
        .random(1, ctx())
        .await
        .err()
        .expect("nobody is there");
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    assert!(error.details().retry_after.is_some());
}

#[tokio::test]
async fn an_unknown_instance_is_not_found_and_a_known_one_answers() {
    let (runtime, _) = runtime();
    let endpoint = endpoint(&runtime, "who");
    let who = |name: &'static str| Answering::new(move |()| Ok(vec![name.to_owned()]));
    let _one = listed(&endpoint, 1, who("one")).await;
    let _two = listed(&endpoint, 2, who("two")).await;
    let client = endpoint.client::<(), String>();
    soon(client.wait_for_instances(PATIENCE)).await.unwrap();
    until(|| client.instances().len() == 2).await;
    for (id, name) in [(1, "one"), (2, "two"), (1, "one")] {
        let mut items = client.direct(InstanceId(id), (), ctx()).await.unwrap();
        assert_eq!(soon(items.next()).await.unwrap().unwrap(), name);
    }
    let error = client.direct(InstanceId(3), (), ctx()).await.err().unwrap();
    assert_eq!(error.kind(), ErrorKind::NotFound);
}

#[tokio::test]
async fn an_instance_serves_an_endpoint_once_until_it_is_dropped() {
    let (runtime, discovery) = runtime();
    let endpoint = endpoint(&runtime, "once");
    let handler = || Answering::new(|_: u8| Ok(vec![1_u8]));
    let first = listed(&endpoint, 1, handler()).await;
    let again = endpoint.serve_as(InstanceId(1), handler()).await;
    assert_eq!(again.unwrap_err().kind(), ErrorKind::InvalidArgument);
    drop(first);
    let listed_now = discovery.get("").await;
    assert_eq!(listed_now.unwrap(), []);
    endpoint.serve_as(InstanceId(1), handler()).await.unwrap();
}

#[tokio::test]
async fn nothing_of_a_runtime_is_alive_after_its_shutdown() {
    let (runtime, _) = runtime();
    let endpoint = endpoint(&runtime, "e");
    let _serving = listed(&endpoint, 1, Answering::new(|_: u8| Ok(vec![1_u8]))).await;
    let client = endpoint.client::<u8, u8>();
    let directory = ModelDirectory::follow(&runtime);
    let is_ready: genset_runtime::Readiness = Arc::new(|| true);
    let status =
        StatusServer::bind(([127, 0, 0, 1], 0).into(), &runtime, is_ready.into(), None).await;
    assert_eq!(runtime.tasks(), 3);
    drop(client);
    soon(runtime.shutdown()).await;
    assert_eq!(runtime.tasks(), 0);
    drop((directory, status));
    let late = runtime.endpoint(EndpointName::default()).client::<u8, u8>();
    soon(runtime.shutdown()).await;
    assert_eq!(runtime.tasks(), 0);
    drop(late);
}

/// Discovery that nobody can watch until it is back.
struct Away {
    is_back: AtomicBool,
    memory: MemoryDiscovery,
    outages: Gauge,
}

#[async_trait]
impl Discovery for Away {
    async fn lease(&self) -> Result<Box<dyn Lease>, EngineError> {
        self.memory.lease().await
    }

    async fn get(&self, prefix: &str) -> Result<Vec<Entry>, EngineError> {
        self.memory.get(prefix).await
    }

    async fn watch(&self, prefix: &str) -> Result<Box<dyn Watch>, EngineError> {
        if self.is_back.load(Ordering::Relaxed) {
            return self.memory.watch(prefix).await;
        }
        Err(EngineError::new(ErrorKind::Unavailable, "nobody is there"))
    }

    fn outages(&self) -> Gauge {
        self.outages.clone()
    }
}

/// As when a frontend starts before etcd.
#[tokio::test(start_paused = true)]
async fn discovery_that_is_away_from_the_start_is_counted_and_logged_once_a_minute() {
    let log = Log::watched();
    let away = Arc::new(Away {
        is_back: AtomicBool::new(false),
        memory: MemoryDiscovery::new(),
        outages: Gauge::default(),
    });
    let runtime = Runtime::new(away.clone(), Arc::new(MemoryPlane::new()));
    let client = endpoint(&runtime, "e").client::<u8, u8>();
    for lines in 1..=3 {
        tokio::time::sleep(Duration::from_secs(59)).await;
        assert_eq!((log.lines(), away.outages.get()), (lines, 1));
    }
    let second = Duration::from_secs(1);
    let error = client.wait_for_instances(second).await.unwrap_err();
    assert!(
        error.message().ends_with("discovery cannot be reached"),
        "{error}"
    );
    away.is_back.store(true, Ordering::Relaxed);
    tokio::time::sleep(Duration::from_secs(6)).await;
    assert_eq!((log.lines(), away.outages.get()), (4, 0));
    drop(client);
}
