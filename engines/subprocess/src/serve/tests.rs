use genset_backend_common::ErrorKind;
use genset_engine_sample::{SampleArgs, SampleEngine};
use genset_wire::{MAX_HEAD_BYTES, RequestHead, encode_request};

use super::*;

/// A process whose worker takes payloads of so many bytes.
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

#[tokio::test]
async fn an_item_over_the_workers_limit_is_an_error() {
    let open = Open {
        ctx: RequestContext::new("r"),
        credit: Arc::new(Semaphore::new(2)),
        is_generate: true,
    };
    let reply = Reply {
        child: child(100),
        id: 1,
        open,
        is_ended: false,
    };
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
    let mut bytes = Vec::new();
    let mut batch = child.outbox.take(BytesMut::new()).await;
    batch.write_to(&mut bytes, || ()).await.unwrap();
    let mut decoder = FrameDecoder::new();
    decoder.extend(&bytes);
    let frame = decoder.next_frame().unwrap().unwrap();
    assert_eq!((frame.kind, frame.stream), (FrameKind::Error, 7));
    let error: WireError = decode_payload(&frame.payload).unwrap();
    assert_eq!(error.kind, ErrorKind::InvalidArgument);
    // On a stream that is not free it is against the protocol, as any other.
    assert!(child.asked(0, &payload).is_err());
}
