//! [`Source`]: yields an answer's items, from the call that starts the answer to its end.

use std::pin::Pin;
use std::task::{Context, Poll, ready};

use genset_backend_common::{EngineError, ErrorKind, OutputStream, RequestContext};
use tokio::task::coop::poll_proceed;

use super::AnswerEnd;
use super::counting::Counting;

/// Units of the task's budget that starting an answer takes; ending it takes as many. Each is as much work as several
/// tokens, and a task that starts or ends thousands must not keep its thread.
const EDGE_UNITS: usize = 8;

/// The call that starts an answer.
pub type Starting = Pin<Box<dyn Future<Output = Result<OutputStream, EngineError>> + Send>>;

/// Where an answer's items come from.
pub(super) enum Source {
    /// With the units of the task's budget that are still to be taken before the call is polled.
    Starting(Starting, usize),
    Running(OutputStream),
    Counting(Box<Counting>),
    Ended,
}

impl Source {
    /// An answer that starts when it is first polled.
    pub(super) fn starting(starting: Starting) -> Self {
        Self::Starting(starting, EDGE_UNITS)
    }

    /// Waits until the engine has accepted the request; `true` if it accepted it just now.
    pub(super) fn poll_accepted(
        &mut self,
        cx: &mut Context<'_>,
    ) -> Poll<Result<bool, EngineError>> {
        let Self::Starting(starting, units) = self else {
            return Poll::Ready(Ok(false));
        };
        while *units > 0 {
            ready!(poll_proceed(cx)).made_progress();
            *units -= 1;
        }
        let accepted = ready!(starting.as_mut().poll(cx));
        *self = Self::Ended;
        Poll::Ready(accepted.map(|outputs| {
            *self = Self::Running(outputs);
            true
        }))
    }

    /// The engine's stream of a running answer.
    pub(super) fn outputs(&mut self) -> Result<&mut OutputStream, EngineError> {
        match self {
            Self::Running(outputs) => Ok(outputs),
            Self::Starting(..) | Self::Counting(_) | Self::Ended => {
                let problem = "the answer was read past its end";
                Err(EngineError::new(ErrorKind::StreamIncomplete, problem))
            }
        }
    }

    /// Cancels `ctx` after a stop string cut an answer whose prompt tokens only the engine knows, and waits for the
    /// stream's end from now on.
    pub(super) fn count(&mut self, end: AnswerEnd, ctx: &RequestContext) {
        if let Self::Running(outputs) = std::mem::replace(self, Self::Ended) {
            *self = Self::Counting(Box::new(Counting::new(outputs, end, ctx)));
        }
    }

    /// Releases the engine's stream and ends the task's turn.
    pub(super) fn close(&mut self, cx: &mut Context<'_>) {
        *self = Self::Ended;
        // Takes as many units as are left: this is the end, and the rest of the turn may be cut short.
        for _ in 0..EDGE_UNITS {
            match poll_proceed(cx) {
                Poll::Ready(turn) => turn.made_progress(),
                Poll::Pending => break,
            }
        }
    }
}
