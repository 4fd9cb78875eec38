//! Conversions between tokens and text: a model's files, and the clients' texts for them.

use std::sync::Arc;

use genset_frontend::text::{
    ChatTemplate, Detokenizer, EncodeLimits, StopMatcher, StopOutcome, TemplateInput,
    TemplateSource, TextTokenizer,
};
use serde_json::{Map, Value, json};

use crate::input::{cuts, split_at_byte, text_pieces};

/// Enough for any template that does not waste time on purpose, and little enough to try many.
const FUEL: u64 = 20_000;
const CACHE_BYTES: usize = 1 << 16;
const TEXT: &str = "Hello, w\u{f6}rld! \u{1f98a}\u{200d} 12345\n<s> the  the e\u{301}";

/// A text, NUL, and a `tokenizer.json`; without the NUL a fixed text.
pub fn tokenizer(input: &[u8]) {
    let (text, file) = split_at_byte(input, 0);
    let text = String::from_utf8_lossy(text);
    let text = if text.is_empty() { TEXT } else { &*text };
    let Ok(tokenizer) = TextTokenizer::from_bytes(file) else {
        return;
    };
    let tokenizer = tokenizer.with_cache(CACHE_BYTES);
    let Ok(ids) = tokenizer.encode(text, false) else {
        return;
    };
    // In parts, and again from the cache.
    for _ in 0..2 {
        if let Ok(prompt) = tokenizer.encode_prompt(text, false, &EncodeLimits::NONE) {
            assert_eq!(prompt.ids, ids);
        }
    }
    if let Some(longest) = tokenizer.longest_token_bytes() {
        assert!(ids.len().saturating_mul(longest) >= text.len());
    }
    let tokenizer = Arc::new(tokenizer);
    for skip_special in [false, true] {
        let Ok(whole) = tokenizer.decode_all(&ids, skip_special) else {
            continue;
        };
        let mut detokenizer = Detokenizer::new(Arc::clone(&tokenizer), skip_special);
        let mut out = String::new();
        for &id in &ids {
            detokenizer.push(id, &mut out);
        }
        detokenizer.finish(&mut out);
        assert_eq!(out, whole);
    }
}

/// A `tokenizer_config.json`: its template compiles or is refused.
pub fn tokenizer_config(file: &[u8]) {
    if let Ok(Some(source)) = TemplateSource::from_tokenizer_config(file) {
        drop(source.compile());
    }
}

/// A chat template: renders a conversation with tools, or is refused, in bounded time and memory.
pub fn chat_template(source: &[u8]) {
    let source = String::from_utf8_lossy(source);
    let Ok(template) = ChatTemplate::try_new(&source, Some("<s>"), Some("</s>")) else {
        return;
    };
    let template = template.with_fuel(FUEL);
    let call = json!({"id": "call_1", "type": "function", "function": {"name": "now", "arguments": {"zone": "UTC"}}});
    let messages = [
        json!({"role": "system", "content": "Be brief."}),
        json!({"role": "user", "content": "What time is it?\n"}),
        json!({"role": "assistant", "content": null, "reasoning_content": "hm", "tool_calls": [call]}),
        json!({"role": "tool", "tool_call_id": "call_1", "content": "12:00 \u{1f550}"}),
        json!({"role": "user", "content": [{"type": "text", "text": "Thanks"}]}),
    ];
    let tools = [
        json!({"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}),
    ];
    let mut extra = Map::new();
    extra.insert("enable_thinking".into(), Value::Bool(true));
    for tools in [None, Some(tools.as_slice())] {
        drop(template.render(&TemplateInput {
            messages: &messages,
            tools,
            add_generation_prompt: true,
            extra: &extra,
        }));
    }
}

/// Lengths of pieces, stop strings in lines, NUL, and a text: any pieces yield the same cut.
pub fn stop_strings(input: &[u8]) {
    let (lengths, rest) = cuts(input);
    let (stops, text) = split_at_byte(rest, 0);
    let stops: Arc<[String]> = String::from_utf8_lossy(stops)
        .split('\n')
        .take(16)
        .map(str::to_owned)
        .collect();
    let text = String::from_utf8_lossy(text);
    let run = |pieces: &[&str]| {
        let mut matcher = StopMatcher::new(Arc::clone(&stops));
        let mut out = String::new();
        for piece in pieces {
            let outcome = matcher.push(piece, &mut out);
            if outcome != StopOutcome::Continue {
                return (out, outcome);
            }
        }
        let outcome = matcher.finish(&mut out);
        (out, outcome)
    };
    let whole = run(&[&text]);
    assert_eq!(run(&text_pieces(&text, lengths)), whole);

    let found = stops.iter().filter(|stop| !stop.is_empty());
    let first = found.filter_map(|stop| text.find(stop.as_str())).min();
    assert_eq!(whole.0, text[..first.unwrap_or(text.len())]);
}
