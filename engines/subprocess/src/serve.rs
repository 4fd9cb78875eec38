//! The process's side of the protocol, for engines in Rust. [`worker_socket`] takes the descriptor that the worker passed;
//! [`serve`] serves an engine on it. Use it for an engine that cannot be linked into the worker, for example because it needs
//! other versions of the same crates.
//!
//! It carries start with progress, requests, load, health with the engine's steps, drain and cleanup. It does not carry
//! controls, KV events, metrics and KV transfers; an engine's declarations of these are removed.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::env;
use std::io;
use std::os::fd::{FromRawFd as _, RawFd};
use std::os::unix::net::UnixStream as StdUnixStream;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use futures_core::Stream as _;
use genset_backend_common::error::At;
use genset_backend_common::handles::Load;
use genset_backend_common::prometheus::metrics::gauge::Gauge;
use genset_backend_common::{
    DrainContext, EngineError, GenerateRequest, LLMEngine, RequestContext, StartContext,
};
use genset_wire::{
    Cancel, Credit, Frame, FrameDecoder, FrameError, FrameKind, GoAway, GoAwayCode, Greeting,
    GreetingError, Hello, MAX_FRAME_BYTES, Memory, Outbox, PayloadError, WireError, decode_payload,
    decode_request, encode_payload,
};
use parking_lot::Mutex;
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::io::AsyncReadExt as _;
use tokio::net::UnixStream;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::Semaphore;
use tokio::time::{MissedTickBehavior, timeout};
use tokio_util::task::TaskTracker;

use crate::messages::{DrainRequest, StartItem, StartRequest};
use crate::process::FD_VARIABLE;

/// The number of queued bytes above which answers wait.
const ROOM_BYTES: usize = 1 << 20;
/// The minimum number of bytes that one read has room for.
const READ_BYTES: usize = 64 << 10;

/// The minimum interval between the events that report the engine's steps.
const STEP_INTERVAL: Duration = Duration::from_millis(250);
/// The maximum length of an engine's reason for its death, in characters.
const MAX_REASON_LETTERS: usize = 4096;
/// The time limit of cleanup once the worker is gone. A second later, the worker's guard kills the process.
const ORPHAN_CLEANUP: Duration = Duration::from_secs(2);

/// Why a process stopped serving without a `GoAway`.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ServeError {
    /// The socket from the worker cannot be used.
    #[error("the worker's socket cannot be used: {0}")]
    Socket(#[source] io::Error),
    /// The worker sent no Hello.
    #[error(transparent)]
    Greeting(#[from] GreetingError),
    /// The worker speaks other protocol versions.
    #[error("{0}")]
    Version(#[source] EngineError),
    /// The worker violated the protocol.
    #[error("the worker broke the protocol: {what}")]
    Protocol {
        /// The rule.
        what: String,
    },
    /// The worker ended without a `GoAway`.
    #[error("the worker is gone")]
    WorkerGone,
}

impl From<FrameError> for ServeError {
    fn from(error: FrameError) -> Self {
        Self::protocol(error.to_string())
    }
}

impl From<PayloadError> for ServeError {
    fn from(error: PayloadError) -> Self {
        Self::protocol(error.to_string())
    }
}

impl ServeError {
    fn protocol(what: impl Into<String>) -> Self {
        Self::Protocol { what: what.into() }
    }
}

/// Takes the socket that a worker passed to this process. Returns `None` if no worker started the process, or on a later call.
///
/// # Errors
/// [`ServeError::Protocol`] if the variable holds no descriptor.
pub fn worker_socket() -> Result<Option<StdUnixStream>, ServeError> {
    static IS_TAKEN: AtomicBool = AtomicBool::new(false);
    let Some(given) = env::var_os(FD_VARIABLE) else {
        return Ok(None);
    };
    let number: Option<RawFd> = given.to_str().and_then(|number| number.parse().ok());
    let number = number.filter(|number| *number > 2).ok_or_else(|| {
        ServeError::protocol(format!("{FD_VARIABLE} is {given:?} and no descriptor"))
    })?;
    if IS_TAKEN.swap(true, Ordering::Relaxed) {
        return Ok(None);
    }
    Ok(Some(adopt(number)))
}

#[expect(
    unsafe_code,
    reason = "the worker says by a number which descriptor is ours"
)]
fn adopt(number: RawFd) -> StdUnixStream {
    // SAFETY: the parent that set the variable opened the descriptor for this process alone, and it is taken once.
    unsafe { StdUnixStream::from_raw_fd(number) }
}

