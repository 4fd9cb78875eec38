//! [`Follower`] prepares models as workers announce them, and drops them with their workers. If another card of a name
//! becomes preferred, the old one serves until the new one is ready.

use std::collections::BTreeMap;
use std::num::NonZeroUsize;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use genset_backend_common::{CancelReason, EngineError, ErrorKind, ModelCard, error::At};
use genset_runtime::{LiveModel, ModelDirectory};
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use tokio::sync::Semaphore;

use super::admission::Admissions;
use super::chosen::Chosen;
use super::{Failure, Models, ServedModel, TextFiles, adapters};
use crate::clock::now;
use crate::media::Fetcher;
use crate::parsers::{ParserNames, Parsers};
use crate::pipeline::PromptTimings;

/// Pauses before a failed preparation is retried, doubling from the first to the last.
const RETRY_PAUSES: (Duration, Duration) = (Duration::from_millis(500), Duration::from_secs(30));

/// How many models' files are fetched and read at once: each may take 128 MiB, and as much again as a tokenizer.
pub(super) const MODELS_READ_AT_ONCE: usize = 8;

/// The number of workers left out, by model.
pub(super) type LeftOutWorkers = Family<[(&'static str, String); 1], Gauge>;

pub(super) struct Follower {
    pub(super) directory: ModelDirectory,
    pub(super) left_out: LeftOutWorkers,
    pub(super) models: Models,
    pub(super) timeout: Duration,
    pub(super) parsers: ParserNames,
    pub(super) tokenizer_cache_bytes: usize,
    pub(super) max_running_choices: NonZeroUsize,
    /// Permits for models whose files are being fetched and read.
    pub(super) reading: Semaphore,
    pub(super) timings: PromptTimings,
    pub(super) admissions: Admissions,
    pub(super) media: Fetcher,
}

/// A model that is being prepared.
struct Preparing<'a> {
    live: LiveModel,
    ready: Pin<Box<dyn Future<Output = Arc<ServedModel>> + Send + 'a>>,
}

impl Follower {
    pub(super) async fn run(self, mut chosen: Chosen) {
        let mut live = self.directory.subscribe();
        // Concurrently: a model whose only worker hangs must not block the others.
        let mut preparing = BTreeMap::<String, Preparing<'_>>::new();
        loop {
            let announced = servable(&live.borrow_and_update());
            let (wanted, left_out) = chosen.of(&announced);
            self.count_left_out(&wanted);
            self.admissions.retain(|name| wanted.contains_key(name));
            self.models.map.send_modify(|map| {
                Arc::make_mut(map).retain(|name, known| {
                    // An adapter stays as long as its base model is ready and has it.
                    let name = known.adapter.as_ref().map_or(name, |served| &served.base);
                    let live = wanted.get(name);
                    let is_served = live.is_some_and(|live| known.base_in(live).is_some());
                    if !is_served {
                        self.models.lingering.gone(&known.card);
                    }
                    is_served
                });
            });
            self.models
                .map
                .send_if_modified(|map| adapters::renew(Arc::make_mut(map), &wanted));
            self.models.failures.send_if_modified(|failures| {
                let known = failures.len();
                // Models that got a place in the meantime no longer lack one.
                let is_stale = |failure: &Failure| matches!(failure, Failure::NoRoom(_));
                failures.retain(|name, failure| {
                    let live = wanted.get(name);
                    live.is_some_and(|live| !self.is_ready(name, live)) && !is_stale(failure)
                });
                let has_gone = failures.len() != known;
                let no_room = |(name, refusal)| (name, Failure::NoRoom(refusal));
                failures.extend(left_out.into_iter().map(no_room));
                has_gone || failures.len() != known
            });
            preparing.retain(|name, known| {
                wanted
                    .get(name)
                    .is_some_and(|live| live.is_same_service(&known.live))
            });
            for (name, live) in &wanted {
                if !self.is_ready(name, live) && !preparing.contains_key(name) {
                    preparing.insert(name.clone(), self.begin(live));
                }
            }
            tokio::select! {
                biased;
                changed = live.changed() => if changed.is_err() {
                    return;
                },
                ready = next_ready(&mut preparing) => {
                    let name = ready.card.name.clone();
                    preparing.remove(&name);
                    tracing::info!(model = name, "model ready");
                    self.models.failures
                        .send_if_modified(|failures| failures.remove(&name).is_some());
                    self.models.map
                        .send_modify(|map| drop(Arc::make_mut(map).insert(name, ready)));
                }
            }
        }
    }

    /// Whether the model with this name is served with the card of `live`.
    fn is_ready(&self, name: &str, live: &LiveModel) -> bool {
        let map = self.models.map.borrow();
        map.get(name).is_some_and(|known| known.is_of(live))
    }

    fn begin(&self, live: &LiveModel) -> Preparing<'_> {
        let wanted = live.clone();
        Preparing {
            live: live.clone(),
            ready: Box::pin(async move { self.prepare_patiently(&wanted).await }),
        }
    }

    /// Prepares a model, retrying until it succeeds.
    async fn prepare_patiently(&self, live: &LiveModel) -> Arc<ServedModel> {
        let mut pause = RETRY_PAUSES.0;
        loop {
            match self.prepare(live).await {
                Ok(ready) => return ready,
                Err(error) => {
                    let model = &live.card.name;
                    tracing::error!(model, kind = %error.kind(), %error, "the model cannot be served");
                    let failure = Failure::Unprepared(error);
                    self.models
                        .failures
                        .send_modify(|failures| drop(failures.insert(model.clone(), failure)));
                }
            }
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(RETRY_PAUSES.1);
        }
    }

    fn count_left_out(&self, wanted: &BTreeMap<String, &LiveModel>) {
        self.left_out.clear();
        for (name, model) in wanted {
            let count = i64::try_from(model.left_out.len()).unwrap_or(i64::MAX);
            self.left_out
                .get_or_create(&[("model", name.clone())])
                .set(count);
        }
    }

    async fn prepare(&self, live: &LiveModel) -> Result<Arc<ServedModel>, EngineError> {
        if live.card.capabilities.inputs.is_empty() {
            let problem = "the card names none that this version knows";
            return Err(EngineError::unsupported(At::other("inputs"), problem));
        }
        let parsers = Parsers::choose(&live.card, &self.parsers)?;
        let layers = &self.models.layers;
        let engine = genset_router::connect(&self.directory, live, layers, self.timeout).await?;
        let text = if needs_tokenizer(&live.card) {
            Some(Arc::new(self.fetch_text(live).await?))
        } else {
            None
        };
        Ok(Arc::new(ServedModel {
            card: live.card.clone(),
            adapter: None,
            endpoint: live.endpoint(),
            created: now(),
            engine,
            text,
            parsers,
            timings: self.timings.clone(),
            admission: self.admissions.of(&live.card.name),
            max_running_choices: self.max_running_choices,
            work: self.models.work.clone(),
            media: self.media.clone(),
        }))
    }

    async fn fetch_text(&self, live: &LiveModel) -> Result<TextFiles, EngineError> {
        let reading = self.reading.acquire().await;
        // Nobody closes the semaphore.
        let _reading = reading.map_err(|_closed| CancelReason::Shutdown.to_error())?;
        let mut files = BTreeMap::new();
        for artifact in &live.card.artifacts {
            let content = self.directory.fetch(live, artifact, self.timeout).await?;
            files.insert(artifact.name.clone(), content);
        }
        // Building a tokenizer with 250,000 entries takes a second.
        let cache_bytes = self.tokenizer_cache_bytes;
        let read = move || TextFiles::read(|name| files.get(name).cloned(), cache_bytes);
        tokio::task::spawn_blocking(read)
            .await
            .unwrap_or_else(|error| {
                Err(
                    EngineError::new(ErrorKind::Internal, "reading the model's files failed")
                        .with_source(error),
                )
            })
    }
}

/// Engines that tokenize prompts themselves get text. Engines that only embed or score always get tokens.
fn needs_tokenizer(card: &ModelCard) -> bool {
    let mut inputs = card.capabilities.inputs.iter();
    card.takes_tokens() || inputs.all(|kind| !kind.is_prompt())
}

/// The models that accept whole requests, without those that have only prefill instances.
pub(super) fn servable(announced: &BTreeMap<String, LiveModel>) -> BTreeMap<String, LiveModel> {
    let servable = announced.iter().filter(|(_, live)| live.is_servable());
    servable
        .map(|(name, live)| (name.clone(), live.clone()))
        .collect()
}

/// The next model that is ready; pending while none is being prepared.
///
/// Cancel safe: preparation continues with the next call.
async fn next_ready(preparing: &mut BTreeMap<String, Preparing<'_>>) -> Arc<ServedModel> {
    if preparing.is_empty() {
        return std::future::pending().await;
    }
    let all = preparing.values_mut().map(|preparing| &mut preparing.ready);
    futures_util::future::select_all(all).await.0
}
