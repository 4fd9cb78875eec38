//! Faults that the checks of LC catch.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

use futures_util::StreamExt;
use genset_backend_common::{
    EngineConfig, EngineError, OutputStream, Role, StartContext, async_trait,
};
use parking_lot::{Condvar, Mutex};
use tokio::task::JoinSet;

use super::Mutant;
use super::fault::{Call, Declares, Fault, Inner, raw, with_fault};
use super::shutdown::{leave_a_file, park_a_thread};

pub(super) const MUTANTS: &[Mutant] = &[
    Mutant {
        name: "no-limits",
        stands_for: "a config read from a checkpoint without the field, so that the worker registers with room for nothing",
        killed_by: &["LC01"],
        build: |clean, scenario| {
            with_fault(
                clean,
                scenario,
                Declares(|config| config.max_num_seqs = Some(0)),
            )
        },
    },
    Mutant {
        name: "prompt-logprobs-declared",
        stands_for: "an ability of the library, declared for the engine around it: answers have no place for it",
        killed_by: &["LC01"],
        build: |clean, scenario| {
            let declare = |config: &mut EngineConfig| config.capabilities.prompt_logprobs = true;
            with_fault(clean, scenario, Declares(declare))
        },
    },
    Mutant {
        name: "third-start-takes-the-device",
        stands_for: "a start that is retried again and again: each refused one leaves a handle, and the third finds none",
        killed_by: &["SQ01"],
        build: |clean, scenario| with_fault(clean, scenario, ThirdStart::default()),
    },
    Mutant {
        name: "start-twice-doubles",
        stands_for: "a start retried after a timeout, which loads beside the first load and takes the device's memory twice",
        killed_by: &["LC02"],
        build: |clean, scenario| with_fault(clean, scenario, DoublesOnStart::default()),
    },
    Mutant {
        name: "early-request-panics",
        stands_for: "a scheduler that is taken for granted: the first request before the end of the load is an unwrap on None",
        killed_by: &["LC03"],
        build: |clean, scenario| with_fault(clean, scenario, PanicsBeforeStart),
    },
    Mutant {
        name: "config-flaps",
        stands_for: "a model name with the process's own suffix, so that workers of one model do not find each other",
        killed_by: &["LC04"],
        build: |clean, scenario| {
            static STARTS: AtomicU32 = AtomicU32::new(0);
            let suffix = |config: &mut EngineConfig| {
                config.model = format!(
                    "{}-{}",
                    config.model,
                    STARTS.fetch_add(1, Ordering::Relaxed)
                );
            };
            with_fault(clean, scenario, Declares(suffix))
        },
    },
    Mutant {
        name: "dropped-load-goes-on",
        stands_for: "a loader that nobody owns until the load is done: a worker told to stop meanwhile never frees it",
        killed_by: &["LC05"],
        build: |clean, scenario| with_fault(clean, scenario, OrphanLoader::default()),
    },
    Mutant {
        name: "import-time-thread",
        stands_for: "an engine whose constructor opens the device and begins a watcher thread",
        killed_by: &["LC06", "LC10", "SH09"],
        build: |clean, scenario| {
            park_a_thread("device-watch");
            with_fault(clean, scenario, Declares(|_| {}))
        },
    },
    Mutant {
        name: "wrong-option-is-internal",
        stands_for: "every failure of start reported alike, so that a wrong flag restarts the worker for ever",
        killed_by: &["LC07"],
        build: |clean, scenario| with_fault(clean, scenario, InternalForRoles),
    },
    Mutant {
        name: "waits-for-the-device-with-its-thread",
        stands_for: "a lock file taken with a blocking call: the new worker of a rollout hangs, deaf to its own stop signal, until the old one is gone",
        killed_by: &["LC08"],
        build: |clean, scenario| with_fault(clean, scenario, TakesTheDevice::default()),
    },
    Mutant {
        name: "false-virtual-time",
        stands_for: "a capability copied from an example, by an engine whose thread makes the tokens",
        killed_by: &["LC09"],
        build: |clean, scenario| with_fault(clean, scenario, MadeByAThread),
    },
    Mutant {
        name: "thread-left-by-a-dropped-start",
        stands_for: "a loader's thread that is joined by whoever waits for the load: where nobody does any more, it stays",
        killed_by: &["LC10"],
        build: |clean, scenario| with_fault(clean, scenario, LeavesLoader),
    },
    Mutant {
        name: "file-left-by-a-failed-start",
        stands_for: "a lock file that is closed at the end of a load, and not where the load fails",
        killed_by: &["LC10"],
        build: |clean, scenario| with_fault(clean, scenario, LeavesLockFile),
    },
];

#[derive(Default)]
struct ThirdStart {
    starts: AtomicU32,
}

impl Fault for ThirdStart {
    fn begin(&self, _ctx: &StartContext) {
        self.starts.fetch_add(1, Ordering::Relaxed);
    }

    fn ask(&self, _call: &mut Call) -> Result<(), EngineError> {
        match self.starts.load(Ordering::Relaxed) {
            0..=2 => Ok(()),
            _ => Err(EngineError::internal("no device is left")),
        }
    }
}