/// Serves `engine` to the worker at the other end of `socket`, until the worker sends `GoAway` and closes its end.
///
/// # Errors
/// Fails if the worker is gone or violates the protocol. The engine was cleaned up by then, and the process should exit.
///
/// # Examples
/// ```no_run
/// use std::sync::Arc;
/// # use genset_engine_subprocess::{serve, worker_socket, ServeError};
/// # async fn run(engine: impl genset_backend_common::LLMEngine) -> Result<(), ServeError> {
/// match worker_socket()? {
///     Some(socket) => serve(Arc::new(engine), socket).await,
///     None => Ok(()), // Nobody started it as an engine.
/// }
/// # }
/// ```
pub async fn serve(engine: Arc<dyn LLMEngine>, socket: StdUnixStream) -> Result<(), ServeError> {
    let socket = { socket.set_nonblocking(true) }.and_then(|()| UnixStream::from_std(socket));
    let mut socket = socket.map_err(ServeError::Socket)?;
    let (limit, decoder) = greet(&mut socket).await?;
    let memory = Memory::of_process(usize::MAX, Gauge::default());
    let child = Arc::new(Child {
        engine,
        outbox: Outbox::new(ROOM_BYTES, limit, &memory),
        streams: Mutex::default(),
        started: Mutex::default(),
        tasks: TaskTracker::new(),
    });
    let (reader, writer) = socket.into_split();
    let writing = tokio::select! {
        read = child.read(reader, decoder) => read,
        () = child.write(writer) => Err(ServeError::WorkerGone),
    };
    if writing.is_err() {
        child.end_streams();
        drop(timeout(ORPHAN_CLEANUP, child.engine.cleanup()).await);
    }
    writing
}

/// Exchanges Hellos with the worker. Returns its payload limit, and the decoder with any bytes that followed.
async fn greet(socket: &mut UnixStream) -> Result<(usize, FrameDecoder), ServeError> {
    let ours = Hello::new(u32::try_from(MAX_FRAME_BYTES).unwrap_or(u32::MAX));
    let mut greeting = Greeting::new(socket);
    greeting.send(FrameKind::Hello, &ours).await?;
    let theirs: Hello = greeting.receive(FrameKind::Hello).await?;
    if let Err(error) = ours.agree(&theirs) {
        let go_away = GoAway {
            code: GoAwayCode::Version,
            reason: error.message().to_owned(),
        };
        drop(greeting.send(FrameKind::GoAway, &go_away).await);
        return Err(ServeError::Version(error));
    }
    let limit = usize::try_from(theirs.max_frame_bytes).unwrap_or(usize::MAX);
    Ok((limit, greeting.into_decoder(MAX_FRAME_BYTES)))
}

/// The engine and its open streams.
struct Child {
    engine: Arc<dyn LLMEngine>,
    outbox: Outbox,
    streams: Mutex<HashMap<u32, Open>>,
    /// The context of the engine's start, once the worker has asked for it.
    started: Mutex<Option<StartContext>>,
    tasks: TaskTracker,
}

#[derive(Clone)]
struct Open {
    ctx: RequestContext,
    credit: Arc<Semaphore>,
    is_generate: bool,
}

#[derive(Serialize)]
#[serde(rename_all = "snake_case")]
enum Event {
    Load(Load),
    Step,
    Dead { reason: String },
}

impl Child {
    /// Reads frames. Returns `Ok` once the worker has sent `GoAway` and closed its end.
    async fn read(
        self: &Arc<Self>,
        mut socket: OwnedReadHalf,
        mut decoder: FrameDecoder,
    ) -> Result<(), ServeError> {
        let mut is_let_go = false;
        loop {
            while let Some(frame) = decoder.next_frame()? {
                is_let_go |= frame.kind == FrameKind::GoAway;
                self.arrived(frame)?;
            }
            decoder.buffer_mut().reserve(READ_BYTES);
            match socket.read_buf(decoder.buffer_mut()).await {
                Ok(0) | Err(_) if is_let_go => return Ok(()),
                Ok(0) | Err(_) => return Err(ServeError::WorkerGone),
                Ok(_) => {}
            }
        }
    }

    /// Writes until the worker stops reading.
    async fn write(&self, mut socket: OwnedWriteHalf) {
        let mut spent = BytesMut::new();
        loop {
            let mut batch = self.outbox.take(std::mem::take(&mut spent)).await;
            if batch.write_to(&mut socket, || ()).await.is_err() {
                // The reader sees the same end, and knows whether it was expected.
                return std::future::pending().await;
            }
            spent = batch.into_buffer();
        }
    }

