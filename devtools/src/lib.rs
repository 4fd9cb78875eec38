//! Models for development: random ones of real sizes, and Llamas as GGUF files.
//!
//! Tests and benchmarks use it, and so do two programs: `train-tiny-chat` (`cargo xtask train-tiny-chat`) and `make-model`
//! (`cargo xtask make-model`). A third, `make-tiny-chat` (`cargo xtask make-tiny-chat`), makes the tokenizer and the
//! configurations of the model in this repository. Nothing that is shipped depends on it, and it depends on no crate of ours.

pub mod checkout;
pub mod corpus;
pub mod gguf;
pub mod synthetic;
