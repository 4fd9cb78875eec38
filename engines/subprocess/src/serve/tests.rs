use futures_util::FutureExt as _;
use genset_backend_common::ErrorKind;
use genset_engine_sample::{SampleArgs, SampleEngine};
use genset_wire::{MAX_HEAD_BYTES, RequestHead, encode_request};

use super::*;

/// A process whose worker accepts payloads of up to `limit` bytes.
fn child(limit: usize) -> Arc<Child> {
    let args = SampleArgs {
        vocab_size: 1000,
        token_delay_ms: 1,
    };
    let memory = Memory::of_process(usize::MAX, Gauge::default());
    Arc::new(Child {
        engine: Arc::new(SampleEngine::from_args(&args)),
        outbox: Outbox::new(ROOM_BYTES, limit, &memory),
        streams: Mutex::default(),
        started: Mutex::default(),
        tasks: TaskTracker::new(),
    })
}

fn reply(child: &Arc<Child>, credit: usize) -> Reply {
    Reply {
        child: Arc::clone(child),
        id: 1,
        open: Open {
            ctx: RequestContext::new("r"),
            credit: Arc::new(Semaphore::new(credit)),
            is_generate: false,
        },
        is_ended: false,
    }
}

/// The frames that wait for the socket.
async fn written(child: &Child) -> Vec<Frame> {
    let mut bytes = Vec::new();
    let mut batch = child.outbox.take(BytesMut::new()).await;
    batch.write_to(&mut bytes, || ()).await.unwrap();
    let mut decoder = FrameDecoder::new();
    decoder.extend(&bytes);
    std::iter::from_fn(|| decoder.next_frame().unwrap()).collect()
}

#[tokio::test]
async fn an_item_over_the_workers_limit_is_an_error() {
    let reply = reply(&child(100), 2);
    reply.item(&"x".repeat(50)).await.unwrap();
    let error = reply.item(&"x".repeat(200)).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Internal);
    let sizes = "202 bytes is over the limit of 100";
    assert!(error.message().contains(sizes), "{error}");
}

#[tokio::test]
async fn a_request_with_too_long_a_head_is_refused_alone() {
    let child = child(MAX_FRAME_BYTES);
    let head = RequestHead {
        id: "x".repeat(MAX_HEAD_BYTES),
        ..RequestHead::default()
    };
    let payload = Bytes::from(encode_request(&head, &[0xc0]).unwrap());
    child.asked(7, &payload).unwrap();
    let frame = written(&child).await.remove(0);
    assert_eq!((frame.kind, frame.stream), (FrameKind::Error, 7));
    let error: WireError = decode_payload(&frame.payload).unwrap();
    assert_eq!(error.kind, ErrorKind::InvalidArgument);
    // On a stream that is not free it violates the protocol, like any other request.
    assert!(child.asked(0, &payload).is_err());
}

#[tokio::test(start_paused = true)]
async fn of_many_steps_the_worker_is_told_one_now_and_then() {
    let child = child(MAX_FRAME_BYTES);
    let ctx = StartContext::detached(1);
    *child.started.lock() = Some(ctx.clone());
    let reply = reply(&child, 16);
    let mut events = std::pin::pin!(reply.events());
    for steps in [0, 1000, 0, 1] {
        assert!(events.as_mut().now_or_never().is_none());
        for _ in 0..steps {
            ctx.health.report_step();
        }
        tokio::time::advance(STEP_INTERVAL).await;
    }
    assert!(events.as_mut().now_or_never().is_none());
    let told: Vec<String> = written(&child)
        .await
        .iter()
        .map(|frame| decode_payload(&frame.payload).unwrap())
        .collect();
    assert_eq!(told, ["step", "step"]);
}
