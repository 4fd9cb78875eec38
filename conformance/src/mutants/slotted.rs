//! [`slotted`]: a clean engine with another design, for faults that need slots, a queue or tasks. A task per request pushes its
//! tokens, a limited number of requests runs at once, the others wait in turn, and a probe reports the counters.

mod serve;
mod slots;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use genset_backend_common::{
    EngineConfig, EngineControls, EngineError, GenerateRequest, LLMEngine, OutputStream,
    RequestContext, StartContext, async_trait,
    handles::{Load, LoadPublisher},
    output,
};
use parking_lot::Mutex;
use tokio::sync::watch;
use tokio::task::JoinSet;

use super::Clean;
use super::fault::deaf;
use crate::subject::{Probe, Scenario, Subject};
use serve::{Job, serve};
use slots::Slots;

/// The faults of a slotted engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SlotFault {
    None,
    /// Never frees a dropped stream's slot.
    KeepsSlotOnDrop,
    /// Never frees the slot of a stream with a long prompt that is dropped before its first token.
    KeepsSlotInPrefill,
    /// Forgets waiting requests at cleanup.
    ForgetsWaiters,
    /// Never frees a dropped stream's KV block.
    KeepsKvOnDrop,
    /// Computes a cancelled request to its end.
    ComputesOnAfterCancel,
    /// A queued request ignores its cancel.
    DeafInQueue,
    /// Serves the newest in the queue first.
    NewestFirst,
    /// Serves waiting requests in turn, whatever their priority.
    PriorityIgnored,
    /// Serves the smallest priority first, like the nice values of processes.
    LowestFirst,
    /// Parks a request that finds no free slot, and never wakes it.
    ForgetsTheQueue,
    /// Serves the waiting request with the shortest prompt first.
    ShortestFirst,
    /// A request that had to wait begins with its slot's old content.
    KeepsRow,
    /// Reserves a slot early, and loses it if the call is dropped at the wrong place.
    LosesReservation,
    /// Each cancelled request leaves a task.
    LeaksTaskOnCancel,
    /// Each sixth cancelled request leaves a task.
    LeaksTaskOnSixthCancel,
    /// Checks requests itself; a request that is refused while it waits keeps its place in the queue.
    KeepsTurnOfRefused,
    /// Checks requests itself; a refused request keeps its KV block.
    KeepsKvOfRefused,
    /// No fault; publishes its load.
    Publishes,
    /// Publishes waiting requests as running.
    PublishesAllAsRunning,
    /// Does not publish waiting requests.
    PublishesNoneAsWaiting,
}

impl SlotFault {
    fn publishes(self) -> bool {
        let told = [
            Self::Publishes,
            Self::PublishesAllAsRunning,
            Self::PublishesNoneAsWaiting,
        ];
        told.contains(&self)
    }
}

/// The clean engine with four slots, a queue and a probe; as correct as the one it wraps.
#[must_use]
pub fn slotted(clean: &Clean, scenario: &Scenario) -> Subject {
    with_slots(clean, scenario, 4, SlotFault::None)
}

/// An engine that runs this number of requests at once, with `fault`.
pub(super) fn with_slots(
    clean: &Clean,
    scenario: &Scenario,
    slots: u32,
    fault: SlotFault,
) -> Subject {
    let subject = clean.build(scenario);
    let counters = Arc::new(Counters::default());
    let engine = Slotted {
        inner: subject.engine,
        slots: Slots::new(slots, fault),
        counters: Arc::clone(&counters),
        tasks: Mutex::default(),
        stop: watch::Sender::new(false),
        config: Mutex::default(),
        max_num_seqs: slots,
        fault,
    };
    Subject {
        engine: Arc::new(engine),
        probe: Some(counters),
        ..subject
    }
}

/// As [`with_slots`], without a probe.
pub(super) fn without_probe(
    clean: &Clean,
    scenario: &Scenario,
    slots: u32,
    fault: SlotFault,
) -> Subject {
    Subject {
        probe: None,
        ..with_slots(clean, scenario, slots, fault)
    }
}

#[derive(Debug, Default)]
struct Counters {
    active: AtomicU64,
    produced: AtomicU64,
    kv_used: AtomicU64,
    unwanted: AtomicU64,
    /// The publisher of the load, if it is published, and the fault in it.
    load: Mutex<Option<(LoadPublisher, SlotFault)>>,
}

