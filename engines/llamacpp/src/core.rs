//! [`Core`]: the engine thread's loop. It places, plans, computes and chooses; between steps, requests come and go.

use std::collections::VecDeque;

use futures_util::FutureExt as _;
use futures_util::future::select_all;
use genset_backend_common::EngineError;
use genset_backend_common::handles::{HealthReporter, Load, LoadPublisher};
use llama_cpp_2::context::LlamaContext;
use llama_cpp_2::llama_batch::LlamaBatch;
use llama_cpp_2::token::LlamaToken;
use tokio::runtime::Handle;
use tokio::sync::{mpsc, oneshot};

use crate::request::Active;
use crate::slots::{Eviction, Row, Sequence, Slots, first_ready};

/// A command to the engine thread.
pub(crate) enum Command {
    /// Adds a request.
    Add(Box<Sequence<Active>>),
    /// Forgets every reusable cell, and notifies the sender when done.
    ClearPrefixCache(oneshot::Sender<()>),
    /// Ends every request and the thread.
    Stop,
}

/// The engine thread's state.
pub(crate) struct Core<'model> {
    context: LlamaContext<'model>,
    batch: LlamaBatch<'static>,
    slots: Slots<Active>,
    waiting: VecDeque<Sequence<Active>>,
    /// The maximum number of tokens in a step, at least one per slot.
    max_batch: usize,
    /// A row of logits; choosing a token overwrites it.
    logits: Vec<f32>,
    load: LoadPublisher,
    health: HealthReporter,
}

/// The loop's next action.
enum Then {
    GoOn,
    /// Nothing can be computed before a command or a reader arrives.
    Wait,
    End,
}

impl<'model> Core<'model> {
    /// Creates the state. `context` has cells for all `slots`, and a batch of `max_batch` tokens.
    pub(crate) fn new(
        context: LlamaContext<'model>,
        slots: Slots<Active>,
        max_batch: usize,
        load: LoadPublisher,
        health: HealthReporter,
    ) -> Self {
        Self {
            context,
            batch: LlamaBatch::new(max_batch, 1),
            slots,
            waiting: VecDeque::new(),
            max_batch,
            logits: Vec::new(),
            load,
            health,
        }
    }

    /// Computes one token in an empty slot, to find out whether the model can.
    ///
    /// # Errors
    /// `Internal` if it cannot.
    pub(crate) fn probe(&mut self, slot: usize) -> Result<(), EngineError> {
        let cannot = || EngineError::internal("llama.cpp computes no token of the model");
        self.batch.clear();
        let added = self.batch.add(LlamaToken(0), 0, &[number(slot)], true);
        added.map_err(|error| cannot().with_source(error))?;
        let computed = self.context.decode(&mut self.batch);
        computed.map_err(|error| cannot().with_source(error))?;
        self.clear(slot);
        Ok(())
    }

    /// Serves until a stop command, until all senders are dropped, or until the model fails for good.
    pub(crate) fn run(mut self, mut commands: mpsc::Receiver<Command>, runtime: &Handle) {
        let mut then = Then::Wait;
        loop {
            then = match then {
                Then::End => break,
                Then::Wait => self.wait(&mut commands, runtime),
                Then::GoOn => Then::GoOn,
            };
            while let Some(command) = come(&then, &mut commands) {
                then = self.obey(command);
            }
            if matches!(then, Then::GoOn) {
                then = self.step();
            }
        }
        commands.close();
        while let Ok(command) = commands.try_recv() {
            let _ = self.obey(command);
        }
        self.end_all();
    }

    /// Waits for a command, or for a reader that catches up or leaves.
    fn wait(&mut self, commands: &mut mpsc::Receiver<Command>, runtime: &Handle) -> Then {
        self.publish_load();
        match self.next_command(commands, runtime) {
            Some(command) => self.obey(command),
            None => Then::GoOn,
        }
    }

    /// The next command; `None` if a reader was first, before or during the wait.
    fn next_command(
        &self,
        commands: &mut mpsc::Receiver<Command>,
        runtime: &Handle,
    ) -> Option<Command> {
        let ready = self.slots.readiness(&self.waiting, is_ready)?;
        let requests = self.slots.all.iter().filter_map(|it| it.request.as_ref());
        let came = requests.map(|request| request.sink.has_room().boxed());
        let waiting = self.waiting.iter().zip(ready);
        let left = waiting.map(|(sequence, ready)| match ready {
            true => sequence.request.sink.closed().boxed(),
            false => sequence.request.sink.has_room().boxed(),
        });
        let readers: Vec<_> = came.chain(left).collect();
        if readers.is_empty() {
            return commands.blocking_recv().or(Some(Command::Stop));
        }
        runtime.block_on(async {
            tokio::select! {
                biased;
                command = commands.recv() => command.or(Some(Command::Stop)),
                _ = select_all(readers) => None,
            }
        })
    }

