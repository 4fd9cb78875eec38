//! [`Objects`] turns the answer of an engine that writes OpenAI's own objects into deltas. Each object is a chunk or a whole
//! answer; only the first choice is read. No markup is parsed: the objects separate content, reasoning and tool calls.

use genset_backend_common::{EngineError, ErrorKind, FinishReason};
use serde::Deserialize;
use serde_json::Value;

use super::Deltas;

/// The state of one answer, besides its deltas.
#[derive(Debug, Default)]
pub(super) struct Objects {
    /// The index of the latest tool call, as the objects number it.
    call: Option<u32>,
    /// Why the answer was cut, if it was.
    pub(super) cut: Option<FinishReason>,
    /// The reasoning tokens, as the engine counts them.
    pub(super) reasoning_tokens: u32,
}

#[derive(Deserialize)]
struct Object {
    #[serde(default)]
    choices: Vec<Choice>,
    #[serde(default)]
    usage: Value,
    /// In an object without choices.
    error: Option<Value>,
}

#[derive(Deserialize)]
struct Choice {
    index: Option<u32>,
    /// In a chunk of a chat.
    delta: Option<Said>,
    /// In a whole chat.
    message: Option<Said>,
    /// In a completion.
    text: Option<String>,
    finish_reason: Option<String>,
}

#[derive(Deserialize)]
struct Said {
    content: Option<String>,
    refusal: Option<String>,
    reasoning_content: Option<String>,
    /// Another name of `reasoning_content`.
    reasoning: Option<String>,
    tool_calls: Option<Vec<Call>>,
}

#[derive(Deserialize)]
struct Call {
    index: Option<u32>,
    id: Option<String>,
    function: Option<Function>,
}

#[derive(Default, Deserialize)]
struct Function {
    name: Option<String>,
    arguments: Option<String>,
}

impl Objects {
    /// Reads the next object.
    ///
    /// # Errors
    /// The engine's own error if the object is one. `Internal` if the text is not an object of the API, or continues a tool call
    /// after the next one has begun: that call's arguments were already delivered.
    pub(super) fn read(&mut self, text: &str, out: &mut Deltas) -> Result<(), EngineError> {
        let object: Object = serde_json::from_str(text).map_err(|error| {
            let problem = "the model's engine sent text that is not an object of OpenAI's API";
            EngineError::internal(problem).with_source(error)
        })?;
        if let Some(error) = object.error.filter(|_| object.choices.is_empty()) {
            return Err(engines_error(&error));
        }
        let tokens = &object.usage["completion_tokens_details"]["reasoning_tokens"];
        if let Some(tokens) = tokens.as_u64() {
            self.reasoning_tokens = u32::try_from(tokens).unwrap_or(u32::MAX);
        }
        let choices = object.choices.into_iter();
        for choice in choices.filter(|choice| choice.index.unwrap_or(0) == 0) {
            for said in [choice.delta, choice.message].into_iter().flatten() {
                self.say(said, out)?;
            }
            out.content(choice.text.as_deref().unwrap_or_default());
            self.cut = match choice.finish_reason.as_deref() {
                Some("length") => Some(FinishReason::Length),
                Some("content_filter") => Some(FinishReason::ContentFilter),
                Some(_) | None => self.cut,
            };
        }
        Ok(())
    }

    fn say(&mut self, said: Said, out: &mut Deltas) -> Result<(), EngineError> {
        let reasoning = said.reasoning_content.or(said.reasoning);
        out.reasoning(reasoning.as_deref().unwrap_or_default());
        for text in [said.content, said.refusal].into_iter().flatten() {
            out.content(&text);
        }
        let mut calls = said.tool_calls.into_iter().flatten();
        calls.try_for_each(|call| self.go_on(call, out))
    }

    /// Continues the latest call or begins the next one. A call without an index is whole and begins a new one.
    fn go_on(&mut self, call: Call, out: &mut Deltas) -> Result<(), EngineError> {
        let next = self.call.map_or(0, |latest| latest.saturating_add(1));
        let number = call.index.unwrap_or(next);
        let function = call.function.unwrap_or_default();
        match self.call {
            Some(latest) if number == latest => {}
            Some(latest) if number < latest => {
                return Err(EngineError::internal(
                    "the model's engine continued a tool call after the next one had begun",
                ));
            }
            Some(_) | None => {
                self.call = Some(number);
                let name = function.name.unwrap_or_default();
                out.tool_call(&name, &call.id.unwrap_or_default());
            }
        }
        out.arguments(&function.arguments.unwrap_or_default());
        Ok(())
    }
}

