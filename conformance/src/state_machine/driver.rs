//! Performs a sequence on a fresh engine, together with the model.

use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::future::{Either, join, join_all, select};
use genset_backend_common::{
    CancelReason, EngineError, ErrorKind, Output, OutputStream, RequestContext,
};
use tokio::time::timeout;

use super::model::{Phase, StreamModel};
use super::operation::{Asked, Operation, Sequence};
use crate::check::{CheckResult, Stop, fail};
use crate::running::Running;
use crate::trial::{Live, Trial};

/// The index of the current operation, for watchers on other threads; the number of operations at the end.
pub(super) type Progress = Arc<AtomicUsize>;

/// Performs the operations, and then the end: reads all streams, cleans up twice and sends one more request.
pub(super) async fn perform(trial: Trial, sequence: Sequence, progress: Progress) -> CheckResult {
    let mut driver = Driver::new(trial);
    for operation in sequence.operations() {
        driver.step(*operation).await?;
        progress.fetch_add(1, Ordering::Release);
    }
    driver.end().await
}

/// How many tokens an open request may still want at the end. A request that wants more is cancelled, as a Worker does after
/// its grace period.
const GRACE_TOKENS: u32 = 64;

struct Driver {
    live: Live,
    phase: Phase,
    requests: Vec<Request>,
}

impl Driver {
    fn new(trial: Trial) -> Self {
        Self {
            live: Live::unstarted(trial, 4096),
            phase: Phase::Built,
            requests: Vec::new(),
        }
    }

    fn trial(&self) -> Trial {
        self.live.trial.clone()
    }

    async fn step(&mut self, operation: Operation) -> CheckResult {
        match operation {
            Operation::Start => self.start().await,
            Operation::Generate(asked) => self.generate(asked).await,
            Operation::Poll { request, items } => self.poll(request, items).await,
            Operation::Cancel { request } => {
                if let Some(request) = self.requests.get_mut(request) {
                    request.cancel();
                }
                Ok(())
            }
            Operation::Drop { request } => {
                if let Some(request) = self.requests.get_mut(request) {
                    request.model.drop();
                    request.outputs = None;
                }
                Ok(())
            }
            Operation::Abort { request } => self.abort(request).await,
            Operation::Drain => self.drain().await,
            Operation::Cleanup => self.cleanup("cleanup").await,
            Operation::Advance { millis } => {
                tokio::time::sleep(Duration::from_millis(millis)).await;
                Ok(())
            }
        }
    }

    async fn start(&mut self) -> CheckResult {
        let trial = self.trial();
        let start = self.live.subject.engine.start(self.live.start.clone());
        let started = trial.starting("start", start).await?;
        self.phase = judge(self.phase.started(started.as_ref().map(|_| ())))?;
        if let Ok(config) = started {
            self.live.config = config;
        }
        Ok(())
    }

    /// Sends a request. If the engine is not serving and accepts it, its stream must refuse it at once.
    async fn generate(&mut self, asked: Asked) -> CheckResult {
        let asked = self.fitted(asked);
        let mut is_alone = self.requests.iter().all(|request| request.model.is_ended());
        let mut sent = self.send(asked).await?;
        if self.phase == Phase::Started && is_overloaded(&sent) {
            self.settle().await?;
            tokio::time::sleep(self.live.trial.limits().cancel).await;
            is_alone = true;
            sent = self.send(asked).await?;
        }
        let model = StreamModel::new(asked, &self.live, self.phase, is_alone);
        let mut request = match sent {
            Ok(running) => Request::accepted(model, running),
            Err(error) => {
                judge(self.phase.allows_refusal(&error, is_alone))?;
                Request::refused(model)
            }
        };
        if !self.phase.is_serving() {
            request.read(&self.live.trial, self.phase, 1).await?;
        }
        self.requests.push(request);
        Ok(())
    }

    /// Limits a request to the engine's context.
    fn fitted(&self, asked: Asked) -> Asked {
        let context = self.live.config.context_length_tokens.max(2);
        let prompt_len = asked.prompt_len.min(context / 2);
        let max_tokens = asked.max_tokens.min(context - prompt_len);
        Asked {
            prompt_len,
            max_tokens,
            ..asked
        }
    }

