//! Handles SIGINT and SIGTERM if this process has PID 1, as in a container: there, signals without a handler do not end the
//! process. `main` calls [`end_process_1`] first; code with its own handling calls [`take_interrupt`], [`take_both`] or, if it
//! blocks its thread, [`interrupt_token`].
//! With any other PID, the system's default ends the process. SIGXFSZ does not end a process after [`outlive_file_limit`].

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};

use genset_backend_common::EngineError;
use tokio::runtime::{Builder, Runtime};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio_util::sync::CancellationToken;

use crate::input::note;

/// Whether other code handles SIGINT.
static HAS_INTERRUPT: AtomicBool = AtomicBool::new(false);

/// Whether other code handles SIGTERM.
static HAS_TERMINATE: AtomicBool = AtomicBool::new(false);

/// The offset that shells add to a signal's number for the exit code of the process that it ended.
const BY_SIGNAL: i32 = 128;

/// Makes SIGINT and SIGTERM end this process, if it has PID 1, until other code takes them.
pub(crate) fn end_process_1() {
    if std::process::id() == 1
        && let Err(error) = begin()
    {
        note(format_args!("warning: signals cannot be handled: {error}"));
    }
}

/// The caller handles SIGINT from now on.
pub(crate) fn take_interrupt() {
    HAS_INTERRUPT.store(true, Ordering::Release);
}

/// The caller handles SIGINT and SIGTERM from now on.
pub(crate) fn take_both() {
    take_interrupt();
    HAS_TERMINATE.store(true, Ordering::Release);
}

/// A token that SIGINT cancels from now on. A second one ends this process, in case its work does not end.
///
/// # Errors
/// `Internal`: the system gives no handler or no thread.
pub(crate) fn interrupt_token() -> Result<CancellationToken, EngineError> {
    take_interrupt();
    cancelled_by_interrupt()
        .map_err(|error| EngineError::internal("Ctrl-C cannot be listened to").with_source(error))
}

fn cancelled_by_interrupt() -> io::Result<CancellationToken> {
    let runtime = Builder::new_current_thread().enable_all().build()?;
    let mut interrupt = {
        let _entered = runtime.enter();
        signal(SignalKind::interrupt())?
    };
    let token = CancellationToken::new();
    let cancelled = token.clone();
    // The thread ends with the process.
    let thread = std::thread::Builder::new().name("interrupt".to_owned());
    thread.spawn(move || {
        runtime.block_on(async {
            let _ = interrupt.recv().await;
            cancelled.cancel();
            let _ = interrupt.recv().await;
        });
        exit(BY_SIGNAL + SignalKind::interrupt().as_raw_value());
    })?;
    Ok(token)
}

/// From now on this process ends with its standard input: whoever started it holds the other end.
pub(crate) fn end_with_input() -> io::Result<()> {
    // The thread ends with the process.
    let thread = std::thread::Builder::new().name("input".to_owned());
    thread.spawn(|| {
        // A failure to read is an end, too.
        drop(io::copy(&mut io::stdin(), &mut io::sink()));
        exit(BY_SIGNAL + SignalKind::hangup().as_raw_value());
    })?;
    Ok(())
}

/// Turns a file that may not grow (`ulimit -f`) into a write error instead of the end of this process. Child processes keep the
/// system's default.
pub(crate) fn outlive_file_limit(runtime: &Runtime) {
    let _entered = runtime.enter();
    let kind = SignalKind::from_raw(rustix::process::Signal::XFSZ.as_raw());
    // The handler stays installed after its listener is dropped.
    if let Err(error) = signal(kind) {
        note(format_args!("warning: SIGXFSZ cannot be handled: {error}"));
    }
}

fn begin() -> io::Result<()> {
    let runtime = Builder::new_current_thread().enable_all().build()?;
    let (interrupt, terminate) = {
        let _entered = runtime.enter();
        (
            signal(SignalKind::interrupt())?,
            signal(SignalKind::terminate())?,
        )
    };
    // The thread ends with the process.
    let thread = std::thread::Builder::new().name("signals".to_owned());
    thread.spawn(move || exit(runtime.block_on(ended(interrupt, terminate))))?;
    Ok(())
}

/// Waits for a signal that no other code handles; returns the exit code.
async fn ended(mut interrupt: Signal, mut terminate: Signal) -> i32 {
    loop {
        let (kind, is_taken) = tokio::select! {
            _ = interrupt.recv() => (SignalKind::interrupt(), &HAS_INTERRUPT),
            _ = terminate.recv() => (SignalKind::terminate(), &HAS_TERMINATE),
        };
        if !is_taken.load(Ordering::Acquire) {
            return BY_SIGNAL + kind.as_raw_value();
        }
    }
}

#[expect(
    clippy::exit,
    clippy::disallowed_methods,
    reason = "as the system does where a process has another number: no destructor runs"
)]
fn exit(code: i32) {
    std::process::exit(code)
}
