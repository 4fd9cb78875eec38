//! One HTTP request and its response.

use std::pin::pin;

use bytes::Bytes;
use futures_util::future::{Either, select};
use http::header::{ACCEPT, CONTENT_LENGTH, CONTENT_TYPE, HOST, LOCATION, USER_AGENT};
use http::{HeaderMap, Request, Uri};
use http_body_util::{BodyExt as _, Empty};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;

use super::connect::Stream;
use super::{Failed, Problem};
use crate::budget::MemoryShare;
use crate::error::ApiError;

/// The longest URL that is read, in bytes.
const MAX_URL_BYTES: usize = 8 << 10;

/// What a URL names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Target {
    uri: Uri,
    host: String,
    is_tls: bool,
}

/// The response.
#[derive(Debug)]
pub(super) enum Answer {
    Content(Vec<u8>),
    /// The URL to ask next.
    Elsewhere(String),
}

impl Target {
    /// # Errors
    /// [`Problem::NoUrl`] unless it is an `http` or `https` URL with a host and without credentials.
    pub(super) fn parse(url: &str) -> Result<Self, Problem> {
        let uri = Some(url).filter(|url| url.len() <= MAX_URL_BYTES);
        let uri: Uri = uri.and_then(|url| url.parse().ok()).ok_or(Problem::NoUrl)?;
        let is_tls = match uri.scheme_str() {
            Some("https") => true,
            Some("http") => false,
            _ => return Err(Problem::NoUrl),
        };
        let authority = uri.authority().ok_or(Problem::NoUrl)?;
        // Port 0 is invalid, and the parser drops one that does not fit.
        let has_port = authority.as_str().len() > authority.host().len();
        let is_good = !authority.as_str().contains('@')
            && (!has_port || authority.port_u16().is_some_and(|port| port > 0));
        let host = authority.host().trim_matches(['[', ']']);
        if !is_good || host.is_empty() {
            return Err(Problem::NoUrl);
        }
        let host = host.to_ascii_lowercase();
        Ok(Self { host, is_tls, uri })
    }

    /// The target of a redirect. Refuses a redirect from HTTPS to plain HTTP.
    pub(super) fn follow(&self, location: &str) -> Result<Self, Problem> {
        let next = Self::parse(&self.resolved(location))?;
        if self.is_tls && !next.is_tls {
            return Err(Problem::NoUrl);
        }
        Ok(next)
    }

    /// The whole URL of a reference, which may be relative.
    ///
    /// # Source
    /// RFC 3986, section 5.2.
    fn resolved(&self, reference: &str) -> String {
        let (path, query) = match reference.find(['?', '#']) {
            Some(at) => reference.split_at(at),
            None => (reference, ""),
        };
        let scheme = if self.is_tls { "https" } else { "http" };
        if path.starts_with("//") {
            return format!("{scheme}:{reference}");
        }
        let first = path.split('/').next().unwrap_or_default();
        if first.contains(':') {
            return reference.to_owned();
        }
        let authority = self.authority();
        let path = match path {
            "" => self.uri.path().to_owned(),
            path if path.starts_with('/') => path.to_owned(),
            path => beside(self.uri.path(), path),
        };
        format!("{scheme}://{authority}{path}{query}")
    }

    fn authority(&self) -> &str {
        self.uri
            .authority()
            .map_or("", |authority| authority.as_str())
    }

    pub(super) fn host(&self) -> &str {
        &self.host
    }

    pub(super) fn port(&self) -> u16 {
        let usual = if self.is_tls { 443 } else { 80 };
        self.uri.port_u16().unwrap_or(usual)
    }

    pub(super) const fn is_tls(&self) -> bool {
        self.is_tls
    }

    fn request(&self) -> Result<Request<Empty<Bytes>>, Problem> {
        let path = self.uri.path_and_query().map_or("/", |path| path.as_str());
        let request = Request::get(path)
            .header(HOST, self.authority())
            .header(USER_AGENT, concat!("genset/", env!("CARGO_PKG_VERSION")))
            .header(ACCEPT, "image/png, image/jpeg, image/gif, image/webp");
        request.body(Empty::new()).map_err(|_| Problem::NoUrl)
    }
}

/// The path of `relative` beside the last part of `path`.
fn beside(path: &str, relative: &str) -> String {
    let folder = path.rsplit_once('/').map_or("", |(folder, _)| folder);
    let mut parts: Vec<&str> = folder.split('/').collect();
    for part in relative.split('/') {
        match part {
            "." => {}
            // The first part is empty: what stands before the first slash.
            ".." => parts.truncate(parts.len().saturating_sub(1).max(1)),
            part => parts.push(part),
        }
    }
    parts.join("/")
}