    async fn send(&mut self, asked: Asked) -> Result<Result<Running, EngineError>, Stop> {
        let live = self.live.clone();
        let prompt_len = usize::try_from(asked.prompt_len).unwrap_or(1);
        let request = live.greedy(live.prompt(prompt_len, asked.seed), asked.max_tokens);
        let ctx = live.context(&request);
        let sent = live.try_generate(request, ctx);
        let settled = settle(&live.trial, self.phase, self.requests.iter_mut());
        with_room(&live.trial, sent, settled).await
    }

    async fn poll(&mut self, request: usize, items: u64) -> CheckResult {
        let (trial, phase) = (self.trial(), self.phase);
        let (before, rest) = self.requests.split_at_mut(request);
        let Some((polled, after)) = rest.split_first_mut() else {
            return Ok(());
        };
        let others = before.iter_mut().chain(after);
        with_room(
            &trial,
            polled.read(&trial, phase, items),
            settle(&trial, phase, others),
        )
        .await
    }

    /// Calls `abort` as a Worker does: for requests that were cancelled or dropped, or have ended.
    async fn abort(&mut self, request: Option<usize>) -> CheckResult {
        let ctx = match request.and_then(|request| self.requests.get_mut(request)) {
            Some(request) => {
                request.cancel();
                request.ctx.clone()
            }
            None => Some(RequestContext::new("of-nobody")),
        };
        if let Some(ctx) = ctx {
            self.live.abort(&ctx).await?;
        }
        Ok(())
    }

    /// Drains while all streams are read. A Worker drains only an engine that it has started.
    async fn drain(&mut self) -> CheckResult {
        if self.phase == Phase::Built {
            return Ok(());
        }
        self.phase = self.phase.draining();
        let live = self.live.clone();
        let (drained, ()) = live.drain_while("drain", self.settle()).await?;
        match drained {
            Err(error) if self.phase.is_serving() => fail!("drain failed: {error}"),
            Ok(()) | Err(_) => Ok(()),
        }
    }

    /// Cleans up while all streams are read. All streams must end.
    async fn cleanup(&mut self, what: &str) -> CheckResult {
        self.phase = Phase::Stopped;
        let live = self.live.clone();
        let cleanup = live.trial.cleaning(what, live.subject.engine.cleanup());
        let (cleaned, settled) = join(cleanup, self.settle()).await;
        settled?;
        match cleaned? {
            Ok(()) => Ok(()),
            Err(error) => fail!("{what} failed: {error} ({})", error.kind()),
        }
    }

    async fn end(&mut self) -> CheckResult {
        self.settle().await?;
        if self.phase.is_serving() {
            let is_idle =
                |probe: &dyn crate::subject::Probe| probe.active_requests().map(|n| n == 0);
            let what = "freeing what requests held that are all over";
            self.live.await_probe(what, is_idle).await?;
        }
        self.cleanup("cleanup").await?;
        self.cleanup("a cleanup after the cleanup").await?;
        let request = self.requests.len();
        let late = Asked {
            request,
            prompt_len: 1,
            max_tokens: 1,
            seed: 0,
        };
        self.generate(late).await
    }

    async fn settle(&mut self) -> CheckResult {
        settle(&self.live.trial, self.phase, self.requests.iter_mut()).await
    }
}

/// Reads all open streams to their ends, concurrently.
async fn settle(
    trial: &Trial,
    phase: Phase,
    requests: impl Iterator<Item = &mut Request>,
) -> CheckResult {
    let ends = requests.map(|request| async {
        if request.model.remaining() > GRACE_TOKENS {
            request.cancel();
        }
        request.read(trial, phase, u64::MAX).await
    });
    join_all(ends).await.into_iter().collect()
}

/// Waits for `wanted`. If it does not come for a while, runs `settled` to make room, for an engine that runs few requests at
/// once. Stops `settled` as soon as `wanted` has come, since others may depend on it.
async fn with_room<T>(
    trial: &Trial,
    wanted: impl Future<Output = Result<T, Stop>>,
    settled: impl Future<Output = CheckResult>,
) -> Result<T, Stop> {
    let mut wanted = pin!(wanted);
    if let Ok(wanted) = timeout(trial.limits().cancel / 2, &mut wanted).await {
        return wanted;
    }
    match select(wanted, pin!(settled)).await {
        Either::Left((wanted, _)) => wanted,
        Either::Right((settled, wanted)) => {
            settled?;
            wanted.await
        }
    }
}

