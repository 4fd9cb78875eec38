//! A client that writes HTTP/1.1 by hand, so that tests can break every rule and see every byte.

use std::net::SocketAddr;
use std::time::Duration;

use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

/// A test fails after this much silence.
const PATIENCE: Duration = Duration::from_secs(60);

/// Waits for a future that must complete soon.
pub(crate) async fn soon<T>(what: impl Future<Output = T>) -> T {
    tokio::time::timeout(PATIENCE, what)
        .await
        .expect("it never came")
}

/// An answer, read to its end.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Response {
    pub(crate) status: u16,
    pub(crate) headers: Vec<(String, String)>,
    pub(crate) body: Vec<u8>,
}

impl Response {
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        let found = self.headers.iter().find(|(known, _)| known == name);
        found.map(|(_, value)| value.as_str())
    }

    pub(crate) fn text(&self) -> String {
        String::from_utf8(self.body.clone()).expect("the body is UTF-8")
    }

    pub(crate) fn json(&self) -> Value {
        serde_json::from_slice(&self.body)
            .unwrap_or_else(|error| panic!("{error} in {:?}", self.text()))
    }

    /// The text of the first choice of a whole answer.
    pub(crate) fn content(&self) -> String {
        let choice = &self.json()["choices"][0];
        let text = choice["message"]["content"]
            .as_str()
            .or(choice["text"].as_str());
        text.unwrap_or_else(|| panic!("no text in {}", self.text()))
            .to_owned()
    }

    /// The data of each event of a streamed answer.
    pub(crate) fn events(&self) -> Vec<String> {
        let text = self.text();
        let events = text.split_terminator("\n\n").map(|event| {
            let data = event.strip_prefix("data: ");
            data.unwrap_or_else(|| panic!("no event: {event:?}"))
                .to_owned()
        });
        events.collect()
    }

    /// The JSON of each event of a streamed answer, without the last event, `[DONE]`.
    pub(crate) fn chunks(&self) -> Vec<Value> {
        let events = self.events().into_iter();
        let chunks = events.filter(|event| event != "[DONE]");
        chunks
            .map(|chunk| serde_json::from_str(&chunk).expect("an event is JSON"))
            .collect()
    }

    /// The JSON of each event of a streamed answer; each event has the name of its type.
    pub(crate) fn named_events(&self) -> Vec<Value> {
        let event = |event: &str| {
            let (name, data) = event.split_once('\n').expect("two lines");
            let data = data.strip_prefix("data: ").expect("data");
            let data: Value = serde_json::from_str(data).expect("an event is JSON");
            let kind = data["type"].as_str().expect("a type");
            assert_eq!(name, format!("event: {kind}"));
            data
        };
        self.text().split_terminator("\n\n").map(event).collect()
    }

    /// The text of choice `index` of a streamed answer, and its finish reason.
    pub(crate) fn streamed(&self, index: usize) -> (String, Option<String>) {
        let (mut text, mut reason) = (String::new(), None);
        for chunk in self.chunks() {
            for choice in chunk["choices"].as_array().into_iter().flatten() {
                if choice["index"] != index {
                    continue;
                }
                let piece = choice["delta"]["content"]
                    .as_str()
                    .or(choice["text"].as_str());
                text += piece.unwrap_or_default();
                reason = choice["finish_reason"]
                    .as_str()
                    .map(str::to_owned)
                    .or(reason);
            }
        }
        (text, reason)
    }

    /// `status`, `param` and `code` of a refusal, and its message.
    pub(crate) fn refusal(&self) -> (u16, Option<String>, Option<String>, String) {
        let error = &self.json()["error"];
        let field = |name: &str| error[name].as_str().map(str::to_owned);
        let message = field("message").unwrap_or_else(|| panic!("no error in {}", self.text()));
        (self.status, field("param"), field("code"), message)
    }

    /// Checks that this is a 400 because of `param`. Returns its message.
    #[track_caller]
    pub(crate) fn blames(&self, param: &str) -> String {
        let (status, blamed, _, message) = self.refusal();
        assert_eq!((status, blamed.as_deref()), (400, Some(param)), "{message}");
        message
    }

    /// Checks that this is a 400 because the server or the model does not support `param`. Returns its message.
    #[track_caller]
    pub(crate) fn does_not_support(&self, param: &str) -> String {
        let code = self.refusal().2;
        assert_eq!(code.as_deref(), Some("unsupported_parameter"), "{param}");
        self.blames(param)
    }
}

/// The bytes of a POST with a JSON body.
pub(crate) fn post(path: &str, body: impl AsRef<[u8]>) -> Vec<u8> {
    request("POST", path, "", body)
}

/// The bytes of a GET.
pub(crate) fn get(path: &str) -> Vec<u8> {
    format!("GET {path} HTTP/1.1\r\nhost: localhost\r\n\r\n").into_bytes()
}

/// The bytes of a request with a body; `headers` are whole lines, each with its line break.
pub(crate) fn request(method: &str, path: &str, headers: &str, body: impl AsRef<[u8]>) -> Vec<u8> {
    let body = body.as_ref();
    let head = format!(
        "{method} {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n{headers}content-length: {}\r\n\r\n",
        body.len()
    );
    [head.as_bytes(), body].concat()
}

/// What remains of a body.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Left {
    Bytes(usize),
    Chunks,
    ToTheEnd,
    Nothing,
}

