//! OpenAI's `/v1/completions` with token ids both ways, as vLLM and TensorRT-LLM add to it.
//!
//! # Source
//! vLLM 0.18, "OpenAI-Compatible Server" (`return_token_ids`, `return_tokens_as_token_ids`, `structured_outputs`);
//! TensorRT-LLM 1.1, "trtllm-serve" (`detokenize`, `response_format`). TensorRT-LLM refuses fields that it does not know.

use std::collections::BTreeSet;
use std::num::NonZeroU32;

use genset_backend_common::output::{TokenChunk, TokenLogprob, TopLogprob};
use genset_backend_common::{
    Capabilities, EngineError, GenerateRequest, GuidedDecoding, RequestField, TokenId, async_trait,
    config::{GuidedKind, SamplingOption},
};
use serde_json::{Map, Value, json};

use super::chat::{self, chat_of, refuse_legs};
use super::llama::refuse_min_tokens;
use super::wire::{ChatLogprob, Choice, Chunk, Logprobs, error_of, token_logprob};
use super::{
    Api, Call, End, Facts, Reader, Step, biases, first_model, given, no_logprobs, sampling_fields,
    unreadable, with_media,
};
use crate::apart::Leg;
use crate::config::LauncherConfig;
use crate::exposition::samples;
use crate::http::{Client, HttpError};

/// The maximum number of candidates of vLLM, unless `max-logprobs` changes it.
const VLLM_MAX_LOGPROBS: u32 = 20;

/// The prefix of a token's text that contains the token's id.
const ID_PREFIX: &str = "token_id:";

/// Tokens per KV block of TensorRT-LLM, unless `tokens_per_block` changes it.
const TRTLLM_BLOCK_SIZE: NonZeroU32 = NonZeroU32::new(32).unwrap();

/// vLLM's field for the transfer parameters of its connectors.
const KV_TRANSFER_PARAMS: &str = "kv_transfer_params";

/// Why TensorRT-LLM cannot isolate requests by cache salt, and the alternative.
pub(crate) const TRTLLM_NO_SALTS: &str = "TensorRT-LLM's completions know no cache salts, which every request with an API key has; set \
                        kv_cache_config: {enable_block_reuse: false} in --extra-engine-args, so that no request reuses the KV \
                        blocks of another";

/// vLLM shows its model the tools anyway, and parses no calls. It refuses `auto` without a tool parser.
const TOOL_CHOICE: &str = "none";

/// Until `min_tokens`, vLLM 0.32 bans the end of the answer. If the grammar allows nothing else, all tokens are banned: vLLM
/// then picks one of them and aborts the request, or continues with text that violates the grammar.
const VLLM_NO_MIN_TOKENS: &str = "vLLM fails an answer whose grammar ends before; leave min_tokens out where a grammar binds the answer";

/// vLLM's header for the data-parallel rank that serves a request.
const RANK_HEADER: &str = "x-data-parallel-rank";

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Flavor {
    Vllm,
    Trtllm,
}

/// The API of vLLM or TensorRT-LLM.
#[derive(Debug)]
pub(super) struct Completions {
    flavor: Flavor,
    model: String,
    capabilities: Capabilities,
    /// Whether requests reuse other requests' KV blocks.
    reuses_blocks: bool,
    /// Tokens per KV block of a TensorRT-LLM whose events are followed.
    event_blocks: Option<NonZeroU32>,
}

impl Completions {
    pub(super) fn vllm(config: &LauncherConfig) -> Self {
        let max_logprobs = config.setting("max-logprobs").and_then(Value::as_u64);
        let max_logprobs = max_logprobs.and_then(|max| u32::try_from(max).ok());
        let mut capabilities = sampling();
        capabilities.max_logprobs = max_logprobs.or(Some(VLLM_MAX_LOGPROBS));
        capabilities.guided = GuidedKind::ALL.into();
        let policy = config.setting("scheduling-policy");
        capabilities.priority = policy.is_some_and(|policy| policy == "priority");
        Self {
            flavor: Flavor::Vllm,
            model: config.model.display().to_string(),
            capabilities: with_media(capabilities, &config.media),
            reuses_blocks: true,
            event_blocks: None,
        }
    }

