//! llama-server's own `/completion`, with token ids both ways.
//!
//! # Source
//! llama.cpp, `tools/server/README.md` of spring 2026 (`return_tokens`, `n_probs`, `stop_type`). It knows no stop tokens but
//! the model's own; ours are found in its answer, which then ends. It knows no `min_tokens`.

use genset_backend_common::output::{TokenChunk, TokenLogprob, TopLogprob};
use genset_backend_common::{
    Capabilities, EngineError, GenerateRequest, GuidedDecoding, GuidedKind, SamplingOption,
    TokenId, async_trait,
};
use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::wire::{error_of, token_logprob};
use super::{Api, Call, End, Facts, Reader, Step, unreadable};
use crate::http::{Client, HttpError};

const MAX_LOGPROBS: u32 = 20;

/// The API of llama-server.
#[derive(Debug)]
pub(super) struct Llama;

#[async_trait]
impl Api for Llama {
    fn capabilities(&self) -> Capabilities {
        let mut capabilities = Capabilities::tokens().with_sampling(sampling_options());
        capabilities.max_logprobs = Some(MAX_LOGPROBS);
        capabilities.guided = grammars().into();
        capabilities
    }

    fn call(
        &self,
        request: &GenerateRequest,
        max_tokens: Option<u32>,
    ) -> Result<Call, EngineError> {
        refuse_min_tokens(request)?;
        let mut body = sampling(request);
        body.insert("prompt".into(), request.tokens()?.into());
        body.insert("stream".into(), true.into());
        body.insert("return_tokens".into(), true.into());
        body.insert("cache_prompt".into(), true.into());
        body.insert("ignore_eos".into(), request.stop.ignore_eos.into());
        if let Some(max_tokens) = max_tokens {
            body.insert("n_predict".into(), max_tokens.into());
        }
        if let Some(asked) = request.output.logprobs {
            body.insert("n_probs".into(), asked.max(1).into());
        }
        Ok(Call::new("/completion", &Value::Object(body)))
    }

    fn reader(&self, request: &GenerateRequest) -> Box<dyn Reader> {
        Box::new(LlamaReader {
            logprobs: request.output.logprobs,
        })
    }

    fn tells_usage_later(&self) -> bool {
        true
    }

    async fn facts(&self, client: &Client) -> Result<Facts, HttpError> {
        props(client).await
    }
}

pub(super) fn sampling_options() -> [SamplingOption; 9] {
    use SamplingOption as Opt;
    [
        Opt::Temperature,
        Opt::TopP,
        Opt::TopK,
        Opt::MinP,
        Opt::PresencePenalty,
        Opt::FrequencyPenalty,
        Opt::RepetitionPenalty,
        Opt::LogitBias,
        Opt::Seed,
    ]
}

pub(super) fn grammars() -> [GuidedKind; 4] {
    [
        GuidedKind::JsonObject,
        GuidedKind::JsonSchema,
        GuidedKind::Choice,
        GuidedKind::Grammar,
    ]
}

pub(super) fn refuse_min_tokens(request: &GenerateRequest) -> Result<(), EngineError> {
    if request.stop.min_tokens == 0 {
        return Ok(());
    }
    Err(EngineError::unsupported(
        "min_tokens",
        "llama-server has no such setting",
    ))
}

/// The options that `/completion` and the OpenAI paths of llama-server share.
pub(super) fn sampling(request: &GenerateRequest) -> Map<String, Value> {
    let sampling = &request.sampling;
    let biases: Vec<Value> = sampling
        .logit_bias
        .iter()
        .map(|(token, bias)| json!([token, bias]))
        .collect();
    let values = [
        ("temperature", sampling.temperature.map(Value::from)),
        ("top_p", sampling.top_p.map(Value::from)),
        ("top_k", sampling.top_k.map(Value::from)),
        ("min_p", sampling.min_p.map(Value::from)),
        (
            "presence_penalty",
            sampling.presence_penalty.map(Value::from),
        ),
        (
            "frequency_penalty",
            sampling.frequency_penalty.map(Value::from),
        ),
        (
            "repeat_penalty",
            sampling.repetition_penalty.map(Value::from),
        ),
        ("seed", sampling.seed.map(|seed| seed_of(seed).into())),
        (
            "logit_bias",
            (!biases.is_empty()).then_some(Value::Array(biases)),
        ),
    ];
    let set = values
        .into_iter()
        .filter_map(|(name, value)| Some((name, value?)));
    let guided = request.guided.as_ref().and_then(guided);
    set.chain(guided)
        .map(|(name, value)| (name.to_owned(), value))
        .collect()
}

