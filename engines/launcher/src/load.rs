//! [`ServerLoad`]: the load of a launched server, as the worker publishes it. Requests sent to the server are counted here. The
//! server reports how many of them wait inside it and how full its KV cache is; it is asked every second. Asking never delays
//! or ends a request, and a report that is too old is discarded. The server's metrics are shown by [`Repeated`]; if they show
//! that the server has computed something since the last time, that is reported as a step.

pub(crate) mod figures;

use std::convert::Infallible;
use std::future::pending;
use std::sync::Arc;
use std::time::Duration;

use genset_backend_common::handles::{HealthReporter, Load, LoadPublisher};
use genset_backend_common::{EngineConfig, StartContext};
use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::time::{Instant, sleep, timeout};

use crate::dialect::Dialect;
use crate::gate::Gate;
use crate::http::{Client, HttpError};
use crate::repeated::Repeated;
use figures::{Figures, KvBlocks, RankLoads, computed};

/// How often a server is asked, and how long its answers are valid.
#[derive(Debug, Clone, Copy)]
struct Pace {
    /// The pause after an answer.
    pause: Duration,
    /// The additional pause if nothing happens. Both together are the age that an answer reaches before the next question.
    quiet: Duration,
    /// The time limit of an answer.
    answer: Duration,
    /// How long an answer is valid.
    stale: Duration,
    /// How long the server's metrics are shown.
    shown: Duration,
}

/// Frequent enough for routing. To produce its metrics takes a Python server milliseconds.
const PACE: Pace = Pace {
    pause: Duration::from_millis(500),
    quiet: Duration::from_millis(500),
    answer: Duration::from_secs(3),
    stale: Duration::from_secs(5),
    shown: Duration::from_secs(20),
};

/// SGLang reports its load separately from its metrics, which it assembles from files. So it is asked for metrics only in one
/// of this number of rounds.
const SGLANG_METRICS_EVERY: u32 = 5;

/// The load of one engine's servers, one server after another.
#[derive(Debug)]
pub(crate) struct ServerLoad {
    dialect: Dialect,
    publisher: LoadPublisher,
    health: HealthReporter,
    pace: Pace,
    known: Mutex<Known>,
    /// `None` for a server without metrics.
    repeated: Option<Repeated>,
    /// Asks the server early: it has changed from idle to busy or back.
    due: Notify,
}

/// The values from which the load is computed.
#[derive(Debug, Default)]
struct Known {
    /// The number of requests from the engine's call to the end of their stream.
    inside: u32,
    /// How many of them wait here for room in the server.
    held_back: u32,
    /// Whether the server was idle when they arrived, and none has been answered yet.
    is_waking: bool,
    /// The server's maximum number of concurrent requests, if known.
    most: Option<u32>,
    /// The number of KV blocks that the engine declared.
    total_blocks: Option<u64>,
    /// The server's last answer and its time.
    figures: Option<(Instant, Figures)>,
    /// The value of [`computed`] then.
    computed: Option<f64>,
    /// Whether the server accepts no requests. Otherwise a sleeping server would look idle.
    is_closed: bool,
}

impl Known {
    fn load(&self) -> Load {
        let figures = self.figures.map(|(_, figures)| figures);
        let waiting = figures.map_or(0, |figures| figures.waiting);
        let too_many = self.most.map_or(0, |most| self.inside.saturating_sub(most));
        let waiting = waiting
            .saturating_add(self.held_back)
            .max(too_many)
            .min(self.inside);
        let blocks = if self.is_closed {
            self.total_blocks.map(KvBlocks::full)
        } else {
            figures.and_then(|figures| figures.blocks)
        };
        Load {
            running_requests: self.inside - waiting,
            waiting_requests: waiting,
            kv_used_blocks: blocks.map_or(0, |blocks| blocks.used),
            kv_total_blocks: blocks.map_or(0, |blocks| blocks.total),
            ..Load::default()
        }
    }
}

impl ServerLoad {
    pub(crate) fn new(dialect: Dialect, ctx: &StartContext) -> Self {
        Self {
            dialect,
            publisher: ctx.load.clone(),
            health: ctx.health.clone(),
            pace: PACE,
            known: Mutex::default(),
            repeated: Repeated::registered(dialect, &ctx.metrics),
            due: Notify::new(),
        }
    }

    /// Sets the declared capacities of a new server. Its KV cache counts as empty until it is asked.
    pub(crate) fn started(&self, declared: &EngineConfig) {
        let blocks = declared.kv_total_blocks;
        let unused = blocks.map(|total| KvBlocks { used: 0, total });
        self.change(|known| {
            known.most = declared.max_num_seqs;
            known.total_blocks = blocks;
            let idle = Figures {
                waiting: 0,
                blocks: None,
            };
            let (_, figures) = known.figures.get_or_insert((Instant::now(), idle));
            figures.blocks = figures.blocks.or(unused);
        });
    }

    /// Counts a request until the returned guard is dropped.
    pub(crate) fn count(self: &Arc<Self>) -> Counted {
        self.change(|known| {
            known.is_waking |= known.inside == 0;
            known.inside = known.inside.saturating_add(1);
        });
        Counted(Arc::clone(self))
    }

