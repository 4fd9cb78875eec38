use bytes::BytesMut;
use genset_backend_common::output::{PredictionTokens, Usage};
use genset_backend_common::{FinishReason, GuidedDecoding};
use proptest::prelude::{any, prop_assert, prop_assert_eq, proptest};
use serde_json::{Value, json};

use super::*;
use crate::answer::{AnswerEnd, Completed, TotalUsage};
use crate::config::FrontendConfig;
use crate::error::{ApiError, Param};
use crate::markup::{Message, ToolCall};

fn limits() -> ParamLimits {
    ParamLimits::from(&FrontendConfig::default())
}

fn parse_chat(further: Value) -> Result<ChatRequest, ApiError> {
    let mut body = json!({"model": "m", "messages": [{"role": "user", "content": "Hi"}]});
    if let (Value::Object(body), Value::Object(further)) = (&mut body, further) {
        body.extend(further);
    }
    ChatRequest::parse(body.to_string().as_bytes(), &limits())
}

fn completed(message: Message, reason: FinishReason) -> Completed {
    Completed {
        message,
        end: AnswerEnd {
            reason,
            usage: Usage::default(),
            pays_for_prompt: true,
            stop_string: None,
        },
        rated: None,
        reasoning_tokens: 0,
        has_open_call: false,
    }
}

/// Asserts that each of these is refused, and the field named.
fn assert_refused<'a>(cases: impl IntoIterator<Item = (Value, &'a str)>) {
    for (further, param) in cases {
        let error = parse_chat(further.clone()).unwrap_err();
        let named = error.param.as_ref().map(Param::name);
        assert_eq!(named, Some(param), "{further}");
    }
}

#[test]
fn what_is_absent_has_its_default() {
    let request = parse_chat(json!({})).unwrap();
    let params = &request.params;
    assert_eq!((params.n, params.stream), (1, None));
    assert_eq!(params.stop.max_tokens, None);
    assert!(request.add_generation_prompt && params.stop_strings.is_empty());
    let body = br#"{"model": "m", "prompt": "Hi"}"#;
    let request = CompletionRequest::parse(body, &limits()).unwrap();
    assert_eq!(request.params.stop.max_tokens, Some(16));
    assert_eq!(request.prompts, [Prompt::Text("Hi".into())]);
}

#[test]
fn null_is_absent_everywhere() {
    let plain = parse_chat(json!({})).unwrap();
    for name in [
        "n",
        "stream",
        "stream_options",
        "stop",
        "max_tokens",
        "temperature",
        "logit_bias",
        "seed",
        "tools",
        "tool_choice",
        "logprobs",
        "genset",
        "nvext",
        "chat_template_kwargs",
        "user",
        "never_heard_of",
    ] {
        assert_eq!(parse_chat(json!({name: null})).unwrap(), plain, "{name}");
    }
}

#[test]
fn a_field_of_an_extension_is_named_with_it() {
    for extension in ["genset", "nvext"] {
        for field in [
            "top_k",
            "ignore_eos",
            "stop_token_ids",
            "min_p",
            "priority",
            "annotations",
            "what",
        ] {
            let name = format!("{extension}.{field}");
            assert_refused([(json!({extension: {field: "x"}}), &*name)]);
        }
        // OpenAI's own fields belong at the top level.
        let name = format!("{extension}.temperature");
        assert_refused([(json!({extension: {"temperature": 1}}), &*name)]);
    }
    assert_refused([(json!({"annotations": {}}), "annotations")]);
}

#[test]
fn of_two_extensions_the_later_read_counts() {
    let request =
        parse_chat(json!({"top_k": 1, "genset": {"top_k": 2}, "nvext": {"top_k": 3}})).unwrap();
    assert_eq!(request.params.sampling.top_k, Some(3));
    let request = parse_chat(json!({"top_k": 1, "genset": {"top_k": 2}, "nvext": {}})).unwrap();
    assert_eq!(request.params.sampling.top_k, Some(2));
    for no_limit in [-1, 0] {
        let request = parse_chat(json!({"top_k": 1, "nvext": {"top_k": no_limit}})).unwrap();
        assert_eq!(request.params.sampling.top_k, Some(u32::MAX));
    }
}

