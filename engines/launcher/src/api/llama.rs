//! llama-server's own `/completion`, with token ids in both directions.
//!
//! # Source
//! llama.cpp, `tools/server/README.md` of spring 2026 (`return_tokens`, `n_probs`, `stop_type`). It has no stop tokens besides
//! the model's own, so we find ours in its answer and end it there. It has no `min_tokens`, and its `ignore_eos` bans the
//! model's end-of-sequence tokens. So we let it end, and if the request must not end there, we call it again to continue.
//!
//! It sends nothing while the text ends inside a character; then it sends the whole character with only its last token (b11434,
//! `process_token` and `send_partial_response`). Its token count shows the gap, and its tokenizer fills it. If the text does
//! not determine the tokens, because its bytes are not a character or the model used another tokenization, the tokens are drawn
//! again in a call that is not streamed and names them. The first tokens were never sent to the client.

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
use super::{
    Api, Call, End, Facts, Reader, Step, Withheld, given, no_logprobs, sampling_fields, unreadable,
};
use crate::http::{Client, HttpError};

const MAX_LOGPROBS: u32 = 20;

/// Tokens that llama-server may generate past the limit of a request with a grammar, to complete the character at the limit. We
/// cut the answer at the limit.
pub(crate) const PAST_LIMIT: u32 = 8;

/// The API of llama-server.
#[derive(Debug, Default)]
pub(crate) struct Llama {
    cache: PromptCache,
}

impl Llama {
    /// The fields of every call.
    fn body(&self, request: &GenerateRequest) -> Result<Map<String, Value>, EngineError> {
        let mut body = sampling(request);
        body.insert("prompt".into(), request.tokens()?.into());
        body.insert("stream".into(), true.into());
        body.insert("return_tokens".into(), true.into());
        // Each event has the usage, so there is no separate event to wait for.
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
            // Without a grammar, the tokens of a character at the limit are drawn again. A server that continues would keep its
            // slot until it notices our disconnect; the next request would get another slot, without its prompt.
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

    fn withholds(&self) -> Option<&Llama> {
        Some(self)
    }

    fn goes_on(&self) -> bool {
        true
    }

    /// Reserves the end of the context for completing a character.
    async fn facts(&self, client: &Client) -> Result<Facts, HttpError> {
        let mut facts = props(client).await?;
        let context = facts.context_length_tokens;
        facts.context_length_tokens = context.map(|context| context.saturating_sub(PAST_LIMIT));
        Ok(facts)
    }
}

/// Recovers tokens that the server withheld.
impl Llama {
    /// Tokenizes a text; returns its tokens, each with its bytes.
    pub(crate) async fn pieces(client: &Client, text: &str) -> Result<Vec<Piece>, HttpError> {
        #[derive(Deserialize)]
        struct Tokenized {
            tokens: Vec<Piece>,
        }
        let body = json!({"content": text, "add_special": false, "parse_special": false, "with_pieces": true});
        let tokenized: Tokenized = client.ask("/tokenize", &body).await?;
        Ok(tokenized.tokens)
    }

    /// Builds the call for the next `count` tokens in one answer that names them all.
    ///
    /// # Errors
    /// As [`Api::call`].
    pub(crate) fn whole_call(
        &self,
        request: &GenerateRequest,
        count: u32,
    ) -> Result<Call, EngineError> {
        let mut body = self.body(request)?;
        body.insert("stream".into(), false.into());
        body.insert("n_predict".into(), count.into());
        Ok(Call::new("/completion", &Value::Object(body)))
    }

    /// The tokens of that answer.
    ///
    /// # Errors
    /// `Disconnected` if the answer cannot be decoded.
    pub(crate) fn whole_tokens(answer: &[u8]) -> Result<Vec<TokenId>, EngineError> {
        let chunk: Chunk = serde_json::from_slice(answer).map_err(unreadable)?;
        Ok(chunk.tokens)
    }

