//! The OpenAI-compatible server: HTTP in, validation, chat template, tokens, and back: text, stop strings, server-sent
//! events. It serves whatever models the live workers of its runtime serve, and knows no engine and no tensor.
//!
//! A request's road: `http` reads it, [`openai`] checks it, [`pipeline`] templates and tokenizes it ([`text`]) and starts
//! it on the model's instances ([`model`]); [`answer`] turns tokens into text on the way back, and `http` writes it.

pub mod answer;
pub mod anthropic;
pub mod batch;
mod block;
mod budget;
mod clock;
mod config;
mod error;
mod http;
mod json;
pub mod keys;
pub mod markup;
mod media;
pub mod model;
pub mod openai;
mod parsers;
pub mod pipeline;
pub mod reasoning;
pub mod responses;
pub mod text;
pub mod tools;
mod turns;
mod work;

pub use budget::{MemoryBudget, MemoryShare};
pub use config::{AllowedHost, BatchConfig, FrontendConfig, FrontendTls, MediaConfig, Origin};
pub use error::{ApiError, Param, ParamName};
pub use http::{BindError, FrontendServer, LocalAnswer, LocalFrontend};
pub use json::JsonBody;
pub use media::HostPattern;
pub use parsers::{ParserNames, Parsers};
pub use work::WorkThreads;

/// The Rust code of the guides as doc tests. They stand here because some of it puts an engine behind this server.
#[cfg(doctest)]
mod guides {
    #[doc = include_str!("../../docs/guide/conformance.md")]
    mod conformance {}

    #[doc = include_str!("../../docs/guide/engine-authors.md")]
    mod engine_authors {}
}