    /// Grammars need a backend, which the extra arguments select.
    pub(super) fn trtllm(config: &LauncherConfig) -> Self {
        let mut capabilities = sampling();
        // Candidates are reported by text, which identifies no token; only the chosen token is known.
        capabilities.max_logprobs = Some(0);
        let backend = config.setting("guided-decoding-backend");
        if backend.is_some_and(|backend| !backend.is_null()) {
            capabilities.guided = GuidedKind::ALL.into();
        }
        Self {
            flavor: Flavor::Trtllm,
            model: config.model.display().to_string(),
            capabilities,
            reuses_blocks: trtllm_reuses_blocks(config),
            event_blocks: trtllm_event_blocks(config),
        }
    }

    fn body(
        &self,
        request: &GenerateRequest,
        max_tokens: Option<u32>,
    ) -> Result<Map<String, Value>, EngineError> {
        if self.flavor == Flavor::Vllm && request.guided.is_some() {
            refuse_min_tokens(request, VLLM_NO_MIN_TOKENS)?;
        }
        let mut body = Map::new();
        // The server lists adapters as models.
        let model = request.adapter.as_ref().unwrap_or(&self.model);
        body.insert("model".into(), model.clone().into());
        if let Some(chat) = chat_of(request) {
            chat::begin(&mut body, chat, TOOL_CHOICE);
        } else {
            body.insert("prompt".into(), request.tokens()?.into());
            body.insert("stream".into(), true.into());
            body.insert("stream_options".into(), json!({"include_usage": true}));
            body.insert("add_special_tokens".into(), false.into());
        }
        body.insert("ignore_eos".into(), ignores_own_eos(request).into());
        let stop = &request.stop;
        // Until `min_tokens` vLLM also bans the model's own end-of-sequence tokens, even if they end nothing here.
        let min_tokens = match self.flavor {
            Flavor::Vllm if stop.ignore_eos => 0,
            Flavor::Vllm | Flavor::Trtllm => stop.min_tokens,
        };
        // We find the stop tokens that are not sent to it in the answer.
        let stops = match (self.flavor, &request.guided) {
            // vLLM takes every stop token as an end of the grammar, and aborts the request if one comes inside it.
            (Flavor::Vllm, Some(_)) => stop.eos_token_ids.to_vec(),
            (Flavor::Vllm, None) if min_tokens < stop.min_tokens => Vec::new(),
            (Flavor::Vllm | Flavor::Trtllm, _) => stop_ids(request),
        };
        if !stops.is_empty() {
            body.insert("stop_token_ids".into(), stops.into());
        }
        if min_tokens > 0 {
            body.insert("min_tokens".into(), min_tokens.into());
        }
        if let Some(max_tokens) = max_tokens {
            body.insert("max_tokens".into(), max_tokens.into());
        }
        if let Some(salt) = &request.cache_salt {
            self.add_salt(&mut body, salt)?;
        }
        let sampling = &request.sampling;
        let seed = sampling.seed.map(|seed| match self.flavor {
            Flavor::Vllm => seed.cast_signed().into(),
            // It converts the number to an unsigned one, which fails for a negative one.
            Flavor::Trtllm => seed.into(),
        });
        let own = [("seed", seed), ("logit_bias", biases(sampling))];
        let fields = sampling_fields(sampling, "repetition_penalty", 0);
        body.extend(given(fields.into_iter().chain(own)));
        self.add_own(&mut body, request);
        Ok(body)
    }

    /// Isolates the request's KV blocks from those of requests with another salt.
    fn add_salt(&self, body: &mut Map<String, Value>, salt: &str) -> Result<(), EngineError> {
        match self.flavor {
            Flavor::Vllm => {
                body.insert("cache_salt".into(), salt.into());
                Ok(())
            }
            Flavor::Trtllm if self.reuses_blocks => Err(EngineError::unsupported(
                RequestField::CacheSalt,
                TRTLLM_NO_SALTS,
            )),
            Flavor::Trtllm => Ok(()),
        }
    }

