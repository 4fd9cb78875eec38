//! SGLang's own `/generate`, with token ids in both directions.
//!
//! # Source
//! SGLang 0.5.9, "SGLang Native APIs" and "Sampling Parameters". Its events repeat all tokens so far, unless the server was
//! started with `incremental-streaming-output` (formerly `stream-output`); both are supported. From the sources of 0.5.23:
//! where it takes seeds (`SamplingBatchInfo`), and the maximum prompt length (`validate_input_length`, `/server_info`).

use std::collections::BTreeSet;
use std::num::NonZeroU32;

use genset_backend_common::output::{TokenLogprob, TopLogprob};
use genset_backend_common::{
    Capabilities, EngineError, ErrorKind, GenerateRequest, GuidedDecoding, RequestField, TokenId,
    async_trait,
    config::{Deviation, GuidedKind, SamplingOption},
    request::{ChatInput, MediaKind},
};
use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::chat::{self, chat_of};
use super::completions::stop_ids;
use super::text::TextReader;
use super::wire::{error_of, token_logprob};
use super::{
    Api, Call, End, Facts, Reader, Step, biases, first_model, given, no_logprobs, sampling_fields,
    unreadable, with_media,
};
use crate::config::LauncherConfig;
use crate::http::{Client, HttpError};

/// The largest `repetition_penalty` that it accepts.
const MAX_REPETITION_PENALTY: f32 = 2.0;

/// Candidates are cheap in SGLang; our clients ask for no more than this.
const MAX_LOGPROBS: u32 = 20;

/// With `none` SGLang leaves the tools out of the prompt. It parses calls only with a tool parser, which we refuse.
const TOOL_CHOICE: &str = "auto";

/// Tokens of the context that a prompt cannot use, if the server does not report its maximum prompt length.
const NOT_FOR_PROMPTS: u32 = 6;

/// The status in the abort of a request when the queue is full. As an HTTP status, it means that no server is there.
const QUEUE_IS_FULL: u16 = 503;

/// The first version known to include the salt of blocks in KV events.
const TELLS_SALTS: [u32; 3] = [0, 5, 23];

/// Why KV events of older versions are not used.
const NO_SALTS_TOLD: &str =
    "an SGLang before 0.5.23 does not say which blocks belong to requests with a salt";

/// The API of SGLang.
#[derive(Debug)]
pub(super) struct Sglang {
    /// Whether it was started with deterministic inference; only then does it honor seeds.
    takes_seeds: bool,
    media: BTreeSet<MediaKind>,
}

impl Sglang {
    pub(super) fn new(config: &LauncherConfig) -> Self {
        let setting = config.setting("enable-deterministic-inference");
        Self {
            takes_seeds: setting == Some(&Value::Bool(true)),
            media: config.media.clone(),
        }
    }
}

#[async_trait]
impl Api for Sglang {
    fn capabilities(&self) -> Capabilities {
        let mut capabilities = Capabilities::tokens().with_sampling(SamplingOption::ALL);
        if !self.takes_seeds {
            capabilities.sampling.remove(&SamplingOption::Seed);
        }
        // It receives one prompt, without a mark where generated tokens begin; its penalties count only those of the answer.
        capabilities.resume_as_prompt = true;
        capabilities.max_logprobs = Some(MAX_LOGPROBS);
        capabilities.deviations = [Deviation::LogprobsAfterBias].into();
        capabilities.guided = GuidedKind::ALL.into();
        with_media(capabilities, &self.media)
    }

    fn call(
        &self,
        request: &GenerateRequest,
        max_tokens: Option<u32>,
    ) -> Result<Call, EngineError> {
        check_penalty(request)?;
        if let Some(chat) = chat_of(request) {
            return chat_call(request, chat, max_tokens);
        }
        let mut body = Map::new();
        body.insert("input_ids".into(), request.tokens()?.into());
        body.insert("stream".into(), true.into());
        body.insert(
            "sampling_params".into(),
            Value::Object(sampling_params(request, max_tokens)),
        );
        add_salt_and_rank(&mut body, request);
        if let Some(asked) = request.output.logprobs {
            body.insert("return_logprob".into(), true.into());
            body.insert("logprob_start_len".into(), (-1).into());
            body.insert("top_logprobs_num".into(), asked.into());
        }
        Ok(Call::new("/generate", &Value::Object(body)))
    }

