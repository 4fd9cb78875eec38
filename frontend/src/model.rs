//! [`ServedModel`]: a model ready to answer text, and [`Models`]: those that live workers serve, prepared as they appear.

mod adapters;
mod admission;
mod awaited;
mod chosen;
mod embed_prompt;
mod infill;
mod lingering;
mod matryoshka;

use std::collections::BTreeMap;
use std::num::NonZeroUsize;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use genset_backend_common::ports::Generate;
use genset_backend_common::{
    CancelReason, EngineError, ErrorKind, ModelCard, TokenId, error::At, request::Shared,
};
use genset_router::Layers;
use genset_runtime::{EndpointName, LiveModel, ModelDirectory, Runtime};
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use serde::Deserialize;
use tokio::sync::{Semaphore, watch};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

pub use adapters::ServedAdapter;
pub(crate) use admission::{ModelAdmission, Place};
pub use infill::Infill;
pub use matryoshka::Matryoshka;

use admission::{Admissions, ModelLimits};
use chosen::Chosen;
use lingering::Lingering;

use crate::clock::now;
use crate::config::FrontendConfig;
use crate::media::Fetcher;
use crate::parsers::{ParserNames, Parsers};
use crate::pipeline::PromptTimings;
use crate::text::{ChatTemplate, TemplateSource, TextTokenizer};
use crate::work::WorkThreads;

/// A model with everything a text request needs.
pub struct ServedModel {
    /// What its workers publish.
    pub card: ModelCard,
    /// Where it is a LoRA adapter of another model: which, and of what.
    pub adapter: Option<ServedAdapter>,
    /// The endpoint its workers served when it was prepared.
    pub endpoint: EndpointName,
    /// Seconds since 1970 when this server first saw it.
    pub created: u64,
    /// Its instances.
    pub engine: Arc<dyn Generate>,
    /// How text becomes tokens and back; `None` for engines that do that themselves.
    pub text: Option<Arc<TextFiles>>,
    /// How its answers are taken apart.
    pub parsers: Parsers,
    /// How long its prompts take to make.
    pub timings: PromptTimings,
    /// How many of its requests this server answers at once.
    pub(crate) admission: Arc<ModelAdmission>,
    /// How many choices of one of its requests are answered at once.
    pub(crate) max_running_choices: NonZeroUsize,
    /// Where long work on its requests is done.
    pub(crate) work: WorkThreads,
    /// What fetches the images that chats name by URL.
    pub(crate) media: Fetcher,
}

/// How many instructions a chat template may take where it holds up others.
const QUICK_FUEL: u64 = 50_000;

/// What a model's files say about text.
#[derive(Debug)]
pub struct TextFiles {
    /// Text to tokens and back.
    pub tokenizer: Arc<TextTokenizer>,
    /// Messages to text; `None` when the model has no chat template.
    pub template: Option<ChatTemplate>,
    /// The same with the fuel and the room of a few milliseconds, to be rendered where it would hold up others.
    pub quick_template: Option<ChatTemplate>,
    /// The tokens that end a sequence.
    pub eos_token_ids: Shared<Vec<TokenId>>,
    /// The lengths its embeddings may be cut to.
    pub matryoshka: Matryoshka,
    /// What stands before every text to embed; empty for most models.
    pub embed_prompt: String,
    /// How it is asked for what stands between two texts; `None` when it cannot be.
    pub infill: Option<&'static Infill>,
}

impl ServedModel {
    /// Whether it is what `live` says. Where prefill and decode can be done apart, its layers follow whoever does them.
    fn is_of(&self, live: &LiveModel) -> bool {
        let can_be_apart = self.card.capabilities.can_be_apart();
        self.card == live.card && (can_be_apart || self.endpoint == live.endpoint())
    }

    /// The same of the model that it is, or is an adapter of.
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

impl std::fmt::Debug for ServedModel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ServedModel")
            .field("card", &self.card)
            .finish_non_exhaustive()
    }
}

/// `generation_config.json` and `config.json`, as far as they matter here.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct TokenConfig {
    eos_token_id: Option<OneOrMany>,
}

#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum OneOrMany {
    One(TokenId),
    Many(Vec<TokenId>),
}

