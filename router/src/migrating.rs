//! [`Migrating`]: a running request survives the loss of its instance. The layer keeps the streamed tokens; when the instance is
//! lost or leaves, the request continues on another one from the same position.
//!
//! The layer sits above the layers that choose an instance and below the detokenizer; neither notices a migration. It handles
//! failures *after* an instance took the request; the layer below retries refusals before that. If the layer below knows no live
//! instance, the request waits here for one.
//!
//! - `resume` is pure: the kept tokens, and the request that resumes from them.
//! - `stream` carries one answer across its instances.
//! - `metrics` counts migrations, their reasons, and failures to migrate.

mod metrics;
mod resume;
mod stream;
#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use genset_backend_common::log_limit::OncePerMinute;
use genset_backend_common::memory::Memory;
use genset_backend_common::ports::Generate;
use genset_backend_common::{
    EngineError, GenerateRequest, MetricsRegistry, ModelCard, OutputStream, RequestContext,
};
#[cfg(feature = "cli")]
use genset_runtime::{byte_count, in_bytes, in_seconds, positive_seconds};
use tokio_util::sync::CancellationToken;

use self::metrics::{MigrationMetrics, ModelMetrics};
use self::resume::Kept;
pub(crate) use self::resume::{continued, without_seam};
use self::stream::{MigratingStream, Parts, await_instance, is_away};
use crate::route::Route;

/// How requests move, for every model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(feature = "cli", derive(clap::Args))]
pub struct MigrationConfig {
    /// How long a request waits for an instance when none is left, whether its answer has begun or not, in seconds
    ///
    /// Its deadline may end the wait before.
    #[cfg_attr(feature = "cli", arg(long = "migration-wait", env = "GENSET_MIGRATION_WAIT", value_name = "MIGRATION_WAIT",
        default_value = in_seconds(Self::default().wait), value_parser = positive_seconds))]
    pub wait: Duration,
    /// Most memory of prompts and tokens that are kept so that requests can move to another instance, in bytes
    ///
    /// Requests beyond it do not move.
    #[cfg_attr(feature = "cli", arg(long = "migration-memory", env = "GENSET_MIGRATION_MEMORY", value_name = "MIGRATION_MEMORY",
        default_value = in_bytes(Self::default().max_kept_bytes), value_parser = byte_count::<usize>))]
    pub max_kept_bytes: usize,
}

impl Default for MigrationConfig {
    fn default() -> Self {
        Self {
            wait: Duration::from_secs(5),
            max_kept_bytes: 256 << 20,
        }
    }
}

/// State shared by all migrating models: the limits, the memory budget and the metrics. Clones share state.
#[derive(Debug, Clone)]
pub struct Migrations {
    config: MigrationConfig,
    budget: Arc<Memory>,
    metrics: MigrationMetrics,
    /// Cancelled once no instance can take a request over any more.
    nobody_comes: CancellationToken,
}

impl Migrations {
    /// Registers the metrics, once per process.
    #[must_use]
    pub fn register(registry: &MetricsRegistry, config: MigrationConfig) -> Self {
        let metrics = MigrationMetrics::register(registry);
        Self {
            config,
            budget: Memory::of_process(config.max_kept_bytes, metrics.kept_bytes()),
            metrics,
            nobody_comes: CancellationToken::new(),
        }
    }

    /// From now on no request waits for an instance: this process is shutting down, so none would take it over in time.
    pub fn expect_nobody(&self) {
        self.nobody_comes.cancel();
    }
}

/// A layer that migrates requests when their instance is lost.
///
/// The model card bounds how often a request migrates, and how many instances it may lose before its answer begins. If the engine
/// declares `resume`, the answer is the same as without a failure. If it declares `resume_as_prompt`, the rest is an answer to a
/// longer prompt; a request that needs more than that migrates only before its first item. Requests of other engines also migrate
/// only before their first item.
pub struct Migrating {
    parts: Arc<Parts>,
}

impl Migrating {
    /// Creates the layer over `below` for the model of `card`.
    #[must_use]
    pub fn new(below: Arc<dyn Route>, card: &ModelCard, migrations: Migrations) -> Self {
        let parts = Parts {
            below,
            limit: card.migration_limit,
            context_length_tokens: card.context_length_tokens,
            capabilities: card.capabilities.clone(),
            config: migrations.config,
            metrics: ModelMetrics::new(migrations.metrics, &card.name),
            budget: migrations.budget,
            nobody_comes: migrations.nobody_comes,
            logged: OncePerMinute::default(),
        };
        Self {
            parts: Arc::new(parts),
        }
    }
}

genset_backend_common::debug_as!(|it| Migrating {
    limit: it.parts.limit,
    ..
});

#[async_trait]
impl Generate for Migrating {
    async fn generate(
        &self,
        request: GenerateRequest,
        ctx: RequestContext,
    ) -> Result<OutputStream, EngineError> {
        let ctx = ctx.with_loss_limit(self.parts.limit);
        let kept = Kept::of(&request, &self.parts.capabilities, &self.parts.budget);
        let below = &self.parts.below;
        let routed = match below.route(request.clone(), ctx.clone(), &[]).await {
            Err(refusal)
                if is_away(refusal.kind()) && !ctx.is_cancelled() && !ctx.has_lost_too_many() =>
            {
                let waiting = await_instance(&self.parts, request.clone(), &ctx, refusal);
                waiting.await?
            }
            decided => decided?,
        };
        // Later instances count the time limit from the first one's start. The wait for that one does not count.
        let ctx = ctx.with_began(routed.began);
        let stream = MigratingStream::new(Arc::clone(&self.parts), request, ctx, kept, routed);
        Ok(OutputStream::from_raw(Box::pin(stream)))
    }
}
