//! [`FrontendConfig`]: where the server listens, and all its limits.

mod allowed;

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::thread::available_parallelism;
use std::time::Duration;

#[cfg(feature = "cli")]
use clap::ArgAction;
use genset_backend_common::machine::usable_memory;
use genset_router::RouterConfig;
use genset_runtime::WorkerScope;
#[cfg(feature = "cli")]
use genset_runtime::{byte_count, in_bytes, in_seconds, positive_seconds, seconds};
use http::HeaderName;

pub use allowed::{AllowedHost, Origin};

use crate::media::HostPattern;
use crate::parsers::ParserNames;

/// Where the server listens and every limit it keeps; with the feature `cli`, its command-line flags. `Default` is safe: it
/// listens on loopback, and takes for requests a quarter of the memory that the machine has, or the process's control group.
#[derive(Debug, Clone, PartialEq)]
#[cfg_attr(feature = "cli", derive(clap::Args))]
pub struct FrontendConfig {
    /// Where to listen; port 0 for any free one.
    #[cfg_attr(feature = "cli", arg(skip = Self::default().address))]
    pub address: SocketAddr,
    /// The certificate for HTTPS; `None` for plain HTTP.
    #[cfg_attr(feature = "cli", arg(skip))]
    pub tls: Option<FrontendTls>,
    /// The workers that are served; `None` for all.
    #[cfg_attr(feature = "cli", arg(skip))]
    pub workers: Option<WorkerScope>,
    /// The parsers of answers for every model, overriding its card's.
    #[cfg_attr(feature = "cli", arg(skip))]
    pub parsers: ParserNames,
    /// The file of API keys; `None` to admit everybody.
    #[cfg_attr(feature = "cli", arg(skip))]
    pub api_keys: Option<PathBuf>,
    /// Origins of web pages that may use the server, each a scheme and a host, separated by commas; * for any
    #[cfg_attr(
        feature = "cli",
        arg(
            long,
            env = "GENSET_CORS_ORIGINS",
            value_name = "ORIGIN",
            value_delimiter = ','
        )
    )]
    pub cors_origins: Vec<Origin>,
    /// Names that the server answers to beside its addresses and this machine's own, separated by commas; * for any
    ///
    /// With any here, or on loopback without keys, requests for other names are refused.
    #[cfg_attr(
        feature = "cli",
        arg(
            long,
            env = "GENSET_ALLOWED_HOSTS",
            value_name = "NAME",
            value_delimiter = ','
        )
    )]
    pub allowed_hosts: Vec<AllowedHost>,
    /// Whether there are web pages, a chat at / and charts at /dashboard: true or false
    #[cfg_attr(feature = "cli", arg(long, env = "GENSET_UI", value_name = "BOOL", default_value_t = Self::default().ui, action = ArgAction::Set))]
    pub ui: bool,
    /// How requests get to instances.
    #[cfg_attr(feature = "cli", command(flatten))]
    pub router: RouterConfig,
    /// Header with the affinity key of a request, such as its session; it takes precedence over prompt_cache_key and user
    #[cfg_attr(
        feature = "cli",
        arg(long, env = "GENSET_AFFINITY_HEADER", value_name = "NAME")
    )]
    pub affinity_header: Option<HeaderName>,
    /// How long requests for a model get 503 and not yet 404 after its last worker has gone, in seconds
    #[cfg_attr(feature = "cli", arg(long, env = "GENSET_MODEL_LINGER", default_value = in_seconds(Self::default().model_linger),
        value_parser = positive_seconds))]
    pub model_linger: Duration,
    /// Largest head of a request, in bytes, at least 8192
    ///
    /// About so many: its headers and its path together.
    #[cfg_attr(feature = "cli", arg(long, env = "GENSET_MAX_HEADER_BYTES", default_value = in_bytes(Self::default().max_header_bytes),
        value_parser = byte_count::<usize>))]
    pub max_header_bytes: usize,
    /// Largest request body, in bytes
    #[cfg_attr(feature = "cli", arg(long, env = "GENSET_MAX_BODY_BYTES", default_value = in_bytes(Self::default().max_body_bytes),
        value_parser = byte_count::<usize>))]
    pub max_body_bytes: usize,
    /// Most memory that all requests may take together, in bytes; by default a quarter of the machine's or the control group's
    ///
    /// That of stored responses counts in it.
    #[cfg_attr(feature = "cli", arg(long = "memory-budget", env = "GENSET_MEMORY_BUDGET", value_name = "MEMORY_BUDGET",
        default_value = in_bytes(Self::default().memory_budget_bytes), value_parser = byte_count::<usize>))]
    pub memory_budget_bytes: usize,
    /// Largest n of a request
    #[cfg_attr(feature = "cli", arg(long, env = "GENSET_MAX_CHOICES", default_value_t = Self::default().max_choices,
        value_parser = clap::value_parser!(u32).range(1..)))]
    pub max_choices: u32,
    /// Choices of one request that are answered at once, of all its prompts together; the others start as these end
    #[cfg_attr(feature = "cli", arg(long, env = "GENSET_MAX_RUNNING_CHOICES", default_value_t = Self::default().max_running_choices))]
    pub max_running_choices: NonZeroUsize,
    /// Most stop strings of a request
    #[cfg_attr(feature = "cli", arg(long, env = "GENSET_MAX_STOP_STRINGS", default_value_t = Self::default().max_stop_strings))]
    pub max_stop_strings: usize,
    /// Longest stop string, in bytes
    #[cfg_attr(feature = "cli", arg(long, env = "GENSET_MAX_STOP_BYTES", default_value = in_bytes(Self::default().max_stop_bytes),
        value_parser = byte_count::<usize>))]
    pub max_stop_bytes: usize,
    /// Most different token ids that end an answer
    #[cfg_attr(feature = "cli", arg(long, env = "GENSET_MAX_STOP_TOKEN_IDS", default_value_t = Self::default().max_stop_token_ids))]
    pub max_stop_token_ids: usize,
    /// Most entries of a request's logit_bias
    #[cfg_attr(feature = "cli", arg(long, env = "GENSET_MAX_LOGIT_BIAS", default_value_t = Self::default().max_logit_bias))]
    pub max_logit_bias: usize,
    /// Most bytes of a request's annotations, as JSON
    #[cfg_attr(feature = "cli", arg(long, env = "GENSET_MAX_ANNOTATION_BYTES", default_value = in_bytes(Self::default().max_annotation_bytes),
        value_parser = byte_count::<usize>))]
    pub max_annotation_bytes: usize,
    /// Most tools of a chat request
    #[cfg_attr(feature = "cli", arg(long, env = "GENSET_MAX_TOOLS", default_value_t = Self::default().max_tools))]
    pub max_tools: usize,
    /// What chats may have beside text.
    #[cfg_attr(feature = "cli", command(flatten))]
    pub media: MediaConfig,
    /// Most prompts of a completions request
    #[cfg_attr(feature = "cli", arg(long, env = "GENSET_MAX_PROMPTS", default_value_t = Self::default().max_prompts))]
    pub max_prompts: usize,
    /// Most inputs of an embeddings request
    #[cfg_attr(feature = "cli", arg(long, env = "GENSET_MAX_EMBEDDING_INPUTS", default_value_t = Self::default().max_embedding_inputs))]
    pub max_embedding_inputs: usize,
    /// Most documents of a request to /v1/rerank, and most pairs of one to /v1/score
    #[cfg_attr(feature = "cli", arg(long, env = "GENSET_MAX_SCORE_PAIRS", default_value_t = Self::default().max_score_pairs))]
    pub max_score_pairs: usize,
    /// Most stored responses, which later requests can continue; 0 stores none
    #[cfg_attr(feature = "cli", arg(long, env = "GENSET_MAX_STORED_RESPONSES", default_value_t = Self::default().max_stored_responses))]
    pub max_stored_responses: usize,
    /// Most memory of stored responses, in bytes, and no more than a quarter of the memory budget
    #[cfg_attr(feature = "cli", arg(long, env = "GENSET_MAX_STORED_BYTES", default_value = in_bytes(Self::default().max_stored_bytes),
        value_parser = byte_count::<usize>))]
    pub max_stored_bytes: usize,
    /// What is kept of `/v1/files` and `/v1/batches`.
    #[cfg_attr(feature = "cli", command(flatten))]
    pub batches: BatchConfig,
    /// Most memory of a model's tokenizer cache, which keeps prompts and words with their tokens, in bytes; 0 keeps none
    #[cfg_attr(feature = "cli", arg(long, env = "GENSET_TOKENIZER_CACHE_BYTES", default_value = in_bytes(Self::default().tokenizer_cache_bytes),
        value_parser = byte_count::<usize>))]
    pub tokenizer_cache_bytes: usize,
    /// Long bodies, templates and prompts that are processed at once; more wait. By default as many as there are cores
    #[cfg_attr(feature = "cli", arg(long, env = "GENSET_WORK_THREADS", default_value_t = Self::default().work_threads))]
    pub work_threads: NonZeroUsize,
    /// Whether hints that have no effect here (verbosity, service_tier, ...) are refused rather than ignored
    #[cfg_attr(feature = "cli", arg(long, env = "GENSET_STRICT_PARAMETERS", value_name = "BOOL", action = ArgAction::Set,
        default_value_t = Self::default().strict_parameters, num_args = 0..=1, default_missing_value = "true"))]
    pub strict_parameters: bool,
    /// Models that the server serves at once, of those that workers announce; more are refused
    #[cfg_attr(feature = "cli", arg(long, env = "GENSET_MAX_MODELS", default_value_t = Self::default().max_models))]
    pub max_models: NonZeroUsize,
    /// Requests of one model that the server answers at once; more wait
    #[cfg_attr(feature = "cli", arg(long, env = "GENSET_MAX_MODEL_RUNNING_REQUESTS", default_value_t = Self::default().max_model_running_requests))]
    pub max_model_running_requests: NonZeroUsize,
    /// Requests of one model that may wait; more are refused
    ///
    /// With those that run they should be fewer than the connections, so that a model that is full leaves some to the others.
    #[cfg_attr(feature = "cli", arg(long, env = "GENSET_MAX_MODEL_WAITING_REQUESTS", default_value_t = Self::default().max_model_waiting_requests))]
    pub max_model_waiting_requests: usize,
    /// Connections at once; more wait
    #[cfg_attr(feature = "cli", arg(long, env = "GENSET_MAX_CONNECTIONS", default_value_t = Self::default().max_connections,
        value_parser = clap::builder::RangedU64ValueParser::<usize>::new().range(1..)))]
    pub max_connections: usize,
    /// Connections at once from one address; more are closed
    ///
    /// An IPv6 network (/64) counts as one address.
    #[cfg_attr(feature = "cli", arg(long, env = "GENSET_MAX_CONNECTIONS_PER_PEER", default_value_t = Self::default().max_connections_per_peer))]
    pub max_connections_per_peer: NonZeroUsize,
    /// Limit on reading a request's head, and on idle connections, in seconds
    #[cfg_attr(feature = "cli", arg(long, env = "GENSET_HEADER_TIMEOUT", default_value = in_seconds(Self::default().header_timeout),
        value_parser = positive_seconds))]
    pub header_timeout: Duration,
    /// Limit on reading a request's body, in seconds
    #[cfg_attr(feature = "cli", arg(long, env = "GENSET_BODY_TIMEOUT", default_value = in_seconds(Self::default().body_timeout),
        value_parser = positive_seconds))]
    pub body_timeout: Duration,
    /// How long a client may take nothing of its answer, in seconds
    #[cfg_attr(feature = "cli", arg(long, env = "GENSET_WRITE_TIMEOUT", default_value = in_seconds(Self::default().write_timeout),
        value_parser = positive_seconds))]
    pub write_timeout: Duration,
    /// Silence of a streamed answer after which clients and proxies get a sign of life, in seconds; 0 for none
    ///
    /// A stream that has not begun by then begins without the engine: an error after that is an event.
    #[cfg_attr(feature = "cli", arg(long, env = "GENSET_STREAM_KEEP_ALIVE", default_value = in_seconds(Self::default().stream_keep_alive),
        value_parser = seconds))]
    pub stream_keep_alive: Duration,
    /// Limit on preparing a model that a worker announces, in seconds
    #[cfg_attr(feature = "cli", arg(long, env = "GENSET_MODEL_TIMEOUT", default_value = in_seconds(Self::default().model_timeout),
        value_parser = positive_seconds))]
    pub model_timeout: Duration,
    /// Whether the log has a line for each request: true or false
    ///
    /// Its target is `genset::access`.
    #[cfg_attr(feature = "cli", arg(long, env = "GENSET_ACCESS_LOG", value_name = "BOOL", default_value_t = Self::default().access_log, action = ArgAction::Set))]
    pub access_log: bool,
}