impl Counters {
    /// Publishes the load.
    fn tell(&self) {
        let load = self.load.lock();
        let Some((publisher, fault)) = &*load else {
            return;
        };
        let count = |counter: &AtomicU64| {
            u32::try_from(counter.load(Ordering::Relaxed)).unwrap_or(u32::MAX)
        };
        // A running request has a KV block.
        let (all, running) = (count(&self.active), count(&self.kv_used));
        let waiting = all.saturating_sub(running);
        let (running_requests, waiting_requests) = if *fault == SlotFault::PublishesAllAsRunning {
            (all, 0)
        } else if *fault == SlotFault::PublishesNoneAsWaiting {
            (running, 0)
        } else {
            (running, waiting)
        };
        publisher.publish(Load {
            running_requests,
            waiting_requests,
            ..Load::default()
        });
    }
}

impl Probe for Counters {
    fn active_requests(&self) -> Option<u64> {
        Some(self.active.load(Ordering::Relaxed))
    }

    fn produced_tokens(&self) -> Option<u64> {
        Some(self.produced.load(Ordering::Relaxed))
    }

    fn kv_used_blocks(&self) -> Option<u64> {
        Some(self.kv_used.load(Ordering::Relaxed))
    }
}

struct Slotted {
    inner: Arc<dyn LLMEngine>,
    slots: Arc<Slots>,
    counters: Arc<Counters>,
    tasks: Mutex<JoinSet<()>>,
    stop: watch::Sender<bool>,
    config: Mutex<Option<EngineConfig>>,
    max_num_seqs: u32,
    fault: SlotFault,
}

impl Slotted {
    /// Checks a request only after it has acquired resources, and keeps those of a refused one.
    fn check_too_late(&self, request: &GenerateRequest) -> Result<(), EngineError> {
        let keeps_turn = self.fault == SlotFault::KeepsTurnOfRefused;
        let keeps_kv = self.fault == SlotFault::KeepsKvOfRefused;
        let config = self.config.lock();
        let (Some(config), true) = (&*config, keeps_turn || keeps_kv) else {
            return Ok(());
        };
        config.check(request).inspect_err(|_| {
            if keeps_kv {
                self.counters.kv_used.fetch_add(1, Ordering::Relaxed);
                return;
            }
            let mut turn = Slots::take(&self.slots, request.priority);
            if turn.try_recv().is_err() {
                // It receives its slot in its turn, and nobody returns it.
                std::mem::forget(turn);
            }
        })
    }
}

#[async_trait]
impl LLMEngine for Slotted {
    async fn start(&self, ctx: StartContext) -> Result<EngineConfig, EngineError> {
        let load = ctx.load.clone();
        let mut config = self.inner.start(ctx).await?;
        config.capabilities.priority = true;
        if self.fault.publishes() {
            config.max_num_seqs = Some(self.max_num_seqs);
            *self.counters.load.lock() = Some((load, self.fault));
        }
        *self.config.lock() = Some(config.clone());
        Ok(config)
    }

    async fn generate(
        &self,
        request: GenerateRequest,
        ctx: RequestContext,
    ) -> Result<OutputStream, EngineError> {
        self.check_too_late(&request)?;
        let mut priority = request.priority;
        if self.fault == SlotFault::ShortestFirst {
            let prompt = i32::try_from(ctx.prompt_tokens()).unwrap_or(i32::MAX);
            priority = priority.saturating_mul(1 << 20).saturating_sub(prompt);
        }
        // The task receives the cancel from its sink; the wrapped stream is just dropped with it.
        let outputs = self.inner.generate(request, deaf(&ctx)).await?;
        let finds_row = self.fault == SlotFault::KeepsRow && self.slots.is_full();
        let mut slot = Slots::take(&self.slots, priority);
        if self.fault == SlotFault::LosesReservation {
            slot = slots::reserve_carelessly(slot).await;
        }
        let is_long = ctx.prompt_tokens() > 64;
        let (sink, stream) = output::channel(ctx);
        let job = Job {
            is_long,
            finds_row,
            outputs,
            sink,
            slot,
            stop: self.stop.subscribe(),
            counters: Arc::clone(&self.counters),
            fault: self.fault,
        };
        let mut tasks = self.tasks.lock();
        while tasks.try_join_next().is_some() {}
        tasks.spawn(serve(job));
        Ok(stream)
    }

    async fn cleanup(&self) -> Result<(), EngineError> {
        self.stop.send_replace(true);
        let mut tasks = std::mem::take(&mut *self.tasks.lock());
        while tasks.join_next().await.is_some() {}
        self.inner.cleanup().await
    }

    fn controls(&self) -> Option<&dyn EngineControls> {
        self.inner.controls()
    }
}
