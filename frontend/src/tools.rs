//! Tool calls: parses them from a model's text, and constrains models to make them.
//!
//! A [`ToolDialect`] is how a family of models writes its calls. Most are rows of a table for one of four parsers: `json`
//! (calls are JSON objects, or names followed by them), `xml` (a tag for each parameter), `pythonic` (a list of function
//! calls) and `keyed` (objects with bare keys). Two dialects have their own parsers: `nested` (tags named after parameters), and
//! `harmony`, which also reads reasoning. [`forced`] is for calls that guided decoding enforces.
//!
//! All parsers treat a malformed call in the same way. Once its name is known, the call is reported, with its arguments as
//! far as they were written, valid JSON or not. Before that, its text without the markers is content.

mod aside;
mod dialects;
pub mod forced;
mod harmony;
mod json;
mod keyed;
mod literal;
mod nested;
mod pythonic;
mod schemas;
mod xml;

pub use dialects::ToolDialect;
pub use schemas::ToolSchemas;

#[cfg(test)]
mod tests;
