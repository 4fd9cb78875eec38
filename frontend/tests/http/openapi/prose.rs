//! What the document says in words: rules between fields, and rules of the model. A body that its schema allows must be served
//! after it is mended here.

use serde_json::{Map, Value, json};

use crate::support::MODEL;

/// The vocabulary size of the test model.
const VOCABULARY: u64 = 2048;

/// Fields of which at most one may bind the answer.
const GUIDED: [&str; 4] = [
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
];

/// The id of an input file on the server.
pub(super) const INPUT_FILE: &str = "file-input";

/// Makes a body that its schema allows also follow the rules that no schema expresses.
pub(super) fn mend(path: &str, body: &mut Value) {
    let Value::Object(body) = body else {
        panic!("every body is an object")
    };
    if path == "/v1/batches" {
        body.insert("input_file_id".into(), INPUT_FILE.into());
        return;
    }
    body.insert("model".into(), MODEL.into());
    // What the model does not support: shorter embeddings, earlier responses, infill.
    body.remove("dimensions");
    body.remove("previous_response_id");
    body.remove("suffix");
    mend_stream(body);
    mend_numbers(body);
    mend_stops(body);
    mend_inputs(path, body);
    mend_tools(body);
    mend_formats(body);
    if path.contains("/messages") {
        mend_messages(body);
    }
}

fn is_set(body: &Map<String, Value>, name: &str) -> bool {
    body.get(name).is_some_and(|value| !value.is_null())
}

fn mend_stream(body: &mut Map<String, Value>) {
    if is_set(body, "stream_options") {
        body.insert("stream".into(), true.into());
    }
}

fn mend_numbers(body: &mut Map<String, Value>) {
    if is_set(body, "top_logprobs") && !body.contains_key("input") {
        body.insert("logprobs".into(), true.into());
    }
    if is_set(body, "best_of") {
        let n = body.get("n").filter(|n| !n.is_null()).cloned();
        body.insert("best_of".into(), n.unwrap_or_else(|| json!(1)));
    }
    if body.get("echo") == Some(&json!(true)) {
        body.remove("logprobs");
    }
    for_extensions(body, |fields| {
        if is_set(fields, "min_tokens") {
            fields.insert("min_tokens".into(), 1.into());
        }
        if is_set(fields, "data_parallel_rank") {
            fields.insert("data_parallel_rank".into(), 0.into());
        }
    });
}

/// Applies `mend` to the body, and to the objects in it that may have the same fields.
fn for_extensions(body: &mut Map<String, Value>, mut mend: impl FnMut(&mut Map<String, Value>)) {
    mend(body);
    for extension in ["genset", "nvext"] {
        if let Some(Value::Object(fields)) = body.get_mut(extension) {
            mend(fields);
        }
    }
}

/// Limits in bytes, where a schema counts characters.
fn mend_stops(body: &mut Map<String, Value>) {
    let shorten = |stop: &mut Value| {
        if stop.as_str().is_some_and(|stop| stop.len() > 1024) {
            *stop = json!("stop");
        }
    };
    for name in ["stop", "stop_sequences"] {
        match body.get_mut(name) {
            Some(Value::Array(stops)) => stops.iter_mut().for_each(shorten),
            Some(stop) => shorten(stop),
            None => {}
        }
    }
}

/// Token ids within the vocabulary, and at least one.
fn mend_inputs(path: &str, body: &mut Map<String, Value>) {
    for_extensions(body, |fields| {
        if let Some(ids) = fields.get_mut("stop_token_ids") {
            into_vocabulary(ids);
        }
    });
    if let Some(tokens) = body.get_mut("tokens") {
        into_vocabulary(tokens);
    }
    if path == "/v1/completions" {
        fill(&mut body["prompt"]);
    }
    if path == "/v1/embeddings" {
        fill(&mut body["input"]);
    }
    // No response is kept.
    let items = body.get_mut("input").and_then(Value::as_array_mut);
    for item in items.into_iter().flatten() {
        if item["type"] == "item_reference" {
            *item = json!({"role": "user", "content": "Hi"});
        }
    }
    // Lists of different lengths form no pairs.
    if path.ends_with("/score")
        && body["text_1"].as_array().map(Vec::len) != body["text_2"].as_array().map(Vec::len)
    {
        body.insert("text_1".into(), "Hi".into());
    }
}

