//! Flags of the HTTP server, and its config made of them.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::time::Duration;

use clap::{ArgAction, Args};
use genset_backend_common::EngineError;
use genset_frontend::{
    AllowedHost, BatchConfig, FrontendConfig, HostPattern, MediaConfig, Origin, ParserNames,
};
use genset_router::RouterConfig;
use genset_runtime::{EndpointName, positive_seconds};
use http::HeaderName;

use super::access;

#[derive(Debug, Clone, Args)]
pub(super) struct HttpArgs {
    /// Address to listen on
    #[arg(long, env = "GENSET_HTTP_HOST", default_value_t = IpAddr::V4(Ipv4Addr::LOCALHOST))]
    http_host: IpAddr,
    /// Port to listen on; 0 for any free one
    #[arg(long, env = "GENSET_HTTP_PORT", default_value_t = 8080)]
    http_port: u16,
    /// PEM file with the certificate of the HTTP port; makes it HTTPS
    #[arg(
        long,
        env = "GENSET_HTTP_TLS_CERT",
        value_name = "FILE",
        requires = "http_tls_key"
    )]
    http_tls_cert: Option<PathBuf>,
    /// PEM file with the certificate's private key
    #[arg(
        long,
        env = "GENSET_HTTP_TLS_KEY",
        value_name = "FILE",
        requires = "http_tls_cert"
    )]
    http_tls_key: Option<PathBuf>,
    /// TOML file with the hashed keys of those who may ask; 'genset key NAME' makes one
    #[arg(long, env = "GENSET_API_KEYS", value_name = "FILE")]
    api_keys: Option<PathBuf>,
    /// Origins of web pages that may ask, each a scheme and a host, separated by commas; * for any
    #[arg(
        long,
        env = "GENSET_CORS_ORIGINS",
        value_name = "ORIGIN",
        value_delimiter = ','
    )]
    cors_origins: Vec<Origin>,
    /// Names that the server answers to beside its addresses and this machine's own, separated by commas; * for any
    #[arg(
        long,
        env = "GENSET_ALLOWED_HOSTS",
        value_name = "NAME",
        value_delimiter = ','
    )]
    allowed_hosts: Vec<AllowedHost>,
    /// Whether there are web pages, a chat at / and charts at /dashboard: true or false
    #[arg(long, env = "GENSET_UI", value_name = "BOOL", default_value_t = true, action = ArgAction::Set)]
    ui: bool,
    #[command(flatten)]
    router: RouterConfig,
    /// Header whose value says which requests belong together, such as those of a session; it goes before prompt_cache_key and user
    #[arg(long, env = "GENSET_AFFINITY_HEADER", value_name = "NAME")]
    affinity_header: Option<HeaderName>,
    /// How long a model whose last worker has gone is answered with 503 and not yet with 404, in seconds
    #[arg(long, env = "GENSET_MODEL_LINGER", default_value = "60", value_parser = positive_seconds)]
    model_linger: Duration,
    /// Largest head of a request, in bytes, at least 8192
    #[arg(long, env = "GENSET_MAX_HEADER_BYTES", default_value_t = FrontendConfig::default().max_header_bytes)]
    max_header_bytes: usize,
    /// Largest request body, in bytes
    #[arg(long, env = "GENSET_MAX_BODY_BYTES", default_value_t = FrontendConfig::default().max_body_bytes)]
    max_body_bytes: usize,
    /// Most memory that all requests may take together, in bytes; by default a quarter of the machine's or the control group's
    #[arg(long, env = "GENSET_MEMORY_BUDGET", default_value_t = FrontendConfig::default().memory_budget_bytes)]
    memory_budget: usize,
    /// Largest n of a request
    #[arg(long, env = "GENSET_MAX_CHOICES", default_value_t = FrontendConfig::default().max_choices)]
    max_choices: u32,
    /// Choices of one request that are answered at once, of all its prompts together; the others start as these end
    #[arg(long, env = "GENSET_MAX_RUNNING_CHOICES", default_value_t = FrontendConfig::default().max_running_choices)]
    max_running_choices: NonZeroUsize,
    /// Most stop strings of a request
    #[arg(long, env = "GENSET_MAX_STOP_STRINGS", default_value_t = FrontendConfig::default().max_stop_strings)]
    max_stop_strings: usize,
    /// Longest stop string, in bytes
    #[arg(long, env = "GENSET_MAX_STOP_BYTES", default_value_t = FrontendConfig::default().max_stop_bytes)]
    max_stop_bytes: usize,
    /// Most different token ids that end an answer
    #[arg(long, env = "GENSET_MAX_STOP_TOKEN_IDS", default_value_t = FrontendConfig::default().max_stop_token_ids)]
    max_stop_token_ids: usize,
    /// Most entries of a request's logit_bias
    #[arg(long, env = "GENSET_MAX_LOGIT_BIAS", default_value_t = FrontendConfig::default().max_logit_bias)]
    max_logit_bias: usize,
    /// Most bytes of a request's annotations, as JSON
    #[arg(long, env = "GENSET_MAX_ANNOTATION_BYTES", default_value_t = FrontendConfig::default().max_annotation_bytes)]
    max_annotation_bytes: usize,
    /// Most tools of a chat request
    #[arg(long, env = "GENSET_MAX_TOOLS", default_value_t = FrontendConfig::default().max_tools)]
    max_tools: usize,
    /// Most bytes that the images and sounds of a chat may have together
    #[arg(long, env = "GENSET_MEDIA_MAX_BYTES", value_name = "BYTES", default_value_t = MediaConfig::default().max_bytes)]
    media_max_bytes: usize,
    /// Hosts that images are fetched from which chats name by URL, separated by commas: example.org, *.example.org, example.org:8443
    #[arg(
        long,
        env = "GENSET_MEDIA_HOSTS",
        value_name = "HOST",
        value_delimiter = ','
    )]
    media_hosts: Vec<HostPattern>,
    /// How long the images of a chat may take to fetch together, in seconds
    #[arg(long, env = "GENSET_MEDIA_TIMEOUT", default_value = "10", value_parser = positive_seconds)]
    media_timeout: Duration,
    /// Most prompts of a completions request
    #[arg(long, env = "GENSET_MAX_PROMPTS", default_value_t = FrontendConfig::default().max_prompts)]
    max_prompts: usize,
    /// Most inputs of an embeddings request
    #[arg(long, env = "GENSET_MAX_EMBEDDING_INPUTS", default_value_t = FrontendConfig::default().max_embedding_inputs)]
    max_embedding_inputs: usize,
    /// Most documents of a request to /v1/rerank, and most pairs of one to /v1/score
    #[arg(long, env = "GENSET_MAX_SCORE_PAIRS", default_value_t = FrontendConfig::default().max_score_pairs)]
    max_score_pairs: usize,
    /// Most responses that are kept for later ones to go on from; 0 keeps none
    #[arg(long, env = "GENSET_MAX_STORED_RESPONSES", default_value_t = FrontendConfig::default().max_stored_responses)]
    max_stored_responses: usize,
    /// Most memory of kept responses, in bytes, and no more than a quarter of the memory budget
    #[arg(long, env = "GENSET_MAX_STORED_BYTES", default_value_t = FrontendConfig::default().max_stored_bytes)]
    max_stored_bytes: usize,
    /// Folder for /v1/files and /v1/batches, which goes on with its batches after a restart; without it there are none
    #[arg(long, env = "GENSET_BATCH_FOLDER", value_name = "DIR")]
    batch_folder: Option<PathBuf>,
    /// Largest file that may be uploaded, in bytes
    #[arg(long, env = "GENSET_MAX_FILE_BYTES", value_name = "BYTES", default_value_t = 200 << 20)]
    max_file_bytes: u64,
    /// Most files of each API key, with those that batches have written
    #[arg(
        long,
        env = "GENSET_MAX_FILES",
        value_name = "FILES",
        default_value_t = 1000
    )]
    max_files: usize,
    /// Most bytes of all files of each API key; beyond, uploads are refused
    #[arg(long, env = "GENSET_MAX_FILES_BYTES", value_name = "BYTES", default_value_t = 10 << 30)]
    max_files_bytes: u64,
    /// Most batches of each API key that have not ended
    #[arg(
        long,
        env = "GENSET_MAX_BATCHES",
        value_name = "BATCHES",
        default_value_t = 32
    )]
    max_batches: usize,
    /// Most requests of a batch
    #[arg(
        long,
        env = "GENSET_MAX_BATCH_REQUESTS",
        value_name = "REQUESTS",
        default_value_t = 50_000
    )]
    max_batch_requests: usize,
    /// How long files are kept unless their upload says otherwise, and batches after their end, in seconds
    #[arg(long, env = "GENSET_FILE_LIFETIME", default_value = "2592000", value_parser = positive_seconds)]
    file_lifetime: Duration,
    /// Most memory of a model's known prompts and words and their tokens, in bytes; 0 keeps none
    #[arg(long, env = "GENSET_TOKENIZER_CACHE_BYTES", default_value_t = FrontendConfig::default().tokenizer_cache_bytes)]
    tokenizer_cache_bytes: usize,
    /// Long bodies, templates and prompts that are worked on at once; more wait. By default as many as there are cores
    #[arg(long, env = "GENSET_WORK_THREADS", default_value_t = FrontendConfig::default().work_threads)]
    work_threads: NonZeroUsize,
    /// Whether hints that have no effect here (verbosity, service_tier, ...) are refused rather than ignored
    #[arg(long, env = "GENSET_STRICT_PARAMETERS", value_name = "BOOL", default_value_t = false, action = ArgAction::Set,
        num_args = 0..=1, default_missing_value = "true")]
    strict_parameters: bool,
    /// Models that the server serves at once, of those that workers announce; more are refused
    #[arg(long, env = "GENSET_MAX_MODELS", default_value_t = FrontendConfig::default().max_models)]
    max_models: NonZeroUsize,
    /// Requests of one model that the server answers at once; more wait
    #[arg(long, env = "GENSET_MAX_MODEL_RUNNING_REQUESTS", default_value_t = FrontendConfig::default().max_model_running_requests)]
    max_model_running_requests: NonZeroUsize,
    /// Requests of one model that may wait; more are refused
    #[arg(long, env = "GENSET_MAX_MODEL_WAITING_REQUESTS", default_value_t = FrontendConfig::default().max_model_waiting_requests)]
    max_model_waiting_requests: usize,
    /// Connections at once; more wait
    #[arg(long, env = "GENSET_MAX_CONNECTIONS", default_value_t = FrontendConfig::default().max_connections)]
    max_connections: usize,
    /// Connections at once from one address; more are closed
    #[arg(long, env = "GENSET_MAX_CONNECTIONS_PER_PEER", default_value_t = FrontendConfig::default().max_connections_per_peer)]
    max_connections_per_peer: NonZeroUsize,
    /// Limit on reading a request's head, and on idle connections, in seconds
    #[arg(long, env = "GENSET_HEADER_TIMEOUT", default_value = "60", value_parser = positive_seconds)]
    header_timeout: Duration,
    /// Limit on reading a request's body, in seconds
    #[arg(long, env = "GENSET_BODY_TIMEOUT", default_value = "60", value_parser = positive_seconds)]
    body_timeout: Duration,
    /// How long a client may take nothing of its answer, in seconds
    #[arg(long, env = "GENSET_WRITE_TIMEOUT", default_value = "60", value_parser = positive_seconds)]
    write_timeout: Duration,
    /// Limit on preparing a model that a worker announces, in seconds
    #[arg(long, env = "GENSET_MODEL_TIMEOUT", default_value = "60", value_parser = positive_seconds)]
    model_timeout: Duration,
    /// Whether the log has a line for each request: true or false
    #[arg(long, env = "GENSET_ACCESS_LOG", value_name = "BOOL", default_value_t = true, action = ArgAction::Set)]
    access_log: bool,
}