impl Default for FrontendConfig {
    fn default() -> Self {
        Self {
            address: SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 8080),
            tls: None,
            workers: None,
            parsers: ParserNames::default(),
            api_keys: None,
            cors_origins: Vec::new(),
            allowed_hosts: Vec::new(),
            ui: true,
            router: RouterConfig::default(),
            affinity_header: None,
            model_linger: Duration::from_secs(60),
            max_header_bytes: 64 << 10,
            max_body_bytes: 16 << 20,
            memory_budget_bytes: quarter_of_machine(),
            max_choices: 16,
            max_running_choices: NonZeroUsize::new(256).unwrap_or(NonZeroUsize::MIN),
            // Continue sends more than twenty with a completion of code.
            max_stop_strings: 32,
            max_stop_bytes: 1024,
            max_stop_token_ids: 256,
            max_logit_bias: 1024,
            max_annotation_bytes: 16 << 10,
            max_tools: 128,
            media: MediaConfig::default(),
            max_prompts: 256,
            max_embedding_inputs: 2048,
            max_score_pairs: 1024,
            max_stored_responses: 1024,
            max_stored_bytes: 64 << 20,
            batches: BatchConfig::default(),
            tokenizer_cache_bytes: 16 << 20,
            work_threads: available_parallelism().unwrap_or(NonZeroUsize::MIN),
            strict_parameters: false,
            max_models: NonZeroUsize::new(256).unwrap_or(NonZeroUsize::MIN),
            max_model_running_requests: NonZeroUsize::new(8192).unwrap_or(NonZeroUsize::MIN),
            max_model_waiting_requests: 4096,
            max_connections: 16_384,
            max_connections_per_peer: NonZeroUsize::new(4096).unwrap_or(NonZeroUsize::MIN),
            // Longer than nginx and AWS's load balancers keep idle connections: one that a server closes first may carry a request.
            header_timeout: Duration::from_secs(75),
            body_timeout: Duration::from_secs(60),
            write_timeout: Duration::from_secs(60),
            stream_keep_alive: Duration::from_secs(15),
            model_timeout: Duration::from_secs(60),
            access_log: true,
        }
    }
}