    fn add_own(&self, body: &mut Map<String, Value>, request: &GenerateRequest) {
        match self.flavor {
            Flavor::Vllm => {
                body.insert("return_token_ids".into(), true.into());
                if let Some(logprobs) = request.output.logprobs {
                    if chat_of(request).is_some() {
                        body.insert("logprobs".into(), true.into());
                        body.insert("top_logprobs".into(), logprobs.into());
                    } else {
                        body.insert("logprobs".into(), logprobs.into());
                    }
                    body.insert("return_tokens_as_token_ids".into(), true.into());
                }
                if let Some(guided) = &request.guided {
                    body.insert("structured_outputs".into(), vllm_guided(guided));
                }
                if request.priority != 0 {
                    // In vLLM a smaller number has priority.
                    body.insert(
                        "priority".into(),
                        i64::from(request.priority).saturating_neg().into(),
                    );
                }
            }
            Flavor::Trtllm => {
                body.insert("detokenize".into(), false.into());
                if request.output.logprobs.is_some() {
                    body.insert("logprobs".into(), 1.into());
                }
                if let Some(guided) = &request.guided {
                    body.insert("response_format".into(), trtllm_guided(guided));
                }
            }
        }
    }
}

/// Whether a TensorRT-LLM with these settings reuses the KV blocks of other requests.
///
/// # Source
/// TensorRT-LLM, "KV Cache System" (`enable_block_reuse`, on by default). The `CompletionRequest` of its main branch of 2026
/// has no `cache_salt`.
pub(crate) fn trtllm_reuses_blocks(config: &LauncherConfig) -> bool {
    let kv_cache = config.setting("kv-cache-config");
    let reuse = kv_cache.and_then(|config| config.get("enable_block_reuse"));
    reuse != Some(&Value::Bool(false))
}

/// Tokens per KV block of a TensorRT-LLM that keeps events of its blocks; `None` if it keeps none, as by default.
///
/// # Source
/// TensorRT-LLM, "KV Cache System" and `KvCacheConfig` (`event_buffer_max_size`, `tokens_per_block`).
pub(crate) fn trtllm_event_blocks(config: &LauncherConfig) -> Option<NonZeroU32> {
    let kv_cache = config.setting("kv-cache-config")?;
    let kept = kv_cache.get("event_buffer_max_size")?.as_u64()?;
    if kept == 0 || !trtllm_reuses_blocks(config) {
        return None;
    }
    let Some(size) = kv_cache.get("tokens_per_block") else {
        return Some(TRTLLM_BLOCK_SIZE);
    };
    NonZeroU32::new(u32::try_from(size.as_u64()?).ok()?)
}

/// Both servers receive one prompt, without a mark where generated tokens begin.
fn sampling() -> Capabilities {
    Capabilities::tokens()
        .with_sampling(SamplingOption::ALL)
        .with_resume_as_prompt()
}

fn vllm_guided(guided: &GuidedDecoding) -> Value {
    match guided {
        GuidedDecoding::JsonObject => json!({"json_object": true}),
        GuidedDecoding::JsonSchema(schema) => json!({"json": schema}),
        GuidedDecoding::Regex(regex) => json!({"regex": regex}),
        GuidedDecoding::Choice(choices) => json!({"choice": choices}),
        GuidedDecoding::Grammar(grammar) => json!({"grammar": grammar}),
    }
}

fn trtllm_guided(guided: &GuidedDecoding) -> Value {
    match guided {
        GuidedDecoding::JsonObject => json!({"type": "json_object"}),
        GuidedDecoding::JsonSchema(schema) => json!({"type": "json_schema", "json_schema": schema}),
        GuidedDecoding::Regex(regex) => json!({"type": "regex", "regex": regex}),
        GuidedDecoding::Choice(choices) => {
            json!({"type": "regex", "regex": super::guided::choice_regex(choices)})
        }
        GuidedDecoding::Grammar(grammar) => json!({"type": "ebnf", "ebnf": grammar}),
    }
}

/// Whether the server must continue past its model's own end-of-sequence tokens. With a list of ours, it stops at those instead
/// and names the token.
fn ignores_own_eos(request: &GenerateRequest) -> bool {
    request.stop.ignore_eos || !request.stop.eos_token_ids.is_empty()
}

