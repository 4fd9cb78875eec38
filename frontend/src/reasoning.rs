//! Parsers of the thoughts that models write before their answers.
//!
//! All but one dialect are two markers around the thoughts: a row of `dialects`, run by `tags`. The exception, harmony,
//! marks tool calls by the same means; its parser is in [`tools`](crate::tools).

mod dialects;
mod tags;

pub use dialects::ReasoningDialect;

#[cfg(test)]
mod tests;