    fn tells_usage_later(&self, request: &GenerateRequest) -> bool {
        chat_of(request).is_some()
    }

    fn reader(&self, request: &GenerateRequest) -> Box<dyn Reader> {
        if chat_of(request).is_some() {
            return Box::new(TextReader);
        }
        Box::new(SglangReader {
            logprobs: request.output.logprobs,
            seen: 0,
        })
    }

    async fn facts(&self, client: &Client) -> Result<Facts, HttpError> {
        let model = first_model(client).await?;
        let info: ServerInfo = match client.get("/server_info").await {
            Ok(info) => info,
            Err(error) => {
                tracing::debug!(%error, "SGLang does not report how long a prompt may be");
                ServerInfo::default()
            }
        };
        Ok(info.facts(model.context_length_tokens))
    }
}

fn add_salt_and_rank(body: &mut Map<String, Value>, request: &GenerateRequest) {
    if let Some(salt) = &request.cache_salt {
        body.insert("extra_key".into(), salt.as_str().into());
        // Older versions ignore the unknown field; newer ones include the salt in KV events.
        body.insert("cache_salt".into(), salt.as_str().into());
    }
    if let Some(rank) = request.data_parallel_rank {
        // The older and the newer name; it silently ignores unknown fields.
        body.insert("data_parallel_rank".into(), rank.into());
        body.insert("routed_dp_rank".into(), rank.into());
    }
}