fn is_overloaded(sent: &Result<Running, EngineError>) -> bool {
    sent.as_ref()
        .is_err_and(|error| error.kind() == ErrorKind::Overloaded)
}

fn judge<T>(judged: Result<T, String>) -> Result<T, Stop> {
    judged.map_err(Stop::Fail)
}

/// A request and its model.
struct Request {
    model: StreamModel,
    /// `None` if it was refused.
    ctx: Option<RequestContext>,
    /// `None` once it is over.
    outputs: Option<OutputStream>,
}

impl Request {
    fn accepted(model: StreamModel, running: Running) -> Self {
        Self {
            model,
            ctx: Some(running.ctx.clone()),
            outputs: Some(running.into_outputs()),
        }
    }

    fn refused(mut model: StreamModel) -> Self {
        model.refuse();
        Self {
            model,
            ctx: None,
            outputs: None,
        }
    }

    /// Cancels the request. Cancelling one that has ended must change nothing.
    fn cancel(&mut self) {
        if let Some(ctx) = &self.ctx {
            self.model.cancel();
            ctx.cancel(CancelReason::Client);
        }
    }

    /// Reads up to `items` items, or to the end. The stream of a cancelled request must yield all of them soon. A cleanup may end
    /// what is open as its last step, so its streams also have the time by which it may be longer than a call.
    async fn read(&mut self, trial: &Trial, phase: Phase, items: u64) -> CheckResult {
        let limits = trial.limits();
        let longer = match phase {
            Phase::Stopped => limits.cleanup.saturating_sub(limits.call),
            Phase::Built | Phase::Started | Phase::Draining => Duration::ZERO,
        };
        if self.model.is_cancelled() {
            let limit = limits.cancel + longer;
            let what = format!("the end of {}, which was cancelled,", self.model.name());
            let read = self.read_items(trial, phase, items, limit);
            return trial.within(&what, limit, read).await?;
        }
        self.read_items(trial, phase, items, limits.call + longer)
            .await
    }

    async fn read_items(
        &mut self,
        trial: &Trial,
        phase: Phase,
        items: u64,
        limit: Duration,
    ) -> CheckResult {
        for _ in 0..items {
            let Some(outputs) = self.outputs.as_mut() else {
                break;
            };
            let what = format!("the next item of {}", self.model.name());
            let Some(item) = trial.within(&what, limit, outputs.next()).await? else {
                fail!("{} is over, and its terminal never came", self.model.name());
            };
            // If a stream just ends, the violation says more than the error made from it.
            judge(self.model.observe_rest(None, outputs.violation()))?;
            judge(self.model.observe(&item, phase))?;
            if self.model.is_ended() {
                self.read_past_end(trial, limit).await?;
            }
        }
        Ok(())
    }

    async fn read_past_end(&mut self, trial: &Trial, limit: Duration) -> CheckResult {
        let Some(mut outputs) = self.outputs.take() else {
            return Ok(());
        };
        let what = format!("a poll past the end of {}", self.model.name());
        let rest: Option<Result<Output, EngineError>> =
            trial.within(&what, limit, outputs.next()).await?;
        judge(self.model.observe_rest(rest.as_ref(), outputs.violation()))
    }
}

#[cfg(test)]
mod tests {
    use genset_engine_sample::{SampleArgs, SampleEngine};

    use super::*;
    use crate::checks::tests::EndsStreamsLast;
    use crate::limits::Limits;
    use crate::mutants::fault::faulty;
    use crate::subject::Scenario;
    use crate::trial::Variation;

    #[tokio::test(start_paused = true)]
    async fn a_slow_cleanup_may_end_the_streams_last() {
        let factory = |_: &Scenario| {
            let args = SampleArgs {
                vocab_size: 1000,
                token_delay_ms: 0,
            };
            let sample = SampleEngine::from_args(&args).into();
            faulty(sample, EndsStreamsLast::default())
        };
        let limits = Limits {
            cleanup: Duration::from_secs(16),
            ..Limits::default()
        };
        // The cleanup comes with one request that may go on and one that is cancelled, since it wants too many tokens.
        let text = "start; generate#0 len=3 max=5; generate#1 len=3 max=100; poll#1 1; cleanup";
        let trial = Trial::new(Arc::new(factory), "SQ01", limits, Variation::default());
        let ended = perform(trial, text.parse().unwrap(), Progress::default()).await;
        assert_eq!(ended, Ok(()));
    }
}