    fn obey(&mut self, command: Command) -> Then {
        match command {
            Command::Add(sequence) => self.waiting.push_back(*sequence),
            Command::ClearPrefixCache(done) => {
                // Running sequences keep their cells.
                self.slots.end_reuse();
                for slot in 0..self.slots.all.len() {
                    if self.slots.all[slot].request.is_none() {
                        self.clear(slot);
                    }
                }
                // The receiver may be gone.
                let _ = done.send(());
            }
            Command::Stop => return Then::End,
        }
        Then::GoOn
    }

    fn step(&mut self) -> Then {
        self.leave_out_the_gone();
        self.place_waiting();
        let rows = self.plan();
        if rows.is_empty() {
            return Then::Wait;
        }
        match self.compute(&rows) {
            Ok(ends) => {
                self.health.report_step();
                for (row, end) in rows.iter().zip(ends) {
                    self.slots.all[row.slot].computed += row.tokens;
                    if let Some(place) = end {
                        self.choose(row.slot, place);
                    }
                }
                self.publish_load();
                Then::GoOn
            }
            Err(error) => self.fail_step(&rows, &error),
        }
    }

    /// Frees what cancelled requests hold.
    fn leave_out_the_gone(&mut self) {
        let is_gone = |request: &Active| request.sink.is_closed();
        self.waiting.retain(|sequence| !is_gone(&sequence.request));
        for slot in 0..self.slots.all.len() {
            if self.slots.all[slot].request.as_ref().is_some_and(is_gone) {
                self.slots.release(slot);
            }
        }
    }

    fn place_waiting(&mut self) {
        while let Some(first) = first_ready(&self.waiting, is_ready)
            && let Some(sequence) = self.waiting.get(first)
            && let Some(place) = self.slots.place(&sequence.tokens, sequence.salt.as_deref())
            && let Some(mut sequence) = self.waiting.remove(first)
        {
            let common = self.reuse(place.source, place.slot, place.common);
            let cached = &mut sequence.request.cached_tokens;
            cached.get_or_insert(u32::try_from(common).unwrap_or(u32::MAX));
            self.slots.fill(place.slot, common, sequence);
        }
    }

    /// Leaves only the first `common` tokens of `source` in the cells of `slot`. Leaves none if the model's memory cannot be cut
    /// there.
    fn reuse(&mut self, source: usize, slot: usize, common: usize) -> usize {
        if source != slot || common == 0 {
            self.clear(slot);
        }
        if common == 0 {
            return 0;
        }
        let (from, to, end) = (number(source), number(slot), u32::try_from(common).ok());
        let cut = if source == slot {
            self.context.kv_cache_seq_rm(to, end, None)
        } else {
            self.context.copy_kv_cache_seq(from, to, None, end)
        };
        // A recurrent layer's state covers the whole sequence.
        let is_whole = self.context.kv_cache_seq_pos_min(to) == 0
            && usize::try_from(self.context.kv_cache_seq_pos_max(to)).ok() == Some(common - 1);
        if cut.is_ok() && is_whole {
            return common;
        }
        self.clear(slot);
        0
    }

    fn clear(&mut self, slot: usize) {
        // Removing a whole sequence always works.
        let _ = self.context.kv_cache_seq_rm(number(slot), None, None);
        self.slots.forget(slot);
    }

    /// The rows to compute next, once there are cells for them. Skips sequences whose reader is behind.
    fn plan(&mut self) -> Vec<Row> {
        loop {
            let rows = self.slots.plan(self.max_batch, is_ready);
            if self.slots.has_room(&rows) {
                return rows;
            }
            match self.slots.evict(is_ready) {
                Some(Eviction::Idle(slot)) => self.clear(slot),
                Some(Eviction::Preempted(slot, sequence)) => {
                    self.clear(slot);
                    self.waiting.push_front(*sequence);
                }
                None => return rows,
            }
        }
    }

