//! Faults that the checks of SH catch.

use std::cell::Cell;
use std::fs::File;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::mpsc::sync_channel;
use std::time::Duration;

use futures_util::StreamExt;
use genset_backend_common::{
    DrainContext, EngineConfig, EngineError, OutputStream, StartContext, async_trait,
};
use parking_lot::Mutex;
use tokio::sync::watch;

use super::Mutant;
use super::cut::{Then, cut};
use super::fault::{Call, Fault, Inner, held_to_end, is_last, others, raw, with_fault};
use super::slotted::{SlotFault, without_probe};

pub(super) const MUTANTS: &[Mutant] = &[
    Mutant {
        name: "cleanup-fails",
        stands_for: "a teardown in the wrong order, which fails whenever the engine had started",
        killed_by: &["LC05", "SH01", "SH07", "SH08"],
        build: |clean, scenario| with_fault(clean, scenario, Ends::new(Ill::First)),
    },
    Mutant {
        name: "cleanup-not-idempotent",
        stands_for: "a second signal during the shutdown, which frees again what is freed",
        killed_by: &["SH02", "SH08"],
        build: |clean, scenario| with_fault(clean, scenario, Ends::new(Ill::Second)),
    },
    Mutant {
        name: "cleanup-needs-start",
        stands_for: "a worker that fails before its start, and whose log ends with the cleanup's failure",
        killed_by: &["SH03"],
        build: |clean, scenario| with_fault(clean, scenario, Ends::new(Ill::WithoutStart)),
    },
    Mutant {
        name: "failed-start-leaves-no-cleanup",
        stands_for: "an out-of-memory load whose cleanup frees what was never allocated",
        killed_by: &["SH04"],
        build: |clean, scenario| with_fault(clean, scenario, Ends::new(Ill::AfterFailedStart)),
    },
    Mutant {
        name: "cleanup-forgets-streams",
        stands_for: "a scheduler that ends without a word to the requests it holds (clients hang when a worker stops)",
        killed_by: &["SH05", "SH14", "SH16", "ST05"],
        build: |clean, scenario| with_fault(clean, scenario, CutsStreams::on_cleanup()),
    },
    Mutant {
        name: "drain-cuts-requests",
        stands_for: "a drain that means stop: every rollout cuts the answers under way",
        killed_by: &["SH06"],
        build: |clean, scenario| with_fault(clean, scenario, CutsStreams::on_drain()),
    },
    Mutant {
        name: "second-drain-waits",
        stands_for: "a drain that waits for a notice which the first one has used up",
        killed_by: &["SH07"],
        build: |clean, scenario| with_fault(clean, scenario, DrainsOnce::default()),
    },
    Mutant {
        name: "concurrent-cleanup-deadlocks",
        stands_for: "a stop signal that comes while a failing start cleans up, and the two wait for each other",
        killed_by: &["SH08"],
        build: |clean, scenario| with_fault(clean, scenario, CleansUpInPairs::default()),
    },
    Mutant {
        name: "undying-thread",
        stands_for: "a scheduler thread that no shutdown reaches: one more for every engine of the process",
        killed_by: &["LC10", "SH09"],
        build: |clean, scenario| with_fault(clean, scenario, Leaves(|| park_a_thread("scheduler"))),
    },
    Mutant {
        name: "undying-task",
        stands_for: "a detached statistics task that outlives its engine",
        killed_by: &["LC02", "LC05", "SH09"],
        build: |clean, scenario| with_fault(clean, scenario, Leaves(leave_a_task)),
    },
    Mutant {
        name: "open-file",
        stands_for: "a checkpoint file that stays open after the engine is gone",
        killed_by: &["LC10", "SH09"],
        build: |clean, scenario| with_fault(clean, scenario, Leaves(leave_a_file)),
    },
    Mutant {
        name: "one-engine-a-process",
        stands_for: "a cleanup that tears down what the next engine of the process needs (a device context, a process group)",
        killed_by: &["DG07", "DT10", "LC04", "LC07", "MT04", "RD01", "SH10"],
        build: |clean, scenario| with_fault(clean, scenario, OneInAProcess),
    },
    Mutant {
        name: "late-request-is-internal",
        stands_for: "requests that meet a stopping worker and come back as 500, so that no client sends them elsewhere",
        killed_by: &["SH11"],
        build: |clean, scenario| with_fault(clean, scenario, InternalAfterCleanup::default()),
    },
    Mutant {
        name: "drop-joins-for-ever",
        stands_for: "a destructor that joins a thread nobody told to stop: a panic becomes a process that never exits",
        killed_by: &["SH12"],
        build: |clean, scenario| with_fault(clean, scenario, BlocksOnDrop::default()),
    },
    Mutant {
        name: "weights-stay",
        stands_for: "a registry of loaded models that is never emptied: each swap of models keeps the old one's buffers",
        killed_by: &["SH13"],
        build: |clean, scenario| with_fault(clean, scenario, Leaves(leave_weights)),
    },
    Mutant {
        name: "waiters-forgotten-at-cleanup",
        stands_for: "a cleanup that ends what the scheduler runs, and not what it has in its queue",
        killed_by: &["SH14"],
        build: |clean, scenario| without_probe(clean, scenario, 4, SlotFault::ForgetsWaiters),
    },
    Mutant {
        name: "drain-waits-for-the-dropped",
        stands_for: "a count of requests that is taken down by their terminals only: a drain waits for those that have none",
        killed_by: &["SH15"],
        build: |clean, scenario| with_fault(clean, scenario, CountsTerminals::default()),
    },
    Mutant {
        name: "drain-waits-out-its-time",
        stands_for: "a drain that sleeps for most of its grace: every rollout takes as long as the longest one may",
        killed_by: &["SH06", "SH07", "SH15"],
        build: |clean, scenario| with_fault(clean, scenario, SleepsInDrain),
    },
    Mutant {
        name: "cleanup-waits-for-readers",
        stands_for: "a cleanup that joins tasks which wait for room in their clients' streams",
        killed_by: &["SH16", "ST05"],
        build: |clean, scenario| with_fault(clean, scenario, JoinsReaders::default()),
    },
];

