//! The `kv_blocks` endpoint of prefill workers: transfers KV blocks to decode workers over the request plane, with its flow
//! control.
//!
//! It is not listed in discovery. The [`TransferParams`] of a sequence hold the address of its blocks, so they can be fetched as
//! long as the worker is reachable, also while it drains.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use futures_util::{StreamExt, stream};
use genset_backend_common::{
    EngineError, ErrorKind, RequestContext, RequestField,
    transfer::{KvAddress, KvBytes, KvCarrier, KvSource, KvTransfers, TransferParams},
};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::component::Runtime;
use crate::discovery::Address;
use crate::names::EndpointName;
use crate::plane::{self, Encoded, Handler, ResponseStream};

/// Time limit of a release, which runs in the background. If it fails, the blocks expire by themselves.
const RELEASE_TIMEOUT: Duration = Duration::from_secs(5);

/// The maximum size of an item in bytes.
const ITEM_BYTES: usize = 256 << 10;

/// A request to the `kv_blocks` endpoint.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum KvBlocksRequest {
    /// Fetches the blocks held under these data, in pieces.
    Fetch(Value),
    /// Frees the blocks. The response is empty.
    Release(Value),
}

/// Serves the blocks that an engine holds.
pub(crate) struct KvBlocksHandler(pub(crate) Arc<dyn KvSource>);

#[async_trait]
impl Handler<KvBlocksRequest, Encoded> for KvBlocksHandler {
    async fn handle(
        &self,
        request: KvBlocksRequest,
        ctx: RequestContext,
    ) -> Result<ResponseStream<Encoded>, EngineError> {
        match request {
            KvBlocksRequest::Fetch(data) => {
                let pieces = self.0.fetch(data, ctx).await?;
                Ok(Box::pin(
                    pieces.flat_map(|piece| stream::iter(items(piece))),
                ))
            }
            KvBlocksRequest::Release(data) => {
                self.0.release(&data);
                Ok(Box::pin(stream::empty()))
            }
        }
    }
}

/// Splits a piece of an engine's data into items that stay in the CPU cache while they are read and written.
fn items(piece: Result<Bytes, EngineError>) -> impl Iterator<Item = Result<Encoded, EngineError>> {
    let mut rest = Some(piece);
    std::iter::from_fn(move || match rest.take()? {
        Ok(mut bytes) => {
            let item = bytes.split_to(bytes.len().min(ITEM_BYTES));
            rest = (!bytes.is_empty()).then_some(Ok(bytes));
            Some(Ok(Encoded(item)))
        }
        Err(error) => Some(Err(error)),
    })
}

/// Fetches and releases KV blocks of other workers.
#[derive(Debug, Clone)]
pub struct KvBlocksClient {
    runtime: Runtime,
}

impl KvBlocksClient {
    /// Creates a client on the request plane of `runtime`.
    #[must_use]
    pub fn new(runtime: &Runtime) -> Self {
        Self {
            runtime: runtime.clone(),
        }
    }

    /// Tells the worker that holds the blocks that nobody will fetch them, in a background task. If that fails, the blocks are
    /// freed when they expire.
    pub fn release(&self, transfer: &TransferParams) {
        let Some(source) = transfer.source.clone() else {
            return;
        };
        let (client, request) = (
            self.clone(),
            KvBlocksRequest::Release(transfer.data.clone()),
        );
        let release = async move {
            let ctx = RequestContext::new("release");
            let released = async {
                let mut none = client.call(&source, request, ctx).await?;
                while let Some(piece) = none.next().await {
                    piece?;
                }
                Ok::<(), EngineError>(())
            };
            match tokio::time::timeout(RELEASE_TIMEOUT, released).await {
                Ok(Ok(())) => {}
                Ok(Err(error)) => tracing::debug!(%error, "KV blocks were not released"),
                Err(_) => tracing::debug!("KV blocks were not released in time"),
            }
        };
        self.runtime.spawn_detached(release);
    }

