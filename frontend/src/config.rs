//! [`FrontendConfig`]: where the server listens and every limit it keeps.

mod allowed;

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::thread::available_parallelism;
use std::time::Duration;

use genset_router::RouterConfig;
use genset_runtime::EndpointName;
use http::HeaderName;

pub use allowed::{AllowedHost, Origin};

use crate::budget::quarter_of_machine;
use crate::media::HostPattern;
use crate::parsers::ParserNames;

/// Where the server listens and every limit it keeps. `Default` is safe: it listens on loopback, and takes for requests a
/// quarter of the memory that the machine has, or the process's control group.
#[derive(Debug, Clone, PartialEq)]
pub struct FrontendConfig {
    /// Where to listen; port 0 for any free one.
    pub address: SocketAddr,
    /// The certificate of an HTTPS port; `None` for plain HTTP.
    pub tls: Option<FrontendTls>,
    /// The file with the keys of those who may ask; `None` where everybody may.
    pub api_keys: Option<PathBuf>,
    /// The origins of web pages that may ask; `*` for every one.
    pub cors_origins: Vec<Origin>,
    /// The names that the server answers to beside its addresses and this machine's own; `*` for every one. With any here, or
    /// on loopback without keys, requests for other names are refused.
    pub allowed_hosts: Vec<AllowedHost>,
    /// Whether there are web pages at `/` and `/dashboard`.
    pub ui: bool,
    /// The endpoint whose workers are served; `None` for every worker there is.
    pub endpoint: Option<EndpointName>,
    /// How requests get to instances.
    pub router: RouterConfig,
    /// The header that says what a request has in common with others that are best served by the same instance. It goes before
    /// fields of the body that say so.
    pub affinity_header: Option<HeaderName>,
    /// About the largest head of a request, its headers and its path together, in bytes; at least 8192.
    pub max_header_bytes: usize,
    /// The largest request body, in bytes.
    pub max_body_bytes: usize,
    /// The most memory that all requests and stored responses may take together, in bytes.
    pub memory_budget_bytes: usize,
    /// The largest `n`.
    pub max_choices: u32,
    /// Choices of one request that are answered at once; the others start as these end.
    pub max_running_choices: NonZeroUsize,
    /// The most stop strings.
    pub max_stop_strings: usize,
    /// The longest stop string, in bytes.
    pub max_stop_bytes: usize,
    /// The most different token ids that end an answer.
    pub max_stop_token_ids: usize,
    /// The most entries of `logit_bias`.
    pub max_logit_bias: usize,
    /// The most bytes of a request's annotations, as JSON.
    pub max_annotation_bytes: usize,
    /// The most prompts in one completions request.
    pub max_prompts: usize,
    /// The most inputs in one embeddings request.
    pub max_embedding_inputs: usize,
    /// The most documents in one request to rank them again, and the most pairs in one request for scores.
    pub max_score_pairs: usize,
    /// The most tools in one chat request.
    pub max_tools: usize,
    /// What chats may have beside text.
    pub media: MediaConfig,
    /// The most responses of `/v1/responses` that are kept for later ones to go on from; 0 keeps none.
    pub max_stored_responses: usize,
    /// The most memory they may take, in bytes, and no more than a quarter of the memory budget.
    pub max_stored_bytes: usize,
    /// What is kept of `/v1/files` and `/v1/batches`.
    pub batches: BatchConfig,
    /// The most memory that the tokens of known prompts and words may take, for each model, in bytes; 0 keeps none.
    pub tokenizer_cache_bytes: usize,
    /// Bodies, templates and prompts that are worked on at once off the async threads, where they are long; more wait.
    pub work_threads: NonZeroUsize,
    /// The parsers of answers, for every model, in place of what its card names.
    pub parsers: ParserNames,
    /// Connections at once; more wait to be accepted.
    pub max_connections: usize,
    /// Connections at once from one address, or from one IPv6 network (/64); more are closed.
    pub max_connections_per_peer: NonZeroUsize,
    /// Whether fields that cannot make an answer wrong, and have no effect here, are refused when they ask for something.
    pub strict_parameters: bool,
    /// Models that are served at once, of those that workers announce; more are refused until one goes.
    pub max_models: NonZeroUsize,
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
    /// How long a model whose last worker has gone is answered as one that will be back.
    pub model_linger: Duration,
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
            allowed_hosts: Vec::new(),
            ui: true,
            endpoint: None,
            router: RouterConfig::default(),
            affinity_header: None,
            max_header_bytes: 64 << 10,
            max_body_bytes: 16 << 20,
            memory_budget_bytes: quarter_of_machine(),
            max_choices: 16,
            max_running_choices: NonZeroUsize::new(256).unwrap_or(NonZeroUsize::MIN),
            max_stop_strings: 16,
            max_stop_bytes: 1024,
            max_stop_token_ids: 256,
            max_logit_bias: 1024,
            max_annotation_bytes: 16 << 10,
            max_prompts: 256,
            max_embedding_inputs: 2048,
            max_score_pairs: 1024,
            max_tools: 128,
            media: MediaConfig::default(),
            max_stored_responses: 1024,
            max_stored_bytes: 64 << 20,
            batches: BatchConfig::default(),
            tokenizer_cache_bytes: 16 << 20,
            work_threads: available_parallelism().unwrap_or(NonZeroUsize::MIN),
            parsers: ParserNames::default(),
            max_connections: 16_384,
            max_connections_per_peer: NonZeroUsize::new(4096).unwrap_or(NonZeroUsize::MIN),
            strict_parameters: false,
            max_models: NonZeroUsize::new(256).unwrap_or(NonZeroUsize::MIN),
            max_model_running_requests: NonZeroUsize::new(8192).unwrap_or(NonZeroUsize::MIN),
            max_model_waiting_requests: 4096,
            header_timeout: Duration::from_secs(60),
            body_timeout: Duration::from_secs(60),
            write_timeout: Duration::from_secs(60),
            access_log: true,
            model_linger: Duration::from_secs(60),
            model_timeout: Duration::from_secs(60),
        }
    }
}

