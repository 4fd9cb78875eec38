//! [`Ports`]: the ports for a server to be started.

use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener};
use std::ops::RangeInclusive;
use std::os::unix::net::UnixListener;

use genset_backend_common::EngineError;

use crate::command::{Plan, SideChannel};

/// The range of server ports. It is below the ports that systems assign dynamically, so that other programs on this machine do
/// not take one by chance while a server starts.
const PORTS: RangeInclusive<u16> = 20_000..=32_000;

/// How many of [`PORTS`] are tried before a port is requested from the system.
const MOST_TRIES: usize = 64;

/// The ports of a server, which listens on them only seconds later. Until this is dropped, no other launcher on the machine
/// takes them. If another program does, the server reports that and exits.
#[derive(Debug)]
pub(crate) struct Ports {
    /// The port of its HTTP API.
    pub(crate) http: u16,
    /// Where the connectors of other servers ask for KV blocks, if they do. Further ranks use the ports after it.
    pub(crate) side_channel: Option<SocketAddr>,
    _reserved: Vec<Reserved>,
}

/// Consecutive free ports.
struct Found {
    /// The first port's address.
    address: SocketAddr,
    /// Keep others from listening there.
    _listeners: Vec<TcpListener>,
    reserved: Vec<Reserved>,
}

/// A reservation of a port among launchers.
type Reserved = Option<UnixListener>;

/// Reserves a port among launchers. On Linux this is a name that only one process can hold, and that is released with the
/// process. Elsewhere it does nothing.
fn reserve(port: u16) -> io::Result<Reserved> {
    #[cfg(target_os = "linux")]
    {
        use std::os::linux::net::SocketAddrExt as _;
        let name = format!("genset-launcher-port-{port}");
        let name = std::os::unix::net::SocketAddr::from_abstract_name(name)?;
        UnixListener::bind_addr(&name).map(Some)
    }
    #[cfg(not(target_os = "linux"))]
    {
        let _ = port;
        Ok(None)
    }
}

impl Ports {
    /// Finds ports that nobody listens on now.
    ///
    /// # Errors
    /// `InvalidArgument` if the address does not belong to this machine.
    pub(crate) fn free(plan: &Plan) -> Result<Self, EngineError> {
        // Holds both at once, so that they differ.
        let http = listen(Ipv4Addr::LOCALHOST.into(), 1).map_err(|error| {
            EngineError::internal(format!("no free port for the server: {error}"))
                .with_source(error)
        })?;
        let side_channel = plan.side_channel.map(|SideChannel { host, ports }| {
            listen(host, ports).map_err(|error| {
                let problem = format!(
                    "{host} cannot be listened on, is it an address of this machine? {error}"
                );
                EngineError::invalid_argument("--kv-transfer-host", problem).with_source(error)
            })
        });
        let side_channel = side_channel.transpose()?;
        Ok(Self {
            http: http.address.port(),
            side_channel: side_channel.as_ref().map(|found| found.address),
            _reserved: [Some(http), side_channel]
                .into_iter()
                .flatten()
                .flat_map(|found| found.reserved)
                .collect(),
        })
    }
}

/// Finds this number of consecutive ports.
fn listen(host: IpAddr, ports: u16) -> io::Result<Found> {
    (0..MOST_TRIES)
        .find_map(|_| listen_from(host, rand::random_range(PORTS), ports).ok())
        .map_or_else(|| listen_from(host, 0, ports), Ok)
}

fn listen_from(host: IpAddr, first: u16, ports: u16) -> io::Result<Found> {
    let listener = TcpListener::bind((host, first))?;
    let address = listener.local_addr()?;
    let mut reserved = vec![reserve(address.port())?];
    let mut listeners = vec![listener];
    for nth in 1..ports {
        let port = address.port().checked_add(nth);
        let port = port.ok_or(io::ErrorKind::AddrNotAvailable)?;
        listeners.push(TcpListener::bind((host, port))?);
        reserved.push(reserve(port)?);
    }
    Ok(Found {
        address,
        _listeners: listeners,
        reserved,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ports_of_ranks_are_free_and_one_after_the_other() {
        let host = Ipv4Addr::LOCALHOST.into();
        let found = listen(host, 3).unwrap();
        let port = |listener: &TcpListener| listener.local_addr().unwrap().port();
        let ports: Vec<u16> = found._listeners.iter().map(port).collect();
        let first = found.address.port();
        assert_eq!(ports, (first..).take(3).collect::<Vec<u16>>());
        // One of them is in use, so neither is returned.
        assert!(listen_from(host, first - 1, 2).is_err());
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn a_port_is_left_alone_until_its_server_listens() {
        let host = Ipv4Addr::LOCALHOST.into();
        let Found {
            address,
            _listeners: listeners,
            reserved,
        } = listen(host, 1).unwrap();
        drop(listeners);
        assert!(listen_from(host, address.port(), 1).is_err());
        drop(reserved);
        listen_from(host, address.port(), 1).unwrap();
    }
}