    /// Computes these rows. Returns, for each row that chooses a token, the place of its logits in the batch.
    fn compute(&mut self, rows: &[Row]) -> Result<Vec<Option<i32>>, EngineError> {
        let cannot = || EngineError::internal("llama.cpp failed to compute a step");
        self.batch.clear();
        let mut ends = Vec::with_capacity(rows.len());
        for row in rows {
            let slot = &self.slots.all[row.slot];
            let (begin, end) = (slot.computed, slot.computed + row.tokens);
            let is_last = end == slot.tokens.len();
            for place in begin..end {
                let token = LlamaToken(number(slot.tokens[place]));
                let wants_logits = is_last && place + 1 == end;
                let added = self
                    .batch
                    .add(token, number(place), &[number(row.slot)], wants_logits);
                added.map_err(|error| cannot().with_source(error))?;
            }
            ends.push(is_last.then(|| self.batch.n_tokens() - 1));
        }
        let computed = self.context.decode(&mut self.batch);
        computed.map_err(|error| cannot().with_source(error))?;
        Ok(ends)
    }

    /// Chooses a slot's next token from the logits at `place`, and sends it to the reader.
    fn choose(&mut self, slot: usize, place: i32) {
        self.logits.clear();
        let row = self.context.get_logits_ith(place);
        self.logits.extend_from_slice(row);
        let Some(mut request) = self.slots.all[slot].request.take() else {
            return;
        };
        match request.choose(&mut self.logits) {
            Ok((chunk, None)) => {
                let slot = &mut self.slots.all[slot];
                slot.tokens.extend_from_slice(&chunk.token_ids);
                // There is room. If the reader has left, the next step skips the sequence.
                let _ = request.sink.try_send(chunk);
                slot.request = Some(request);
            }
            Ok((last, Some(finish))) => {
                self.slots.release(slot);
                self.publish_load();
                request.finish(finish.with_last(last));
            }
            Err(error) => {
                tracing::error!(%error, "a request failed in sampling");
                // The cells may contain the cause of the wrong logits.
                self.slots.release(slot);
                self.clear(slot);
                request.sink.fail(error);
            }
        }
    }

    /// Fails the requests of a step that was not computed. Their keys and values cannot be trusted.
    fn fail_step(&mut self, rows: &[Row], error: &EngineError) -> Then {
        tracing::error!(%error, sequences = rows.len(), "a step was not computed");
        for row in rows {
            let request = self.slots.release(row.slot);
            self.clear(row.slot);
            if let Some(request) = request {
                let problem =
                    "the model failed to compute a step of this request; see the worker's log";
                request.sink.fail(EngineError::internal(problem));
            }
        }
        // A request may make one step fail, but a probe token that still fails means that the model cannot compute.
        match rows.first().map(|row| self.probe(row.slot)) {
            None | Some(Ok(())) => Then::GoOn,
            Some(Err(error)) => {
                let problem = format!("the model computes no more: {error}");
                self.health.report_dead(problem);
                Then::End
            }
        }
    }

    fn publish_load(&self) {
        let count = |requests: usize| u32::try_from(requests).unwrap_or(u32::MAX);
        self.load.publish(Load {
            running_requests: count(self.slots.running().count()),
            waiting_requests: count(self.waiting.len()),
            ..Load::default()
        });
    }

    fn end_all(&mut self) {
        let error = self.health.stopped();
        let running = (0..self.slots.all.len()).filter_map(|slot| self.slots.release(slot));
        let running: Vec<Active> = running.collect();
        let waiting = self.waiting.drain(..).map(|sequence| sequence.request);
        for request in running.into_iter().chain(waiting) {
            request.sink.fail(error.clone());
        }
        self.publish_load();
    }
}

/// Whether the request's reader has room for a token; otherwise none is computed.
fn is_ready(request: &Active) -> bool {
    !request.sink.is_full()
}

/// A waiting command, if the loop continues. Commands behind a stop stay in the channel, to be ended with all others.
fn come(then: &Then, commands: &mut mpsc::Receiver<Command>) -> Option<Command> {
    match then {
        Then::GoOn => commands.try_recv().ok(),
        Then::Wait | Then::End => None,
    }
}

/// Converts to llama.cpp's type for tokens, places and sequences: none reaches 2^31.
fn number(value: impl TryInto<i32>) -> i32 {
    value.try_into().unwrap_or(i32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_comes_behind_a_stop_is_not_thrown_away() {
        let (sender, mut commands) = mpsc::channel(1);
        let (done, _is_done) = oneshot::channel();
        let sent = sender.try_send(Command::ClearPrefixCache(done));
        assert!(sent.is_ok());
        assert!(come(&Then::End, &mut commands).is_none());
        assert!(come(&Then::GoOn, &mut commands).is_some());
    }
}
