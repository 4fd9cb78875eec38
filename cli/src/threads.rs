//! The async runtimes on which commands run. Each function fails where the system gives no thread.

use genset_backend_common::EngineError;
use tokio::runtime::{Builder, Runtime};

/// As many threads as the machine has cores.
pub(crate) fn of_every_core() -> Result<Runtime, EngineError> {
    built(&mut Builder::new_multi_thread())
}

/// For a command that waits more than it computes.
pub(crate) fn two() -> Result<Runtime, EngineError> {
    built(Builder::new_multi_thread().worker_threads(2))
}

/// The thread of the caller alone.
pub(crate) fn this_one() -> Result<Runtime, EngineError> {
    built(&mut Builder::new_current_thread())
}

fn built(builder: &mut Builder) -> Result<Runtime, EngineError> {
    builder.enable_all().build().map_err(|error| {
        EngineError::internal(format!("the async runtime cannot be started: {error}"))
            .with_source(error)
    })
}
