//! [`ServedModel`]: a model ready to answer text, and [`Models`]: those that live workers serve, prepared as they appear.

mod admission;
mod infill;
mod matryoshka;

use std::collections::BTreeMap;
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use genset_backend_common::ports::Generate;
use genset_backend_common::{EngineError, ErrorKind, InputKind, ModelCard, TokenId};
use genset_runtime::{EndpointName, LiveModel, ModelDirectory, Runtime, SelectionMode};
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use serde::Deserialize;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

pub(crate) use admission::{ModelAdmission, Place};
pub use infill::Infill;
pub use matryoshka::Matryoshka;

use admission::{Admissions, ModelLimits};

use crate::config::FrontendConfig;
use crate::parsers::{ParserNames, Parsers};
use crate::pipeline::PromptTimings;
use crate::text::{ChatTemplate, TemplateSource, TextTokenizer};

/// A model with everything a text request needs.
pub struct ServedModel {
    /// What its workers publish.
    pub card: ModelCard,
    /// The endpoint its workers serve.
    pub endpoint: EndpointName,
    /// Seconds since 1970 when this server first saw it.
    pub created: u64,
    /// Its instances.
    pub engine: Arc<dyn Generate>,
    /// How text becomes tokens and back; `None` for engines that do that themselves.
    pub text: Option<TextFiles>,
    /// How its answers are taken apart.
    pub parsers: Parsers,
    /// How long its prompts take to make.
    pub timings: PromptTimings,
    /// How many of its requests this server answers at once.
    pub(crate) admission: Arc<ModelAdmission>,
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
    /// The same with the fuel of a few milliseconds, to be rendered where it would hold up others.
    pub quick_template: Option<ChatTemplate>,
    /// The tokens that end a sequence.
    pub eos_token_ids: Vec<TokenId>,
    /// The lengths its embeddings may be cut to.
    pub matryoshka: Matryoshka,
    /// How it is asked for what stands between two texts; `None` when it cannot be.
    pub infill: Option<&'static Infill>,
}

impl ServedModel {
    /// Whether it is what `live` says.
    fn is_of(&self, live: &LiveModel) -> bool {
        self.card == live.card && self.endpoint == live.endpoint
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
    /// Reads a model's files; `file` gives them by name. The tokenizer keeps at most so many bytes of known prompts.
    ///
    /// # Errors
    /// `InvalidArgument`, naming the file at fault.
    pub fn read(
        file: impl Fn(&str) -> Option<Vec<u8>>,
        tokenizer_cache_bytes: usize,
    ) -> Result<Self, EngineError> {
        let required = |name: &'static str| {
            file(name).ok_or_else(|| {
                EngineError::invalid_argument(name, "the model's workers publish no such file")
            })
        };
        let tokenizer = TextTokenizer::from_bytes(&required("tokenizer.json")?)
            .map_err(|error| bad_file("tokenizer.json", error))?
            .with_prefix_cache(tokenizer_cache_bytes);
        let tokenizer_config = required("tokenizer_config.json")?;
        let source = match file("chat_template.jinja").map(String::from_utf8) {
            Some(Ok(jinja)) => TemplateSource::from_jinja(jinja, &tokenizer_config).map(Some),
            Some(Err(error)) => return Err(bad_file("chat_template.jinja", error)),
            None => TemplateSource::from_tokenizer_config(&tokenizer_config),
        };
        let source = source.map_err(|error| bad_file("tokenizer_config.json", error))?;
        let template = source.as_ref().map(TemplateSource::compile).transpose();
        let template = template.map_err(|error| bad_file("tokenizer_config.json", error))?;
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
        Ok(Self {
            infill: Infill::of(&tokenizer),
            tokenizer: Arc::new(tokenizer),
            quick_template: template
                .clone()
                .map(|template| template.with_fuel(QUICK_FUEL)),
            template,
            eos_token_ids,
            matryoshka: matryoshka.unwrap_or_default(),
        })
    }
}

/// Engines that tokenize prompts by themselves get text; those that only embed never do.
fn needs_tokenizer(card: &ModelCard) -> bool {
    let mut inputs = card.capabilities.inputs.iter();
    card.takes_tokens() || inputs.all(|kind| *kind == InputKind::Embed)
}

