//! [`Events`]: decodes server-sent events from the pieces of a body, however it is split.
//!
//! # Source
//! The WHATWG HTML standard, "Server-sent events". llama.cpp also writes `error:` lines, which the standard tells readers to
//! ignore; here they are events of their own.

use crate::http::{Body, HttpError};

/// The maximum length of an event, in bytes: SGLang repeats all tokens so far in each of its events.
const MAX_EVENT_BYTES: usize = 16 << 20;

/// Why there is no next event.
#[derive(Debug, thiserror::Error)]
pub(crate) enum EventError {
    #[error(transparent)]
    Http(#[from] HttpError),
    #[error("an event is longer than {MAX_EVENT_BYTES} bytes")]
    TooLong,
    #[error("its answer ended in the middle of an event")]
    Half,
}

/// An event's data.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Event {
    Data(Vec<u8>),
    /// The data of an `error:` line.
    Error(Vec<u8>),
}

/// Decodes pieces to events.
#[derive(Debug, Default)]
pub(crate) struct Decoder {
    buffer: Vec<u8>,
    /// The number of buffer bytes already consumed.
    used: usize,
    /// The number of buffer bytes searched without finding a line end.
    searched: usize,
    data: Vec<u8>,
    has_data: bool,
    is_error: bool,
}

impl Decoder {
    pub(crate) fn push(&mut self, piece: &[u8]) -> Result<(), EventError> {
        self.buffer.drain(..self.used);
        self.searched -= self.used;
        self.used = 0;
        if self.buffer.len() + self.data.len() >= MAX_EVENT_BYTES {
            return Err(EventError::TooLong);
        }
        self.buffer.extend_from_slice(piece);
        Ok(())
    }

    /// The next complete event, if there is one.
    pub(crate) fn next(&mut self) -> Option<Event> {
        while let Some(length) = self
            .buffer
            .get(self.searched..)?
            .iter()
            .position(|byte| *byte == b'\n')
        {
            let end = self.searched + length;
            let line = self.buffer.get(self.used..end).unwrap_or_default();
            let line = line.strip_suffix(b"\r").unwrap_or(line);
            let is_blank = line.is_empty();
            if let Some((data, is_error)) = field(line) {
                if self.has_data {
                    self.data.push(b'\n');
                }
                self.data.extend_from_slice(data);
                self.has_data = true;
                self.is_error |= is_error;
            }
            self.used = end + 1;
            self.searched = self.used;
            if is_blank && std::mem::take(&mut self.has_data) {
                let data = std::mem::take(&mut self.data);
                let event = if std::mem::take(&mut self.is_error) {
                    Event::Error(data)
                } else {
                    Event::Data(data)
                };
                return Some(event);
            }
        }
        self.searched = self.buffer.len();
        None
    }

    /// Whether an event has begun and not ended.
    pub(crate) fn is_half(&self) -> bool {
        self.has_data
            || self
                .buffer
                .get(self.used..)
                .is_some_and(|rest| rest.iter().any(|b| !b.is_ascii_whitespace()))
    }
}

/// The value of a data or error line; other fields and comments are ignored.
fn field(line: &[u8]) -> Option<(&[u8], bool)> {
    let (value, is_error) = match line.strip_prefix(b"data:") {
        Some(value) => (value, false),
        None => (line.strip_prefix(b"error:")?, true),
    };
    Some((value.strip_prefix(b" ").unwrap_or(value), is_error))
}

/// The events of a body.
#[derive(Debug)]
pub(crate) struct Events {
    body: Body,
    decoder: Decoder,
}

impl Events {
    pub(crate) fn new(body: Body) -> Self {
        Self {
            body,
            decoder: Decoder::default(),
        }
    }

    /// The next event; `None` at the end.
    ///
    /// # Cancel safety
    /// Cancel safe: if another branch wins, nothing is lost.
    pub(crate) async fn next(&mut self) -> Result<Option<Event>, EventError> {
        loop {
            if let Some(event) = self.decoder.next() {
                return Ok(Some(event));
            }
            match self.body.piece().await? {
                Some(piece) => self.decoder.push(&piece)?,
                None if self.decoder.is_half() => return Err(EventError::Half),
                None => return Ok(None),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn decode(pieces: &[&[u8]]) -> (Vec<Event>, bool) {
        let mut decoder = Decoder::default();
        let mut events = Vec::new();
        for piece in pieces {
            decoder.push(piece).unwrap();
            events.extend(std::iter::from_fn(|| decoder.next()));
        }
        (events, decoder.is_half())
    }

    #[test]
    fn events_are_the_same_however_they_are_cut() {
        let text = b": ping\r\ndata: {\"a\":1}\r\n\r\nevent: x\nid: 7\ndata:one\ndata: two\n\nerror: {}\n\n\n\ndata: [DONE]\n\n";
        let expected = vec![
            Event::Data(b"{\"a\":1}".to_vec()),
            Event::Data(b"one\ntwo".to_vec()),
            Event::Error(b"{}".to_vec()),
            Event::Data(b"[DONE]".to_vec()),
        ];
        assert_eq!(decode(&[text]), (expected.clone(), false));
        let bytes: Vec<&[u8]> = text.chunks(1).collect();
        assert_eq!(decode(&bytes), (expected.clone(), false));
        for at in 0..text.len() {
            let (a, b) = text.split_at(at);
            assert_eq!(decode(&[a, b]).0, expected, "cut at {at}");
        }
    }

    #[test]
    fn half_an_event_is_seen() {
        assert!(decode(&[b"data: {\"a\""]).1);
        assert!(decode(&[b"data: {}\n"]).1);
        assert!(!decode(&[b"data: {}\n\n"]).1);
        assert!(!decode(&[b"data: {}\n\n\n"]).1);
    }

    #[test]
    fn an_event_without_end_is_refused() {
        let mut decoder = Decoder::default();
        let piece = vec![b'x'; 1 << 20];
        let refused = (0..64).find(|_| {
            let refused = decoder.push(&piece).is_err();
            assert_eq!(decoder.next(), None);
            refused
        });
        assert_eq!(refused, Some(16));
    }
}
