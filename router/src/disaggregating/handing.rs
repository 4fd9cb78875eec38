//! [`Handing`]: the search for an instance that goes on with a request whose prompt is computed. It waits where there is none: what
//! the prefill instance did is not to be done again. [`TwoLegs`](super::stream::TwoLegs) begins it.

use std::sync::Arc;
use std::time::Duration;

use genset_backend_common::{
    CancelReason, EngineError, ErrorKind, GenerateRequest, RequestContext, RequestField,
    transfer::{KvTransfers, TransferParams},
};
use genset_runtime::InstanceId;

use super::Parts;
use super::metrics::Whole;
use crate::patience::Patience;
use crate::route::{Route, Routed};

/// A request between its legs.
pub(super) struct Handing {
    pub(super) parts: Arc<Parts>,
    /// The decode instances as they were when the request was begun.
    pub(super) decode: Arc<dyn Route>,
    pub(super) request: GenerateRequest,
    pub(super) ctx: RequestContext,
    pub(super) left_out: Vec<InstanceId>,
}

/// Who goes on.
pub(super) enum Taken {
    /// A decode instance, with the blocks of the prompt.
    Blocks(Routed),
    /// An instance that does all of it.
    Whole(Routed),
}

/// Why nobody goes on.
pub(super) enum Untaken {
    /// It is about the request, or about its blocks.
    Refused(EngineError),
    /// No instance took it in time, or too many were lost with it.
    Nobody(EngineError),
}

impl Handing {
    /// Asks decode instances to take the blocks, and where none does, any to do all of it; again and again until the wait is over.
    pub(super) async fn run(self, blocks: TransferParams) -> Result<Taken, Untaken> {
        let mut patience = Patience::new(self.parts.wait, &self.ctx);
        let mut left_out = &self.left_out[..];
        let mut unreadable: Option<EngineError> = None;
        let mut is_told = false;
        loop {
            let refusal = match &unreadable {
                // It would be the same again.
                Some(refusal) => refusal.clone(),
                None => match self.ask_decode(&blocks, left_out).await {
                    Ok(routed) => return Ok(Taken::Blocks(routed)),
                    Err(refusal) if is_about_transfer(&refusal) => refusal,
                    Err(error) => return Err(Untaken::Refused(error)),
                },
            };
            if !std::mem::replace(&mut is_told, true) {
                tracing::warn!(request_id = self.ctx.id(), error = %refusal, "no decode instance took the request over");
            }
            if self.ctx.has_lost_too_many() {
                return Err(Untaken::Nobody(refusal));
            }
            let (request, ctx) = (self.request.clone(), self.ctx.clone());
            let why = Whole::DecodeRefused;
            let last = match self.parts.ask_whole(why, request, ctx, left_out).await {
                Ok(routed) => {
                    self.parts.metrics.whole(why);
                    return Ok(Taken::Whole(routed));
                }
                Err(error) if error.may_go_elsewhere() => error,
                // The client is not at fault for what the instances disagree about.
                Err(_) => return Err(Untaken::Refused(KvTransfers::lost(refusal))),
            };
            if self.ctx.has_lost_too_many() {
                return Err(Untaken::Nobody(last));
            }
            if !patience.pause(&self.ctx).await {
                return Err(Untaken::Nobody(self.in_vain(refusal)));
            }
            if !refusal.may_go_elsewhere() {
                unreadable = Some(refusal);
            }
            // One that lost the request may be back, or was only cut off.
            left_out = if left_out.is_empty() {
                &self.left_out
            } else {
                &[]
            };
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

    /// The error of a request that nobody took in time.
    fn in_vain(&self, refusal: EngineError) -> EngineError {
        if self.ctx.time_left() == Some(Duration::ZERO) {
            return CancelReason::Deadline
                .to_error()
                .with_request_id(self.ctx.id());
        }
        if !refusal.may_go_elsewhere() {
            return KvTransfers::lost(refusal);
        }
        tracing::warn!(request_id = self.ctx.id(), error = %refusal, "no instance took the request over in time");
        // Clients read this message, and must not read every refusal's: an engine's may hold what its process printed.
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

/// Whether a refusal is not about the request itself.
fn is_about_transfer(error: &EngineError) -> bool {
    error.may_go_elsewhere() || error.at() == Some(&RequestField::Transfer.into())
}