/// Sends the request and reads at most `max_bytes`, which `memory` holds.
///
/// # Errors
/// What is wrong with the response, or a 503.
pub(super) async fn ask(
    stream: Box<dyn Stream>,
    target: &Target,
    max_bytes: usize,
    memory: &mut MemoryShare,
) -> Result<Answer, Failed> {
    let request = target.request()?;
    let handshake = http1::Builder::new()
        .max_buf_size(64 << 10)
        .handshake(TokioIo::new(stream));
    let (mut sender, connection) = handshake.await.map_err(|_| Problem::Broken)?;
    let exchange = async {
        let answer = sender.send_request(request).await;
        let (head, mut body) = answer.map_err(|_| Problem::Broken)?.into_parts();
        if head.status.is_redirection() {
            let location = head.headers.get(LOCATION).and_then(|to| to.to_str().ok());
            let location = location.ok_or(Problem::Status(head.status.as_u16()))?;
            return Ok(Answer::Elsewhere(location.to_owned()));
        }
        if head.status != http::StatusCode::OK {
            return Err(Problem::Status(head.status.as_u16()).into());
        }
        check_head(&head.headers, max_bytes)?;
        let mut content = Vec::new();
        while let Some(frame) = body.frame().await {
            let Ok(piece) = frame.map_err(|_| Problem::Broken)?.into_data() else {
                continue;
            };
            if content.len() + piece.len() > max_bytes {
                return Err(Problem::TooLarge.into());
            }
            reserve(&mut content, piece.len(), max_bytes, memory).map_err(Failed::Refused)?;
            content.extend_from_slice(&piece);
        }
        Ok(Answer::Content(content))
    };
    // The connection has no task of its own: it lives as long as this future.
    match select(pin!(exchange), pin!(connection)).await {
        Either::Left((answer, _)) => answer,
        Either::Right((_, exchange)) => exchange.await,
    }
}

/// Makes room for `more` bytes. Doubles the capacity up to `max_bytes`. `memory` holds the capacity, and also the old one while
/// the bytes move.
fn reserve(
    content: &mut Vec<u8>,
    more: usize,
    max_bytes: usize,
    memory: &mut MemoryShare,
) -> Result<(), ApiError> {
    let (needed, old) = (content.len() + more, content.capacity());
    if needed <= old {
        return Ok(());
    }
    let room = (2 * needed).min(max_bytes);
    memory.grow(room)?;
    content.reserve_exact(room - content.len());
    memory.shrink(old);
    Ok(())
}

/// Refuses a response whose headers say that it is too large, or not an image.
fn check_head(headers: &HeaderMap, max_bytes: usize) -> Result<(), Problem> {
    let text = |name| headers.get(name).and_then(|value| value.to_str().ok());
    let length = text(CONTENT_LENGTH).and_then(|length| length.parse::<u64>().ok());
    if length
        .is_some_and(|length| usize::try_from(length).map_or(true, |length| length > max_bytes))
    {
        return Err(Problem::TooLarge);
    }
    let media_type = text(CONTENT_TYPE).unwrap_or("application/octet-stream");
    let is_image = media_type.len() > 6 && media_type[..6].eq_ignore_ascii_case("image/");
    let is_anything = media_type.to_ascii_lowercase().contains("octet-stream");
    (is_image || is_anything)
        .then_some(())
        .ok_or(Problem::NoImage)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::budget::MemoryBudget;

    #[test]
    fn a_redirect_may_be_relative() {
        let target = Target::parse("https://a.example:8443/dir/sub/cat.png?x=1").unwrap();
        for (location, expected) in [
            ("https://b.example/x", "https://b.example/x"),
            ("//b.example/x?y=1", "https://b.example/x?y=1"),
            ("/x", "https://a.example:8443/x"),
            (
                "dog.png?at=b:/c",
                "https://a.example:8443/dir/sub/dog.png?at=b:/c",
            ),
            ("./dog.png", "https://a.example:8443/dir/sub/dog.png"),
            ("../dog.png", "https://a.example:8443/dir/dog.png"),
            ("../../../dog.png", "https://a.example:8443/dog.png"),
            ("?x=2", "https://a.example:8443/dir/sub/cat.png?x=2"),
        ] {
            let next = target.follow(location).unwrap();
            assert_eq!(next.uri.to_string(), expected, "{location}");
        }
        for location in ["http://a.example/x", "ftp://a.example/x", "//"] {
            assert!(target.follow(location).is_err(), "{location}");
        }
    }

    #[test]
    fn the_room_that_an_answer_has_to_grow_is_held_too() {
        let mut memory = MemoryBudget::new(1 << 20).share();
        let mut content = Vec::new();
        for more in [1, 10, 100, 1000, 300] {
            reserve(&mut content, more, 1500, &mut memory).unwrap();
            content.resize(content.len() + more, 0);
            assert_eq!(memory.bytes(), content.capacity());
        }
        assert_eq!(memory.bytes(), 1500);
    }
}
