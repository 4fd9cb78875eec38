//! llama-server's own `/completion`, with token ids both ways.
//!
//! # Source
//! llama.cpp, `tools/server/README.md` of spring 2026 (`return_tokens`, `n_probs`, `stop_type`). It knows no stop tokens but
//! the model's own; ours are found in its answer, which then ends. It knows no `min_tokens`, and its `ignore_eos` bans the model's
//! ends. So it is let end, and where that is no end to the request, it is asked to go on behind it.
//!
//! While the text ends inside a character it sends nothing; then it sends the whole character with its last token alone
//! (b11434, `process_token` and `send_partial_response`). Its count of tokens shows the gap, and its own tokenizer fills it. Where the
//! text does not tell the tokens, because its bytes are no character or the model spelled it in another way, they are drawn again in an
//! answer that is not streamed, which names them; nobody has seen the first ones.

use std::sync::atomic::{AtomicBool, Ordering};

use genset_backend_common::output::{TokenChunk, TokenLogprob, TopLogprob};
use genset_backend_common::{
    Capabilities, EngineError, GenerateRequest, GuidedDecoding, RequestField, TokenId, async_trait,
    config::{Deviation, GuidedKind, SamplingOption},
};
use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::wire::{Timings, error_of, token_logprob};
use super::withheld::Piece;
use super::{Api, Call, End, Facts, Reader, Step, Withheld, Withholds, unreadable};
use crate::http::{Client, HttpError};

const MAX_LOGPROBS: u32 = 20;

/// Tokens that it may generate past the limit beside a grammar, in which it ends the character that the limit is in. We stop at the
/// limit.
pub(crate) const PAST_LIMIT: u32 = 8;

/// The API of llama-server.
#[derive(Debug, Default)]
pub(super) struct Llama {
    cache: PromptCache,
}

impl Llama {
    /// What every call says.
    fn body(&self, request: &GenerateRequest) -> Result<Map<String, Value>, EngineError> {
        let mut body = sampling(request);
        body.insert("prompt".into(), request.tokens()?.into());
        body.insert("stream".into(), true.into());
        body.insert("return_tokens".into(), true.into());
        // Each event tells the usage, so none is waited for.
        body.insert("timings_per_token".into(), true.into());
        body.insert(
            "cache_prompt".into(),
            self.cache.may_be_read_to_answer(request).into(),
        );
        if let Some(asked) = request.output.logprobs {
            body.insert("n_probs".into(), asked.max(1).into());
        }
        Ok(body)
    }
}

#[async_trait]
impl Api for Llama {
    fn capabilities(&self) -> Capabilities {
        let mut capabilities = Capabilities::tokens()
            .with_sampling(SamplingOption::ALL)
            .with_resume_as_prompt()
            .with_deviations(deviations());
        capabilities.max_logprobs = Some(MAX_LOGPROBS);
        capabilities.guided = grammars().into();
        capabilities
    }

    fn call(
        &self,
        request: &GenerateRequest,
        max_tokens: Option<u32>,
    ) -> Result<Call, EngineError> {
        if request.guided.is_some() {
            refuse_min_tokens(
                request,
                "llama-server ends an answer where its grammar does",
            )?;
        }
        let mut body = self.body(request)?;
        if let Some(max_tokens) = max_tokens {
            // Without a grammar the tokens of a character that the limit is in are drawn again. A server that goes on keeps its slot
            // until it sees that we are gone: the next request finds another slot, which has not its prompt.
            let past = request.guided.as_ref().map_or(0, |_| PAST_LIMIT);
            body.insert("n_predict".into(), max_tokens.saturating_add(past).into());
        }
        Ok(Call::new("/completion", &Value::Object(body)))
    }

    fn reader(&self, request: &GenerateRequest) -> Box<dyn Reader> {
        Box::new(LlamaReader {
            logprobs: request.output.logprobs,
            seen: 0,
        })
    }

    fn withholds(&self) -> Option<&dyn Withholds> {
        Some(self)
    }

    fn goes_on(&self) -> bool {
        true
    }

    /// The end of its context is left to end a character in.
    async fn facts(&self, client: &Client) -> Result<Facts, HttpError> {
        let mut facts = props(client).await?;
        let context = facts.context_length_tokens;
        facts.context_length_tokens = context.map(|context| context.saturating_sub(PAST_LIMIT));
        Ok(facts)
    }
}

#[async_trait]
impl Withholds for Llama {
    async fn pieces(&self, client: &Client, text: &str) -> Result<Vec<Piece>, HttpError> {
        #[derive(Deserialize)]
        struct Tokenized {
            tokens: Vec<Piece>,
        }
        let body = json!({"content": text, "add_special": false, "parse_special": false, "with_pieces": true});
        let body = body.to_string().into_bytes();
        let tokenized: Tokenized = client.post("/tokenize", body, &[]).await?.json().await?;
        Ok(tokenized.tokens)
    }

    fn whole_call(&self, request: &GenerateRequest, count: u32) -> Result<Call, EngineError> {
        let mut body = self.body(request)?;
        body.insert("stream".into(), false.into());
        body.insert("n_predict".into(), count.into());
        Ok(Call::new("/completion", &Value::Object(body)))
    }

    fn whole_tokens(&self, answer: &[u8]) -> Result<Vec<TokenId>, EngineError> {
        let chunk: Chunk = serde_json::from_slice(answer).map_err(unreadable)?;
        Ok(chunk.tokens)
    }