impl TextFiles {
    /// Reads a model's files; `file` gives them by name. The tokenizer keeps at most so many bytes of known prompts and words.
    ///
    /// # Errors
    /// `InvalidArgument`, naming the file at fault.
    pub fn read(
        file: impl Fn(&str) -> Option<Vec<u8>>,
        tokenizer_cache_bytes: usize,
    ) -> Result<Self, EngineError> {
        let required = |name: &'static str| {
            file(name).ok_or_else(|| {
                EngineError::invalid_argument(
                    At::other(name),
                    "the model's workers publish no such file",
                )
            })
        };
        let tokenizer = TextTokenizer::from_bytes(&required("tokenizer.json")?)
            .map_err(|error| bad_file("tokenizer.json", error))?
            .with_cache(tokenizer_cache_bytes);
        let tokenizer_config = required("tokenizer_config.json")?;
        let mut template_file = "tokenizer_config.json";
        let source = match file("chat_template.jinja").map(String::from_utf8) {
            Some(Ok(jinja)) => {
                template_file = "chat_template.jinja";
                TemplateSource::from_jinja(jinja, &tokenizer_config).map(Some)
            }
            Some(Err(error)) => return Err(bad_file("chat_template.jinja", error)),
            None => TemplateSource::from_tokenizer_config(&tokenizer_config),
        };
        let source = source.map_err(|error| bad_file("tokenizer_config.json", error))?;
        let template = source.as_ref().map(TemplateSource::compile).transpose();
        let template = template.map_err(|error| bad_file(template_file, error))?;
        let mut eos_token_ids = Vec::new();
        for name in ["generation_config.json", "config.json"] {
            let Some(content) = file(name) else { continue };
            let config: TokenConfig =
                serde_json::from_slice(&content).map_err(|error| bad_file(name, error))?;
            match config.eos_token_id {
                Some(OneOrMany::One(id)) => eos_token_ids.push(id),
                Some(OneOrMany::Many(ids)) => eos_token_ids.extend(ids),
                None => continue,
            }
            break;
        }
        if eos_token_ids.is_empty() {
            let eos = source
                .as_ref()
                .and_then(|source| source.eos_token.as_deref());
            eos_token_ids.extend(eos.and_then(|eos| tokenizer.token_id(eos)));
        }
        let matryoshka = file("config.json").map(|json| Matryoshka::from_config(&json));
        let matryoshka = matryoshka.transpose();
        let matryoshka = matryoshka.map_err(|error| bad_file("config.json", error))?;
        let prompts = "config_sentence_transformers.json";
        let embed_prompt = file(prompts).map(|json| embed_prompt::from_config(&json));
        let embed_prompt = embed_prompt.transpose();
        let embed_prompt = embed_prompt.map_err(|error| bad_file(prompts, error))?;
        Ok(Self {
            embed_prompt: embed_prompt.unwrap_or_default(),
            infill: Infill::of(&tokenizer),
            tokenizer: Arc::new(tokenizer),
            quick_template: template
                .clone()
                .map(|template| template.into_quick(QUICK_FUEL)),
            template,
            eos_token_ids: eos_token_ids.into(),
            matryoshka: matryoshka.unwrap_or_default(),
        })
    }
}

/// Engines that tokenize prompts by themselves get text; those that only embed or score never do.
fn needs_tokenizer(card: &ModelCard) -> bool {
    let mut inputs = card.capabilities.inputs.iter();
    card.takes_tokens() || inputs.all(|kind| !kind.is_prompt())
}

fn bad_file(name: &str, error: impl std::error::Error + Send + Sync + 'static) -> EngineError {
    EngineError::invalid_argument(At::other(name), &error).with_source(error)
}

type ModelMap = Arc<BTreeMap<String, Arc<ServedModel>>>;

/// The model of this name or alias.
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
    /// There is no room for it beside the others.
    NoRoom(EngineError),
    /// What the last attempt to prepare it failed with.
    Unprepared(EngineError),
}

impl Failure {
    /// Whether it stays when nothing but time passes: it is neither for want of room, nor a worker that could not be reached, nor
    /// one that was slow.
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

/// The models that live workers serve. A model is in it once it is ready and routable. Clones share.
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
    /// Begins to follow the runtime's discovery, as far as the config says.
    #[must_use]
    pub fn follow(runtime: &Runtime, config: &FrontendConfig) -> Self {
        let directory = match &config.endpoint {
            Some(endpoint) => ModelDirectory::follow_endpoint(runtime, endpoint),
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
            "Workers that get no requests because their card differs from the one in use",
            left_out.clone(),
        );
        models.work.register(runtime.metrics());
        let follower = Follower {
            directory,
            left_out,
            map: Arc::clone(&models.map),
            failures: Arc::clone(&models.failures),
            lingering: models.lingering.clone(),
            layers: models.layers.clone(),
            timeout: config.model_timeout,
            parsers: config.parsers.clone(),
            max_running_choices: config.max_running_choices,
            tokenizer_cache_bytes: config.tokenizer_cache_bytes,
            work: models.work.clone(),
            media: Fetcher::new(&config.media),
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

    /// Where long work on any request is done.
    pub(crate) fn work(&self) -> &WorkThreads {
        &self.work
    }

    /// A model by name or alias.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<Arc<ServedModel>> {
        named(&self.map.borrow(), name).cloned()
    }

    /// The workers of a model, by its name.
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
        // An adapter is there with its model.
        models.find(|model| model.adapter.is_none()).cloned()
    }

    /// Waits until the model of this name or alias is ready.
    ///
    /// # Errors
    /// Why it cannot be prepared, when trying again would not help: its files or its settings are at fault. It is tried again
    /// all the same, for another worker may bring better ones.
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
        let over = || EngineError::internal("the models are followed no more");
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

