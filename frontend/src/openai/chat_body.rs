//! Writes a checked chat request as a body of `/v1/chat/completions`, for engines that read bodies themselves. The request may come
//! from any API.

use genset_backend_common::{GuidedDecoding, SamplingOptions, StopConditions};
use serde_json::{Map, Value, json};

use super::chat::ChatRequest;
use super::common::CommonParams;
use super::tools::{ToolChoice, ToolOptions, arguments_as_text};

impl ChatRequest {
    /// Returns the body, which asks for one streamed answer, and the parameters that are not in the body.
    pub(crate) fn into_body(self) -> (String, CommonParams) {
        let Self {
            mut params,
            mut messages,
            media: _,
            tools,
            add_generation_prompt,
            template_args,
            reasoning_effort,
        } = self;
        // The arguments of calls are objects for templates.
        arguments_as_text(&mut messages);
        let mut body = Map::new();
        let mut put = |name: &str, value: Value| drop(body.insert(name.into(), value));
        put("model", params.model.as_str().into());
        put("messages", messages.into());
        put("stream", true.into());
        put("stream_options", json!({"include_usage": true}));
        put_tools(tools, &mut put);
        put_sampling(&std::mem::take(&mut params.sampling), &mut put);
        put_stop(&std::mem::take(&mut params.stop), &mut put);
        let stops = std::mem::take(&mut params.stop_strings);
        if !stops.is_empty() {
            put("stop", stops.to_vec().into());
        }
        if let Some(guided) = params.guided.take() {
            put_guided(guided.decoding, &mut put);
        }
        let priority = std::mem::take(&mut params.priority);
        if priority != 0 {
            put("priority", priority.into());
        }
        if !add_generation_prompt {
            put("add_generation_prompt", false.into());
        }
        if !template_args.is_empty() {
            put("chat_template_kwargs", template_args.into());
        }
        if let Some(effort) = reasoning_effort {
            put("reasoning_effort", effort.into());
        }
        (Value::Object(body).to_string(), params)
    }
}

fn put_tools(options: ToolOptions, put: &mut impl FnMut(&str, Value)) {
    if options.tools.is_empty() {
        return;
    }
    let ToolOptions {
        mut tools,
        custom: _,
        choice,
        allowed,
        is_parallel,
    } = options;
    if let Some(allowed) = allowed {
        // Few engines know a choice of several tools.
        tools.retain(|tool| {
            let name = tool["function"]["name"].as_str();
            name.is_some_and(|name| allowed.contains(name))
        });
    }
    put("tools", tools.into());
    let choice = match choice {
        ToolChoice::None => json!("none"),
        ToolChoice::Auto => json!("auto"),
        ToolChoice::Required => json!("required"),
        ToolChoice::Named(name) => json!({"type": "function", "function": {"name": name}}),
    };
    put("tool_choice", choice);
    if !is_parallel {
        put("parallel_tool_calls", false.into());
    }
}

fn put_sampling(sampling: &SamplingOptions, put: &mut impl FnMut(&str, Value)) {
    let numbers = [
        ("temperature", sampling.temperature),
        ("top_p", sampling.top_p),
        ("min_p", sampling.min_p),
        ("presence_penalty", sampling.presence_penalty),
        ("frequency_penalty", sampling.frequency_penalty),
        ("repetition_penalty", sampling.repetition_penalty),
    ];
    for (name, number) in numbers {
        if let Some(number) = number {
            put(name, as_written(number));
        }
    }
    match sampling.top_k {
        None => {}
        // As vLLM and SGLang write it.
        Some(u32::MAX) => put("top_k", json!(-1)),
        Some(top_k) => put("top_k", top_k.into()),
    }
    if let Some(seed) = sampling.seed {
        put("seed", seed.into());
    }
    if !sampling.logit_bias.is_empty() {
        let biases = sampling.logit_bias.iter();
        let biases = biases.map(|(token, bias)| (token.to_string(), as_written(*bias)));
        put("logit_bias", biases.collect::<Map<_, _>>().into());
    }
}

/// Returns the number as its client wrote it: 0.7 in 32 bits is 0.699999988 in 64.
fn as_written(number: f32) -> Value {
    let shortest = number.to_string().parse::<f64>();
    shortest.unwrap_or_else(|_| number.into()).into()
}

fn put_stop(stop: &StopConditions, put: &mut impl FnMut(&str, Value)) {
    if let Some(max_tokens) = stop.max_tokens {
        put("max_tokens", max_tokens.into());
    }
    if stop.min_tokens > 0 {
        put("min_tokens", stop.min_tokens.into());
    }
    if !stop.stop_token_ids.is_empty() {
        put("stop_token_ids", json!(*stop.stop_token_ids));
    }
    if stop.ignore_eos {
        put("ignore_eos", true.into());
    }
}

