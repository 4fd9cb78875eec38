//! OpenAI's Responses API as data: requests read and put into the words of a chat, output items and events written, and a
//! bounded store of what was answered, so that the next request may go on from it. Nothing here knows HTTP or engines; the
//! pipeline is the chats'.
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

pub use error::param_name;
pub use item::{Item, Shown, Speaker};
pub(crate) use item_json::ItemJson;
pub use output::Output;
pub use request::ResponsesRequest;
pub use response::{ResponseEnd, ResponseHead};
pub use store::{ResponseStore, Stored};
pub use stream::ResponseEncoder;
