//! [`RemoteEngine`]: wraps any live endpoint as an engine.
//!
//! The workers behind it may run in another process or language. This lets the conformance kit test a
//! deployed worker, and lets a Worker act as a proxy for others.

mod outputs;

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use genset_backend_common::kv::{BlockChain, KvEventData, KvEventPublisher, chains};
use genset_backend_common::ports::{Control, Generate};
use genset_backend_common::{
    EngineConfig, EngineControls, EngineError, EngineState, ErrorKind, GenerateRequest, LLMEngine,
    ModelCard, OutputStream, RequestContext, StartContext,
    controls::{ControlReply, ControlRequest},
    error::At,
};
use tokio::sync::oneshot;
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;

use self::outputs::RemoteOutputs;
use crate::client::GenerateClient;
use crate::component::Runtime;
use crate::controls::ControlClient;
use crate::discovery::{InstanceRecord, prefix_of};
use crate::load::follow_items;
use crate::models::{LiveModel, ModelDirectory};
use crate::names::{EndpointName, InstanceId};
use crate::registrar::{KvItem, endpoints};
use crate::selection::SelectionMode;

/// Creates the runtime when the engine starts.
type Connect = Box<dyn Fn() -> BoxFuture<'static, Result<Runtime, EngineError>> + Send + Sync>;

/// The workers behind a [`RemoteEngine`].
#[derive(Debug, Clone)]
pub struct RemoteConfig {
    /// The endpoint they serve.
    pub endpoint: EndpointName,
    /// The only instance to use; `None` for all. With one, its KV events and load are published as the engine's own.
    pub instance: Option<InstanceId>,
    /// How to select one of several.
    pub selection: SelectionMode,
    /// How long `start` waits for a worker.
    pub wait: Duration,
}

impl RemoteConfig {
    /// All workers of `endpoint`, in round-robin order; `start` waits ten seconds for the first.
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
/// `cleanup` ends the requests in progress with `EngineShutdown` and leaves the workers running.
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
    /// Creates an engine on an existing runtime.
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

    /// Creates an engine that creates its runtime on start.
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
}

genset_backend_common::debug_as!(|it| RemoteEngine {
    config: it.config,
    state: it.state,
    ..
});

/// The state that `start` builds.
struct Remote {
    client: GenerateClient,
    control: ControlClient,
    runtime: Runtime,
    stop: CancellationToken,
    _follow: Vec<AbortOnDropHandle<()>>,
}

impl Remote {
    /// The only instance: controls of an engine are not sent to one of several.
    fn only_instance(&self) -> Result<InstanceId, EngineError> {
        match &self.client.instances()[..] {
            [only] => Ok(only.instance),
            instances => Err(EngineError::unsupported(
                At::other("instance"),
                format!(
                    "{} workers serve this endpoint; name one instance",
                    instances.len()
                ),
            )),
        }
    }

    /// Workers in other languages may leave out the endpoint `control`. They list it before `generate`. Discovery is asked only of
    /// a worker whose `control` is not known: it may be away.
    ///
    /// # Errors
    /// `Unsupported` if the worker is listed without it.
    async fn ensure_has_controls(
        &self,
        generate: &EndpointName,
        instance: InstanceId,
    ) -> Result<(), EngineError> {
        let known = self.control.workers(Duration::ZERO).await;
        if known.is_ok_and(|known| known.contains(&instance)) {
            return Ok(());
        }
        let is_listed = |record: &InstanceRecord| record.instance == instance;
        if !self.client.instances().iter().any(is_listed) {
            return Ok(());
        }
        let prefix = prefix_of(&generate.sibling(endpoints::CONTROL)?);
        let key = format!("{prefix}{instance}");
        if self.runtime.discovery().get(&key).await?.is_empty() {
            let problem = format!("is no endpoint of the worker {instance}");
            return Err(EngineError::unsupported(
                At::other(endpoints::CONTROL),
                problem,
            ));
        }
        Ok(())
    }
}

#[async_trait]
impl LLMEngine for RemoteEngine {
    async fn start(&self, ctx: StartContext) -> Result<EngineConfig, EngineError> {
        let start = async {
            let runtime = (self.connect)().await?;
            ctx.progress.report("waiting for a worker", None);
            let (remote, card) = meet(&runtime, &self.config, &ctx).await?;
            Ok((remote, config_of(&card, &self.config)))
        };
        self.state.start(start).await
    }