/// Converts the content of an error object. `type` and `code` are those of OpenAI, or `code` is a status, as in vLLM.
fn engines_error(error: &Value) -> EngineError {
    let text = |name: &str| error.get(name).and_then(Value::as_str);
    let status = error.get("code").and_then(Value::as_u64);
    let kind = match (text("code"), text("type"), status) {
        (Some("context_length_exceeded"), _, _) => ErrorKind::ContextLengthExceeded,
        (_, Some("invalid_request_error"), _) | (_, _, Some(400)) => ErrorKind::InvalidArgument,
        (Some("rate_limit_exceeded"), _, _)
        | (_, Some("rate_limit_error"), _)
        | (_, _, Some(429)) => ErrorKind::Overloaded,
        (_, _, Some(503)) => ErrorKind::Unavailable,
        (_, _, _) => ErrorKind::Internal,
    };
    let message = text("message").or(error.as_str());
    EngineError::new(
        kind,
        message.map_or_else(|| error.to_string(), str::to_owned),
    )
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::markup::{Delta, Message, Splitter, ToolCall};

    /// The message that the objects add up to.
    fn read(objects: &[Value]) -> Result<Message, EngineError> {
        let mut splitter = Splitter::of_objects();
        let mut message = Message::default();
        let mut add = |delta: Delta<'_>| message.add(delta);
        for object in objects {
            splitter.take_object(&object.to_string()).unwrap()?;
            splitter.flush(&mut add);
        }
        splitter.finish(&mut add);
        Ok(message)
    }

    fn chunk(delta: Value) -> Value {
        json!({"object": "chat.completion.chunk", "choices": [{"index": 0, "delta": delta}]})
    }

    fn call(id: &str, name: &str, arguments: &str) -> ToolCall {
        ToolCall {
            id: id.into(),
            name: name.into(),
            arguments: arguments.into(),
            is_custom: false,
        }
    }

    #[test]
    fn each_kind_of_object_has_its_text_elsewhere() {
        for (object, text) in [
            (json!({"choices": [{"delta": {"content": "a\nb"}}]}), "a\nb"),
            (
                json!({"choices": [{"message": {"content": "whole"}}]}),
                "whole",
            ),
            (json!({"choices": [{"text": "gone on"}]}), "gone on"),
            (json!({"choices": [{"delta": {"content": null}}]}), ""),
            (json!({"choices": [{"delta": {"refusal": "No."}}]}), "No."),
            (
                json!({"choices": [{"index": 1, "delta": {"content": "b"}}]}),
                "",
            ),
            (json!({"choices": [], "usage": {}}), ""),
        ] {
            assert_eq!(
                read(std::slice::from_ref(&object)).unwrap().content,
                text,
                "{object}"
            );
        }
        assert!(read(&[json!("plain")]).is_err());
    }

    #[test]
    fn reasoning_and_calls_come_in_pieces() {
        let piece = |call: Value| chunk(json!({"tool_calls": [call]}));
        let message = read(&[
            chunk(json!({"role": "assistant", "content": "", "reasoning_content": "Hm"})),
            chunk(json!({"reasoning": "."})),
            chunk(json!({"content": "I look."})),
            piece(json!({"index": 0, "id": "a", "function": {"name": "find", "arguments": ""}})),
            piece(json!({"index": 0, "function": {"arguments": "{\"x\""}})),
            piece(json!({"index": 0, "function": {"name": "find", "arguments": ":1}"}})),
            piece(json!({"index": 1, "id": "b", "function": {"name": "count"}})),
        ]);
        let message = message.unwrap();
        let said = (message.reasoning.as_str(), message.content.as_str());
        assert_eq!(said, ("Hm.", "I look."));
        let calls = [call("a", "find", "{\"x\":1}"), call("b", "count", "")];
        assert_eq!(message.tool_calls, calls);
    }

    #[test]
    fn whole_calls_need_no_number() {
        let calls = json!([
            {"id": "a", "function": {"name": "find", "arguments": "{}"}},
            {"function": {"name": "count", "arguments": "{}"}},
        ]);
        let whole = json!({"choices": [{"message": {"content": null, "tool_calls": calls}}]});
        let calls = read(&[whole]).unwrap().tool_calls;
        assert_eq!(calls[0], call("a", "find", "{}"));
        assert_eq!(calls[1].name, "count");
        assert!(calls[1].id.starts_with("call_"), "{calls:?}");
    }

    #[test]
    fn an_earlier_call_cannot_go_on() {
        let piece = |index: u32| {
            let call = json!({"index": index, "function": {"name": "find", "arguments": "{"}});
            chunk(json!({"tool_calls": [call]}))
        };
        let error = read(&[piece(0), piece(1), piece(0)]).unwrap_err();
        assert!(error.message().contains("after the next"), "{error}");
    }

    #[test]
    fn an_error_object_ends_the_answer() {
        for (error, kind) in [
            (
                json!({"message": "no", "type": "invalid_request_error", "code": "context_length_exceeded"}),
                ErrorKind::ContextLengthExceeded,
            ),
            (
                json!({"message": "no", "type": "invalid_request_error", "code": null}),
                ErrorKind::InvalidArgument,
            ),
            (
                json!({"message": "no", "type": "BadRequestError", "code": 400}),
                ErrorKind::InvalidArgument,
            ),
            (
                json!({"message": "no", "type": "tokens", "code": "rate_limit_exceeded"}),
                ErrorKind::Overloaded,
            ),
            (
                json!({"message": "no", "code": 503}),
                ErrorKind::Unavailable,
            ),
            (
                json!({"message": "no", "type": "server_error"}),
                ErrorKind::Internal,
            ),
            (json!("no"), ErrorKind::Internal),
        ] {
            let said = chunk(json!({"content": "I"}));
            let ended = read(&[said, json!({"error": error})]).unwrap_err();
            assert_eq!((ended.kind(), ended.message()), (kind, "no"), "{error}");
        }
        let not_failed = json!({"choices": [{"text": "well"}], "error": null});
        assert_eq!(read(&[not_failed]).unwrap().content, "well");
    }
}
