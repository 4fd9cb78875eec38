//! [`ServedModel`]: a model that is ready to serve; [`Models`]: the models of live workers, prepared as they appear.

mod adapters;
mod admission;
mod awaited;
mod chosen;
mod embed_prompt;
mod follower;
mod infill;
mod lingering;
mod matryoshka;
mod text_files;

use std::collections::BTreeMap;
use std::num::NonZeroUsize;
use std::sync::Arc;

use genset_backend_common::ports::Generate;
use genset_backend_common::{EngineError, ErrorKind, ModelCard};
use genset_router::Layers;
use genset_runtime::{EndpointName, LiveModel, ModelDirectory, Runtime};
use tokio::sync::{Semaphore, watch};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

pub use adapters::ServedAdapter;
pub(crate) use admission::ModelAdmission;
pub use infill::Infill;
pub use matryoshka::Matryoshka;
pub use text_files::TextFiles;

use admission::{Admissions, ModelLimits};
use chosen::Chosen;
use follower::{Follower, LeftOutWorkers, MODELS_READ_AT_ONCE, servable};
use lingering::Lingering;

use crate::config::FrontendConfig;
use crate::media::Fetcher;
use crate::parsers::Parsers;
use crate::pipeline::PromptTimings;
use crate::work::WorkThreads;

/// A model with everything that a text request needs.
#[derive(Clone)]
pub struct ServedModel {
    /// The card that its workers publish.
    pub card: ModelCard,
    /// The adapter and its base, if it is a LoRA adapter of another model.
    pub adapter: Option<ServedAdapter>,
    /// The endpoint its workers served when it was prepared.
    pub endpoint: EndpointName,
    /// When this server first saw it, in seconds since 1970.
    pub created: u64,
    /// Its instances.
    pub engine: Arc<dyn Generate>,
    /// Tokenizer and template; `None` for engines that tokenize themselves.
    pub text: Option<Arc<TextFiles>>,
    /// The parsers of its answers.
    pub parsers: Parsers,
    /// Measures how long its prompts take to prepare.
    pub timings: PromptTimings,
    /// Limits how many of its requests run at once.
    pub(crate) admission: Arc<ModelAdmission>,
    /// How many choices of one request run at once.
    pub(crate) max_running_choices: NonZeroUsize,
    /// The threads for long work on its requests.
    pub(crate) work: WorkThreads,
    /// Fetches the images that chats name by URL.
    pub(crate) media: Fetcher,
}

impl ServedModel {
    /// Whether it matches `live`. If prefill and decode may be disaggregated, its layers follow the instances that do each.
    fn is_of(&self, live: &LiveModel) -> bool {
        let can_be_apart = self.card.capabilities.can_be_apart();
        self.card == live.card && (can_be_apart || self.endpoint == live.endpoint())
    }

    /// The entry of `live` that serves it or its base model. Includes workers that are left out: they serve until the
    /// preferred card is ready.
    fn base_in<'a>(&self, live: &'a LiveModel) -> Option<&'a LiveModel> {
        let others = live.others.iter().filter(|other| other.is_servable());
        let mut all = std::iter::once(live).chain(others);
        all.find(|service| self.is_base_of(service))
    }

    /// Like [`Self::is_of`], for itself or its base model.
    fn is_base_of(&self, live: &LiveModel) -> bool {
        match &self.adapter {
            None => self.is_of(live),
            Some(_) => {
                let can_be_apart = self.card.capabilities.can_be_apart();
                self.card == live.card.of_adapter(&self.card.name)
                    && (can_be_apart || self.endpoint == live.endpoint())
            }
        }
    }
}

genset_backend_common::debug_as!(|it| ServedModel { card: it.card, .. });

type ModelMap = Arc<BTreeMap<String, Arc<ServedModel>>>;

/// The model with this name or alias.
fn named<'a>(map: &'a ModelMap, name: &str) -> Option<&'a Arc<ServedModel>> {
    let by_alias = || {
        map.values()
            .find(|model| model.card.aliases.iter().any(|alias| alias == name))
    };
    map.get(name).or_else(by_alias)
}

type LiveMap = Arc<BTreeMap<String, LiveModel>>;
/// Why models are not ready, by name.
type Failures = BTreeMap<String, Failure>;

/// Why a model is not ready.
#[derive(Debug, Clone)]
enum Failure {
    /// There are too many other models.
    NoRoom(EngineError),
    /// The error of the last attempt to prepare it.
    Unprepared(EngineError),
}

impl Failure {
    /// Whether the failure persists as time passes: it is neither a lack of room, nor an unreachable or slow worker.
    fn is_lasting(&self) -> bool {
        match self {
            Self::NoRoom(_) => false,
            Self::Unprepared(error) => {
                !error.policy().is_retryable && error.kind() != ErrorKind::DeadlineExceeded
            }
        }
    }

    fn into_error(self) -> EngineError {
        match self {
            Self::NoRoom(error) | Self::Unprepared(error) => error,
        }
    }
}

