//! TLS on the connections of the tcp plane. Without the cargo feature `tls`, a configuration with certificates is refused.
//!
//! Every process of a fleet both calls and is called, so by default both ends of a connection present a certificate, signed by
//! an authority given to both; the system's authorities are not used. Only TLS 1.3 is spoken, without session
//! resumption: one connection joins two processes for as long as they run.
//!
//! - [`context`]: the configuration of rustls; [`stream`]: a connection.
//! - [`problem`]: errors that name the flag to change.
//! - `absent`: the replacement in a build without TLS.

#[cfg(not(feature = "tls"))]
mod absent;
#[cfg(feature = "tls")]
mod context;
#[cfg(feature = "tls")]
mod problem;
#[cfg(feature = "tls")]
mod stream;

#[cfg(not(feature = "tls"))]
pub(super) use absent::TlsContext;
#[cfg(feature = "tls")]
pub(super) use context::TlsContext;

use crate::tls_identity::TlsIdentity;

/// Certificates of the tcp plane. Read once, when the plane is made; checked by
/// [`WirePlane::tcp`](crate::plane::WirePlane::tcp), which refuses them in a build without the cargo feature `tls`.
///
/// # Examples
/// ```
/// use genset_runtime::TlsIdentity;
/// use genset_runtime::plane::{TcpConfig, WireTls};
///
/// fn with_tls(ca_pem: String, certificate_pem: String, key_pem: String) -> TcpConfig {
///     TcpConfig {
///         tls: Some(WireTls {
///             identity: Some(TlsIdentity { certificate_pem, key_pem }),
///             // Every process has a certificate for this name, whatever its host is called.
///             server_name: Some("genset.internal".into()),
///             ..WireTls::new(ca_pem)
///         }),
///         ..TcpConfig::default()
///     }
/// }
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WireTls {
    /// Certificates of the authorities that sign those of every process: PEM content, not a path.
    pub ca_pem: String,
    /// Our own certificate. A serving process needs one; a process that only calls needs one if workers require it.
    pub identity: Option<TlsIdentity>,
    /// The name or address in the certificates of all workers. `None` if each worker's certificate is for the host at which it
    /// is dialled.
    pub server_name: Option<String>,
    /// The certificates that callers of this process must present.
    pub client_certificates: ClientCertificates,
}

impl WireTls {
    /// Trusts the certificates of these authorities; has no certificate of its own yet.
    #[must_use]
    pub fn new(ca_pem: impl Into<String>) -> Self {
        Self {
            ca_pem: ca_pem.into(),
            identity: None,
            server_name: None,
            client_certificates: ClientCertificates::default(),
        }
    }
}

genset_backend_common::named! {
    /// The certificates that callers must present when they connect.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
    pub enum ClientCertificates: FromStr {
        /// A certificate that one of our authorities signed.
        #[default]
        Required = "required",
        /// None: anyone who reaches the port can call, unless there is a [`WireSecret`](crate::plane::WireSecret).
        NotAsked = "none",
    }
}