#[test]
fn a_top_p_of_nothing_keeps_one_token() {
    for (top_p, expected) in [
        (json!(0), f32::MIN_POSITIVE),
        (json!(-0.0), f32::MIN_POSITIVE),
        (json!(1e-60), f32::MIN_POSITIVE),
        (json!(0.5), 0.5),
    ] {
        let request = parse_chat(json!({"top_p": top_p})).unwrap();
        assert_eq!(request.params.sampling.top_p, Some(expected), "{top_p}");
        request.params.sampling.validate().unwrap();
    }
}

#[test]
fn numbers_keep_their_range() {
    for (seed, bits) in [
        (json!(i64::MIN), 1 << 63),
        (json!(-1), u64::MAX),
        (json!(1_u64 << 63), 1 << 63),
        (json!(u64::MAX), u64::MAX),
    ] {
        let request = parse_chat(json!({"seed": seed})).unwrap();
        assert_eq!(request.params.sampling.seed, Some(bits));
    }
    assert_eq!(parse_chat(json!({"n": 16})).unwrap().params.n, 16);
    let overridden = json!({"repetition_penalty": -1, "genset": {"repetition_penalty": 1.1}});
    assert_refused([
        // 2^64, which is a float in JSON.
        (json!({"seed": 18_446_744_073_709_551_616.0}), "seed"),
        (json!({"priority": u64::MAX}), "priority"),
        (json!({"priority": 1_u64 << 31}), "priority"),
        (json!({"max_tokens": 1_u64 << 32}), "max_tokens"),
        (json!({"temperature": 1e39}), "temperature"),
        // A bias that `f32` cannot hold is infinite.
        (json!({"logit_bias": {"1": 1e300}}), "logit_bias"),
        // An overridden value is validated too.
        (overridden, "repetition_penalty"),
    ]);
}

#[test]
fn prompts_may_be_text_or_tokens_one_or_many() {
    let read = |prompt: Value| {
        let body = json!({"model": "m", "prompt": prompt}).to_string();
        CompletionRequest::parse(body.as_bytes(), &limits()).map(|request| request.prompts)
    };
    let text = |text: &str| Prompt::Text(text.into());
    assert_eq!(read(json!("a")).unwrap(), [text("a")]);
    assert_eq!(read(json!(["a", ""])).unwrap(), [text("a"), text("")]);
    assert_eq!(read(json!([1, 2])).unwrap(), [Prompt::Tokens(vec![1, 2])]);
    assert_eq!(
        read(json!([[1], [2, 3]])).unwrap(),
        [Prompt::Tokens(vec![1]), Prompt::Tokens(vec![2, 3])]
    );
    for (bad, param) in [
        (json!([1, "a"]), "prompt"),
        (json!([-1]), "prompt"),
        (json!([1.5]), "prompt"),
        (json!([[1], []]), "prompt[1]"),
        (json!(["a", null]), "prompt[1]"),
        (json!(true), "prompt"),
    ] {
        assert_eq!(read(bad).unwrap_err().param, Some(param.into()));
    }
}

#[test]
fn every_error_is_a_400_in_one_shape() {
    for further in [
        json!({"n": 0}),
        json!({"what": 1}),
        json!({"tools": [1]}),
        json!({"messages": 1}),
    ] {
        let error = parse_chat(further).unwrap_err();
        assert_eq!(error.status, 400);
        let json = error.to_json(chat_name);
        let keys: Vec<&String> = json["error"].as_object().unwrap().keys().collect();
        assert_eq!(keys, ["message", "type", "param", "code"]);
        assert_eq!(json["error"]["type"], "invalid_request_error");
    }
}

fn head(api: Api, model: &str) -> CompletionHead {
    CompletionHead {
        api,
        id: "id".into(),
        created: 7,
        model: model.into(),
    }
}

/// The JSON of each event in `bytes`.
fn events(bytes: &[u8]) -> Vec<Value> {
    let text = std::str::from_utf8(bytes).unwrap();
    assert!(text.ends_with("\n\n"));
    let events = text.trim_end_matches("\n\n").split("\n\n").map(|event| {
        let data = event.strip_prefix("data: ").unwrap();
        assert!(
            !data.contains(['\n', '\r']),
            "an event is one line: {event:?}"
        );
        serde_json::from_str(data).unwrap()
    });
    events.collect()
}

