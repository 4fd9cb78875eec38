//! [`ServerLoad`]: how busy a launched server is, as the worker publishes it. The requests that were sent to it are counted here, at
//! once; how many of them wait inside, and how full its KV cache is, the server says by itself and is asked every second. That
//! never holds a request up and ends nothing: what a server has not said for a while is not known any more. The metrics that it
//! tells on the way are [`Repeated`], and where they say that it has computed something since, that is a step.

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
use crate::repeated::{Repeated, Source};
use figures::{Figures, KvBlocks, RankLoads, computed};

/// How often a server is asked, and for how long it is believed.
#[derive(Debug, Clone, Copy)]
struct Pace {
    /// How long it is left alone after an answer.
    pause: Duration,
    /// How much longer, where nothing happens. Together that is how old what it says may become.
    quiet: Duration,
    /// How long an answer may take.
    answer: Duration,
    /// How long what it said counts.
    stale: Duration,
    /// How long its metrics are shown.
    shown: Duration,
}

/// Often enough for those who route by it. To put its metrics together costs a Python server milliseconds.
const PACE: Pace = Pace {
    pause: Duration::from_millis(500),
    quiet: Duration::from_millis(500),
    answer: Duration::from_secs(3),
    stale: Duration::from_secs(5),
    shown: Duration::from_secs(20),
};

/// SGLang tells its load apart from its metrics, and puts these together out of files. It is asked for them each time of so many.
const SGLANG_METRICS_EVERY: u32 = 5;

/// The load of the servers of one engine, one after the other.
#[derive(Debug)]
pub(crate) struct ServerLoad {
    dialect: Dialect,
    publisher: LoadPublisher,
    health: HealthReporter,
    pace: Pace,
    known: Mutex<Known>,
    /// `None` of a server that has no metrics.
    repeated: Option<Repeated>,
    /// The server is to be asked without waiting for its time: it was idle and is busy, or the other way around.
    due: Notify,
}

/// What a load is put together from.
#[derive(Debug, Default)]
struct Known {
    /// Requests from the call of the engine to the end of their stream.
    inside: u32,
    /// Those of them that wait here for room in the server.
    held_back: u32,
    /// Whether all of them came to a server that was idle, and none has been answered yet.
    is_waking: bool,
    /// How many the server computes at once, where it tells.
    most: Option<u32>,
    /// As the engine declared them.
    total_blocks: Option<u64>,
    /// What the server said last, and when.
    figures: Option<(Instant, Figures)>,
    /// How much it had [`computed`] then.
    computed: Option<f64>,
    /// Whether the server takes no requests. Otherwise one that sleeps would look like the emptiest of all.
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
        let source = Source::of(dialect);
        Self {
            dialect,
            publisher: ctx.load.clone(),
            health: ctx.health.clone(),
            pace: PACE,
            known: Mutex::default(),
            repeated: source.map(|source| Repeated::registered(source, &ctx.metrics)),
            due: Notify::new(),
        }
    }

    /// Takes what the engine declared of a server that has not been asked anything yet: nothing of its KV cache is in use.
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

    /// Counts a request until what this gives is dropped.
    pub(crate) fn count(self: &Arc<Self>) -> Counted {
        self.change(|known| {
            known.is_waking |= known.inside == 0;
            known.inside = known.inside.saturating_add(1);
        });
        Counted(Arc::clone(self))
    }

    /// Asks a server that serves, again and again. When this is dropped, the server is gone, and with it what it said.
    ///
    /// # Cancel safety
    /// An answer under way is lost.
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

    /// Follows whether a server takes requests. One that takes none is full.
    ///
    /// # Cancel safety
    /// What was seen last counts until [`follow`](Self::follow) is dropped.
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
            // They tell nothing, or not unless they were told to.
            Dialect::Trtllm | Dialect::LlamaCppPython => pending().await,
        }
    }

    /// Asks for its metrics, which are repeated from now on.
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

    /// What is answered in time; what else is, is no fault of the server's: its health is asked elsewhere.
    async fn in_time<T>(&self, asked: impl Future<Output = Result<T, HttpError>>) -> Option<T> {
        match timeout(self.pace.answer, asked).await {
            Ok(Ok(answer)) => Some(answer),
            Ok(Err(error)) => {
                tracing::debug!(%error, "the server does not tell its load");
                None
            }
            Err(_) => {
                tracing::debug!("the server does not tell its load in time");
                None
            }
        }
    }

    /// Forgets what was said too long ago.
    fn expire(&self) {
        self.change(|known| {
            let figures = &mut known.figures;
            figures.take_if(|(at, _)| at.elapsed() >= self.pace.stale);
        });
        if let Some(repeated) = &self.repeated {
            repeated.expire(self.pace.shown);
        }
    }

    /// Publishes a change before another is made.
    fn change(&self, change: impl FnOnce(&mut Known)) {
        let mut known = self.known.lock();
        change(&mut known);
        self.publisher.publish(known.load());
    }
}

/// Forgets what a server said, once it is gone.
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

/// A request that is counted until this is dropped.
#[derive(Debug)]
pub(crate) struct Counted(Arc<ServerLoad>);

impl Counted {
    /// The server has answered something. Where it was idle, what it says of itself is of before.
    pub(crate) fn begun(&self) {
        if std::mem::take(&mut self.0.known.lock().is_waking) {
            self.0.due.notify_one();
        }
    }

    /// The request waits here until what this gives is dropped.
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
