//! [`Keeper`]: starts a process that ended again, with pauses, and says meanwhile that the engine is down.

use std::sync::Arc;

use genset_backend_common::prometheus::metrics::counter::Counter;
use genset_backend_common::{EngineConfig, EngineError, ErrorKind};
use genset_process::{Backoff, RestartPolicy};
use parking_lot::Mutex;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::session::{Launcher, Session};

/// The process that serves now, or why none does.
#[derive(Debug)]
pub(crate) struct Current(Mutex<Result<Arc<Session>, EngineError>>);

impl Current {
    pub(crate) fn new(session: Session) -> Self {
        Self(Mutex::new(Ok(Arc::new(session))))
    }

    /// The process that serves now.
    ///
    /// # Errors
    /// `Unavailable` while it is started again; how it failed when that was given up.
    pub(crate) fn session(&self) -> Result<Arc<Session>, EngineError> {
        self.0.lock().clone()
    }

    fn set(&self, now: Result<Arc<Session>, EngineError>) {
        *self.0.lock() = now;
    }
}

/// Keeps a process running, as its policy says.
pub(crate) struct Keeper {
    pub(crate) launcher: Launcher,
    pub(crate) policy: RestartPolicy,
    pub(crate) current: Arc<Current>,
    /// What the engine said of itself when it was first started; clients rely on it.
    pub(crate) declared: EngineConfig,
    pub(crate) restarts: Counter,
    /// Cancelled when the engine is to end.
    pub(crate) abandon: CancellationToken,
}

impl Keeper {
    /// Returns when the engine is to end, or cannot be mended.
    pub(crate) async fn run(self) {
        let mut backoff = Backoff::new(self.policy);
        let abandon = self.abandon.clone();
        let kept = self.keep(&mut backoff);
        tokio::select! {
            biased;
            () = abandon.cancelled() => {}
            error = kept => {
                tracing::error!(%error, "the engine's process is not started again");
                self.current.set(Err(error.clone()));
                self.launcher.health.report_dead(error.to_string());
            }
        }
    }

    /// Starts the process again whenever it ended. Returns why it was given up.
    ///
    /// # Cancel safety
    /// A process that is starting ends; one that serves stays.
    async fn keep(&self, backoff: &mut Backoff) -> EngineError {
        loop {
            let session = match self.current.session() {
                Ok(session) => session,
                Err(error) => return error,
            };
            let since = Instant::now();
            session.link.closed.cancelled().await;
            backoff.served(since.elapsed());
            self.launcher.sinks.forget();
            match self.revive(session.link.over(), backoff).await {
                Ok(session) => {
                    self.current.set(Ok(Arc::new(session)));
                    tracing::info!("the engine's process serves again");
                    self.launcher.health.report_up();
                }
                Err(error) => return error,
            }
        }
    }

    /// A process that serves, after as many attempts as it took.
    async fn revive(
        &self,
        mut failure: EngineError,
        backoff: &mut Backoff,
    ) -> Result<Session, EngineError> {
        while let Some(pause) = backoff.next_pause(rand::random()) {
            let down = EngineError::new(
                ErrorKind::Unavailable,
                "the engine's process ended and is being started again; send the request again",
            );
            self.current.set(Err(down
                .with_retry_after(pause)
                .with_source(failure.clone())));
            let pause_s = pause.as_secs_f64();
            tracing::warn!(pause_s, error = %failure, "the engine's process is started again");
            tokio::time::sleep(pause).await;
            self.restarts.inc();
            match self.launcher.launch().await {
                Ok((session, declared)) if is_same(&self.declared, &declared) => {
                    return Ok(session);
                }
                Ok((_ended_here, declared)) => {
                    return Err(EngineError::internal(format!(
                        "the engine's process came back as another engine, and clients know the first: {declared:?} \
                         instead of {:?}",
                        self.declared
                    )));
                }
                Err(error) => failure = error,
            }
        }
        let attempts = self.policy.max_restarts;
        let message = format!("{attempts} restarts did not help; the last end: {failure}");
        Err(EngineError::new(failure.kind(), message).with_source(failure))
    }
}

/// Whether requests made for the one fit the other. How much it runs at once may differ: many engines measure it anew.
fn is_same(first: &EngineConfig, second: &EngineConfig) -> bool {
    let second = EngineConfig {
        kv_total_blocks: first.kv_total_blocks,
        max_num_seqs: first.max_num_seqs,
        max_num_batched_tokens: first.max_num_batched_tokens,
        canary: first.canary.clone(),
        ..second.clone()
    };
    *first == second
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_requests_rely_on_must_stay() {
        let first = EngineConfig::new("m", 100).with_vocab_size(10);
        let mut second = first.clone();
        second.kv_total_blocks = Some(7);
        assert!(is_same(&first, &second));
        second.context_length_tokens = 99;
        assert!(!is_same(&first, &second));
    }
}
