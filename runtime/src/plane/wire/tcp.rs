//! Wire connections over TCP.

use std::net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket};
use std::sync::Arc;

use async_trait::async_trait;
use genset_backend_common::{EngineError, ErrorKind};
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::Handle;

use super::config::WireConfig;
use super::tls::{TlsContext, WireTls};
use super::transport::{Io, Listener, Transport};
use crate::accepting::TcpAcceptor;

/// The addresses and certificates of a process on TCP.
#[derive(Debug, Clone)]
pub struct TcpConfig {
    /// Address to listen on; port 0 for any free one.
    pub listen: SocketAddr,
    /// The host that others receive, if it differs from the address listened on, for example behind NAT.
    pub advertised_host: Option<String>,
    /// Certificates; with them every connection uses TLS, both dialled and accepted. `None` for plain TCP.
    pub tls: Option<WireTls>,
    /// Whether callers may be on other machines: if they would receive a loopback address, a warning is logged.
    pub has_distant_callers: bool,
}

impl Default for TcpConfig {
    fn default() -> Self {
        Self {
            listen: SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 0),
            advertised_host: None,
            tls: None,
            has_distant_callers: false,
        }
    }
}

/// The transport.
pub(super) struct Tcp {
    config: TcpConfig,
    tls: Option<Arc<TlsContext>>,
    has_secret: bool,
    /// The runtime whose threads are notified when a connection is readable or writable.
    main: Handle,
}

impl Tcp {
    pub(super) fn try_new(
        config: TcpConfig,
        wire: &WireConfig,
        main: Handle,
    ) -> Result<Self, EngineError> {
        if let Some(host) = &config.advertised_host
            && (host.is_empty() || host.contains(['/', ' ']))
        {
            let problem = format!("{host:?} is no host name or address");
            return Err(EngineError::invalid_argument("advertised host", problem));
        }
        let tls = config.tls.as_ref().map(TlsContext::try_new).transpose()?;
        Ok(Self {
            config,
            tls: tls.map(Arc::new),
            has_secret: wire.secret.is_some(),
            main,
        })
    }

    /// Whether anyone who reaches the port can call.
    fn is_open_to_strangers(&self) -> bool {
        !self.has_secret && !self.tls.as_ref().is_some_and(|tls| tls.asks_callers())
    }

    fn warn_of_others(&self, listen: SocketAddr) {
        if self.is_open_to_strangers() {
            tracing::warn!(
                "{listen} is reachable by others, and anybody who reaches it can call this worker; \
                 give every process the same --wire-secret-file, or a certificate with --wire-tls-cert"
            );
        } else if self.tls.is_none() {
            tracing::warn!(
                "{listen} is reachable by others, and the secret proves only who began a connection: what follows is neither \
                 encrypted nor authenticated; keep it on a trusted network, or give every process --wire-tls-ca"
            );
        }
    }

    /// Whether callers on other machines receive a location that is local to each machine.
    fn is_told_in_vain(&self, location: &str) -> bool {
        let address = location.parse::<SocketAddr>();
        self.config.has_distant_callers && address.is_ok_and(|told| told.ip().is_loopback())
    }

    fn location(&self, listening: SocketAddr) -> Result<String, EngineError> {
        let port = listening.port();
        match &self.config.advertised_host {
            Some(host) if host.contains(':') && !host.starts_with('[') => {
                Ok(format!("[{host}]:{port}"))
            }
            Some(host) => Ok(format!("{host}:{port}")),
            None if listening.ip().is_unspecified() => {
                Ok(SocketAddr::new(own_address(listening.ip())?, port).to_string())
            }
            None => Ok(listening.to_string()),
        }
    }
}

/// The address this machine uses to reach others. Sends nothing: connecting a UDP socket only looks up the route.
pub(crate) fn own_address(unspecified: IpAddr) -> Result<IpAddr, EngineError> {
    // TEST-NET-1 and the documentation prefix: addresses that are never assigned.
    let anybody = match unspecified {
        IpAddr::V4(_) => "192.0.2.1:9",
        IpAddr::V6(_) => "[2001:db8::1]:9",
    };
    let found = UdpSocket::bind(SocketAddr::new(unspecified, 0)).and_then(|socket| {
        socket.connect(anybody)?;
        socket.local_addr()
    });
    match found {
        Ok(address) if !address.ip().is_unspecified() => Ok(address.ip()),
        Ok(_) | Err(_) => Err(EngineError::invalid_argument(
            "advertised host",
            "listening on every address, and none can be found that others reach; give one with --advertise-host",
        )),
    }
}

