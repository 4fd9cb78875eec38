//! OpenAI's API as a client sees it, for `genset bench serve`, which measures servers, and `genset conform --url`, which tests
//! them. Each sends its own requests.

use std::time::Duration;

use reqwest::{Client, ClientBuilder};
use serde::Deserialize;
use serde_json::Value;

/// The time limit for connecting.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// The longest line of a stream, in bytes.
const MAX_LINE_BYTES: usize = 16 << 20;

/// The address of a server, as typed with or without its scheme and the API's version.
pub(crate) fn base_of(url: &str) -> String {
    let base = match url.contains("://") {
        true => url.to_owned(),
        false => format!("http://{url}"),
    };
    base.trim_end_matches('/')
        .trim_end_matches("/v1")
        .to_owned()
}

/// A client without a proxy, because the server is what is measured or tested.
pub(crate) fn client() -> ClientBuilder {
    // An error means that a provider is already installed, which is fine.
    let _ = rustls::crypto::ring::default_provider().install_default();
    Client::builder()
        .user_agent(concat!("genset/", env!("CARGO_PKG_VERSION")))
        .no_proxy()
        .connect_timeout(CONNECT_TIMEOUT)
}

/// A stream event of chats and of completions.
#[derive(Debug, Deserialize)]
pub(crate) struct Event {
    #[serde(default)]
    pub(crate) choices: Vec<Choice>,
    pub(crate) usage: Option<Usage>,
    pub(crate) error: Option<Value>,
}

#[derive(Debug, Deserialize)]
pub(crate) struct Choice {
    text: Option<String>,
    delta: Option<Delta>,
    pub(crate) finish_reason: Option<String>,
}

#[derive(Debug, Deserialize)]
struct Delta {
    content: Option<String>,
    reasoning_content: Option<String>,
    /// Another name of `reasoning_content`. A server may send both.
    reasoning: Option<String>,
}

impl Choice {
    /// Its texts, those of reasoning included.
    pub(crate) fn texts(self) -> impl Iterator<Item = String> {
        let delta = self.delta;
        let delta = delta.map(|it| [it.reasoning_content.or(it.reasoning), it.content]);
        delta.into_iter().flatten().flatten().chain(self.text)
    }
}

/// The server's token counts.
#[derive(Debug, Clone, Copy, Deserialize)]
pub(crate) struct Usage {
    pub(crate) prompt_tokens: u64,
    #[serde(default)]
    pub(crate) completion_tokens: u64,
    prompt_tokens_details: Option<PromptDetails>,
}

#[derive(Debug, Clone, Copy, Deserialize)]
struct PromptDetails {
    cached_tokens: Option<u64>,
}

impl Usage {
    /// The number of prompt tokens that were in a prefix cache, if the server reports it.
    pub(crate) fn cached_tokens(&self) -> Option<u64> {
        self.prompt_tokens_details?.cached_tokens
    }
}

/// The lines of a stream that arrives in arbitrary pieces.
#[derive(Debug, Default)]
pub(crate) struct Lines {
    buffer: Vec<u8>,
    /// The number of consumed bytes in the buffer.
    used: usize,
}

impl Lines {
    /// # Errors
    /// The problem, for an endless line.
    pub(crate) fn push(&mut self, piece: &[u8]) -> Result<(), String> {
        self.buffer.drain(..self.used);
        self.used = 0;
        if self.buffer.len() > MAX_LINE_BYTES {
            return Err(format!(
                "a line of the stream is longer than {MAX_LINE_BYTES} bytes"
            ));
        }
        self.buffer.extend_from_slice(piece);
        Ok(())
    }

    /// Returns the data of the next complete line that has data.
    pub(crate) fn next_data(&mut self) -> Option<&[u8]> {
        loop {
            let rest = self.buffer.get(self.used..)?;
            let length = rest.iter().position(|byte| *byte == b'\n')?;
            let begin = self.used;
            self.used += length + 1;
            let is_data = rest.starts_with(b"data:");
            if is_data {
                let line = self.buffer.get(begin + b"data:".len()..begin + length)?;
                return Some(line.trim_ascii());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_url_is_taken_with_and_without_its_version() {
        for url in ["http://a:1", "http://a:1/", "http://a:1/v1", "a:1/v1/"] {
            assert_eq!(base_of(url), "http://a:1");
        }
    }

    #[test]
    fn lines_are_the_same_however_they_are_cut() {
        let text = b": ping\r\ndata: {\"a\":1}\r\n\r\nevent: x\ndata:[DONE]\n\n";
        for size in 1..text.len() {
            let mut lines = Lines::default();
            let mut found = Vec::new();
            for piece in text.chunks(size) {
                lines.push(piece).unwrap();
                while let Some(data) = lines.next_data() {
                    found.push(String::from_utf8(data.to_vec()).unwrap());
                }
            }
            assert_eq!(found, ["{\"a\":1}", "[DONE]"], "pieces of {size}");
        }
    }

    #[test]
    fn a_line_without_end_is_refused() {
        let mut lines = Lines::default();
        let piece = vec![b'x'; 1 << 20];
        let refused = (0..64).find(|_| lines.push(&piece).is_err());
        assert_eq!(refused, Some(17));
    }
}
