//! Faults that the checks of MT catch. The clean engine publishes nothing, so these add their own metrics and load.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::mpsc::sync_channel;
use std::time::Duration;

use futures_util::StreamExt;
use genset_backend_common::prometheus::encoding::{EncodeMetric, MetricEncoder};
use genset_backend_common::prometheus::metrics::MetricType;
use genset_backend_common::prometheus::metrics::counter::Counter;
use genset_backend_common::{
    EngineConfig, EngineError, HealthReporter, OutputStream, StartContext, async_trait,
    handles::{Load, LoadPublisher},
};
use parking_lot::Mutex;

use super::Mutant;
use super::fault::{Call, Declares, Fault, Inner, raw, with_fault};
use super::slotted::{SlotFault, with_slots};

pub(super) const MUTANTS: &[Mutant] = &[
    Mutant {
        name: "scrape-asks-the-engine",
        stands_for: "a gauge read over the engine's own queue, so that a scrape waits for a step and a busy engine looks dead",
        killed_by: &["MT01"],
        build: |clean, scenario| with_fault(clean, scenario, Publishes::with(Flaw::SlowScrape)),
    },
    Mutant {
        name: "load-leaks-on-drop",
        stands_for: "a gauge of running requests that only a finished one lowers: an idle worker that the router avoids",
        killed_by: &["MT02"],
        build: |clean, scenario| with_fault(clean, scenario, Publishes::with(Flaw::LoadLeaks)),
    },
    Mutant {
        name: "load-is-a-flag",
        stands_for: "a gauge that says whether the engine is busy under a name that says how busy",
        killed_by: &["MT07"],
        build: |clean, scenario| with_fault(clean, scenario, Publishes::with(Flaw::LoadIsAFlag)),
    },
    Mutant {
        name: "blocks-in-tokens",
        stands_for: "KV usage counted in tokens beside a total in blocks: a tenth full, and the gauge is over one",
        killed_by: &["MT07"],
        build: |clean, scenario| with_fault(clean, scenario, Publishes::with(Flaw::BlocksInTokens)),
    },
    Mutant {
        name: "blocks-not-counted",
        stands_for: "a gauge of KV blocks that is read from the pool before the step takes them: always those of an idle engine",
        killed_by: &["MT09"],
        build: |clean, scenario| {
            with_fault(clean, scenario, Publishes::with(Flaw::BlocksNotCounted))
        },
    },
    Mutant {
        name: "counter-resets",
        stands_for: "statistics that are read and cleared, under the name of a counter",
        killed_by: &["MT03"],
        build: |clean, scenario| with_fault(clean, scenario, Publishes::with(Flaw::CounterResets)),
    },
    Mutant {
        name: "ranks-vary",
        stands_for: "a number of ranks taken from how many devices were free at the moment",
        killed_by: &["MT04"],
        build: |clean, scenario| {
            static STARTS: AtomicU32 = AtomicU32::new(0);
            let vary = |config: &mut EngineConfig| {
                config.data_parallel_size = 1 + STARTS.fetch_add(1, Ordering::Relaxed) % 2;
            };
            with_fault(clean, scenario, Declares(vary))
        },
    },
    Mutant {
        name: "queue-counted-as-running",
        stands_for: "a gauge of what the engine holds under the name of what it runs: a worker with a queue looks busy, not full",
        killed_by: &["MT08"],
        build: |clean, scenario| with_slots(clean, scenario, 4, SlotFault::PublishesAllAsRunning),
    },
    Mutant {
        name: "queue-not-counted",
        stands_for: "a gauge of waiting requests that nobody sets: the router sees none of the queue",
        killed_by: &["MT08"],
        build: |clean, scenario| with_slots(clean, scenario, 4, SlotFault::PublishesNoneAsWaiting),
    },
    Mutant {
        name: "cleanup-reports-death",
        stands_for: "a scheduler thread whose orderly end is taken for a crash: every planned stop exits as failed",
        killed_by: &["MT05", "RD04"],
        build: |clean, scenario| with_fault(clean, scenario, DiesOfCleanup::default()),
    },
];

/// Engines without a fault: they prove that the checks accept good metrics.
pub(super) const CONTROLS: &[Mutant] = &[
    Mutant {
        name: "publishes-in-order",
        stands_for: "nothing: a counter and a load as they should be",
        killed_by: &[],
        build: |clean, scenario| with_fault(clean, scenario, Publishes::with(Flaw::None)),
    },
    Mutant {
        name: "publishes-its-queue",
        stands_for: "nothing: a load that tells requests that run from requests that wait",
        killed_by: &[],
        build: |clean, scenario| with_slots(clean, scenario, 4, SlotFault::Publishes),
    },
    Mutant {
        name: "many-begin-at-once",
        stands_for: "nothing: as publishes-its-queue, with more seats than requests that wait, which become free in one step",
        killed_by: &[],
        build: |clean, scenario| with_slots(clean, scenario, 32, SlotFault::Publishes),
    },
];

