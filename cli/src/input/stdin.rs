//! `in=stdin`: standard input is one question; its answer goes to standard output.

use std::io;

use genset_backend_common::EngineError;
use genset_runtime::Signals;
use tokio::io::AsyncReadExt;

use super::chat::{CUT, Chat, Turn};
use super::{BYTE_ORDER_MARK, Ending, print};

/// The longest question, in bytes.
pub(super) const MAX_BYTES: u64 = 32 << 20;

pub(super) async fn run(mut chat: Chat, signals: &mut Signals) -> Result<Ending, EngineError> {
    let mut bytes = Vec::new();
    let mut input = tokio::io::stdin().take(MAX_BYTES + 1);
    tokio::select! {
        biased;
        _ = signals.next() => return Ok(Ending::Signalled),
        read = input.read_to_end(&mut bytes) => {
            read.map_err(|error| unreadable(&error))?;
        }
    }
    let text = text_of("standard input", bytes)?;
    let text = text.strip_prefix(BYTE_ORDER_MARK).unwrap_or(&text);
    let question = text.trim_end_matches(['\r', '\n']);
    if question.is_empty() {
        return Err(EngineError::invalid_argument(
            "standard input",
            "is empty; pipe a question into it",
        ));
    }
    match chat.ask(question, signals).await? {
        turn @ (Turn::Answered | Turn::Cut) => {
            print("\n");
            if turn == Turn::Cut {
                chat.screen().tell(CUT);
            }
            Ok(Ending::Done)
        }
        Turn::Stopped | Turn::Terminated => Ok(Ending::Signalled),
        Turn::Unread => Ok(Ending::Done),
    }
}

/// The text of `bytes`, which were read up to a byte over the limit. That may be within a character.
///
/// # Errors
/// `InvalidArgument` with `at`.
pub(super) fn text_of(at: &str, bytes: Vec<u8>) -> Result<String, EngineError> {
    if bytes.len() as u64 > MAX_BYTES {
        let problem = format!("is over the limit of {MAX_BYTES} bytes");
        return Err(EngineError::invalid_argument(at, problem));
    }
    String::from_utf8(bytes)
        .map_err(|error| EngineError::invalid_argument(at, "is not UTF-8 text").with_source(error))
}

pub(super) fn unreadable(error: &io::Error) -> EngineError {
    EngineError::internal(format!("standard input cannot be read: {error}"))
}
