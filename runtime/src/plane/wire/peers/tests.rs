//! What clients know of processes, over connections whose other end the tests play. The clock is paused.

use async_trait::async_trait;
use bytes::{Bytes, BytesMut};
use genset_backend_common::{MetricsRegistry, RequestContext};
use genset_wire::{FrameKind, GoAway, GoAwayCode, Leaving, encode_frame, encode_payload};
use serde::Serialize;
use tokio::io::AsyncWriteExt;
use tokio::sync::mpsc;

use super::super::caller::LEAVING_TIME;
use super::super::transport::{Io, Listener, Transport};
use super::super::{WireConfig, WirePlane};
use super::*;
use crate::discovery::Address;
use crate::names::EndpointName;
use crate::plane::RequestPlane;
use crate::vital::VitalRuntime;

/// Longer than any test, on the paused clock.
const PATIENCE: Duration = Duration::from_secs(3600);

/// A transport whose connections arrive at the test, whatever process they are for.
#[derive(Default)]
struct Played {
    /// Where they arrive; nobody listens if it is closed.
    listener: Mutex<Option<mpsc::Sender<Io>>>,
}

impl Played {
    /// Listens until the result is dropped.
    fn open(&self) -> mpsc::Receiver<Io> {
        let (listener, arriving) = mpsc::channel(8);
        *self.listener.lock() = Some(listener);
        arriving
    }
}

#[async_trait]
impl Transport for Played {
    fn name(&self) -> &'static str {
        "played"
    }

    fn is_local(&self) -> bool {
        true
    }

    async fn dial(&self, _location: &str) -> Result<Io, EngineError> {
        let (ours, theirs) = tokio::io::duplex(1 << 16);
        let theirs = Io::split(theirs, "the plane".into());
        let listener = self.listener.lock().clone();
        match listener.map(|listener| listener.try_send(theirs)) {
            Some(Ok(())) => Ok(Io::split(ours, "the test".into())),
            Some(Err(_)) | None => {
                let message = "nobody listens";
                Err(EngineError::new(ErrorKind::CannotConnect, message))
            }
        }
    }

    async fn listen(&self) -> Result<Box<dyn Listener>, EngineError> {
        let message = "these tests only call";
        Err(EngineError::new(ErrorKind::Unavailable, message))
    }
}

/// A plane that waits long for a silent peer, and its transport.
fn plane() -> (WirePlane, Arc<Played>) {
    plane_with(&MetricsRegistry::default())
}

/// The same, with its metrics there.
fn plane_with(metrics: &MetricsRegistry) -> (WirePlane, Arc<Played>) {
    let config = WireConfig {
        peer_timeout: PATIENCE,
        write_timeout: PATIENCE,
        ..WireConfig::default()
    };
    let played = Arc::new(Played::default());
    let vital = VitalRuntime::of_current();
    let plane = WirePlane::new(vital, played.clone(), config, metrics).unwrap();
    (plane, played)
}

/// The address of an instance of a process.
fn at(process: &str, instance: u64) -> Address {
    Address {
        plane: "played".into(),
        location: format!("{process}/{}", InstanceId(instance)),
    }
}

