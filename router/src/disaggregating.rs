//! [`Disaggregating`]: a request in two legs. A prefill instance computes the prompt and gives the first token, which is passed
//! on at once. A decode instance fetches the KV blocks of the prompt and gives the rest.
//!
//! It stands above the layers that choose an instance, one for each [pool](pools), and below [`Migrating`](crate::Migrating),
//! to which a lost leg is a lost instance: the request begins anew with a prefill. It is for models whose engine plays the
//! roles; for others [`connect`](crate::connect) leaves it out.
//!
//! - A request stays whole when its prompt is short, and when a pool it would need has no instance: aggregated instances take
//!   it, or decode instances are told to compute the prompt themselves.
//! - Both legs choose the first token, the second one to go on from it. So a request that leaves its seed to chance gets one; where
//!   it may have none, the second leg's token is the one that counts.
//! - A request that may not move waits a moment here where the instances of all pools are gone; the layer above has others wait.
//! - A request whose prompt is computed waits where no instance goes on with it, as one that moves does.
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
    EngineError, ErrorKind, GenerateRequest, Input, ModelCard, RequestContext,
    card::DEFAULT_MIGRATION_LIMIT, config::SamplingOption, transfer::TransferParams,
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

/// How long a request waits that may not move, where all instances that it could go to whole are gone or going. A client of one pool
/// waits as long by itself.
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

/// A layer that has prompts computed by one instance and answers by another.
pub(crate) struct Disaggregating {
    parts: Arc<Parts>,
}

/// What the requests of a model have in common.
struct Parts {
    pools: Pools,
    config: DisaggregationConfig,
    /// How long a request waits between its legs.
    wait: Duration,
    /// How long it waits where it cannot begin.
    successor_time: Duration,
    context_length_tokens: u32,
    /// Whether a seed decides what is chosen by chance.
    has_seeds: bool,
    /// Whether a request with a seed may go on from another instance's tokens.
    resumes_exactly: bool,
    blocks: Option<KvBlocksClient>,
    metrics: ModelLegs,
}

impl Disaggregating {
    /// Over the pools of the model of `card`. `blocks` reaches the KV blocks that are to be released.
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
            has_seeds: card.capabilities.sampling.contains(&SamplingOption::Seed),
            resumes_exactly: card.capabilities.resume,
            blocks,
            metrics: legs.of(&card.name),
        };
        Self {
            parts: Arc::new(parts),
        }
    }
}

/// The instances of both legs.
struct Apart {
    prefill: Arc<dyn Route>,
    decode: Arc<dyn Route>,
}

impl Parts {
    /// Whether the request goes in two legs, or why it stays whole.
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

    /// Serves the request in one leg, and counts it. Where no instance is there any more it waits for one, if nobody else does.
    async fn whole(
        &self,
        why: Whole,
        request: GenerateRequest,
        ctx: RequestContext,
        left_out: &[InstanceId],
    ) -> Result<Routed, EngineError> {
        self.metrics.whole(why);
        let mut patience = Patience::new(self.successor_time, &ctx);
        let mut refusal: Option<EngineError> = None;
        loop {
            let asked = self.ask_whole(why, request.clone(), ctx.clone(), left_out);
            let error = match asked.await {
                Err(error) if may_be_tried_again(&error, &ctx) => error,
                decided => return decided,
            };
            let is_gone = error.kind().is_instance_gone();
            // Those that were gone are not asked again for a while.
            let is_left_out = refusal.is_some() && error.kind() == ErrorKind::Unavailable;
            if !is_gone && !is_left_out {
                return Err(error);
            }
            let refusal = refusal.get_or_insert(error);
            if !patience.pause(&ctx).await {
                return Err(refusal.clone());
            }
        }
    }

    /// Asks instances to serve the request in one leg.
    async fn ask_whole(
        &self,
        why: Whole,
        request: GenerateRequest,
        ctx: RequestContext,
        left_out: &[InstanceId],
    ) -> Result<Routed, EngineError> {
        let pools = self.pools.now();
        let aggregated = pools.aggregated.clone().map(|pool| (pool, None));
        let computing = Some(TransferParams::none());
        let decode = pools.decode.clone().map(|pool| (pool, computing));
        let mut ways = [aggregated, decode];
        if why == Whole::Short {
            // Where its cache was counted.
            ways.reverse();
        }
        let mut failure = nobody();
        for (pool, transfer) in ways.into_iter().flatten() {
            let mut request = request.clone();
            request.transfer = transfer;
            match pool.route(request, ctx.clone(), left_out).await {
                Err(error) if may_be_tried_again(&error, &ctx) => failure = error,
                decided => return decided,
            }
        }
        Err(failure)
    }

    /// Leaves nothing to chance that both legs decide. False where the engine takes no seed, or none with tokens of another
    /// instance.
    fn settle_chance(&self, request: &mut GenerateRequest) -> bool {
        let sampling = &mut request.sampling;
        if sampling.temperature == Some(0.0) || sampling.seed.is_some() {
            return true;
        }
        if request.resumed_tokens > 0 && !self.resumes_exactly {
            return false;
        }
        if self.has_seeds {
            // Also without a temperature: the default of a server of another project may be to draw.
            sampling.seed = Some(rand::random());
            return true;
        }
        sampling.temperature.is_none()
    }

    /// Nobody will fetch these blocks.
    fn release(&self, transfer: &TransferParams) {
        if let Some(blocks) = &self.blocks {
            blocks.release(transfer);
        }
    }
}

/// Whether a request that a pool refused may go to another one.
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
        // Of both legs together.
        let ctx = ctx.with_loss_limit(DEFAULT_MIGRATION_LIMIT);
        let apart = match parts.plan(&parts.pools.now(), &request) {
            Ok(apart) => apart,
            Err(why) => return parts.whole(why, request, ctx, left_out).await,
        };
        let is_settled = parts.settle_chance(&mut request);
        // Over the wire an instance takes a request with its first item: by then the prompt is computed.
        let since = Instant::now();
        let begun = apart
            .prefill
            .route(request.clone(), ctx.clone(), left_out)
            .await;
        match begun {
            Ok(routed) => {
                parts.metrics.apart();
                // The second leg has what the first one leaves of the request's time.
                let ctx = ctx.with_began(since);
                let legs = TwoLegs::new(Arc::clone(parts), apart.decode, request, ctx, since);
                Ok(legs.begin(routed, is_settled, left_out))
            }
            Err(error) if may_be_tried_again(&error, &ctx) => {
                tracing::debug!(request_id = ctx.id(), %error, "no prefill instance took the request");
                let whole = parts
                    .whole(Whole::PrefillRefused, request, ctx, left_out)
                    .await;
                // What the prefill instances said is why it was to be apart in vain.
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
