//! [`ModelDirectory`]: the models that live instances serve, by name, and their clients.

mod grouping;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt;
use genset_backend_common::{
    EngineError, ErrorKind, GenerateRequest, Output, RequestContext, Role,
    card::{ArtifactRef, MAX_ARTIFACT_BYTES},
    error::At,
};
use tokio::sync::watch;
use tokio_util::task::AbortOnDropHandle;

use crate::client::{Client, GenerateClient};
use crate::component::Runtime;
use crate::discovery::{
    Change, Entry, InstanceRecord, all_instances, follow_changes, prefix_of, prefix_of_scope,
};
use crate::names::{EndpointName, InstanceId, WorkerScope};
use crate::registrar::{ArtifactRequest, endpoints};
use crate::selection::SelectionMode;

pub use self::grouping::{LeftOutWorker, LiveModel, Pool};
use self::grouping::{ModelMap, by_model};

/// How long a worker may be silent while a file is fetched from it, at most and at least; then another one is asked.
const STALL_TIME: Duration = Duration::from_secs(5);
const LEAST_STALL_TIME: Duration = Duration::from_secs(1);

type Models = Arc<ModelMap>;

/// Follows discovery and finds models by name. Clones share state.
#[derive(Debug, Clone)]
pub struct ModelDirectory {
    runtime: Runtime,
    models: watch::Receiver<Models>,
    _follow: Arc<AbortOnDropHandle<()>>,
}

impl ModelDirectory {
    /// Starts to follow the runtime's discovery.
    #[must_use]
    pub fn follow(runtime: &Runtime) -> Self {
        Self::follow_prefix(runtime, all_instances().to_owned())
    }

    /// Like [`Self::follow`], for only the workers that serve `endpoint`.
    #[must_use]
    pub fn follow_endpoint(runtime: &Runtime, endpoint: &EndpointName) -> Self {
        Self::follow_prefix(runtime, prefix_of(endpoint))
    }

    /// Like [`Self::follow`], for only the workers of `scope`.
    #[must_use]
    pub fn follow_scope(runtime: &Runtime, scope: &WorkerScope) -> Self {
        Self::follow_prefix(runtime, prefix_of_scope(scope))
    }

    fn follow_prefix(runtime: &Runtime, prefix: String) -> Self {
        let (sender, models) = watch::channel(Models::default());
        let follow = runtime.spawn(follow(runtime.clone(), prefix, sender));
        Self {
            runtime: runtime.clone(),
            models,
            _follow: Arc::new(follow),
        }
    }

    /// The models, as a value that follows discovery.
    #[must_use]
    pub fn subscribe(&self) -> watch::Receiver<Models> {
        self.models.clone()
    }

    /// The runtime whose discovery it follows.
    #[must_use]
    pub fn runtime(&self) -> &Runtime {
        &self.runtime
    }

    /// Creates a client of the model's instances that [finish responses](LiveModel::whole_role), and waits until it knows at
    /// least one.
    ///
    /// # Errors
    /// `Unavailable` if none is live within `timeout`.
    pub async fn client(
        &self,
        model: &LiveModel,
        mode: SelectionMode,
        timeout: Duration,
    ) -> Result<GenerateClient, EngineError> {
        let role = model.whole_role();
        self.pool_client(model, role, mode, timeout).await
    }

    /// Like [`Self::client`], for the instances that play `role`.
    ///
    /// # Errors
    /// Same as [`Self::client`].
    pub async fn pool_client(
        &self,
        model: &LiveModel,
        role: Role,
        mode: SelectionMode,
        timeout: Duration,
    ) -> Result<GenerateClient, EngineError> {
        let Some(pool) = model.pools.get(&role) else {
            let message = format!("the model has no {role} instance");
            return Err(EngineError::new(ErrorKind::Unavailable, message));
        };
        let client = self.instances_of(model, role, pool);
        client.wait_for_instances(timeout).await?;
        let client = GenerateClient::new(client, mode);
        if !mode.uses_load() {
            return Ok(client);
        }
        let load = pool.endpoint.sibling(endpoints::LOAD)?;
        Ok(client.following_load(&self.runtime, self.runtime.endpoint(load).client()))
    }

