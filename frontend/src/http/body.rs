//! The events of streamed choices, side by side.

use std::iter::Enumerate;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker};

use bytes::BytesMut;
use futures_util::task::AtomicWaker;
use genset_backend_common::context::Explanation;
use http::StatusCode;
use tokio::task::coop::has_budget_remaining;

use super::metrics::RequestGuard;
use super::replies::{FRAME_BYTES, WriteEvents};
use crate::answer::{Answer, AnswerEnd, TotalUsage};
use crate::error::ApiError;
use crate::openai::{ChunkEncoder, finish_reason};
use crate::pipeline::Answers;

/// The events of one request.
///
/// Its answers run side by side in slots. A slot whose answer has ended takes the next one that has not started. Only slots that
/// were woken are polled: the cost of a token does not depend on how many answers wait for theirs.
pub(super) struct ChoiceEvents {
    encoder: ChunkEncoder,
    /// Answers that have not started.
    waiting: Enumerate<Answers>,
    slots: Vec<Slot>,
    /// Slots with an answer.
    running: usize,
    /// The slot to poll next: the one at which the task's budget ended last.
    turn: usize,
    /// The task that polls them.
    task: Arc<AtomicWaker>,
    total: TotalUsage,
    has_usage_event: bool,
    /// How its answers are routed, if the client asks for it.
    explanation: Option<Explanation>,
    guard: RequestGuard,
    progress: Progress,
}

/// A place for a running answer.
struct Slot {
    /// The answer and its index; `None` when no more wait.
    answer: Option<(usize, Answer)>,
    due: Arc<Due>,
    waker: Waker,
}

/// Whether a slot's answer is to be polled.
struct Due {
    is_due: AtomicBool,
    task: Arc<AtomicWaker>,
}

impl Due {
    /// Returns whether it is due, and clears that.
    fn take(&self) -> bool {
        self.is_due.load(Ordering::Relaxed) && self.is_due.swap(false, Ordering::AcqRel)
    }

    /// Marks it as due without a wake: the caller polls again anyway.
    fn stay(&self) {
        self.is_due.store(true, Ordering::Release);
    }
}

impl Wake for Due {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        // If it is already due, an earlier wake is pending that the task has not handled yet.
        if !self.is_due.swap(true, Ordering::AcqRel) {
            self.task.wake();
        }
    }
}

impl Slot {
    fn new(task: &Arc<AtomicWaker>) -> Self {
        let due = Arc::new(Due {
            is_due: AtomicBool::new(true),
            task: Arc::clone(task),
        });
        Self {
            answer: None,
            waker: Waker::from(Arc::clone(&due)),
            due,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Progress {
    /// The first events are not written yet.
    Opening,
    /// No text was sent yet: the first text is sent at once.
    Waiting,
    Streaming,
    Done,
}

impl ChoiceEvents {
    pub(super) fn new(
        encoder: ChunkEncoder,
        answers: Answers,
        has_usage_event: bool,
        guard: RequestGuard,
    ) -> Self {
        let task = Arc::default();
        let count = answers.len().min(answers.at_once().get());
        Self {
            encoder,
            explanation: answers.explanation().cloned(),
            slots: (0..count).map(|_| Slot::new(&task)).collect(),
            waiting: answers.enumerate(),
            running: 0,
            turn: 0,
            task,
            total: TotalUsage::default(),
            has_usage_event,
            guard,
            progress: Progress::Opening,
        }
    }

    fn open(&mut self, frame: &mut BytesMut) {
        self.progress = Progress::Waiting;
        for slot in 0..self.slots.len() {
            self.take_next(slot, frame);
        }
    }

    /// Gives a slot the next answer that has not started.
    fn take_next(&mut self, slot: usize, frame: &mut BytesMut) {
        let (Some(slot), Some((index, answer))) = (self.slots.get_mut(slot), self.waiting.next())
        else {
            return;
        };
        self.encoder.start(index, frame);
        slot.answer = Some((index, answer));
        slot.due.stay();
        self.running += 1;
    }

    /// Polls the slot's answer if it is due. Returns whether an item brought text, or `None` if there was no item. After an item
    /// the slot stays due.
    fn poll_slot(&mut self, number: usize, frame: &mut BytesMut) -> Option<bool> {
        let slot = self.slots.get_mut(number).filter(|slot| slot.due.take())?;
        let (index, answer) = slot.answer.as_mut()?;
        let mut has_text = false;
        let mut cx = Context::from_waker(&slot.waker);
        let polled = answer.poll_deltas(&mut cx, |delta, rated| {
            has_text = true;
            self.encoder.delta(*index, delta, rated, frame);
        });
        let Poll::Ready(result) = polled else {
            return None;
        };
        slot.due.stay();
        if has_text {
            self.guard.text();
        }
        match result {
            Ok(None) => {}
            Ok(Some(end)) => self.end_answer(number, end, frame),
            Err(error) => {
                let error = ApiError::from(error);
                self.guard.fail(&error);
                self.encoder.error(&error, frame);
                self.slots.clear();
                self.progress = Progress::Done;
            }
        }
        Some(has_text)
    }

    fn end_answer(&mut self, slot: usize, end: AnswerEnd, frame: &mut BytesMut) {
        let ended = self.slots.get_mut(slot);
        let Some((index, answer)) = ended.and_then(|slot| slot.answer.take()) else {
            return;
        };
        let ending = answer.end(|delta, rated| {
            self.encoder.delta(index, delta, rated, frame);
        });
        let reason = finish_reason(&end, ending.has_calls, ending.has_open_call);
        self.encoder.finish(index, reason, &ending.rated, frame);
        self.total.add(&end, ending.reasoning_tokens);
        self.running -= 1;
        self.take_next(slot, frame);
        if self.running == 0 {
            self.guard.set_status(StatusCode::OK);
            self.guard.add_usage(&self.total);
            if let Some(explanation) = &self.explanation {
                self.encoder.explanation(explanation, frame);
            }
            if self.has_usage_event {
                self.encoder.usage(&self.total, frame);
            }
            self.encoder.done(frame);
            self.progress = Progress::Done;
        }
    }
}

impl WriteEvents for ChoiceEvents {
    /// Writes slot by slot.
    fn fill(&mut self, cx: &mut Context<'_>, frame: &mut BytesMut) {
        self.task.register(cx.waker());
        if self.progress == Progress::Opening {
            self.open(frame);
        }
        let mut is_ready = true;
        while is_ready && self.progress != Progress::Done && frame.len() < FRAME_BYTES {
            is_ready = false;
            let mut has_text = false;
            for _ in 0..self.slots.len() {
                let slot = self.turn;
                if let Some(brought_text) = self.poll_slot(slot, frame) {
                    is_ready = true;
                    has_text |= brought_text;
                }
                if self.progress == Progress::Done {
                    return;
                }
                if !has_budget_remaining() {
                    // The task polls the other slots in its next turn, beginning with this one.
                    cx.waker().wake_by_ref();
                    return;
                }
                self.turn = (slot + 1) % self.slots.len();
            }
            if has_text && self.progress == Progress::Waiting {
                // The first token is sent at once, whatever else is ready. Text that is held back does not count.
                self.progress = Progress::Streaming;
                return;
            }
        }
    }

    fn has_ended(&self) -> bool {
        self.progress == Progress::Done
    }
}
