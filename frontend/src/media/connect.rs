//! [`Connect`] connects to a host at a checked address. It connects to the very address that it checked, so a name that
//! resolves differently a moment later (DNS rebinding) has no effect.

use std::io;
use std::net::{IpAddr, SocketAddr, ToSocketAddrs as _};
use std::sync::Arc;

use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::sync::OwnedSemaphorePermit;

use super::address::is_public;
use super::exchange::Target;
use super::{Failed, Problem};

/// The most addresses of a host that it tries.
const MAX_ADDRESSES: usize = 4;

/// Resolves a name; may block.
type Resolve = fn(&str, u16) -> io::Result<Vec<SocketAddr>>;

/// How to reach hosts.
#[derive(Clone)]
pub(super) struct Connect {
    resolve: Resolve,
    may_reach: fn(IpAddr) -> bool,
    #[cfg(feature = "tls")]
    tls: tls::Lazy,
}

genset_backend_common::debug_as!(|_| Connect { .. });

/// A bidirectional byte stream.
pub(super) trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> Stream for T {}

impl Connect {
    /// Connects to public addresses alone, with this machine's resolver.
    pub(super) fn to_public() -> Self {
        let resolve: Resolve = |host, port| Ok((host, port).to_socket_addrs()?.collect());
        Self::new(resolve, is_public)
    }

    pub(super) fn new(resolve: Resolve, may_reach: fn(IpAddr) -> bool) -> Self {
        Self {
            resolve,
            may_reach,
            #[cfg(feature = "tls")]
            tls: tls::Lazy::default(),
        }
    }

    /// # Errors
    /// Why the host cannot be reached.
    pub(super) async fn connect(
        &self,
        target: &Target,
        place: &Arc<OwnedSemaphorePermit>,
    ) -> Result<Box<dyn Stream>, Failed> {
        let addresses = self.addresses(target, Arc::clone(place)).await?;
        // A name with any internal address is refused, whatever its other addresses.
        if addresses
            .iter()
            .any(|address| !(self.may_reach)(address.ip()))
        {
            return Err(Problem::NotPublic.into());
        }
        for address in addresses.into_iter().take(MAX_ADDRESSES) {
            if let Ok(stream) = TcpStream::connect(address).await {
                return self.secured(target, stream).await;
            }
        }
        Err(Problem::Unreachable.into())
    }

    /// The addresses of the target's host. The lookup holds `place` until it ends: it cannot be cancelled, and occupies its
    /// thread even after the caller is gone.
    async fn addresses(
        &self,
        target: &Target,
        place: Arc<OwnedSemaphorePermit>,
    ) -> Result<Vec<SocketAddr>, Problem> {
        let (resolve, host, port) = (self.resolve, target.host().to_owned(), target.port());
        let found = tokio::task::spawn_blocking(move || {
            let _place = place;
            resolve(&host, port)
        });
        match found.await {
            Ok(Ok(addresses)) => Ok(addresses),
            Ok(Err(_)) | Err(_) => Err(Problem::Unreachable),
        }
    }

    #[cfg(feature = "tls")]
    async fn secured(&self, target: &Target, stream: TcpStream) -> Result<Box<dyn Stream>, Failed> {
        if !target.is_tls() {
            return Ok(Box::new(stream));
        }
        Ok(Box::new(self.tls.secure(target.host(), stream).await?))
    }

    #[cfg(not(feature = "tls"))]
    #[expect(clippy::unused_async, reason = "with the feature it waits")]
    async fn secured(&self, target: &Target, stream: TcpStream) -> Result<Box<dyn Stream>, Failed> {
        if target.is_tls() {
            return Err(Problem::NoTls.into());
        }
        Ok(Box::new(stream))
    }
}

#[cfg(feature = "tls")]
mod tls {
    use std::sync::Arc;

    use tokio::net::TcpStream;
    use tokio::sync::OnceCell;
    use tokio::task::spawn_blocking;
    use tokio_rustls::client::TlsStream;
    use tokio_rustls::rustls::pki_types::ServerName;
    use tokio_rustls::rustls::{ClientConfig, RootCertStore};
    use tokio_rustls::{TlsConnector, rustls};

    use super::super::{Failed, Problem};

    /// Trusts this machine's certificate authorities. They are hundreds of files, read when the first host needs them: most
    /// servers fetch nothing.
    #[derive(Clone, Default)]
    pub(super) struct Lazy(Arc<OnceCell<Option<TlsConnector>>>);

    impl Lazy {
        /// Cancel safe: whoever comes next reads them.
        pub(super) async fn secure(
            &self,
            host: &str,
            stream: TcpStream,
        ) -> Result<TlsStream<TcpStream>, Failed> {
            let read = async || spawn_blocking(connector).await.ok().flatten();
            let tls = self.0.get_or_init(read).await;
            let tls = tls.as_ref().ok_or(Problem::NoTls)?;
            let name = ServerName::try_from(host.to_owned()).map_err(|_| Problem::NoUrl)?;
            let connected = tls.connect(name, stream).await;
            connected.map_err(|_| Problem::Unreachable.into())
        }
    }

    fn connector() -> Option<TlsConnector> {
        let mut roots = RootCertStore::empty();
        roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = ClientConfig::builder_with_provider(provider);
        let config = config.with_safe_default_protocol_versions().ok()?;
        let config = config.with_root_certificates(roots).with_no_client_auth();
        Some(Arc::new(config).into())
    }
}
