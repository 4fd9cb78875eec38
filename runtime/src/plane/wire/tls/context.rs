//! [`TlsContext`]: a [`WireTls`] for rustls.

use std::sync::Arc;

use genset_backend_common::{EngineError, ErrorKind};
use tokio::net::TcpStream;
use tokio_rustls::rustls::client::Resumption;
use tokio_rustls::rustls::crypto::{CryptoProvider, ring};
use tokio_rustls::rustls::pki_types::ServerName;
use tokio_rustls::rustls::server::WebPkiClientVerifier;
use tokio_rustls::rustls::{self, ClientConfig, RootCertStore, ServerConfig, version};
use tokio_rustls::{TlsAcceptor, TlsConnector};

use super::problem::{self, Side};
use super::stream::TlsStream;
use super::{ClientCertificates, WireTls};
use crate::tls_identity::pem::{Identity, PemProblem, roots_of};

/// The inner protocol, which both ends announce: another service with a certificate of the same authority is not a worker.
const ALPN: &[u8] = b"genset-wire";

/// Establishes TLS connections.
pub(in super::super) struct TlsContext {
    connector: TlsConnector,
    /// `None` without our own certificate.
    acceptor: Option<TlsAcceptor>,
    /// The name that every worker's certificate must be for; `None` for the host it is dialled at.
    server_name: Option<ServerName<'static>>,
    client_certificates: ClientCertificates,
}

impl TlsContext {
    /// # Errors
    /// `InvalidArgument`, naming the field that holds no certificate, key or name.
    pub(in super::super) fn try_new(config: &WireTls) -> Result<Self, EngineError> {
        let roots = Arc::new(roots_of(&config.ca_pem).map_err(see_flag)?);
        let identity = config.identity.as_ref().map(Identity::try_new).transpose();
        let identity = identity.map_err(see_flag)?;
        let server_name = config
            .server_name
            .as_deref()
            .map(|name| {
                checked_name(name).ok_or_else(|| {
                    let problem =
                        format!("{name:?} is no host name or address; see --wire-tls-server-name");
                    invalid("server_name", problem)
                })
            })
            .transpose()?;
        // The crypto provider is always ring, so that no process-wide default is needed.
        let provider = Arc::new(ring::default_provider());
        let acceptor = identity
            .clone()
            .map(|identity| server_config(&provider, &roots, identity, config.client_certificates))
            .transpose()?;
        Ok(Self {
            connector: Arc::new(client_config(provider, roots, identity)?).into(),
            acceptor: acceptor.map(|config| Arc::new(config).into()),
            server_name,
            client_certificates: config.client_certificates,
        })
    }

    /// # Errors
    /// `InvalidArgument` without a certificate of our own.
    pub(in super::super) fn check_can_serve(&self) -> Result<(), EngineError> {
        match self.acceptor {
            Some(_) => Ok(()),
            None => Err(invalid(
                "identity",
                "a process that serves needs a certificate; give --wire-tls-cert and --wire-tls-key",
            )),
        }
    }

    /// Whether callers must present a certificate.
    pub(in super::super) fn asks_callers(&self) -> bool {
        self.client_certificates == ClientCertificates::Required
    }

    /// A caller's connection. The handshake runs on first read or write, in the task that does so: slow callers
    /// delay no other caller's accept.
    pub(in super::super) fn accept(&self, stream: TcpStream) -> TlsStream {
        TlsStream::accepting(stream, self.acceptor.clone())
    }

    /// Connects to the worker at `location` and verifies its certificate.
    ///
    /// # Errors
    /// `CannotConnect`, with the problem.
    pub(in super::super) async fn connect(
        &self,
        stream: TcpStream,
        location: &str,
    ) -> Result<TlsStream, EngineError> {
        let cannot = |problem: String| {
            let message = format!("cannot connect to the worker: {problem}");
            EngineError::new(ErrorKind::CannotConnect, message)
        };
        let name = match &self.server_name {
            Some(name) => name.clone(),
            None => host_of(location).and_then(checked_name).ok_or_else(|| {
                cannot("a certificate is for a host name or address, and it has none".into())
            })?,
        };
        match self.connector.connect(name, stream).await {
            Ok(stream) => Ok(TlsStream::open(stream.into(), Side::Caller)),
            Err(error) => Err(cannot(problem::of_dialling(&error))),
        }
    }
}

/// The host in `HOST:PORT`; an IPv6 address comes in brackets.
fn host_of(location: &str) -> Option<&str> {
    let (host, _) = location.rsplit_once(':')?;
    let bracketed = host.strip_prefix('[').and_then(|it| it.strip_suffix(']'));
    Some(bracketed.unwrap_or(host))
}

fn checked_name(name: &str) -> Option<ServerName<'static>> {
    ServerName::try_from(name.to_owned()).ok()
}