    async fn generate(
        &self,
        request: GenerateRequest,
        ctx: RequestContext,
    ) -> Result<OutputStream, EngineError> {
        let remote = self.state.get()?;
        let prompt_tokens = request.prompt_tokens();
        // The worker learns of a cancellation by losing its reader; the end here must not wait for it.
        let far = ctx.detached();
        let call = async {
            match self.config.instance {
                Some(instance) => remote.client.direct(instance, request, far.clone()).await,
                None => remote.client.generate(request, far.clone()).await,
            }
        };
        let outputs = tokio::select! {
            biased;
            () = remote.stop.cancelled() => return Err(outputs::stopped()),
            () = ctx.cancelled() => None,
            called = call => Some(called?),
        };
        Ok(RemoteOutputs::stream(
            outputs,
            (ctx, far),
            &remote.stop,
            prompt_tokens,
        ))
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

/// Passes each control on to the worker.
#[async_trait]
impl Control for RemoteEngine {
    async fn control(&self, request: ControlRequest) -> Result<ControlReply, EngineError> {
        let remote = self.state.get()?;
        let instance = match self.config.instance {
            Some(instance) => instance,
            None => remote.only_instance()?,
        };
        remote
            .ensure_has_controls(&self.config.endpoint, instance)
            .await?;
        remote.control.workers(self.config.wait).await?;
        remote.control.ask(instance, request).await
    }
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
        config
            .endpoint
            .sibling(name)
            .map(|name| runtime.endpoint(name))
    };
    let mut follow = Vec::new();
    if let Some(instance) = config.instance {
        let load = Arc::new(sibling(endpoints::LOAD)?.client());
        let publisher = ctx.load.clone();
        let publish = move |load| {
            if let Some(load) = load {
                publisher.publish(load);
            }
        };
        follow.push(runtime.spawn(follow_items(load, instance, "load", publish)));
        let kv_events = Arc::new(sibling(endpoints::KV_EVENTS)?.client());
        let (told, is_told) = oneshot::channel();
        let publish = republish(ctx.kv_events.clone(), told);
        follow.push(runtime.spawn(follow_items(kv_events, instance, "kv_events", publish)));
        if model.card.capabilities.kv_events
            && tokio::time::timeout(config.wait, is_told).await.is_err()
        {
            let message = format!(
                "the worker of {} sent no snapshot of its prefix cache within {} s",
                config.endpoint,
                config.wait.as_secs_f64()
            );
            return Err(EngineError::new(ErrorKind::Unavailable, message));
        }
    }
    let card = ModelCard {
        max_num_seqs: at_once(&client.instances(), config.instance),
        ..model.card
    };
    let remote = Remote {
        client,
        control: ControlClient::try_new(runtime, &config.endpoint)?,
        runtime: runtime.clone(),
        stop: CancellationToken::new(),
        _follow: follow,
    };
    Ok((remote, card))
}

/// Publishes the KV events of the worker. Notifies `told` when the contents of its cache are published for the first time.
fn republish(
    publisher: KvEventPublisher,
    told: oneshot::Sender<()>,
) -> impl FnMut(Option<KvItem>) + Send {
    let mut told = Some(told);
    move |item| match item {
        None => {}
        Some(KvItem::Change(event)) => drop(publisher.publish(event.data)),
        Some(KvItem::Snapshot(snapshot)) => {
            publisher.publish(KvEventData::Cleared);
            for BlockChain { parent, blocks } in chains(snapshot.blocks) {
                publisher.publish(KvEventData::Stored { parent, blocks });
            }
            if let Some(told) = told.take() {
                // A cancelled start does not listen.
                let _ = told.send(());
            }
        }
    }
}

/// How many sequences run at once if every request goes to one instance: the named one, or the only one. With several,
/// the number of requests that each receives is unknown.
fn at_once(instances: &[InstanceRecord], only: Option<InstanceId>) -> Option<u32> {
    let is_asked =
        |record: &&InstanceRecord| only.is_none_or(|instance| record.instance == instance);
    let mut asked = instances.iter().filter(is_asked);
    match (asked.next(), asked.next()) {
        (Some(one), None) => one.card.as_ref()?.max_num_seqs,
        (Some(_) | None, _) => None,
    }
}

/// Waits for the endpoint's only model.
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
            Err(EngineError::invalid_argument(
                At::other("endpoint"),
                problem,
            ))
        }
    }
}

fn config_of(card: &ModelCard, remote: &RemoteConfig) -> EngineConfig {
    let mut capabilities = card.capabilities.clone();
    // Sockets do not follow a paused clock.
    capabilities.virtual_time = false;
    // The caches of several workers do not form one cache.
    capabilities.kv_events &= remote.instance.is_some();
    capabilities.kv_ranks = false;
    // The workers have fixed roles, which cannot be changed from here.
    capabilities.roles.clear();
    let mut config = EngineConfig::new(card.name.clone(), card.context_length_tokens)
        .with_capabilities(capabilities);
    config.vocab_size = card.vocab_size;
    config.kv_block_size = Some(card.kv_block_size);
    config.max_num_seqs = card.max_num_seqs;
    config
}
