//! [`WorkerConfig`]: a Worker's settings for its engine: names and overrides for the card, limits and deadlines.

use std::collections::BTreeSet;
use std::time::Duration;

use serde_json::Value;

use crate::card::{
    Artifact, DEFAULT_MIGRATION_LIMIT, EndpointType, ModelCard, TemplateParsers, check_name,
};
use crate::config::{EngineConfig, InputKind};
use crate::controls::Adapter;
use crate::engine::Role;
use crate::error::{At, EngineError};

/// A Worker's settings for its engine. `Default` suits production; every limit can be changed.
///
/// # Examples
/// ```
/// use std::time::Duration;
/// use genset_backend_common::worker::WorkerConfig;
///
/// let config = WorkerConfig { grace: Duration::from_secs(120), ..WorkerConfig::default() };
/// config.validate().unwrap();
/// ```
#[derive(Debug, Clone)]
pub struct WorkerConfig {
    /// The name clients use; `None` for the engine's name.
    pub model_name: Option<String>,
    /// Other names for the model.
    pub aliases: Vec<String>,
    /// The APIs to offer; `None` for all that the engine supports.
    pub endpoint_types: Option<BTreeSet<EndpointType>>,
    /// Lowers the context length; `None` for the engine's.
    pub context_length_tokens: Option<u32>,
    /// The role of the instance.
    pub role: Role,
    /// The name of the tool-call parser, or `none`. `None` or `auto`: the one that the model's chat template shows.
    pub tool_parser: Option<String>,
    /// The name of the reasoning parser, likewise.
    pub reasoning_parser: Option<String>,
    /// How often a request may migrate to another instance; 0 disables migration.
    pub migration_limit: u32,
    /// Free metadata for the card.
    pub user_data: Value,
    /// Files a frontend needs.
    pub artifacts: Vec<Artifact>,
    /// LoRA adapters to load before the worker serves.
    pub adapters: Vec<Adapter>,
    /// Limits on requests.
    pub limits: RequestLimits,
    /// Limit of the engine's `start`.
    pub start_timeout: Duration,
    /// Limit of each call to request plane and discovery.
    pub register_timeout: Duration,
    /// How long running requests may continue once the worker drains.
    pub grace: Duration,
    /// Limit of the engine's `drain`.
    pub drain_timeout: Duration,
    /// Limit of the engine's `cleanup`.
    pub cleanup_timeout: Duration,
    /// Settings for the canary.
    pub canary: CanaryConfig,
}

/// Limits on the requests of one worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RequestLimits {
    /// The maximum number of requests in the engine, at least 1. Further requests wait. The engine's
    /// [`max_num_seqs`](EngineConfig::max_num_seqs) does not lower it: the engine schedules its requests itself.
    pub max_running: usize,
    /// The maximum number of waiting requests. Further ones are refused as `Overloaded`.
    pub max_waiting: usize,
    /// Deadline of requests without one; `None` for no deadline. If another instance had the request
    /// before, it counts from the time the first one got it.
    pub request_timeout: Option<Duration>,
    /// The longest silence between two items of a stream of tokens or text, enforced within twice its length; `None` for no
    /// limit. It counts from the return of `generate`, and from the engine's last [step](crate::HealthReporter::report_step) if
    /// it reports steps. Before the first item, an engine that answers other requests is not silent.
    pub idle_timeout: Option<Duration>,
}

impl Default for RequestLimits {
    fn default() -> Self {
        Self {
            max_running: 1024,
            max_waiting: 4096,
            request_timeout: Some(Duration::from_secs(600)),
            idle_timeout: Some(Duration::from_secs(120)),
        }
    }
}

/// How a Worker probes its engine: once before it is listed, then after each interval without a sign of life.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CanaryConfig {
    /// Silence after which a canary is sent; `None` to probe only at start.
    pub interval: Option<Duration>,
    /// Limit of one canary.
    pub timeout: Duration,
    /// Consecutive failures after which a serving engine counts as dead, at least 1.
    pub max_failures: u32,
}

impl Default for CanaryConfig {
    fn default() -> Self {
        Self {
            interval: Some(Duration::from_secs(30)),
            timeout: Duration::from_secs(30),
            max_failures: 3,
        }
    }
}

