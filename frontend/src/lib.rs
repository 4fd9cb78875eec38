//! The OpenAI-compatible server: HTTP, validation, chat template and tokenization of requests; detokenization, stop strings
//! and server-sent events of responses. It serves the models of its runtime's live workers, and depends on no engine and no
//! tensor library.
//!
//! The path of a request: `http` reads it, [`openai`] validates it, [`pipeline`] applies the template, tokenizes it
//! ([`text`]) and starts it on the model's instances ([`model`]). On the way back, [`answer`] turns tokens into text, and
//! `http` writes it.

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
#[cfg(feature = "fuzzing")]
pub use http::fuzzing;
pub use http::{BindError, FrontendServer, LocalAnswer, LocalFrontend};
pub use json::JsonBody;
pub use media::HostPattern;
pub use parsers::{ParserNames, Parsers};
pub use work::WorkThreads;

/// The Rust code of the guides as doc tests. They are in this crate because some of it puts an engine behind this server.
#[cfg(doctest)]
mod guides {
    #[doc = include_str!("../../docs/guide/conformance.md")]
    mod conformance {}

    #[doc = include_str!("../../docs/guide/engine-authors.md")]
    mod engine_authors {}
}