    /// A client of the instances that serve the model with exactly this card, ranks aside: others may share the pool's endpoint.
    fn instances_of(
        &self,
        model: &LiveModel,
        role: Role,
        pool: &Pool,
    ) -> Client<GenerateRequest, Output> {
        let common = model.card.clone();
        let endpoint = self.runtime.endpoint(pool.endpoint.clone());
        endpoint.client_of(Arc::new(move |record| {
            let card = record.card.as_ref();
            card.is_some_and(|card| card.role == role && card.in_common() == common)
        }))
    }

    /// Fetches a file from any of the model's workers and checks its hash. Accepts as many bytes as `artifact` names, and at most
    /// [`MAX_ARTIFACT_BYTES`], whatever the worker sends. If a worker is silent for five seconds, the next one is asked; sooner
    /// if there are so many that not all could be asked in time.
    ///
    /// # Errors
    /// `Unavailable` if no worker responds within `timeout`; `Internal` if the content has another hash or length;
    /// `InvalidArgument` if the file is over the limit.
    pub async fn fetch(
        &self,
        model: &LiveModel,
        artifact: &ArtifactRef,
        timeout: Duration,
    ) -> Result<Vec<u8>, EngineError> {
        let fetch = self.fetch_unbounded(model, artifact, timeout);
        tokio::time::timeout(timeout, fetch)
            .await
            .unwrap_or_else(|_| {
                let message = format!(
                    "{} did not arrive within {} s",
                    artifact.name,
                    timeout.as_secs_f64()
                );
                Err(EngineError::new(ErrorKind::Unavailable, message))
            })
    }

    async fn fetch_unbounded(
        &self,
        model: &LiveModel,
        artifact: &ArtifactRef,
        timeout: Duration,
    ) -> Result<Vec<u8>, EngineError> {
        let mut failure = EngineError::new(ErrorKind::Unavailable, "the model's workers have gone");
        let count = u32::try_from(model.size()).unwrap_or(u32::MAX);
        let stall = (timeout / count.max(1)).clamp(LEAST_STALL_TIME, STALL_TIME);
        for (role, pool) in &model.pools {
            let limits = (timeout, stall);
            match self.fetch_in(model, *role, pool, artifact, limits).await {
                Ok(content) => return Ok(content),
                Err(error) => failure = error,
            }
        }
        Err(failure)
    }

    /// Fetches a file from any worker of a pool that has one before the deadline. Limits each worker's silence.
    async fn fetch_in(
        &self,
        model: &LiveModel,
        role: Role,
        pool: &Pool,
        artifact: &ArtifactRef,
        (timeout, stall): (Duration, Duration),
    ) -> Result<Vec<u8>, EngineError> {
        let name = pool.endpoint.sibling(endpoints::ARTIFACTS)?;
        let workers = self.instances_of(model, role, pool);
        workers.wait_for_instances(timeout).await?;
        let client: Client<ArtifactRequest, bytes::Bytes> = self.runtime.endpoint(name).client();
        client.wait_for_instances(timeout).await?;
        let mut failure = EngineError::new(ErrorKind::Unavailable, "the model's workers have gone");
        // A dead worker stays listed until its lease ends. Start at a random one, so that not all clients start with the same.
        let mut workers = workers.instances();
        let first = rand::random_range(0..workers.len().max(1));
        workers.rotate_left(first);
        for worker in workers {
            match fetch_from(&client, worker.instance, artifact, stall).await {
                Ok(content) => return Ok(content),
                Err(error) => {
                    tracing::debug!(instance = %worker.instance, artifact = artifact.name, %error, "not fetched");
                    failure = error;
                }
            }
        }
        Err(failure)
    }
}

