//! [`RemoteEngine`]: any live endpoint as an engine again.
//!
//! What answers may be a worker in another process or another language. The conformance kit can so be pointed at a
//! deployed worker, and a Worker can stand in front of others.

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use async_trait::async_trait;
use futures_core::Stream;
use futures_util::future::BoxFuture;
use futures_util::{FutureExt, StreamExt};
use genset_backend_common::kv::{BlockHash, KvEventData, KvEventPublisher, StoredBlock};
use genset_backend_common::ports::Generate;
use genset_backend_common::{
    Adapter, ControlReply, ControlRequest, EngineConfig, EngineControls, EngineError, EngineState,
    ErrorKind, GenerateRequest, LLMEngine, Load, LoadPublisher, ModelCard, Output, OutputStream,
    RequestContext, SleepLevel, StartContext,
};
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;

use crate::client::{Client, GenerateClient};
use crate::component::Runtime;
use crate::models::{LiveModel, ModelDirectory};
use crate::names::{EndpointName, InstanceId};
use crate::registrar::{KvItem, endpoints};
use crate::selection::SelectionMode;

/// Pause before a stream of events that ended is asked for again.
const RESUBSCRIBE_PAUSE: Duration = Duration::from_millis(500);

/// Makes the runtime an engine is started on.
type Connect = Box<dyn Fn() -> BoxFuture<'static, Result<Runtime, EngineError>> + Send + Sync>;

/// Which workers a [`RemoteEngine`] stands for.
#[derive(Debug, Clone)]
pub struct RemoteConfig {
    /// The endpoint they serve.
    pub endpoint: EndpointName,
    /// The only one that is asked; `None` for all. With one, its KV events and load are passed on as the engine's own.
    pub instance: Option<InstanceId>,
    /// How one of several is selected.
    pub selection: SelectionMode,
    /// How long `start` waits for a worker.
    pub wait: Duration,
}

impl RemoteConfig {
    /// Every worker of `endpoint`, one after the other; `start` waits ten seconds for the first.
    #[must_use]
    pub fn new(endpoint: EndpointName) -> Self {
        Self {
            endpoint,
            instance: None,
            selection: SelectionMode::default(),
            wait: Duration::from_secs(10),
        }
    }
}

/// The workers of an endpoint as one engine.
///
/// `cleanup` ends the requests under way with `EngineShutdown` and leaves the workers as they are.
///
/// # Examples
/// ```no_run
/// use genset_backend_common::{LLMEngine, StartContext};
/// use genset_runtime::{RemoteConfig, RemoteEngine, Runtime};
///
/// # async fn start(runtime: Runtime) -> Result<(), Box<dyn std::error::Error>> {
/// let config = RemoteConfig::new("dyn://llama.backend.generate".parse()?);
/// let engine = RemoteEngine::new(runtime, config);
/// let declared = engine.start(StartContext::detached(1)).await?;
/// println!("{} with {} tokens", declared.model, declared.context_length_tokens);
/// # Ok(())
/// # }
/// ```
pub struct RemoteEngine {
    connect: Connect,
    config: RemoteConfig,
    state: EngineState<Remote>,
}

impl RemoteEngine {
    /// An engine on a runtime that is there.
    #[must_use]
    pub fn new(runtime: Runtime, config: RemoteConfig) -> Self {
        Self::connecting(
            move || {
                let runtime = runtime.clone();
                async move { Ok(runtime) }.boxed()
            },
            config,
        )
    }

    /// An engine that makes its runtime when it starts.
    #[must_use]
    pub fn connecting(
        connect: impl Fn() -> BoxFuture<'static, Result<Runtime, EngineError>> + Send + Sync + 'static,
        config: RemoteConfig,
    ) -> Self {
        Self {
            connect: Box::new(connect),
            config,
            state: EngineState::new(),
        }
    }

    async fn control(&self, request: ControlRequest) -> Result<ControlReply, EngineError> {
        let remote = self.state.get()?;
        let instance = match self.config.instance {
            Some(instance) => instance,
            None => remote.only_instance()?,
        };
        remote.control.wait_for_instances(self.config.wait).await?;
        let ctx = RequestContext::new("control");
        let mut replies = remote.control.direct(instance, request, ctx).await?;
        replies.next().await.unwrap_or_else(|| {
            Err(EngineError::new(
                ErrorKind::StreamIncomplete,
                "the worker gave no reply",
            ))
        })
    }

    async fn done(&self, request: ControlRequest) -> Result<(), EngineError> {
        match self.control(request).await? {
            ControlReply::Done => Ok(()),
            reply @ (ControlReply::Adapters { .. } | ControlReply::Profile { .. }) => {
                Err(unexpected(&reply))
            }
        }
    }
}

fn unexpected(reply: &ControlReply) -> EngineError {
    EngineError::internal(format!(
        "the worker gave a reply to another request: {reply:?}"
    ))
}

impl fmt::Debug for RemoteEngine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RemoteEngine")
            .field("config", &self.config)
            .field("state", &self.state)
            .finish_non_exhaustive()
    }
}

