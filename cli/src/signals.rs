//! SIGINT and SIGTERM where this process has the number 1, as in a container: there the system lets no signal end it that it does
//! not handle. `main` calls [`end_process_1`] before all else; who has a way of its own to end says so with [`take_interrupt`] or
//! [`take_both`]. Any other process is ended by the system. By SIGXFSZ none is ended that [`outlive_file_limit`] was called in.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};

use tokio::runtime::{Builder, Runtime};
use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::input::note;

/// Whether SIGINT is no longer ours.
static HAS_INTERRUPT: AtomicBool = AtomicBool::new(false);

/// Whether SIGTERM is no longer ours.
static HAS_TERMINATE: AtomicBool = AtomicBool::new(false);

/// What shells add to a signal's number for the exit code of what it ended.
const BY_SIGNAL: i32 = 128;

/// Lets SIGINT and SIGTERM end this process, if it has the number 1, until somebody takes them.
pub(crate) fn end_process_1() {
    if std::process::id() == 1
        && let Err(error) = begin()
    {
        note(format_args!("warning: signals cannot be handled: {error}"));
    }
}

/// SIGINT is handled by who calls this.
pub(crate) fn take_interrupt() {
    HAS_INTERRUPT.store(true, Ordering::Release);
}

/// SIGINT and SIGTERM are handled by who calls this.
pub(crate) fn take_both() {
    take_interrupt();
    HAS_TERMINATE.store(true, Ordering::Release);
}

/// A file that may not grow any more (`ulimit -f`) is an error of who writes it, and not the end of this process. What it starts is
/// left to the system.
pub(crate) fn outlive_file_limit(runtime: &Runtime) {
    let _entered = runtime.enter();
    let kind = SignalKind::from_raw(rustix::process::Signal::XFSZ.as_raw());
    // The handler stays, whether or not somebody listens.
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
    // It ends with the process.
    let thread = std::thread::Builder::new().name("signals".to_owned());
    thread.spawn(move || exit(runtime.block_on(ended(interrupt, terminate))))?;
    Ok(())
}

/// Waits for a signal that nobody has taken; returns the exit code.
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