/// Fetches a file from this worker, which may be silent for at most `stall`.
async fn fetch_from(
    client: &Client<ArtifactRequest, bytes::Bytes>,
    worker: InstanceId,
    artifact: &ArtifactRef,
    stall: Duration,
) -> Result<Vec<u8>, EngineError> {
    let request = ArtifactRequest {
        blake3: artifact.blake3.clone(),
    };
    let ctx = RequestContext::new("artifact");
    let begun = client.direct(worker, request, ctx);
    let mut chunks = said_within(stall, begun).await??;
    let length = length_of(artifact)?;
    let mut content = Vec::with_capacity(length);
    while let Some(chunk) = said_within(stall, chunks.next()).await? {
        let chunk = chunk?;
        // Refuse empty chunks: a worker that sends nothing else would never end.
        if chunk.is_empty() || chunk.len() > length - content.len() {
            return Err(another(artifact));
        }
        content.extend_from_slice(&chunk);
    }
    // Hashing 64 MiB takes longer than other tasks should wait.
    let expected = artifact.clone();
    let hashed = tokio::task::spawn_blocking(move || expected.matches(&content).then_some(content));
    match hashed.await {
        Ok(Some(content)) => Ok(content),
        Ok(None) | Err(_) => Err(another(artifact)),
    }
}

/// Awaits a worker's next data, at most for `stall`.
async fn said_within<T>(stall: Duration, what: impl Future<Output = T>) -> Result<T, EngineError> {
    let said = tokio::time::timeout(stall, what).await;
    said.map_err(|_| {
        let message = format!("the worker said nothing for {} s", stall.as_secs_f64());
        EngineError::new(ErrorKind::Unavailable, message)
    })
}

/// The number of bytes a file may have, according to its card.
fn length_of(artifact: &ArtifactRef) -> Result<usize, EngineError> {
    if artifact.size > MAX_ARTIFACT_BYTES {
        let problem = format!(
            "{} has {} bytes, and a model's file may have {MAX_ARTIFACT_BYTES}",
            artifact.name, artifact.size
        );
        return Err(EngineError::invalid_argument(
            At::other("artifact"),
            problem,
        ));
    }
    usize::try_from(artifact.size)
        .map_err(|error| EngineError::invalid_argument(At::other("artifact"), error))
}

fn another(artifact: &ArtifactRef) -> EngineError {
    EngineError::internal(format!(
        "{} arrived with another hash or length than its card names",
        artifact.name
    ))
}

async fn follow(runtime: Runtime, prefix: String, models: watch::Sender<Models>) {
    let mut records: BTreeMap<String, InstanceRecord> = BTreeMap::new();
    let mut reported = BTreeSet::new();
    // Of a worker's records one has a card.
    let read = |entry: &Entry| {
        let record = runtime.records().read(entry)?;
        let has_card = record.card.is_some();
        has_card.then(|| (entry.key.clone(), record))
    };
    follow_changes(&**runtime.discovery(), &prefix, |changes| {
        let mut is_changed = false;
        for change in changes {
            match change {
                Change::Snapshot(entries) => {
                    records = entries.iter().filter_map(read).collect();
                    is_changed = true;
                }
                Change::Put(entry) => {
                    // An invalid record replaces the previous one: its owner wrote it.
                    is_changed |= records.remove(&entry.key).is_some();
                    let record = read(&entry);
                    is_changed |= record.is_some();
                    records.extend(record);
                }
                Change::Removed(key) => is_changed |= records.remove(&key).is_some(),
            }
        }
        if !is_changed {
            return;
        }
        let now = Arc::new(by_model(records.values()));
        reported = report(&now, &reported);
        models.send_if_modified(|known| {
            let is_new = *known != now;
            *known = now;
            is_new
        });
    })
    .await;
}

/// Logs the newly left-out workers; returns all left-out ones.
fn report(models: &ModelMap, reported: &BTreeSet<InstanceId>) -> BTreeSet<InstanceId> {
    let mut all = BTreeSet::new();
    for (name, model) in models {
        for worker in &model.left_out {
            all.insert(worker.instance);
            if !reported.contains(&worker.instance) {
                tracing::warn!(
                    model = name,
                    instance = %worker.instance,
                    endpoint = %worker.endpoint,
                    differences = worker.differences.join("; "),
                    "this worker's card differs from the preferred one; it gets no new requests once that one is ready"
                );
            }
        }
    }
    all
}