    fn arrived(self: &Arc<Self>, frame: Frame) -> Result<(), ServeError> {
        let open = |stream| self.streams.lock().get(&stream).cloned();
        match frame.kind {
            FrameKind::Request => self.asked(frame.stream, &frame.payload)?,
            FrameKind::Credit => {
                let credit: Credit = decode_payload(&frame.payload)?;
                if let Some(open) = open(frame.stream) {
                    let items = usize::try_from(credit.items).unwrap_or(usize::MAX);
                    let room = Semaphore::MAX_PERMITS - open.credit.available_permits();
                    open.credit.add_permits(items.min(room));
                }
            }
            FrameKind::Cancel => {
                let cancel: Cancel = decode_payload(&frame.payload)?;
                if let Some(open) = open(frame.stream) {
                    open.ctx.cancel(cancel.reason);
                    if open.is_generate {
                        let engine = Arc::clone(&self.engine);
                        let abort = async move { engine.abort(&open.ctx).await };
                        self.tasks.spawn(abort);
                    }
                }
            }
            FrameKind::Ping => self.send(FrameKind::Pong, 0, &frame.payload),
            FrameKind::GoAway | FrameKind::Pong | FrameKind::Leaving | FrameKind::Unknown(_) => {}
            FrameKind::Hello
            | FrameKind::Item
            | FrameKind::End
            | FrameKind::Error
            | FrameKind::Auth => {
                let what = format!(
                    "a {:?} frame, which the worker may not send after its Hello",
                    frame.kind
                );
                return Err(ServeError::Protocol { what });
            }
        }
        Ok(())
    }

    fn asked(self: &Arc<Self>, id: u32, payload: &Bytes) -> Result<(), ServeError> {
        let (mut head, body) = match decode_request(payload) {
            Ok(parts) => parts,
            Err(error @ PayloadError::HeadTooLong) => {
                if id == 0 || self.streams.lock().contains_key(&id) {
                    return Err(not_free(id));
                }
                let error = EngineError::invalid_argument(At::other("headers"), error);
                self.send_error(id, &error);
                return Ok(());
            }
            Err(error) => return Err(error.into()),
        };
        let endpoint = std::mem::take(&mut head.endpoint);
        let open = Open {
            credit: Arc::new(Semaphore::new(
                usize::try_from(head.credit).unwrap_or(Semaphore::MAX_PERMITS),
            )),
            is_generate: endpoint == "generate",
            ctx: head.into_context(),
        };
        match self.streams.lock().entry(id) {
            Entry::Vacant(place) if id != 0 => place.insert(open.clone()),
            Entry::Vacant(_) | Entry::Occupied(_) => return Err(not_free(id)),
        };
        let reply = Reply {
            child: Arc::clone(self),
            id,
            open,
            is_ended: false,
        };
        self.tasks.spawn(reply.give(endpoint, body));
        Ok(())
    }

    fn end_streams(&self) {
        for open in self.streams.lock().values() {
            open.ctx
                .cancel(genset_backend_common::CancelReason::Shutdown);
        }
    }

    fn send(&self, kind: FrameKind, stream: u32, payload: &[u8]) {
        if let Err(error) = self.outbox.push(kind, stream, payload) {
            tracing::error!(?kind, stream, %error, "a frame was not sent");
        }
    }

    fn send_error(&self, stream: u32, error: &EngineError) {
        let payload = encode_payload(&WireError::from(error)).unwrap_or_default();
        self.send(FrameKind::Error, stream, &payload);
    }
}

fn not_free(id: u32) -> ServeError {
    ServeError::protocol(format!("a request on stream {id}, which is not free"))
}

/// A stream that is being answered. It sends its end even if the engine panics.
struct Reply {
    child: Arc<Child>,
    id: u32,
    open: Open,
    is_ended: bool,
}

impl Reply {
    async fn give(mut self, endpoint: String, body: Bytes) {
        let ctx = self.open.ctx.clone();
        let result = tokio::select! {
            biased;
            // A caller that cancels reads nothing more; dropping the answer frees its resources.
            () = ctx.cancelled() => Ok(()),
            result = self.answer(&endpoint, &body) => result,
        };
        self.end(result);
    }

    fn end(&mut self, result: Result<(), EngineError>) {
        if std::mem::replace(&mut self.is_ended, true) {
            return;
        }
        // Before the frame is sent: the worker may reuse the id after it.
        self.child.streams.lock().remove(&self.id);
        match result {
            Ok(()) => self.child.send(FrameKind::End, self.id, b""),
            Err(error) => self.child.send_error(self.id, &error),
        }
    }

