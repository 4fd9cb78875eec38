//! [`Rank`]: the loop of one data-parallel rank. Each step plans, waits for the step's time, commits and delivers. Requests
//! are added and removed between steps.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use genset_backend_common::log_limit::OncePerMinute;
use genset_backend_common::output::{Finish, TrySendError};
use genset_backend_common::{EngineError, ErrorKind, RequestField};
use genset_scheduler::{
    AddError, FreedSequences, Outcome, Outgrown, Report, Scheduled, Scheduler, SequenceId,
};
use tokio::sync::{mpsc, oneshot};
use tokio_util::sync::CancellationToken;

use crate::active::{Active, Arrival, Next};
use crate::board::Board;
use crate::time::{StepClock, StepTimes};

/// How long a client should wait after it was rejected because the queue is full.
const RETRY_AFTER: Duration = Duration::from_secs(1);

/// A command to a rank.
#[derive(Debug)]
pub(crate) enum Command {
    /// Adds a request.
    Add(Box<Arrival>),
    /// A request was cancelled, or its reader is gone.
    Look,
    /// The blocks of this sequence have arrived.
    Received(SequenceId),
    /// Forgets every reusable KV block, and notifies the sender when done.
    ClearPrefixCache(oneshot::Sender<()>),
}

/// A rank's state.
#[derive(Debug)]
pub(crate) struct Rank {
    number: usize,
    scheduler: Scheduler,
    /// Sorted, so that one seed gives one simulation.
    requests: BTreeMap<SequenceId, Active>,
    commands: mpsc::Receiver<Command>,
    times: StepTimes,
    clock: StepClock,
    board: Arc<Board>,
    freed: FreedSequences,
    last_id: u64,
    /// Limits the log: with too few blocks, each long request would write a line.
    logged: OncePerMinute,
}

impl Rank {
    pub(crate) fn new(
        number: usize,
        scheduler: Scheduler,
        times: StepTimes,
        commands: mpsc::Receiver<Command>,
        board: Arc<Board>,
        freed: FreedSequences,
    ) -> Self {
        Self {
            number,
            scheduler,
            requests: BTreeMap::new(),
            commands,
            times,
            clock: StepClock::new(),
            board,
            freed,
            last_id: 0,
            logged: OncePerMinute::default(),
        }
    }

    /// Serves until `stop` is cancelled or all command senders are gone, then ends every request.
    pub(crate) async fn run(mut self, stop: CancellationToken) {
        let _watch = PanicWatch(Arc::clone(&self.board));
        self.publish_state();
        tokio::select! {
            biased;
            () = stop.cancelled() => {}
            () = self.serve() => {}
        }
        self.commands.close();
        while let Ok(command) = self.commands.try_recv() {
            self.obey(command);
        }
        self.end_all();
    }

    /// The state is consistent at every await: a step dropped while its time passes was planned and never computed.
    async fn serve(&mut self) {
        loop {
            while let Ok(command) = self.commands.try_recv() {
                self.obey(command);
            }
            for id in self.freed.take() {
                self.scheduler.free_held(id);
            }
            self.look_at_readers();
            let step = self.scheduler.plan();
            self.publish_events();
            self.end_outgrown(&step.outgrown);
            if step.is_empty() {
                self.publish_state();
                self.clock.idle();
                if !self.wait().await {
                    return;
                }
            }
            if step.rows.is_empty() {
                continue;
            }
            self.publish_state();
            let is_received = |id: SequenceId| {
                let active = self.requests.get(&id);
                active.is_some_and(|active| active.is_received)
            };
            let took = (self.times).of(&self.scheduler, &step.rows, is_received);
            self.clock.pass(took).await;
            self.finish_step(&step.rows, took);
        }
    }

    /// Waits for a command, or for a reader that was behind. Returns `false` when all command senders are gone.
    async fn wait(&mut self) -> bool {
        let paused = self.requests.values().filter(|active| active.is_paused);
        let mut readers: FuturesUnordered<_> =
            paused.map(|active| active.sink.has_room()).collect();
        let command = tokio::select! {
            command = self.commands.recv() => command,
            Some(()) = readers.next() => return true,
        };
        drop(readers);
        match command {
            Some(command) => {
                self.obey(command);
                true
            }
            None => false,
        }
    }

    fn obey(&mut self, command: Command) {
        match command {
            Command::Add(arrival) => self.add(*arrival),
            Command::Look => {}
            Command::Received(id) => {
                if self.scheduler.received(id)
                    && let Some(active) = self.requests.get_mut(&id)
                {
                    active.is_received = true;
                }
            }
            Command::ClearPrefixCache(done) => {
                self.scheduler.clear_prefix_cache();
                self.publish_events();
                // The requester may be gone.
                let _ = done.send(());
            }
        }
    }

    fn add(&mut self, arrival: Arrival) {
        self.last_id += 1;
        let id = SequenceId(self.last_id);
        let Arrival {
            mut sequence,
            receives,
            active,
        } = arrival;
        sequence.id = id;
        let added = match receives {
            Some(told) => self.scheduler.add_receiving(sequence, told),
            None => self.scheduler.add(sequence),
        };
        match added {
            Ok(()) => drop(self.requests.insert(id, active)),
            Err(refusal) => active.sink.fail(refused(refusal)),
        }
    }

