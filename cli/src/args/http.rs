//! Flags for the HTTP port. Several of these flags make one value of the server's config; the others are fields of it.

use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;

use clap::Args;
use genset_backend_common::EngineError;
use genset_frontend::{FrontendConfig, FrontendTls};
use genset_runtime::text_of_file;

/// Where the HTTP server listens and who may ask it: what `genset doctor` looks at, too.
#[derive(Debug, Clone, Args)]
pub(crate) struct HttpArgs {
    /// Address that the HTTP server listens on
    #[arg(long, env = "GENSET_HTTP_HOST", default_value_t = FrontendConfig::default().address.ip())]
    http_host: IpAddr,
    /// Port that it listens on; 0 for any free one
    #[arg(long, env = "GENSET_HTTP_PORT", default_value_t = FrontendConfig::default().address.port())]
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
    pub(crate) http_tls_key: Option<PathBuf>,
    /// TOML file with the hashed API keys of clients; 'genset key NAME' makes a key
    #[arg(long, env = "GENSET_API_KEYS", value_name = "FILE")]
    api_keys: Option<PathBuf>,
}

impl HttpArgs {
    pub(crate) fn address(&self) -> SocketAddr {
        SocketAddr::new(self.http_host, self.http_port)
    }

    /// The config that the flags describe, with the remaining fields from `other`.
    ///
    /// # Errors
    /// `InvalidArgument`, naming the flag whose file cannot be read.
    pub(crate) fn config(&self, other: FrontendConfig) -> Result<FrontendConfig, EngineError> {
        // Each flag requires the other.
        let tls = match (&self.http_tls_cert, &self.http_tls_key) {
            (Some(certificate), Some(key)) => Some(FrontendTls {
                certificate_pem: text_of_file("--http-tls-cert", certificate)?,
                key_pem: text_of_file("--http-tls-key", key)?,
            }),
            (_, _) => None,
        };
        Ok(FrontendConfig {
            address: self.address(),
            tls,
            api_keys: self.api_keys.clone(),
            ..other
        })
    }
}

/// Whether a flag of this name is about a server.
pub(super) fn is_of_a_server(name: &str) -> bool {
    let server = HttpArgs::augment_args(clap::Command::new("server"));
    let server = FrontendConfig::augment_args(server);
    let mut names = server.get_arguments().filter_map(clap::Arg::get_long);
    names.any(|flag| flag == name)
}