/// The tokens to stop at.
pub(super) fn stop_ids(request: &GenerateRequest) -> Vec<TokenId> {
    let stop = &request.stop;
    let eos = stop.eos_token_ids.iter().filter(|_| !stop.ignore_eos);
    stop.stop_token_ids.iter().chain(eos).copied().collect()
}

#[async_trait]
impl Api for Completions {
    fn capabilities(&self) -> Capabilities {
        self.capabilities.clone()
    }

    fn call(
        &self,
        request: &GenerateRequest,
        max_tokens: Option<u32>,
    ) -> Result<Call, EngineError> {
        self.leg_call(request, max_tokens, &Leg::Whole)
    }

    fn leg_call(
        &self,
        request: &GenerateRequest,
        max_tokens: Option<u32>,
        leg: &Leg,
    ) -> Result<Call, EngineError> {
        let body = match leg {
            Leg::Whole => self.body(request, max_tokens)?,
            Leg::Prefill => {
                refuse_legs(request)?;
                let mut body = self.body(request, Some(1))?;
                // A streamed answer does not contain the transfer parameters.
                body.insert("stream".into(), false.into());
                body.remove("stream_options");
                if let Some(min_tokens) = body.get_mut("min_tokens") {
                    // Must not exceed `max_tokens`.
                    *min_tokens = 1.into();
                }
                let kept = json!({"do_remote_decode": true, "do_remote_prefill": false});
                body.insert(KV_TRANSFER_PARAMS.into(), kept);
                body
            }
            Leg::Decode(fetch) => {
                refuse_legs(request)?;
                let mut body = self.body(request, max_tokens)?;
                body.insert(KV_TRANSFER_PARAMS.into(), fetch.params.clone());
                body
            }
        };
        let mut call = match chat_of(request) {
            Some(chat) => chat::call(&body, chat)?,
            None => Call::new("/v1/completions", &Value::Object(body)),
        };
        if let (Flavor::Vllm, Some(rank)) = (self.flavor, request.data_parallel_rank) {
            call.headers.push((RANK_HEADER, rank.to_string()));
        }
        Ok(call)
    }

    fn reader(&self, request: &GenerateRequest) -> Box<dyn Reader> {
        Box::new(CompletionsReader {
            logprobs: request.output.logprobs,
            has_own_eos: self.flavor == Flavor::Vllm && !ignores_own_eos(request),
        })
    }

    fn tells_usage_later(&self, _request: &GenerateRequest) -> bool {
        true
    }

    async fn facts(&self, client: &Client) -> Result<Facts, HttpError> {
        let model = first_model(client).await?;
        if self.flavor == Flavor::Trtllm {
            // It reports no size; without events, nobody needs it.
            return Ok(Facts {
                kv_block_size: self.event_blocks,
                ..model
            });
        }
        let cache = match client.text("/metrics").await {
            Ok(metrics) => CacheConfig::read(&metrics),
            Err(error) => {
                tracing::debug!(%error, "vLLM does not report the size of its KV blocks");
                CacheConfig::default()
            }
        };
        Ok(Facts {
            kv_block_size: cache.block_size,
            kv_total_blocks: cache.num_gpu_blocks,
            ranks: cache.ranks,
            ..model
        })
    }
}

/// The labels of vLLM's `vllm:cache_config_info`.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct CacheConfig {
    pub(super) block_size: Option<NonZeroU32>,
    /// The total of all ranks.
    pub(super) num_gpu_blocks: Option<u64>,
    /// The number of ranks in the metrics; `None` if they are not numbered from 0.
    pub(super) ranks: Option<u32>,
}

impl CacheConfig {
    /// Parses all metrics, in Prometheus' text format. Reads the first of several ranks; they are alike.
    pub(super) fn read(metrics: &str) -> Self {
        let lines: Vec<_> = samples(metrics, "vllm:cache_config_info").collect();
        let first = |name: &str| lines.first()?.label(name);
        let engines: BTreeSet<u32> = lines
            .iter()
            .filter_map(|line| line.label("engine")?.parse().ok())
            .collect();
        let ranks = u32::try_from(engines.len()).unwrap_or(0);
        Self {
            block_size: first("block_size").and_then(|size| size.parse().ok()),
            num_gpu_blocks: first("num_gpu_blocks").and_then(|blocks| blocks.parse().ok()),
            ranks: (ranks > 0 && engines.last() == Some(&(ranks - 1))).then_some(ranks),
        }
    }
}