#[derive(Default)]
struct DoublesOnStart {
    schedulers: Mutex<JoinSet<()>>,
}

#[async_trait]
impl Fault for DoublesOnStart {
    fn begin(&self, _ctx: &StartContext) {
        self.schedulers.lock().spawn(std::future::pending());
    }

    async fn cleanup(&self, inner: &Inner) -> Result<(), EngineError> {
        self.schedulers.lock().abort_all();
        inner.cleanup().await
    }
}

struct PanicsBeforeStart;

impl Fault for PanicsBeforeStart {
    fn ask(&self, call: &mut Call) -> Result<(), EngineError> {
        assert!(call.config.is_some(), "the scheduler is not there yet");
        Ok(())
    }
}

/// The loader belongs to the engine only after the load is done.
#[derive(Default)]
struct OrphanLoader {
    loader: Mutex<Option<tokio::task::AbortHandle>>,
}

#[async_trait]
impl Fault for OrphanLoader {
    async fn start(&self, inner: &Inner, ctx: StartContext) -> Result<EngineConfig, EngineError> {
        let loader = tokio::runtime::Handle::current().spawn(std::future::pending::<()>());
        tokio::time::sleep(Duration::from_millis(10)).await;
        let started = inner.start(ctx).await.inspect_err(|_| loader.abort())?;
        *self.loader.lock() = Some(loader.abort_handle());
        Ok(started)
    }

    async fn cleanup(&self, inner: &Inner) -> Result<(), EngineError> {
        if let Some(loader) = self.loader.lock().take() {
            loader.abort();
        }
        inner.cleanup().await
    }
}

struct InternalForRoles;

#[async_trait]
impl Fault for InternalForRoles {
    async fn start(&self, inner: &Inner, ctx: StartContext) -> Result<EngineConfig, EngineError> {
        if ctx.role != Role::Aggregated {
            return Err(EngineError::internal("the engine failed to start"));
        }
        inner.start(ctx).await
    }

    fn declare(&self, config: &mut EngineConfig) {
        config.capabilities.roles.clear();
    }
}

/// How long the blocking call waits before it returns the thread, so that the kit's own runs end.
const DEVICE_PATIENCE: Duration = Duration::from_secs(3);

/// The only device, and a notification that it is free.
static DEVICE: (Mutex<bool>, Condvar) = (Mutex::new(false), Condvar::new());

/// Waits for the device in a blocking call.
#[derive(Default)]
struct TakesTheDevice {
    has_device: AtomicBool,
}

impl TakesTheDevice {
    fn take(&self) {
        let (is_taken, freed) = &DEVICE;
        let mut is_taken = is_taken.lock();
        freed.wait_while_for(&mut is_taken, |taken| *taken, DEVICE_PATIENCE);
        if !std::mem::replace(&mut is_taken, true) {
            self.has_device.store(true, Ordering::Release);
        }
    }

    fn give_back(&self) {
        if self.has_device.swap(false, Ordering::AcqRel) {
            *DEVICE.0.lock() = false;
            DEVICE.1.notify_one();
        }
    }
}

impl Drop for TakesTheDevice {
    fn drop(&mut self) {
        self.give_back();
    }
}

#[async_trait]
impl Fault for TakesTheDevice {
    fn begin(&self, _ctx: &StartContext) {
        if !self.has_device.load(Ordering::Acquire) {
            self.take();
        }
    }

    async fn cleanup(&self, inner: &Inner) -> Result<(), EngineError> {
        self.give_back();
        inner.cleanup().await
    }
}

/// How long a thread takes to make a token.
const MADE_IN: Duration = Duration::from_micros(200);

/// Each token waits for a thread, which does not follow tokio's clock.
struct MadeByAThread;

impl Fault for MadeByAThread {
    fn answer(&self, _call: &Call, outputs: OutputStream) -> OutputStream {
        raw(outputs.then(|item| async move {
            let (made, token) = tokio::sync::oneshot::channel();
            std::thread::spawn(move || {
                std::thread::park_timeout(MADE_IN);
                drop(made.send(item));
            });
            match token.await {
                Ok(item) => item,
                Err(_) => Err(EngineError::internal("the thread is gone")),
            }
        }))
    }
}

/// Starts a thread that only the end of the load would end.
struct LeavesLoader;

struct Loader {
    is_joined: bool,
}

impl Drop for Loader {
    fn drop(&mut self) {
        if !self.is_joined {
            park_a_thread("loader");
        }
    }
}

#[async_trait]
impl Fault for LeavesLoader {
    async fn start(&self, inner: &Inner, ctx: StartContext) -> Result<EngineConfig, EngineError> {
        let mut loader = Loader { is_joined: false };
        tokio::task::yield_now().await;
        loader.is_joined = true;
        inner.start(ctx).await
    }
}

struct LeavesLockFile;

#[async_trait]
impl Fault for LeavesLockFile {
    async fn start(&self, inner: &Inner, ctx: StartContext) -> Result<EngineConfig, EngineError> {
        inner.start(ctx).await.inspect_err(|_| leave_a_file())
    }
}