/// A thread that never ends.
pub(super) fn park_a_thread(name: &str) {
    let parked = std::thread::Builder::new().name(name.into()).spawn(|| {
        loop {
            std::thread::park();
        }
    });
    drop(parked);
}

fn leave_a_task() {
    drop(tokio::runtime::Handle::current().spawn(std::future::pending::<()>()));
}

pub(super) fn leave_a_file() {
    if let Ok(file) = File::open("/dev/null") {
        std::mem::forget(file);
    }
}

/// One engine's buffers: small for a model, large enough to be noticed.
const WEIGHTS_BYTES: usize = 1024 * 1024;

fn leave_weights() {
    static REGISTRY: Mutex<Vec<Vec<u8>>> = Mutex::new(Vec::new());
    // The pages exist only after a write.
    REGISTRY.lock().push(vec![1; WEIGHTS_BYTES]);
}

fn failed() -> Result<(), EngineError> {
    Err(EngineError::internal("the device is busy"))
}

/// The cleanup that fails.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Ill {
    First,
    Second,
    WithoutStart,
    AfterFailedStart,
}

/// Fails one kind of cleanup.
struct Ends {
    ill: Ill,
    is_started: AtomicBool,
    is_start_failed: AtomicBool,
    cleanups: AtomicU32,
}

impl Ends {
    fn new(ill: Ill) -> Self {
        Self {
            ill,
            is_started: AtomicBool::new(false),
            is_start_failed: AtomicBool::new(false),
            cleanups: AtomicU32::new(0),
        }
    }
}

#[async_trait]
impl Fault for Ends {
    async fn start(&self, inner: &Inner, ctx: StartContext) -> Result<EngineConfig, EngineError> {
        let started = inner.start(ctx).await;
        match &started {
            Ok(_) => self.is_started.store(true, Ordering::Release),
            Err(_) if !self.is_started.load(Ordering::Acquire) => {
                self.is_start_failed.store(true, Ordering::Release);
            }
            Err(_) => {}
        }
        started
    }

    async fn cleanup(&self, inner: &Inner) -> Result<(), EngineError> {
        let before = self.cleanups.fetch_add(1, Ordering::AcqRel);
        let is_started = self.is_started.load(Ordering::Acquire);
        let is_start_failed = self.is_start_failed.load(Ordering::Acquire);
        inner.cleanup().await?;
        let is_ill = match self.ill {
            Ill::First => is_started && before == 0,
            Ill::Second => is_started && before > 0,
            Ill::WithoutStart => !is_started && !is_start_failed,
            Ill::AfterFailedStart => is_start_failed,
        };
        if is_ill { failed() } else { Ok(()) }
    }
}

/// Streams that fail when the engine is cleaned up or drained.
struct CutsStreams {
    is_over: watch::Sender<bool>,
    on_drain: bool,
    then: Then,
}

impl CutsStreams {
    fn on_cleanup() -> Self {
        Self {
            is_over: watch::Sender::new(false),
            on_drain: false,
            then: Then::Hang,
        }
    }

    fn on_drain() -> Self {
        Self {
            on_drain: true,
            then: Then::Fail(EngineError::engine_shutdown("the engine drains")),
            ..Self::on_cleanup()
        }
    }
}

#[async_trait]
impl Fault for CutsStreams {
    fn answer(&self, _call: &Call, outputs: OutputStream) -> OutputStream {
        cut(outputs, &self.is_over, self.then.clone())
    }

    async fn drain(&self, inner: &Inner, ctx: DrainContext) -> Result<(), EngineError> {
        if self.on_drain {
            self.is_over.send_replace(true);
        }
        inner.drain(ctx).await
    }

    async fn cleanup(&self, inner: &Inner) -> Result<(), EngineError> {
        if !self.on_drain {
            self.is_over.send_replace(true);
        }
        inner.cleanup().await
    }
}

