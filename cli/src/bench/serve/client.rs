//! [`Client`]: requests to a server of OpenAI's API, and the arrival times of the pieces of their answers.

use std::convert::Infallible;
use std::fmt;
use std::pin::Pin;
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use genset_backend_common::EngineError;
use genset_hub::without_password;
use http_body::{Body, Frame, SizeHint};
use reqwest::header::{CONTENT_LENGTH, CONTENT_TYPE, HeaderValue};
use reqwest::{RequestBuilder, Response};
use tokio::time::Instant;

use crate::openai::{Event, Lines, Usage, base_of, client};

/// The number of bytes read from an error's body.
const MAX_ERROR_BYTES: usize = 64 << 10;

/// A client for one server. It keeps connections open and uses no proxy, because the server is what is measured.
#[derive(Clone)]
pub(super) struct Client {
    http: reqwest::Client,
    base: String,
    /// The URL to show: without name and password.
    shown: String,
    key: Option<String>,
}

/// Why a request has no answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Failure {
    pub(super) kind: FailureKind,
    /// The message of the server or the connection.
    pub(super) problem: String,
}

/// How a request failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum FailureKind {
    /// The server answered with this HTTP status.
    Status(u16),
    /// There was no connection.
    Connect,
    /// A connection or a stream ended too soon, or did not speak HTTP.
    Broken,
    /// The stream contained an error event.
    Event,
}

impl fmt::Display for FailureKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Status(status) => status.fmt(f),
            Self::Connect => f.write_str("connect"),
            Self::Broken => f.write_str("broken"),
            Self::Event => f.write_str("event"),
        }
    }
}

/// An answer, with the times at which a client saw it arrive.
#[derive(Debug)]
pub(super) struct Answer {
    /// When the request's body was passed to the connection.
    pub(super) sent: Instant,
    /// When each piece with content arrived.
    pub(super) pieces: Vec<Instant>,
    pub(super) ended: Instant,
    pub(super) text: String,
    pub(super) usage: Option<Usage>,
}

impl Client {
    /// # Errors
    /// `InvalidArgument` if this is not the URL of a server, or no header can have the key.
    pub(super) fn try_new(
        url: &str,
        key: Option<String>,
        silence: Duration,
    ) -> Result<Self, EngineError> {
        let is_sendable = |key: &String| HeaderValue::from_bytes(key.as_bytes()).is_ok();
        if !key.as_ref().is_none_or(is_sendable) {
            let problem = "has a character that no header can have, such as a line break";
            return Err(EngineError::invalid_argument("--api-key", problem));
        }
        let bad = |problem: String| EngineError::invalid_argument("URL", problem);
        // In text that is not a URL, a password cannot be told from the rest.
        let given = url.rsplit('@').next().unwrap_or_default();
        let base = base_of(url);
        let parsed = reqwest::Url::parse(&base)
            .map_err(|error| bad(format!("{given:?} is no URL: {error}")))?;
        if !matches!(parsed.scheme(), "http" | "https") {
            return Err(bad(format!(
                "{given:?} is no HTTP URL; give one such as http://127.0.0.1:8000"
            )));
        }
        let http = client()
            .read_timeout(silence)
            .build()
            .map_err(|error| bad(format!("{given:?} cannot be asked: {}", causes(&error))))?;
        Ok(Self {
            http,
            shown: without_password(&base),
            base,
            key,
        })
    }

    /// The server's address, safe to show.
    pub(super) fn shown(&self) -> &str {
        &self.shown
    }

    /// Requests JSON.
    pub(super) async fn get(&self, path: &str) -> Result<serde_json::Value, Failure> {
        let request = self.http.get(format!("{}{path}", self.base));
        self.whole(request).await
    }

    /// Sends JSON and reads JSON.
    pub(super) async fn post(
        &self,
        path: &str,
        body: &serde_json::Value,
    ) -> Result<serde_json::Value, Failure> {
        let request = self.http.post(format!("{}{path}", self.base));
        let request = request
            .header(CONTENT_TYPE, "application/json")
            .body(body.to_string());
        self.whole(request).await
    }

    async fn whole(&self, request: RequestBuilder) -> Result<serde_json::Value, Failure> {
        let response = self.send(request).await?;
        let body = response.bytes().await.map_err(|error| broken(&error))?;
        serde_json::from_slice(&body)
            .map_err(|error| broken_off(format!("an answer that is no JSON: {error}")))
    }

    /// Sends a request with `"stream": true` and reads its answer to the end.
    ///
    /// # Cancel safety
    /// Dropping the future closes the connection.
    pub(super) async fn stream(&self, path: &str, body: Bytes) -> Result<Answer, Failure> {
        let began = Instant::now();
        let sent = Arc::new(OnceLock::new());
        let request = self.http.post(format!("{}{path}", self.base));
        let request = request
            .header(CONTENT_TYPE, "application/json")
            .header(CONTENT_LENGTH, body.len())
            .body(reqwest::Body::wrap(Marked {
                bytes: Some(body),
                sent: Arc::clone(&sent),
            }));
        let response = self.send(request).await?;
        let sent = sent.get().copied().unwrap_or(began);
        read_stream(response, sent).await
    }

    async fn send(&self, request: RequestBuilder) -> Result<Response, Failure> {
        let request = match &self.key {
            Some(key) => request.bearer_auth(key),
            None => request,
        };
        let response = request.send().await.map_err(|error| broken(&error))?;
        if response.status().is_success() {
            return Ok(response);
        }
        let kind = FailureKind::Status(response.status().as_u16());
        let problem = error_text(response).await;
        Err(Failure { kind, problem })
    }
}