/// A chat with media. Its answer is text: streamed chats contain no token ids.
fn chat_call(
    request: &GenerateRequest,
    chat: &ChatInput,
    max_tokens: Option<u32>,
) -> Result<Call, EngineError> {
    if request.output.logprobs.is_some() {
        let problem = "SGLang streams no tokens of an answer to images or audio, so there are no log probabilities of them";
        return Err(EngineError::unsupported(RequestField::Logprobs, problem));
    }
    if request.stop.ignore_eos && !request.stop.stop_token_ids.is_empty() {
        let problem = "SGLang ignores them beside ignore_eos; leave one of the two out";
        return Err(EngineError::unsupported(
            RequestField::StopTokenIds,
            problem,
        ));
    }
    let renamed = sampling_params(request, max_tokens)
        .into_iter()
        .map(|(name, value)| match name.as_str() {
            "max_new_tokens" => ("max_tokens".to_owned(), value),
            "min_new_tokens" => ("min_tokens".to_owned(), value),
            "sampling_seed" => ("seed".to_owned(), value),
            _ => (name, value),
        });
    let mut body: Map<String, Value> = renamed.collect();
    if let Some(Value::String(schema)) = body.remove("json_schema") {
        let schema: Value = serde_json::from_str(&schema).map_err(unreadable)?;
        let format =
            json!({"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}});
        body.insert("response_format".into(), format);
    }
    chat::begin(&mut body, chat, TOOL_CHOICE);
    // Our caller parses the markup.
    body.insert("skip_special_tokens".into(), false.into());
    body.insert("separate_reasoning".into(), false.into());
    add_salt_and_rank(&mut body, request);
    chat::call(&body, chat)
}

fn check_penalty(request: &GenerateRequest) -> Result<(), EngineError> {
    match request.sampling.repetition_penalty {
        Some(penalty) if penalty > MAX_REPETITION_PENALTY => {
            let problem = format!("SGLang takes at most {MAX_REPETITION_PENALTY}, got {penalty}");
            Err(EngineError::invalid_argument(
                RequestField::RepetitionPenalty,
                problem,
            ))
        }
        Some(_) | None => Ok(()),
    }
}

fn sampling_params(request: &GenerateRequest, max_tokens: Option<u32>) -> Map<String, Value> {
    let (sampling, stop) = (&request.sampling, &request.stop);
    let stops = stop_ids(request);
    let own = [
        ("max_new_tokens", max_tokens.map(Value::from)),
        (
            "min_new_tokens",
            // Until `min_tokens` it also bans the model's own end-of-sequence tokens, ignored or not.
            (stop.min_tokens > 0 && !stop.ignore_eos).then(|| stop.min_tokens.into()),
        ),
        // With it, SGLang ignores stop_token_ids too; we stop at those ourselves.
        ("ignore_eos", Some(stop.ignore_eos.into())),
        ("stop_token_ids", (!stops.is_empty()).then(|| stops.into())),
        (
            "sampling_seed",
            sampling.seed.map(|seed| seed.cast_signed().into()),
        ),
        ("logit_bias", biases(sampling)),
    ];
    // It refuses a `top_k` of 0.
    let fields = sampling_fields(sampling, "repetition_penalty", -1).into_iter();
    let guided = request.guided.as_deref().map(guided);
    let guided = guided.map(|(name, value)| (name, Some(value)));
    given(fields.chain(own).chain(guided)).collect()
}

fn guided(guided: &GuidedDecoding) -> (&'static str, Value) {
    match guided {
        GuidedDecoding::JsonObject => ("json_schema", json!({"type": "object"}).to_string().into()),
        GuidedDecoding::JsonSchema(schema) => ("json_schema", schema.to_string().into()),
        GuidedDecoding::Regex(regex) => ("regex", regex.clone().into()),
        GuidedDecoding::Choice(choices) => ("regex", super::guided::choice_regex(choices).into()),
        GuidedDecoding::Grammar(grammar) => ("ebnf", grammar.clone().into()),
    }
}

/// The fields of `/server_info` that we use.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct ServerInfo {
    /// A prompt must be shorter than this.
    max_req_input_len: Option<u32>,
    /// The number of tokens in the KV cache of a rank.
    max_total_num_tokens: Option<u64>,
    /// Tokens per KV block.
    page_size: Option<NonZeroU32>,
    /// The number of ranks, or of replicas.
    dp_size: Option<u32>,
    /// The number of ranks per replica; missing in older versions.
    attn_dp_size: Option<u32>,
    version: String,
}

impl ServerInfo {
    /// Limits the context so that the server accepts every prompt that fits.
    fn facts(&self, context_length_tokens: Option<u32>) -> Facts {
        let context = context_length_tokens.map(|context| {
            let left = context.saturating_sub(NOT_FOR_PROMPTS);
            self.max_req_input_len
                .filter(|max| *max > 0)
                .map_or(left, |max| max.min(context))
        });
        let blocks = self.max_total_num_tokens.zip(self.page_size);
        let ranks = self
            .dp_size
            .map(|ranks| ranks.saturating_mul(self.attn_dp_size.unwrap_or(1)));
        Facts {
            context_length_tokens: context,
            kv_block_size: self.page_size,
            kv_total_blocks: blocks.map(|(tokens, size)| {
                (tokens / u64::from(size.get())).saturating_mul(ranks.unwrap_or(1).into())
            }),
            ranks: ranks.filter(|ranks| *ranks > 0),
            no_kv_events: (!tells_salts(&self.version)).then_some(NO_SALTS_TOLD),
            ..Facts::default()
        }
    }
}

/// Whether a version, such as `0.5.23.post1`, includes salts in KV events.
fn tells_salts(version: &str) -> bool {
    let mut numbers = version.split('.').map(|number| {
        let end = number.find(|c: char| !c.is_ascii_digit());
        number[..end.unwrap_or(number.len())].parse().unwrap_or(0)
    });
    let version: [u32; 3] = std::array::from_fn(|_| numbers.next().unwrap_or(0));
    version >= TELLS_SALTS
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Chunk {
    output_ids: Option<Vec<TokenId>>,
    meta_info: MetaInfo,
    error: Option<Value>,
}

/// Log probability, token id, and the token's text if requested.
type Candidate = (Option<f32>, TokenId, Value);

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct MetaInfo {
    finish_reason: Option<FinishReason>,
    prompt_tokens: Option<u32>,
    completion_tokens: Option<usize>,
    cached_tokens: Option<u32>,
    output_token_logprobs: Vec<Candidate>,
    output_top_logprobs: Vec<Option<Vec<Candidate>>>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct FinishReason {
    #[serde(rename = "type")]
    kind: String,
    /// A token id, or the text of a stop string.
    matched: Option<Value>,
    message: Option<String>,
    status_code: Option<u16>,
}

struct SglangReader {
    logprobs: Option<u32>,
    /// The number of tokens read so far.
    seen: usize,
}

impl Reader for SglangReader {
    fn read(&mut self, event: &[u8]) -> Result<Step, EngineError> {
        let chunk: Chunk = serde_json::from_slice(event).map_err(unreadable)?;
        if let Some(error) = &chunk.error {
            return Err(error_of(None, error));
        }
        let meta = chunk.meta_info;
        let mut step = Step {
            prompt_tokens: meta.prompt_tokens,
            cached_tokens: meta.cached_tokens,
            end: meta.finish_reason.as_ref().map(end_of).transpose()?,
            ..Step::default()
        };
        let Some(ids) = chunk.output_ids else {
            return match step.end {
                Some(End::Aborted(_)) => Ok(step),
                _ => Err(unreadable(
                    "it has no output_ids; SGLang gives them since 0.5, and before with skip-tokenizer-init: true in \
                     --extra-engine-args",
                )),
            };
        };
        let new = self.new_ids(ids, meta.completion_tokens)?;
        if let Some(asked) = self.logprobs {
            step.tokens.logprobs = read_logprobs(
                last(meta.output_token_logprobs, new.len())?,
                last_or_none(meta.output_top_logprobs, new.len()),
                asked,
            );
        }
        step.tokens.token_ids = new.into();
        if let Some(End::Stop(Some(token))) = step.end
            && step.tokens.token_ids.last() == Some(&token)
        {
            step.tokens.token_ids.pop();
            step.tokens.logprobs.truncate(step.tokens.token_ids.len());
        }
        Ok(step)
    }
}

impl SglangReader {
    /// The tokens not seen before. An event contains all tokens or only the new ones; the total count shows which.
    fn new_ids(
        &mut self,
        mut ids: Vec<TokenId>,
        total: Option<usize>,
    ) -> Result<Vec<TokenId>, EngineError> {
        let total = total.unwrap_or(ids.len());
        let new = if ids.len() == total && total >= self.seen {
            ids.split_off(self.seen)
        } else if self.seen + ids.len() == total {
            ids
        } else {
            return Err(unreadable(format!(
                "{} tokens are said to be there, {} came before and {} now",
                total,
                self.seen,
                ids.len()
            )));
        };
        self.seen += new.len();
        Ok(new)
    }
}

fn end_of(reason: &FinishReason) -> Result<End, EngineError> {
    match reason.kind.as_str() {
        "stop" => {
            let token = reason.matched.as_ref().and_then(Value::as_u64);
            Ok(End::Stop(
                token.and_then(|token| TokenId::try_from(token).ok()),
            ))
        }
        "length" => Ok(End::Length),
        other => {
            let message = reason.message.clone().unwrap_or_else(|| other.to_owned());
            match reason.status_code {
                Some(status) => {
                    let error = error_of(Some(status), &json!({"message": message}));
                    // The queue is full: the server is alive, and the error concerns only this request.
                    Err(if status == QUEUE_IS_FULL {
                        EngineError::new(ErrorKind::Overloaded, error.message())
                    } else {
                        error
                    })
                }
                None => Ok(End::Aborted(message)),
            }
        }
    }
}

/// The last `count` values of a list that covers all tokens or only the new ones.
fn last<T>(mut values: Vec<T>, count: usize) -> Result<Vec<T>, EngineError> {
    let before = values.len().checked_sub(count);
    Ok(values.split_off(before.ok_or_else(no_logprobs)?))
}

fn last_or_none<T>(values: Vec<Option<T>>, count: usize) -> Vec<Option<T>> {
    last(values, count).unwrap_or_else(|_| std::iter::repeat_with(|| None).take(count).collect())
}

fn read_logprobs(
    chosen: Vec<Candidate>,
    tops: Vec<Option<Vec<Candidate>>>,
    asked: u32,
) -> Vec<TokenLogprob> {
    let both = chosen.into_iter().zip(tops);
    both.map(|((logprob, ..), top)| {
        let top = top.unwrap_or_default().into_iter();
        let top = top.map(|(logprob, token_id, _)| TopLogprob {
            token_id,
            logprob: logprob.unwrap_or(f32::MIN),
        });
        token_logprob(logprob.unwrap_or(f32::MIN), top.collect(), asked)
    })
    .collect()
}