    /// Builds the call for the `count` likeliest next tokens.
    ///
    /// The server returns no probabilities with a token that ends inside a character. So the grammar asks for a token that is a
    /// character: its answer has the probabilities of all tokens, and the grammar does not change them.
    ///
    /// # Errors
    /// As [`Api::call`].
    pub(crate) fn rating_call(
        &self,
        request: &GenerateRequest,
        count: u32,
    ) -> Result<Call, EngineError> {
        let body = json!({
            "prompt": request.tokens()?, "n_predict": 1, "stream": false, "temperature": 0.0, "n_probs": count,
            "grammar": "root ::= [a-z]", "cache_prompt": self.cache.may_be_read_by(request),
        });
        Ok(Call::new("/completion", &body))
    }

    /// The candidates in the answer to it.
    ///
    /// # Errors
    /// `Disconnected` if the answer cannot be decoded.
    pub(crate) fn candidates(answer: &[u8]) -> Result<Vec<TopLogprob>, EngineError> {
        let chunk: Chunk = serde_json::from_slice(answer).map_err(unreadable)?;
        let at = chunk.completion_probabilities.into_iter().next();
        Ok(at.map(Probability::candidates).unwrap_or_default())
    }
}

/// llama.cpp's deviations (b11434): results depend on the batch size, and penalties cover the last 64 tokens, including those
/// of the prompt.
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

/// Tracks whether the server's slots may be reused: they do not know cache salts. A prompt with a salt is computed anew, but
/// its slot keeps it for any later request to read. So after such a prompt no request may read from the slots.
#[derive(Debug, Default)]
pub(super) struct PromptCache {
    has_salted: AtomicBool,
}

impl PromptCache {
    /// Whether the request may read from the cache. Call this before sending the request.
    fn may_be_read_by(&self, request: &GenerateRequest) -> bool {
        if request.cache_salt.is_some() {
            self.has_salted.store(true, Ordering::Relaxed);
        }
        !self.has_salted.load(Ordering::Relaxed)
    }

    /// As [`Self::may_be_read_by`], for an answer. With a seed, the prompt is computed anew: cached prompts give slightly
    /// different results, which a draw among all tokens reveals.
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

/// The options shared by `/completion` and the OpenAI paths of llama-server.
pub(super) fn sampling(request: &GenerateRequest) -> Map<String, Value> {
    let sampling = &request.sampling;
    let biases: Vec<Value> = sampling
        .logit_bias
        .iter()
        .map(|(token, bias)| json!([token, bias]))
        .collect();
    let own = [
        ("seed", sampling.seed.map(|seed| seed_of(seed).into())),
        (
            "logit_bias",
            (!biases.is_empty()).then_some(Value::Array(biases)),
        ),
    ];
    let fields = sampling_fields(sampling, "repeat_penalty", 0).into_iter();
    let guided = request.guided.as_deref().and_then(guided);
    let guided = guided.map(|(name, value)| (name, Some(value)));
    given(fields.chain(own).chain(guided)).collect()
}

/// Maps a 64-bit seed to 31 bits; of 32-bit seeds, the largest means a random one.
fn seed_of(seed: u64) -> u32 {
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
        // Not declared, so it cannot arrive here.
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

/// The facts in `/props`.
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
    /// The number of tokens generated so far, including withheld ones.
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
    /// The number of tokens read so far.
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
            // If the last event has tokens, they repeat earlier ones.
            return Ok(step);
        }
        let count = chunk.tokens.len();
        step.tokens = TokenChunk {
            token_ids: chunk.tokens.into(),
            logprobs: Vec::new(),
        };
        if let Some(asked) = self.logprobs {
            if chunk.completion_probabilities.len() != count {
                return Err(no_logprobs());
            }
            let read = chunk.completion_probabilities.into_iter();
            step.tokens.logprobs = read.map(|at| logprob_of(at, asked)).collect();
        }
        Ok(step)
    }
}

impl LlamaReader {
    /// The number of tokens generated since the last event that this event does not name; 0 if the server reports no count.
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
