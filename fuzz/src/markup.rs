//! Parsed answers of models: any pieces yield the same result.

use std::sync::Arc;

use genset_frontend::markup::{IdStyle, Message, Splitter};
use genset_frontend::reasoning::ReasoningDialect;
use genset_frontend::tools::{ToolDialect, ToolSchemas};
use serde_json::{Value, json};

use crate::input::{cuts, first, text_pieces};

fn tools() -> Arc<ToolSchemas> {
    let tool = |name: &str, properties: Value| {
        let parameters = json!({"type": "object", "properties": properties});
        json!({"type": "function", "function": {"name": name, "parameters": parameters}})
    };
    Arc::new(ToolSchemas::new(&[
        tool(
            "weather",
            json!({"city": {"type": "string"}, "days": {"type": "integer"}}),
        ),
        tool(
            "write",
            json!({
                "text": {"type": "string"},
                "options": {"type": "object"},
                "new": {"type": ["boolean", "null"]},
            }),
        ),
        tool("now", json!({})),
    ]))
}

fn split(mut splitter: Splitter, pieces: &[&str]) -> Message {
    let mut message = Message::default();
    for piece in pieces {
        splitter.push(piece, |delta| message.add(delta));
    }
    splitter.finish(|delta| message.add(delta));
    // If the model gives no id, it is random.
    for call in &mut message.tool_calls {
        if call.id.starts_with("call_") {
            call.id.clear();
        }
    }
    message
}

fn assert_same_in_pieces(input: &[u8], splitter: impl Fn() -> Splitter) {
    let (lengths, text) = cuts(input);
    let text = String::from_utf8_lossy(text);
    let whole = split(splitter(), &[&text]);
    let pieces = text_pieces(&text, lengths);
    assert_eq!(split(splitter(), &pieces), whole, "in {pieces:?}");
    let characters: Vec<&str> = text.split_inclusive(|_: char| true).collect();
    assert_eq!(split(splitter(), &characters), whole, "in characters");
}

fn tool_dialect(number: u8) -> ToolDialect {
    let all = ToolDialect::all();
    all[usize::from(number) % all.len()]
}

/// The number of a dialect, lengths of pieces, and an answer with tool calls.
pub fn tool_parser(input: &[u8]) {
    let (number, rest) = first(input);
    let dialect = tool_dialect(number);
    let tools = tools();
    assert_same_in_pieces(rest, || {
        let parser = dialect.parser(Arc::clone(&tools));
        Splitter::new(None, Some(parser), IdStyle::Call)
    });
}

/// The numbers of two dialects, lengths of pieces, and an answer with reasoning, followed by tool calls.
pub fn reasoning_parser(input: &[u8]) {
    let (number, rest) = first(input);
    let (tool_number, rest) = first(rest);
    let all = ReasoningDialect::all();
    let dialect = all[usize::from(number) % all.len()];
    let prompt = [None, Some("<think>"), Some("</think>\n\n")][usize::from(tool_number % 3)];
    // Half of the inputs have no tools.
    let tool_dialect = (tool_number < 128).then(|| tool_dialect(tool_number));
    let tools = tools();
    assert_same_in_pieces(rest, || {
        let thoughts = dialect.parser(prompt, tool_dialect.is_some());
        let calls = tool_dialect.map(|dialect| dialect.parser(Arc::clone(&tools)));
        Splitter::new(thoughts, calls, IdStyle::Call)
    });
}
