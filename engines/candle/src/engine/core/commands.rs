//! [`Command`]: what the engine thread is told between its steps, and how it obeys.

use std::ops::Range;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, Thread};
use std::time::Duration;

use bytes::Bytes;
use genset_backend_common::{EngineError, ErrorKind, RequestField};
use genset_scheduler::{AddError, NewSequence, SequenceId};
use tokio::sync::{mpsc, oneshot};
use tokio::time::Instant;

use super::super::blocks;
use super::super::sequence::Arrival;
use super::{Core, Then};

/// How long a client refused for a full queue should wait.
const RETRY_AFTER: Duration = Duration::from_secs(1);

/// Between two steps bytes of KV blocks are waited for as long as the step took, divided by this.
const MOVING_PART: u32 = 16;

/// What the engine thread is told.
#[derive(Debug)]
pub(crate) enum Command {
    /// A request comes.
    Add(Box<Arrival>),
    /// A reader came or left, or a request was cancelled.
    Look,
    /// The blocks of this sequence have come.
    Received(SequenceId),
    /// Bytes of a held sequence's blocks are wanted; no reply where they are not held.
    Read {
        id: SequenceId,
        /// Places in the bytes of all its blocks.
        bytes: Range<usize>,
        reply: oneshot::Sender<Bytes>,
    },
    /// Bytes of the blocks of a sequence that waits for them.
    Write {
        id: SequenceId,
        /// Their place in the bytes of all its blocks.
        start: usize,
        bytes: Bytes,
        done: oneshot::Sender<()>,
    },
    /// Forget every reusable KV block, and say when it is done.
    ClearPrefixCache(oneshot::Sender<()>),
    /// End every request and the thread.
    Stop,
}

impl Core {
    pub(super) fn take_commands(&mut self, commands: &mut mpsc::Receiver<Command>) -> Then {
        loop {
            match commands.try_recv() {
                Ok(command) => {
                    if let Then::End = self.obey(command) {
                        return Then::End;
                    }
                }
                Err(mpsc::error::TryRecvError::Empty) => return Then::GoOn,
                Err(mpsc::error::TryRecvError::Disconnected) => return Then::End,
            }
        }
    }

    /// Goes on to obey for a small part of a step's time where bytes of KV blocks were moved: who moves them has more as soon as these
    /// are there, and would else wait for all of the next step. What can be computed from now on does not wait for that.
    pub(super) fn move_more(&mut self, commands: &mut mpsc::Receiver<Command>) -> Then {
        if !std::mem::take(&mut self.has_moved) || self.scheduler.is_idle() {
            return Then::GoOn;
        }
        let until = Instant::now() + self.step_time / MOVING_PART;
        while let Some(command) = next_until(commands, until) {
            let is_newcomer = matches!(command, Command::Add(_) | Command::Received(_));
            if let Then::End = self.obey(command) {
                return Then::End;
            }
            if is_newcomer {
                // Those that came together begin together.
                if let Then::End = self.take_commands(commands) {
                    return Then::End;
                }
                break;
            }
        }
        self.has_moved = false;
        Then::GoOn
    }

    pub(super) fn obey(&mut self, command: Command) -> Then {
        match command {
            Command::Add(arrival) => self.add(*arrival),
            Command::Look => self.has_looked = false,
            Command::Received(id) => drop(self.scheduler.received(id)),
            Command::Read { id, bytes, reply } => {
                self.has_moved = true;
                let (scheduler, forward) = (&self.scheduler, &*self.forward);
                if let Some(bytes) = blocks::read(scheduler, forward, &self.buffers, id, bytes) {
                    // Who asked may have left.
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
                // Who asked may have left.
                let _ = done.send(());
            }
            Command::Stop => return Then::End,
        }
        Then::GoOn
    }

    fn add(&mut self, arrival: Arrival) {
        if self.scheduler.is_full() && !std::mem::replace(&mut self.has_looked, true) {
            // Some may have left while they waited.
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
            Err(refusal) => self.outlets.readers.wake(
                active
                    .outlet
                    .end(Err(refused(refusal)))
                    .into_iter()
                    .collect(),
            ),
        }
    }
}

/// The next command; `None` where none comes in time, or none will.
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

/// Wakes a thread that is parked.
struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

fn refused(refusal: AddError) -> EngineError {
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
        // Ids are counted up, and prompts are computed in chunks.
        AddError::DuplicateId(_) | AddError::ExceedsStep { .. } => EngineError::internal(message),
    }
}

/// The refusal of a prompt that no KV cache of this size holds.
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
