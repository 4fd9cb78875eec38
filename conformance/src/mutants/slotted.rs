//! [`slotted`]: a clean engine of another build, for faults that need slots, a queue or tasks of the engine's own: tokens
//! are pushed by a task a request, a limited number of requests runs at once, the others wait their turn, and a probe shows
//! the counters.

mod serve;
mod slots;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use genset_backend_common::{
    EngineConfig, EngineControls, EngineError, GenerateRequest, LLMEngine, OutputStream,
    RequestContext, StartContext, async_trait, output,
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
    /// A dropped stream's KV block is never given back.
    KeepsKvOnDrop,
    /// A cancelled request is computed to its end.
    ComputesOnAfterCancel,
    /// A queued request does not hear its cancel.
    DeafInQueue,
    /// The newest in the queue is served first.
    NewestFirst,
    /// Who finds no slot free is parked and never woken.
    ForgetsTheQueue,
    /// A slot is reserved early, and lost when the call is dropped at the wrong place.
    LosesReservation,
    /// A task is left behind by each cancelled request.
    LeaksTaskOnCancel,
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
    habits: Habits,
}

#[async_trait]
impl LLMEngine for Slotted {
    async fn start(&self, ctx: StartContext) -> Result<EngineConfig, EngineError> {
        self.inner.start(ctx).await
    }

    async fn generate(
        &self,
        request: GenerateRequest,
        ctx: RequestContext,
    ) -> Result<OutputStream, EngineError> {
        // The task hears the cancel from its sink; the wrapped stream just goes away with it.
        let own = RequestContext::new(ctx.id()).with_prompt_tokens(ctx.prompt_tokens());
        let outputs = self.inner.generate(request, own).await?;
        let mut slot = Slots::take(&self.slots);
        if self.habits.fault == SlotFault::LosesReservation {
            slot = slots::reserve_carelessly(slot).await;
        }
        let (sink, stream) = output::channel(ctx);
        let job = Job {
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
