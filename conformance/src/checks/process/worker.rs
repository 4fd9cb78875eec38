//! [`Worker`]: the kit as the process's worker, frame by frame. It opens streams and reads what arrives. An invalid frame, or
//! one that a process must not send, fails the check.

#![expect(
    clippy::wildcard_enum_match_arm,
    reason = "who waits for one arrival fails on any other, whatever it is"
)]

use std::collections::VecDeque;
use std::fs::{File, OpenOptions};
use std::io::{self, ErrorKind, Read, Seek, Write};
use std::net::Shutdown;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt as _;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use genset_backend_common::{EngineConfig, Output, Role};
use genset_wire::{
    Frame, FrameDecoder, FrameKind, Hello, PROTOCOL_VERSION, RequestHead, WireError,
    decode_payload, encode_frame, encode_payload, encode_request,
};
use serde::de::{DeserializeOwned, IgnoredAny};
use serde::{Deserialize, Serialize};
use tokio::time::Instant;

use super::supervise;
use super::tracks::Tracks;
use crate::check::{Stop, fail};
use crate::trial::Trial;

const MAX_FRAME_BYTES: u32 = 16 << 20;
/// The credit for streams with few items.
const SMALL_CREDIT: u32 = 16;
/// The lines of standard error that a failure quotes.
const LAST_LINES: usize = 3;

/// What the process sends, as far as checks need it.
#[derive(Debug)]
pub(super) enum Arrival {
    /// An item of a stream; `None` if it is not an output.
    Item(u32, Option<Output>),
    /// The last item of `start`.
    Config(Box<EngineConfig>),
    /// A stream's end.
    End(u32),
    /// A stream's end with an error.
    Error(u32, WireError),
    Pong(Bytes),
    GoAway,
    /// The end of the socket.
    Closed,
}

/// An item of any stream.
#[derive(Deserialize)]
#[serde(untagged)]
enum Item {
    Output(Box<Output>),
    Config { config: Box<EngineConfig> },
    Other(IgnoredAny),
}

impl Item {
    fn on(self, stream: u32) -> Arrival {
        match self {
            Self::Output(output) => Arrival::Item(stream, Some(*output)),
            Self::Config { config } => Arrival::Config(config),
            Self::Other(_) => Arrival::Item(stream, None),
        }
    }
}

/// The author's process, and our end of its socket.
pub(super) struct Worker {
    trial: Trial,
    child: Child,
    /// Kills the process's descendants, if the check ends early.
    pub(super) tracks: Tracks,
    stderr: File,
    socket: UnixStream,
    decoder: FrameDecoder,
    arrived: VecDeque<Arrival>,
    open: Vec<u32>,
    last_stream: u32,
}

fn broken(what: &str, error: &dyn std::fmt::Display) -> Stop {
    Stop::Fail(format!("{what}: {error}"))
}

pub(super) fn encoded<T: Serialize>(value: &T) -> Result<Vec<u8>, Stop> {
    encode_payload(value).map_err(|error| broken("the kit cannot encode a payload", &error))
}

fn decoded<T: DeserializeOwned>(what: &str, payload: &[u8]) -> Result<T, Stop> {
    decode_payload(payload).map_err(|error| broken(&format!("{what} cannot be read"), &error))
}

/// A complete `Hello` with one version.
pub(super) fn hello(version: u16) -> Result<BytesMut, Stop> {
    let hello = Hello {
        version,
        min_version: version,
        max_frame_bytes: MAX_FRAME_BYTES,
        has_secret: false,
        nonce: Bytes::new(),
    };
    framed(FrameKind::Hello, 0, &encoded(&hello)?)
}

pub(super) fn framed(kind: FrameKind, stream: u32, payload: &[u8]) -> Result<BytesMut, Stop> {
    let mut bytes = BytesMut::new();
    encode_frame(kind, stream, payload, &mut bytes)
        .map_err(|error| broken("the kit cannot encode a frame", &error))?;
    Ok(bytes)
}

/// A file for a process's standard error, twice: to read it here, and for the process, which appends wherever we read.
fn stderr_file(mark: &str) -> io::Result<(File, File)> {
    let path = std::env::temp_dir().join(format!("genset-conformance-{mark}"));
    let mut options = OpenOptions::new();
    options.read(true).append(true).create_new(true);
    let file = options.open(&path)?;
    std::fs::remove_file(path)?;
    Ok((file.try_clone()?, file))
}

#[derive(Serialize)]
struct StartRequest {
    worker_id: u64,
    role: Role,
}

