//! [`Core`]: the engine thread's loop. Each step plans, computes, samples, commits and delivers. Between steps it takes commands.

mod commands;

use std::collections::HashMap;
use std::ops::ControlFlow::{self, Break, Continue};
use std::sync::Arc;
use std::task::Waker;
use std::time::Duration;

use genset_backend_common::kv::KvEventPublisher;
use genset_backend_common::log_limit::OncePerMinute;
use genset_backend_common::output::{Finish, TokenChunk};
use genset_backend_common::{EngineError, ErrorKind, HealthReporter, handles::LoadPublisher};
use genset_scheduler::{
    FreedSequences, Outcome, Outgrown, Report, Scheduled, Scheduler, SequenceId,
};
use rayon::prelude::*;
use tokio::sync::mpsc;
use tokio::time::Instant;

pub(crate) use self::commands::{Command, look, refused, too_long_for_cache};
use super::adapters::LoadedAdapter;
use super::batch::pack;
use super::blocks;
use super::forward::{Fetched, Forward, ForwardError, contained, fetch};
use super::metrics::{Metrics, StepFigures};
use super::readers::Readers;
use super::sequence::{Active, Choosing, Next, Unchosen};
use super::speculation::Speculation;
use crate::model::{Piece, StepBatch};

/// The publishers of the engine thread.
#[derive(Debug)]
pub(crate) struct Outlets {
    pub(crate) readers: Arc<Readers>,
    pub(crate) kv_events: KvEventPublisher,
    pub(crate) load: LoadPublisher,
    pub(crate) health: HealthReporter,
    pub(crate) metrics: Metrics,
}

/// The engine thread's state.
pub(crate) struct Core {
    scheduler: Scheduler,
    forward: Box<dyn Forward>,
    speculation: Option<Speculation>,
    requests: HashMap<SequenceId, Box<Active>>,
    /// The adapters of sequences that use one.
    adapted: HashMap<SequenceId, Arc<LoadedAdapter>>,
    outlets: Outlets,
    freed: FreedSequences,
    last_id: u64,
    /// Whether the readers were checked since the last sign that one left.
    has_looked: bool,
    /// Whether bytes of KV blocks were read or written since the last step.
    has_moved: bool,
    /// The duration of the last step.
    step_time: Duration,
    buffers: blocks::Buffers,
    /// A KV block outside the scheduler's pool, for [`Core::ask_model`].
    spare_block: usize,
    /// Limits the log about requests that fail or are ended.
    logged: OncePerMinute,
}

/// The result of a request that sampled in this step.
struct Delivery {
    choosing: Choosing,
    chunk: TokenChunk,
    end: Option<Result<Finish, EngineError>>,
}

impl Core {
    /// The model's KV cache must have one block more than the scheduler.
    pub(crate) fn new(
        scheduler: Scheduler,
        forward: Box<dyn Forward>,
        speculation: Option<Speculation>,
        outlets: Outlets,
        freed: FreedSequences,
    ) -> Self {
        let spare_block = scheduler.pool().total();
        Self {
            scheduler,
            forward,
            speculation,
            requests: HashMap::new(),
            adapted: HashMap::new(),
            outlets,
            freed,
            last_id: 0,
            has_looked: false,
            has_moved: false,
            step_time: Duration::ZERO,
            buffers: blocks::Buffers::default(),
            spare_block,
            logged: OncePerMinute::default(),
        }
    }

    /// Serves until it is stopped, all command senders are gone, or the model fails for good.
    pub(crate) fn run(mut self, mut commands: mpsc::Receiver<Command>) {
        let _ = self.serve(&mut commands);
        commands.close();
        while let Ok(command) = commands.try_recv() {
            let _ = self.obey(command);
        }
        self.end_all();
    }

