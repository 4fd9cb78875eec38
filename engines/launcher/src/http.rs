//! [`Client`]: HTTP requests to the server on the loopback interface, one connection each, never through a proxy. Dropping an
//! answer closes its connection; that is how these servers learn of a cancelled request.

use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt as _, Full};
use hyper::body::Incoming;
use hyper::client::conn::http1;
use hyper::header::{AUTHORIZATION, CONTENT_TYPE, HOST, HeaderMap, HeaderValue, RETRY_AFTER};
use hyper::{Method, Request, StatusCode};
use hyper_util::rt::TokioIo;
use serde::de::DeserializeOwned;
use serde_json::Value;
use tokio::net::TcpStream;
use tokio_util::sync::CancellationToken;
use tokio_util::task::{AbortOnDropHandle, TaskTracker};

use crate::key::ApiKey;

/// The default limit for a body that is read whole, in bytes.
const MAX_BODY_BYTES: usize = 4 << 20;

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
pub(crate) enum HttpError {
    #[error("it takes no connection: {0}")]
    Connect(#[source] std::io::Error),
    #[error("its connection broke: {0}")]
    Broken(#[from] hyper::Error),
    #[error("its answer is larger than {limit} bytes")]
    TooLarge { limit: usize },
    #[error("its answer is not what it should be: {0}")]
    Unreadable(#[from] serde_json::Error),
    #[error("a request could not be written: {0}")]
    Request(#[from] hyper::http::Error),
    #[error("it answered with {0}")]
    Status(StatusCode),
}

/// The server's address, and the tracker for its connection tasks.
#[derive(Debug, Clone)]
pub(crate) struct Client {
    address: SocketAddr,
    /// The header of every request, if the server requires a key.
    authorization: Option<HeaderValue>,
    tasks: TaskTracker,
    /// Ends all connections with the server, even if their answers are still held.
    over: CancellationToken,
}

/// The head of an answer, and its unread body.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: StatusCode,
    pub(crate) headers: HeaderMap,
    pub(crate) body: Body,
}

/// The body of an answer. Dropping it closes the connection.
#[derive(Debug)]
pub(crate) struct Body {
    incoming: Incoming,
    _connection: AbortOnDropHandle<()>,
}

impl Client {
    pub(crate) fn new(
        port: u16,
        key: &ApiKey,
        tasks: TaskTracker,
        over: CancellationToken,
    ) -> Self {
        Self {
            address: SocketAddr::from((Ipv4Addr::LOCALHOST, port)),
            authorization: key.header(),
            tasks,
            over,
        }
    }

    /// Sends a GET and reads only the status.
    pub(crate) async fn status(&self, path: &str) -> Result<StatusCode, HttpError> {
        Ok(self.answer_to_get(path).await?.status)
    }

    /// Sends a GET and reads the JSON answer.
    pub(crate) async fn get<T: DeserializeOwned>(&self, path: &str) -> Result<T, HttpError> {
        self.answer_to_get(path).await?.json().await
    }

    /// Sends a GET and reads the text answer.
    pub(crate) async fn text(&self, path: &str) -> Result<String, HttpError> {
        let answer = self.answer_to_get(path).await?;
        if !answer.status.is_success() {
            return Err(HttpError::Status(answer.status));
        }
        let body = answer.body.read_all().await?;
        Ok(String::from_utf8_lossy(&body).into_owned())
    }

    async fn answer_to_get(&self, path: &str) -> Result<Answer, HttpError> {
        let request = self.request(Method::GET, path).body(Full::default())?;
        self.send(request).await
    }

    /// Posts JSON and reads the JSON answer.
    pub(crate) async fn ask<T: DeserializeOwned>(
        &self,
        path: &str,
        body: &Value,
    ) -> Result<T, HttpError> {
        self.post(path, body.to_string(), &[]).await?.json().await
    }

    /// Posts JSON.
    ///
    /// # Cancel safety
    /// Dropping the future closes the connection.
    pub(crate) async fn post(
        &self,
        path: &str,
        body: impl Into<Bytes>,
        headers: &[(&str, &str)],
    ) -> Result<Answer, HttpError> {
        let mut request = self
            .request(Method::POST, path)
            .header(CONTENT_TYPE, "application/json");
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        self.send(request.body(Full::new(body.into()))?).await
    }

    fn request(&self, method: Method, path: &str) -> hyper::http::request::Builder {
        let request = Request::builder().method(method).uri(path);
        let request = request.header(HOST, self.address.to_string());
        match &self.authorization {
            Some(authorization) => request.header(AUTHORIZATION, authorization),
            None => request,
        }
    }

    async fn send(&self, request: Request<Full<Bytes>>) -> Result<Answer, HttpError> {
        let stream = TcpStream::connect(self.address)
            .await
            .map_err(HttpError::Connect)?;
        stream.set_nodelay(true).map_err(HttpError::Connect)?;
        let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
        let over = self.over.clone();
        let task = self.tasks.spawn(async move {
            tokio::select! {
                biased;
                () = over.cancelled() => {}
                // The reader of the answer receives any error of the connection.
                _ = connection => {}
            }
        });
        let connection = AbortOnDropHandle::new(task);
        let (head, incoming) = sender.send_request(request).await?.into_parts();
        let body = Body {
            incoming,
            _connection: connection,
        };
        Ok(Answer {
            status: head.status,
            headers: head.headers,
            body,
        })
    }
}

impl Answer {
    /// Reads the answer as JSON, if the status is a success.
    pub(crate) async fn json<T: DeserializeOwned>(self) -> Result<T, HttpError> {
        if !self.status.is_success() {
            return Err(HttpError::Status(self.status));
        }
        Ok(serde_json::from_slice(&self.body.read_all().await?)?)
    }

    /// The value of `retry-after`.
    pub(crate) fn retry_after(&self) -> Option<Duration> {
        let seconds = self
            .headers
            .get(RETRY_AFTER)?
            .to_str()
            .ok()?
            .trim()
            .parse()
            .ok()?;
        Some(Duration::from_secs(seconds))
    }
}

impl Body {
    /// The next piece; `None` at the end.
    ///
    /// # Cancel safety
    /// Cancel safe: if another branch wins, nothing is lost.
    pub(crate) async fn piece(&mut self) -> Result<Option<Bytes>, HttpError> {
        while let Some(frame) = self.incoming.frame().await {
            if let Ok(piece) = frame?.into_data() {
                return Ok(Some(piece));
            }
        }
        Ok(None)
    }

    pub(crate) async fn read_all(self) -> Result<Vec<u8>, HttpError> {
        self.read_up_to(MAX_BODY_BYTES).await
    }

    /// Reads the whole body, up to `limit` bytes.
    pub(crate) async fn read_up_to(mut self, limit: usize) -> Result<Vec<u8>, HttpError> {
        let mut all = Vec::new();
        while let Some(piece) = self.piece().await? {
            if all.len() + piece.len() > limit {
                return Err(HttpError::TooLarge { limit });
            }
            all.extend_from_slice(&piece);
        }
        Ok(all)
    }
}
