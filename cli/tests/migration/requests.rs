//! The requests of the matrix, by the required capabilities of an engine. Each is defined once for all engines that can answer
//! it.

use serde_json::{Value, json};

use self::Api::{Chat, Completions, Messages, Responses};

const QUESTION: &str = "What is the capital of Spain?";

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Api {
    Chat,
    Completions,
    Responses,
    Messages,
}

impl Api {
    pub(crate) fn path(self) -> &'static str {
        match self {
            Chat => "/v1/chat/completions",
            Completions => "/v1/completions",
            Responses => "/v1/responses",
            Messages => "/v1/messages",
        }
    }

    /// A request with as few fields as possible, for a greedy answer.
    fn least(self) -> Value {
        let model = json!({"model": "tiny-chat", "temperature": 0});
        let asked = json!([{"role": "user", "content": QUESTION}]);
        let further = match self {
            Chat | Messages => json!({"messages": asked, "max_tokens": 24}),
            Completions => json!({"prompt": "The capital of", "max_tokens": 12}),
            Responses => json!({"input": QUESTION, "max_output_tokens": 24}),
        };
        with(model, further)
    }

    /// The field for stop strings. The Responses API has none.
    pub(crate) fn stop(self) -> &'static str {
        match self {
            Chat | Completions => "stop",
            Messages => "stop_sequences",
            Responses => panic!("it takes no stop strings"),
        }
    }

    /// The text of a complete answer, without reasoning and calls.
    pub(crate) fn text(self, answer: &str) -> String {
        let answer: Value = serde_json::from_str(answer).unwrap();
        let text = match self {
            Chat => &answer["choices"][0]["message"]["content"],
            Completions => &answer["choices"][0]["text"],
            Responses => panic!("nobody asks"),
            Messages => {
                let mut blocks = answer["content"].as_array().unwrap().iter();
                &blocks.find(|block| block["type"] == "text").unwrap()["text"]
            }
        };
        text.as_str().unwrap().to_owned()
    }
}

/// A request, sent both unstreamed and streamed.
#[derive(Debug, Clone)]
pub(crate) struct Request {
    pub(crate) api: Api,
    pub(crate) body: Value,
    /// Whether a stop string from the middle of its answer ends it.
    pub(crate) is_stopped: bool,
    /// The number of engine answers that make up each choice.
    pub(crate) parts: u32,
    /// A text that its answer must contain; otherwise the request does not test what it should.
    pub(crate) shows: &'static str,
}

impl Request {
    fn of(api: Api, further: Value) -> Self {
        Self {
            api,
            body: with(api.least(), further),
            is_stopped: false,
            parts: 1,
            shows: "",
        }
    }

    fn stopped(self) -> Self {
        Self {
            is_stopped: true,
            ..self
        }
    }

    fn shows(self, shows: &'static str) -> Self {
        Self { shows, ..self }
    }

    pub(crate) fn streamed(&self) -> Self {
        let mut request = self.clone();
        request.body["stream"] = true.into();
        if matches!(self.api, Chat | Completions) {
            request.body["stream_options"] = json!({"include_usage": true});
        }
        request
    }

    /// The number of choices in its answer.
    pub(crate) fn choices(&self) -> u32 {
        let prompts = self.body["prompt"].as_array().map_or(1, Vec::len);
        let n = self.body["n"].as_u64().unwrap_or(1);
        u32::try_from(n).unwrap() * u32::try_from(prompts).unwrap()
    }
}

fn chat(further: Value) -> Request {
    Request::of(Chat, further)
}

fn completion(further: Value) -> Request {
    Request::of(Completions, further)
}

fn response(further: Value) -> Request {
    Request::of(Responses, further)
}

fn message(further: Value) -> Request {
    Request::of(Messages, further)
}

fn with(mut fields: Value, further: Value) -> Value {
    let Value::Object(further) = further else {
        panic!("further fields are an object")
    };
    fields.as_object_mut().unwrap().extend(further);
    fields
}

/// For engines that generate tokens of any kind.
pub(crate) fn tokens() -> Vec<Request> {
    let seeded = |further| {
        let options =
            json!({"temperature": 0.9, "top_p": 0.95, "top_k": 50, "min_p": 0.001, "seed": 7});
        with(options, further)
    };
    let two = json!({"prompt": ["The capital of", "A token is"], "n": 2});
    vec![
        chat(json!({})),
        chat(json!({})).stopped(),
        chat(json!({"min_tokens": 18})),
        chat(seeded(json!({"ignore_eos": true}))),
        // Choices end at different lengths.
        chat(seeded(json!({"n": 4}))),
        completion(json!({})),
        completion(json!({})).stopped(),
        completion(json!({"echo": true})),
        completion(seeded(json!({"n": 4, "best_of": 4, "echo": true}))),
        completion(seeded(two)),
        response(json!({})),
        response(json!({"genset": {"min_tokens": 18}})),
        message(json!({})),
        message(json!({})).stopped(),
    ]
}