    /// Takes commands and computes steps until the thread is to end.
    fn serve(&mut self, commands: &mut mpsc::Receiver<Command>) -> ControlFlow<()> {
        let mut has_work = false;
        loop {
            if !has_work {
                self.publish_state();
                match commands.blocking_recv() {
                    Some(command) => self.obey(command)?,
                    None => return Break(()),
                }
            }
            // Requests that arrived together start together.
            self.take_commands(commands)?;
            self.move_more(commands)?;
            for id in self.freed.take() {
                self.scheduler.free_held(id);
            }
            self.look_at_readers();
            // The command queue may have been full when a sign was sent.
            self.has_looked = false;
            has_work = self.step()?;
        }
    }

    /// Frees what cancelled requests hold, and pauses those whose readers are behind.
    fn look_at_readers(&mut self) {
        let scheduler = &mut self.scheduler;
        self.requests.retain(|id, active| {
            if active.outlet.is_closed() {
                scheduler.cancel(*id);
                return false;
            }
            scheduler.set_paused(*id, active.outlet.is_behind());
            true
        });
    }

    /// Returns whether more can be computed before a command comes.
    fn step(&mut self) -> ControlFlow<(), bool> {
        let began = Instant::now();
        if !self.adapted.is_empty() {
            // The last of its requests frees an unloaded adapter's memory.
            let requests = &self.requests;
            self.adapted.retain(|id, _| requests.contains_key(id));
        }
        let mut step = self.scheduler.plan();
        self.publish_events();
        self.end_outgrown(&step.outgrown);
        if step.rows.is_empty() {
            return Continue(!step.is_empty());
        }
        let computing = Instant::now();
        self.speculate(&mut step.rows);
        let packed = pack(&self.scheduler, &step.rows, &self.adapted);
        let mut choosing = self.take_choosing(&step.rows);
        let computed = packed.and_then(|batch| {
            let logits = compute(&mut *self.forward, &batch, &mut choosing)?;
            Ok((batch, logits))
        });
        let forward = computing.elapsed();
        match computed {
            Ok((batch, logits)) => {
                self.outlets.health.report_step();
                let generated_tokens = self.finish_step(&step.rows, choosing, logits);
                let (sequences, tokens) = (batch.sequences.len(), batch.tokens.len());
                self.step_time = began.elapsed();
                let figures = StepFigures {
                    step: self.step_time,
                    forward,
                    sequences,
                    tokens,
                    generated_tokens,
                };
                self.outlets.metrics.step(figures);
                self.publish_state();
                Continue(true)
            }
            Err(problem) => self.fail_step(&step.rows, choosing, &problem),
        }
    }

    /// Adds drafts, if speculation is on.
    fn speculate(&mut self, rows: &mut [Scheduled]) {
        if let Some(speculation) = &mut self.speculation {
            let requests = &self.requests;
            speculation.speculate(&mut self.scheduler, rows, |id| {
                requests.get(&id).map_or(0, |active| active.most_drafts())
            });
        }
    }

    /// Takes the requests that sample a token in this step, in the order of their logits.
    fn take_choosing(&mut self, rows: &[Scheduled]) -> Vec<Choosing> {
        let wanting = rows.iter().filter(|row| row.wants_token);
        wanting
            .filter_map(|row| {
                let mut active = self.requests.remove(&row.id)?;
                active.place_of_guide = None;
                Some(Choosing::new(row.id, active, row.drafts.clone()))
            })
            .collect()
    }

    /// Samples tokens, commits the step and delivers; returns the number of tokens streamed.
    fn finish_step(
        &mut self,
        rows: &[Scheduled],
        choosing: Vec<Choosing>,
        logits: Vec<Fetched>,
    ) -> usize {
        let choose = |(mut choosing, logits): (Choosing, Vec<Fetched>)| {
            let next = choosing.choose(logits);
            (choosing, next)
        };
        // If all tokens are known already, waking other threads would take longer than reading them.
        let has_rows = logits
            .iter()
            .any(|fetched| matches!(fetched, Fetched::Logits(_)));
        let mut logits = logits.into_iter();
        let with_places = |choosing: Choosing| {
            let logits = logits.by_ref().take(choosing.places()).collect();
            (choosing, logits)
        };
        let places: Vec<(Choosing, Vec<Fetched>)> = choosing.into_iter().map(with_places).collect();
        let chosen: Vec<(Choosing, Result<Next, Unchosen>)> = if has_rows {
            places.into_par_iter().map(choose).collect()
        } else {
            places.into_iter().map(choose).collect()
        };
        for (choosing, _) in &chosen {
            self.outlets.metrics.predictions(choosing.predictions);
        }
        let prefilled = rows.iter().filter(|row| !row.wants_token);
        let mut reports: Vec<Report> = prefilled
            .map(|row| Report {
                id: row.id,
                outcome: Outcome::Computed,
            })
            .collect();
        let deliveries: Vec<Delivery> = chosen
            .into_iter()
            .map(|(choosing, next)| self.settle(choosing, next, &mut reports))
            .collect();
        self.scheduler.commit(&reports);
        // Before the tokens, so that a client that sees a token can also see its blocks.
        self.publish_events();
        self.deliver(deliveries)
    }