/// A seed of 31 bits out of one of 64; of 32 bits, the largest asks for a random one.
pub(super) fn seed_of(seed: u64) -> u32 {
    let folded = (seed ^ (seed >> 32)) & u64::from(u32::MAX >> 1);
    u32::try_from(folded).unwrap_or_default()
}

fn guided(guided: &GuidedDecoding) -> Option<(&'static str, Value)> {
    match guided {
        GuidedDecoding::JsonObject => Some(("json_schema", json!({"type": "object"}))),
        GuidedDecoding::JsonSchema(schema) => Some(("json_schema", schema.clone())),
        GuidedDecoding::Choice(choices) => {
            Some(("grammar", super::guided::choice_gbnf(choices).into()))
        }
        GuidedDecoding::Grammar(grammar) => Some(("grammar", grammar.clone().into())),
        // Not declared, so it does not come here.
        GuidedDecoding::Regex(_) => None,
    }
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Props {
    default_generation_settings: GenerationSettings,
    total_slots: Option<u32>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct GenerationSettings {
    n_ctx: Option<u32>,
}

/// What `/props` tells.
pub(super) async fn props(client: &Client) -> Result<Facts, HttpError> {
    let props: Props = client.get("/props").await?;
    Ok(Facts {
        context_length_tokens: props.default_generation_settings.n_ctx,
        max_num_seqs: props.total_slots,
    })
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Chunk {
    tokens: Vec<TokenId>,
    stop: bool,
    stop_type: String,
    completion_probabilities: Vec<Probability>,
    tokens_evaluated: Option<u32>,
    timings: Timings,
    error: Option<Value>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Probability {
    logprob: f32,
    top_logprobs: Vec<TopProbability>,
}

#[derive(Debug, Deserialize)]
struct TopProbability {
    id: TokenId,
    logprob: f32,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Timings {
    cache_n: Option<u32>,
}

struct LlamaReader {
    logprobs: Option<u32>,
}

impl Reader for LlamaReader {
    fn read(&mut self, event: &[u8]) -> Result<Step, EngineError> {
        let chunk: Chunk = serde_json::from_slice(event).map_err(unreadable)?;
        if let Some(error) = &chunk.error {
            return Err(error_of(None, error));
        }
        let mut step = Step::default();
        if chunk.stop {
            // The last event's tokens are those that came before, where it has any.
            step.end = Some(match chunk.stop_type.as_str() {
                "limit" => End::Length,
                _ => End::Stop(None),
            });
            step.prompt_tokens = chunk.tokens_evaluated;
            step.cached_tokens = chunk.timings.cache_n;
            return Ok(step);
        }
        let count = chunk.tokens.len();
        step.tokens = TokenChunk {
            token_ids: chunk.tokens.into(),
            logprobs: Vec::new(),
        };
        if let Some(asked) = self.logprobs {
            if chunk.completion_probabilities.len() != count {
                return Err(unreadable(
                    "log probabilities were asked for and are not there",
                ));
            }
            let read = chunk.completion_probabilities.into_iter();
            step.tokens.logprobs = read.map(|at| logprob_of(at, asked)).collect();
        }
        Ok(step)
    }
}

fn logprob_of(at: Probability, asked: u32) -> TokenLogprob {
    let top = at.top_logprobs.into_iter();
    let top = top
        .map(|c| TopLogprob {
            token_id: c.id,
            logprob: c.logprob,
        })
        .collect();
    token_logprob(at.logprob, top, asked)
}