/// The models that live workers serve. A model is included once it is ready and routable. Clones share them.
#[derive(Debug, Clone)]
pub struct Models {
    map: Arc<watch::Sender<ModelMap>>,
    failures: Arc<watch::Sender<Failures>>,
    live: watch::Receiver<LiveMap>,
    lingering: Lingering,
    layers: Layers,
    work: WorkThreads,
    tasks: TaskTracker,
    shutdown: CancellationToken,
}

impl Models {
    /// Starts to follow the runtime's discovery, within the config's limits.
    #[must_use]
    pub fn follow(runtime: &Runtime, config: &FrontendConfig) -> Self {
        let directory = match &config.workers {
            Some(scope) => ModelDirectory::follow_scope(runtime, scope),
            None => ModelDirectory::follow(runtime),
        };
        let models = Self {
            map: Arc::new(watch::Sender::new(ModelMap::default())),
            failures: Arc::default(),
            live: directory.subscribe(),
            lingering: Lingering::new(config.model_linger),
            layers: Layers::register(runtime.metrics(), config.router.clone()),
            work: WorkThreads::new(config.work_threads),
            tasks: TaskTracker::new(),
            shutdown: CancellationToken::new(),
        };
        let chosen = Chosen::register(runtime.metrics(), config.max_models);
        let left_out = LeftOutWorkers::default();
        runtime.metrics().register(
            "genset_frontend_left_out_workers",
            "Workers whose card differs from the preferred one: they get no new requests once that one is ready",
            left_out.clone(),
        );
        models.work.register(runtime.metrics());
        let follower = Follower {
            directory,
            left_out,
            models: models.clone(),
            timeout: config.model_timeout,
            parsers: config.parsers.clone(),
            max_running_choices: config.max_running_choices,
            tokenizer_cache_bytes: config.tokenizer_cache_bytes,
            media: Fetcher::new(&config.media, models.work.clone()),
            reading: Semaphore::new(MODELS_READ_AT_ONCE),
            timings: PromptTimings::register(runtime.metrics()),
            admissions: Admissions::register(
                runtime.metrics(),
                ModelLimits {
                    running: config.max_model_running_requests,
                    waiting: config.max_model_waiting_requests,
                },
            ),
        };
        let shutdown = models.shutdown.clone();
        models.tasks.spawn(async move {
            tokio::select! {
                biased;
                () = shutdown.cancelled() => {}
                () = follower.run(chosen) => {}
            }
        });
        models
    }

    /// The threads for long work on any request.
    pub(crate) fn work(&self) -> &WorkThreads {
        &self.work
    }

    /// The model with this name or alias.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<Arc<ServedModel>> {
        named(&self.map.borrow(), name).cloned()
    }

    /// The workers of the model with this name.
    #[must_use]
    pub fn workers(&self, name: &str) -> Option<LiveModel> {
        self.live.borrow().get(name).cloned()
    }

    /// The names of the models that workers announce, ready or not.
    #[must_use]
    pub fn announced(&self) -> Vec<String> {
        servable(&self.live.borrow()).into_keys().collect()
    }

    /// Every model, by name.
    #[must_use]
    pub fn all(&self) -> Vec<Arc<ServedModel>> {
        self.map.borrow().values().cloned().collect()
    }

    /// Waits until at least one model is ready.
    ///
    /// # Cancel safety
    /// Nothing is lost when the future is dropped.
    pub async fn any(&self) -> Option<Arc<ServedModel>> {
        let mut map = self.map.subscribe();
        let map = map.wait_for(|map| !map.is_empty()).await.ok()?;
        let mut models = map.values();
        // An adapter always comes with its base model.
        models.find(|model| model.adapter.is_none()).cloned()
    }

    /// Waits until the model of this name or alias is ready.
    ///
    /// # Errors
    /// Why it cannot be prepared, if a retry would not help: its files or its settings are invalid. Preparation is retried
    /// all the same, because another worker may bring better ones.
    ///
    /// # Cancel safety
    /// Nothing is lost when the future is dropped.
    pub async fn named(&self, name: &str) -> Result<Arc<ServedModel>, EngineError> {
        let mut map = self.map.subscribe();
        let mut failures = self.failures.subscribe();
        let is_lasting = |failures: &Failures| {
            let failure = self.failure(failures, name);
            failure.as_ref().is_some_and(Failure::is_lasting)
        };
        let over = || EngineError::internal("this process no longer follows the models");
        tokio::select! {
            biased;
            map = map.wait_for(|map| named(map, name).is_some()) => {
                let model = map.ok().and_then(|map| named(&map, name).cloned());
                model.ok_or_else(over)
            }
            failures = failures.wait_for(is_lasting) => {
                let failure = failures.ok().and_then(|failures| self.failure(&failures, name));
                Err(failure.map_or_else(over, Failure::into_error))
            }
        }
    }

    /// From now on, no answer waits for an instance to take it over, because this process ends. Current waiters get the error
    /// at once.
    pub fn expect_nobody(&self) {
        self.layers.expect_nobody();
    }

    /// Stops following and waits until it has ended.
    pub async fn shutdown(&self) {
        self.shutdown.cancel();
        self.tasks.close();
        self.tasks.wait().await;
    }
}