/// Every sampling option.
fn every_option(further: Value) -> Value {
    let options = json!({
        "temperature": 0.9, "top_p": 0.95, "top_k": 50, "min_p": 0.001, "seed": 7,
        "presence_penalty": 0.5, "frequency_penalty": 0.4, "repetition_penalty": 1.1,
        "logit_bias": {"300": 1.5, "301": -100}, "ignore_eos": true,
    });
    with(options, further)
}

/// For engines that sample as a request says.
pub(crate) fn sampling() -> Vec<Request> {
    let penalized = json!({"presence_penalty": 0.8, "frequency_penalty": 0.6, "min_tokens": 18, "max_tokens": 24});
    let four = json!({"n": 4, "ignore_eos": false});
    vec![
        chat(every_option(json!({}))),
        chat(every_option(json!({}))).stopped(),
        chat(every_option(four.clone())),
        chat(json!({"logit_bias": {"300": 3.0}, "min_tokens": 6})),
        chat(penalized.clone()),
        completion(every_option(json!({}))),
        completion(every_option(four)),
        completion(penalized),
        response(json!({"genset": {"repetition_penalty": 1.3, "min_tokens": 18}})),
        message(json!({"top_k": 3, "top_p": 0.9})),
    ]
}

fn schema() -> Value {
    json!({
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Madrid"]}, "people": {"type": "integer"}},
        "required": ["city", "people"],
        "additionalProperties": false,
    })
}

/// A chat's `response_format`.
fn format_of_chat() -> Value {
    json!({"type": "json_schema", "json_schema": {"name": "a", "schema": schema()}})
}

/// The `text` of a response.
fn text_of_response() -> Value {
    json!({"format": {"type": "json_schema", "name": "a", "schema": schema()}})
}

const REGEX: &str = "[a-z]{4,9} [0-9]{3,6}!";
const GRAMMAR: &str = "start: \"a\" NUMBER \"b\" NUMBER\nNUMBER: /[0-9]{3}/";
const CHOICES: [&str; 2] = ["Paris is the capital", "Madrid is the capital"];

/// For engines that return log probabilities, also with guided decoding.
pub(crate) fn logprobs() -> Vec<Request> {
    let rated = json!({"temperature": 0.8, "seed": 3, "logprobs": true, "top_logprobs": 3});
    let of_chat = |further| chat(with(rated.clone(), further));
    let rated = json!({"temperature": 0.8, "seed": 3, "logprobs": 2});
    let of_completion = |further| completion(with(rated.clone(), further));
    let requests = [
        of_chat(every_option(json!({}))),
        of_chat(json!({})).stopped(),
        of_chat(json!({"n": 4})),
        of_chat(json!({"response_format": format_of_chat()})),
        of_chat(json!({"guided_regex": REGEX})),
        of_chat(json!({"guided_grammar": GRAMMAR})),
        of_completion(json!({})),
        of_completion(json!({})).stopped(),
        of_completion(json!({"n": 4})),
        of_completion(json!({"guided_choice": CHOICES})),
        response(json!({"top_logprobs": 2})),
        response(json!({"top_logprobs": 2, "text": text_of_response()})),
    ];
    let requests = requests.map(|request| request.shows("logprobs\":"));
    requests.into()
}

