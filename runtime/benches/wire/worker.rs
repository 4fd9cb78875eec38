//! The worker process.

use std::future::pending;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use futures_util::{StreamExt, stream};
use genset_backend_common::{EngineError, Output, RequestContext, async_trait};
use genset_runtime::plane::{Handler, ResponseStream};
use serde::{Deserialize, Serialize};
use tokio::time::{Instant, MissedTickBehavior};

use super::{Outcome, component};

/// A request to the worker.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub(crate) struct Ask {
    /// The number of items; `None` for an endless stream.
    pub(crate) items: Option<usize>,
    /// The pause before each, in microseconds.
    pub(crate) pause_us: u64,
    /// Whether the stream stays open after the last item.
    pub(crate) stays_open: bool,
}

impl Ask {
    /// One item without a pause, then the end.
    pub(crate) const ONE: Self = Self {
        items: Some(1),
        pause_us: 0,
        stays_open: false,
    };

    /// An endless stream of items.
    pub(crate) const fn endless(pause_us: u64) -> Self {
        Self {
            items: None,
            pause_us,
            stays_open: false,
        }
    }

    fn answer<T: Send + 'static>(
        self,
        item: impl Fn() -> T + Send + Sync + Clone + 'static,
    ) -> ResponseStream<T> {
        let tail = stream::once(pending()).take(usize::from(self.stays_open));
        let items = stream::repeat(()).take(self.items.unwrap_or(usize::MAX));
        if self.pause_us == 0 {
            return Box::pin(items.map(move |()| Ok(item())).chain(tail));
        }
        let pause = Duration::from_micros(self.pause_us);
        let mut ticks = tokio::time::interval_at(Instant::now() + pause, pause);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let paced = items.zip(stream::unfold(ticks, |mut ticks| async move {
            ticks.tick().await;
            Some(((), ticks))
        }));
        Box::pin(paced.map(move |_| Ok(item())).chain(tail))
    }
}

/// Responds with tokens, like an engine.
struct Tokens;

#[async_trait]
impl Handler<Ask, Output> for Tokens {
    async fn handle(
        &self,
        ask: Ask,
        _ctx: RequestContext,
    ) -> Result<ResponseStream<Output>, EngineError> {
        Ok(ask.answer(|| Output::from(1000)))
    }
}

/// Responds with timestamps.
struct Times;

#[async_trait]
impl Handler<Ask, u64> for Times {
    async fn handle(
        &self,
        ask: Ask,
        _ctx: RequestContext,
    ) -> Result<ResponseStream<u64>, EngineError> {
        Ok(ask.answer(now_ns))
    }
}

/// Nanoseconds of the machine's clock, which both processes read.
pub(crate) fn now_ns() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0, |since| u64::try_from(since.as_nanos()).unwrap_or(0))
}

/// Serves until it is killed.
pub(crate) async fn serve(directory: &Path) -> Outcome<()> {
    let component = component(directory)?;
    let tokens = component
        .endpoint("tokens")?
        .serve(Arc::new(Tokens))
        .await?;
    let times = component.endpoint("times")?.serve(Arc::new(Times)).await?;
    tokens.list(None).await?;
    times.list(None).await?;
    pending().await
}
