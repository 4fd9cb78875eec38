//! [`ServedModel`]: a model ready to answer text, and [`Models`]: those that live workers serve, prepared as they appear.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use genset_backend_common::ports::Generate;
use genset_backend_common::{EngineError, ErrorKind, ModelCard, TokenId};
use genset_runtime::{EndpointName, LiveModel, ModelDirectory, Runtime, SelectionMode};
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use serde::Deserialize;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::config::FrontendConfig;
use crate::parsers::{ParserNames, Parsers};
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
}

/// What a model's files say about text.
#[derive(Debug)]
pub struct TextFiles {
    /// Text to tokens and back.
    pub tokenizer: Arc<TextTokenizer>,
    /// Messages to text; `None` when the model has no chat template.
    pub template: Option<ChatTemplate>,
    /// The tokens that end a sequence.
    pub eos_token_ids: Vec<TokenId>,
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
    /// Reads a model's files; `file` gives them by name.
    ///
    /// # Errors
    /// `InvalidArgument`, naming the file at fault.
    pub fn read(file: impl Fn(&str) -> Option<Vec<u8>>) -> Result<Self, EngineError> {
        let required = |name: &'static str| {
            file(name).ok_or_else(|| {
                EngineError::invalid_argument(name, "the model's workers publish no such file")
            })
        };
        let tokenizer = TextTokenizer::from_bytes(&required("tokenizer.json")?)
            .map_err(|error| bad_file("tokenizer.json", error))?;
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
        Ok(Self {
            tokenizer: Arc::new(tokenizer),
            template,
            eos_token_ids,
        })
    }
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
}

impl Follower {
    async fn run(self) {
        let mut live = self.directory.subscribe();
        let mut pause = RETRY_PAUSES.0;
        loop {
            let mut has_failed = false;
            let wanted = live.borrow_and_update().clone();
            self.count_left_out(&wanted);
            self.map.send_modify(|map| {
                Arc::make_mut(map)
                    .retain(|name, known| wanted.get(name).is_some_and(|live| known.is_of(live)));
            });
            for (name, model) in wanted.iter() {
                if self.map.borrow().contains_key(name) {
                    continue;
                }
                match self.prepare(model).await {
                    Ok(ready) => {
                        tracing::info!(model = name, "model ready");
                        self.map.send_modify(|map| {
                            drop(Arc::make_mut(map).insert(name.clone(), ready))
                        });
                    }
                    Err(error) => {
                        has_failed = true;
                        tracing::error!(model = name, kind = %error.kind(), %error, "the model cannot be served");
                    }
                }
            }
            let retry = async {
                if !has_failed {
                    std::future::pending::<()>().await;
                }
                tokio::time::sleep(pause).await;
            };
            tokio::select! {
                biased;
                changed = live.changed() => {
                    if changed.is_err() {
                        return;
                    }
                    pause = RETRY_PAUSES.0;
                }
                () = retry => pause = (pause * 2).min(RETRY_PAUSES.1),
            }
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
        let text = if live.card.takes_tokens() {
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
        }))
    }

    async fn fetch_text(&self, live: &LiveModel) -> Result<TextFiles, EngineError> {
        let mut files = BTreeMap::new();
        for artifact in &live.card.artifacts {
            let content = self.directory.fetch(live, artifact, self.timeout).await?;
            files.insert(artifact.name.clone(), content);
        }
        // Building a tokenizer of a quarter million entries takes a second.
        let read = move || TextFiles::read(|name| files.get(name).cloned());
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