/// Of the memory budget, stored responses may take one part in so many.
const STORED_DIVISOR: usize = 4;

impl FrontendConfig {
    /// Whether nobody but this machine can reach the server, and whoever can may ask: it listens on loopback without keys.
    pub(crate) fn is_for_this_machine(&self) -> bool {
        self.api_keys.is_none() && self.address.ip().to_canonical().is_loopback()
    }

    /// The part of the memory budget that is set aside for stored responses.
    pub(crate) fn stored_bytes(&self) -> usize {
        self.max_stored_bytes
            .min(self.memory_budget_bytes / STORED_DIVISOR)
    }
}

/// Limits on images and sounds in chats.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MediaConfig {
    /// The most bytes that those of one request may have together. They travel as base64 in one frame of at most 16 MiB.
    pub max_bytes: usize,
    /// The hosts that images are fetched from; none are, unless there are some.
    pub hosts: Vec<HostPattern>,
    /// How long the images of one request may take to fetch, all together.
    pub timeout: Duration,
    /// How often an image's host may redirect; each time the new host must be an allowed one.
    pub max_redirects: u32,
}

impl Default for MediaConfig {
    fn default() -> Self {
        Self {
            max_bytes: 10 << 20,
            hosts: Vec::new(),
            timeout: Duration::from_secs(10),
            max_redirects: 3,
        }
    }
}

/// Where files and batches are kept, and the limits on them. Those of an owner hold for each API key by itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BatchConfig {
    /// The folder, which one process at a time may have; without it there are neither files nor batches.
    pub folder: Option<PathBuf>,
    /// The largest file that may be uploaded, in bytes.
    pub max_file_bytes: u64,
    /// The most files of an owner, with those that batches have written.
    pub max_files: usize,
    /// The most bytes that the files of an owner may have together for a further upload to be taken.
    pub max_total_bytes: u64,
    /// The most batches of an owner that have not ended.
    pub max_batches: usize,
    /// The most requests of a batch.
    pub max_requests: usize,
    /// Requests of all batches that are answered at the same time.
    pub concurrency: NonZeroUsize,
    /// How long a file is kept unless its upload says otherwise, and a batch after its end.
    pub lifetime: Duration,
}

impl Default for BatchConfig {
    fn default() -> Self {
        Self {
            folder: None,
            max_file_bytes: 200 << 20,
            max_files: 1000,
            max_total_bytes: 10 << 30,
            max_batches: 32,
            max_requests: 50_000,
            concurrency: NonZeroUsize::new(16).unwrap_or(NonZeroUsize::MIN),
            lifetime: Duration::from_secs(30 * 24 * 3600),
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
