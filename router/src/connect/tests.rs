//! The whole stack, over listed workers, some of which are gone.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use genset_backend_common::ports::Generate;
use genset_backend_common::{
    Capabilities, EngineConfig, EngineError, ErrorKind, Finish, GenerateRequest, MetricsRegistry,
    ModelCard, Output, RequestContext, Role, output,
};
use genset_runtime::discovery::{Address, Discovery, InstanceRecord, Lease, MemoryDiscovery};
use genset_runtime::plane::{Handler, MemoryPlane, ResponseStream};
use genset_runtime::{
    EjectionConfig, Endpoint, InstanceId, ModelDirectory, Runtime, SelectionMode, Serving,
};
use tokio::time::Instant;

use super::{Layers, connect};
use crate::config::{RouterConfig, RouterMode};
use crate::testing::read;

struct Answers;

#[async_trait]
impl Handler<GenerateRequest, Output> for Answers {
    async fn handle(
        &self,
        request: GenerateRequest,
        ctx: RequestContext,
    ) -> Result<ResponseStream<Output>, EngineError> {
        let ctx = ctx.with_prompt_tokens(request.prompt_tokens().unwrap_or_default());
        let outputs = output::stream(ctx, |out| async move {
            out.token(7).await?;
            Ok(Finish::length())
        });
        Ok(Box::pin(outputs))
    }
}

struct Broken;

#[async_trait]
impl Handler<GenerateRequest, Output> for Broken {
    async fn handle(
        &self,
        _request: GenerateRequest,
        _ctx: RequestContext,
    ) -> Result<ResponseStream<Output>, EngineError> {
        Err(EngineError::internal("the GPU is in an error state"))
    }
}

struct Site {
    runtime: Runtime,
    discovery: MemoryDiscovery,
    card: ModelCard,
}

impl Site {
    fn new(migration_limit: u32) -> Self {
        let can = Capabilities::tokens().with_roles(Role::ALL);
        let config = EngineConfig::new("m", 64).with_capabilities(can);
        let mut card = ModelCard::from_config(&config);
        card.migration_limit = migration_limit;
        let discovery = MemoryDiscovery::new();
        Self {
            runtime: Runtime::new(Arc::new(discovery.clone()), Arc::new(MemoryPlane::new())),
            discovery,
            card,
        }
    }

    fn of_role(&self, role: Role) -> (Endpoint, ModelCard) {
        let name = format!("test.{role}.generate").parse().unwrap();
        let mut card = self.card.clone();
        card.role = role;
        (self.runtime.endpoint(name), card)
    }

    /// Starts a worker, listed until the returned value is dropped.
    async fn live(&self, role: Role) -> Serving {
        self.serve(role, 1, Arc::new(Answers)).await
    }

    async fn serve(
        &self,
        role: Role,
        id: u64,
        handler: Arc<dyn Handler<GenerateRequest, Output>>,
    ) -> Serving {
        let (endpoint, card) = self.of_role(role);
        let serving = endpoint.serve_as(InstanceId(id), handler).await.unwrap();
        serving.list(Some(card)).await.unwrap();
        serving
    }

    /// Lists a killed worker, for as long as its lease lives.
    async fn dead(&self, role: Role) -> Box<dyn Lease> {
        let (endpoint, card) = self.of_role(role);
        let record = InstanceRecord {
            endpoint: endpoint.name().clone(),
            instance: InstanceId(2),
            address: Address {
                plane: "memory".into(),
                location: "nowhere".into(),
            },
            card: Some(card),
            started_ms: 0,
        };
        let lease = self.discovery.lease().await.unwrap();
        lease.put(record.to_entry().unwrap()).await.unwrap();
        lease
    }

    /// Stacks the layers over `pools` pools.
    async fn stack(
        &self,
        pools: usize,
        config: RouterConfig,
    ) -> (ModelDirectory, Arc<dyn Generate>) {
        let directory = ModelDirectory::follow(&self.runtime);
        let mut models = directory.subscribe();
        let is_known = models.wait_for(|models| {
            let model = models.get("m");
            model.is_some_and(|model| model.pools.len() == pools)
        });
        let model = is_known.await.unwrap()["m"].clone();
        let layers = Layers::register(&MetricsRegistry::default(), config);
        let patience = Duration::from_secs(120);
        let stack = connect(&directory, &model, &layers, patience)
            .await
            .unwrap();
        (directory, stack)
    }

    /// Sends a request with `pools` pools; returns how it ends, and after what time.
    async fn ask(&self, pools: usize) -> (Result<(), ErrorKind>, Duration) {
        let (_directory, stack) = self.stack(pools, RouterConfig::default()).await;
        let since = Instant::now();
        (end_of_one(&*stack).await, since.elapsed())
    }
}

/// Sends a request; returns how it ends.
async fn end_of_one(stack: &dyn Generate) -> Result<(), ErrorKind> {
    let request = GenerateRequest::from_tokens("m", vec![1, 2, 3]);
    let end = match stack.generate(request, RequestContext::new("r")).await {
        Ok(outputs) => read(outputs).await.end,
        Err(error) => Err(error),
    };
    end.map(drop).map_err(|error| error.kind())
}

#[tokio::test(start_paused = true)]
async fn no_request_waits_for_a_pool_whose_last_worker_was_killed_where_another_takes_it() {
    for (limit, gone) in [
        (3, Role::Prefill),
        (3, Role::Aggregated),
        (0, Role::Prefill),
        (0, Role::Aggregated),
    ] {
        let site = Site::new(limit);
        let _dead = site.dead(gone).await;
        let _live = site.live(Role::Decode).await;
        assert_eq!(site.ask(2).await, (Ok(()), Duration::ZERO), "{gone}");
    }
}

#[tokio::test(start_paused = true)]
async fn where_nobody_is_left_a_request_waits_as_long_as_it_may_and_no_longer() {
    let refused = Err(ErrorKind::CannotConnect);
    for (limit, seconds) in [(3, 5), (0, 1)] {
        let site = Site::new(limit);
        let _dead = site.dead(Role::Aggregated).await;
        let after = Duration::from_secs(seconds);
        assert_eq!(site.ask(1).await, (refused, after), "{limit}");
        // One wait covers both pools.
        let _also = site.dead(Role::Decode).await;
        assert_eq!(site.ask(2).await, (refused, after), "{limit}");
    }
}

#[tokio::test(start_paused = true)]
async fn every_mode_passes_over_a_worker_that_fails_all() {
    let round_robin = RouterMode::Plain(SelectionMode::RoundRobin);
    for (mode, after, expected) in [
        (round_robin, 5, 5),
        (RouterMode::Kv, 5, 5),
        (round_robin, 0, 10),
    ] {
        let site = Site::new(3);
        let _live = site.live(Role::Aggregated).await;
        let _broken = site.serve(Role::Aggregated, 2, Arc::new(Broken)).await;
        let config = RouterConfig {
            mode,
            ejection: EjectionConfig {
                after,
                ..EjectionConfig::default()
            },
            ..RouterConfig::default()
        };
        let (_directory, stack) = site.stack(1, config).await;
        let mut failed = 0;
        for _ in 0..20 {
            if let Err(kind) = end_of_one(&*stack).await {
                assert_eq!(kind, ErrorKind::Internal);
                failed += 1;
            }
        }
        assert_eq!(failed, expected, "{mode}");
    }
}
