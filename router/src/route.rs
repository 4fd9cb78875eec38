//! [`Route`]: what a layer needs of the layer below.

use std::sync::Arc;

use async_trait::async_trait;
use genset_backend_common::ports::Generate;
use genset_backend_common::{EngineError, GenerateRequest, OutputStream, RequestContext};
use genset_runtime::{GenerateClient, InstanceId};

pub use genset_runtime::{Holder, Routed};

/// Answers `generate`, and says who does it. A layer that moves a request from one instance to another needs both: whom to
/// leave out, and who was asked.
#[async_trait]
pub trait Route: Send + Sync + 'static {
    /// Starts one request at an instance that is none of `left_out`.
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

    /// Starts one request at any instance, for those who need not know which.
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

    /// The most tokens of the request's prompt that an instance is known to have cached. 0 where nobody looks.
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

/// The answers of a layer, whoever gives them.
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