impl Default for WorkerConfig {
    fn default() -> Self {
        Self {
            model_name: None,
            aliases: Vec::new(),
            endpoint_types: None,
            context_length_tokens: None,
            role: Role::default(),
            tool_parser: None,
            reasoning_parser: None,
            migration_limit: DEFAULT_MIGRATION_LIMIT,
            user_data: Value::Null,
            artifacts: Vec::new(),
            adapters: Vec::new(),
            limits: RequestLimits::default(),
            start_timeout: Duration::from_secs(3600),
            register_timeout: Duration::from_secs(10),
            grace: Duration::from_secs(30),
            drain_timeout: Duration::from_secs(30),
            cleanup_timeout: Duration::from_secs(30),
            canary: CanaryConfig::default(),
        }
    }
}

impl WorkerConfig {
    /// Checks the values against their ranges.
    ///
    /// # Errors
    /// `InvalidArgument`, naming the field.
    pub fn validate(&self) -> Result<(), EngineError> {
        if let Some(name) = &self.model_name {
            check_name("model_name".into(), name)?;
        }
        for alias in &self.aliases {
            check_name("aliases".into(), alias)?;
        }
        let problem = if self.context_length_tokens == Some(0) {
            ("context_length", "must be at least 1")
        } else if self.limits.max_running == 0 {
            ("max_running", "must be at least 1")
        } else if self.canary.timeout.is_zero() {
            ("canary_timeout", "must be more than 0")
        } else if self.canary.max_failures == 0 {
            ("canary.max_failures", "must be at least 1")
        } else if self.endpoint_types.as_ref().is_some_and(BTreeSet::is_empty) {
            (
                "endpoint_types",
                "name at least one of chat, completions, embeddings, scores",
            )
        } else {
            return self.validate_adapters();
        };
        Err(EngineError::invalid_argument(problem.0, problem.1))
    }

    fn validate_adapters(&self) -> Result<(), EngineError> {
        let mut names = BTreeSet::new();
        for adapter in &self.adapters {
            adapter.check()?;
            if !names.insert(&adapter.name) {
                let problem = format!("{:?} is named twice", adapter.name);
                return Err(EngineError::invalid_argument("--adapter", problem));
            }
        }
        Ok(())
    }

    /// Returns the engine's config and card with the operator's overrides.
    ///
    /// # Errors
    /// `InvalidArgument` when an override contradicts the engine's abilities.
    pub fn apply(
        &self,
        mut engine: EngineConfig,
    ) -> Result<(EngineConfig, ModelCard), EngineError> {
        engine.validate()?;
        if !engine.capabilities.plays(self.role) {
            let problem = format!("this engine cannot be a {} instance", self.role);
            return Err(EngineError::unsupported(At::other("role"), problem));
        }
        if let Some(context) = self.context_length_tokens {
            if context > engine.context_length_tokens {
                return Err(EngineError::invalid_argument(
                    "context_length",
                    format!(
                        "the engine's context holds {} tokens, not {context}",
                        engine.context_length_tokens
                    ),
                ));
            }
            engine.context_length_tokens = context;
        }
        let mut card = ModelCard::from_config(&engine);
        if let Some(types) = &self.endpoint_types {
            for (endpoint, kind, problem) in [
                (
                    EndpointType::Embeddings,
                    InputKind::Embed,
                    "the engine does not embed",
                ),
                (
                    EndpointType::Scores,
                    InputKind::Score,
                    "the engine does not score",
                ),
            ] {
                if types.contains(&endpoint) && !engine.capabilities.inputs.contains(&kind) {
                    return Err(EngineError::invalid_argument("endpoint_types", problem));
                }
            }
            card.endpoint_types.clone_from(types);
        }
        if let Some(name) = &self.model_name {
            card.name.clone_from(name);
        }
        card.aliases.clone_from(&self.aliases);
        card.check_names()?;
        card.role = self.role;
        self.choose_parsers(&mut card);
        card.migration_limit = self.migration_limit;
        card.user_data.clone_from(&self.user_data);
        card.artifacts = self
            .artifacts
            .iter()
            .map(|artifact| artifact.reference.clone())
            .collect();
        Ok((engine, card))
    }