#[derive(Default)]
struct DrainsOnce {
    is_drained: AtomicBool,
}

#[async_trait]
impl Fault for DrainsOnce {
    async fn drain(&self, inner: &Inner, ctx: DrainContext) -> Result<(), EngineError> {
        if self.is_drained.swap(true, Ordering::AcqRel) {
            std::future::pending::<()>().await;
        }
        inner.drain(ctx).await
    }
}

/// Of two concurrent cleanups, the second waits forever.
#[derive(Default)]
struct CleansUpInPairs {
    under_way: AtomicU32,
}

#[async_trait]
impl Fault for CleansUpInPairs {
    async fn cleanup(&self, inner: &Inner) -> Result<(), EngineError> {
        if self.under_way.fetch_add(1, Ordering::AcqRel) > 0 {
            std::future::pending::<()>().await;
        }
        tokio::task::yield_now().await;
        self.under_way.fetch_sub(1, Ordering::AcqRel);
        inner.cleanup().await
    }
}

/// Leaves something behind at each start.
struct Leaves(fn());

impl Fault for Leaves {
    fn begin(&self, _ctx: &StartContext) {
        (self.0)();
    }
}

thread_local! {
    /// Simulates process-wide state: every check has its own thread.
    static IS_TORN_DOWN: Cell<bool> = const { Cell::new(false) };
}

/// Counts a request as active until its terminal comes.
#[derive(Default)]
struct CountsTerminals {
    under_way: Arc<AtomicU32>,
}

#[async_trait]
impl Fault for CountsTerminals {
    fn answer(&self, _call: &Call, outputs: OutputStream) -> OutputStream {
        self.under_way.fetch_add(1, Ordering::AcqRel);
        let under_way = Arc::clone(&self.under_way);
        raw(outputs.inspect(move |item| {
            under_way.fetch_sub(u32::from(is_last(item)), Ordering::AcqRel);
        }))
    }

    async fn drain(&self, inner: &Inner, ctx: DrainContext) -> Result<(), EngineError> {
        let ended = until(|| self.under_way.load(Ordering::Acquire) == 0);
        drop(tokio::time::timeout(ctx.deadline / 2, ended).await);
        inner.drain(ctx).await
    }
}

struct SleepsInDrain;

#[async_trait]
impl Fault for SleepsInDrain {
    async fn drain(&self, inner: &Inner, ctx: DrainContext) -> Result<(), EngineError> {
        tokio::time::sleep(ctx.deadline * 3 / 4).await;
        inner.drain(ctx).await
    }
}

/// Ends only when all streams are dropped.
#[derive(Default)]
struct JoinsReaders {
    readers: Arc<()>,
}

#[async_trait]
impl Fault for JoinsReaders {
    fn answer(&self, _call: &Call, outputs: OutputStream) -> OutputStream {
        held_to_end(outputs, Arc::clone(&self.readers))
    }

    async fn cleanup(&self, inner: &Inner) -> Result<(), EngineError> {
        until(|| others(&self.readers) == 0).await;
        inner.cleanup().await
    }
}

async fn until(is_so: impl Fn() -> bool) {
    while !is_so() {
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

struct OneInAProcess;

#[async_trait]
impl Fault for OneInAProcess {
    async fn start(&self, inner: &Inner, ctx: StartContext) -> Result<EngineConfig, EngineError> {
        if IS_TORN_DOWN.get() {
            return Err(EngineError::internal("the device context is gone"));
        }
        inner.start(ctx).await
    }

    async fn cleanup(&self, inner: &Inner) -> Result<(), EngineError> {
        IS_TORN_DOWN.set(true);
        inner.cleanup().await
    }
}

#[derive(Default)]
struct InternalAfterCleanup {
    is_over: AtomicBool,
}

#[async_trait]
impl Fault for InternalAfterCleanup {
    fn ask(&self, _call: &mut Call) -> Result<(), EngineError> {
        match self.is_over.load(Ordering::Acquire) {
            true => Err(EngineError::internal("the scheduler does not answer")),
            false => Ok(()),
        }
    }

    async fn cleanup(&self, inner: &Inner) -> Result<(), EngineError> {
        self.is_over.store(true, Ordering::Release);
        inner.cleanup().await
    }
}

#[derive(Default)]
struct BlocksOnDrop {
    is_running: AtomicBool,
}

#[async_trait]
impl Fault for BlocksOnDrop {
    fn declare(&self, _config: &mut EngineConfig) {
        self.is_running.store(true, Ordering::Release);
    }

    async fn cleanup(&self, inner: &Inner) -> Result<(), EngineError> {
        self.is_running.store(false, Ordering::Release);
        inner.cleanup().await
    }
}

impl Drop for BlocksOnDrop {
    fn drop(&mut self) {
        if self.is_running.load(Ordering::Acquire) {
            let (_sender, never) = sync_channel::<()>(0);
            let _ = never.recv_timeout(Duration::from_secs(30));
        }
    }
}