    async fn call(
        &self,
        source: &KvAddress,
        request: KvBlocksRequest,
        ctx: RequestContext,
    ) -> Result<ResponseStream<Encoded>, EngineError> {
        let endpoint: EndpointName = source
            .endpoint
            .parse()
            .map_err(|error| EngineError::invalid_argument(RequestField::Transfer, error))?;
        let address = Address {
            plane: source.plane.clone(),
            location: source.location.clone(),
        };
        plane::call(&**self.runtime.plane(), &address, &endpoint, request, ctx).await
    }
}

#[async_trait]
impl KvCarrier for KvBlocksClient {
    async fn fetch(
        &self,
        transfer: &TransferParams,
        ctx: RequestContext,
    ) -> Result<KvBytes, EngineError> {
        let source = transfer.source.as_ref();
        let source = source.ok_or_else(|| KvTransfers::lost("they have no address"))?;
        let request = KvBlocksRequest::Fetch(transfer.data.clone());
        let pieces = self.call(source, request, ctx).await.map_err(not_ours)?;
        Ok(Box::pin(pieces.map(|piece| match piece {
            Ok(Encoded(bytes)) => Ok(bytes),
            Err(error) => Err(not_ours(error)),
        })))
    }
}

/// Converts an error of the other worker. Its loss or its fault must not be mistaken for one of the calling worker.
fn not_ours(error: EngineError) -> EngineError {
    match error.kind() {
        ErrorKind::CannotConnect
        | ErrorKind::Disconnected
        | ErrorKind::EngineShutdown
        | ErrorKind::Unavailable
        | ErrorKind::Overloaded
        | ErrorKind::NotFound
        | ErrorKind::Internal => KvTransfers::lost(&error).with_source(error),
        ErrorKind::InvalidArgument
        | ErrorKind::ContextLengthExceeded
        | ErrorKind::Unsupported
        | ErrorKind::StreamIncomplete
        | ErrorKind::DeadlineExceeded
        | ErrorKind::Cancelled => error,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_piece_leaves_in_items_and_an_error_as_it_is() {
        let piece = Bytes::from(vec![7; 2 * ITEM_BYTES + 1]);
        let sent: Vec<Bytes> = items(Ok(piece.clone()))
            .map(|item| item.map(|Encoded(bytes)| bytes).unwrap())
            .collect();
        assert_eq!(sent.iter().map(Bytes::len).max(), Some(ITEM_BYTES));
        assert_eq!(sent.concat(), piece);
        let mut failed = items(Err(KvTransfers::lost("gone")));
        failed.next().unwrap().unwrap_err();
        assert!(failed.next().is_none());
    }

    /// As where the holder's engine panics while it reads them: the worker that asked for them is well.
    #[test]
    fn a_fault_of_the_holder_is_that_its_blocks_are_lost() {
        let error = not_ours(EngineError::internal("the endpoint's handler panicked"));
        assert_eq!(error.kind(), ErrorKind::StreamIncomplete);
    }

    /// A router then asks an instance that computes the whole request.
    #[tokio::test]
    async fn blocks_of_an_endpoint_that_is_none_are_refused_as_the_requests_field() {
        let source = KvAddress {
            plane: "memory".into(),
            location: "1".into(),
            endpoint: "a.b.c.d".into(),
        };
        let transfer = TransferParams {
            source_worker_id: 1,
            source: Some(Box::new(source)),
            data: Value::Null,
        };
        let client = KvBlocksClient::new(&Runtime::in_process());
        let fetched = client.fetch(&transfer, RequestContext::new("r")).await;
        let Err(error) = fetched else {
            panic!("there is no such endpoint");
        };
        assert_eq!(error.kind(), ErrorKind::InvalidArgument);
        assert_eq!(error.at(), Some(&RequestField::Transfer.into()));
    }
}
