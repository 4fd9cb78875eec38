//! [`cut`]: a stream that ends differently after an event, for faults of shutdowns and crashes.

use std::pin::Pin;

use futures_util::{StreamExt, stream};
use genset_backend_common::output::{Finish, Output};
use genset_backend_common::{EngineError, OutputStream};

/// How a cut stream continues.
#[derive(Debug, Clone)]
pub(super) enum Then {
    /// Never ends.
    Hang,
    /// Ends with an error.
    Fail(EngineError),
    /// Finishes as if it were complete.
    Finish,
}

type Cause = Pin<Box<dyn Future<Output = ()> + Send>>;

/// Passes `outputs` on until `cause` completes, then continues as `then` says.
pub(super) fn cut(
    outputs: OutputStream,
    cause: impl Future<Output = ()> + Send + 'static,
    then: Then,
) -> OutputStream {
    let whole: (Option<OutputStream>, Cause) = (Some(outputs), Box::pin(cause));
    let raw = stream::unfold(whole, move |(outputs, mut cause)| {
        let then = then.clone();
        async move {
            let mut outputs = outputs?;
            tokio::select! {
                biased;
                () = &mut cause => Some((end(then).await, (None, cause))),
                item = outputs.next() => Some((item?, (Some(outputs), cause))),
            }
        }
    });
    OutputStream::from_raw(Box::pin(raw))
}

async fn end(then: Then) -> Result<Output, EngineError> {
    match then {
        Then::Hang => std::future::pending().await,
        Then::Fail(error) => Err(error),
        Then::Finish => Ok(Output::Finished(Box::new(
            Finish::length().into_finished(0, 0),
        ))),
    }
}