    /// Asks a serving server repeatedly. Dropping the future means that the server is gone, and discards its answers.
    ///
    /// # Cancel safety
    /// An answer in progress is lost.
    pub(crate) async fn follow(&self, client: &Client) -> Infallible {
        let _forgets = Forgets(self);
        let mut rounds = (0..SGLANG_METRICS_EVERY).cycle();
        loop {
            let _ = timeout(self.pace.quiet, self.due.notified()).await;
            if let Some(figures) = self.ask(client).await {
                self.change(|known| known.figures = Some((Instant::now(), figures)));
            }
            if self.dialect == Dialect::Sglang && rounds.next() == Some(0) {
                drop(self.metrics(client).await);
            }
            self.expire();
            sleep(self.pace.pause).await;
        }
    }

    /// Tracks whether the gate admits requests. A server with a closed gate is reported as full.
    ///
    /// # Cancel safety
    /// The last state counts until [`follow`](Self::follow) is dropped.
    pub(crate) async fn follow_gate(&self, gate: &Gate) -> Infallible {
        loop {
            for is_closed in [true, false] {
                gate.becomes(is_closed).await;
                self.change(|known| known.is_closed = is_closed);
            }
        }
    }

    async fn ask(&self, client: &Client) -> Option<Figures> {
        match self.dialect {
            Dialect::Vllm => Figures::of_vllm(&self.metrics(client).await?),
            Dialect::LlamaServer => Figures::of_llama(&self.metrics(client).await?),
            Dialect::Sglang => {
                let loads = client.get::<RankLoads>("/v1/loads?include=core");
                let loads = self.in_time(loads).await?;
                loads.figures(self.known.lock().total_blocks)
            }
            // These report no load, or only if configured to.
            Dialect::Trtllm | Dialect::LlamaCppPython => pending().await,
        }
    }

    /// Asks for the server's metrics, and shows them from now on.
    async fn metrics(&self, client: &Client) -> Option<String> {
        let metrics = self.in_time(client.text("/metrics")).await?;
        self.told(&metrics);
        Some(metrics)
    }

    fn told(&self, metrics: &str) {
        if let Some(now) = computed(metrics)
            && let Some(before) = self.known.lock().computed.replace(now)
            && now > before
        {
            self.health.report_step();
        }
        if let Some(repeated) = &self.repeated {
            repeated.tell(metrics);
        }
    }

    /// The answer, if it arrives in time. A missing one does not count against the server: health is checked elsewhere.
    async fn in_time<T>(&self, asked: impl Future<Output = Result<T, HttpError>>) -> Option<T> {
        match timeout(self.pace.answer, asked).await {
            Ok(Ok(answer)) => Some(answer),
            Ok(Err(error)) => {
                tracing::debug!(%error, "the server does not report its load");
                None
            }
            Err(_) => {
                tracing::debug!("the server does not report its load in time");
                None
            }
        }
    }

    /// Discards answers that are too old.
    fn expire(&self) {
        self.change(|known| {
            let figures = &mut known.figures;
            figures.take_if(|(at, _)| at.elapsed() >= self.pace.stale);
        });
        if let Some(repeated) = &self.repeated {
            repeated.expire(self.pace.shown);
        }
    }

    /// Makes a change and publishes it before the next one.
    fn change(&self, change: impl FnOnce(&mut Known)) {
        let mut known = self.known.lock();
        change(&mut known);
        self.publisher.publish(known.load());
    }
}

/// Discards a server's answers once it is gone.
struct Forgets<'a>(&'a ServerLoad);

impl Drop for Forgets<'_> {
    fn drop(&mut self) {
        self.0.change(|known| {
            known.figures = None;
            known.computed = None;
            known.is_closed = false;
        });
        if let Some(repeated) = &self.0.repeated {
            repeated.forget();
        }
    }
}

/// Counts a request until this is dropped.
#[derive(Debug)]
pub(crate) struct Counted(Arc<ServerLoad>);

impl Counted {
    /// Notes that the server has begun to answer. If it was idle before, its last report is outdated.
    pub(crate) fn begun(&self) {
        if std::mem::take(&mut self.0.known.lock().is_waking) {
            self.0.due.notify_one();
        }
    }

    /// Counts the request as waiting here until the returned guard is dropped.
    pub(crate) fn held_back(&self) -> HeldBack<'_> {
        self.0
            .change(|known| known.held_back = known.held_back.saturating_add(1));
        HeldBack(&self.0)
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        let mut is_idle = false;
        self.0.change(|known| {
            known.inside = known.inside.saturating_sub(1);
            is_idle = known.inside == 0;
        });
        if is_idle {
            self.0.due.notify_one();
        }
    }
}

/// A request that waits until this is dropped.
#[derive(Debug)]
pub(crate) struct HeldBack<'a>(&'a ServerLoad);

impl Drop for HeldBack<'_> {
    fn drop(&mut self) {
        self.0
            .change(|known| known.held_back = known.held_back.saturating_sub(1));
    }
}

#[cfg(test)]
mod tests;
