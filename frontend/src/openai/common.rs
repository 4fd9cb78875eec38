//! What chat completions and completions have in common.

use std::collections::BTreeMap;
use std::sync::Arc;

use genset_backend_common::{SamplingOptions, StopConditions, TokenId};
use serde_json::{Value, json};

use super::fields::Fields;
use super::guided::{self, GuidedOptions};
use super::logprobs::LogprobOptions;
use super::response::SERVICE_TIER;
use crate::config::FrontendConfig;
use crate::error::ApiError;

/// Parameters that are accepted and have no effect here; `docs/guide/openai-api.md` lists them.
pub(super) const IGNORED: &[&str] = &[
    "user",
    "metadata",
    "store",
    "prediction",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_options",
    "prompt_cache_retention",
];

/// Bounds on what a request may ask for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RequestLimits {
    /// The largest `n`.
    pub max_choices: u32,
    /// The most stop strings.
    pub max_stop_strings: usize,
    /// The longest stop string, in bytes.
    pub max_stop_bytes: usize,
    /// The most prompts in one completions request.
    pub max_prompts: usize,
    /// The most tools in one chat request.
    pub max_tools: usize,
}

impl From<&FrontendConfig> for RequestLimits {
    fn from(config: &FrontendConfig) -> Self {
        Self {
            max_choices: config.max_choices,
            max_stop_strings: config.max_stop_strings,
            max_stop_bytes: config.max_stop_bytes,
            max_prompts: config.max_prompts,
            max_tools: config.max_tools,
        }
    }
}

/// The parameters both APIs share, checked.
#[derive(Debug, Clone, PartialEq)]
pub struct CommonParams {
    /// The model's name or alias.
    pub model: String,
    /// How many answers to each prompt.
    pub n: u32,
    /// Whether to stream.
    pub stream: bool,
    /// Whether the stream ends with a usage chunk.
    pub include_usage: bool,
    /// Strings that end an answer.
    pub stop_strings: Arc<[String]>,
    /// When else an answer ends; the model's end-of-sequence ids are added later.
    pub stop: StopConditions,
    /// How tokens are chosen.
    pub sampling: SamplingOptions,
    /// The log probabilities it asks for.
    pub logprobs: Option<LogprobOptions>,
    /// What binds the answers.
    pub guided: Option<GuidedOptions>,
    /// Scheduling priority.
    pub priority: i32,
    /// Free values for the engine.
    pub annotations: BTreeMap<String, Value>,
}

impl CommonParams {
    /// Reads the shared fields. `default_max_tokens` applies when the request sets no limit.
    pub(super) fn read(
        fields: &mut Fields,
        limits: &RequestLimits,
        default_max_tokens: Option<u32>,
    ) -> Result<Self, ApiError> {
        let model = fields.string("model")?;
        let model = model.ok_or_else(|| ApiError::invalid("model", "you must provide a model"))?;
        let mut params = Self {
            model,
            n: read_n(fields, limits)?,
            stream: fields.bool("stream")?.unwrap_or(false),
            include_usage: false,
            stop_strings: read_stop(fields, limits)?,
            stop: StopConditions::default(),
            sampling: read_sampling(fields)?,
            logprobs: None,
            guided: None,
            priority: 0,
            annotations: BTreeMap::new(),
        };
        params.include_usage = read_stream_options(fields, params.stream)?;
        let max_tokens = fields
            .u32("max_completion_tokens")?
            .map(|max| ("max_completion_tokens", max));
        let max_tokens = max_tokens.or(fields.u32("max_tokens")?.map(|max| ("max_tokens", max)));
        if let Some((name, 0)) = max_tokens {
            return Err(ApiError::invalid(name, "must be at least 1"));
        }
        params.stop.max_tokens = max_tokens.map(|(_, max)| max).or(default_max_tokens);
        params.read_extensions(fields)?;
        for extension in ["genset", "nvext"] {
            let prefix = if extension == "genset" {
                "genset."
            } else {
                "nvext."
            };
            if let Some(mut inner) = fields.object(extension, prefix)? {
                params.read_extensions(&mut inner)?;
                params.read_annotations(&mut inner)?;
                inner.finish(&[])?;
            }
        }
        fields.refuse(
            "service_tier",
            &[json!("auto"), SERVICE_TIER.into()],
            "this server has one tier, named \"default\"",
        )?;
        Ok(params)
    }

    /// Parameters beyond OpenAI's, at the top level or in an extension object.
    fn read_extensions(&mut self, fields: &mut Fields) -> Result<(), ApiError> {
        if let Some(ignore_eos) = fields.bool("ignore_eos")? {
            self.stop.ignore_eos = ignore_eos;
        }
        if let Some(min_tokens) = fields.u32("min_tokens")? {
            self.stop.min_tokens = min_tokens;
        }
        if let Some(ids) = fields.list("stop_token_ids")? {
            self.stop.stop_token_ids = token_ids(&fields.full_name("stop_token_ids"), &ids)?;
        }
        self.sampling.top_k = fields.u32("top_k")?.or(self.sampling.top_k);
        self.sampling.min_p = fields.f32("min_p")?.or(self.sampling.min_p);
        self.sampling.repetition_penalty = fields
            .f32("repetition_penalty")?
            .or(self.sampling.repetition_penalty);
        if let Some(priority) = fields.i64("priority")? {
            self.priority = i32::try_from(priority)
                .map_err(|_| ApiError::invalid(fields.full_name("priority"), "must fit 32 bits"))?;
        }
        guided::join(&mut self.guided, GuidedOptions::read_extensions(fields)?)
    }

