//! [`Command`]: the commands that the engine thread takes between its steps, and how it executes them.

use std::ops::ControlFlow::{self, Break, Continue};
use std::ops::Range;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, Thread};
use std::time::Duration;

use bytes::Bytes;
use genset_backend_common::{EngineError, ErrorKind, RequestField};
use genset_scheduler::{AddError, NewSequence, SequenceId};
use tokio::sync::mpsc::error::TryRecvError;
use tokio::sync::{mpsc, oneshot};
use tokio::time::Instant;

use super::super::blocks;
use super::super::forward::contained;
use super::super::sequence::Arrival;
use super::Core;
use crate::model::ProductTime;

/// How long a client should wait after it was rejected because the queue is full.
const RETRY_AFTER: Duration = Duration::from_secs(1);

/// After a step, the thread waits for further bytes of KV blocks for the step's time divided by this.
const MOVING_PART: u32 = 16;

/// A command to the engine thread.
#[derive(Debug)]
pub(crate) enum Command {
    /// Adds a request.
    Add(Box<Arrival>),
    /// A reader caught up or left, or a request was cancelled.
    Look,
    /// The blocks of this sequence have arrived.
    Received(SequenceId),
    /// Reads bytes of a held sequence's blocks. The reply is dropped if they are not held.
    Read {
        id: SequenceId,
        /// The range within the bytes of all its blocks.
        bytes: Range<usize>,
        reply: oneshot::Sender<Bytes>,
    },
    /// Writes bytes of the blocks of a sequence that waits for them.
    Write {
        id: SequenceId,
        /// Their offset in the bytes of all its blocks.
        start: usize,
        bytes: Bytes,
        done: oneshot::Sender<()>,
    },
    /// Forgets every reusable KV block, and notifies the sender when done.
    ClearPrefixCache(oneshot::Sender<()>),
    /// Times the products of a decode step. Requests wait meanwhile.
    TimeProducts {
        sequences: usize,
        repeats: usize,
        reply: oneshot::Sender<Result<Option<Vec<ProductTime>>, EngineError>>,
    },
    /// Ends every request and the thread.
    Stop,
}

/// Makes the engine thread look at its readers, if it still runs. If its queue is full, it looks anyway.
pub(crate) fn look(commands: &mpsc::WeakSender<Command>) {
    if let Some(commands) = commands.upgrade() {
        drop(commands.try_send(Command::Look));
    }
}

impl Core {
    pub(super) fn take_commands(
        &mut self,
        commands: &mut mpsc::Receiver<Command>,
    ) -> ControlFlow<()> {
        loop {
            match commands.try_recv() {
                Ok(command) => self.obey(command)?,
                Err(TryRecvError::Empty) => return Continue(()),
                Err(TryRecvError::Disconnected) => return Break(()),
            }
        }
    }

    /// If bytes of KV blocks were moved, continues to take commands for a small part of a step's time. A transfer sends its next
    /// bytes once these are handled, and would otherwise wait for all of the next step. Work that becomes ready ends this wait.
    pub(super) fn move_more(&mut self, commands: &mut mpsc::Receiver<Command>) -> ControlFlow<()> {
        if !std::mem::take(&mut self.has_moved) || self.scheduler.is_idle() {
            return Continue(());
        }
        let until = Instant::now() + self.step_time / MOVING_PART;
        while let Some(command) = next_until(commands, until) {
            let is_newcomer = matches!(command, Command::Add(_) | Command::Received(_));
            self.obey(command)?;
            if is_newcomer {
                // Requests that arrived together start together.
                self.take_commands(commands)?;
                break;
            }
        }
        self.has_moved = false;
        Continue(())
    }