/// What `start` builds.
struct Remote {
    client: GenerateClient,
    control: Client<ControlRequest, ControlReply>,
    stop: CancellationToken,
    _follow: Vec<AbortOnDropHandle<()>>,
}

impl Remote {
    /// The one instance there is: what is asked of an engine is not asked of one of several.
    fn only_instance(&self) -> Result<InstanceId, EngineError> {
        match &self.client.instances()[..] {
            [only] => Ok(only.instance),
            instances => Err(EngineError::unsupported(
                "instance",
                format!(
                    "{} workers serve this endpoint; name the instance that is meant",
                    instances.len()
                ),
            )),
        }
    }
}

#[async_trait]
impl LLMEngine for RemoteEngine {
    async fn start(&self, ctx: StartContext) -> Result<EngineConfig, EngineError> {
        let mut declared = None;
        let start = async {
            let runtime = (self.connect)().await?;
            ctx.progress.report("waiting for a worker", None);
            let (remote, card) = meet(&runtime, &self.config, &ctx).await?;
            declared = Some(config_of(&card, &self.config));
            Ok(remote)
        };
        self.state.start(start).await?;
        declared.ok_or_else(|| EngineError::internal("started without a card"))
    }

    async fn generate(
        &self,
        request: GenerateRequest,
        ctx: RequestContext,
    ) -> Result<OutputStream, EngineError> {
        let remote = self.state.get()?;
        let call = async {
            match self.config.instance {
                Some(instance) => remote.client.direct(instance, request, ctx).await,
                None => remote.client.generate(request, ctx).await,
            }
        };
        let called = remote.stop.run_until_cancelled(call).await;
        let outputs = called.unwrap_or_else(|| Err(stopped()))?;
        Ok(OutputStream::from_raw(Box::pin(UntilStopped {
            outputs: Some(outputs),
            stop: Box::pin(remote.stop.clone().cancelled_owned()),
        })))
    }

    async fn cleanup(&self) -> Result<(), EngineError> {
        if let Some(remote) = self.state.take() {
            remote.stop.cancel();
        }
        Ok(())
    }

    fn controls(&self) -> Option<&dyn EngineControls> {
        Some(self)
    }
}

fn stopped() -> EngineError {
    EngineError::engine_shutdown("the engine was stopped")
}

/// Finds the model and its workers.
async fn meet(
    runtime: &Runtime,
    config: &RemoteConfig,
    ctx: &StartContext,
) -> Result<(Remote, ModelCard), EngineError> {
    let directory = ModelDirectory::follow_endpoint(runtime, &config.endpoint);
    let model = the_model(&directory, config).await?;
    let client = directory
        .client(&model, config.selection, config.wait)
        .await?;
    let sibling = |name: &str| {
        let name = config.endpoint.sibling(name);
        name.map(|name| runtime.endpoint(name))
            .map_err(|error| EngineError::invalid_argument("endpoint", error))
    };
    let mut follow = Vec::new();
    if let Some(instance) = config.instance {
        let load = sibling(endpoints::LOAD)?.client();
        follow.push(runtime.spawn(follow_load(load, instance, ctx.load.clone())));
        let kv_events = sibling(endpoints::KV_EVENTS)?.client();
        follow.push(runtime.spawn(follow_kv_events(kv_events, instance, ctx.kv_events.clone())));
    }
    let remote = Remote {
        client,
        control: sibling(endpoints::CONTROL)?.client(),
        stop: CancellationToken::new(),
        _follow: follow,
    };
    Ok((remote, model.card))
}

/// The one model of the endpoint, once it is there.
async fn the_model(
    directory: &ModelDirectory,
    config: &RemoteConfig,
) -> Result<LiveModel, EngineError> {
    let mut models = directory.subscribe();
    let some = models.wait_for(|models| !models.is_empty());
    let Ok(Ok(models)) = tokio::time::timeout(config.wait, some).await else {
        let message = format!(
            "no worker of {} appeared within {} s; is one running, with the same discovery?",
            config.endpoint,
            config.wait.as_secs_f64()
        );
        return Err(EngineError::new(ErrorKind::Unavailable, message));
    };
    let mut values = models.values();
    match (values.next(), values.next()) {
        (Some(model), None) => Ok(model.clone()),
        _ => {
            let names: Vec<_> = models.keys().cloned().collect();
            let problem = format!(
                "{} serves several models ({}); an engine is one",
                config.endpoint,
                names.join(", ")
            );
            Err(EngineError::invalid_argument("endpoint", problem))
        }
    }
}

fn config_of(card: &ModelCard, remote: &RemoteConfig) -> EngineConfig {
    let mut capabilities = card.capabilities.clone();
    // A socket does not follow a paused clock.
    capabilities.virtual_time = false;
    // The caches of several workers are not one cache.
    capabilities.kv_events &= remote.instance.is_some();
    let mut config = EngineConfig::new(card.name.clone(), card.context_length_tokens)
        .with_capabilities(capabilities);
    config.vocab_size = card.vocab_size;
    config.kv_block_size = Some(card.kv_block_size);
    config
}

/// Outputs until the engine stops; then the terminal that says so.
struct UntilStopped {
    outputs: Option<OutputStream>,
    stop: Pin<Box<dyn Future<Output = ()> + Send>>,
}

