//! Anthropic's Messages API as data: requests read and put into the words of a chat, responses and events written, errors in
//! their own shape. Nothing here knows HTTP or engines; the pipeline is the chats'.
//!
//! # Source
//! <https://docs.anthropic.com/en/api/messages>

mod block;
mod content;
mod error;
mod options;
mod request;
mod response;
mod stream;

pub use error::{error_json, param_name};
pub use request::MessagesRequest;
pub use response::{Blocks, MessageHead, StopReason, message_json};
pub use stream::MessageEncoder;
