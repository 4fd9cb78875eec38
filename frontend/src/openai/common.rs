//! Fields shared by chat completions and completions.

use std::collections::BTreeMap;
use std::sync::Arc;

use genset_backend_common::{
    SamplingOptions, StopConditions, TokenId,
    request::{MAX_CACHE_SALT_BYTES, Shared},
};
use serde_json::Value;

use super::fields::Fields;
use super::guided::{self, GuidedOptions};
use super::hints::Hints;
use super::logprobs::LogprobOptions;
use super::response::SERVICE_TIER;
use crate::config::FrontendConfig;
use crate::error::ApiError;

/// Parameters that are accepted without effect, unless they were read; `docs/guide/openai-api.md` lists them.
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

/// The annotation that asks how an answer was routed.
const ROUTER_ANNOTATION: &str = "router";

/// Limits on what a request may ask for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ParamLimits {
    /// The largest `n`.
    pub max_choices: u32,
    /// The most stop strings.
    pub max_stop_strings: usize,
    /// The longest stop string, in bytes.
    pub max_stop_bytes: usize,
    /// The most different token ids that end an answer.
    pub max_stop_token_ids: usize,
    /// The most biases.
    pub max_logit_bias: usize,
    /// The most bytes of annotations, as JSON.
    pub max_annotation_bytes: usize,
    /// The most prompts in one completions request.
    pub max_prompts: usize,
    /// The most tools in one chat request.
    pub max_tools: usize,
    /// The most bytes of the images and sounds of a chat.
    pub max_media_bytes: usize,
    /// Whether hints that have no effect here are refused.
    pub is_strict: bool,
    /// Whether the server routes by affinity, so that affinity fields are read.
    pub has_affinity: bool,
    /// Whether answers may name instances and their load.
    pub may_explain: bool,
}

impl From<&FrontendConfig> for ParamLimits {
    fn from(config: &FrontendConfig) -> Self {
        Self {
            max_choices: config.max_choices,
            max_stop_strings: config.max_stop_strings,
            max_stop_bytes: config.max_stop_bytes,
            max_stop_token_ids: config.max_stop_token_ids,
            max_logit_bias: config.max_logit_bias,
            max_annotation_bytes: config.max_annotation_bytes,
            max_prompts: config.max_prompts,
            max_tools: config.max_tools,
            max_media_bytes: config.media.max_bytes,
            is_strict: config.strict_parameters,
            has_affinity: config.router.has_affinity(),
            may_explain: config.is_for_this_machine(),
        }
    }
}

/// Options of a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Streaming {
    /// Whether it ends with a chunk of usage.
    pub has_usage: bool,
}

/// The validated parameters shared by both APIs.
#[derive(Debug, Clone, PartialEq)]
pub struct CommonParams {
    /// The model's name or alias.
    pub model: String,
    /// How many answers to each prompt.
    pub n: u32,
    /// How to stream, if requested.
    pub stream: Option<Streaming>,
    /// Strings that end an answer.
    pub stop_strings: Arc<[String]>,
    /// Other stop conditions; the model's end-of-sequence ids are added later.
    pub stop: StopConditions,
    /// Sampling options.
    pub sampling: SamplingOptions,
    /// The log probabilities that it asks for.
    pub logprobs: Option<LogprobOptions>,
    /// The constraint on the answers (guided decoding).
    pub guided: Option<GuidedOptions>,
    /// Scheduling priority.
    pub priority: i32,
    /// The data-parallel rank that must serve it.
    pub data_parallel_rank: Option<u32>,
    /// Isolates its KV blocks from requests with other salts; the caller's key is added if there are keys.
    pub cache_salt: Option<String>,
    /// A key shared with requests that the same instance should serve, if the server routes by affinity.
    pub affinity: Option<String>,
    /// Custom values for the engine.
    pub annotations: Shared<BTreeMap<String, Value>>,
    /// Whether the answer says how it was routed.
    pub is_explained: bool,
    /// Its fields that have no effect here.
    pub hints: Hints,
}