    /// Sets the parsers that the operator names, or else those that the chat template shows.
    fn choose_parsers(&self, card: &mut ModelCard) {
        card.tool_parser = named(self.tool_parser.as_deref());
        card.reasoning_parser = named(self.reasoning_parser.as_deref());
        if !card.endpoint_types.contains(&EndpointType::Chat) {
            return;
        }
        let shown = TemplateParsers::of_artifacts(&self.artifacts);
        let (mut found, mut flags) = (Vec::new(), Vec::new());
        for (kind, parser, name) in [
            ("tool", &mut card.tool_parser, shown.tool),
            ("reasoning", &mut card.reasoning_parser, shown.reasoning),
        ] {
            if let Some(name) = name.filter(|_| parser.is_none()) {
                *parser = Some(name.to_owned());
                found.push(format!("{kind} parser {name}"));
                flags.push(format!("--{kind}-parser none"));
            }
        }
        if !found.is_empty() {
            let (found, flags) = (found.join(", "), flags.join(", "));
            tracing::info!("{found}: found in the chat template ({flags} for none)");
        }
    }
}

/// The parser that a setting names, if it does.
fn named(setting: Option<&str>) -> Option<String> {
    let name = setting.filter(|name| *name != "auto");
    name.map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::card::MAX_MODEL_NAME_BYTES;

    /// The parsers on the card of a worker with these settings and files.
    fn parsers(settings: [Option<&str>; 2], files: &[(&str, &str)]) -> [Option<String>; 2] {
        let artifact = |(name, content): &(&str, &str)| Artifact::new(*name, content.as_bytes());
        let [tool_parser, reasoning_parser] = settings.map(|setting| setting.map(str::to_owned));
        let config = WorkerConfig {
            tool_parser,
            reasoning_parser,
            artifacts: files.iter().map(artifact).collect(),
            ..WorkerConfig::default()
        };
        let (_, card) = config.apply(EngineConfig::new("m", 8)).unwrap();
        [card.tool_parser, card.reasoning_parser]
    }

    const QWEN: &str = r#"{% if tools %}<tool_call>\n{\"name\": 1}\n</tool_call><think></think>"#;

    #[test]
    fn a_parser_is_the_one_named_or_else_the_one_that_the_template_shows() {
        let jinja = [("chat_template.jinja", QWEN)];
        let own = |settings| parsers(settings, &jinja).map(Option::unwrap_or_default);
        assert_eq!(own([None, Some("auto")]), ["hermes", "qwen3"]);
        assert_eq!(own([Some("none"), None]), ["none", "qwen3"]);
        assert_eq!(own([Some("xlam"), Some("none")]), ["xlam", "none"]);
        assert_eq!(parsers([Some("auto"), None], &[]), [None, None]);
    }

    #[test]
    fn the_template_is_that_of_the_frontend() {
        let one = serde_json::json!({ "chat_template": QWEN }).to_string();
        let named = serde_json::json!([
            { "name": "default", "template": "<think></think>" },
            { "name": "tool_use", "template": QWEN },
            { "name": "rag", "template": "<|START_ACTION|>" },
        ]);
        let named = serde_json::json!({ "chat_template": named }).to_string();
        let (one, named) = (one.as_str(), named.as_str());
        let config = "tokenizer_config.json";
        let aside = "additional_chat_templates/tool_use.jinja";
        for files in [
            &[(config, one)][..],
            &[(config, named)],
            &[(config, "{}"), ("chat_template.json", one)],
            &[("chat_template.json", "{}"), (config, one)],
            &[("chat_template.jinja", "<think></think>"), (aside, QWEN)],
        ] {
            let found = parsers([None, None], files).map(Option::unwrap_or_default);
            assert_eq!(found, ["hermes", "qwen3"], "{files:?}");
        }
        let files = [(config, one), ("chat_template.jinja", "{{ messages }}")];
        assert_eq!(parsers([None, None], &files), [None, None]);
    }

    #[test]
    fn a_name_that_no_client_may_give_is_refused() {
        let longest = "a".repeat(MAX_MODEL_NAME_BYTES);
        let too_long = format!("{longest}a");
        for (name, is_good) in [
            (longest.as_str(), true),
            (too_long.as_str(), false),
            (" ", false),
            ("a\n\x1b[31mb", false),
        ] {
            let named = WorkerConfig {
                model_name: Some(name.into()),
                ..WorkerConfig::default()
            };
            let also_named = WorkerConfig {
                aliases: vec![name.into()],
                ..WorkerConfig::default()
            };
            assert_eq!(named.validate().is_ok(), is_good, "{name}");
            assert_eq!(also_named.validate().is_ok(), is_good, "{name}");
            let by_engine = WorkerConfig::default().apply(EngineConfig::new(name, 8));
            assert_eq!(by_engine.is_ok(), is_good, "{name}");
        }
    }
}
