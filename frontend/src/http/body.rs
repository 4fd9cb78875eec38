//! The body of a streamed answer: server-sent events, written as the tokens come.

use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::{Bytes, BytesMut};
use http::StatusCode;
use http_body::{Body, Frame};

use super::metrics::RequestGuard;
use crate::answer::{Answer, AnswerEnd, Spent};
use crate::error::ApiError;
use crate::openai::{ChoiceEnd, ChunkEncoder};

/// Tokens that are ready together leave together, up to about this many bytes: one write, and a bound on what a fast engine
/// puts in front of a slow client.
pub(super) const FRAME_BYTES: usize = 8 << 10;

/// The next frame of a body, once what is ready was written into `buffer`.
pub(super) fn next_frame(
    buffer: &mut BytesMut,
    has_ended: bool,
) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
    if !buffer.is_empty() {
        return Poll::Ready(Some(Ok(Frame::data(buffer.split().freeze()))));
    }
    if has_ended {
        Poll::Ready(None)
    } else {
        Poll::Pending
    }
}

/// The events of one request. Dropping it cancels what still runs.
pub(super) struct EventBody {
    encoder: ChunkEncoder,
    answers: Vec<Option<Answer>>,
    running: usize,
    spent: Spent,
    has_usage_event: bool,
    guard: RequestGuard,
    buffer: BytesMut,
    /// Text of the present item; empty between two.
    text: String,
    progress: Progress,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Progress {
    /// The first events are not written.
    Opening,
    /// No text was sent yet: the first leaves at once.
    Waiting,
    Streaming,
    Done,
}

impl EventBody {
    pub(super) fn new(
        encoder: ChunkEncoder,
        answers: Vec<Answer>,
        has_usage_event: bool,
        guard: RequestGuard,
    ) -> Self {
        Self {
            encoder,
            running: answers.len(),
            answers: answers.into_iter().map(Some).collect(),
            spent: Spent::default(),
            has_usage_event,
            guard,
            buffer: BytesMut::new(),
            text: String::new(),
            progress: Progress::Opening,
        }
    }

    fn open(&mut self) {
        self.progress = Progress::Waiting;
        for index in 0..self.answers.len() {
            self.encoder.start(index, &mut self.buffer);
        }
    }

    /// Writes what is ready, in turns, until nothing is or the frame is full.
    fn fill(&mut self, cx: &mut Context<'_>) {
        let mut is_ready = true;
        while is_ready && self.progress != Progress::Done && self.buffer.len() < FRAME_BYTES {
            is_ready = false;
            for index in 0..self.answers.len() {
                is_ready |= self.poll_answer(index, cx);
                if self.progress == Progress::Done {
                    return;
                }
            }
            let has_text = !self.text.is_empty() && !self.buffer.is_empty();
            if is_ready && self.progress == Progress::Waiting && has_text {
                // The first token leaves at once, whatever else is ready. Text that is held back is none.
                self.text.clear();
                self.progress = Progress::Streaming;
                return;
            }
            self.text.clear();
        }
    }

    /// Whether the answer had an item.
    fn poll_answer(&mut self, index: usize, cx: &mut Context<'_>) -> bool {
        let Some(Some(answer)) = self.answers.get_mut(index) else {
            return false;
        };
        let before = self.text.len();
        let Poll::Ready(result) = answer.poll_text(cx, &mut self.text) else {
            return false;
        };
        if let Some(text) = self.text.get(before..).filter(|text| !text.is_empty()) {
            answer.deliver(text, |delta, rated| {
                self.encoder.delta(index, delta, rated, &mut self.buffer);
            });
            self.guard.text();
        }
        match result {
            Ok(None) => {}
            Ok(Some(end)) => self.end_answer(index, end),
            Err(error) => {
                let error = ApiError::from(error);
                self.guard.fail(&error);
                self.encoder.error(error, &mut self.buffer);
                self.answers.clear();
                self.progress = Progress::Done;
            }
        }
        true
    }

    fn end_answer(&mut self, index: usize, end: AnswerEnd) {
        let Some(answer) = self.answers.get_mut(index).and_then(Option::take) else {
            return;
        };
        let ending = answer.end(|delta, rated| {
            self.encoder.delta(index, delta, rated, &mut self.buffer);
        });
        let reason = ChoiceEnd::new(end.reason, ending.has_calls);
        self.encoder
            .finish(index, reason, &ending.rated, &mut self.buffer);
        self.spent.add(&end, ending.reasoning_tokens);
        self.running -= 1;
        if self.running == 0 {
            self.guard.set_status(StatusCode::OK);
            self.guard.spent(&self.spent);
            if self.has_usage_event {
                self.encoder.usage(&self.spent, &mut self.buffer);
            }
            self.encoder.done(&mut self.buffer);
            self.progress = Progress::Done;
        }
    }
}

impl Body for EventBody {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let this = &mut *self;
        if this.progress == Progress::Opening {
            this.open();
        }
        this.fill(cx);
        next_frame(&mut this.buffer, this.progress == Progress::Done)
    }

    fn is_end_stream(&self) -> bool {
        self.progress == Progress::Done && self.buffer.is_empty()
    }
}