/// One connection.
#[derive(Debug)]
pub(crate) struct Client {
    stream: TcpStream,
    buffer: Vec<u8>,
    left: Left,
    events: String,
}

impl Client {
    pub(crate) async fn connect(address: SocketAddr) -> Self {
        let stream = soon(TcpStream::connect(address))
            .await
            .expect("the server accepts");
        Self {
            stream,
            buffer: Vec::new(),
            left: Left::Nothing,
            events: String::new(),
        }
    }

    /// Sends bytes. A closed connection is not an error: its answer may still be there.
    pub(crate) async fn send(&mut self, bytes: impl AsRef<[u8]>) {
        drop(soon(self.stream.write_all(bytes.as_ref())).await);
    }

    /// Reads more; false at the end of the connection.
    async fn fill(&mut self) -> bool {
        matches!(soon(self.stream.read_buf(&mut self.buffer)).await, Ok(1..))
    }

    /// Whether the server closes without sending another byte.
    pub(crate) async fn is_closed(&mut self) -> bool {
        self.buffer.is_empty() && !self.fill().await
    }

    /// Reads to the end of the connection.
    pub(crate) async fn drain(&mut self) {
        self.buffer.clear();
        while self.fill().await {
            self.buffer.clear();
        }
    }

    fn take_through(&mut self, mark: &[u8]) -> Option<Vec<u8>> {
        let at = self
            .buffer
            .windows(mark.len())
            .position(|window| window == mark)?;
        Some(self.buffer.drain(..at + mark.len()).collect())
    }

    async fn read_through(&mut self, mark: &[u8]) -> Option<Vec<u8>> {
        loop {
            if let Some(taken) = self.take_through(mark) {
                return Some(taken);
            }
            if !self.fill().await {
                return None;
            }
        }
    }

    /// Reads the status and headers of the next answer; `None` when the connection ends instead.
    pub(crate) async fn head(&mut self, method: &str) -> Option<Response> {
        let head = self.read_through(b"\r\n\r\n").await?;
        let head = String::from_utf8(head).expect("a head is ASCII");
        let mut lines = head.trim_end().split("\r\n");
        let status = lines.next().and_then(|line| line.split(' ').nth(1));
        let status = status
            .and_then(|status| status.parse().ok())
            .expect("a status line");
        let split = |line: &str| {
            let (name, value) = line.split_once(':').expect("a header");
            (name.to_ascii_lowercase(), value.trim().to_owned())
        };
        let response = Response {
            status,
            headers: lines.map(split).collect(),
            body: Vec::new(),
        };
        let length = response
            .header("content-length")
            .and_then(|length| length.parse().ok());
        self.left = match (method, status, length) {
            ("HEAD", _, _) | (_, 100..200 | 204 | 304, _) => Left::Nothing,
            (_, _, Some(length)) => Left::Bytes(length),
            _ if response.header("transfer-encoding") == Some("chunked") => Left::Chunks,
            _ => Left::ToTheEnd,
        };
        Some(response)
    }

    async fn read_exactly(&mut self, count: usize) -> Vec<u8> {
        while self.buffer.len() < count {
            assert!(self.fill().await, "the body broke off");
        }
        self.buffer.drain(..count).collect()
    }

    /// Reads the next piece of the body; `None` at its end.
    pub(crate) async fn piece(&mut self) -> Option<Vec<u8>> {
        match self.left {
            Left::Nothing => None,
            Left::Bytes(count) => {
                self.left = Left::Nothing;
                Some(self.read_exactly(count).await)
            }
            Left::ToTheEnd => {
                while self.fill().await {}
                self.left = Left::Nothing;
                Some(std::mem::take(&mut self.buffer))
            }
            Left::Chunks => {
                let line = self
                    .read_through(b"\r\n")
                    .await
                    .expect("the body broke off");
                let digits = String::from_utf8(line).expect("a chunk size");
                let size = usize::from_str_radix(digits.trim(), 16).expect("a chunk size");
                let mut chunk = self.read_exactly(size + 2).await;
                chunk.truncate(size);
                if size == 0 {
                    self.left = Left::Nothing;
                    return None;
                }
                Some(chunk)
            }
        }
    }

    /// Reads the next whole answer; `None` when the connection ends instead.
    pub(crate) async fn response_to(&mut self, method: &str) -> Option<Response> {
        let mut response = self.head(method).await?;
        while let Some(piece) = self.piece().await {
            response.body.extend(piece);
        }
        Some(response)
    }

    /// Reads the next whole answer.
    pub(crate) async fn response(&mut self) -> Response {
        self.response_to("POST").await.expect("an answer")
    }

    /// Reads the data of the next event of a streamed answer whose head was read; `None` at the end. Comments are skipped: on a
    /// busy machine a stream may be silent for long.
    pub(crate) async fn event(&mut self) -> Option<String> {
        loop {
            if let Some((event, rest)) = self.events.split_once("\n\n") {
                let event = event.to_owned();
                self.events = rest.to_owned();
                if event.starts_with(':') {
                    continue;
                }
                let data = event.strip_prefix("data: ").expect("an event");
                return Some(data.to_owned());
            }
            let piece = self.piece().await?;
            self.events += &String::from_utf8(piece).expect("an event is UTF-8");
        }
    }
}