proptest! {
    /// Any text survives: an event is one line of JSON that contains it.
    #[test]
    fn any_text_survives_an_event(text: String, model: String, index in 0_usize..100, has_usage: bool) {
        for api in [Api::Chat, Api::Completions] {
            let encoder = ChunkEncoder::new(&head(api, &model), has_usage);
            let mut out = BytesMut::new();
            encoder.start(index, &mut out);
            encoder.text(index, &text, &mut out);
            encoder.finish(index, "stop", &[], &mut out);
            encoder.usage(&TotalUsage::default(), &mut out);
            let events = events(&out);
            prop_assert_eq!(events.len(), if api == Api::Chat { 4 } else { 3 });
            let piece = &events[events.len() - 3];
            let read = match api {
                Api::Chat => &piece["choices"][0]["delta"]["content"],
                Api::Completions => &piece["choices"][0]["text"],
            };
            prop_assert_eq!(read, &text);
            prop_assert_eq!(&piece["choices"][0]["index"], index);
            for event in &events {
                prop_assert_eq!(&event["model"], &model);
                prop_assert_eq!(&event["id"], "id");
            }
            let (usage, chunks) = events.split_last().unwrap();
            prop_assert_eq!(&usage["choices"], &json!([]));
            prop_assert!(usage["usage"].is_object());
            for chunk in chunks {
                prop_assert_eq!(chunk.as_object().unwrap().contains_key("usage"), has_usage);
                prop_assert!(chunk["usage"].is_null());
            }
        }
    }

    /// Any bytes are either parsed or refused.
    #[test]
    fn any_bytes_are_read_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..64)) {
        prop_assert!(ChatRequest::parse(&bytes, &limits()).is_err());
        prop_assert!(CompletionRequest::parse(&bytes, &limits()).is_err());
    }
}

#[test]
fn a_whole_answer_and_a_streamed_one_say_the_same() {
    let total = TotalUsage {
        usage: Usage {
            prompt_tokens: 3,
            completion_tokens: 4,
            cached_tokens: Some(2),
            predictions: Some(PredictionTokens {
                accepted: 3,
                rejected: 5,
            }),
        },
        reasoning_tokens: 1,
    };
    for api in [Api::Chat, Api::Completions] {
        for (reason, name) in [
            (FinishReason::Stop, "stop"),
            (FinishReason::Length, "length"),
            (FinishReason::Cancelled, "length"),
            (FinishReason::ContentFilter, "content_filter"),
        ] {
            let answer = completed(Message::from("text".to_owned()), reason);
            let choice = completed_choice(api, 5, &answer);
            let whole = response_json(&head(api, "m"), vec![choice], &total);
            let encoder = ChunkEncoder::new(&head(api, "m"), true);
            let mut out = BytesMut::new();
            encoder.finish(5, finish_reason(&answer.end, false, false), &[], &mut out);
            encoder.usage(&total, &mut out);
            let streamed = events(&out);
            for end in [&whole["choices"][0], &streamed[0]["choices"][0]] {
                assert_eq!(
                    (&end["finish_reason"], &end["index"]),
                    (&json!(name), &json!(5))
                );
            }
            assert_eq!(whole["usage"], streamed[1]["usage"]);
            assert_eq!(whole["usage"]["total_tokens"], 7);
            assert_eq!(whole["usage"]["prompt_tokens_details"]["cached_tokens"], 2);
            let details = &whole["usage"]["completion_tokens_details"];
            assert_eq!(details["reasoning_tokens"], 1);
            assert_eq!(details["accepted_prediction_tokens"], 3);
            assert_eq!(details["rejected_prediction_tokens"], 5);
        }
    }
}

#[test]
fn only_a_natural_end_with_calls_is_one_for_calls() {
    let call = ToolCall {
        id: "call_1".into(),
        name: "f".into(),
        arguments: "{}".into(),
        is_custom: false,
    };
    let message = Message {
        tool_calls: vec![call],
        ..Message::default()
    };
    let choice = |reason| completed_choice(Api::Chat, 0, &completed(message.clone(), reason));
    assert_eq!(choice(FinishReason::Stop)["finish_reason"], "tool_calls");
    assert_eq!(choice(FinishReason::Length)["finish_reason"], "length");
    assert!(choice(FinishReason::Stop)["message"]["content"].is_null());
    let none = completed(Message::default(), FinishReason::Stop);
    let none = completed_choice(Api::Chat, 0, &none);
    assert_eq!(
        (&none["finish_reason"], &none["message"]["content"]),
        (&json!("stop"), &json!(""))
    );
}