fn fill(prompt: &mut Value) {
    into_vocabulary(prompt);
    match prompt {
        Value::String(text) if text.is_empty() => *text = "Hi".into(),
        Value::Array(prompts) => prompts
            .iter_mut()
            .filter(|prompt| prompt.is_string())
            .for_each(fill),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) | Value::Object(_) => {}
    }
}

fn into_vocabulary(ids: &mut Value) {
    match ids {
        Value::Number(id) => {
            let inside = id.as_u64().map(|id| id % VOCABULARY);
            *ids = json!(inside);
        }
        Value::Array(ids) => ids.iter_mut().for_each(into_vocabulary),
        Value::Null | Value::Bool(_) | Value::String(_) | Value::Object(_) => {}
    }
}

/// The types of tools that have a name. A choice may name no other, since those run at OpenAI.
const NAMED: [&str; 4] = ["", "custom", "function", "namespace"];

/// Distinct names, and a choice among them.
fn mend_tools(body: &mut Map<String, Value>) {
    let tools = body.get_mut("tools").and_then(Value::as_array_mut);
    let mut first = None;
    for (index, tool) in tools.into_iter().flatten().enumerate() {
        let kind = tool["type"].as_str().unwrap_or_default();
        if !NAMED.contains(&kind) {
            continue;
        }
        let inner = if kind == "namespace" { "__tool_0" } else { "" };
        first.get_or_insert_with(|| format!("tool_{index}{inner}"));
        let function = match ["function", "custom"].map(|kind| tool.get(kind).is_some()) {
            [true, _] => &mut tool["function"],
            [_, true] => &mut tool["custom"],
            _ => tool,
        };
        function["name"] = format!("tool_{index}").into();
        let inner = function.get_mut("tools").and_then(Value::as_array_mut);
        for (index, inner) in inner.into_iter().flatten().enumerate() {
            inner["name"] = format!("tool_{index}").into();
        }
    }
    let Some(first) = first else {
        body.remove("tool_choice");
        return;
    };
    let Some(choice) = body.get_mut("tool_choice") else {
        return;
    };
    match choice {
        Value::Object(choice) => {
            let several = match choice.get_mut("allowed_tools") {
                Some(allowed) => allowed.get_mut("tools"),
                None => choice.get_mut("tools"),
            };
            let several = several.and_then(Value::as_array_mut);
            for one in several.into_iter().flatten() {
                if let Some(one) = one.as_object_mut() {
                    name_in_choice(one, &first);
                }
            }
            name_in_choice(choice, &first);
        }
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) | Value::Array(_) => {}
    }
}

/// Names the tool in a choice of one.
fn name_in_choice(choice: &mut Map<String, Value>, name: &str) {
    if choice.contains_key("custom") {
        choice["custom"]["name"] = name.into();
    } else if let Some(function) = choice.get_mut("function") {
        function["name"] = name.into();
    } else if choice.contains_key("name") {
        choice.insert("name".into(), name.into());
    }
}

/// At most one field binds the answer, and then it calls no tools.
fn mend_formats(body: &mut Map<String, Value>) {
    let mut is_bound = body.get("response_format").is_some_and(is_format)
        || body
            .get("text")
            .and_then(|text| text.get("format"))
            .is_some_and(is_format)
        || body
            .get("output_config")
            .and_then(|config| config.get("format"))
            .is_some_and(Value::is_object);
    if is_bound {
        body.remove("output_format");
    }
    is_bound |= body.get("output_format").is_some_and(Value::is_object);
    for_extensions(body, |fields| {
        for name in GUIDED {
            if !is_set(fields, name) {
                continue;
            }
            if std::mem::replace(&mut is_bound, true) {
                fields.remove(name);
            } else if name == "guided_json" && fields[name].is_string() {
                fields.insert(name.into(), "{}".into());
            }
        }
    });
    if is_bound {
        body.remove("tools");
        body.remove("tool_choice");
    }
}

fn is_format(format: &Value) -> bool {
    format.is_object() && format["type"] != "text"
}

/// The last message is the user's, and the reasoning budget is below the answer's.
fn mend_messages(body: &mut Map<String, Value>) {
    if let Some(Value::Array(messages)) = body.get_mut("messages") {
        messages.push(json!({"role": "user", "content": "Hi"}));
    }
    let budget = body
        .get_mut("thinking")
        .and_then(|thinking| thinking.get_mut("budget_tokens"));
    if let Some(budget) = budget {
        *budget = json!(1024);
        if body.contains_key("max_tokens") {
            body.insert("max_tokens".into(), json!(2000));
        }
    }
}
