//! An error that persists.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use futures_util::StreamExt;
use genset_backend_common::{EngineError, ErrorKind, OutputStream, async_trait};

use crate::mutants::fault::{Call, Fault, Inner, raw};

/// After one request was refused for its content, all others fail.
#[derive(Default)]
pub(super) struct AfterFailure {
    is_poisoned: Arc<AtomicBool>,
}

#[async_trait]
impl Fault for AfterFailure {
    async fn generate(&self, inner: &Inner, call: Call) -> Result<OutputStream, EngineError> {
        let outputs = match inner.generate(call.request, call.ctx).await {
            Ok(outputs) => outputs,
            Err(error) => {
                let is_early = error.kind() == ErrorKind::EngineShutdown;
                self.is_poisoned.fetch_or(!is_early, Ordering::Relaxed);
                return Err(error);
            }
        };
        let is_poisoned = Arc::clone(&self.is_poisoned);
        Ok(raw(outputs.map(move |item| {
            if is_poisoned.load(Ordering::Relaxed) {
                return Err(EngineError::internal("a lock was left poisoned"));
            }
            item
        })))
    }
}