fn bad_file(name: &str, error: impl std::error::Error + Send + Sync + 'static) -> EngineError {
    EngineError::invalid_argument(name, &error).with_source(error)
}

type ModelMap = Arc<BTreeMap<String, Arc<ServedModel>>>;
type LiveMap = Arc<BTreeMap<String, LiveModel>>;

/// The models that live workers serve. A model is in it once it is ready and routable. Clones share.
#[derive(Debug, Clone)]
pub struct Models {
    map: Arc<watch::Sender<ModelMap>>,
    live: watch::Receiver<LiveMap>,
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
            live: directory.subscribe(),
            tasks: TaskTracker::new(),
            shutdown: CancellationToken::new(),
        };
        let left_out = LeftOutWorkers::default();
        runtime.metrics().register(
            "genset_frontend_left_out_workers",
            "Workers that get no requests because their card differs from the one in use",
            left_out.clone(),
        );
        let follower = Follower {
            directory,
            left_out,
            map: Arc::clone(&models.map),
            selection: config.selection,
            timeout: config.model_timeout,
            parsers: config.parsers.clone(),
            tokenizer_cache_bytes: config.tokenizer_cache_bytes,
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
                () = follower.run() => {}
            }
        });
        models
    }

    /// A model by name or alias.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<Arc<ServedModel>> {
        let map = self.map.borrow();
        let by_alias = || {
            map.values()
                .find(|model| model.card.aliases.iter().any(|alias| alias == name))
        };
        map.get(name).or_else(by_alias).cloned()
    }

    /// The workers of a model, by its name.
    #[must_use]
    pub fn workers(&self, name: &str) -> Option<LiveModel> {
        self.live.borrow().get(name).cloned()
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
        map.values().next().cloned()
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

/// Workers left out, by model.
type LeftOutWorkers = Family<[(&'static str, String); 1], Gauge>;

struct Follower {
    directory: ModelDirectory,
    left_out: LeftOutWorkers,
    map: Arc<watch::Sender<ModelMap>>,
    selection: SelectionMode,
    timeout: Duration,
    parsers: ParserNames,
    tokenizer_cache_bytes: usize,
    timings: PromptTimings,
    admissions: Admissions,
}

/// A model on its way to being ready.
struct Preparing<'a> {
    live: LiveModel,
    ready: Pin<Box<dyn Future<Output = Arc<ServedModel>> + Send + 'a>>,
}

impl Follower {
    async fn run(self) {
        let mut live = self.directory.subscribe();
        // Side by side: a model whose only worker hangs must not keep the others waiting.
        let mut preparing = BTreeMap::<String, Preparing<'_>>::new();
        loop {
            let wanted = live.borrow_and_update().clone();
            self.count_left_out(&wanted);
            self.admissions.retain(|name| wanted.contains_key(name));
            self.map.send_modify(|map| {
                Arc::make_mut(map)
                    .retain(|name, known| wanted.get(name).is_some_and(|live| known.is_of(live)));
            });
            preparing.retain(|name, known| {
                wanted
                    .get(name)
                    .is_some_and(|live| live.is_same_service(&known.live))
            });
            for (name, live) in wanted.iter() {
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
                }
            }
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(RETRY_PAUSES.1);
        }
    }

    fn count_left_out(&self, live: &LiveMap) {
        self.left_out.clear();
        for (name, model) in live.iter() {
            let count = i64::try_from(model.left_out.len()).unwrap_or(i64::MAX);
            self.left_out
                .get_or_create(&[("model", name.clone())])
                .set(count);
        }
    }

    async fn prepare(&self, live: &LiveModel) -> Result<Arc<ServedModel>, EngineError> {
        let parsers = Parsers::choose(&live.card, &self.parsers)?;
        let client = self
            .directory
            .client(live, self.selection, self.timeout)
            .await?;
        let text = if needs_tokenizer(&live.card) {
            Some(self.fetch_text(live).await?)
        } else {
            None
        };
        let created = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .map_or(0, |since| since.as_secs());
        Ok(Arc::new(ServedModel {
            card: live.card.clone(),
            endpoint: live.endpoint.clone(),
            created,
            engine: Arc::new(client),
            text,
            parsers,
            timings: self.timings.clone(),
            admission: self.admissions.of(&live.card.name),
        }))
    }

    async fn fetch_text(&self, live: &LiveModel) -> Result<TextFiles, EngineError> {
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
