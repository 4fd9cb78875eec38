//! [`Route`]: what a layer needs of the layer below.

use async_trait::async_trait;
use genset_backend_common::ports::Generate;
use genset_backend_common::{EngineError, GenerateRequest, RequestContext};
use genset_runtime::{GenerateClient, InstanceId};

pub use genset_runtime::{Holder, Routed};

/// Answers `generate`, and says who does it. A layer that moves a request from one instance to another needs both: whom to
/// leave out, and who was asked.
#[async_trait]
pub trait Route: Generate {
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
