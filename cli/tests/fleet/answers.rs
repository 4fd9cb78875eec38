//! Streamed answers, read as a client reads them.

use std::net::SocketAddr;

use serde_json::{Value, json};

use crate::support::{Exchange, done_events, text_of};

/// A stream whose answer has begun.
pub(crate) struct Stream {
    exchange: Exchange,
    read: String,
}

/// How a stream ended.
#[derive(Debug)]
pub(crate) enum End {
    /// The answer is complete, with this many tokens.
    Done(u64),
    /// An error event, which is the last event.
    Error(Value),
}

impl Stream {
    /// Requests `max_tokens` tokens; resolves when the answer begins.
    ///
    /// # Errors
    /// The server's response if it is not an answer.
    pub(crate) async fn begin(address: SocketAddr, max_tokens: u64) -> Result<Self, String> {
        Self::begin_of("tiny-chat", address, max_tokens).await
    }

    /// Like [`begin`](Self::begin), for a model with another name.
    pub(crate) async fn begin_of(
        model: &str,
        address: SocketAddr,
        max_tokens: u64,
    ) -> Result<Self, String> {
        let mut body = chat(max_tokens, true);
        body["model"] = model.into();
        let body = body.to_string();
        let exchange = Exchange::try_begin(address, "POST", "/v1/chat/completions", &body)
            .await
            .map_err(|error| error.to_string())?;
        if exchange.status == 200 {
            let read = String::new();
            return Ok(Self { exchange, read });
        }
        let response = exchange.response().await;
        Err(format!("{} {}", response.status, response.body))
    }

    /// Waits for the first text.
    pub(crate) async fn until_text(&mut self) {
        while !self.read.contains("\"content\":\"") {
            self.read += &self.exchange.first_piece().await;
        }
    }

    /// Reads to the end and returns the text. The answer must be complete.
    pub(crate) async fn whole_text(mut self) -> String {
        self.read += &self.exchange.rest().await;
        text_of(&done_events(&self.read))
    }

    /// Reads to the end.
    pub(crate) async fn end(mut self) -> End {
        self.read += &self.exchange.rest().await;
        let events = self.read.split_terminator("\n\n");
        let events: Vec<&str> = events.filter(|event| !event.starts_with(':')).collect();
        let data = |event: &&str| event.strip_prefix("data: ").expect("an event").to_owned();
        let last = events.last().map(data).expect("a stream with events");
        if last == "[DONE]" {
            let usage = events.iter().rev().nth(1).map(data).expect("a usage");
            let usage: Value = serde_json::from_str(&usage).expect("JSON");
            let tokens = usage["usage"]["completion_tokens"].as_u64();
            return End::Done(tokens.unwrap_or_else(|| panic!("no usage: {}", self.read)));
        }
        let last: Value = serde_json::from_str(&last).expect("JSON");
        assert!(
            last["error"].is_object(),
            "neither whole nor an error: {}",
            self.read
        );
        End::Error(last["error"].clone())
    }
}

/// A greedy chat that ignores end-of-sequence tokens.
pub(crate) fn chat(max_tokens: u64, is_stream: bool) -> Value {
    let mut body = json!({
        "model": "tiny-chat",
        "ignore_eos": true,
        "temperature": 0,
        "max_tokens": max_tokens,
        "messages": [{"role": "user", "content": "hello"}],
    });
    if is_stream {
        body["stream"] = true.into();
        body["stream_options"] = json!({"include_usage": true});
    }
    body
}
