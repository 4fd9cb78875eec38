//! Text and chat in, text out: the OpenAI paths of llama-server and `llama_cpp.server`, for a GGUF file that contains its
//! tokenizer and chat template.
//!
//! The server counts the prompt's tokens before the request is sent, so that the request can reserve room.
//!
//! # Source
//! llama.cpp, `tools/server/README.md` of spring 2026; llama-cpp-python 0.3.36, `llama_cpp.server`. The latter reports no usage
//! in a stream; `/extras/tokenize/count` counts its prompts.

use genset_backend_common::{
    Capabilities, EngineError, GenerateRequest, Input, RequestField, async_trait,
    config::{Deviation, GuidedKind, SamplingOption},
    request::ChatInput,
};
use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::llama::{PromptCache, deviations, grammars, props, sampling};
use super::wire::{Chunk, error_of};
use super::{Api, Call, End, Facts, Reader, Step, biases, unreadable};
use crate::http::{Client, HttpError};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Flavor {
    LlamaServer,
    LlamaCppPython,
}

/// The text API of llama.cpp's servers.
#[derive(Debug)]
pub(super) struct Text {
    flavor: Flavor,
    /// Used by llama-server only.
    cache: PromptCache,
}

impl Text {
    pub(super) fn new(flavor: Flavor) -> Self {
        let cache = PromptCache::default();
        Self { flavor, cache }
    }

    fn refuse(&self, request: &GenerateRequest) -> Result<(), EngineError> {
        if !request.stop.stop_token_ids.is_empty() {
            let problem = "this server is driven by text and knows no tokens";
            return Err(EngineError::unsupported(
                RequestField::StopTokenIds,
                problem,
            ));
        }
        match self.flavor {
            Flavor::LlamaCppPython if request.stop.ignore_eos => Err(EngineError::unsupported(
                RequestField::IgnoreEos,
                "llama_cpp.server has no such setting",
            )),
            // llama-server is declared not to honor `min_tokens`, so it does not arrive here.
            Flavor::LlamaServer | Flavor::LlamaCppPython => Ok(()),
        }
    }

    fn options(&self, request: &GenerateRequest) -> Map<String, Value> {
        let mut body = match self.flavor {
            Flavor::LlamaServer => sampling(request),
            Flavor::LlamaCppPython => python_sampling(request),
        };
        body.insert("stream".into(), true.into());
        match self.flavor {
            Flavor::LlamaServer => {
                body.insert("stream_options".into(), json!({"include_usage": true}));
                // A piece of text may be several tokens; each event reports the count.
                body.insert("timings_per_token".into(), true.into());
                body.insert("ignore_eos".into(), request.stop.ignore_eos.into());
                if !self.cache.may_be_read_to_answer(request) {
                    body.insert("cache_prompt".into(), false.into());
                }
            }
            Flavor::LlamaCppPython if request.stop.min_tokens > 0 => {
                body.insert("min_tokens".into(), request.stop.min_tokens.into());
            }
            Flavor::LlamaCppPython => {}
        }
        // Without it, `llama_cpp.server` generates 16 tokens.
        body.insert("max_tokens".into(), request.stop.max_tokens.into());
        body
    }
}

/// The options of `llama_cpp.server`, which requires every number and accepts no null.
fn python_sampling(request: &GenerateRequest) -> Map<String, Value> {
    let mut body = sampling(request);
    if let Some(biases) = biases(&request.sampling) {
        body.insert("logit_bias".into(), biases);
        body.insert("logit_bias_type".into(), "input_ids".into());
    }
    body
}

#[async_trait]
impl Api for Text {
    fn capabilities(&self) -> Capabilities {
        let mut capabilities = Capabilities::text().with_sampling(SamplingOption::ALL);
        match self.flavor {
            Flavor::LlamaServer => {
                capabilities.guided = grammars().into();
                capabilities
                    .with_deviations(deviations().into_iter().chain([Deviation::NoMinTokens]))
            }
            Flavor::LlamaCppPython => {
                capabilities.guided = [GuidedKind::Choice, GuidedKind::Grammar].into();
                capabilities
            }
        }
    }

    fn call(
        &self,
        request: &GenerateRequest,
        _max_tokens: Option<u32>,
    ) -> Result<Call, EngineError> {
        self.refuse(request)?;
        let mut body = self.options(request);
        let path = match &request.input {
            Input::Text(text) => {
                body.insert("prompt".into(), text.as_str().into());
                "/v1/completions"
            }
            Input::Chat(chat) => {
                refuse_tools(chat)?;
                body.insert("messages".into(), chat.messages.clone().into());
                "/v1/chat/completions"
            }
            Input::Tokens(_) | Input::Embed(_) | Input::Score(_) => {
                let problem = "this engine takes text and chat messages";
                return Err(EngineError::unsupported(RequestField::Prompt, problem));
            }
        };
        Ok(Call::new(path, &Value::Object(body)))
    }

