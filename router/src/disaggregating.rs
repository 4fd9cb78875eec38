//! [`Disaggregating`]: serves a request in two legs. A prefill instance computes the prompt and the first token, which is
//! streamed at once. A decode instance fetches the prompt's KV blocks and generates the rest.
//!
//! The layer sits above the layers that choose an instance, one for each [pool](pools), and below
//! [`Migrating`](crate::Migrating), which treats a lost leg as a lost instance: the request restarts with a prefill. It is for
//! models whose engine supports the roles; for others [`connect`](crate::connect) leaves it out.
//!
//! - A request is not split if its prompt is short or a pool it needs is empty: an aggregated instance serves it, or a decode
//!   instance computes the prompt itself.
//! - Both legs choose the first token; the second leg continues from it. A request that samples without a seed therefore gets
//!   one. If it cannot have one, the second leg's token counts.
//! - A request that may not migrate waits briefly here if the instances of all pools are gone; other requests wait in the layer
//!   above.
//! - A request whose prompt is computed waits for a decode instance as long as a migrating request does.
//! - Blocks that nobody will fetch are released: the request was cancelled, its client left, or no decode instance took it.

mod handing;
mod metrics;
mod pools;
mod stream;
#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use genset_backend_common::{
    Capabilities, EngineError, ErrorKind, GenerateRequest, Input, ModelCard, RequestContext,
    card::DEFAULT_MIGRATION_LIMIT, config::SamplingOption, log_limit::OncePerMinute,
    transfer::TransferParams,
};
use genset_runtime::{InstanceId, KvBlocksClient};
use tokio::time::Instant;

pub use self::metrics::Legs;
use self::metrics::{ModelLegs, Whole};
pub(crate) use self::pools::{PoolSet, Pools};
use self::stream::TwoLegs;
use crate::config::RouterConfig;
use crate::patience::Patience;
use crate::route::{Route, Routed};

/// How long a request that may not migrate waits when every instance that could serve it whole is gone or shutting down. A client
/// of one pool waits equally long by itself.
const SUCCESSOR_TIME: Duration = Duration::from_secs(1);

/// When requests are served in two legs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[cfg_attr(feature = "cli", derive(clap::Args))]
pub struct DisaggregationConfig {
    /// Prompts with fewer tokens to compute than this, less those that are cached, are not sent to prefill instances; 0 sends all
    #[cfg_attr(feature = "cli", arg(long = "prefill-threshold", env = "GENSET_PREFILL_THRESHOLD", value_name = "TOKENS",
        default_value_t = Self::default().prefill_threshold_tokens))]
    pub prefill_threshold_tokens: u32,
}

/// A layer that sends a request's prefill and decode to different instances.
pub(crate) struct Disaggregating {
    parts: Arc<Parts>,
}

/// State shared by the requests of a model.
struct Parts {
    pools: Pools,
    config: DisaggregationConfig,
    /// How long a request waits between its legs.
    wait: Duration,
    /// How long a request waits if it cannot start.
    successor_time: Duration,
    context_length_tokens: u32,
    /// What the engine supports.
    can: Capabilities,
    blocks: Option<KvBlocksClient>,
    metrics: ModelLegs,
    /// Limits the log: what instances disagree about concerns every request.
    logged: OncePerMinute,
}

impl Disaggregating {
    /// Creates the layer over the pools of `card`'s model. `blocks` releases KV blocks at their instance.
    pub(crate) fn new(
        pools: Pools,
        card: &ModelCard,
        config: &RouterConfig,
        blocks: Option<KvBlocksClient>,
        legs: &Legs,
    ) -> Self {
        let parts = Parts {
            pools,
            config: config.disaggregation,
            wait: config.migration.wait,
            successor_time: match card.migration_limit {
                0 => SUCCESSOR_TIME,
                _ => Duration::ZERO,
            },
            context_length_tokens: card.context_length_tokens,
            can: card.capabilities.clone(),
            blocks,
            metrics: legs.of(&card.name),
            logged: OncePerMinute::default(),
        };
        Self {
            parts: Arc::new(parts),
        }
    }
}

/// The pools for both legs.
struct Apart {
    prefill: Arc<dyn Route>,
    decode: Arc<dyn Route>,
}

impl Parts {
    /// Returns the pools for two legs, or the reason to serve the request whole.
    fn plan(&self, pools: &PoolSet, request: &GenerateRequest) -> Result<Apart, Whole> {
        if !pools.is_apart() {
            return Err(Whole::NotApart);
        }
        let Input::Tokens(prompt) = &request.input else {
            return Err(Whole::NoTokens);
        };
        let prefill = pools.prefill.clone().ok_or(Whole::NoPrefill)?;
        let decode = pools.decode.clone().ok_or(Whole::NoDecode)?;
        let threshold = self.config.prefill_threshold_tokens;
        if threshold > 0 {
            let prompt_tokens = u32::try_from(prompt.len()).unwrap_or(u32::MAX);
            let is_short = prompt_tokens < threshold
                || prompt_tokens.saturating_sub(decode.cached_tokens(request)) < threshold;
            if is_short {
                return Err(Whole::Short);
            }
        }
        Ok(Apart { prefill, decode })
    }

