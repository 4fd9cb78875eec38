//! [`Handing`]: finds a decode instance for a request whose prompt is computed. It waits if there is none, so that the prefill is
//! not repeated. [`TwoLegs`](super::stream::TwoLegs) starts it.

use std::sync::Arc;
use std::time::Duration;

use genset_backend_common::{
    CancelReason, EngineError, ErrorKind, GenerateRequest, RequestContext, RequestField, TokenId,
    transfer::{KvTransfers, TransferParams},
};
use genset_runtime::InstanceId;

use super::Parts;
use super::metrics::Whole;
use crate::migrating::continued;
use crate::patience::Patience;
use crate::route::{Route, Routed};

/// A request between its legs.
pub(super) struct Handing {
    pub(super) parts: Arc<Parts>,
    /// The decode pool at the start of the request.
    pub(super) decode: Arc<dyn Route>,
    pub(super) request: GenerateRequest,
    /// The tokens of the answer after which an instance without the blocks continues.
    pub(super) given: Vec<TokenId>,
    pub(super) ctx: RequestContext,
    pub(super) left_out: Vec<InstanceId>,
}

/// The instance that continues the request.
pub(super) enum Taken {
    /// A decode instance, with the blocks of the prompt.
    Blocks(Routed),
    /// An instance that computes the prompt itself.
    Whole(Routed),
}

/// Why no instance continues the request.
pub(super) enum Untaken {
    /// The error concerns the request or its blocks.
    Refused(EngineError),
    /// No instance took it in time, or the request lost too many instances.
    Nobody(EngineError),
}

impl Handing {
    /// Offers the blocks to decode instances; if none takes them, asks any instance to serve the whole request. Retries until the
    /// wait is over.
    pub(super) async fn run(self, blocks: TransferParams) -> Result<Taken, Untaken> {
        let mut patience = Patience::new(self.parts.wait, &self.ctx);
        let mut left_out = &self.left_out[..];
        // The refusal after which the blocks are offered no more.
        let mut useless: Option<EngineError> = None;
        let mut is_told = false;
        loop {
            let refusal = match &useless {
                // The decode pool would refuse again.
                Some(refusal) => refusal.clone(),
                None => match self.ask_decode(&blocks, left_out).await {
                    Ok(routed) => return Ok(Taken::Blocks(routed)),
                    Err(refusal) if is_about_transfer(&refusal) => refusal,
                    Err(error) => return Err(Untaken::Refused(error)),
                },
            };
            if !std::mem::replace(&mut is_told, true) {
                self.tell(&refusal);
            }
            if self.ctx.has_lost_too_many() {
                return Err(Untaken::Nobody(refusal));
            }
            let why = Whole::DecodeRefused;
            let request = continued(&self.request, &self.given);
            let whole = (self.parts).ask_whole(why, &request, &self.ctx, left_out);
            let last = match whole.await {
                Ok(routed) => {
                    self.parts.metrics.whole(why);
                    return Ok(Taken::Whole(routed));
                }
                Err(error) if error.may_go_elsewhere() => error,
                // The client did not cause a disagreement between instances.
                Err(_) => return Err(Untaken::Refused(KvTransfers::lost(refusal))),
            };
            if self.ctx.has_lost_too_many() {
                return Err(Untaken::Nobody(last));
            }
            if !patience.pause(&self.ctx).await {
                return Err(Untaken::Nobody(self.in_vain(refusal)));
            }
            if are_useless(&refusal) {
                useless = Some(refusal);
            }
            // An instance that lost the request may be back, or was only disconnected.
            left_out = if left_out.is_empty() {
                &self.left_out
            } else {
                &[]
            };
        }
    }

    /// Logs the first refusal of the decode pool.
    fn tell(&self, refusal: &EngineError) {
        let (request_id, kind) = (self.ctx.id(), refusal.kind());
        if let Some(unlogged) = self.parts.logged.unlogged(kind.name()) {
            tracing::warn!(request_id, error = %refusal, unlogged, "no decode instance took the request over; further requests are only counted for a minute");
        } else {
            tracing::debug!(request_id, error = %refusal, "no decode instance took the request over");
        }
    }

    async fn ask_decode(
        &self,
        blocks: &TransferParams,
        left_out: &[InstanceId],
    ) -> Result<Routed, EngineError> {
        let now = self.parts.pools.now().decode.clone();
        let decode = now.unwrap_or_else(|| Arc::clone(&self.decode));
        let mut request = self.request.clone();
        request.transfer = Some(blocks.clone());
        decode.route(request, self.ctx.clone(), left_out).await
    }

    /// Returns the error of a request that no instance took in time.
    fn in_vain(&self, refusal: EngineError) -> EngineError {
        if self.ctx.time_left() == Some(Duration::ZERO) {
            return CancelReason::Deadline
                .to_error()
                .with_request_id(self.ctx.id());
        }
        if !refusal.may_go_elsewhere() {
            return KvTransfers::lost(refusal);
        }
        if let Some(unlogged) = self.parts.logged.unlogged("in vain") {
            tracing::warn!(request_id = self.ctx.id(), error = %refusal, unlogged, "no instance took the request over in time; further requests are only counted for a minute");
        }
        // Clients read this message. It must not include a refusal's text: an engine's may contain process output.
        let message = format!(
            "no instance took the request over from its prefill instance within {} s ({}); send the request again",
            self.parts.wait.as_secs_f64(),
            refusal.kind()
        );
        EngineError::new(ErrorKind::Unavailable, message)
            .with_retry_after(Duration::from_secs(1))
            .with_source(refusal)
    }
}

/// Returns whether a refusal is not about the request itself.
fn is_about_transfer(error: &EngineError) -> bool {
    error.may_go_elsewhere() || error.at() == Some(&RequestField::Transfer.into())
}

/// Returns whether no decode instance can use the blocks: it cannot read them, or they are lost.
fn are_useless(refusal: &EngineError) -> bool {
    !refusal.may_go_elsewhere() || refusal.kind() == ErrorKind::StreamIncomplete
}