#[test]
fn arguments_of_calls_reach_the_template_as_objects_where_they_are() {
    let read = |arguments: Value| {
        let function = json!({"name": "f", "arguments": arguments});
        let call = json!({"id": "a", "type": "function", "function": function});
        let request =
            parse_chat(json!({"messages": [{"role": "assistant", "tool_calls": [call]}]}));
        request.unwrap().messages.remove(0)["tool_calls"][0]["function"]["arguments"].clone()
    };
    assert_eq!(read(json!("{\"a\": 1}")), json!({"a": 1}));
    assert_eq!(read(json!({"a": 1})), json!({"a": 1}));
    assert_eq!(read(json!(" ")), json!({}));
    assert_eq!(read(json!("{\"a\": ")), json!("{\"a\": "));
    assert_eq!(read(json!("[1]")), json!("[1]"));
}

#[test]
fn options_of_a_stream_that_have_no_effect_are_named() {
    let options = json!({"include_usage": true, "continuous_usage_stats": true});
    let request = parse_chat(json!({"stream": true, "stream_options": options})).unwrap();
    let ignored: Vec<&str> = request.params.hints.fields().collect();
    assert_eq!(ignored, ["stream_options.continuous_usage_stats"]);
    let options = json!({"continuous_usage_stats": 1});
    assert_refused([(
        json!({"stream": true, "stream_options": options}),
        "stream_options.continuous_usage_stats",
    )]);
}

#[test]
fn a_tool_may_have_the_longest_name_of_any_api() {
    let named = |name: String| json!({"tools": [{"type": "function", "function": {"name": name}}]});
    parse_chat(named("f".repeat(128))).unwrap();
    assert_refused([(named("f".repeat(129)), "tools[0].function.name")]);
}

#[test]
fn what_is_wrong_in_a_custom_tool_is_named() {
    let custom = |fields: Value| json!({"type": "custom", "custom": fields});
    let tool = custom(json!({"name": "f", "format": {"type": "text"}}));
    let function = json!({"type": "function", "function": {"name": "f"}});
    let call = |fields: Value| {
        let calls = json!([{"id": "a", "type": "custom", "custom": fields}]);
        json!({"messages": [{"role": "assistant", "tool_calls": calls}]})
    };
    let choice = json!({"type": "custom", "custom": {"name": "f"}});
    let request = parse_chat(json!({"tools": [tool], "tool_choice": choice})).unwrap();
    assert_eq!(request.tools.choice, ToolChoice::Named("f".into()));
    assert_refused([
        (
            json!({"tools": [custom(json!({"name": "f", "format": {"type": "json"}}))]}),
            "tools[0].custom.format.type",
        ),
        (
            json!({"tools": [custom(json!({"name": "a b"}))]}),
            "tools[0].custom.name",
        ),
        (json!({"tools": [function, tool]}), "tools"),
        (json!({"tool_choice": choice}), "tool_choice.custom.name"),
        (
            call(json!({"name": "f"})),
            "messages[0].tool_calls[0].custom.input",
        ),
    ]);
}

#[test]
fn candidates_are_asked_for_within_their_range() {
    let asked = |further| parse_chat(further).unwrap().params.logprobs;
    assert_eq!(asked(json!({"logprobs": false, "top_logprobs": 0})), None);
    let top = |further| asked(further).map(|logprobs| logprobs.top);
    assert_eq!(top(json!({"logprobs": true})), Some(0));
    assert_eq!(top(json!({"logprobs": true, "top_logprobs": 20})), Some(20));
    assert_refused([
        (json!({"logprobs": 1}), "logprobs"),
        (json!({"top_logprobs": 1}), "top_logprobs"),
        (
            json!({"logprobs": false, "top_logprobs": 1}),
            "top_logprobs",
        ),
        (
            json!({"logprobs": true, "top_logprobs": 21}),
            "top_logprobs",
        ),
        (
            json!({"logprobs": true, "top_logprobs": -1}),
            "top_logprobs",
        ),
        (
            json!({"logprobs": true, "top_logprobs": true}),
            "top_logprobs",
        ),
    ]);
    let completion = |logprobs: Value| {
        let body = json!({"model": "m", "prompt": "Hi", "logprobs": logprobs}).to_string();
        CompletionRequest::parse(body.as_bytes(), &limits())
    };
    assert_eq!(completion(json!(null)).unwrap().params.logprobs, None);
    assert_eq!(
        completion(json!(0)).unwrap().params.logprobs.unwrap().top,
        0
    );
    for bad in [json!(21), json!(true), json!(-1), json!("5")] {
        let error = completion(bad).unwrap_err();
        assert_eq!(error.param, Some("logprobs".into()));
    }
}

