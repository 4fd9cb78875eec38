//! [`TlsIdentity`]: the certificate that a process shows to etcd, to NATS, and to other processes.

#[cfg(any(feature = "nats", feature = "tls"))]
pub(crate) mod pem;

use std::fmt;

/// A process's own certificate. `Debug` omits the private key.
#[derive(Clone, PartialEq, Eq)]
pub struct TlsIdentity {
    /// The certificate and its intermediate certificates: PEM content, not a path.
    pub certificate_pem: String,
    /// Its private key: PEM content, not a path.
    pub key_pem: String,
}

impl fmt::Debug for TlsIdentity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TlsIdentity")
            .field("certificate_pem", &self.certificate_pem)
            .finish_non_exhaustive()
    }
}