    /// Serves the request in one leg, and counts it. If all instances are gone, it waits for one unless another layer does.
    async fn whole(
        &self,
        why: Whole,
        request: &GenerateRequest,
        ctx: &RequestContext,
        left_out: &[InstanceId],
    ) -> Result<Routed, EngineError> {
        self.metrics.whole(why);
        let mut patience = Patience::new(self.successor_time, ctx);
        let mut refusal: Option<EngineError> = None;
        loop {
            let error = match self.ask_whole(why, request, ctx, left_out).await {
                Err(error) if may_be_tried_again(&error, ctx) => error,
                decided => return decided,
            };
            let is_gone = error.kind().is_instance_gone();
            // The client below does not retry lost instances for a while: it then returns `Unavailable`.
            let is_left_out = refusal.is_some() && error.kind() == ErrorKind::Unavailable;
            if !is_gone && !is_left_out {
                return Err(error);
            }
            let refusal = refusal.get_or_insert(error);
            if !patience.pause(ctx).await {
                return Err(refusal.clone());
            }
        }
    }

    /// Routes the request to instances that serve it in one leg.
    async fn ask_whole(
        &self,
        why: Whole,
        request: &GenerateRequest,
        ctx: &RequestContext,
        left_out: &[InstanceId],
    ) -> Result<Routed, EngineError> {
        let pools = self.pools.now();
        let aggregated = pools.aggregated.clone().map(|pool| (pool, None));
        let computing = Some(TransferParams::none());
        let decode = pools.decode.clone().map(|pool| (pool, computing));
        let mut ways = [aggregated, decode];
        if why == Whole::Short {
            // The decode pool first: it has the cached prefix.
            ways.reverse();
        }
        let mut failure = nobody();
        for (pool, transfer) in ways.into_iter().flatten() {
            let mut request = request.clone();
            request.transfer = transfer;
            match pool.route(request, ctx.clone(), left_out).await {
                Err(error) if may_be_tried_again(&error, ctx) => failure = error,
                decided => return decided,
            }
        }
        Err(failure)
    }

    /// Makes both legs sample the same first token. Returns false if the engine does not take a seed, or no seed with tokens of
    /// another instance.
    fn settle_chance(&self, request: &mut GenerateRequest) -> bool {
        let sampling = &mut request.sampling;
        if sampling.temperature == Some(0.0) || sampling.seed.is_some() {
            return true;
        }
        if request.resumed_tokens > 0 && !self.can.resume {
            return false;
        }
        if self.can.sampling.contains(&SamplingOption::Seed) {
            // Even without a temperature: the default of a third-party server may be to sample.
            sampling.seed = Some(rand::random());
            return true;
        }
        sampling.temperature.is_none()
    }

    /// Releases blocks that nobody will fetch.
    fn release(&self, transfer: &TransferParams) {
        if let Some(blocks) = &self.blocks {
            blocks.release(transfer);
        }
    }
}

/// Returns whether a request that a pool refused may go to another pool.
fn may_be_tried_again(error: &EngineError, ctx: &RequestContext) -> bool {
    error.may_go_elsewhere() && !ctx.is_cancelled() && !ctx.has_lost_too_many()
}

fn nobody() -> EngineError {
    let message = "no instance that can serve the whole request is available; try again later";
    EngineError::new(ErrorKind::Unavailable, message).with_retry_after(Duration::from_secs(1))
}

#[async_trait]
impl Route for Disaggregating {
    async fn route(
        &self,
        mut request: GenerateRequest,
        ctx: RequestContext,
        left_out: &[InstanceId],
    ) -> Result<Routed, EngineError> {
        let parts = &self.parts;
        // The limit covers both legs together.
        let ctx = ctx.with_loss_limit(DEFAULT_MIGRATION_LIMIT);
        let apart = match parts.plan(&parts.pools.now(), &request) {
            Ok(apart) => apart,
            Err(why) => return parts.whole(why, &request, &ctx, left_out).await,
        };
        let is_settled = parts.settle_chance(&mut request);
        // Over the wire, `route` returns with the first item: by then the prompt is computed.
        let since = Instant::now();
        let begun = apart
            .prefill
            .route(request.clone(), ctx.clone(), left_out)
            .await;
        match begun {
            Ok(routed) => {
                parts.metrics.apart();
                // The second leg gets the time that the first one leaves of the request's limit.
                let ctx = ctx.with_began(routed.began);
                let legs = TwoLegs::new(Arc::clone(parts), apart.decode, request, ctx, since);
                Ok(legs.begin(routed, is_settled, left_out))
            }
            Err(error) if may_be_tried_again(&error, &ctx) => {
                tracing::debug!(request_id = ctx.id(), %error, "no prefill instance took the request");
                let whole = parts
                    .whole(Whole::PrefillRefused, &request, &ctx, left_out)
                    .await;
                // The prefill pool's error is why the request could not be split.
                whole.map_err(|last| {
                    if last.kind() == ErrorKind::Unavailable {
                        error
                    } else {
                        last
                    }
                })
            }
            Err(error) => Err(error),
        }
    }
}
