//! Migration costs no allocation per token: only when the capacity for kept tokens doubles.
//!
//! A separate test binary, because it sets its own allocator.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "../../frontend/tests/allocations/counting.rs"]
#[allow(dead_code, reason = "the frontend's tests need the rest")]
mod counting;

use std::sync::Arc;

use futures_util::{FutureExt, StreamExt, stream};
use genset_backend_common::output::{Finish, Output, OutputStream};
use genset_backend_common::ports::Generate;
use genset_backend_common::{
    Capabilities, EngineConfig, EngineError, GenerateRequest, MetricsRegistry, ModelCard,
    RequestContext, async_trait,
};
use genset_router::{Holder, Migrating, MigrationConfig, Migrations, Route, Routed};
use genset_runtime::InstanceId;
use tokio::time::Instant;

#[global_allocator]
static ALLOCATOR: counting::Counting = counting::Counting;

/// An instance that streams as many tokens as requested.
struct Ready;

#[async_trait]
impl Generate for Ready {
    async fn generate(
        &self,
        request: GenerateRequest,
        ctx: RequestContext,
    ) -> Result<OutputStream, EngineError> {
        Ok(self.route(request, ctx, &[]).await?.outputs)
    }
}

#[async_trait]
impl Route for Ready {
    async fn route(
        &self,
        request: GenerateRequest,
        _ctx: RequestContext,
        _left_out: &[InstanceId],
    ) -> Result<Routed, EngineError> {
        let tokens = request.stop.max_tokens.unwrap();
        let end = Finish::length().into_finished(2, tokens);
        let items = (0..tokens).map(|token| Ok(Output::from(token)));
        let end = stream::once(async { Ok(Output::Finished(Box::new(end))) });
        Ok(Routed {
            holder: Holder::One(InstanceId(1)),
            began: Instant::now(),
            outputs: OutputStream::from_raw(Box::pin(stream::iter(items).chain(end))),
        })
    }
}

/// Counts the allocations of a request for `tokens` tokens.
fn allocations(engine: &dyn Generate, tokens: u32) -> u64 {
    let mut request = GenerateRequest::from_tokens("m", vec![1, 2]);
    request.stop.max_tokens = Some(tokens);
    let before = counting::allocations();
    let reading = async {
        let mut outputs = engine.generate(request, RequestContext::new("r")).await;
        let mut given = 0;
        while let Some(item) = outputs.as_mut().unwrap().next().await {
            given += item.unwrap().token_count();
        }
        given
    };
    assert_eq!(reading.now_or_never(), Some(tokens));
    counting::allocations() - before
}

#[test]
fn a_token_of_a_request_that_may_move_allocates_nothing() {
    let can = Capabilities::tokens().with_resume();
    let config = EngineConfig::new("m", 1 << 20).with_capabilities(can);
    let migrations = Migrations::register(&MetricsRegistry::default(), MigrationConfig::default());
    let card = ModelCard::from_config(&config);
    let layer = Migrating::new(Arc::new(Ready), &card, migrations);
    let extra = |tokens| allocations(&layer, tokens) - allocations(&Ready, tokens);
    // Six more doublings for thousands of tokens.
    let (few, many) = (extra(64), extra(4096));
    assert_eq!(many - few, 6, "{few} and {many}");
    assert!(few < 8, "{few}");
}
