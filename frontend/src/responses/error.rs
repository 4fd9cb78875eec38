//! A chat's errors in the words of this API.

use crate::error::ApiError;

/// The fields of a chat and what they are called here.
const NAMES: [(&str, &str); 9] = [
    ("prompt", "input"),
    ("messages", "input"),
    ("max_completion_tokens", "max_output_tokens"),
    ("logprobs", "top_logprobs"),
    ("reasoning_effort", "reasoning.effort"),
    ("response_format", "text.format"),
    ("response_format.json_schema.name", "text.format.name"),
    ("response_format.json_schema.schema", "text.format.schema"),
    ("tool_choice.function.name", "tool_choice.name"),
];

/// The error as a client of this API finds it: a chat's field has this API's name, in `param` and in the message.
#[must_use]
pub fn in_our_words(error: ApiError) -> ApiError {
    error.renamed(|field| {
        if let Some((_, ours)) = NAMES.iter().find(|(theirs, _)| *theirs == field) {
            return (*ours).to_owned();
        }
        if field.starts_with("tools[") {
            return field.replace(".function", "");
        }
        field.to_owned()
    })
}
