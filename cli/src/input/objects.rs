//! What models say whose engines read the bodies of chats and completions themselves: the text in the API's objects, a chunk or a whole
//! answer each.

use futures_util::StreamExt;
use genset_backend_common::output::TextChunk;
use genset_backend_common::{EngineError, Output, OutputStream};
use serde_json::Value;

/// The same answer, as text in place of objects.
pub(super) fn texts(objects: OutputStream) -> OutputStream {
    let texts = objects.map(|output| output.and_then(as_text));
    OutputStream::from_raw(Box::pin(texts))
}

fn as_text(output: Output) -> Result<Output, EngineError> {
    match output {
        Output::Text(TextChunk { text, token_count }) => Ok(Output::Text(TextChunk {
            text: text_in(&text)?,
            token_count,
        })),
        other @ (Output::Tokens(_)
        | Output::Embeddings(_)
        | Output::Scores(_)
        | Output::Finished(_)) => Ok(other),
    }
}

/// What an object adds to the first choice: nothing where it is about something else.
fn text_in(object: &str) -> Result<String, EngineError> {
    let object: Value = serde_json::from_str(object).map_err(|error| {
        EngineError::internal("the model's engine answered with what is no JSON").with_source(error)
    })?;
    let choice = &object["choices"][0];
    let places = [
        &choice["delta"]["content"],
        &choice["message"]["content"],
        &choice["text"],
    ];
    let text = places.into_iter().find_map(Value::as_str);
    Ok(text.unwrap_or_default().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_kind_of_object_has_its_text_elsewhere() {
        for (object, text) in [
            (r#"{"choices":[{"delta":{"content":"a\nb"}}]}"#, "a\nb"),
            (r#"{"choices":[{"message":{"content":"whole"}}]}"#, "whole"),
            (r#"{"choices":[{"text":"gone on"}]}"#, "gone on"),
            (r#"{"choices":[{"delta":{"content":null}}]}"#, ""),
            (r#"{"choices":[],"usage":{}}"#, ""),
        ] {
            assert_eq!(text_in(object).unwrap(), text, "{object}");
        }
        assert!(text_in("plain").is_err());
    }
}