/// The memory that this process may use, if the kernel does not say.
const UNKNOWN_BYTES: u64 = 4 << 30;

/// A quarter of the memory that this process may use, looked up once.
fn quarter_of_machine() -> usize {
    static BYTES: OnceLock<usize> = OnceLock::new();
    *BYTES.get_or_init(|| {
        let bytes = usable_memory(Path::new("/")).unwrap_or(UNKNOWN_BYTES);
        usize::try_from(bytes / 4).unwrap_or(usize::MAX)
    })
}

/// Stored responses may take one part in this many of the memory budget.
const STORED_DIVISOR: usize = 4;

impl FrontendConfig {
    /// Whether the server is open but reachable from this machine only: it listens on loopback without keys.
    pub(crate) fn is_for_this_machine(&self) -> bool {
        self.api_keys.is_none() && self.address.ip().to_canonical().is_loopback()
    }

    /// The part of the memory budget that is reserved for stored responses.
    pub(crate) fn stored_bytes(&self) -> usize {
        self.max_stored_bytes
            .min(self.memory_budget_bytes / STORED_DIVISOR)
    }
}

/// Limits on images and sounds in chats.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "cli", derive(clap::Args))]
pub struct MediaConfig {
    /// Most bytes that the images and sounds of a chat may have together
    ///
    /// They travel as base64 in one frame of at most 16 MiB.
    #[cfg_attr(feature = "cli", arg(long = "media-max-bytes", env = "GENSET_MEDIA_MAX_BYTES", value_name = "BYTES",
        default_value = in_bytes(Self::default().max_bytes), value_parser = byte_count::<usize>))]
    pub max_bytes: usize,
    /// Hosts of images that chats name by URL and the server fetches, separated by commas: example.org, *.example.org,
    /// example.org:8443
    #[cfg_attr(
        feature = "cli",
        arg(
            long = "media-hosts",
            env = "GENSET_MEDIA_HOSTS",
            value_name = "HOST",
            value_delimiter = ','
        )
    )]
    pub hosts: Vec<HostPattern>,
    /// How long the images of a chat may take to fetch together, in seconds
    #[cfg_attr(feature = "cli", arg(long = "media-timeout", env = "GENSET_MEDIA_TIMEOUT", value_name = "MEDIA_TIMEOUT",
        default_value = in_seconds(Self::default().timeout), value_parser = positive_seconds))]
    pub timeout: Duration,
    /// How often an image's host may redirect; each time the new host must be an allowed one.
    #[cfg_attr(feature = "cli", arg(skip = Self::default().max_redirects))]
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