impl CommonParams {
    /// Parses the shared fields. `default_max_tokens` applies if the request sets no limit.
    pub(super) fn read(
        fields: &mut Fields<'_>,
        limits: &ParamLimits,
        default_max_tokens: Option<u32>,
    ) -> Result<Self, ApiError> {
        let mut params = Self {
            model: fields.model()?,
            n: read_n(fields, limits)?,
            stream: read_streaming(fields)?,
            stop_strings: read_stop(fields, limits)?,
            stop: StopConditions::default(),
            sampling: read_sampling(fields, limits)?,
            logprobs: None,
            guided: None,
            priority: 0,
            data_parallel_rank: None,
            cache_salt: None,
            affinity: read_affinity(fields, limits)?,
            annotations: Shared::default(),
            is_explained: false,
            hints: Hints::default(),
        };
        let newer = read_max_tokens(fields, "max_completion_tokens")?;
        let older = read_max_tokens(fields, "max_tokens")?;
        params.stop.max_tokens = newer.or(older).or(default_max_tokens);
        params.read_extensions(fields, limits)?;
        for extension in ["genset", "nvext"] {
            if let Some(mut inner) = fields.object(extension)? {
                params.read_extensions(&mut inner, limits)?;
                params.read_annotations(&mut inner, limits)?;
                inner.finish(&[])?;
            }
        }
        fields.hint(
            "service_tier",
            &["auto", SERVICE_TIER],
            "this server has one tier, named \"default\"",
        )?;
        Ok(params)
    }

    /// Parses parameters beyond OpenAI's, at the top level or in an extension object.
    fn read_extensions(
        &mut self,
        fields: &mut Fields<'_>,
        limits: &ParamLimits,
    ) -> Result<(), ApiError> {
        if let Some(ignore_eos) = fields.bool("ignore_eos")? {
            self.stop.ignore_eos = ignore_eos;
        }
        if let Some(min_tokens) = fields.u32("min_tokens")? {
            self.stop.min_tokens = min_tokens;
        }
        if let Some(mut ids) = fields.token_ids("stop_token_ids")? {
            let name = fields.full_name("stop_token_ids");
            ids.sort_unstable();
            ids.dedup();
            at_most(&name, limits.max_stop_token_ids, ids.len(), "different ids")?;
            self.stop.stop_token_ids = ids.into();
        }
        match fields.i64("top_k")? {
            None => {}
            // No limit, as the engines that have this option write it. Without a value their own default would count.
            Some(-1 | 0) => self.sampling.top_k = Some(u32::MAX),
            Some(top_k) => {
                let problem = "must be between -1 and 4294967295";
                let invalid = |_| ApiError::invalid(fields.full_name("top_k"), problem);
                self.sampling.top_k = Some(u32::try_from(top_k).map_err(invalid)?);
            }
        }
        self.sampling.min_p = fields.f32("min_p")?.or(self.sampling.min_p);
        self.sampling.repetition_penalty = fields
            .f32("repetition_penalty")?
            .or(self.sampling.repetition_penalty);
        // Validates also values that another place will override.
        self.sampling.validate()?;
        if let Some(priority) = fields.i64("priority")? {
            self.priority = i32::try_from(priority)
                .map_err(|_| ApiError::invalid(fields.full_name("priority"), "must fit 32 bits"))?;
        }
        let rank = fields.u32("data_parallel_rank")?;
        self.data_parallel_rank = rank.or(self.data_parallel_rank);
        if let Some(salt) = fields.string("cache_salt")? {
            if salt.is_empty() || salt.len() > MAX_CACHE_SALT_BYTES {
                let problem = format!("must have 1 to {MAX_CACHE_SALT_BYTES} bytes");
                return Err(ApiError::invalid(fields.full_name("cache_salt"), problem));
            }
            self.cache_salt = Some(salt);
        }
        guided::join(&mut self.guided, GuidedOptions::read_extensions(fields)?)
    }

    fn read_annotations(
        &mut self,
        fields: &mut Fields<'_>,
        limits: &ParamLimits,
    ) -> Result<(), ApiError> {
        match fields.take("annotations")? {
            None => Ok(()),
            Some(Value::Object(values)) => {
                self.annotations.extend(values);
                let name = fields.full_name("annotations");
                let bytes = json_bytes(&*self.annotations);
                at_most(&name, limits.max_annotation_bytes, bytes, "bytes as JSON")
            }
            Some(Value::Array(names)) => {
                for (index, name) in names.iter().enumerate() {
                    let problem = if name.as_str() != Some(ROUTER_ANNOTATION) {
                        format!("expected \"{ROUTER_ANNOTATION}\"")
                    } else if !limits.may_explain {
                        // A decision names instances and their load, which comes from others' requests.
                        "only a server on loopback without API keys says how it routes".to_owned()
                    } else {
                        self.is_explained = true;
                        continue;
                    };
                    let name = fields.full_name("annotations");
                    return Err(ApiError::invalid(format!("{name}[{index}]"), problem));
                }
                Ok(())
            }
            Some(other) => {
                let expected = "an object, or a list of annotations";
                Err(fields.wrong_type("annotations", expected, &other))
            }
        }
    }
}

