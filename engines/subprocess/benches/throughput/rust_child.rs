//! A minimal engine process in Rust: in each step it sends a chunk for every stream that has credit, all in one frame. The
//! benchmark starts itself as this process.

use std::collections::BTreeMap;
use std::io::{ErrorKind, Read as _, Write as _};
use std::os::fd::{FromRawFd as _, OwnedFd};
use std::os::unix::net::UnixStream;

use bytes::{Bytes, BytesMut};
use genset_backend_common::output::{Finish, TokenChunk};
use genset_backend_common::{EngineConfig, GenerateRequest, Output};
use genset_wire::{
    Credit, Frame, FrameDecoder, FrameKind, Hello, decode_payload, decode_request, encode_frame,
    encode_payload,
};
use serde::Serialize;

const MAX_FRAME_BYTES: u32 = 16 << 20;

/// An active request.
struct Stream {
    credit: u32,
    made: u32,
    max_tokens: u32,
}

struct Child {
    socket: UnixStream,
    decoder: FrameDecoder,
    streams: BTreeMap<u32, Stream>,
    out: BytesMut,
    tokens_a_chunk: u32,
}

/// Serves until the worker sends `GoAway`.
pub fn serve(fd: i32, tokens_a_chunk: u32) {
    #[expect(
        unsafe_code,
        reason = "the descriptor comes by its number; nothing safe takes one"
    )]
    // SAFETY: the worker opened it for this process, and nothing else here owns it.
    let socket = UnixStream::from(unsafe { OwnedFd::from_raw_fd(fd) });
    let mut child = Child {
        socket,
        decoder: FrameDecoder::with_limit(usize::try_from(MAX_FRAME_BYTES).unwrap()),
        streams: BTreeMap::new(),
        out: BytesMut::new(),
        tokens_a_chunk,
    };
    child.greet();
    while child.read() {
        child.step();
        child.socket.set_nonblocking(false).unwrap();
        child.socket.write_all(&child.out.split()).unwrap();
    }
}

impl Child {
    fn greet(&mut self) {
        self.send(FrameKind::Hello, 0, &Hello::new(MAX_FRAME_BYTES));
        self.socket.write_all(&self.out.split()).unwrap();
    }

    fn send<T: Serialize>(&mut self, kind: FrameKind, stream: u32, value: &T) {
        let payload = encode_payload(value).unwrap();
        encode_frame(kind, stream, &payload, &mut self.out).unwrap();
    }

    /// Reads the frames that have arrived; blocks if there is nothing else to do. Returns `false` at the end.
    fn read(&mut self) -> bool {
        let is_busy = self.streams.values().any(|stream| stream.credit > 0);
        self.socket.set_nonblocking(is_busy).unwrap();
        let mut bytes = [0; 64 << 10];
        match self.socket.read(&mut bytes) {
            Ok(0) => return false,
            Ok(read) => self.decoder.extend(&bytes[..read]),
            Err(error) if error.kind() == ErrorKind::WouldBlock => return true,
            Err(error) => panic!("{error}"),
        }
        while let Some(frame) = self.decoder.next_frame().unwrap() {
            self.take(&frame);
        }
        true
    }

    fn take(&mut self, frame: &Frame) {
        let stream = frame.stream;
        match frame.kind {
            FrameKind::Request => self.open(stream, &frame.payload),
            FrameKind::Ping => {
                encode_frame(FrameKind::Pong, 0, &frame.payload, &mut self.out).unwrap();
            }
            FrameKind::Credit => {
                let credit: Credit = decode_payload(&frame.payload).unwrap();
                if let Some(stream) = self.streams.get_mut(&stream) {
                    stream.credit += credit.items;
                }
            }
            FrameKind::Cancel if self.streams.remove(&stream).is_some() => self.end(stream),
            _ => {}
        }
    }

    fn open(&mut self, stream: u32, payload: &Bytes) {
        let (head, body) = decode_request(payload).unwrap();
        match head.endpoint.as_str() {
            "start" => {
                let config = EngineConfig::new("stepping", 1 << 30).with_vocab_size(100);
                self.send(
                    FrameKind::Item,
                    stream,
                    &BTreeMap::from([("config", config)]),
                );
                self.end(stream);
            }
            "generate" => {
                let request: GenerateRequest = decode_payload(&body).unwrap();
                let asked = Stream {
                    credit: head.credit,
                    made: 0,
                    max_tokens: request.stop.max_tokens.unwrap(),
                };
                self.streams.insert(stream, asked);
            }
            // There are no events, so the stream stays open.
            "events" => {}
            _ => self.end(stream),
        }
    }

    fn end(&mut self, stream: u32) {
        encode_frame(FrameKind::End, stream, b"", &mut self.out).unwrap();
    }

    fn step(&mut self) {
        let mut pairs: Vec<(u32, Option<Output>)> = Vec::with_capacity(self.streams.len());
        for (id, stream) in &mut self.streams {
            if stream.credit == 0 {
                continue;
            }
            stream.credit -= 1;
            if stream.made < stream.max_tokens {
                stream.made += self.tokens_a_chunk;
                let chunk: TokenChunk = (0..self.tokens_a_chunk).map(|_| 7).collect();
                pairs.push((*id, Some(Output::Tokens(chunk))));
            } else {
                let finished = Finish::length().into_finished(1, stream.made);
                pairs.push((*id, Some(Output::Finished(Box::new(finished)))));
                pairs.push((*id, None));
            }
        }
        for (id, item) in &pairs {
            if item.is_none() {
                self.streams.remove(id);
            }
        }
        if !pairs.is_empty() {
            self.send(FrameKind::Item, 0, &pairs);
        }
    }
}
