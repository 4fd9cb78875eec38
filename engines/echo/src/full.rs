//! Echoes text.

use std::time::Duration;

use genset_backend_common::output::{self, Finish, OutputStream};
use genset_backend_common::{
    Capabilities, EngineConfig, EngineError, EngineState, ErrorKind, GenerateRequest, Input,
    LLMEngine, RequestContext, RequestField, StartContext, async_trait, request::ChatInput,
};

use crate::{EchoArgs, ends, pause};

/// The most tokens (words) of prompt and answer together.
const CONTEXT_LENGTH: u32 = 1 << 20;

/// Echoes the prompt's text, or the last user message of a chat, word by word. A word with the space before it is one token.
/// If it must not end yet (`ignore_eos`, `min_tokens`), starts the text again.
#[derive(Debug)]
pub struct EchoFull {
    delay: Duration,
    started: EngineState<()>,
}

impl EchoFull {
    /// Creates an engine that is not started yet.
    #[must_use]
    pub fn from_args(args: &EchoArgs) -> Self {
        Self {
            delay: args.delay(),
            started: EngineState::new(),
        }
    }
}

#[async_trait]
impl LLMEngine for EchoFull {
    async fn start(&self, _ctx: StartContext) -> Result<EngineConfig, EngineError> {
        let can = Capabilities::text()
            .with_point_mass_sampling()
            .with_virtual_time();
        let config = EngineConfig::new("echo_full", CONTEXT_LENGTH).with_capabilities(can);
        self.started.start(async { Ok(((), config)) }).await
    }

    async fn generate(
        &self,
        request: GenerateRequest,
        ctx: RequestContext,
    ) -> Result<OutputStream, EngineError> {
        self.started.get()?;
        let text = match &request.input {
            Input::Text(text) => text.to_string(),
            Input::Chat(chat) => last_user_message(chat)?,
            Input::Tokens(_) | Input::Embed(_) | Input::Score(_) => {
                return Err(EngineError::unsupported(
                    RequestField::Prompt,
                    "this engine takes text and chat messages",
                ));
            }
        };
        let words = words(&text);
        let prompt_tokens = u32::try_from(words.len()).unwrap_or(u32::MAX);
        let room = room(prompt_tokens)?;
        let (stop, delay) = (request.stop, self.delay);
        let max_tokens = stop.max_tokens_within(room);
        // Keeps the usage right if the Worker ends the request: for text, only the engine counts the prompt.
        ctx.tell_prompt_tokens(prompt_tokens);
        Ok(output::stream(ctx, move |out| async move {
            for (generated, word) in (0..).zip(words.iter().cycle()) {
                if generated == max_tokens {
                    return Ok(Finish::length());
                }
                if !stop.ignore_eos && ends(&stop, words.len(), generated) {
                    break;
                }
                pause(delay).await;
                out.text(word.as_str(), 1).await?;
            }
            Ok(Finish::stop())
        }))
    }

    async fn cleanup(&self) -> Result<(), EngineError> {
        drop(self.started.take());
        Ok(())
    }
}

/// The number of words that the context leaves for the answer.
fn room(prompt_tokens: u32) -> Result<u32, EngineError> {
    match CONTEXT_LENGTH.saturating_sub(prompt_tokens) {
        0 => {
            let message = format!(
                "the text has {prompt_tokens} words, but the context holds {CONTEXT_LENGTH} with the answer; shorten it"
            );
            let error = EngineError::new(ErrorKind::ContextLengthExceeded, message);
            Err(error.with_at(RequestField::Prompt))
        }
        room => Ok(room),
    }
}

/// Words, each with the white space before it. Trailing white space is a word of its own.
fn words(text: &str) -> Vec<String> {
    let mut rest = text;
    let words = std::iter::from_fn(|| {
        let word_start = rest
            .find(|c: char| !c.is_whitespace())
            .unwrap_or(rest.len());
        let tail = rest.get(word_start..).unwrap_or_default();
        let word_end = word_start + tail.find(char::is_whitespace).unwrap_or(tail.len());
        let (word, after) = rest.split_at_checked(word_end)?;
        rest = after;
        (!word.is_empty()).then(|| word.to_owned())
    });
    words.collect()
}

/// The text of the last message with the role `user`: a string, or the text parts of a list.
fn last_user_message(chat: &ChatInput) -> Result<String, EngineError> {
    let message = chat
        .messages
        .iter()
        .rev()
        .find(|message| message["role"] == "user");
    let content = message.map(|message| &message["content"]).ok_or_else(|| {
        EngineError::invalid_argument(
            RequestField::Prompt,
            "must hold a message with the role \"user\"",
        )
    })?;
    if let Some(text) = content.as_str() {
        return Ok(text.to_owned());
    }
    let parts = content.as_array().map(Vec::as_slice).unwrap_or_default();
    Ok(parts
        .iter()
        .filter_map(|part| part["text"].as_str())
        .collect())
}

#[cfg(test)]
mod tests {
    use futures_util::StreamExt;
    use genset_conformance::Answer;
    use serde_json::json;

    use super::*;

    async fn echo(request: GenerateRequest) -> (String, u32) {
        let engine = EchoFull::from_args(&EchoArgs::default());
        engine.start(StartContext::detached(1)).await.unwrap();
        let outputs = engine.generate(request, RequestContext::new("r")).await;
        let answer = Answer::of(outputs.unwrap().collect().await);
        (answer.text(), answer.usage().unwrap().total_tokens())
    }

    #[tokio::test(start_paused = true)]
    async fn text_comes_back_unchanged() {
        for text in ["hello  wide\nworld ", "", " ", "é 🦀"] {
            assert_eq!(echo(GenerateRequest::from_text("m", text)).await.0, text);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn the_last_user_message_comes_back() {
        let messages = vec![
            json!({"role": "user", "content": "one"}),
            json!({"role": "assistant", "content": "two"}),
            json!({"role": "user", "content": [{"type": "text", "text": "three four"}]}),
        ];
        let chat = ChatInput {
            messages,
            tools: vec![],
        };
        assert_eq!(
            echo(GenerateRequest::from_chat("m", chat)).await,
            ("three four".into(), 4)
        );
    }
}
