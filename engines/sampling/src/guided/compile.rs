//! Compiles a request's [`GuidedDecoding`] to a parser: checks first, then llguidance, on a stack of its own.

use std::panic::AssertUnwindSafe;
use std::thread;

use genset_backend_common::{EngineError, GuidedDecoding, RequestField};
use llguidance::api::{GrammarInit, TopLevelGrammar};
use llguidance::derivre::RegexBuilder;
use llguidance::{ParserFactory, TokenParser, panic_utils};
use serde_json::{Value, json};

use super::bounds;
use super::limits::GuideLimits;
use super::schema as schemas;

/// Grammar compilers are recursive. llguidance goes at most 50,000 schemas deep, including references, at up to 4.4 kB of
/// stack each (anyOf), and the limits of a schema keep it to about 30,000. This size is always enough, for any caller. The
/// system commits only the pages that are used.
const STACK_BYTES: usize = 256 << 20;
/// The longest reason that is sent to a client.
const REASON_CHARS: usize = 400;
/// White space between the tokens of a JSON text, at most once.
const JSON_SPACE: &str = r" |\n[ \t]{0,32}";

/// # Errors
/// `InvalidArgument` for [`RequestField::Guided`].
pub(super) fn compile(
    parsers: &ParserFactory,
    limits: &GuideLimits,
    guided: &GuidedDecoding,
) -> Result<TokenParser, EngineError> {
    on_large_stack(|| {
        parsers
            .create_parser(grammar(limits, guided)?)
            .map_err(|error| reason(&error))
    })
    .and_then(|compiled| compiled.map_err(refused))
    .map(|mut parser| {
        parser.start_without_prompt();
        parser
    })
}

/// Checks a grammar by itself. This is far cheaper than compiling it, and keeps no state.
///
/// # Errors
/// As [`compile`].
pub(super) fn check(
    parsers: &ParserFactory,
    limits: &GuideLimits,
    guided: &GuidedDecoding,
) -> Result<(), EngineError> {
    let checked = on_large_stack(|| {
        let source = GrammarInit::Serialized(grammar(limits, guided)?);
        let tokens = Some(parsers.tok_env().clone());
        let read = || source.to_internal(tokens, parsers.limits().clone());
        let read = panic_utils::catch_unwind(AssertUnwindSafe(read));
        read.map(drop).map_err(|error| reason(&error))
    })?;
    checked.map_err(refused)
}

fn refused(problem: String) -> EngineError {
    EngineError::invalid_argument(RequestField::Guided, problem)
}

fn grammar(limits: &GuideLimits, guided: &GuidedDecoding) -> Result<TopLevelGrammar, String> {
    match guided {
        GuidedDecoding::JsonObject => schema(limits, &json!({"type": "object"})),
        GuidedDecoding::JsonSchema(value) => schema(limits, value),
        GuidedDecoding::Regex(pattern) => regex(limits, pattern),
        GuidedDecoding::Choice(texts) => choice(limits, texts),
        GuidedDecoding::Grammar(text) => lark(limits, text),
    }
}

fn schema(limits: &GuideLimits, value: &Value) -> Result<TopLevelGrammar, String> {
    schemas::check(limits, value)?;
    let mut value = value.clone();
    bounds::fit(&mut value)?;
    let mut schema = match value {
        Value::Object(schema) => schema,
        // The schema that accepts everything.
        Value::Bool(true) => serde_json::Map::new(),
        Value::Bool(false) => return Err("nothing validates against the schema false".into()),
        Value::Null | Value::Number(_) | Value::String(_) | Value::Array(_) => {
            return Err("a schema is an object, true or false".into());
        }
    };
    let options = json!({"whitespace_pattern": JSON_SPACE});
    if schema.insert("x-guidance".into(), options).is_some() {
        return Err("'x-guidance' is not a keyword of JSON Schema".into());
    }
    Ok(TopLevelGrammar::from_json_schema(Value::Object(schema)))
}

pub(super) fn check_bytes(what: &str, bytes: usize, limit: usize) -> Result<(), String> {
    if bytes > limit {
        return Err(format!("{what}: longer than {limit} bytes"));
    }
    Ok(())
}

/// Checks the depth of open brackets. It also counts those in texts and classes, so it errs on the strict side.
fn check_depth(limits: &GuideLimits, text: &str) -> Result<(), String> {
    let mut open = 0_usize;
    for letter in text.chars() {
        match letter {
            '(' | '[' | '{' => open += 1,
            ')' | ']' | '}' => open = open.saturating_sub(1),
            _ => {}
        }
        if open > limits.depth {
            return Err(format!(
                "more than {} brackets are open at once",
                limits.depth
            ));
        }
    }
    Ok(())
}

fn regex(limits: &GuideLimits, pattern: &str) -> Result<TopLevelGrammar, String> {
    check_bytes("the expression", pattern.len(), limits.expression_bytes)?;
    check_depth(limits, pattern)?;
    // The pattern is parsed alone, before it is wrapped in a grammar, so that errors are about the client's own text.
    let parsed = panic_utils::catch_unwind(|| RegexBuilder::new().mk_regex(pattern).map(|_| ()));
    parsed.map_err(|error| reason(&error))?;
    Ok(TopLevelGrammar::from_regex(pattern))
}

fn choice(limits: &GuideLimits, texts: &[String]) -> Result<TopLevelGrammar, String> {
    if texts.is_empty() {
        return Err("must hold at least one text".into());
    }
    if texts.len() > limits.choices {
        return Err(format!("more than {} texts", limits.choices));
    }
    if texts.iter().any(String::is_empty) {
        return Err("a text must not be empty".into());
    }
    let bytes = texts.iter().map(String::len).sum();
    check_bytes("the texts", bytes, limits.source_bytes)?;
    let texts: Vec<String> = texts.iter().map(|text| escape(text)).collect();
    Ok(TopLevelGrammar::from_regex(&texts.join("|")))
}

/// The expression that matches `text` alone.
fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len() + 8);
    for letter in text.chars() {
        if r"\.+*?()|[]{}^$#&-~".contains(letter) {
            escaped.push('\\');
        }
        escaped.push(letter);
    }
    escaped
}

fn lark(limits: &GuideLimits, text: &str) -> Result<TopLevelGrammar, String> {
    check_bytes("the grammar", text.len(), limits.expression_bytes)?;
    check_depth(limits, text)?;
    if text.trim().is_empty() {
        return Err("the grammar is empty".into());
    }
    // Each rule and terminal has one colon; colons in texts count too.
    if text.matches(':').count() > limits.rules {
        return Err(format!("more than {} rules and terminals", limits.rules));
    }
    schemas::check_lark(limits, text)?;
    Ok(TopLevelGrammar::from_lark(text.to_owned()))
}

/// llguidance's message without its traces, shortened for clients.
pub(super) fn reason(error: &impl ToString) -> String {
    let text = error.to_string();
    let text = text.split("\n<").next().unwrap_or_default().trim();
    match text.char_indices().nth(REASON_CHARS) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text.to_owned(),
    }
}

fn on_large_stack<T: Send>(work: impl FnOnce() -> T + Send) -> Result<T, EngineError> {
    let failed = || EngineError::internal("compiling a grammar panicked");
    thread::scope(|scope| {
        let spawned = thread::Builder::new()
            .name("genset-guide".into())
            .stack_size(STACK_BYTES)
            .spawn_scoped(scope, work);
        let thread = spawned.map_err(|error| {
            EngineError::internal("no thread to compile a grammar on").with_source(error)
        })?;
        thread.join().map_err(|_| failed())
    })
}