/// The more specific of the two affinity fields. If they have no effect, they are left unread, and then ignored.
fn read_affinity(
    fields: &mut Fields<'_>,
    limits: &ParamLimits,
) -> Result<Option<String>, ApiError> {
    if !limits.has_affinity {
        return Ok(None);
    }
    match fields.string("prompt_cache_key")? {
        None => fields.string("user"),
        key => Ok(key),
    }
}

/// The length of a value as JSON.
pub(crate) fn json_bytes(value: &impl serde::Serialize) -> usize {
    struct Count(usize);
    impl std::io::Write for Count {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0 += bytes.len();
            Ok(bytes.len())
        }
        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }
    let mut count = Count(0);
    match serde_json::to_writer(&mut count, value) {
        Ok(()) => count.0,
        Err(_) => usize::MAX,
    }
}

/// Refuses a field with more of something than the limit.
pub(super) fn at_most(name: &str, most: usize, got: usize, what: &str) -> Result<(), ApiError> {
    if got <= most {
        return Ok(());
    }
    let problem = format!("at most {most} {what}, got {got}");
    Err(ApiError::invalid(name, problem))
}

/// Parses one of the two names of the limit. A value that is overridden is checked too.
fn read_max_tokens(fields: &mut Fields<'_>, name: &'static str) -> Result<Option<u32>, ApiError> {
    match fields.u32(name)? {
        Some(0) => Err(ApiError::invalid(name, "must be at least 1")),
        max_tokens => Ok(max_tokens),
    }
}

fn read_n(fields: &mut Fields<'_>, limits: &ParamLimits) -> Result<u32, ApiError> {
    let n = fields.u32("n")?.unwrap_or(1);
    if (1..=limits.max_choices).contains(&n) {
        return Ok(n);
    }
    Err(ApiError::invalid(
        "n",
        format!("must be between 1 and {}, got {n}", limits.max_choices),
    ))
}

fn read_stop(fields: &mut Fields<'_>, limits: &ParamLimits) -> Result<Arc<[String]>, ApiError> {
    let stops = match fields.take("stop")? {
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
    at_most("stop", limits.max_stop_strings, stops.len(), "stop strings")?;
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

fn read_streaming(fields: &mut Fields<'_>) -> Result<Option<Streaming>, ApiError> {
    let is_stream = fields.bool("stream")?.unwrap_or(false);
    let Some(mut options) = fields.object("stream_options")? else {
        return Ok(is_stream.then(Streaming::default));
    };
    if !is_stream {
        return Err(ApiError::invalid(
            "stream_options",
            "only allowed when 'stream' is true",
        ));
    }
    let has_usage = options.bool("include_usage")?.unwrap_or(false);
    for hint in ["include_obfuscation", "continuous_usage_stats"] {
        if options.bool(hint)?.is_some() {
            options.ignore(hint);
        }
    }
    options.finish(&[])?;
    Ok(Some(Streaming { has_usage }))
}

fn read_sampling(
    fields: &mut Fields<'_>,
    limits: &ParamLimits,
) -> Result<SamplingOptions, ApiError> {
    let seed = fields.bits64("seed")?;
    let sampling = SamplingOptions {
        temperature: fields.f32("temperature")?,
        top_p: read_top_p(fields)?,
        presence_penalty: fields.f32("presence_penalty")?,
        frequency_penalty: fields.f32("frequency_penalty")?,
        logit_bias: read_logit_bias(fields, limits)?.into(),
        seed,
        ..SamplingOptions::default()
    };
    Ok(sampling)
}

/// Takes `top_p`. OpenAI's range includes 0, the contract's does not: the smallest number keeps one token, too.
fn read_top_p(fields: &mut Fields<'_>) -> Result<Option<f32>, ApiError> {
    let top_p = fields.f32("top_p")?;
    Ok(top_p.map(|top_p| {
        if top_p == 0.0 {
            f32::MIN_POSITIVE
        } else {
            top_p
        }
    }))
}

fn read_logit_bias(
    fields: &mut Fields<'_>,
    limits: &ParamLimits,
) -> Result<BTreeMap<TokenId, f32>, ApiError> {
    let biases = match fields.take("logit_bias")? {
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
    at_most("logit_bias", limits.max_logit_bias, biases.len(), "biases")?;
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