    fn read_annotations(&mut self, fields: &mut Fields) -> Result<(), ApiError> {
        match fields.take("annotations") {
            None => Ok(()),
            Some(Value::Object(values)) => {
                self.annotations.extend(values);
                Ok(())
            }
            Some(other) => Err(fields.wrong_type("annotations", "an object", &other)),
        }
    }
}

fn read_n(fields: &mut Fields, limits: &RequestLimits) -> Result<u32, ApiError> {
    let n = fields.u32("n")?.unwrap_or(1);
    if (1..=limits.max_choices).contains(&n) {
        return Ok(n);
    }
    Err(ApiError::invalid(
        "n",
        format!("must be between 1 and {}, got {n}", limits.max_choices),
    ))
}

fn read_stop(fields: &mut Fields, limits: &RequestLimits) -> Result<Arc<[String]>, ApiError> {
    let stops = match fields.take("stop") {
        None => return Ok(Arc::default()),
        Some(Value::String(stop)) => vec![stop],
        Some(Value::Array(stops)) => stops
            .into_iter()
            .map(|stop| match stop {
                Value::String(stop) => Ok(stop),
                other => Err(fields.wrong_type("stop", "strings", &other)),
            })
            .collect::<Result<_, _>>()?,
        Some(other) => {
            return Err(fields.wrong_type("stop", "a string or a list of strings", &other));
        }
    };
    if stops.len() > limits.max_stop_strings {
        let problem = format!(
            "at most {} stop strings, got {}",
            limits.max_stop_strings,
            stops.len()
        );
        return Err(ApiError::invalid("stop", problem));
    }
    if stops.iter().any(String::is_empty) {
        return Err(ApiError::invalid("stop", "a stop string must not be empty"));
    }
    if stops.iter().any(|stop| stop.len() > limits.max_stop_bytes) {
        let problem = format!(
            "a stop string may have at most {} bytes",
            limits.max_stop_bytes
        );
        return Err(ApiError::invalid("stop", problem));
    }
    Ok(stops.into())
}

fn read_stream_options(fields: &mut Fields, is_stream: bool) -> Result<bool, ApiError> {
    let Some(mut options) = fields.object("stream_options", "stream_options.")? else {
        return Ok(false);
    };
    if !is_stream {
        return Err(ApiError::invalid(
            "stream_options",
            "only allowed when 'stream' is true",
        ));
    }
    let include_usage = options.bool("include_usage")?.unwrap_or(false);
    options.bool("include_obfuscation")?;
    options.finish(&[])?;
    Ok(include_usage)
}

fn read_sampling(fields: &mut Fields) -> Result<SamplingOptions, ApiError> {
    let seed = fields.i64("seed")?.map(i64::cast_unsigned);
    let sampling = SamplingOptions {
        temperature: fields.f32("temperature")?,
        top_p: fields.f32("top_p")?,
        presence_penalty: fields.f32("presence_penalty")?,
        frequency_penalty: fields.f32("frequency_penalty")?,
        logit_bias: read_logit_bias(fields)?,
        seed,
        ..SamplingOptions::default()
    };
    Ok(sampling)
}

fn read_logit_bias(fields: &mut Fields) -> Result<BTreeMap<TokenId, f32>, ApiError> {
    let biases = match fields.take("logit_bias") {
        None => return Ok(BTreeMap::new()),
        Some(Value::Object(biases)) => biases,
        Some(other) => {
            return Err(fields.wrong_type(
                "logit_bias",
                "an object of token ids to numbers",
                &other,
            ));
        }
    };
    let read = |(token, bias): (String, Value)| {
        let id = token
            .parse::<TokenId>()
            .map_err(|_| ApiError::invalid("logit_bias", format!("{token:?} is not a token id")))?;
        #[expect(
            clippy::cast_possible_truncation,
            reason = "the range is checked with the request"
        )]
        let bias = bias.as_f64().map(|bias| bias as f32);
        let bias = bias.ok_or_else(|| {
            ApiError::invalid("logit_bias", format!("the bias of {id} is not a number"))
        })?;
        Ok((id, bias))
    };
    biases.into_iter().map(read).collect()
}

/// A list of token ids.
pub(super) fn token_ids(name: &str, list: &[Value]) -> Result<Vec<TokenId>, ApiError> {
    let read = |value: &Value| value.as_u64().and_then(|id| TokenId::try_from(id).ok());
    list.iter()
        .map(|value| {
            read(value).ok_or_else(|| {
                ApiError::invalid(
                    name,
                    "a token id must be an integer between 0 and 4294967295",
                )
            })
        })
        .collect()
}