impl Worker {
    /// Starts the author's process and sends nothing yet.
    pub(super) fn spawn(trial: &Trial) -> Result<Self, Stop> {
        let mut own = supervise(trial)?.command();
        // Log everything.
        own.env.insert("GENSET_ENGINE_LOG".into(), "debug".into());
        let tracks = Tracks::on(&mut own)?;
        let (stderr, written) = stderr_file(tracks.mark())
            .map_err(|error| broken("the kit has no file for standard error", &error))?;
        let pair = UnixStream::pair();
        let (ours, theirs) = pair.map_err(|error| broken("the kit has no socket", &error))?;
        // A shell sets up the descriptors: the socket at descriptor 3, and no standard input.
        let mut command = Command::new("/bin/sh");
        command
            .args(["-c", "exec 3<&0 </dev/null; exec \"$@\"", "sh"])
            .arg(&own.program)
            .args(&own.args)
            .envs(&own.env)
            .env("GENSET_ENGINE_FD", "3")
            .stdin(Stdio::from(OwnedFd::from(theirs)))
            .stdout(Stdio::null())
            .stderr(Stdio::from(written))
            .process_group(0);
        if let Some(cwd) = &own.cwd {
            command.current_dir(cwd);
        }
        let child = command.spawn();
        // The command holds the process's end of the socket too.
        drop(command);
        Ok(Self {
            trial: trial.clone(),
            child: child.map_err(|error| broken("the process cannot be started", &error))?,
            tracks,
            stderr,
            socket: ours,
            decoder: FrameDecoder::new(),
            arrived: VecDeque::new(),
            open: Vec::new(),
            last_stream: 0,
        })
    }

    /// Starts the author's process, exchanges Hellos and starts its engine. Returns its config.
    pub(super) fn start(trial: &Trial) -> Result<(Self, EngineConfig), Stop> {
        let mut worker = Self::spawn(trial)?;
        worker.write(&hello(PROTOCOL_VERSION)?)?;
        let config = worker.ask_to_start()?;
        Ok((worker, config))
    }

    /// Requests `start` and follows it to its end.
    pub(super) fn ask_to_start(&mut self) -> Result<EngineConfig, Stop> {
        let start = StartRequest {
            worker_id: 1,
            role: Role::Aggregated,
        };
        let stream = self.request("start", SMALL_CREDIT, &start)?;
        let mut config = None;
        loop {
            match self.next("the end of `start`", self.trial.limits().start)? {
                Arrival::Config(declared) => config = Some(declared),
                Arrival::Item(..) => {}
                Arrival::End(ended) if ended == stream => break,
                Arrival::Closed => fail!(
                    "the process closed its socket before `start` had ended; its last lines on stderr: {}",
                    self.last_lines()
                ),
                other => fail!("`start` was answered with {other:?}"),
            }
        }
        match config {
            Some(config) => Ok(*config),
            None => fail!("`start` ended without a config"),
        }
    }

    fn last_lines(&mut self) -> String {
        let mut written = Vec::new();
        // What cannot be read is left out.
        let _ = self.stderr.rewind();
        let _ = self.stderr.read_to_end(&mut written);
        let text = String::from_utf8_lossy(&written);
        let mut last: Vec<&str> = text.lines().rev().take(LAST_LINES).collect();
        last.reverse();
        last.join(" | ")
    }

    /// Opens a stream.
    pub(super) fn request<T: Serialize>(
        &mut self,
        endpoint: &str,
        credit: u32,
        request: &T,
    ) -> Result<u32, Stop> {
        let head = RequestHead {
            endpoint: endpoint.to_owned(),
            id: format!("{endpoint}-{}", self.last_stream + 1),
            credit,
            ..RequestHead::default()
        };
        let payload = encode_request(&head, &encoded(request)?)
            .map_err(|error| broken("the kit cannot encode a request", &error))?;
        self.request_of(&payload)
    }

    /// As [`Self::request`], with the caller's head.
    pub(super) fn request_with<H: Serialize, T: Serialize>(
        &mut self,
        head: &H,
        request: &T,
    ) -> Result<u32, Stop> {
        let payload = [encoded(head)?, encoded(request)?].concat();
        self.request_of(&payload)
    }

    /// Opens a stream with a raw payload.
    fn request_of(&mut self, payload: &[u8]) -> Result<u32, Stop> {
        self.last_stream += 1;
        let stream = self.last_stream;
        self.open.push(stream);
        self.send_bytes(FrameKind::Request, stream, payload)?;
        Ok(stream)
    }

    pub(super) fn send<T: Serialize>(
        &mut self,
        kind: FrameKind,
        stream: u32,
        payload: &T,
    ) -> Result<(), Stop> {
        self.send_bytes(kind, stream, &encoded(payload)?)
    }

    pub(super) fn send_bytes(
        &mut self,
        kind: FrameKind,
        stream: u32,
        payload: &[u8],
    ) -> Result<(), Stop> {
        self.write(&framed(kind, stream, payload)?)
    }

    pub(super) fn write(&mut self, bytes: &[u8]) -> Result<(), Stop> {
        let limit = self.trial.limits().call;
        let written = self.socket.set_write_timeout(Some(limit));
        let written = written.and_then(|()| self.socket.write_all(bytes));
        written.map_err(|error| broken("the process takes no frames", &error))
    }

