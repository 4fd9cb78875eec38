//! OpenAI's Responses API as data: parses requests into chat requests, writes output items and events, and keeps responses in
//! a bounded store, so that the next request may continue a conversation. Nothing here knows HTTP or engines; responses use
//! the chat pipeline.
//!
//! # Source
//! <https://platform.openai.com/docs/api-reference/responses>

mod error;
mod input;
mod item;
mod item_json;
mod output;
mod request;
mod response;
mod store;
mod stream;
mod tools;

pub use error::param_name;
pub use input::FindItem;
pub use item::{Item, Shown, Speaker};
pub(crate) use item_json::ItemJson;
pub use output::Output;
pub use request::ResponsesRequest;
pub use response::{ResponseEnd, ResponseHead};
pub use store::{ResponseStore, Stored};
pub use stream::ResponseEncoder;
pub(crate) use tools::HOSTED;