#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
enum Flaw {
    #[default]
    None,
    SlowScrape,
    LoadLeaks,
    LoadIsAFlag,
    BlocksInTokens,
    BlocksNotCounted,
    CounterResets,
}

/// The total number of KV blocks, the published number per request, and the tokens per block.
const BLOCKS: u64 = 4096;
const REQUEST_BLOCKS: u64 = 128;
const BLOCK_TOKENS: u64 = 16;

/// A counter of requests and a load, wrong in one way.
struct Publishes {
    requests: Counter,
    running: Arc<Running>,
}

/// The requests that are running, as published.
#[derive(Debug, Default)]
struct Running {
    requests: Mutex<u32>,
    load: Mutex<LoadPublisher>,
    flaw: Flaw,
}

impl Publishes {
    fn with(flaw: Flaw) -> Self {
        Self {
            requests: Counter::default(),
            running: Arc::new(Running {
                flaw,
                ..Running::default()
            }),
        }
    }
}

impl Running {
    fn change(&self, change: impl Fn(u32) -> u32) {
        let mut requests = self.requests.lock();
        *requests = change(*requests);
        let is_flag = self.flaw == Flaw::LoadIsAFlag;
        let is_in_tokens = self.flaw == Flaw::BlocksInTokens;
        let unit = if is_in_tokens { BLOCK_TOKENS } else { 1 };
        let is_counted = self.flaw != Flaw::BlocksNotCounted;
        let block_unit = if is_counted { unit } else { 0 };
        self.load.lock().publish(Load {
            running_requests: if is_flag {
                (*requests).min(1)
            } else {
                *requests
            },
            kv_used_blocks: u64::from(*requests) * REQUEST_BLOCKS * block_unit,
            kv_total_blocks: BLOCKS,
            ..Load::default()
        });
    }
}

/// Counts a request in the load.
struct Place {
    running: Arc<Running>,
    is_finished: AtomicBool,
}

impl Drop for Place {
    fn drop(&mut self) {
        if self.running.flaw != Flaw::LoadLeaks || self.is_finished.load(Ordering::Acquire) {
            self.running.change(|requests| requests.saturating_sub(1));
        }
    }
}

impl Fault for Publishes {
    fn begin(&self, ctx: &StartContext) {
        let help = "Requests taken";
        let name = "genset_sample_requests";
        if self.running.flaw == Flaw::SlowScrape {
            let help = "Blocks in use";
            ctx.metrics
                .register("genset_sample_blocks", help, AsksTheEngine);
        }
        ctx.metrics.register(name, help, self.requests.clone());
        *self.running.load.lock() = ctx.load.clone();
    }

    fn answer(&self, _call: &Call, outputs: OutputStream) -> OutputStream {
        if self.requests.inc() == 3 && self.running.flaw == Flaw::CounterResets {
            self.requests.inner().store(0, Ordering::Release);
        }
        self.running.change(|requests| requests + 1);
        let place = Place {
            running: Arc::clone(&self.running),
            is_finished: AtomicBool::new(false),
        };
        raw(outputs.inspect(move |item| {
            let is_last = item.as_ref().is_ok_and(|output| output.is_terminal());
            place.is_finished.fetch_or(is_last, Ordering::AcqRel);
        }))
    }
}

/// A gauge that waits for an answer from the engine.
#[derive(Debug)]
struct AsksTheEngine;

impl EncodeMetric for AsksTheEngine {
    fn encode(&self, mut encoder: MetricEncoder<'_>) -> fmt::Result {
        let (_engine, answer) = sync_channel::<()>(0);
        let _ = answer.recv_timeout(Duration::from_millis(20));
        encoder.encode_gauge(&0_i64)
    }

    fn metric_type(&self) -> MetricType {
        MetricType::Gauge
    }
}

#[derive(Default)]
struct DiesOfCleanup {
    health: Mutex<HealthReporter>,
}

#[async_trait]
impl Fault for DiesOfCleanup {
    fn begin(&self, ctx: &StartContext) {
        *self.health.lock() = ctx.health.clone();
    }

    async fn cleanup(&self, inner: &Inner) -> Result<(), EngineError> {
        self.health
            .lock()
            .report_dead("the scheduler thread is gone");
        inner.cleanup().await
    }
}