impl Stream for UntilStopped {
    type Item = Result<Output, EngineError>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = &mut *self;
        let Some(outputs) = &mut this.outputs else {
            return Poll::Ready(None);
        };
        if let Poll::Ready(item) = outputs.poll_next_unpin(cx) {
            return Poll::Ready(item);
        }
        if this.stop.as_mut().poll(cx).is_ready() {
            this.outputs = None;
            return Poll::Ready(Some(Err(stopped())));
        }
        Poll::Pending
    }
}

async fn follow_load(client: Client<(), Load>, instance: InstanceId, publisher: LoadPublisher) {
    loop {
        if let Ok(mut loads) = client
            .direct(instance, (), RequestContext::new("load"))
            .await
        {
            while let Some(Ok(load)) = loads.next().await {
                publisher.publish(load);
            }
        }
        tokio::time::sleep(RESUBSCRIBE_PAUSE).await;
    }
}

async fn follow_kv_events(
    client: Client<(), KvItem>,
    instance: InstanceId,
    publisher: KvEventPublisher,
) {
    loop {
        if let Ok(mut items) = client
            .direct(instance, (), RequestContext::new("kv_events"))
            .await
        {
            while let Some(Ok(item)) = items.next().await {
                publish(&publisher, item);
            }
        }
        tokio::time::sleep(RESUBSCRIBE_PAUSE).await;
    }
}

fn publish(publisher: &KvEventPublisher, item: KvItem) {
    match item {
        KvItem::Change(event) => drop(publisher.publish(event.data)),
        KvItem::Snapshot(snapshot) => {
            publisher.publish(KvEventData::Cleared);
            for block in parents_first(snapshot.blocks) {
                publisher.publish(KvEventData::Stored {
                    parent: block.parent,
                    blocks: vec![block.hash],
                });
            }
        }
    }
}

/// The blocks in an order in which they may have been stored.
fn parents_first(blocks: Vec<StoredBlock>) -> Vec<StoredBlock> {
    let known: HashSet<BlockHash> = blocks.iter().map(|block| block.hash).collect();
    let (mut children, mut ordered) = (HashMap::<BlockHash, Vec<StoredBlock>>::new(), Vec::new());
    for block in blocks {
        match block.parent.filter(|parent| known.contains(parent)) {
            Some(parent) => children.entry(parent).or_default().push(block),
            None => ordered.push(block),
        }
    }
    let mut next = 0;
    while let Some(block) = ordered.get(next) {
        let after = children.remove(&block.hash).unwrap_or_default();
        ordered.extend(after);
        next += 1;
    }
    ordered
}

#[async_trait]
impl EngineControls for RemoteEngine {
    async fn sleep(&self, level: SleepLevel) -> Result<(), EngineError> {
        self.done(ControlRequest::Sleep { level }).await
    }

    async fn wake(&self) -> Result<(), EngineError> {
        self.done(ControlRequest::Wake).await
    }

    async fn clear_prefix_cache(&self) -> Result<(), EngineError> {
        self.done(ControlRequest::ClearPrefixCache).await
    }

    async fn load_adapter(&self, adapter: Adapter) -> Result<(), EngineError> {
        self.done(ControlRequest::LoadAdapter { adapter }).await
    }

    async fn unload_adapter(&self, name: &str) -> Result<(), EngineError> {
        let name = name.to_owned();
        self.done(ControlRequest::UnloadAdapter { name }).await
    }

    async fn adapters(&self) -> Result<Vec<Adapter>, EngineError> {
        match self.control(ControlRequest::ListAdapters).await? {
            ControlReply::Adapters { adapters } => Ok(adapters),
            reply @ (ControlReply::Done | ControlReply::Profile { .. }) => Err(unexpected(&reply)),
        }
    }

    async fn update_weights(&self, source: serde_json::Value) -> Result<(), EngineError> {
        self.done(ControlRequest::UpdateWeights { source }).await
    }

    async fn start_profile(&self) -> Result<(), EngineError> {
        self.done(ControlRequest::StartProfile).await
    }

    async fn stop_profile(&self) -> Result<String, EngineError> {
        match self.control(ControlRequest::StopProfile).await? {
            ControlReply::Profile { location } => Ok(location),
            reply @ (ControlReply::Done | ControlReply::Adapters { .. }) => Err(unexpected(&reply)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_snapshot_is_stored_parents_first_whatever_its_order() {
        let block = |hash, parent: Option<u64>| StoredBlock {
            hash: BlockHash(hash),
            parent: parent.map(BlockHash),
        };
        let blocks = vec![
            block(4, Some(3)),
            block(3, Some(1)),
            block(2, Some(1)),
            block(1, None),
            // Its parent was evicted.
            block(9, Some(8)),
        ];
        let ordered = parents_first(blocks.clone());
        assert_eq!(ordered.len(), blocks.len());
        let at = |hash| {
            ordered
                .iter()
                .position(|block| block.hash == BlockHash(hash))
        };
        assert!(at(1) < at(2) && at(1) < at(3) && at(3) < at(4) && at(9).is_some());
    }
}
