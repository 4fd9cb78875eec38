//! Helpers to read an answer, for the tests of several layers.

use futures_util::StreamExt;
use genset_backend_common::output::Finished;
use genset_backend_common::{EngineError, Output, OutputStream, TokenId};

/// An answer, read to its end.
#[derive(Debug)]
pub(crate) struct Read {
    pub(crate) tokens: Vec<TokenId>,
    pub(crate) end: Result<Finished, EngineError>,
}

/// Reads an answer to its end. Tokens in the terminal come last.
pub(crate) async fn read(mut outputs: OutputStream) -> Read {
    let mut tokens = Vec::new();
    loop {
        match outputs.next().await.unwrap() {
            Ok(Output::Tokens(chunk)) => tokens.extend(chunk.token_ids),
            Ok(Output::Finished(finished)) => {
                tokens.extend(finished.last.token_ids.iter());
                let end = Ok(*finished);
                return Read { tokens, end };
            }
            Ok(_) => {}
            Err(error) => {
                let end = Err(error);
                return Read { tokens, end };
            }
        }
    }
}