    /// The next arrival.
    ///
    /// # Errors
    /// Fails with `what` if nothing arrives in time, or what arrives must not be sent.
    pub(super) fn next(&mut self, what: &str, limit: Duration) -> Result<Arrival, Stop> {
        match self.poll(limit)? {
            Some(arrival) => Ok(arrival),
            None => fail!("{what} did not come within {} s", limit.as_secs_f64()),
        }
    }

    /// As [`Self::next`]; `None` if nothing arrives within `limit`.
    pub(super) fn poll(&mut self, limit: Duration) -> Result<Option<Arrival>, Stop> {
        let deadline = Instant::now() + limit;
        loop {
            if let Some(arrival) = self.arrived.pop_front() {
                return Ok(Some(arrival));
            }
            let frame = self.decoder.next_frame();
            match frame.map_err(|error| broken("the process sent what is no frame", &error))? {
                Some(frame) => self.take(frame)?,
                None if !self.read(deadline)? => return Ok(self.arrived.pop_front()),
                None => {}
            }
        }
    }

    /// Whether anything may still arrive before the deadline.
    fn read(&mut self, deadline: Instant) -> Result<bool, Stop> {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Ok(false);
        }
        let mut buffer = [0; 1 << 16];
        // In parts: this blocks the check's thread, which is the kit's fault and not the engine's.
        let part = left.min(self.trial.wait_interval());
        let read = self.socket.set_read_timeout(Some(part));
        match read.and_then(|()| self.socket.read(&mut buffer)) {
            Ok(0) if self.decoder.buffered() > 0 => {
                fail!("the process broke off in the middle of a frame")
            }
            Ok(0) => self.arrived.push_back(Arrival::Closed),
            Ok(count) => self.decoder.extend(buffer.get(..count).unwrap_or_default()),
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                self.trial.note_wait();
            }
            Err(_) => self.arrived.push_back(Arrival::Closed),
        }
        Ok(true)
    }

    fn take(&mut self, frame: Frame) -> Result<(), Stop> {
        let Frame {
            kind,
            stream,
            payload,
        } = frame;
        let arrival = match kind {
            FrameKind::Hello => {
                let _: Hello = decoded("Hello", &payload)?;
                return Ok(());
            }
            FrameKind::Item if stream == 0 => return self.take_batch(&payload),
            FrameKind::Item => decoded::<Item>("an item", &payload)?.on(stream),
            FrameKind::End => Arrival::End(stream),
            FrameKind::Error => Arrival::Error(stream, decoded("an Error", &payload)?),
            FrameKind::Pong => Arrival::Pong(payload),
            FrameKind::GoAway => Arrival::GoAway,
            FrameKind::Ping => return self.send_bytes(FrameKind::Pong, 0, &payload),
            FrameKind::Leaving | FrameKind::Unknown(_) => return Ok(()),
            FrameKind::Request | FrameKind::Cancel | FrameKind::Credit | FrameKind::Auth => {
                fail!("the process sent {kind:?}, which is the worker's to send")
            }
        };
        self.keep(arrival, stream)
    }

    fn take_batch(&mut self, payload: &[u8]) -> Result<(), Stop> {
        let pairs: Vec<(u32, Option<Item>)> = decoded("a batch", payload)?;
        for (stream, item) in pairs {
            let arrival = item.map_or(Arrival::End(stream), |item| item.on(stream));
            self.keep(arrival, stream)?;
        }
        Ok(())
    }

    /// Keeps a frame of a stream, which must be open.
    fn keep(&mut self, arrival: Arrival, stream: u32) -> Result<(), Stop> {
        let is_open = match arrival {
            Arrival::Pong(_) | Arrival::GoAway | Arrival::Closed => true,
            Arrival::Item(..) | Arrival::Config(_) => self.open.contains(&stream),
            Arrival::End(_) | Arrival::Error(..) => {
                let place = self.open.iter().position(|open| *open == stream);
                place.map(|place| self.open.swap_remove(place)).is_some()
            }
        };
        if !is_open {
            fail!("the process sent a frame for stream {stream}, which is not open: {arrival:?}");
        }
        self.arrived.push_back(arrival);
        Ok(())
    }

    /// Disappears without notice, like a killed worker.
    pub(super) fn vanish(&mut self) {
        let _ = self.socket.shutdown(Shutdown::Both);
    }

    /// Closes our direction.
    pub(super) fn leave(&mut self) {
        let _ = self.socket.shutdown(Shutdown::Write);
    }

    /// Waits for the process to exit.
    pub(super) async fn exit(&mut self, when: &str, limit: Duration) -> Result<ExitStatus, Stop> {
        let deadline = Instant::now() + limit;
        loop {
            let status = self.child.try_wait();
            if let Some(status) = status.map_err(|error| broken("the process is lost", &error))? {
                return Ok(status);
            }
            if Instant::now() >= deadline {
                fail!(
                    "{when} the process did not exit within {} s",
                    limit.as_secs_f64()
                );
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        // Fails if it has exited already; it is reaped in both cases.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
