//! [`FrontendConfig`]: where the server listens and every limit it keeps.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::time::Duration;

use genset_runtime::{EndpointName, SelectionMode};
use http::HeaderValue;

use crate::parsers::ParserNames;

/// Where the server listens and every limit it keeps. `Default` is safe; it listens on loopback.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FrontendConfig {
    /// Where to listen; port 0 for any free one.
    pub address: SocketAddr,
    /// The certificate of an HTTPS port; `None` for plain HTTP.
    pub tls: Option<FrontendTls>,
    /// The file with the keys of those who may ask; `None` where everybody may.
    pub api_keys: Option<PathBuf>,
    /// The origins of web pages that may ask; `*` for every one.
    pub cors_origins: Vec<HeaderValue>,
    /// The endpoint whose workers are served; `None` for every worker there is.
    pub endpoint: Option<EndpointName>,
    /// How instances are selected.
    pub selection: SelectionMode,
    /// About the largest head of a request, its headers and its path together, in bytes; at least 8192.
    pub max_header_bytes: usize,
    /// The largest request body, in bytes.
    pub max_body_bytes: usize,
    /// The most memory that all request bodies may take together, in bytes.
    pub max_bodies_bytes: usize,
    /// The largest `n`.
    pub max_choices: u32,
    /// The most stop strings.
    pub max_stop_strings: usize,
    /// The longest stop string, in bytes.
    pub max_stop_bytes: usize,
    /// The most prompts in one completions request.
    pub max_prompts: usize,
    /// The most inputs in one embeddings request.
    pub max_embedding_inputs: usize,
    /// The most tools in one chat request.
    pub max_tools: usize,
    /// The most responses of `/v1/responses` that are kept for later ones to go on from; 0 keeps none.
    pub max_stored_responses: usize,
    /// The most memory they may take, in bytes.
    pub max_stored_bytes: usize,
    /// The most memory that the tokens of known prompts may take, for each model, in bytes; 0 keeps none.
    pub tokenizer_cache_bytes: usize,
    /// The parsers of answers, for every model, in place of what its card names.
    pub parsers: ParserNames,
    /// Connections at once; more wait to be accepted.
    pub max_connections: usize,
    /// Requests of one model that are answered at once; more wait.
    pub max_model_running_requests: NonZeroUsize,
    /// Requests of one model that may wait; more are refused. With those that run they should be fewer than the connections,
    /// so that a model that is full leaves some to the others.
    pub max_model_waiting_requests: usize,
    /// Limit on reading a request's head, also of an idle kept-alive connection.
    pub header_timeout: Duration,
    /// Limit on reading a request's body.
    pub body_timeout: Duration,
    /// How long a client may take nothing of what is sent to it before it is disconnected.
    pub write_timeout: Duration,
    /// Whether each request gets a line in the log, under the target `genset::access`.
    pub access_log: bool,
    /// Limit on preparing a model that a worker announces.
    pub model_timeout: Duration,
}

impl Default for FrontendConfig {
    fn default() -> Self {
        Self {
            address: SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 8080),
            tls: None,
            api_keys: None,
            cors_origins: Vec::new(),
            endpoint: None,
            selection: SelectionMode::default(),
            max_header_bytes: 64 << 10,
            max_body_bytes: 32 << 20,
            max_bodies_bytes: 1 << 30,
            max_choices: 16,
            max_stop_strings: 16,
            max_stop_bytes: 1024,
            max_prompts: 256,
            max_embedding_inputs: 2048,
            max_tools: 128,
            max_stored_responses: 1024,
            max_stored_bytes: 64 << 20,
            tokenizer_cache_bytes: 16 << 20,
            parsers: ParserNames::default(),
            max_connections: 16_384,
            max_model_running_requests: NonZeroUsize::new(8192).unwrap_or(NonZeroUsize::MIN),
            max_model_waiting_requests: 4096,
            header_timeout: Duration::from_secs(60),
            body_timeout: Duration::from_secs(60),
            write_timeout: Duration::from_secs(60),
            access_log: true,
            model_timeout: Duration::from_secs(60),
        }
    }
}

/// The server's certificate. `Debug` leaves the private key out.
#[derive(Clone, PartialEq, Eq)]
pub struct FrontendTls {
    /// The certificate and those between it and its authority: PEM, the content and not a path.
    pub certificate_pem: String,
    /// Its private key: PEM, the content and not a path.
    pub key_pem: String,
}

impl fmt::Debug for FrontendTls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FrontendTls")
            .field("certificate_pem", &self.certificate_pem)
            .finish_non_exhaustive()
    }
}
