//! [`RemoteOutputs`]: a remote worker's outputs, adapted to an engine's contract.

use std::time::Duration;

use futures_util::{StreamExt, stream};
use genset_backend_common::output::Finish;
use genset_backend_common::{CancelReason, EngineError, Output, OutputStream, RequestContext};
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

/// How long to wait for the worker's terminal after a cancellation, if only it tells the length of the prompt.
const USAGE_WAIT: Duration = Duration::from_secs(1);

/// The outputs of one request. On cancellation or engine shutdown, yields the terminal at once and drops what the worker
/// sent meanwhile. If the prompt is not tokens, only the worker knows its length, so waits briefly for the worker's
/// terminal. Dropping the worker's stream ends its work.
pub(super) struct RemoteOutputs {
    outputs: OutputStream,
    ctx: RequestContext,
    /// The request's context for the worker.
    far: RequestContext,
    stop: CancellationToken,
    /// `None` if only the worker knows the number.
    prompt_tokens: Option<u32>,
    streamed_tokens: u32,
}

impl RemoteOutputs {
    /// The outputs of a request; without `outputs`, of one that was cancelled before it had any.
    pub(super) fn stream(
        outputs: Option<OutputStream>,
        (ctx, far): (RequestContext, RequestContext),
        stop: &CancellationToken,
        prompt_tokens: Option<u32>,
    ) -> OutputStream {
        let prompt_tokens = prompt_tokens.or(outputs.is_none().then_some(0));
        let outputs =
            outputs.unwrap_or_else(|| OutputStream::from_raw(Box::pin(stream::pending())));
        let remote = Self {
            outputs,
            ctx,
            far,
            stop: stop.clone(),
            prompt_tokens,
            streamed_tokens: 0,
        };
        // The state is `None` after the terminal: the worker's stream is dropped with it.
        let items = stream::unfold(Some(remote), |remote| async move {
            let mut remote = remote?;
            let item = remote.next().await?;
            let has_more = item.as_ref().is_ok_and(|output| !output.is_terminal());
            Some((item, has_more.then_some(remote)))
        });
        OutputStream::from_raw(Box::pin(items))
    }

    async fn next(&mut self) -> Option<Result<Output, EngineError>> {
        tokio::select! {
            biased;
            () = self.ctx.cancelled() => Some(Ok(self.end_as_cancelled().await)),
            item = self.outputs.next() => {
                if let Some(Ok(output)) = &item {
                    self.streamed_tokens = self.streamed_tokens.saturating_add(output.token_count());
                }
                item
            }
            () = self.stop.cancelled() => Some(Err(stopped())),
        }
    }

    async fn end_as_cancelled(&mut self) -> Output {
        let prompt_tokens = match self.prompt_tokens {
            Some(prompt_tokens) => prompt_tokens,
            None => self.told_prompt_tokens().await,
        };
        let finished = Finish::cancelled().into_finished(prompt_tokens, self.streamed_tokens);
        Output::Finished(Box::new(finished))
    }

    /// The length of the prompt in the worker's terminal; 0 if that does not arrive.
    async fn told_prompt_tokens(&mut self) -> u32 {
        let reason = self.ctx.cancel_reason().unwrap_or(CancelReason::Client);
        self.far.cancel(reason);
        let outputs = &mut self.outputs;
        let told = async {
            while let Some(Ok(output)) = outputs.next().await {
                if let Output::Finished(finished) = output {
                    return finished.usage.prompt_tokens;
                }
            }
            0
        };
        let told = self.stop.run_until_cancelled(timeout(USAGE_WAIT, told));
        told.await.and_then(Result::ok).unwrap_or_default()
    }
}

/// The error of a request to a stopped engine.
pub(super) fn stopped() -> EngineError {
    EngineError::engine_shutdown("the engine was stopped")
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;
    use tokio::sync::oneshot;

    use super::*;

    #[tokio::test]
    async fn what_the_worker_sends_after_a_cancellation_is_dropped() {
        let (worker, sent) = oneshot::channel();
        let items = stream::once(async move { sent.await.unwrap() });
        let items = OutputStream::from_raw(Box::pin(items));
        let (ctx, stop) = (RequestContext::new("a"), CancellationToken::new());
        let contexts = (ctx.clone(), ctx.detached());
        let mut outputs = RemoteOutputs::stream(Some(items), contexts, &stop, Some(3));
        assert!(outputs.next().now_or_never().is_none());
        ctx.cancel(CancelReason::Client);
        worker.send(Ok(Output::from(7))).unwrap();
        let Output::Finished(finished) = outputs.next().await.unwrap().unwrap() else {
            panic!("the worker's token was passed on");
        };
        assert_eq!(finished.usage.completion_tokens, 0);
        assert!(outputs.next().await.is_none());
    }
}