/// Waits until it holds.
async fn until(holds: impl Fn() -> bool) {
    let held = async {
        while !holds() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    tokio::time::timeout(PATIENCE, held).await.unwrap();
}

/// Accepts a connection of the plane to a process, and waits until the plane has it.
async fn accept(plane: &WirePlane, process: &str, arriving: &mut mpsc::Receiver<Io>) -> Io {
    let mut io = arriving.recv().await.unwrap();
    let config = WireConfig::default();
    let greeted = handshake::greet(&mut io, Role::Callee, &config).await;
    greeted.unwrap();
    until(|| plane.shared.peers.peer(process).open_caller().is_some()).await;
    io
}

/// Has the plane connect to a process, and accepts.
async fn connect(plane: &WirePlane, process: &str, arriving: &mut mpsc::Receiver<Io>) -> Io {
    plane.prepare(&at(process, 1), &EndpointName::default());
    accept(plane, process, arriving).await
}

/// Sends a frame to the plane.
async fn say(io: &mut Io, kind: FrameKind, payload: &impl Serialize) {
    let payload = encode_payload(payload).unwrap();
    let mut frame = BytesMut::new();
    encode_frame(kind, 0, &payload, &mut frame).unwrap();
    io.writer.write_all(&frame).await.unwrap();
}

/// How many processes the plane knows.
fn known(plane: &WirePlane) -> usize {
    plane.shared.peers.peers.lock().len()
}

/// Whether an answer about this process takes a look.
fn is_doubtful(plane: &WirePlane, process: &str) -> bool {
    let peer = plane.shared.peers.peer(process);
    peer.doubt.load(Ordering::Relaxed)
}

#[tokio::test(start_paused = true)]
async fn all_instances_of_a_process_are_gone_with_it_and_come_back_with_it() {
    let (plane, played) = plane();
    let all = [at("a", 1), at("a", 2), at("b", 3)].map(|address| plane.reachability(&address));
    let are_reachable = || all.each_ref().map(Reachability::is_reachable);
    assert_eq!(are_reachable(), [true; 3]);
    for _ in 0..3 {
        let mut arriving = played.open();
        let process = connect(&plane, "a", &mut arriving).await;
        assert_eq!(are_reachable(), [true; 3]);
        drop((process, arriving));
        until(|| !all[0].is_reachable()).await;
        assert_eq!(are_reachable(), [false, false, true]);
        // So it is for those who ask now.
        assert!(!plane.is_reachable(&at("a", 4)));

        let mut arriving = played.open();
        let process = accept(&plane, "a", &mut arriving).await;
        assert_eq!(are_reachable(), [true; 3]);
        assert!(!is_doubtful(&plane, "a"));
        // Another loss is seen, too.
        drop((process, arriving));
        until(|| !all[0].is_reachable()).await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_connection_that_ended_is_not_counted_while_its_process_is_redialled() {
    let metrics = MetricsRegistry::default();
    let (plane, played) = plane_with(&metrics);
    let counts = |open: u32| {
        let line = format!("genset_wire_connections{{role=\"caller\"}} {open}\n");
        metrics.encode().contains(&line)
    };
    let instance = plane.reachability(&at("a", 1));
    let mut arriving = played.open();
    let process = connect(&plane, "a", &mut arriving).await;
    until(|| counts(1)).await;
    drop((process, arriving));
    until(|| !instance.is_reachable()).await;
    assert!(counts(0), "{}", metrics.encode());
}

/// As behind a broken network, when discovery still hears from the worker.
#[tokio::test(start_paused = true)]
async fn a_lost_process_is_skipped_until_it_is_reached_again() {
    let metrics = MetricsRegistry::default();
    let (plane, played) = plane_with(&metrics);
    let unreachable = |processes: u32| {
        let line = format!("genset_wire_unreachable_processes {processes}\n");
        metrics.encode().contains(&line)
    };
    let instance = plane.reachability(&at("a", 1));
    let mut arriving = played.open();
    let process = connect(&plane, "a", &mut arriving).await;
    assert!(unreachable(0), "{}", metrics.encode());
    drop((process, arriving));
    until(|| !instance.is_reachable()).await;
    tokio::time::sleep(10 * REDIAL_TIME).await;
    assert!(!instance.is_reachable() && unreachable(1));
    // There are no calls, but it is found.
    let mut arriving = played.open();
    let process = accept(&plane, "a", &mut arriving).await;
    assert!(instance.is_reachable() && unreachable(0));
    // Once no client lists it, it is forgotten.
    drop((process, arriving));
    until(|| unreachable(1)).await;
    drop(instance);
    tokio::time::sleep(2 * REDIAL_TIME).await;
    assert!(unreachable(0), "{}", metrics.encode());
}

/// As when requests reach a process that accepts connections and closes them.
#[tokio::test(start_paused = true)]
async fn a_process_that_is_lost_again_before_its_redial_is_redialled_by_one_task() {
    let (plane, played) = plane();
    let instance = plane.reachability(&at("a", 1));
    for _ in 0..3 {
        let mut arriving = played.open();
        let process = connect(&plane, "a", &mut arriving).await;
        drop((process, arriving));
        until(|| !instance.is_reachable()).await;
    }
    until(|| plane.shared.common.tasks.len() == 1).await;
}

/// As with a wrong address, or one that the network closes to this process.
#[tokio::test(start_paused = true)]
async fn a_process_that_was_never_reached_is_skipped_until_it_is() {
    let (plane, played) = plane();
    let instance = plane.reachability(&at("a", 1));
    assert!(instance.is_reachable());
    plane.prepare(&at("a", 1), &EndpointName::default());
    until(|| !instance.is_reachable()).await;
    tokio::time::sleep(10 * REDIAL_TIME).await;
    assert!(!instance.is_reachable());
    let mut arriving = played.open();
    let process = accept(&plane, "a", &mut arriving).await;
    assert!(instance.is_reachable());
    // Its loss is seen, too.
    drop((process, arriving));
    until(|| !instance.is_reachable()).await;
}

/// They share one attempt to connect, which outlives them and tells later ones to go elsewhere.
#[tokio::test(start_paused = true)]
async fn requests_wait_for_a_silent_process_until_their_deadlines() {
    let (plane, played) = plane();
    let instance = plane.reachability(&at("a", 1));
    let mut arriving = played.open();
    let began = Instant::now();
    let time = Duration::from_secs(1);
    for _ in 0..2 {
        let ctx = RequestContext::new("r").with_deadline(Instant::now() + time);
        let (address, endpoint) = (at("a", 1), EndpointName::default());
        let answer = plane.call(&address, &endpoint, Bytes::new(), ctx).await;
        assert_eq!(answer.err().unwrap().kind(), ErrorKind::DeadlineExceeded);
    }
    assert_eq!(began.elapsed(), 2 * time);
    assert!(instance.is_reachable());
    let _silent = arriving.recv().await.unwrap();
    until(|| !instance.is_reachable()).await;
    assert!(arriving.try_recv().is_err());
    let _process = accept(&plane, "a", &mut arriving).await;
    assert!(instance.is_reachable());
}

/// It is dialled in vain before its last connection ends.
#[tokio::test(start_paused = true)]
async fn a_process_that_said_goodbye_is_gone_when_its_connection_ends() {
    let metrics = MetricsRegistry::default();
    let (plane, played) = plane_with(&metrics);
    let instance = plane.reachability(&at("a", 1));
    let mut arriving = played.open();
    let mut process = connect(&plane, "a", &mut arriving).await;
    drop(arriving);
    let goodbye = GoAway {
        code: GoAwayCode::Shutdown,
        reason: "this process shuts down".into(),
    };
    say(&mut process, FrameKind::GoAway, &goodbye).await;
    until(|| plane.shared.peers.peer("a").has_said_goodbye()).await;
    assert!(plane.shared.peers.caller("a").await.is_err());
    assert!(instance.is_reachable());
    drop(process);
    until(|| !instance.is_reachable()).await;
    assert!(!plane.is_reachable(&at("a", 1)));
    // That is no fault.
    let none = "genset_wire_unreachable_processes 0\n";
    assert!(metrics.encode().contains(none), "{}", metrics.encode());
}

#[tokio::test(start_paused = true)]
async fn an_instance_that_leaves_is_skipped_for_a_while_and_no_other() {
    let (plane, played) = plane();
    let [leaving, other] = [1, 2].map(|instance| plane.reachability(&at("a", instance)));
    let mut arriving = played.open();
    let mut process = connect(&plane, "a", &mut arriving).await;
    let notice = Leaving { instance: 1 };
    say(&mut process, FrameKind::Leaving, &notice).await;
    until(|| !leaving.is_reachable()).await;
    assert!(other.is_reachable());
    tokio::time::sleep(LEAVING_TIME).await;
    assert!(leaving.is_reachable() && other.is_reachable());
    assert!(!is_doubtful(&plane, "a"));

    // It is listed again.
    say(&mut process, FrameKind::Leaving, &notice).await;
    until(|| !leaving.is_reachable()).await;
    plane.prepare(&at("a", 1), &EndpointName::default());
    assert!(leaving.is_reachable());

    // The process is another after a new connection.
    say(&mut process, FrameKind::Leaving, &notice).await;
    until(|| !leaving.is_reachable()).await;
    drop(process);
    until(|| !other.is_reachable()).await;
    let _process = accept(&plane, "a", &mut arriving).await;
    assert!(leaving.is_reachable() && other.is_reachable());
}

#[tokio::test(start_paused = true)]
async fn processes_that_nobody_uses_are_forgotten() {
    let (plane, played) = plane();
    // They were asked about, and dialled in vain.
    assert!(plane.is_reachable(&at("a", 1)));
    assert!(plane.shared.peers.caller("b").await.is_err());
    plane.prepare(&at("c", 1), &EndpointName::default());
    until(|| known(&plane) == 0).await;

    let instance = plane.reachability(&at("a", 1));
    let again = plane.reachability(&at("a", 1));
    let mut arriving = played.open();
    let process = connect(&plane, "a", &mut arriving).await;
    drop((process, arriving));
    until(|| !instance.is_reachable()).await;
    tokio::time::sleep(2 * REDIAL_TIME).await;
    drop(instance);
    assert_eq!(known(&plane), 1);
    drop(again);
    until(|| known(&plane) == 0).await;

    // Lost, and no longer listed.
    let mut arriving = played.open();
    let process = connect(&plane, "a", &mut arriving).await;
    drop((process, arriving));
    until(|| is_doubtful(&plane, "a")).await;
    tokio::time::sleep(2 * REDIAL_TIME).await;
    assert_eq!(known(&plane), 0);
}

#[tokio::test(start_paused = true)]
async fn an_address_of_another_plane_is_not_reachable() {
    let (plane, _) = plane();
    let elsewhere = Address {
        plane: "tcp".into(),
        ..at("a", 1)
    };
    assert!(!plane.reachability(&elsewhere).is_reachable());
    assert_eq!(known(&plane), 0);
}
