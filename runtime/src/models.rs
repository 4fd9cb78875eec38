//! [`ModelDirectory`]: the models that live instances serve, by name, and how to reach them.

mod grouping;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use bytes::BytesMut;
use futures_util::StreamExt;
use genset_backend_common::{
    ArtifactRef, EngineError, ErrorKind, GenerateRequest, Output, RequestContext,
};
use tokio::sync::watch;
use tokio_util::task::AbortOnDropHandle;

use crate::client::{Client, GenerateClient};
use crate::component::Runtime;
use crate::discovery::{Change, InstanceRecord, all_instances, prefix_of};
use crate::instances::watch_patiently;
use crate::names::{EndpointName, InstanceId};
use crate::registrar::{ArtifactRequest, endpoints};
use crate::selection::SelectionMode;

pub use self::grouping::{LeftOutWorker, LiveModel};
use self::grouping::{ModelMap, by_model};

type Models = Arc<ModelMap>;

/// Follows discovery and knows the models by name.
#[derive(Debug)]
pub struct ModelDirectory {
    runtime: Runtime,
    models: watch::Receiver<Models>,
    _follow: AbortOnDropHandle<()>,
}

impl ModelDirectory {
    /// Begins to follow the runtime's discovery.
    #[must_use]
    pub fn follow(runtime: &Runtime) -> Self {
        Self::follow_prefix(runtime, all_instances().to_owned())
    }

    /// As [`Self::follow`], of the workers that serve `endpoint` and no others.
    #[must_use]
    pub fn follow_endpoint(runtime: &Runtime, endpoint: &EndpointName) -> Self {
        Self::follow_prefix(runtime, prefix_of(endpoint))
    }

    fn follow_prefix(runtime: &Runtime, prefix: String) -> Self {
        let (sender, models) = watch::channel(Models::default());
        let follow = runtime.spawn(follow(runtime.clone(), prefix, sender));
        Self {
            runtime: runtime.clone(),
            models,
            _follow: follow,
        }
    }

    /// The models, as a value that follows discovery.
    #[must_use]
    pub fn subscribe(&self) -> watch::Receiver<Models> {
        self.models.clone()
    }

    /// A client of the model's instances that waits until it knows at least one.
    ///
    /// # Errors
    /// `Unavailable` when none is live within `timeout`.
    pub async fn client(
        &self,
        model: &LiveModel,
        mode: SelectionMode,
        timeout: Duration,
    ) -> Result<GenerateClient, EngineError> {
        let client = self.instances_of(model);
        client.wait_for_instances(timeout).await?;
        let client = GenerateClient::new(client, mode);
        if !mode.uses_load() {
            return Ok(client);
        }
        let load = model
            .endpoint
            .sibling(endpoints::LOAD)
            .map_err(|error| EngineError::invalid_argument("endpoint", error))?;
        Ok(client.following_load(&self.runtime, self.runtime.endpoint(load).client()))
    }

    /// A client of the instances that serve the model by this very card: others may share its endpoint.
    fn instances_of(&self, model: &LiveModel) -> Client<GenerateRequest, Output> {
        let card = model.card.clone();
        let endpoint = self.runtime.endpoint(model.endpoint.clone());
        endpoint.client_of(Arc::new(move |record| record.card.as_ref() == Some(&card)))
    }

    /// Fetches a file from any of the model's workers and checks its hash.
    ///
    /// # Errors
    /// `Unavailable` when no worker answers within `timeout`; `Internal` when what it sends has another hash.
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
        let name = model
            .endpoint
            .sibling(endpoints::ARTIFACTS)
            .map_err(|error| EngineError::invalid_argument("endpoint", error))?;
        let workers = self.instances_of(model);
        workers.wait_for_instances(timeout).await?;
        let client: Client<ArtifactRequest, bytes::Bytes> = self.runtime.endpoint(name).client();
        client.wait_for_instances(timeout).await?;
        let mut failure = EngineError::new(ErrorKind::Unavailable, "the model's workers have gone");
        // One that died is listed until its lease ends.
        for worker in workers.instances() {
            match fetch_from(&client, worker.instance, artifact).await {
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

/// A file from this worker.
async fn fetch_from(
    client: &Client<ArtifactRequest, bytes::Bytes>,
    worker: InstanceId,
    artifact: &ArtifactRef,
) -> Result<Vec<u8>, EngineError> {
    let request = ArtifactRequest {
        blake3: artifact.blake3.clone(),
    };
    let ctx = RequestContext::new("artifact");
    let mut chunks = client.direct(worker, request, ctx).await?;
    let mut content = BytesMut::new();
    while let Some(chunk) = chunks.next().await {
        content.extend_from_slice(&chunk?);
        if content.len() as u64 > artifact.size {
            break;
        }
    }
    if artifact.matches(&content) {
        return Ok(content.to_vec());
    }
    Err(EngineError::internal(format!(
        "{} arrived with another hash than its card names",
        artifact.name
    )))
}

async fn follow(runtime: Runtime, prefix: String, models: watch::Sender<Models>) {
    let mut records: BTreeMap<String, InstanceRecord> = BTreeMap::new();
    let mut reported = BTreeSet::new();
    while let Some(mut watch) = watch_patiently(&**runtime.discovery(), &prefix).await {
        while let Some(change) = watch.next().await {
            match change {
                Change::Snapshot(entries) => {
                    let read = |entry| {
                        Some((
                            InstanceRecord::from_entry(entry)?.key(),
                            InstanceRecord::from_entry(entry)?,
                        ))
                    };
                    records = entries.iter().filter_map(read).collect();
                }
                Change::Put(entry) => {
                    if let Some(record) = InstanceRecord::from_entry(&entry) {
                        records.insert(record.key(), record);
                    }
                }
                Change::Removed(key) => drop(records.remove(&key)),
            }
            let now = Arc::new(by_model(records.values(), &models.borrow()));
            reported = report(&now, reported);
            models.send_if_modified(|known| {
                let is_new = *known != now;
                *known = now;
                is_new
            });
        }
    }
}

/// Names the workers that are newly left out; returns all that are.
fn report(models: &ModelMap, reported: BTreeSet<InstanceId>) -> BTreeSet<InstanceId> {
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
                    "this worker's card differs from the one in use; it gets no requests"
                );
            }
        }
    }
    all
}
