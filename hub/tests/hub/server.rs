//! A local hub with the real one's protocol and faults on demand.

use std::collections::{BTreeMap, BTreeSet};
use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use bytes::Bytes;
use http_body_util::{BodyExt, StreamBody, combinators::BoxBody};
use hyper::body::{Frame, Incoming};
use hyper::service::service_fn;
use hyper::{Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use serde_json::{Value, json};
use sha1::Digest as _;
use tokio::net::TcpListener;
use tokio::task::JoinSet;

pub(crate) const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

type Body = BoxBody<Bytes, io::Error>;

/// A fault in one response.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Fault {
    /// A status, with this `X-Error-Code` and `Retry-After`.
    Status(u16, &'static str, Option<u64>),
    /// The response ends after this many bytes, as if it were complete.
    Cut(usize),
    /// The connection breaks after at most this many bytes.
    Break(usize),
    /// No more bytes arrive after this many.
    Hang(usize),
    /// Range requests are ignored: the response begins at 0.
    NoRanges,
    /// Wrong bytes arrive.
    Wrong,
    /// Too many bytes arrive.
    TooMany,
}

#[derive(Default)]
pub(crate) struct Shared {
    pub(crate) files: BTreeMap<String, (Vec<u8>, bool)>,
    /// Wrong lengths to report.
    pub(crate) sizes: BTreeMap<String, u64>,
    /// Consumed from the front, by file path or `api`.
    pub(crate) faults: BTreeMap<String, Vec<Fault>>,
    /// Every request: its path, its range, whether it had a token.
    pub(crate) seen: Vec<(String, Option<String>, bool)>,
    pub(crate) token: Option<String>,
    pub(crate) gone: BTreeSet<String>,
}

/// A running hub. Dropping it stops it.
pub(crate) struct FakeHub {
    pub(crate) shared: Arc<Mutex<Shared>>,
    pub(crate) address: SocketAddr,
    _tasks: JoinSet<()>,
}

impl FakeHub {
    /// Starts a hub with these files; those that end in `.safetensors` or `.gguf` are large files with a SHA-256.
    pub(crate) async fn start(files: &[(&str, &[u8])]) -> Self {
        let shared = Arc::new(Mutex::new(Shared::default()));
        for (name, content) in files {
            let is_large = name.ends_with(".safetensors") || name.ends_with(".gguf");
            shared
                .lock()
                .files
                .insert((*name).into(), (content.to_vec(), is_large));
        }
        let listener = TcpListener::bind("127.0.0.1:0")
            .await
            .expect("as the tests have it");
        let address = listener.local_addr().expect("as the tests have it");
        let state = Arc::clone(&shared);
        let mut tasks = JoinSet::new();
        tasks.spawn(async move {
            let mut connections = JoinSet::new();
            while let Ok((connection, _)) = listener.accept().await {
                let state = Arc::clone(&state);
                connections.spawn(async move {
                    let answer = service_fn(move |request| {
                        let answer = state.lock().answer(&request, address);
                        async { Ok::<_, Infallible>(answer) }
                    });
                    let server = hyper::server::conn::http1::Builder::new();
                    let _ = server
                        .serve_connection(TokioIo::new(connection), answer)
                        .await;
                });
            }
        });
        Self {
            shared,
            address,
            _tasks: tasks,
        }
    }

    pub(crate) fn fail(&self, path: &str, faults: &[Fault]) {
        self.shared
            .lock()
            .faults
            .insert(path.into(), faults.to_vec());
    }

    /// The requests for content so far.
    pub(crate) fn downloads(&self) -> Vec<(String, Option<String>, bool)> {
        let seen = self.shared.lock().seen.clone();
        seen.into_iter()
            .filter(|(path, ..)| path.starts_with("/cdn/"))
            .collect()
    }
}

impl Shared {
    fn answer(&mut self, request: &Request<Incoming>, address: SocketAddr) -> Response<Body> {
        let path = request.uri().path().to_owned();
        let header = |name: &str| {
            request
                .headers()
                .get(name)
                .map(|value| value.to_str().expect("as the tests have it").to_owned())
        };
        let (range, authorization) = (header("range"), header("authorization"));
        self.seen
            .push((path.clone(), range.clone(), authorization.is_some()));
        if let Some(file) = path.strip_prefix("/cdn/") {
            return self.content(file, range.as_deref());
        }
        if let Some(fault) = self.fault("api")
            && let Fault::Status(..) = fault
        {
            return refusal(fault);
        }
        if self.token.is_some()
            && authorization != self.token.as_ref().map(|token| format!("Bearer {token}"))
        {
            return refusal(Fault::Status(401, "GatedRepo", None));
        }
        if let Some(rest) = path.strip_prefix("/api/models/") {
            return self.list(rest);
        }
        // To another name of this machine, as the real hub redirects to other hosts.
        let file = path
            .split_once(&format!("/resolve/{COMMIT}/"))
            .map(|(_, file)| file.to_owned());
        let target = format!(
            "http://localhost:{}/cdn/{}",
            address.port(),
            file.expect("as the tests have it")
        );
        Response::builder()
            .status(302)
            .header("location", target)
            .body(whole(Vec::new()))
            .expect("as the tests have it")
    }

    fn list(&self, path: &str) -> Response<Body> {
        let (repo, revision) = path.split_once("/revision/").expect("as the tests have it");
        if repo != "org/model" || self.gone.contains(repo) {
            return refusal(Fault::Status(401, "RepoNotFound", None));
        }
        if revision != "main" && revision != COMMIT {
            return refusal(Fault::Status(404, "RevisionNotFound", None));
        }
        let files: Vec<Value> = { self.files.iter() }
            .map(|(name, (content, is_large))| {
                let size = content.len();
                let git = format!(
                    "{:x}",
                    sha1::Sha1::new_with_prefix(format!("blob {size}\0"))
                        .chain_update(content)
                        .finalize()
                );
                let large = format!("{:x}", sha2::Sha256::digest(content));
                let size = { self.sizes.get(name) }.map_or(json!(size), |told| json!(told));
                match is_large {
                    true => json!({"rfilename": name, "size": size, "blobId": "0".repeat(40),
                        "lfs": {"sha256": large, "size": size, "pointerSize": 130}}),
                    false => json!({"rfilename": name, "size": size, "blobId": git}),
                }
            })
            .chain([json!({"rfilename": "../outside.json", "size": 1, "blobId": "0".repeat(40)})])
            .collect();
        let answer = json!({"id": repo, "sha": COMMIT, "siblings": files});
        Response::new(whole(answer.to_string().into_bytes()))
    }

    fn fault(&mut self, path: &str) -> Option<Fault> {
        let faults = self.faults.get_mut(path)?;
        (!faults.is_empty()).then(|| faults.remove(0))
    }

    fn content(&mut self, file: &str, range: Option<&str>) -> Response<Body> {
        let fault = self.fault(file);
        let mut content = self.files[file].0.clone();
        let total = content.len();
        match fault {
            Some(Fault::Status(..)) => return refusal(fault.expect("as the tests have it")),
            Some(Fault::Wrong) => content.iter_mut().for_each(|byte| *byte ^= 1),
            Some(Fault::TooMany) => content.extend_from_slice(b"more"),
            Some(Fault::Cut(_) | Fault::Break(_) | Fault::Hang(_) | Fault::NoRanges) | None => {}
        }
        let from = range.and_then(|range| {
            range
                .strip_prefix("bytes=")?
                .strip_suffix('-')?
                .parse::<usize>()
                .ok()
        });
        let mut response = Response::builder();
        let mut left = content.clone();
        if let Some(from) = from.filter(|_| !matches!(fault, Some(Fault::NoRanges))) {
            left = content.split_off(from);
            response = response.status(StatusCode::PARTIAL_CONTENT).header(
                "content-range",
                format!("bytes {from}-{}/{total}", total - 1),
            );
        }
        let body = match fault {
            Some(Fault::Cut(bytes)) => whole(left[..bytes.min(left.len())].to_vec()),
            Some(Fault::Break(bytes)) => broken(&left[..bytes.min(left.len())], false),
            Some(Fault::Hang(bytes)) => broken(&left[..bytes.min(left.len())], true),
            _ => whole(left),
        };
        response.body(body).expect("as the tests have it")
    }
}

fn refusal(fault: Fault) -> Response<Body> {
    let Fault::Status(status, code, after) = fault else {
        panic!("no status");
    };
    let mut response = Response::builder().status(status);
    if !code.is_empty() {
        response = response.header("x-error-code", code);
    }
    if let Some(after) = after {
        response = response.header("retry-after", after);
    }
    response
        .body(whole(b"{\"error\": \"no\"}".to_vec()))
        .expect("as the tests have it")
}

fn whole(content: Vec<u8>) -> Body {
    http_body_util::Full::new(Bytes::from(content))
        .map_err(|never| match never {})
        .boxed()
}

/// These bytes, then an abnormal end: a broken connection, or silence.
fn broken(content: &[u8], hangs: bool) -> Body {
    let first = Ok(Frame::data(Bytes::copy_from_slice(content)));
    let rest = async move {
        if hangs {
            std::future::pending::<()>().await;
        }
        Err(io::Error::other("cut"))
    };
    let frames = futures_util::StreamExt::chain(
        futures_util::stream::iter([first]),
        futures_util::stream::once(rest),
    );
    BodyExt::boxed(StreamBody::new(Box::pin(frames)))
}
