//! The fuzzed functions: parsers of untrusted input, one function each. [`TARGETS`] lists them.
//!
//! A [`Target`] takes any bytes and returns; a panic is a finding. If there is a law to keep (the same result
//! however a text is cut, a round trip through writing and reading), the function asserts it. `cargo xtask fuzz` calls
//! the targets through `fuzz/libfuzzer`, a separate workspace, since the other crates need neither libFuzzer nor
//! instrumented code. Inputs that it keeps are in `fuzz/corpus`, and this crate's tests replay them. The crate is not published.
#![expect(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a panic is how a target reports what it found"
)]

pub mod batches;
pub mod discovery;
pub mod files;
mod input;
pub mod launcher;
pub mod markup;
pub mod models;
pub mod requests;
pub mod router;
pub mod text;
pub mod wire;

/// A fuzzed function.
#[derive(Debug, Clone, Copy)]
pub struct Target {
    /// The name of its binary in `fuzz/libfuzzer/src/bin` and of its folder in `fuzz/corpus`.
    pub name: &'static str,
    /// Runs on an input. It panics if the code is wrong, never because of the input.
    pub run: fn(&[u8]),
}

/// Every target.
pub const TARGETS: &[Target] = &[
    target("api_keys", files::api_keys),
    target("batch_lines", batches::batch_lines),
    target("batches", batches::batches),
    target("chat", requests::chat),
    target("chat_template", text::chat_template),
    target("completions", requests::completions),
    target("config", models::config),
    target("discovery_record", discovery::discovery_record),
    target("embeddings", requests::embeddings),
    target("frames", wire::frames),
    target("gguf", models::gguf),
    target("handshake", wire::handshake),
    target("kv_events", router::kv_events),
    target("lease_file", discovery::lease_file),
    target("messages", requests::messages),
    target("metrics", launcher::metrics),
    target("payloads", wire::payloads),
    target("reasoning_parser", markup::reasoning_parser),
    target("responses", requests::responses),
    target("safetensors", models::safetensors),
    target("scores", requests::scores),
    target("script", files::script),
    target("sse", launcher::sse),
    target("stop_strings", text::stop_strings),
    target("tokenize", requests::tokenize),
    target("tokenizer", text::tokenizer),
    target("tokenizer_config", text::tokenizer_config),
    target("tool_parser", markup::tool_parser),
    target("uploads", batches::uploads),
];

const fn target(name: &'static str, run: fn(&[u8])) -> Target {
    Target { name, run }
}
