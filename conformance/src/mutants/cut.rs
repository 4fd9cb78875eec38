//! [`cut`]: a stream that ends differently after an event, for faults of shutdowns and crashes.

use std::pin::Pin;

use futures_util::{StreamExt, stream};
use genset_backend_common::output::{Finish, Output};
use genset_backend_common::{EngineError, OutputStream};
use tokio::sync::watch;

use super::fault::raw;

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

/// Passes `outputs` on until `cause` is true, then continues as `then` says.
pub(super) fn cut(outputs: OutputStream, cause: &watch::Sender<bool>, then: Then) -> OutputStream {
    let mut is_so = cause.subscribe();
    cut_after(outputs, then, async move {
        if is_so.wait_for(|is_so| *is_so).await.is_err() {
            std::future::pending().await
        }
    })
}

/// As [`cut`], for a cause that ends.
pub(super) fn cut_after(
    outputs: OutputStream,
    then: Then,
    cause: impl Future<Output = ()> + Send + 'static,
) -> OutputStream {
    let whole: (Option<OutputStream>, Cause) = (Some(outputs), Box::pin(cause));
    raw(stream::unfold(whole, move |(outputs, mut cause)| {
        let then = then.clone();
        async move {
            let mut outputs = outputs?;
            tokio::select! {
                biased;
                () = &mut cause => Some((end(then).await, (None, cause))),
                item = outputs.next() => Some((item?, (Some(outputs), cause))),
            }
        }
    }))
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