impl HttpArgs {
    /// The config of a server for the workers of `endpoint`, or for all.
    ///
    /// # Errors
    /// `InvalidArgument`, naming the flag.
    pub(super) fn config(
        self,
        endpoint: Option<EndpointName>,
        parsers: ParserNames,
        batch_concurrency: NonZeroUsize,
    ) -> Result<FrontendConfig, EngineError> {
        let batches = BatchConfig {
            folder: self.batch_folder,
            max_file_bytes: self.max_file_bytes,
            max_files: self.max_files,
            max_total_bytes: self.max_files_bytes,
            max_batches: self.max_batches,
            max_requests: self.max_batch_requests,
            concurrency: batch_concurrency,
            lifetime: self.file_lifetime,
        };
        self.router.kv.validate()?;
        Ok(FrontendConfig {
            address: SocketAddr::new(self.http_host, self.http_port),
            tls: access::tls(self.http_tls_cert.as_deref(), self.http_tls_key.as_deref())?,
            cors_origins: self.cors_origins,
            allowed_hosts: self.allowed_hosts,
            api_keys: self.api_keys,
            ui: self.ui,
            endpoint,
            router: self.router,
            affinity_header: self.affinity_header,
            model_linger: self.model_linger,
            max_header_bytes: self.max_header_bytes,
            max_body_bytes: self.max_body_bytes,
            memory_budget_bytes: self.memory_budget,
            max_choices: self.max_choices,
            max_running_choices: self.max_running_choices,
            max_stop_strings: self.max_stop_strings,
            max_stop_bytes: self.max_stop_bytes,
            max_stop_token_ids: self.max_stop_token_ids,
            max_logit_bias: self.max_logit_bias,
            max_annotation_bytes: self.max_annotation_bytes,
            max_tools: self.max_tools,
            media: MediaConfig {
                max_bytes: self.media_max_bytes,
                hosts: self.media_hosts,
                timeout: self.media_timeout,
                ..MediaConfig::default()
            },
            max_prompts: self.max_prompts,
            max_embedding_inputs: self.max_embedding_inputs,
            max_score_pairs: self.max_score_pairs,
            max_stored_responses: self.max_stored_responses,
            max_stored_bytes: self.max_stored_bytes,
            batches,
            tokenizer_cache_bytes: self.tokenizer_cache_bytes,
            work_threads: self.work_threads,
            parsers,
            strict_parameters: self.strict_parameters,
            max_models: self.max_models,
            max_model_running_requests: self.max_model_running_requests,
            max_model_waiting_requests: self.max_model_waiting_requests,
            max_connections: self.max_connections,
            max_connections_per_peer: self.max_connections_per_peer,
            header_timeout: self.header_timeout,
            body_timeout: self.body_timeout,
            write_timeout: self.write_timeout,
            model_timeout: self.model_timeout,
            access_log: self.access_log,
        })
    }
}