#[test]
fn a_format_is_read_or_the_field_at_fault_named() {
    let schema = json!({"type": "object"});
    let format = |schema: Value| json!({"type": "json_schema", "json_schema": schema});
    let read = |further| parse_chat(further).unwrap().params.guided;
    assert_eq!(read(json!({"response_format": {"type": "text"}})), None);
    for (further, decoding, field) in [
        (
            json!({"response_format": {"type": "json_object"}}),
            GuidedDecoding::JsonObject,
            "response_format",
        ),
        (
            json!({"response_format": format(json!({"name": "n", "strict": true, "schema": schema}))}),
            GuidedDecoding::JsonSchema(schema.clone()),
            "response_format",
        ),
        (
            json!({"guided_json": schema}),
            GuidedDecoding::JsonSchema(schema.clone()),
            "guided_json",
        ),
        (
            json!({"genset": {"guided_json": schema.to_string()}}),
            GuidedDecoding::JsonSchema(schema.clone()),
            "genset.guided_json",
        ),
        (
            json!({"nvext": {"guided_regex": "a+"}}),
            GuidedDecoding::Regex("a+".into()),
            "nvext.guided_regex",
        ),
        (
            json!({"guided_choice": ["a", "b"]}),
            GuidedDecoding::Choice(vec!["a".into(), "b".into()]),
            "guided_choice",
        ),
        (
            json!({"guided_grammar": "root ::= x"}),
            GuidedDecoding::Grammar("root ::= x".into()),
            "guided_grammar",
        ),
    ] {
        let guided = read(further).unwrap();
        assert_eq!((guided.decoding, guided.field.as_str()), (decoding, field));
    }
    assert_refused([
        (json!({"response_format": "json"}), "response_format"),
        (json!({"response_format": {}}), "response_format.type"),
        (
            json!({"response_format": {"type": "xml"}}),
            "response_format.type",
        ),
        (
            json!({"response_format": {"type": "json_object", "schema": {}}}),
            "response_format.schema",
        ),
        (
            json!({"response_format": {"type": "json_schema"}}),
            "response_format.json_schema",
        ),
        (
            json!({"response_format": format(json!({"schema": {}}))}),
            "response_format.json_schema.name",
        ),
        (
            json!({"response_format": format(json!({"name": "n"}))}),
            "response_format.json_schema.schema",
        ),
        (
            json!({"response_format": format(json!({"name": "n", "schema": []}))}),
            "response_format.json_schema.schema",
        ),
        (
            json!({"response_format": format(json!({"name": "n", "schema": {}, "x": 1}))}),
            "response_format.json_schema.x",
        ),
        (json!({"guided_json": "{"}), "guided_json"),
        (json!({"guided_json": 1}), "guided_json"),
        (json!({"guided_regex": ""}), "guided_regex"),
        (json!({"guided_regex": ["a"]}), "guided_regex"),
        (json!({"guided_choice": []}), "guided_choice"),
        (json!({"guided_choice": ["a", 1]}), "guided_choice"),
        (
            json!({"genset": {"guided_grammar": 1}}),
            "genset.guided_grammar",
        ),
    ]);
}

#[test]
fn of_two_formats_the_later_is_named() {
    let tool = json!([{"type": "function", "function": {"name": "f"}}]);
    assert_refused([
        (
            json!({"guided_json": {}, "guided_regex": "a"}),
            "guided_regex",
        ),
        (
            json!({"guided_choice": ["a"], "genset": {"guided_choice": ["a"]}}),
            "genset.guided_choice",
        ),
        (
            json!({"guided_regex": "a", "response_format": {"type": "json_object"}}),
            "response_format",
        ),
    ]);
    for fine in [
        json!({"guided_regex": "a", "response_format": {"type": "text"}}),
        json!({"tools": tool, "tool_choice": "none", "response_format": {"type": "json_object"}}),
        json!({"tools": tool, "response_format": {"type": "json_object"}}),
        json!({"tools": tool, "tool_choice": "required", "guided_regex": "a"}),
        json!({"tools": tool, "response_format": {"type": "text"}}),
    ] {
        parse_chat(fine).unwrap();
    }
}
