//! [`slotted`]: a clean engine of another build, for faults that need slots, a queue or tasks of the engine's own: tokens
//! are pushed by a task a request, a limited number of requests runs at once, the others wait their turn, and a probe shows
//! the counters.

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
use crate::subject::{Probe, Scenario, Subject};
use serve::{Job, serve};
use slots::Slots;

/// How a slotted engine behaves.
#[derive(Debug, Clone, Copy)]
pub(super) struct Habits {
    /// Requests it runs at once.
    pub slots: usize,
    /// What it does wrong.
    pub fault: SlotFault,
}

/// What a slotted engine may do wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SlotFault {
    None,
    /// A dropped stream's slot is never given back.
    KeepsSlotOnDrop,
    /// The slot of a stream that is dropped before its first token is never given back, where the prompt is long.
    KeepsSlotInPrefill,
    /// Who waits is forgotten at cleanup.
    ForgetsWaiters,
    /// A dropped stream's KV block is never given back.
    KeepsKvOnDrop,
    /// A cancelled request is computed to its end.
    ComputesOnAfterCancel,
    /// A queued request does not hear its cancel.
    DeafInQueue,
    /// The newest in the queue is served first.
    NewestFirst,
    /// Whoever waits is served in turn, whatever the priority.
    PriorityIgnored,
    /// The smallest priority is served first, as with the nice values of processes.
    LowestFirst,
    /// Who finds no slot free is parked and never woken.
    ForgetsTheQueue,
    /// Who waits with the shortest prompt is served first.
    ShortestFirst,
    /// Who had to wait begins with what its slot's last request left in it.
    KeepsRow,
    /// A slot is reserved early, and lost when the call is dropped at the wrong place.
    LosesReservation,
    /// A task is left behind by each cancelled request.
    LeaksTaskOnCancel,
    /// A task is left behind by each sixth of them.
    LeaksTaskOnSixthCancel,
    /// It checks requests by itself, and one that is refused while it has to wait keeps its place in the queue.
    KeepsTurnOfRefused,
    /// It checks requests by itself, and one that is refused keeps its KV block.
    KeepsKvOfRefused,
    /// None, and it publishes its load.
    Publishes,
    /// Its load says of those that wait that they run.
    PublishesAllAsRunning,
    /// Its load says nothing of those that wait.
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

const CLEAN: Habits = Habits {
    slots: 4,
    fault: SlotFault::None,
};

/// The clean engine with four slots, a queue and a probe: as clean as the one it wraps.
#[must_use]
pub fn slotted(clean: &Clean, scenario: &Scenario) -> Subject {
    with_habits(clean, scenario, CLEAN)
}

pub(super) fn with_habits(clean: &Clean, scenario: &Scenario, habits: Habits) -> Subject {
    let subject = clean.build(scenario);
    let counters = Arc::new(Counters::default());
    let engine = Slotted {
        inner: subject.engine,
        slots: Slots::new(habits),
        counters: Arc::clone(&counters),
        tasks: Mutex::default(),
        stop: watch::Sender::new(false),
        config: Mutex::default(),
        habits,
    };
    Subject {
        engine: Arc::new(engine),
        probe: Some(counters),
        ..subject
    }
}

/// As [`with_habits`], seen from outside only.
pub(super) fn without_probe(clean: &Clean, scenario: &Scenario, habits: Habits) -> Subject {
    Subject {
        probe: None,
        ..with_habits(clean, scenario, habits)
    }
}

#[derive(Debug, Default)]
struct Counters {
    active: AtomicU64,
    produced: AtomicU64,
    kv_used: AtomicU64,
    unwanted: AtomicU64,
    /// Where the load is published, if it is, and how.
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
        // Who runs has a KV block.
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
    habits: Habits,
}

impl Slotted {
    /// Looks at a request only after it was given what it needs, and keeps that of a refused one.
    fn check_too_late(&self, request: &GenerateRequest) -> Result<(), EngineError> {
        let keeps_turn = self.habits.fault == SlotFault::KeepsTurnOfRefused;
        let keeps_kv = self.habits.fault == SlotFault::KeepsKvOfRefused;
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
                // It is given its slot when its turn comes, and nobody is there to give it back.
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
        if self.habits.fault.publishes() {
            config.max_num_seqs = u32::try_from(self.habits.slots).ok();
            *self.counters.load.lock() = Some((load, self.habits.fault));
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
        // The task hears the cancel from its sink; the wrapped stream just goes away with it.
        let own = RequestContext::new(ctx.id()).with_prompt_tokens(ctx.prompt_tokens());
        let mut priority = request.priority;
        if self.habits.fault == SlotFault::ShortestFirst {
            let prompt = i32::try_from(ctx.prompt_tokens()).unwrap_or(i32::MAX);
            priority = priority.saturating_mul(1 << 20).saturating_sub(prompt);
        }
        let outputs = self.inner.generate(request, own).await?;
        let finds_row = self.habits.fault == SlotFault::KeepsRow && self.slots.is_full();
        let mut slot = Slots::take(&self.slots, priority);
        if self.habits.fault == SlotFault::LosesReservation {
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
            fault: self.habits.fault,
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
