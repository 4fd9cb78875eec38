//! [`Presence`]: checks that a live worker is still reachable while the kit tests it.

use std::time::Duration;

use futures_util::StreamExt as _;
use genset_backend_common::{
    EngineError, GenerateRequest, LLMEngine, RequestContext, StartContext,
};
use genset_runtime::RemoteEngine;
use tokio::runtime::Builder;
use tokio::time::{Instant, sleep, timeout_at};
use tokio_util::sync::CancellationToken;

/// The pause between two requests to an unreachable worker.
const LOOK_AGAIN: Duration = Duration::from_millis(500);

/// The minimum time limit for an answer, even if the worker must never be unreachable.
const ANSWER_TIME: Duration = Duration::from_secs(5);

/// Practically forever: a century. A clock cannot represent all times that a flag accepts.
const FAR: Duration = Duration::from_secs(100 * 365 * 24 * 3600);

/// Asks a live worker whether it is reachable. Any other subject always is.
pub(super) struct Presence {
    /// Connects to the worker as an engine, anew for each request.
    pub(super) worker: Option<Box<dyn Fn() -> RemoteEngine>>,
    /// How long it may be unreachable.
    pub(super) limit: Duration,
}

impl Presence {
    /// Waits until the worker answers a request in any way, or for the interrupt. Blocks the calling thread.
    ///
    /// # Errors
    /// The message if the worker does not answer within the limit.
    pub(super) fn check(&self, interrupt: &CancellationToken) -> Result<(), String> {
        let Some(worker) = &self.worker else {
            return Ok(());
        };
        let runtime = Builder::new_current_thread().enable_all().build();
        let runtime = runtime.map_err(|error| format!("no async runtime to ask on: {error}"))?;
        runtime.block_on(async {
            tokio::select! {
                biased;
                () = interrupt.cancelled() => Ok(()),
                found = self.wait(async || ask(&worker()).await) => found,
            }
        })
    }

    async fn wait(&self, asks: impl AsyncFn() -> Result<(), EngineError>) -> Result<(), String> {
        let end = end(self.limit);
        let mut last = "it does not answer".to_owned();
        loop {
            let until = end.max(Instant::now() + ANSWER_TIME);
            match timeout_at(until, asks()).await {
                Ok(Ok(())) => return Ok(()),
                Ok(Err(error)) => last = error.message().to_owned(),
                Err(_) => {}
            }
            if Instant::now() >= end {
                let seconds = self.limit.as_secs_f64();
                return Err(format!("the worker is gone for {seconds} s ({last})"));
            }
            sleep(LOOK_AGAIN).await;
        }
    }
}

/// The end of a wait that begins now.
fn end(limit: Duration) -> Instant {
    Instant::now() + limit.min(FAR)
}

/// # Errors
/// An error whose kind is migratable. Any other error counts as an answer of the worker.
async fn ask(worker: &RemoteEngine) -> Result<(), EngineError> {
    let declared = worker.start(StartContext::detached(1)).await?;
    let mut request = GenerateRequest::from_tokens(declared.model, vec![1]);
    request.stop.max_tokens = Some(1);
    let answered = async {
        let context = RequestContext::new("is-there");
        let mut outputs = worker.generate(request, context).await?;
        while let Some(output) = outputs.next().await {
            output?;
        }
        Ok::<(), EngineError>(())
    };
    let answered = answered.await;
    worker.cleanup().await?;
    answered.or_else(|error| match error.kind().policy().is_migratable {
        true => Err(error),
        false => Ok(()),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_worker_that_may_not_be_away_has_time_to_answer() {
        let presence = Presence {
            worker: None,
            limit: Duration::ZERO,
        };
        let answers = async || {
            tokio::task::yield_now().await;
            Ok::<(), EngineError>(())
        };
        assert_eq!(presence.wait(answers).await, Ok(()));
        let is_away = async || Err::<(), _>(EngineError::internal("no connection"));
        let gone = presence.wait(is_away).await.unwrap_err();
        assert_eq!(gone, "the worker is gone for 0 s (no connection)");
    }

    #[test]
    fn a_limit_may_be_any_number_of_seconds() {
        assert!(end(Duration::from_secs(u64::MAX)) > end(Duration::from_secs(60)));
    }
}
