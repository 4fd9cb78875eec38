//! The fuzz targets as libFuzzer programs, one binary each, which `cargo xtask fuzz` builds and runs.
//!
//! Code under test may catch panics of libraries, which are not findings. So a panic ends the program only if it leaves
//! the target.

use std::panic::{AssertUnwindSafe, catch_unwind, set_hook};
use std::sync::{Mutex, PoisonError};

#[doc(hidden)]
pub use libfuzzer_sys;

static LATEST_PANIC: Mutex<String> = Mutex::new(String::new());

/// Reports panics instead of aborting at each.
pub fn note_panics() {
    set_hook(Box::new(|panic| {
        let mut latest = LATEST_PANIC.lock().unwrap_or_else(PoisonError::into_inner);
        *latest = format!("{panic}\n{}", std::backtrace::Backtrace::capture());
    }));
}

/// Runs a target on an input, and aborts if it panics, which libFuzzer reports as a finding.
pub fn run(target: fn(&[u8]), input: &[u8]) {
    if catch_unwind(AssertUnwindSafe(|| target(input))).is_err() {
        let latest = LATEST_PANIC.lock().unwrap_or_else(PoisonError::into_inner);
        eprintln!("\n{latest}");
        std::process::abort();
    }
}

/// The body of a binary: libFuzzer around a target's function.
#[macro_export]
macro_rules! target {
    ($target:path) => {
        $crate::libfuzzer_sys::fuzz_target!(
            init: $crate::note_panics(),
            |input: &[u8]| { $crate::run($target, input) }
        );
    };
}
