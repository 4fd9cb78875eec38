//! The model of this repository: its folder and its special tokens.

use std::path::Path;

/// Ends a document; also the padding.
pub const END_OF_TEXT: &str = "<|endoftext|>";
/// Begins a message.
pub const MESSAGE_START: &str = "<|im_start|>";
/// Ends a message, and with it the model's turn.
pub const MESSAGE_END: &str = "<|im_end|>";

/// The model's folder.
#[must_use]
pub fn folder() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../models/tiny-chat"))
}
