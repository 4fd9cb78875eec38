//! [`Route`]: the interface of a layer to the layer below.

use std::sync::Arc;

use async_trait::async_trait;
use genset_backend_common::ports::Generate;
use genset_backend_common::{EngineError, GenerateRequest, OutputStream, RequestContext};
use genset_runtime::{GenerateClient, InstanceId};

pub use genset_runtime::{Holder, Routed};

/// Serves `generate`, and reports which instance does. A layer that migrates requests needs both: the instances to leave out, and
/// the instance that was asked.
#[async_trait]
pub trait Route: Send + Sync + 'static {
    /// Starts one request at an instance not in `left_out`.
    ///
    /// # Errors
    /// A typed refusal before any token; `Unavailable` when no instance may be asked.
    ///
    /// # Cancel safety
    /// Dropping the future, or the stream it returns, cancels the request.
    async fn route(
        &self,
        request: GenerateRequest,
        ctx: RequestContext,
        left_out: &[InstanceId],
    ) -> Result<Routed, EngineError>;

    /// Starts one request at any instance, for callers that need not know which.
    ///
    /// # Errors
    /// As [`route`](Self::route).
    ///
    /// # Cancel safety
    /// As [`route`](Self::route).
    async fn generate(
        &self,
        request: GenerateRequest,
        ctx: RequestContext,
    ) -> Result<OutputStream, EngineError> {
        Ok(self.route(request, ctx, &[]).await?.outputs)
    }

    /// Returns the most prompt tokens of the request that one instance is known to have cached; 0 if the layer does not track
    /// this.
    fn cached_tokens(&self, _request: &GenerateRequest) -> u32 {
        0
    }
}

#[async_trait]
impl Route for GenerateClient {
    async fn route(
        &self,
        request: GenerateRequest,
        ctx: RequestContext,
        left_out: &[InstanceId],
    ) -> Result<Routed, EngineError> {
        Self::route(self, request, ctx, left_out).await
    }
}

/// Adapts a layer to `Generate`, without the answering instance.
pub(crate) struct Whoever(pub(crate) Arc<dyn Route>);

#[async_trait]
impl Generate for Whoever {
    async fn generate(
        &self,
        request: GenerateRequest,
        ctx: RequestContext,
    ) -> Result<OutputStream, EngineError> {
        Ok(self.0.route(request, ctx, &[]).await?.outputs)
    }
}
