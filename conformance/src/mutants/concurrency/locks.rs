//! Requests that disturb each other: by locks, by shared memory, by blocking the runtime, by slowing each other down.

use std::sync::Arc;
use std::time::Duration;

use futures_util::{StreamExt, stream};
use genset_backend_common::{Output, OutputStream};
use parking_lot::Condvar;
use tokio::runtime::{Handle, RuntimeFlavor};

use crate::mutants::fault::{Call, Fault, others, raw};

/// Whether the engine runs on several threads. Faults that wait in real time occur only there, so that a run of all checks
/// stays short.
fn is_multi_thread() -> bool {
    Handle::try_current().is_ok_and(|h| h.runtime_flavor() == RuntimeFlavor::MultiThread)
}

/// A batch lock and a cache lock. With a full batch they are taken in different orders.
#[derive(Default)]
pub(super) struct BothOrders {
    locks: Arc<[tokio::sync::Mutex<()>; 2]>,
    active: Arc<()>,
}

/// The number of concurrent requests from which on the locks are used.
const FULL_BATCH: usize = 10;

impl Fault for BothOrders {
    fn answer(&self, _call: &Call, outputs: OutputStream) -> OutputStream {
        let before = others(&self.active);
        let place = Arc::clone(&self.active);
        let is_batched = before + 1 >= FULL_BATCH && !is_multi_thread();
        let locks = Arc::clone(&self.locks);
        let parity = usize::from(before.is_multiple_of(2));
        raw(outputs.then(move |item| {
            // The stream owns the place as long as it lives.
            let _ = &place;
            let locks = Arc::clone(&locks);
            async move {
                if is_batched {
                    let _first = locks[parity].lock().await;
                    tokio::task::yield_now().await;
                    let _second = locks[1 - parity].lock().await;
                }
                item
            }
        }))
    }
}

/// Scratch memory to which every stream writes its token before reading it back. The time between is held open until another
/// thread writes too, so that the race always occurs.
#[derive(Default)]
pub(super) struct SharedScratch {
    scratch: Arc<Scratch>,
}

#[derive(Default)]
struct Scratch {
    state: parking_lot::Mutex<Overlap>,
    changed: Condvar,
}

/// Whether two threads have used the scratch memory at once.
#[derive(Default)]
struct Overlap {
    is_writing: bool,
    has_happened: bool,
    /// How many times it was held open so far.
    moments: u32,
}

/// How long it is held open.
const MOMENT: Duration = Duration::from_millis(200);
/// How many times it is held open, until another thread comes: on a busy machine it may miss the first.
const MAX_MOMENTS: u32 = 5;

impl Scratch {
    /// Whether another thread wrote meanwhile.
    fn is_overwritten(&self) -> bool {
        let mut state = self.state.lock();
        if state.is_writing {
            state.has_happened = true;
            self.changed.notify_all();
        }
        if state.has_happened || state.moments == MAX_MOMENTS {
            return false;
        }
        state.moments += 1;
        state.is_writing = true;
        let is_alone = |state: &mut Overlap| !state.has_happened;
        let _ = self.changed.wait_while_for(&mut state, is_alone, MOMENT);
        state.is_writing = false;
        state.has_happened
    }
}

impl Fault for SharedScratch {
    fn answer(&self, _call: &Call, outputs: OutputStream) -> OutputStream {
        let scratch = Arc::clone(&self.scratch);
        raw(outputs.filter(move |item| {
            let is_token = matches!(item, Ok(Output::Tokens(_)));
            let is_lost = is_token && is_multi_thread() && scratch.is_overwritten();
            std::future::ready(!is_lost)
        }))
    }
}

/// Computes the prompt inside `generate`.
pub(super) struct BlocksRuntime;

/// More than twice the patience of a health check.
const PREFILL: Duration = Duration::from_millis(300);

/// The prompt length from which on it takes that long.
const LONG_PROMPT: u32 = 32;

impl Fault for BlocksRuntime {
    fn answer(&self, call: &Call, outputs: OutputStream) -> OutputStream {
        let is_long = call.request.prompt_tokens() >= Some(LONG_PROMPT);
        let mut is_prefilled = !(is_long && is_multi_thread());
        raw(outputs.inspect(move |_| {
            if !std::mem::replace(&mut is_prefilled, true) {
                block(PREFILL);
            }
        }))
    }
}

fn block(time: Duration) {
    let (_sender, receiver) = std::sync::mpsc::sync_channel::<()>(0);
    let _ = receiver.recv_timeout(time);
}

/// The time of each step is quadratic in the number of running requests.
#[derive(Default)]
pub(super) struct AntiScaling {
    active: Arc<()>,
}

const STEP: Duration = Duration::from_millis(1);

impl Fault for AntiScaling {
    fn answer(&self, call: &Call, mut outputs: OutputStream) -> OutputStream {
        let ctx = call.ctx.clone();
        let place = Arc::clone(&self.active);
        let mut wait = None;
        // The wrapped stream handles the cancel, so it is polled first.
        raw(stream::poll_fn(move |cx| {
            use std::task::Poll;
            if wait.is_none() && !ctx.is_cancelled() {
                let active = u32::try_from(others(&place)).unwrap_or(u32::MAX);
                let slower = (active * active).saturating_sub(1);
                wait = Some(Box::pin(tokio::time::sleep(STEP * slower)));
            }
            match wait.as_mut().map(|wait| wait.as_mut().poll(cx)) {
                Some(Poll::Pending) if !ctx.is_cancelled() => Poll::Pending,
                _ => {
                    let item = outputs.poll_next_unpin(cx);
                    if item.is_ready() {
                        wait = None;
                    }
                    item
                }
            }
        }))
    }
}
