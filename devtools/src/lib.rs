//! Models for development: random ones of realistic sizes, and Llamas as GGUF files.
//!
//! Used by tests and benchmarks, and by two programs: `train-tiny-chat` (`cargo xtask train-tiny-chat`) and `make-model`
//! (`cargo xtask make-model`). A third, `make-tiny-chat` (`cargo xtask make-tiny-chat`), creates the tokenizer and the
//! configurations of this repository's model. Nothing that is shipped depends on this crate, and it depends on no other crate
//! of ours.

pub mod checkout;
pub mod corpus;
pub mod gguf;
pub mod synthetic;
pub mod tiny_chat;
