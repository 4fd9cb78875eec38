//! Flags of the HTTP server, and its config made of them.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::time::Duration;

use clap::{ArgAction, Args};
use genset_backend_common::EngineError;
use genset_frontend::{FrontendConfig, ParserNames};
use genset_runtime::{EndpointName, SelectionMode};

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
    cors_origins: Vec<String>,
    /// How instances are selected: round-robin, random, least-loaded or power-of-two
    #[arg(long, env = "GENSET_ROUTER_MODE", default_value_t = SelectionMode::default())]
    router_mode: SelectionMode,
    /// Largest head of a request, in bytes, at least 8192
    #[arg(long, env = "GENSET_MAX_HEADER_BYTES", default_value_t = FrontendConfig::default().max_header_bytes)]
    max_header_bytes: usize,
    /// Largest request body, in bytes
    #[arg(long, env = "GENSET_MAX_BODY_BYTES", default_value_t = FrontendConfig::default().max_body_bytes)]
    max_body_bytes: usize,
    /// Most memory that all request bodies may take together, in bytes
    #[arg(long, env = "GENSET_MAX_BODIES_BYTES", default_value_t = FrontendConfig::default().max_bodies_bytes)]
    max_bodies_bytes: usize,
    /// Largest n of a request
    #[arg(long, env = "GENSET_MAX_CHOICES", default_value_t = FrontendConfig::default().max_choices)]
    max_choices: u32,
    /// Most stop strings of a request
    #[arg(long, env = "GENSET_MAX_STOP_STRINGS", default_value_t = FrontendConfig::default().max_stop_strings)]
    max_stop_strings: usize,
    /// Longest stop string, in bytes
    #[arg(long, env = "GENSET_MAX_STOP_BYTES", default_value_t = FrontendConfig::default().max_stop_bytes)]
    max_stop_bytes: usize,
    /// Most tools of a chat request
    #[arg(long, env = "GENSET_MAX_TOOLS", default_value_t = FrontendConfig::default().max_tools)]
    max_tools: usize,
    /// Most prompts of a completions request
    #[arg(long, env = "GENSET_MAX_PROMPTS", default_value_t = FrontendConfig::default().max_prompts)]
    max_prompts: usize,
    /// Most inputs of an embeddings request
    #[arg(long, env = "GENSET_MAX_EMBEDDING_INPUTS", default_value_t = FrontendConfig::default().max_embedding_inputs)]
    max_embedding_inputs: usize,
    /// Most responses that are kept for later ones to go on from; 0 keeps none
    #[arg(long, env = "GENSET_MAX_STORED_RESPONSES", default_value_t = FrontendConfig::default().max_stored_responses)]
    max_stored_responses: usize,
    /// Most memory of kept responses, in bytes
    #[arg(long, env = "GENSET_MAX_STORED_BYTES", default_value_t = FrontendConfig::default().max_stored_bytes)]
    max_stored_bytes: usize,
    /// Most memory of a model's known prompts and their tokens, in bytes; 0 keeps none
    #[arg(long, env = "GENSET_TOKENIZER_CACHE_BYTES", default_value_t = FrontendConfig::default().tokenizer_cache_bytes)]
    tokenizer_cache_bytes: usize,
    /// Requests of one model that the server answers at once; more wait
    #[arg(long, env = "GENSET_MAX_MODEL_RUNNING_REQUESTS", default_value_t = FrontendConfig::default().max_model_running_requests)]
    max_model_running_requests: NonZeroUsize,
    /// Requests of one model that may wait; more are refused
    #[arg(long, env = "GENSET_MAX_MODEL_WAITING_REQUESTS", default_value_t = FrontendConfig::default().max_model_waiting_requests)]
    max_model_waiting_requests: usize,
    /// Connections at once; more wait
    #[arg(long, env = "GENSET_MAX_CONNECTIONS", default_value_t = FrontendConfig::default().max_connections)]
    max_connections: usize,
    /// Limit on reading a request's head, and on idle connections, in seconds
    #[arg(long, env = "GENSET_HEADER_TIMEOUT", default_value = "60", value_parser = seconds)]
    header_timeout: Seconds,
    /// Limit on reading a request's body, in seconds
    #[arg(long, env = "GENSET_BODY_TIMEOUT", default_value = "60", value_parser = seconds)]
    body_timeout: Seconds,
    /// How long a client may take nothing of its answer, in seconds
    #[arg(long, env = "GENSET_WRITE_TIMEOUT", default_value = "60", value_parser = seconds)]
    write_timeout: Seconds,
    /// Limit on preparing a model that a worker announces, in seconds
    #[arg(long, env = "GENSET_MODEL_TIMEOUT", default_value = "60", value_parser = seconds)]
    model_timeout: Seconds,
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
    ) -> Result<FrontendConfig, EngineError> {
        Ok(FrontendConfig {
            address: SocketAddr::new(self.http_host, self.http_port),
            tls: access::tls(self.http_tls_cert.as_deref(), self.http_tls_key.as_deref())?,
            cors_origins: access::origins(&self.cors_origins)?,
            api_keys: self.api_keys,
            endpoint,
            selection: self.router_mode,
            max_header_bytes: self.max_header_bytes,
            max_body_bytes: self.max_body_bytes,
            max_bodies_bytes: self.max_bodies_bytes,
            max_choices: self.max_choices,
            max_stop_strings: self.max_stop_strings,
            max_stop_bytes: self.max_stop_bytes,
            max_tools: self.max_tools,
            max_prompts: self.max_prompts,
            max_embedding_inputs: self.max_embedding_inputs,
            max_stored_responses: self.max_stored_responses,
            max_stored_bytes: self.max_stored_bytes,
            tokenizer_cache_bytes: self.tokenizer_cache_bytes,
            parsers,
            max_model_running_requests: self.max_model_running_requests,
            max_model_waiting_requests: self.max_model_waiting_requests,
            max_connections: self.max_connections,
            header_timeout: self.header_timeout.0,
            body_timeout: self.body_timeout.0,
            write_timeout: self.write_timeout.0,
            model_timeout: self.model_timeout.0,
            access_log: self.access_log,
        })
    }
}

/// A limit in seconds, more than 0.
#[derive(Debug, Clone, Copy)]
struct Seconds(Duration);

fn seconds(text: &str) -> Result<Seconds, String> {
    let value: f64 = text
        .parse()
        .map_err(|_| format!("{text:?} is not a number of seconds"))?;
    if value > 0.0 && value <= 1e9 {
        Ok(Seconds(Duration::from_secs_f64(value)))
    } else {
        Err("must be more than 0 and at most 1e9 seconds".into())
    }
}