    /// It gives no probabilities with a token that ends inside a character. Those of all tokens come with one that is a character,
    /// which the grammar asks for; they are the model's own, whatever the grammar leaves.
    fn rating_call(&self, request: &GenerateRequest, count: u32) -> Result<Call, EngineError> {
        let body = json!({
            "prompt": request.tokens()?, "n_predict": 1, "stream": false, "temperature": 0.0, "n_probs": count,
            "grammar": "root ::= [a-z]", "cache_prompt": self.cache.may_be_read_by(request),
        });
        Ok(Call::new("/completion", &body))
    }

    fn candidates(&self, answer: &[u8]) -> Result<Vec<TopLogprob>, EngineError> {
        let chunk: Chunk = serde_json::from_slice(answer).map_err(unreadable)?;
        let at = chunk.completion_probabilities.into_iter().next();
        Ok(at.map(Probability::candidates).unwrap_or_default())
    }
}

/// What is llama.cpp's own way (b11434): its sums depend on the size of a batch, and its penalties look at the last 64 tokens, those
/// of the prompt among them.
pub(super) fn deviations() -> [Deviation; 2] {
    [Deviation::BatchVariant, Deviation::PenaltiesCountPrompt]
}

pub(super) fn grammars() -> [GuidedKind; 4] {
    [
        GuidedKind::JsonObject,
        GuidedKind::JsonSchema,
        GuidedKind::Choice,
        GuidedKind::Grammar,
    ]
}

/// What the server's slots have of prompts. They know no salts. A prompt with one is computed anew, but its slot keeps it, and whoever
/// may read from slots finds it there: so nobody may any more.
#[derive(Debug, Default)]
pub(super) struct PromptCache {
    has_salted: AtomicBool,
}

impl PromptCache {
    /// Whether the request may read from it. To be asked before the request is sent.
    fn may_be_read_by(&self, request: &GenerateRequest) -> bool {
        if request.cache_salt.is_some() {
            self.has_salted.store(true, Ordering::Relaxed);
        }
        !self.has_salted.load(Ordering::Relaxed)
    }

    /// As [`Self::may_be_read_by`], for an answer. The prompt of one that a seed makes repeatable is computed anew: read from the cache
    /// its sums are others, and a draw among all tokens shows it.
    pub(super) fn may_be_read_to_answer(&self, request: &GenerateRequest) -> bool {
        let sampling = &request.sampling;
        let is_drawn = sampling.temperature != Some(0.0);
        self.may_be_read_by(request) && !(is_drawn && sampling.seed.is_some())
    }
}

pub(super) fn refuse_min_tokens(request: &GenerateRequest, why: &str) -> Result<(), EngineError> {
    match request.stop.min_tokens {
        0 => Ok(()),
        _ => Err(EngineError::unsupported(RequestField::MinTokens, why)),
    }
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
    let guided = request.guided.as_deref().and_then(guided);
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
        ..Facts::default()
    })
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Chunk {
    content: String,
    tokens: Vec<TokenId>,
    /// Tokens generated so far, those included that were withheld.
    tokens_predicted: Option<u64>,
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

impl Probability {
    fn candidates(self) -> Vec<TopLogprob> {
        let top = self.top_logprobs.into_iter();
        top.map(|c| TopLogprob {
            token_id: c.id,
            logprob: c.logprob,
        })
        .collect()
    }
}

#[derive(Debug, Deserialize)]
struct TopProbability {
    id: TokenId,
    logprob: f32,
}

struct LlamaReader {
    logprobs: Option<u32>,
    /// Tokens read so far.
    seen: u64,
}

impl Reader for LlamaReader {
    fn read(&mut self, event: &[u8]) -> Result<Step, EngineError> {
        let chunk: Chunk = serde_json::from_slice(event).map_err(unreadable)?;
        if let Some(error) = &chunk.error {
            return Err(error_of(None, error));
        }
        let mut step = Step {
            prompt_tokens: chunk.tokens_evaluated,
            cached_tokens: chunk.timings.cache_n,
            ..Step::default()
        };
        let gap = self.gap(&chunk)?;
        if chunk.stop {
            step.end = Some(match chunk.stop_type.as_str() {
                "limit" => End::Length,
                _ => End::Stop(None),
            });
        }
        if gap > 0 {
            step.withheld = Some(withheld(chunk, gap));
            return Ok(step);
        }
        if chunk.stop {
            // The last event's tokens are those that came before, where it has any.
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

impl LlamaReader {
    /// How many tokens were generated since the last event that this one does not name. A server that counts none has none.
    fn gap(&mut self, chunk: &Chunk) -> Result<u64, EngineError> {
        let given = if chunk.stop { 0 } else { chunk.tokens.len() };
        let named = self
            .seen
            .saturating_add(u64::try_from(given).unwrap_or(u64::MAX));
        let predicted = chunk.tokens_predicted.unwrap_or(named);
        let gap = predicted.checked_sub(named).ok_or_else(|| {
            unreadable(format!(
                "it counts {predicted} tokens after {named} were given"
            ))
        })?;
        self.seen = predicted;
        Ok(gap)
    }
}

fn withheld(chunk: Chunk, gap: u64) -> Withheld {
    let gap = usize::try_from(gap).unwrap_or(usize::MAX);
    let given = match chunk.stop {
        true => Vec::new(),
        false => chunk.tokens,
    };
    Withheld {
        text: chunk.content,
        count: gap.saturating_add(given.len()),
        given,
    }
}

fn logprob_of(at: Probability, asked: u32) -> TokenLogprob {
    token_logprob(at.logprob, at.candidates(), asked)
}
