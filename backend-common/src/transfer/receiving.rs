//! [`receiving`]: fetches an answer's KV blocks while the answer is polled.

use std::pin::Pin;
use std::task::{Context, Poll};

use futures_core::Stream;

use crate::error::EngineError;
use crate::output::{Output, OutputStream};

type Fetch = Pin<Box<dyn Future<Output = Result<(), EngineError>> + Send>>;

/// Wraps `outputs` and polls `fetch` along with it, until it completes. An error of the fetch ends the answer. Dropping the
/// answer drops the fetch.
pub fn receiving(
    outputs: OutputStream,
    fetch: impl Future<Output = Result<(), EngineError>> + Send + 'static,
) -> OutputStream {
    OutputStream::from_raw(Box::pin(Receiving {
        fetch: Some(Box::pin(fetch)),
        outputs: Some(outputs),
    }))
}

struct Receiving {
    fetch: Option<Fetch>,
    /// `None` after a failed fetch.
    outputs: Option<OutputStream>,
}

impl Stream for Receiving {
    type Item = Result<Output, EngineError>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = &mut *self;
        if let Some(fetch) = &mut this.fetch
            && let Poll::Ready(fetched) = fetch.as_mut().poll(cx)
        {
            this.fetch = None;
            if let Err(error) = fetched {
                this.outputs = None;
                return Poll::Ready(Some(Err(error)));
            }
        }
        let Some(outputs) = &mut this.outputs else {
            return Poll::Ready(None);
        };
        let item = Pin::new(outputs).poll_next(cx);
        if matches!(&item, Poll::Ready(Some(Ok(output))) if output.is_terminal()) {
            // The answer has ended; drop the rest of the fetch.
            this.fetch = None;
        }
        item
    }
}