    fn settle(
        &mut self,
        mut choosing: Choosing,
        next: Result<Next, Unchosen>,
        reports: &mut Vec<Report>,
    ) -> Delivery {
        match next {
            Ok(next) => {
                let Next {
                    outcome,
                    chunk,
                    end,
                    accepted,
                } = choosing.end_prefill(next, &self.freed);
                self.scheduler.accept_drafts(choosing.id, accepted);
                reports.push(Report {
                    id: choosing.id,
                    outcome,
                });
                let cached = self
                    .scheduler
                    .sequence(choosing.id)
                    .map_or(0, |sequence| sequence.cached_tokens());
                let end = end.map(|finish| self.with_usage(finish, &choosing.active, cached));
                let end = end.map(Ok);
                Delivery {
                    choosing,
                    chunk,
                    end,
                }
            }
            Err(unchosen) => {
                self.scheduler.cancel(choosing.id);
                let error = match unchosen {
                    Unchosen::Logits(error) => {
                        self.log_failed("logits", &error);
                        // The KV blocks may be the cause of the bad logits, so no other sequence must reuse them.
                        self.scheduler.clear_prefix_cache();
                        error
                    }
                    // Its grammar cannot continue.
                    Unchosen::Guide(error) if error.kind() == ErrorKind::InvalidArgument => {
                        tracing::debug!(%error, "a request failed in sampling");
                        error
                    }
                    Unchosen::Guide(error) => {
                        self.log_failed("guide", &error);
                        error
                    }
                };
                Delivery {
                    choosing,
                    chunk: TokenChunk::default(),
                    end: Some(Err(error)),
                }
            }
        }
    }

    fn log_failed(&self, reason: &'static str, error: &EngineError) {
        if let Some(unlogged) = self.logged.unlogged(reason) {
            tracing::error!(%error, unlogged, "a request failed in sampling; further ones are only counted for a minute");
        }
    }

    /// Adds the usage that only the engine knows.
    fn with_usage(&self, finish: Finish, active: &Active, cached_tokens: usize) -> Finish {
        let cached = u32::try_from(cached_tokens).unwrap_or(u32::MAX);
        let finish = finish.with_cached_tokens(cached);
        if self.speculation.is_some() {
            return finish.with_predictions(active.predictions);
        }
        finish
    }

    /// Puts every token of the step into its mailbox, then has the readers woken together.
    fn deliver(&mut self, deliveries: Vec<Delivery>) -> usize {
        let mut wakers: Vec<Waker> = Vec::with_capacity(deliveries.len());
        let mut tokens = 0;
        for Delivery {
            choosing: Choosing { id, active, .. },
            chunk,
            end,
        } in deliveries
        {
            tokens += chunk.token_ids.len();
            match end {
                None => {
                    wakers.extend(active.outlet.send(chunk));
                    self.requests.insert(id, active);
                }
                Some(Ok(finish)) => wakers.extend(active.outlet.end(Ok(finish.with_last(chunk)))),
                Some(Err(error)) => wakers.extend(active.outlet.end(Err(error))),
            }
        }
        self.outlets.readers.wake(wakers);
        tokens
    }

