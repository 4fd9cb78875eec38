//! A mock engine that plays a script: it answers with the script's texts, at the script's pace, and fails where the script
//! says. It serves tests of everything around an engine, and applications that need a server with known answers.
//!
//! It takes text and chat messages and returns text. With a [`Vocabulary`] it takes and returns token ids instead, so that
//! templates, detokenization, stop strings and log probabilities are exercised too. It is no model: it ignores sampling
//! options, since there is one possible answer, and enforces no grammar.
//!
//! # Examples
//! ```
//! use futures_util::StreamExt;
//! use genset_backend_common::{GenerateRequest, LLMEngine, Output, RequestContext, StartContext};
//! use genset_engine_scripted::{Script, ScriptedEngine};
//!
//! # let runtime = tokio::runtime::Builder::new_current_thread().build()?;
//! # runtime.block_on(async {
//! let script: Script = r#"
//!     [[reply]]
//!     match.contains = "weather"
//!     text = '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>'
//!     chunk_chars = 7
//!
//!     [[reply]]
//!     text = "You said: {{last_user}}"
//! "#
//! .parse()?;
//! let engine = ScriptedEngine::from_script(script);
//! engine.start(StartContext::detached(1)).await?;
//!
//! let request = GenerateRequest::from_text("mock", "hello");
//! let mut outputs = engine.generate(request, RequestContext::new("r")).await?;
//! let mut answer = String::new();
//! while let Some(item) = outputs.next().await {
//!     if let Output::Text(chunk) = item? {
//!         answer += &chunk.text;
//!     }
//! }
//! assert_eq!(answer, "You said: hello");
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! # })?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod conversation;
mod engine;
mod mode;
mod play;
mod ratings;
mod replies;
mod script;
mod vocabulary;

use std::path::PathBuf;

pub use engine::ScriptedEngine;
pub use mode::TEXT_CONTEXT_LENGTH;
pub use script::{Script, ScriptError};
pub use vocabulary::Vocabulary;

/// What the engine is built from; with the feature `cli`, its command-line flags.
#[derive(Debug, Clone)]
#[cfg_attr(feature = "cli", derive(clap::Args))]
pub struct ScriptedArgs {
    /// TOML file with the replies
    #[cfg_attr(feature = "cli", arg(long, value_name = "FILE", env = "GENSET_SCRIPT"))]
    pub script: PathBuf,
}
