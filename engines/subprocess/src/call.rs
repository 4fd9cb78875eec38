//! [`Call`]: one stream, from the reader's side.

use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use genset_backend_common::inbox::Taken;
use genset_backend_common::{CancelReason, EngineError};
use genset_wire::{Credit, FrameKind, decode_payload};
use serde::de::DeserializeOwned;

use crate::link::{CallInbox, Link};

/// A call to the process. Dropping it before its end cancels it.
pub(crate) struct Call {
    link: Arc<Link>,
    id: u32,
    inbox: Arc<CallInbox>,
    window: u32,
    /// Items read since credit was last granted.
    read: u32,
    is_over: bool,
}

impl Call {
    pub(crate) fn new(link: Arc<Link>, id: u32, inbox: Arc<CallInbox>, window: u32) -> Self {
        Self {
            link,
            id,
            inbox,
            window,
            read: 0,
            is_over: false,
        }
    }

    /// The next item, undecoded; `None` at the end.
    pub(crate) fn poll_item(
        &mut self,
        cx: &mut Context<'_>,
    ) -> Poll<Result<Option<Bytes>, EngineError>> {
        if self.is_over {
            return Poll::Ready(Ok(None));
        }
        Poll::Ready(match ready!(self.inbox.poll_take(cx)) {
            Taken::Item {
                item, has_ended, ..
            } => {
                // Once the process has ended a stream, it no longer knows it.
                if !has_ended {
                    self.grant();
                }
                Ok(Some(item))
            }
            Taken::End(end) => {
                self.is_over = true;
                end.map(|()| None)
            }
        })
    }

    /// The next item, undecoded; `None` at the end.
    ///
    /// # Cancel safety
    /// Cancel safe: if another branch wins, nothing was read.
    pub(crate) async fn undecoded(&mut self) -> Result<Option<Bytes>, EngineError> {
        std::future::poll_fn(|cx| self.poll_item(cx)).await
    }

    /// The next item; `None` at the end.
    ///
    /// # Cancel safety
    /// Cancel safe: if another branch wins, nothing was read.
    pub(crate) async fn item<T: DeserializeOwned>(&mut self) -> Result<Option<T>, EngineError> {
        let bytes = self.undecoded().await?;
        let item = bytes.map(|bytes| decode_payload(&bytes)).transpose();
        item.map_err(|error| {
            let message = format!(
                "the engine's process sent an unexpected answer: {}",
                error.detail()
            );
            EngineError::internal(message).with_source(error)
        })
    }

    /// The item of an answer that has at most one.
    pub(crate) async fn only<T: DeserializeOwned>(mut self) -> Result<Option<T>, EngineError> {
        let first = self.item().await?;
        if first.is_some() && self.item::<T>().await?.is_some() {
            return Err(EngineError::internal(
                "the engine's process sent two answers where one is expected",
            ));
        }
        Ok(first)
    }

    /// Ends the call for the reader and sends the reason to the process.
    pub(crate) fn cancel(mut self, reason: CancelReason) {
        self.is_over = true;
        self.link.cancel(self.id, reason);
    }

    /// Drops a call that was never sent.
    pub(crate) fn forget(mut self) {
        self.is_over = true;
    }

    /// Returns credit for the items read, half a window at a time.
    fn grant(&mut self) {
        self.read += 1;
        if self.read >= (self.window / 2).max(1) {
            let items = std::mem::take(&mut self.read);
            self.link
                .send(FrameKind::Credit, self.id, &Credit { items });
        }
    }
}

impl Drop for Call {
    fn drop(&mut self) {
        if !self.is_over {
            self.link.cancel(self.id, CancelReason::Client);
        }
    }
}