    /// Frees what cancelled requests hold, and pauses those whose readers are behind.
    fn look_at_readers(&mut self) {
        let scheduler = &mut self.scheduler;
        self.requests.retain(|id, active| {
            if active.sink.is_closed() {
                scheduler.cancel(*id);
                return false;
            }
            let is_behind = active.sink.is_full();
            if is_behind != active.is_paused {
                active.is_paused = is_behind;
                scheduler.set_paused(*id, is_behind);
            }
            true
        });
    }

    /// Samples tokens, commits the step and delivers the tokens.
    fn finish_step(&mut self, rows: &[Scheduled], took: Duration) {
        let mut reports = Vec::with_capacity(rows.len());
        let mut deliveries = Vec::with_capacity(rows.len());
        for row in rows {
            let Some(active) = self.requests.get_mut(&row.id) else {
                continue;
            };
            let mut outcome = Outcome::Computed;
            if row.wants_token {
                let mut next = active.next();
                // Without a receiver, nobody would learn of the blocks, and they would be held until the lease ends.
                if next.end.is_none()
                    && !active.sink.is_closed()
                    && let Some(leg) = active.prefill.take()
                {
                    let held = self.freed.holding(row.id);
                    let transfer = leg.transfers.hold(&leg, held);
                    let finish = Finish::length().with_last(next.token);
                    next.end = Some(finish.with_transfer(transfer));
                    next.outcome = Outcome::Held;
                }
                outcome = next.outcome;
                next.end = next.end.map(|end| self.with_cached_tokens(row.id, end));
                deliveries.push((row.id, next));
            }
            reports.push(Report {
                id: row.id,
                outcome,
            });
        }
        self.scheduler.commit(&reports);
        // Before the tokens, so that a client that sees a token can also see its blocks.
        self.publish_events();
        let generated = deliveries
            .into_iter()
            .map(|(id, next)| self.deliver(id, next))
            .sum();
        self.board.step(took, generated);
    }

    fn with_cached_tokens(&self, id: SequenceId, end: Finish) -> Finish {
        let cached = self
            .scheduler
            .sequence(id)
            .map_or(0, |sequence| sequence.cached_tokens());
        end.with_cached_tokens(u32::try_from(cached).unwrap_or(u32::MAX))
    }

    /// Sends a token to its reader; returns the number of tokens sent.
    fn deliver(&mut self, id: SequenceId, next: Next) -> u64 {
        if let Some(end) = next.end {
            let streamed = u64::from(end.last.len());
            if let Some(active) = self.requests.remove(&id) {
                active.sink.finish(end);
            }
            return streamed;
        }
        let sent = match self.requests.get(&id) {
            Some(active) => active.sink.try_send(next.token.into()),
            None => return 0,
        };
        match sent {
            // A request whose reader is gone is removed before the next step.
            Ok(()) | Err(TrySendError::Closed) => {}
            Err(TrySendError::Full(_)) => {
                self.scheduler.cancel(id);
                if let Some(active) = self.requests.remove(&id) {
                    let lost = "a token found no room that was there before; please report it";
                    active.sink.fail(EngineError::internal(lost));
                }
            }
        }
        1
    }

    /// Ends sequences that fill the whole KV cache like those that fill the context.
    fn end_outgrown(&mut self, outgrown: &[Outgrown]) {
        for Outgrown { id, cached_tokens } in outgrown {
            if let Some(active) = self.requests.remove(id) {
                if let Some(unlogged) = self.logged.unlogged("outgrown") {
                    tracing::warn!(
                        unlogged,
                        "a sequence filled the whole KV cache and was ended; a larger num_gpu_blocks lets it go on; further ones are only counted for a minute"
                    );
                }
                let cached = u32::try_from(*cached_tokens).unwrap_or(u32::MAX);
                active
                    .sink
                    .finish(Finish::length().with_cached_tokens(cached));
            }
        }
    }

    fn publish_events(&mut self) {
        self.board
            .cache_changed(self.number, self.scheduler.take_events());
    }

    fn publish_state(&self) {
        self.board.state(self.number, self.scheduler.stats());
    }

    fn end_all(&mut self) {
        let error = self.board.health.stopped();
        for (id, active) in std::mem::take(&mut self.requests) {
            self.scheduler.cancel(id);
            active.sink.fail(error.clone());
        }
        self.publish_state();
    }
}

/// Reports the panic of a rank to the Worker: the rank serves nobody any more.
struct PanicWatch(Arc<Board>);

impl Drop for PanicWatch {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let reason = "a rank of the mocker panicked; please report it";
            self.0.health.report_dead(reason);
        }
    }
}

fn refused(refusal: AddError) -> EngineError {
    let message = refusal.to_string();
    match refusal {
        AddError::QueueFull { .. } => {
            EngineError::new(ErrorKind::Overloaded, format!("{message}; try again later"))
                .with_retry_after(RETRY_AFTER)
        }
        AddError::NeverFits { .. } | AddError::ExceedsStep { .. } => {
            EngineError::new(ErrorKind::ContextLengthExceeded, message)
                .with_at(RequestField::Prompt)
        }
        AddError::EmptyPrompt => {
            EngineError::invalid_argument(RequestField::Prompt, "must hold at least one token")
        }
        AddError::DuplicateId(_) => EngineError::internal(message),
    }
}