fn client_config(
    provider: Arc<CryptoProvider>,
    roots: Arc<RootCertStore>,
    identity: Option<Identity>,
) -> Result<ClientConfig, EngineError> {
    let builder = ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&version::TLS13])
        .map_err(no_version)?
        .with_root_certificates(roots);
    let mut config = match identity {
        None => builder.with_no_client_auth(),
        Some(Identity { chain, key }) => builder
            .with_client_auth_cert(chain, key)
            .map_err(|error| unusable(&error))?,
    };
    config.alpn_protocols = vec![ALPN.to_vec()];
    config.resumption = Resumption::disabled();
    Ok(config)
}

fn server_config(
    provider: &Arc<CryptoProvider>,
    roots: &Arc<RootCertStore>,
    Identity { chain, key }: Identity,
    client_certificates: ClientCertificates,
) -> Result<ServerConfig, EngineError> {
    let builder = ServerConfig::builder_with_provider(Arc::clone(provider))
        .with_protocol_versions(&[&version::TLS13])
        .map_err(no_version)?;
    let builder = match client_certificates {
        ClientCertificates::NotAsked => builder.with_no_client_auth(),
        ClientCertificates::Required => {
            let verifier = WebPkiClientVerifier::builder_with_provider(
                Arc::clone(roots),
                Arc::clone(provider),
            );
            let verifier = verifier.build().map_err(|error| {
                let problem = format!("cannot be used to check callers: {error}");
                invalid("ca_pem", problem)
            })?;
            builder.with_client_cert_verifier(verifier)
        }
    };
    let mut config = builder
        .with_single_cert(chain, key)
        .map_err(|error| unusable(&error))?;
    config.alpn_protocols = vec![ALPN.to_vec()];
    config.send_tls13_tickets = 0;
    Ok(config)
}

fn unusable(error: &rustls::Error) -> EngineError {
    see_flag(Identity::unusable(error))
}

/// Names the field and the flag.
fn see_flag(PemProblem { field, problem }: PemProblem) -> EngineError {
    let flag = match field {
        "ca_pem" => "--wire-tls-ca",
        "identity.certificate_pem" => "--wire-tls-cert",
        "identity.key_pem" => "--wire-tls-key",
        _ => "--wire-tls-cert and --wire-tls-key",
    };
    invalid(field, format!("{problem}; see {flag}"))
}

fn no_version(error: rustls::Error) -> EngineError {
    EngineError::internal("ring should speak TLS 1.3").with_source(error)
}

fn invalid(field: &str, problem: impl std::fmt::Display) -> EngineError {
    EngineError::invalid_argument(format!("tcp.tls.{field}"), problem)
}

#[cfg(test)]
mod tests {
    use rcgen::KeyPair;

    use super::*;
    use crate::tls_identity::TlsIdentity;

    fn self_signed() -> (String, KeyPair) {
        let made = rcgen::generate_simple_self_signed(["a".to_owned()]).unwrap();
        (made.cert.pem(), made.signing_key)
    }

    fn with_identity(certificate_pem: &str, key_pem: &str) -> WireTls {
        WireTls {
            identity: Some(TlsIdentity {
                certificate_pem: certificate_pem.into(),
                key_pem: key_pem.into(),
            }),
            ..WireTls::new(self_signed().0)
        }
    }

    #[test]
    fn what_is_no_certificate_key_or_name_is_named() {
        let (certificate, key) = self_signed();
        let (_, other_key) = self_signed();
        let nameless = WireTls {
            server_name: Some("not a name".into()),
            ..WireTls::new(certificate.clone())
        };
        let cases = [
            (WireTls::new("/etc/ca.pem"), "ca_pem", "--wire-tls-ca"),
            (nameless, "server_name", "--wire-tls-server-name"),
            (
                with_identity("", &key.serialize_pem()),
                "identity.certificate_pem",
                "--wire-tls-cert",
            ),
            (
                with_identity(&certificate, "secret"),
                "identity.key_pem",
                "--wire-tls-key",
            ),
            (
                with_identity(&certificate, &other_key.serialize_pem()),
                "identity",
                "--wire-tls-key",
            ),
        ];
        for (tls, field, flag) in cases {
            let error = TlsContext::try_new(&tls).err().unwrap();
            let field = format!("tcp.tls.{field}");
            assert_eq!(error.at().map(|at| at.name()), Some(field.as_str()));
            assert!(error.message().contains(flag), "{error}");
            assert!(!format!("{error:?} {tls:?}").contains("secret"), "{error}");
        }
    }

    #[test]
    fn the_name_to_expect_is_the_host_dialled() {
        for (location, host) in [
            ("worker-1:7", "worker-1"),
            ("10.0.0.1:7", "10.0.0.1"),
            ("[fd00::1]:7", "fd00::1"),
        ] {
            let name = host_of(location).and_then(checked_name).unwrap();
            assert_eq!(name.to_str(), host);
        }
    }
}