    /// From now on no answer waits for an instance to take it over: this process ends, and who waited gets the error at once.
    pub fn expect_nobody(&self) {
        self.layers.expect_nobody();
    }

    /// Ends the following and waits for it.
    pub async fn shutdown(&self) {
        self.shutdown.cancel();
        self.tasks.close();
        self.tasks.wait().await;
    }
}

/// Pauses before a model that could not be prepared is tried again, doubling from the first to the last.
const RETRY_PAUSES: (Duration, Duration) = (Duration::from_millis(500), Duration::from_secs(30));

/// The files of so many models are fetched and read at once: each model's may take 128 MiB, and as much again as a tokenizer.
const MODELS_READ_AT_ONCE: usize = 8;

/// Workers left out, by model.
type LeftOutWorkers = Family<[(&'static str, String); 1], Gauge>;

struct Follower {
    directory: ModelDirectory,
    left_out: LeftOutWorkers,
    map: Arc<watch::Sender<ModelMap>>,
    failures: Arc<watch::Sender<Failures>>,
    lingering: Lingering,
    layers: Layers,
    timeout: Duration,
    parsers: ParserNames,
    tokenizer_cache_bytes: usize,
    max_running_choices: NonZeroUsize,
    /// A permit for each model whose files are being fetched and read.
    reading: Semaphore,
    timings: PromptTimings,
    admissions: Admissions,
    work: WorkThreads,
    media: Fetcher,
}

/// A model on its way to being ready.
struct Preparing<'a> {
    live: LiveModel,
    ready: Pin<Box<dyn Future<Output = Arc<ServedModel>> + Send + 'a>>,
}

impl Follower {
    async fn run(self, mut chosen: Chosen) {
        let mut live = self.directory.subscribe();
        // Side by side: a model whose only worker hangs must not keep the others waiting.
        let mut preparing = BTreeMap::<String, Preparing<'_>>::new();
        loop {
            let announced = servable(&live.borrow_and_update());
            let (wanted, left_out) = chosen.of(&announced);
            self.count_left_out(&wanted);
            self.admissions.retain(|name| wanted.contains_key(name));
            self.map.send_modify(|map| {
                Arc::make_mut(map).retain(|name, known| {
                    // An adapter stays as long as its model is there and has it.
                    let name = known.adapter.as_ref().map_or(name, |served| &served.base);
                    let is_served = wanted.get(name).is_some_and(|live| known.is_base_of(live));
                    if !is_served {
                        self.lingering.gone(&known.card);
                    }
                    is_served
                });
            });
            self.map
                .send_if_modified(|map| adapters::renew(Arc::make_mut(map), &wanted));
            self.failures.send_if_modified(|failures| {
                let known = failures.len();
                // Those that have come by a place since are not told that there is none.
                let is_stale = |failure: &Failure| matches!(failure, Failure::NoRoom(_));
                failures.retain(|name, failure| wanted.contains_key(name) && !is_stale(failure));
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
                if !self.map.borrow().contains_key(name) && !preparing.contains_key(name) {
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
                    self.failures
                        .send_if_modified(|failures| failures.remove(&name).is_some());
                    self.map
                        .send_modify(|map| drop(Arc::make_mut(map).insert(name, ready)));
                }
            }
        }
    }

    fn begin(&self, live: &LiveModel) -> Preparing<'_> {
        let wanted = live.clone();
        Preparing {
            live: live.clone(),
            ready: Box::pin(async move { self.prepare_patiently(&wanted).await }),
        }
    }

    /// Prepares a model, again and again until it is done.
    async fn prepare_patiently(&self, live: &LiveModel) -> Arc<ServedModel> {
        let mut pause = RETRY_PAUSES.0;
        loop {
            match self.prepare(live).await {
                Ok(ready) => return ready,
                Err(error) => {
                    let model = &live.card.name;
                    tracing::error!(model, kind = %error.kind(), %error, "the model cannot be served");
                    let failure = Failure::Unprepared(error);
                    self.failures
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
        let parsers = Parsers::choose(&live.card, &self.parsers)?;
        let layers = &self.layers;
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
            work: self.work.clone(),
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
        // Building a tokenizer of a quarter million entries takes a second.
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

/// The models that whole requests can be sent to: not those of which there are prefill instances alone.
fn servable(announced: &BTreeMap<String, LiveModel>) -> BTreeMap<String, LiveModel> {
    let servable = announced.iter().filter(|(_, live)| live.is_servable());
    servable
        .map(|(name, live)| (name.clone(), live.clone()))
        .collect()
}

/// The next model that is ready; never, while none is being prepared.
///
/// Cancel safe: what is not ready goes on with the next call.
async fn next_ready(preparing: &mut BTreeMap<String, Preparing<'_>>) -> Arc<ServedModel> {
    if preparing.is_empty() {
        return std::future::pending().await;
    }
    let all = preparing.values_mut().map(|preparing| &mut preparing.ready);
    futures_util::future::select_all(all).await.0
}