    async fn answer(&self, endpoint: &str, body: &Bytes) -> Result<(), EngineError> {
        let engine = &self.child.engine;
        match endpoint {
            "start" => self.start(decoded(body)?).await,
            "events" => self.events().await,
            "generate" => self.generate(decoded(body)?).await,
            "drain" => {
                let DrainRequest { deadline_ms } = decoded(body)?;
                let deadline = Duration::from_millis(deadline_ms);
                engine.drain(DrainContext { deadline }).await
            }
            "cleanup" => engine.cleanup().await,
            "control" => {
                let problem =
                    "is not yet available for engines in Rust that run in a process of their own";
                Err(EngineError::unsupported(At::other("control"), problem))
            }
            _ => Err(EngineError::not_found(format!(
                "there is no endpoint {endpoint:?}"
            ))),
        }
    }

    /// Sends an item; waits for credit, and for room in the outbox.
    async fn item(&self, value: &impl Serialize) -> Result<(), EngineError> {
        if let Ok(credit) = self.open.credit.acquire().await {
            credit.forget();
        }
        let payload = encode_payload(value).map_err(|error| {
            EngineError::internal("an item cannot be written as MessagePack").with_source(error)
        })?;
        self.child.outbox.room().await;
        let pushed = self.child.outbox.push(FrameKind::Item, self.id, &payload);
        pushed.map_err(|error| EngineError::internal(format!("an item is too large: {error}")))
    }

    async fn start(&self, asked: StartRequest) -> Result<(), EngineError> {
        let mut ctx = StartContext::detached(asked.worker_id);
        ctx.role = asked.role;
        *self.child.started.lock() = Some(ctx.clone());
        let mut progress = ctx.progress.subscribe();
        let mut starting = std::pin::pin!(self.child.engine.start(ctx));
        let mut config = loop {
            tokio::select! {
                started = &mut starting => break started?,
                Ok(()) = progress.changed() => {
                    let now = progress.borrow_and_update().clone();
                    // Keeps one credit for the config. A stage without credit is dropped.
                    if self.open.credit.available_permits() > 1 {
                        let stage = StartItem::Progress { stage: now.stage, fraction: now.fraction };
                        self.item(&stage).await?;
                    }
                }
            }
        };
        let can = &mut config.capabilities;
        (can.kv_events, can.kv_ranks) = (false, false);
        can.roles.clear();
        self.item(&StartItem::Config(Box::new(config))).await
    }

    async fn events(&self) -> Result<(), EngineError> {
        let Some(ctx) = self.child.started.lock().clone() else {
            let problem = "the engine was not asked to start";
            return Err(EngineError::engine_shutdown(problem));
        };
        let mut loads = ctx.load.subscribe();
        let mut told_steps = ctx.health.steps();
        let mut ticks = tokio::time::interval(STEP_INTERVAL);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                reason = ctx.health.died() => {
                    // Truncated, since a reason that is too long must not hide the death.
                    let reason = reason.chars().take(MAX_REASON_LETTERS).collect();
                    self.item(&Event::Dead { reason }).await?;
                    return std::future::pending().await;
                }
                Ok(()) = loads.changed() => {
                    let load = *loads.borrow_and_update();
                    self.item(&Event::Load(load)).await?;
                }
                _ = ticks.tick() => {
                    let steps = ctx.health.steps();
                    if std::mem::replace(&mut told_steps, steps) != steps {
                        self.item(&Event::Step).await?;
                    }
                }
            }
        }
    }

    async fn generate(&self, request: GenerateRequest) -> Result<(), EngineError> {
        let ctx = self.open.ctx.clone();
        let ctx = ctx.with_prompt_tokens(request.prompt_tokens().unwrap_or(0));
        let mut outputs = self.child.engine.generate(request, ctx).await?;
        // The worker reports a stream that ends without a terminal.
        while let Some(output) =
            std::future::poll_fn(|cx| Pin::new(&mut outputs).poll_next(cx)).await
        {
            let output = output?;
            self.item(&output).await?;
            if output.is_terminal() {
                break;
            }
        }
        Ok(())
    }
}

impl Drop for Reply {
    fn drop(&mut self) {
        self.end(Err(EngineError::internal("the engine panicked")));
    }
}

fn decoded<T: DeserializeOwned>(body: &Bytes) -> Result<T, EngineError> {
    decode_payload(body).map_err(|error| {
        EngineError::internal("the worker's request cannot be read").with_source(error)
    })
}

#[cfg(test)]
mod tests;