    /// The usual probe sets `ignore_eos`.
    fn canary(&self, model: &str) -> Option<GenerateRequest> {
        let mut canary = GenerateRequest::from_text(model, "Hello");
        canary.stop.max_tokens = Some(1);
        (self.flavor == Flavor::LlamaCppPython).then_some(canary)
    }

    fn reader(&self, _request: &GenerateRequest) -> Box<dyn Reader> {
        Box::new(TextReader)
    }

    fn tells_usage_later(&self, _request: &GenerateRequest) -> bool {
        self.flavor == Flavor::LlamaServer
    }

    async fn facts(&self, client: &Client) -> Result<Facts, HttpError> {
        match self.flavor {
            Flavor::LlamaServer => props(client).await,
            // One model, one sequence: requests wait for each other anyway.
            Flavor::LlamaCppPython => Ok(Facts {
                context_length_tokens: None,
                max_num_seqs: Some(1),
                ..Facts::default()
            }),
        }
    }

    async fn prompt_tokens(
        &self,
        client: &Client,
        request: &GenerateRequest,
    ) -> Result<Option<u32>, HttpError> {
        let count = match (self.flavor, &request.input) {
            (_, Input::Tokens(_) | Input::Embed(_) | Input::Score(_)) => return Ok(None),
            (Flavor::LlamaServer, input) => {
                return match llama_tokens(client, input).await {
                    // The server reports the fault when the request is sent; likewise for a prompt whose token list is too long
                    // to read.
                    Err(HttpError::Status(_) | HttpError::TooLarge { .. }) => Ok(None),
                    counted => counted.map(Some),
                };
            }
            (Flavor::LlamaCppPython, input) => {
                let text = match input {
                    Input::Chat(chat) => text_of(chat),
                    Input::Text(text) => text.to_string(),
                    Input::Tokens(_) | Input::Embed(_) | Input::Score(_) => String::new(),
                };
                let body = json!({"input": text});
                let counted: Count = client.ask("/extras/tokenize/count", &body).await?;
                counted.count
            }
        };
        Ok(Some(count))
    }
}

#[derive(Deserialize)]
struct Count {
    count: u32,
}

/// A chat rendered by llama-server's template.
#[derive(Deserialize)]
struct Templated {
    prompt: String,
}

#[derive(Deserialize)]
struct Tokenized {
    tokens: Vec<u32>,
}

/// The number of tokens of a prompt, counted by llama-server.
async fn llama_tokens(client: &Client, input: &Input) -> Result<u32, HttpError> {
    let text = match input {
        Input::Text(text) => text.to_string(),
        Input::Chat(chat) => {
            let body = json!({"messages": chat.messages});
            let templated: Templated = client.ask("/apply-template", &body).await?;
            templated.prompt
        }
        Input::Tokens(_) | Input::Embed(_) | Input::Score(_) => String::new(),
    };
    let body = json!({"content": text, "add_special": true, "parse_special": true});
    let tokenized: Tokenized = client.ask("/tokenize", &body).await?;
    Ok(u32::try_from(tokenized.tokens.len()).unwrap_or(u32::MAX))
}

fn refuse_tools(chat: &ChatInput) -> Result<(), EngineError> {
    if chat.tools.is_empty() {
        return Ok(());
    }
    let problem = "tools need the model's own template and tokens; give the model's folder with --model-config";
    Err(EngineError::unsupported(RequestField::Tools, problem))
}

/// The texts of a chat. They are counted as its prompt, without what the server's template adds.
fn text_of(chat: &ChatInput) -> String {
    let texts = chat
        .messages
        .iter()
        .flat_map(|message| match &message["content"] {
            Value::String(text) => vec![text.as_str()],
            Value::Array(parts) => parts
                .iter()
                .filter_map(|part| part["text"].as_str())
                .collect(),
            Value::Null | Value::Bool(_) | Value::Number(_) | Value::Object(_) => Vec::new(),
        });
    texts.collect::<Vec<_>>().join("\n")
}

pub(super) struct TextReader;

impl Reader for TextReader {
    fn read(&mut self, event: &[u8]) -> Result<Step, EngineError> {
        let chunk: Chunk = serde_json::from_slice(event).map_err(unreadable)?;
        if let Some(error) = &chunk.error {
            return Err(error_of(None, error));
        }
        let mut step = Step {
            completion_tokens: chunk.timings.predicted_n,
            ..Step::default()
        };
        if let Some(usage) = &chunk.usage {
            step.prompt_tokens = usage.prompt_tokens;
            step.completion_tokens = usage.completion_tokens;
            step.cached_tokens = usage.cached_tokens().or(chunk.timings.cache_n);
        }
        let Some(choice) = chunk.choices.into_iter().next() else {
            return Ok(step);
        };
        step.text = choice
            .text
            .or(choice.delta.and_then(|delta| delta.content))
            .unwrap_or_default();
        step.end = choice.finish_reason.map(|reason| match reason.as_str() {
            "stop" => End::Stop(None),
            "length" => End::Length,
            _ => End::Aborted(reason),
        });
        Ok(step)
    }
}
