//! What a client sees of a stream.

use futures_util::StreamExt;

use crate::error::ErrorKind;
use crate::output::{FinishReason, Output, OutputStream};
use crate::request::TokenId;

/// A legal stream, read to its end.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Transcript {
    pub(super) tokens: Vec<TokenId>,
    pub(super) end: End,
}

/// How a stream ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum End {
    Finished {
        reason: FinishReason,
        prompt_tokens: u32,
        completion_tokens: u32,
    },
    Failed(ErrorKind),
}

impl Transcript {
    pub(super) fn finished(reason: FinishReason, prompt_tokens: u32, tokens: &[TokenId]) -> Self {
        Self {
            tokens: tokens.to_vec(),
            end: End::Finished {
                reason,
                prompt_tokens,
                completion_tokens: u32::try_from(tokens.len()).unwrap(),
            },
        }
    }

    pub(super) fn failed(kind: ErrorKind, tokens: &[TokenId]) -> Self {
        Self {
            tokens: tokens.to_vec(),
            end: End::Failed(kind),
        }
    }
}

/// Reads a stream to its end.
///
/// # Panics
/// When a client must not see such a stream: no terminal, items after it, an empty item, or usage that does not match the tokens.
pub(super) async fn read(mut outputs: OutputStream) -> Transcript {
    let mut tokens = Vec::new();
    let end = loop {
        match outputs.next().await.expect("a terminal ends the stream") {
            Ok(Output::Tokens(chunk)) => {
                assert!(!chunk.is_empty());
                tokens.extend(chunk.token_ids);
            }
            Ok(output @ (Output::Text(_) | Output::Embeddings(_) | Output::Scores(_))) => {
                panic!("nobody asked for {output:?}")
            }
            Ok(Output::Finished(finished)) => {
                tokens.extend(finished.last.token_ids);
                let streamed = u32::try_from(tokens.len()).unwrap();
                assert_eq!(finished.usage.completion_tokens, streamed);
                break End::Finished {
                    reason: finished.reason,
                    prompt_tokens: finished.usage.prompt_tokens,
                    completion_tokens: finished.usage.completion_tokens,
                };
            }
            Err(error) => break End::Failed(error.kind()),
        }
    };
    assert!(outputs.next().await.is_none(), "the terminal is the last");
    Transcript { tokens, end }
}