    /// Breaks if the thread is to end.
    pub(super) fn obey(&mut self, command: Command) -> ControlFlow<()> {
        match command {
            Command::Add(arrival) => self.add(*arrival),
            Command::Look => self.has_looked = false,
            Command::Received(id) => drop(self.scheduler.received(id)),
            Command::Read { id, bytes, reply } => {
                self.has_moved = true;
                let (scheduler, forward) = (&self.scheduler, &*self.forward);
                if let Some(bytes) = blocks::read(scheduler, forward, &self.buffers, id, bytes) {
                    // The requester may be gone.
                    let _ = reply.send(bytes);
                }
            }
            Command::Write {
                id,
                start,
                bytes,
                done,
            } => {
                self.has_moved = true;
                blocks::write(&self.scheduler, &mut *self.forward, id, start, &bytes);
                let _ = done.send(());
            }
            Command::ClearPrefixCache(done) => {
                self.scheduler.clear_prefix_cache();
                self.publish_events();
                // The requester may be gone.
                let _ = done.send(());
            }
            Command::TimeProducts {
                sequences,
                repeats,
                reply,
            } => {
                let times = contained(|| self.forward.time_products(sequences, repeats));
                let times = times.map_err(|problem| {
                    EngineError::internal(format!("the products could not be timed: {problem}"))
                });
                // The requester may be gone.
                let _ = reply.send(times);
            }
            Command::Stop => return Break(()),
        }
        Continue(())
    }

    fn add(&mut self, arrival: Arrival) {
        if self.scheduler.is_full() && !std::mem::replace(&mut self.has_looked, true) {
            // Some readers may have left meanwhile.
            self.look_at_readers();
        }
        self.last_id += 1;
        let id = SequenceId(self.last_id);
        let Arrival {
            prompt,
            priority,
            root,
            adapter,
            receives,
            active,
        } = arrival;
        let sequence = NewSequence {
            id,
            prompt,
            priority,
            root,
        };
        let added = match receives {
            Some(told) => self.scheduler.add_receiving(sequence, told),
            None => self.scheduler.add(sequence),
        };
        match added {
            Ok(()) => {
                self.adapted.extend(adapter.map(|adapter| (id, adapter)));
                self.requests.insert(id, active);
            }
            Err(refusal) => {
                let waker = active.outlet.end(Err(refused(refusal)));
                self.outlets.readers.wake(waker);
            }
        }
    }
}

/// The next command; `None` if none arrives in time, or all senders are gone.
fn next_until(commands: &mut mpsc::Receiver<Command>, until: Instant) -> Option<Command> {
    let waker = Waker::from(Arc::new(Unpark(thread::current())));
    let mut cx = Context::from_waker(&waker);
    loop {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return None;
        }
        match commands.poll_recv(&mut cx) {
            Poll::Ready(command) => return command,
            Poll::Pending => thread::park_timeout(left),
        }
    }
}

/// Wakes a parked thread.
struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

/// The error of a request that the scheduler does not take.
pub(crate) fn refused(refusal: AddError) -> EngineError {
    let message = refusal.to_string();
    match refusal {
        AddError::QueueFull { .. } => {
            EngineError::new(ErrorKind::Overloaded, format!("{message}; try again later"))
                .with_retry_after(RETRY_AFTER)
        }
        AddError::NeverFits {
            prompt_tokens,
            capacity_tokens,
        } => too_long_for_cache(prompt_tokens, capacity_tokens),
        AddError::EmptyPrompt => {
            EngineError::invalid_argument(RequestField::Prompt, "must hold at least one token")
        }
        // Ids are unique by counting, and prompts are computed in chunks.
        AddError::DuplicateId(_) | AddError::ExceedsStep { .. } => EngineError::internal(message),
    }
}

/// The error for a prompt that exceeds the whole KV cache.
pub(crate) fn too_long_for_cache(prompt_tokens: usize, capacity_tokens: usize) -> EngineError {
    let message = format!(
        "the prompt has {prompt_tokens} tokens, but this worker's KV cache holds {capacity_tokens}; \
         shorten the prompt, or give the worker a larger --kv-cache-memory"
    );
    EngineError::new(ErrorKind::ContextLengthExceeded, message).with_at(RequestField::Prompt)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_is_waited_for_and_not_taken_too_late() {
        let (sender, mut commands) = mpsc::channel(1);
        let later = Instant::now() + Duration::from_secs(60);
        thread::scope(|scope| {
            scope.spawn(|| sender.blocking_send(Command::Look).unwrap());
            let next = next_until(&mut commands, later);
            assert!(matches!(next, Some(Command::Look)), "{next:?}");
        });
        sender.try_send(Command::Look).unwrap();
        assert!(next_until(&mut commands, Instant::now()).is_none());
        assert!(commands.try_recv().is_ok());
        drop(sender);
        assert!(next_until(&mut commands, later).is_none());
    }
}
