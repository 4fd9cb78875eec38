//! What a stream allocates: nothing for another token, and a bounded amount while it is open.
//!
//! A separate binary, for its allocator, which is in `counting`. `encoders` turns tokens into events without a server, `server`
//! sends them through a whole server, engine to socket, on one thread, and `tokenize` tokenizes long prompts.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    reason = "a test says what failed by panicking"
)]

mod counting;
mod encoders;
mod server;
#[path = "../counted/site.rs"]
mod site;
mod tokenize;

use std::sync::{Arc, OnceLock};

use genset_backend_common::output::Finish;
use genset_backend_common::{EngineError, Output, TokenId};
use genset_frontend::text::TextTokenizer;

#[global_allocator]
static ALLOCATOR: counting::Counting = counting::Counting;

/// Stop strings that often begin and never complete.
const STOPS: [&str; 3] = ["\n\nUser:", " the end of it", "🦀🦀🦀"];

fn tokenizer() -> &'static Arc<TextTokenizer> {
    static TOKENIZER: OnceLock<Arc<TextTokenizer>> = OnceLock::new();
    TOKENIZER.get_or_init(|| {
        let mut artifacts = site::folder().artifacts.iter();
        let file = artifacts.find(|artifact| artifact.reference.name == "tokenizer.json");
        Arc::new(TextTokenizer::from_bytes(&file.unwrap().content).unwrap())
    })
}

/// An engine's items for an answer: words, quotes and line breaks to escape, and code points split over several tokens.
fn answer(prompt_tokens: u32, tokens: u32) -> Vec<Result<Output, EngineError>> {
    static PERIOD: OnceLock<Vec<TokenId>> = OnceLock::new();
    let text = "It is \"the engine\" that turns.\n\nUsers like the crab 🦀, and the עברית of the \\ path.\n";
    let period = PERIOD.get_or_init(|| tokenizer().encode(text, false).unwrap());
    let ids = period.iter().copied().cycle();
    let steps = (0..tokens).zip(ids).map(|(_, id)| Ok(Output::from(id)));
    let end = Finish::length().into_finished(prompt_tokens, tokens);
    steps.chain([Ok(Output::Finished(Box::new(end)))]).collect()
}
