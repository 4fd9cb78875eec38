//! Anthropic's Messages API as data: parses requests into chat requests, writes responses and events, and formats
//! errors and models as Anthropic does. Nothing here knows HTTP or engines; messages use the chat pipeline.
//!
//! # Source
//! <https://docs.anthropic.com/en/api/messages>

mod block;
mod content;
mod error;
mod models;
mod options;
mod request;
mod response;
mod stream;

pub use error::{error_json, param_name};
pub(crate) use models::{ModelPage, model_json};
pub use request::MessagesRequest;
pub use response::{Blocks, MessageHead, message_json};
pub use stream::MessageEncoder;
