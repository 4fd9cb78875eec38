//! An instance whose tokens are ready, with and without the migrating layer above it.

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

/// Streams as many tokens as requested, one per item.
pub(crate) struct Ready;

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

/// Returns the layer over the instance.
pub(crate) fn migrating() -> Migrating {
    let can = Capabilities::tokens().with_resume();
    let config = EngineConfig::new("m", 1 << 20).with_capabilities(can);
    let migrations = Migrations::register(&MetricsRegistry::default(), MigrationConfig::default());
    let card = ModelCard::from_config(&config);
    Migrating::new(Arc::new(Ready), &card, migrations)
}

/// Sends a request for `tokens` tokens; returns how many came.
pub(crate) fn read(engine: &dyn Generate, tokens: u32) -> u32 {
    let mut request = GenerateRequest::from_tokens("m", vec![1, 2]);
    request.stop.max_tokens = Some(tokens);
    let reading = async {
        let outputs = engine.generate(request, RequestContext::new("r")).await;
        let mut outputs = outputs.unwrap();
        let mut given = 0;
        while let Some(item) = outputs.next().await {
            given += std::hint::black_box(item.unwrap()).token_count();
        }
        given
    };
    reading.now_or_never().unwrap()
}