/// Reads an event stream to its end, so that the connection can be reused.
async fn read_stream(mut response: Response, sent: Instant) -> Result<Answer, Failure> {
    let mut answer = Answer {
        sent,
        pieces: Vec::new(),
        ended: sent,
        text: String::new(),
        usage: None,
    };
    let mut lines = Lines::default();
    let mut is_done = false;
    while let Some(piece) = response.chunk().await.map_err(|error| broken(&error))? {
        let now = Instant::now();
        lines.push(&piece).map_err(broken_off)?;
        while let Some(data) = lines.next_data() {
            if data == b"[DONE]" {
                is_done = true;
                answer.ended = now;
            } else {
                answer.take(data, now)?;
            }
        }
    }
    if is_done {
        Ok(answer)
    } else {
        Err(broken_off("the stream ended without [DONE]".into()))
    }
}

impl Answer {
    fn take(&mut self, data: &[u8], now: Instant) -> Result<(), Failure> {
        let event = |problem: String| Failure {
            kind: FailureKind::Event,
            problem,
        };
        let read: Event = serde_json::from_slice(data)
            .map_err(|error| event(format!("an event that cannot be read: {error}")))?;
        if let Some(error) = read.error {
            return Err(event(message_of(&error)));
        }
        self.usage = read.usage.or(self.usage);
        let before = self.text.len();
        for choice in read.choices {
            self.text.extend(choice.texts());
        }
        if self.text.len() > before {
            self.pieces.push(now);
        }
        Ok(())
    }
}

/// A request body that records when it is sent.
struct Marked {
    bytes: Option<Bytes>,
    sent: Arc<OnceLock<Instant>>,
}

impl Body for Marked {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        self.sent.get_or_init(Instant::now);
        Poll::Ready(self.bytes.take().map(|bytes| Ok(Frame::data(bytes))))
    }

    fn is_end_stream(&self) -> bool {
        self.bytes.is_none()
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.bytes.as_ref().map_or(0, |bytes| bytes.len() as u64))
    }
}

fn broken(error: &reqwest::Error) -> Failure {
    Failure {
        kind: match error.is_connect() {
            true => FailureKind::Connect,
            false => FailureKind::Broken,
        },
        problem: causes(error),
    }
}

/// The failure of an answer that is not whole.
fn broken_off(problem: String) -> Failure {
    let kind = FailureKind::Broken;
    Failure { kind, problem }
}

/// The causes of an error, or its own text if it has none.
fn causes(error: &dyn std::error::Error) -> String {
    let mut text = String::new();
    let mut next = Some(error);
    while let Some(error) = next {
        // The outermost error only says that a request failed, and repeats the URL.
        next = error.source();
        if next.is_none() || !text.is_empty() {
            text = match text.is_empty() {
                true => error.to_string(),
                false => format!("{text}: {error}"),
            };
        }
    }
    text
}

async fn error_text(mut response: Response) -> String {
    let mut body = Vec::new();
    while let Ok(Some(piece)) = response.chunk().await {
        body.extend_from_slice(&piece);
        if body.len() > MAX_ERROR_BYTES {
            break;
        }
    }
    match serde_json::from_slice::<serde_json::Value>(&body) {
        Ok(json) => message_of(json.get("error").unwrap_or(&json)),
        Err(_) => String::from_utf8_lossy(&body).chars().take(200).collect(),
    }
}

/// The message of an error object, in any of its formats.
fn message_of(error: &serde_json::Value) -> String {
    let message = error.get("message").unwrap_or(error);
    message
        .as_str()
        .map_or_else(|| message.to_string(), str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_password_in_the_url_is_sent_and_never_shown() {
        let client = |url| Client::try_new(url, None, Duration::from_secs(1));
        let found = client("https://user:secret@host:8080/v1/").unwrap();
        assert_eq!(found.shown(), "https://host:8080");
        assert_eq!(found.base, "https://user:secret@host:8080");
        assert_eq!(client("HOST:8080").unwrap().shown(), "http://HOST:8080");
        for url in ["https://user:secret@host:port", "ftp://user:secret@host"] {
            let error = client(url).err().unwrap().to_string();
            assert!(!error.contains("secret"), "{error}");
        }
    }

    #[test]
    fn what_is_said_is_taken_from_any_of_its_fields() {
        let now = Instant::now();
        let mut answer = Answer {
            sent: now,
            pieces: Vec::new(),
            ended: now,
            text: String::new(),
            usage: None,
        };
        for data in [
            r#"{"choices":[{"delta":{"role":"assistant","content":""}}]}"#,
            r#"{"choices":[{"delta":{"reasoning_content":"a","reasoning":"a"}}]}"#,
            r#"{"choices":[{"delta":{"content":"b"}}]}"#,
            r#"{"choices":[{"text":"c"}],"usage":null}"#,
            r#"{"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":3,"prompt_tokens_details":{"cached_tokens":4}}}"#,
        ] {
            answer.take(data.as_bytes(), now).unwrap();
        }
        assert_eq!((answer.text.as_str(), answer.pieces.len()), ("abc", 3));
        assert_eq!(answer.usage.unwrap().cached_tokens(), Some(4));
        let failure = answer
            .take(br#"{"error":{"message":"full"}}"#, now)
            .unwrap_err();
        assert_eq!(failure.problem, "full");
    }
}