    /// Ends sequences that fill the whole KV cache like those that fill the context.
    fn end_outgrown(&mut self, outgrown: &[Outgrown]) {
        let mut wakers = Vec::new();
        for Outgrown { id, cached_tokens } in outgrown {
            let Some(active) = self.requests.remove(id) else {
                continue;
            };
            if let Some(unlogged) = self.logged.unlogged("outgrown") {
                tracing::warn!(
                    unlogged,
                    "a sequence filled the whole KV cache and was ended; a larger --kv-cache-memory lets it go on; further ones are only counted for a minute"
                );
            }
            let finish = self.with_usage(Finish::length(), &active, *cached_tokens);
            wakers.extend(active.outlet.end(Ok(finish)));
        }
        self.outlets.readers.wake(wakers);
    }

    /// Fails the requests of a step that was not computed. Their keys and values are unreliable.
    fn fail_step(
        &mut self,
        rows: &[Scheduled],
        choosing: Vec<Choosing>,
        problem: &ForwardError,
    ) -> ControlFlow<(), bool> {
        if let Some(unlogged) = self.logged.unlogged("step") {
            tracing::error!(%problem, sequences = rows.len(), unlogged, "the model failed to compute a step; further ones are only counted for a minute");
        }
        self.outlets.metrics.failed_step();
        self.requests.extend(
            choosing
                .into_iter()
                .map(|Choosing { id, active, .. }| (id, active)),
        );
        let error = EngineError::internal(
            "the model failed to compute a step of this request; see the worker's log",
        );
        let mut wakers = Vec::new();
        for row in rows {
            self.scheduler.cancel(row.id);
            let active = self.requests.remove(&row.id);
            wakers.extend(active.and_then(|active| active.outlet.end(Err(error.clone()))));
        }
        self.outlets.readers.wake(wakers);
        match self.ask_model() {
            Ok(()) => Continue(true),
            Err(problem) => {
                self.outlets
                    .health
                    .report_dead(format!("the model computes no more: {problem}"));
                Break(())
            }
        }
    }

    /// Checks that the model still computes. A request may be the cause of one failed step, but not of a failed step with a
    /// single, arbitrary token.
    fn ask_model(&mut self) -> Result<(), ForwardError> {
        let block = u32::try_from(self.spare_block)?;
        let mut batch = StepBatch::default();
        let piece = Piece {
            tokens: &[0],
            start: 0,
            blocks: vec![block],
            wanted: 0,
        };
        batch.push(self.scheduler.pool().block_size(), piece);
        compute(&mut *self.forward, &batch, &mut []).map(drop)
    }

    fn publish_events(&mut self) {
        for event in self.scheduler.take_events() {
            self.outlets.kv_events.publish(event);
        }
    }

    fn publish_state(&mut self) {
        let stats = self.scheduler.stats();
        self.outlets.metrics.state(stats);
        self.outlets.load.publish(stats.load());
    }

    fn end_all(&mut self) {
        let error = self.outlets.health.stopped();
        for (id, active) in self.requests.drain() {
            self.scheduler.cancel(id);
            let waker = active.outlet.end(Err(error.clone()));
            self.outlets.readers.wake(waker);
        }
        self.publish_state();
    }
}

/// Computes the step's logits. The masks of guided requests are computed in parallel, on another thread if there is one.
fn compute(
    forward: &mut dyn Forward,
    batch: &StepBatch,
    choosing: &mut [Choosing],
) -> Result<Vec<Fetched>, ForwardError> {
    let is_best: Vec<bool> = choosing
        .iter()
        .flat_map(|choosing| std::iter::repeat_n(choosing.is_best(), choosing.places()))
        .collect();
    let guided: Vec<&mut Choosing> = choosing
        .iter_mut()
        .filter(|choosing| choosing.is_guided())
        .collect();
    let logits = contained(|| {
        if guided.is_empty() {
            return forward.forward(batch);
        }
        rayon::in_place_scope(|scope| {
            scope.spawn(|_| guided.into_par_iter().for_each(Choosing::compute_mask));
            forward.forward(batch)
        })
    })?;
    if is_best.is_empty() {
        return Ok(Vec::new());
    }
    Ok(fetch(&logits, &is_best)?)
}