/// Where files and batches are kept, and the limits on them. Those of an owner, an API key, hold for each by itself.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "cli", derive(clap::Args))]
pub struct BatchConfig {
    /// Folder for /v1/files and /v1/batches; its batches continue after a restart. Without it there are no files and no batches
    ///
    /// One process at a time may have it.
    #[cfg_attr(
        feature = "cli",
        arg(long = "batch-folder", env = "GENSET_BATCH_FOLDER", value_name = "DIR")
    )]
    pub folder: Option<PathBuf>,
    /// Largest file that may be uploaded, in bytes
    #[cfg_attr(feature = "cli", arg(long, env = "GENSET_MAX_FILE_BYTES", value_name = "BYTES", default_value = in_bytes(Self::default().max_file_bytes),
        value_parser = byte_count::<u64>))]
    pub max_file_bytes: u64,
    /// Most files of each API key, with those that batches have written
    #[cfg_attr(feature = "cli", arg(long, env = "GENSET_MAX_FILES", value_name = "FILES", default_value_t = Self::default().max_files))]
    pub max_files: usize,
    /// Most bytes of all files of each API key; beyond, uploads are refused
    #[cfg_attr(feature = "cli", arg(long = "max-files-bytes", env = "GENSET_MAX_FILES_BYTES", value_name = "BYTES",
        default_value = in_bytes(Self::default().max_total_bytes), value_parser = byte_count::<u64>))]
    pub max_total_bytes: u64,
    /// Most batches of each API key that have not ended
    #[cfg_attr(feature = "cli", arg(long, env = "GENSET_MAX_BATCHES", value_name = "BATCHES", default_value_t = Self::default().max_batches))]
    pub max_batches: usize,
    /// Most requests of a batch
    #[cfg_attr(feature = "cli", arg(long = "max-batch-requests", env = "GENSET_MAX_BATCH_REQUESTS", value_name = "REQUESTS",
        default_value_t = Self::default().max_requests))]
    pub max_requests: usize,
    /// Requests of all batches that are answered at the same time.
    #[cfg_attr(feature = "cli", arg(skip = Self::default().concurrency))]
    pub concurrency: NonZeroUsize,
    /// How long files are kept unless their upload says otherwise, and batches after their end, in seconds
    #[cfg_attr(feature = "cli", arg(long = "file-lifetime", env = "GENSET_FILE_LIFETIME", value_name = "FILE_LIFETIME",
        default_value = in_seconds(Self::default().lifetime), value_parser = positive_seconds))]
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

/// The server's certificate. `Debug` omits the private key.
#[derive(Clone, PartialEq, Eq)]
pub struct FrontendTls {
    /// The certificate and its intermediates: PEM content, not a path.
    pub certificate_pem: String,
    /// The private key: PEM content, not a path.
    pub key_pem: String,
}

genset_backend_common::debug_as!(|it| FrontendTls {
    certificate_pem: it.certificate_pem,
    ..
});
