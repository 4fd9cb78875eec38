//! HTTPS. Without the cargo feature `tls`, a config that asks for it is refused.

use std::io;

use crate::config::FrontendTls;

#[cfg(feature = "tls")]
pub(super) use present::Tls;

#[cfg(feature = "tls")]
mod present {
    use std::sync::Arc;

    use tokio_rustls::TlsAcceptor;
    use tokio_rustls::rustls::ServerConfig;
    use tokio_rustls::rustls::crypto::ring;
    use tokio_rustls::rustls::pki_types::pem::PemObject;
    use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
    use tokio_rustls::rustls::version::{TLS12, TLS13};
    use tokio_rustls::server::TlsStream;

    use super::{FrontendTls, io};
    use crate::http::stall::StallGuard;

    /// Accepts TLS connections with the server's certificate.
    #[derive(Clone)]
    pub(in crate::http) struct Tls(TlsAcceptor);

    impl Tls {
        /// Reads certificate and key.
        ///
        /// # Errors
        /// When one of them is invalid, or they do not belong together.
        pub(in crate::http) fn try_new(tls: &FrontendTls) -> io::Result<Self> {
            let wrong = |what: &str, problem: &str| {
                io::Error::new(io::ErrorKind::InvalidInput, format!("{what}: {problem}"))
            };
            // Omit the errors: they could contain the key, which may be in either file.
            let chain = CertificateDer::pem_slice_iter(tls.certificate_pem.as_bytes());
            let chain: Vec<_> = chain.collect::<Result<_, _>>().unwrap_or_default();
            if chain.is_empty() {
                return Err(wrong("--http-tls-cert", "holds no certificate in PEM"));
            }
            let key = PrivateKeyDer::from_pem_slice(tls.key_pem.as_bytes());
            let key = key.map_err(|_| wrong("--http-tls-key", "holds no private key in PEM"))?;
            let provider = Arc::new(ring::default_provider());
            let config = ServerConfig::builder_with_provider(provider)
                .with_protocol_versions(&[&TLS13, &TLS12])
                .map(|config| config.with_no_client_auth())
                .and_then(|config| config.with_single_cert(chain, key));
            let mut config = config
                .map_err(|error| wrong("--http-tls-cert and --http-tls-key", &error.to_string()))?;
            config.alpn_protocols = vec![b"http/1.1".to_vec()];
            Ok(Self(TlsAcceptor::from(Arc::new(config))))
        }

        pub(in crate::http) async fn greet(
            &self,
            stream: StallGuard,
        ) -> io::Result<TlsStream<StallGuard>> {
            self.0.accept(stream).await
        }
    }
}

#[cfg(not(feature = "tls"))]
pub(super) use absent::Tls;

#[cfg(not(feature = "tls"))]
mod absent {
    use super::{FrontendTls, io};
    use crate::http::stall::StallGuard;

    /// Has no values: this build has no HTTPS.
    #[derive(Clone)]
    pub(in crate::http) enum Tls {}

    impl Tls {
        pub(in crate::http) fn try_new(_: &FrontendTls) -> io::Result<Self> {
            let problem = "this build has no HTTPS; build it with the cargo feature tls";
            Err(io::Error::new(io::ErrorKind::Unsupported, problem))
        }

        #[expect(
            clippy::unused_async,
            reason = "it takes the place of the one that waits"
        )]
        pub(in crate::http) async fn greet(&self, _: StallGuard) -> io::Result<StallGuard> {
            match *self {}
        }
    }
}
