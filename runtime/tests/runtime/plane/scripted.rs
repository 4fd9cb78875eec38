//! [`Peer`]: an end of a TCP connection that sends the bytes of a test, valid or not.

use bytes::BytesMut;
use genset_backend_common::{CancelReason, EngineError, MetricsRegistry};
use genset_wire::{
    Cancel, Frame, FrameDecoder, FrameKind, GoAway, Hello, RequestHead, decode_payload,
    encode_frame, encode_payload, encode_request,
};
use serde::Serialize;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use crate::support::{soon, until};

/// A frame that every peer refuses: its header announces four gigabytes.
pub(super) const FOUR_GIGABYTES: [u8; 10] = [0xff, 0xff, 0xff, 0xff, 2, 0, 0, 0, 0, 1];

/// A scripted end of a connection.
pub(super) struct Peer {
    stream: TcpStream,
    decoder: FrameDecoder,
}

impl Peer {
    fn new(stream: TcpStream) -> Self {
        Self {
            stream,
            decoder: FrameDecoder::new(),
        }
    }

    /// Dials the process at `host:port`; sends nothing yet.
    pub(super) async fn dial(process: &str) -> Self {
        Self::new(soon(TcpStream::connect(process)).await.unwrap())
    }

    /// Accepts a connection; sends nothing yet.
    pub(super) async fn accept(listener: &TcpListener) -> Self {
        Self::new(soon(listener.accept()).await.unwrap().0)
    }

    /// Dials and greets as an honest caller.
    pub(super) async fn greeted_by(process: &str) -> Self {
        let mut peer = Self::dial(process).await;
        peer.send(FrameKind::Hello, 0, &hello()).await;
        peer.expect(FrameKind::Hello).await;
        peer
    }

    /// Accepts and greets as an honest callee.
    pub(super) async fn greeting(listener: &TcpListener) -> Self {
        let mut peer = Self::accept(listener).await;
        peer.expect(FrameKind::Hello).await;
        peer.send(FrameKind::Hello, 0, &hello()).await;
        peer
    }

    pub(super) async fn send(&mut self, kind: FrameKind, stream: u32, value: &impl Serialize) {
        let payload = encode_payload(value).unwrap();
        self.send_frame(kind, stream, &payload).await;
    }

    pub(super) async fn send_frame(&mut self, kind: FrameKind, stream: u32, payload: &[u8]) {
        self.send_bytes(&frame(kind, stream, payload)).await;
    }

    /// Sends raw bytes. If the other end has gone, reading shows it.
    pub(super) async fn send_bytes(&mut self, bytes: &[u8]) {
        drop(self.try_send(bytes).await);
    }

    /// Sends bytes, unless the other end has gone.
    pub(super) async fn try_send(&mut self, bytes: &[u8]) -> std::io::Result<()> {
        soon(self.stream.write_all(bytes)).await
    }

    /// Opens a stream to `endpoint` of instance 1 with an empty request.
    pub(super) async fn request(&mut self, stream: u32, endpoint: &str, credit: u32) {
        let payload = request(endpoint, credit);
        self.send_frame(FrameKind::Request, stream, &payload).await;
    }

    /// Ends its sending direction, and still reads.
    pub(super) async fn stop_sending(&mut self) {
        drop(self.stream.shutdown().await);
    }

    /// The next frame that is not a ping; `None` when the other end has closed the connection.
    pub(super) async fn next(&mut self) -> Option<Frame> {
        loop {
            if let Some(frame) = self.decoder.next_frame().unwrap() {
                if frame.kind != FrameKind::Ping {
                    return Some(frame);
                }
                self.send_bytes(&ping(FrameKind::Pong)).await;
                continue;
            }
            match soon(self.stream.read_buf(self.decoder.buffer_mut())).await {
                Ok(0) | Err(_) => return None,
                Ok(_) => {}
            }
        }
    }

    /// Reads up to a frame of this kind.
    pub(super) async fn expect(&mut self, kind: FrameKind) -> Frame {
        loop {
            let frame = self.next().await;
            let frame = frame.unwrap_or_else(|| panic!("closed where {kind:?} was due"));
            if frame.kind == kind {
                return frame;
            }
        }
    }

    /// Reads to the end; returns the last `GoAway`, if there was one.
    pub(super) async fn told_at_the_end(&mut self) -> Option<GoAway> {
        let mut told = None;
        while let Some(frame) = self.next().await {
            if frame.kind == FrameKind::GoAway {
                told = Some(decode_payload(&frame.payload).unwrap());
            }
        }
        told
    }

    /// Like [`Self::told_at_the_end`], without answering pings.
    pub(super) async fn told_without_pongs(&mut self) -> Option<GoAway> {
        let bytes = self.bytes_to_the_end().await;
        let mut decoder = FrameDecoder::new();
        decoder.extend(&bytes);
        let mut told = None;
        while let Some(frame) = decoder.next_frame().unwrap() {
            if frame.kind == FrameKind::GoAway {
                told = Some(decode_payload(&frame.payload).unwrap());
            }
        }
        told
    }

    /// Reads all bytes to the end.
    pub(super) async fn bytes_to_the_end(&mut self) -> Vec<u8> {
        let mut bytes = Vec::new();
        // A reset is an end as well.
        let _ = soon(self.stream.read_to_end(&mut bytes)).await;
        bytes
    }
}

/// The greeting of an honest peer without a secret.
pub(super) fn hello() -> Hello {
    Hello::new(16 << 20)
}

/// A frame's bytes.
pub(super) fn frame(kind: FrameKind, stream: u32, payload: &[u8]) -> Vec<u8> {
    let mut bytes = BytesMut::new();
    encode_frame(kind, stream, payload, &mut bytes).unwrap();
    bytes.to_vec()
}

/// The bytes of a `Ping` or a `Pong`.
pub(super) fn ping(kind: FrameKind) -> Vec<u8> {
    frame(kind, 0, &[])
}

/// The cancel of a client, which reads on or discards the rest.
pub(super) fn cancel(discard: bool) -> Cancel {
    let reason = CancelReason::Client;
    Cancel { reason, discard }
}

/// The payload of a request for `()` to `endpoint` of instance 1.
pub(super) fn request(endpoint: &str, credit: u32) -> Vec<u8> {
    let head = RequestHead {
        endpoint: format!("test.worker.{endpoint}"),
        instance: 1,
        id: "r".into(),
        credit,
        ..RequestHead::default()
    };
    encode_request(&head, &encode_payload(&()).unwrap()).unwrap()
}

/// A counter's value; 0 if it was never counted.
fn counted(metrics: &MetricsRegistry, name: &str, reason: &str) -> u64 {
    let line = format!("genset_wire_{name}_total{{reason=\"{reason}\"}} ");
    let text = metrics.encode();
    let value = text.lines().find_map(|text| text.strip_prefix(&line));
    value.map_or(0, |value| value.parse().unwrap())
}

/// Waits until the count is `times`.
pub(super) async fn until_counted(metrics: &MetricsRegistry, name: &str, reason: &str, times: u64) {
    until(|| counted(metrics, name, reason) >= times).await;
    assert_eq!(counted(metrics, name, reason), times, "{name} {reason}");
}

/// The error of an operation that must fail.
pub(super) fn error<T>(result: Result<T, EngineError>) -> EngineError {
    result.err().expect("it must fail")
}
