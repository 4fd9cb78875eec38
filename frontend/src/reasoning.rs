//! Parsers of the reasoning that models write before their answers.
//!
//! All but one dialect put two markers around the reasoning: each is a row in `dialects`, parsed by `tags`, or by `shown` if the
//! reasoning stays in the content. The exception, harmony, marks tool calls in the same way; its parser is in
//! [`tools`](crate::tools).

mod dialects;
mod shown;
mod tags;

pub use dialects::ReasoningDialect;

#[cfg(test)]
mod tests;