/// For engines with guided decoding.
pub(crate) fn guides() -> Vec<Request> {
    let seeded = |further| {
        let options = json!({"temperature": 0.8, "seed": 3, "max_tokens": 40});
        with(options, further)
    };
    let function = json!({"name": "weather", "parameters": schema()});
    let named = json!({"type": "function", "function": {"name": "weather"}});
    let tools = json!([{"type": "function", "function": function}]);
    let flat = json!([with(function, json!({"type": "function"}))]);
    let custom = json!([{"name": "weather", "input_schema": schema()}]);
    let output = json!({"format": {"type": "json_schema", "schema": schema()}});
    let bound = [
        chat(seeded(json!({"response_format": format_of_chat()}))).shows("city"),
        chat(seeded(json!({"response_format": {"type": "json_object"}}))),
        chat(seeded(json!({"guided_regex": REGEX}))),
        chat(seeded(json!({"guided_regex": REGEX, "n": 4}))),
        chat(seeded(json!({"guided_regex": REGEX}))).stopped(),
        chat(seeded(json!({"guided_choice": CHOICES}))),
        chat(seeded(json!({"guided_grammar": GRAMMAR}))),
        completion(seeded(json!({"guided_json": schema()}))).shows("city"),
        completion(seeded(json!({"guided_regex": REGEX, "echo": true}))),
        completion(seeded(json!({"guided_grammar": GRAMMAR}))).stopped(),
        response(json!({"text": text_of_response()})).shows("city"),
        response(json!({"genset": {"guided_regex": REGEX}})),
        response(json!({"genset": {"guided_choice": CHOICES}})),
        response(json!({"genset": {"guided_grammar": GRAMMAR}})),
        message(json!({"output_config": output})).shows("city"),
        message(json!({"output_config": output})).stopped(),
    ];
    let calls = [
        chat(seeded(json!({"tools": tools, "tool_choice": named}))),
        chat(seeded(json!({"tools": tools, "tool_choice": "required"}))),
        response(json!({"tools": flat, "tool_choice": {"type": "function", "name": "weather"}})),
        response(json!({"tools": flat, "tool_choice": "required"})),
        message(json!({"tools": custom, "tool_choice": {"type": "tool", "name": "weather"}})),
        message(json!({"tools": custom, "tool_choice": {"type": "any"}})),
    ];
    let calls = calls.map(|request| request.shows("weather"));
    bound.into_iter().chain(calls).collect()
}

/// For an engine that produces reasoning, text in between and two calls, which are parsed as they arrive.
pub(crate) fn markup() -> Vec<Request> {
    let of_chat = |further| chat(with(json!({"max_tokens": 400}), further));
    let of_message = |further| message(with(json!({"max_tokens": 400}), further));
    let of_response = |further| response(with(json!({"max_output_tokens": 400}), further));
    let names = ["weather", "time"];
    let tools = names.map(|name| json!({"type": "function", "function": {"name": name}}));
    let flat = names.map(|name| json!({"type": "function", "name": name}));
    let custom = names.map(|name| json!({"name": name, "input_schema": {"type": "object"}}));
    let thinking = json!({"type": "adaptive"});
    vec![
        of_chat(json!({})).shows("reasoning_content"),
        of_chat(json!({})).stopped(),
        of_chat(json!({"tools": tools})).shows("tool_calls"),
        of_chat(json!({"tools": tools})).stopped(),
        of_chat(json!({"tools": tools, "n": 4})).shows("tool_calls"),
        of_chat(json!({"tools": tools, "parallel_tool_calls": false})).shows("tool_calls"),
        completion(json!({"max_tokens": 400})).shows("</think>"),
        completion(json!({"max_tokens": 400})).stopped(),
        of_response(json!({})).shows("reasoning"),
        of_response(json!({"tools": flat})).shows("function_call"),
        of_message(json!({"tools": custom})).shows("tool_use"),
        of_message(json!({"thinking": thinking})).shows("thinking"),
        of_message(json!({"thinking": thinking})).stopped(),
        of_message(json!({"tools": custom, "thinking": thinking})).shows("tool_use"),
        of_message(json!({"tools": custom, "thinking": thinking})).stopped(),
    ]
}

/// Requests for an engine whose answer begins unbound, with reasoning. Once its content begins, it is bound to a format.
pub(crate) fn formats() -> Vec<Request> {
    let function = json!({"name": "weather"});
    let tools = json!([{"type": "function", "function": function}]);
    let flat = json!([with(function, json!({"type": "function"}))]);
    let custom = json!([{"name": "weather", "input_schema": {"type": "object"}}]);
    let output = json!({"format": {"type": "json_schema", "schema": schema()}});
    let of_chat = json!({"max_tokens": 400, "tools": tools, "response_format": format_of_chat()});
    let requests = [
        chat(of_chat.clone()),
        chat(with(of_chat, json!({"n": 4}))),
        response(json!({"max_output_tokens": 400, "tools": flat, "text": text_of_response()})),
        message(json!({"max_tokens": 400, "tools": custom, "output_config": output})),
    ];
    let requests = requests.map(|request| Request {
        parts: 2,
        ..request.shows("3300000")
    });
    requests.into()
}