#[async_trait]
impl Transport for Tcp {
    fn name(&self) -> &'static str {
        "tcp"
    }

    fn is_local(&self) -> bool {
        self.config.listen.ip().is_loopback()
    }

    async fn dial(&self, location: &str) -> Result<Io, EngineError> {
        let stream = TcpStream::connect(location).await;
        let stream = stream.and_then(|stream| moved(stream, &self.main));
        let stream = stream.map_err(|error| {
            let message = format!("cannot connect to the worker: {error}");
            EngineError::new(ErrorKind::CannotConnect, message)
        })?;
        let peer = location.to_owned();
        match &self.tls {
            None => Ok(plain(stream, peer)),
            Some(tls) => Ok(Io::split(tls.connect(stream, location).await?, peer)),
        }
    }

    async fn listen(&self) -> Result<Box<dyn Listener>, EngineError> {
        let listen = self.config.listen;
        let cannot = |error: std::io::Error| {
            let problem = format!(
                "cannot listen on {listen}: {error}; choose another with --wire-host and --wire-port"
            );
            EngineError::invalid_argument("--wire-host, --wire-port", problem)
        };
        if let Some(tls) = &self.tls {
            tls.check_can_serve()?;
        }
        let listener = TcpListener::bind(listen).await.map_err(cannot)?;
        let location = self.location(listener.local_addr().map_err(cannot)?)?;
        if !listen.ip().is_loopback() {
            self.warn_of_others(listen);
        }
        if self.is_told_in_vain(&location) {
            tracing::warn!(
                "this process is listed as {location}, which no other machine can reach; listen with --wire-host 0.0.0.0, and set \
                 --advertise-host if the address found is wrong, or use NATS with --request-plane nats"
            );
        }
        Ok(Box::new(Accepting {
            listener: TcpAcceptor::new(listener),
            location,
            tls: self.tls.clone(),
            main: self.main.clone(),
        }))
    }
}

/// Moves a connection to another runtime and makes it send at once.
fn moved(stream: TcpStream, to: &Handle) -> std::io::Result<TcpStream> {
    if let Err(error) = stream.set_nodelay(true) {
        tracing::debug!(%error, "TCP_NODELAY cannot be set; the peer has gone");
    }
    let stream = stream.into_std()?;
    let _entered = to.enter();
    TcpStream::from_std(stream)
}

fn plain(stream: TcpStream, peer: String) -> Io {
    let (reader, writer) = stream.into_split();
    Io {
        reader: Box::new(reader),
        writer: Box::new(writer),
        peer,
    }
}

struct Accepting {
    listener: TcpAcceptor,
    location: String,
    tls: Option<Arc<TlsContext>>,
    main: Handle,
}

impl Accepting {
    fn io(&self, stream: TcpStream, peer: SocketAddr) -> std::io::Result<Io> {
        let stream = moved(stream, &self.main)?;
        Ok(match &self.tls {
            None => plain(stream, peer.to_string()),
            Some(tls) => Io::split(tls.accept(stream), peer.to_string()),
        })
    }
}

#[async_trait]
impl Listener for Accepting {
    fn location(&self) -> String {
        self.location.clone()
    }

    async fn accept(&mut self) -> Option<Io> {
        loop {
            let (stream, peer) = self.listener.accept().await;
            match self.io(stream, peer) {
                Ok(io) => return Some(io),
                Err(error) => tracing::debug!(%peer, %error, "a connection cannot be taken"),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn made(config: TcpConfig) -> Result<Tcp, EngineError> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .build()
            .unwrap();
        Tcp::try_new(config, &WireConfig::default(), runtime.handle().clone())
    }

    fn tcp(listen: &str, advertised: Option<&str>) -> Tcp {
        let config = TcpConfig {
            listen: listen.parse().unwrap(),
            advertised_host: advertised.map(str::to_owned),
            has_distant_callers: true,
            ..TcpConfig::default()
        };
        made(config).unwrap()
    }

    #[test]
    fn others_are_told_a_location_they_can_dial() {
        for (listen, advertised, told, is_in_vain) in [
            ("127.0.0.1:7", None, "127.0.0.1:7", true),
            ("[::1]:7", None, "[::1]:7", true),
            ("0.0.0.0:7", Some("127.0.0.1"), "127.0.0.1:7", true),
            ("0.0.0.0:7", Some("worker-1"), "worker-1:7", false),
            ("0.0.0.0:7", Some("fd00::1"), "[fd00::1]:7", false),
        ] {
            let tcp = tcp(listen, advertised);
            let location = tcp.location(listen.parse().unwrap()).unwrap();
            assert_eq!(location, told);
            assert_eq!(tcp.is_told_in_vain(&location), is_in_vain, "{told}");
        }
        let tcp = made(TcpConfig::default()).unwrap();
        assert!(!tcp.is_told_in_vain("127.0.0.1:7"));
    }

    #[test]
    fn a_host_that_is_none_is_refused() {
        let config = TcpConfig {
            advertised_host: Some("a/b".into()),
            ..TcpConfig::default()
        };
        assert!(made(config).is_err());
    }
}