fn put_guided(decoding: GuidedDecoding, put: &mut impl FnMut(&str, Value)) {
    match decoding {
        GuidedDecoding::JsonObject => put("response_format", json!({"type": "json_object"})),
        GuidedDecoding::JsonSchema(schema) => {
            let named = json!({"name": "output", "schema": schema, "strict": true});
            let format = json!({"type": "json_schema", "json_schema": named});
            put("response_format", format);
        }
        GuidedDecoding::Regex(regex) => put("guided_regex", regex.into()),
        GuidedDecoding::Choice(choices) => put("guided_choice", choices.into()),
        GuidedDecoding::Grammar(grammar) => put("guided_grammar", grammar.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::FrontendConfig;
    use crate::openai::ParamLimits;

    fn read(body: &Value) -> ChatRequest {
        let limits = ParamLimits::from(&FrontendConfig::default());
        ChatRequest::parse(body.to_string().as_bytes(), &limits).unwrap()
    }

    fn written(body: &Value) -> (Value, CommonParams) {
        let (written, params) = read(body).into_body();
        (serde_json::from_str(&written).unwrap(), params)
    }

    /// A body with every field that can be written.
    fn full() -> Value {
        let call = json!({
            "id": "a", "type": "function", "function": {"name": "find", "arguments": "{\"x\":1}"},
        });
        json!({
            "model": "m",
            "messages": [
                {"role": "user", "content": "Look."},
                {"role": "assistant", "tool_calls": [call], "content": ""},
                {"role": "tool", "tool_call_id": "a", "content": "2"},
                {"role": "user", "content": [
                    {"type": "text", "text": "And this?"},
                    {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}},
                ]},
            ],
            "stream": true,
            "stream_options": {"include_usage": true},
            "tools": [{"type": "function", "function": {"name": "find"}}],
            "tool_choice": {"type": "function", "function": {"name": "find"}},
            "parallel_tool_calls": false,
            "temperature": 0.7,
            "top_p": 0.9,
            "min_p": 0.05,
            "presence_penalty": 0.1,
            "frequency_penalty": 0.2,
            "repetition_penalty": 1.1,
            "top_k": 40,
            "seed": 7,
            "logit_bias": {"5": -1.5},
            "max_tokens": 9,
            "min_tokens": 2,
            "stop_token_ids": [3],
            "ignore_eos": true,
            "stop": ["END"],
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "output", "schema": {"type": "object"}, "strict": true},
            },
            "priority": 3,
            "add_generation_prompt": false,
            "chat_template_kwargs": {"enable_thinking": false},
            "reasoning_effort": "low",
        })
    }

    #[test]
    fn a_body_says_all_that_was_asked() {
        let (written, _) = written(&full());
        assert_eq!(written, full());
    }

    #[test]
    fn what_a_body_says_is_said_once() {
        let (_, params) = written(&full());
        let mut rest = full();
        let named = ["model", "messages", "stream", "stream_options"];
        let fields = rest.as_object_mut().unwrap();
        fields.retain(|name, _| named.contains(&name.as_str()));
        assert_eq!(params, read(&rest).params);
    }

    #[test]
    fn what_was_not_asked_is_not_said() {
        let message = json!([{"role": "user", "content": "Hello"}]);
        let (written, _) = written(&json!({"model": "m", "messages": message}));
        let expected = json!({
            "model": "m",
            "messages": message,
            "stream": true,
            "stream_options": {"include_usage": true},
        });
        assert_eq!(written, expected);
    }

    #[test]
    fn whatever_binds_an_answer_is_said() {
        for (name, value) in [
            ("response_format", json!({"type": "json_object"})),
            ("guided_regex", json!("a+")),
            ("guided_choice", json!(["a", "b"])),
            ("guided_grammar", json!("root ::= \"a\"")),
            ("top_k", json!(-1)),
            ("tool_choice", json!("none")),
            ("tool_choice", json!("required")),
        ] {
            let mut body = json!({
                "model": "m",
                "messages": [{"role": "user", "content": "Hello"}],
                "tools": [{"type": "function", "function": {"name": "find"}}],
            });
            body[name] = value.clone();
            assert_eq!(written(&body).0[name], value);
        }
    }

    #[test]
    fn an_engine_sees_the_allowed_tools_alone() {
        let [find, count] =
            ["find", "count"].map(|name| json!({"type": "function", "function": {"name": name}}));
        let (written, _) = written(&json!({
            "model": "m",
            "messages": [{"role": "user", "content": "Hello"}],
            "tools": [find, count],
            "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [count]}},
        }));
        assert_eq!(written["tools"], json!([count]));
        assert_eq!(written["tool_choice"], "required");
    }
}