struct CompletionsReader {
    logprobs: Option<u32>,
    /// Whether the last token before an unnamed stop is the model's own end of sequence.
    has_own_eos: bool,
}

impl Reader for CompletionsReader {
    fn read(&mut self, event: &[u8]) -> Result<Step, EngineError> {
        let chunk: Chunk = serde_json::from_slice(event).map_err(unreadable)?;
        if let Some(error) = &chunk.error {
            return Err(error_of(None, error));
        }
        let mut step = Step::default();
        if let Some(usage) = &chunk.usage {
            step.prompt_tokens = usage.prompt_tokens;
            step.cached_tokens = usage.cached_tokens();
        }
        let Some(choice) = chunk.choices.into_iter().next() else {
            return Ok(step);
        };
        step.end = end_of(&choice)?;
        let is_role_alone = choice.is_role_alone();
        let Choice {
            token_ids,
            logprobs,
            ..
        } = choice;
        let Some(token_ids) = token_ids else {
            // The last event may contain only the end, and the first event of a chat only the role.
            return match step.end {
                Some(_) => Ok(step),
                None if is_role_alone => Ok(step),
                None => Err(unreadable(
                    "it has no token_ids; is the server too old to give them?",
                )),
            };
        };
        step.tokens = TokenChunk {
            token_ids: token_ids.into(),
            logprobs: Vec::new(),
        };
        if let Some(asked) = self.logprobs {
            step.tokens.logprobs =
                read_logprobs(&step.tokens, logprobs.unwrap_or_default(), asked)?;
        }
        if self.has_own_eos && step.end == Some(End::Stop(None)) {
            step.end = Some(End::Stop(step.tokens.token_ids.pop()));
            step.tokens.logprobs.truncate(step.tokens.token_ids.len());
        }
        Ok(step)
    }
}

fn end_of(choice: &Choice) -> Result<Option<End>, EngineError> {
    let Some(reason) = choice.finish_reason.as_deref() else {
        return Ok(None);
    };
    Ok(Some(match reason {
        "stop" => {
            let token = choice.stop_reason.as_ref().and_then(Value::as_u64);
            End::Stop(token.and_then(|token| TokenId::try_from(token).ok()))
        }
        "length" => End::Length,
        other => End::Aborted(other.to_owned()),
    }))
}

fn read_logprobs(
    chunk: &TokenChunk,
    logprobs: Logprobs,
    asked: u32,
) -> Result<Vec<TokenLogprob>, EngineError> {
    let mut read: Vec<TokenLogprob> = match logprobs.content {
        Some(content) => content.iter().map(|at| of_chat(at, asked)).collect(),
        None => {
            let mut tops = logprobs.top_logprobs.unwrap_or_default().into_iter();
            let of_token = |logprob: Option<f32>| {
                let candidates = tops.next().flatten().unwrap_or_default();
                let candidates = candidates.iter();
                let top = candidates.filter_map(|(name, logprob)| candidate(name, logprob));
                token_logprob(logprob.unwrap_or(f32::MIN), top.collect(), asked)
            };
            logprobs.token_logprobs.into_iter().map(of_token).collect()
        }
    };
    if read.len() < chunk.token_ids.len() {
        return Err(no_logprobs());
    }
    read.truncate(chunk.token_ids.len());
    Ok(read)
}

/// The log probabilities of a token in a chat.
fn of_chat(at: &ChatLogprob, asked: u32) -> TokenLogprob {
    let candidates = at.top_logprobs.iter();
    let top = candidates.filter_map(|top| candidate(&top.token, &top.logprob.into()));
    token_logprob(at.logprob, top.collect(), asked)
}

fn candidate(name: &str, logprob: &Value) -> Option<TopLogprob> {
    let token_id = name.strip_prefix(ID_PREFIX)?.parse().ok()?;
    let logprob = serde_json::from_value(logprob.clone()).ok()?;
    Some(TopLogprob { token_id, logprob })
}
