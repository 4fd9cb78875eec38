//! Whether the ports are free, and which process has them.

use std::fs;
use std::io::ErrorKind;
use std::net::{SocketAddr, TcpListener};

use super::DoctorArgs;
use super::finding::Finding;

/// The state of a listening socket in `/proc/net/tcp`.
const LISTENS: &str = "0A";

pub(super) fn look(args: &DoctorArgs) -> Vec<Finding> {
    let http = args.http.address();
    let http = (!args.is_worker).then_some((http, "HTTP", "--http-port"));
    let wire = SocketAddr::new(args.network.wire_host, args.network.wire_port);
    let wire = (wire, "the wire", "--wire-port");
    let status = args.status.status_port.map(|port| {
        let address = SocketAddr::new(args.status.status_host, port);
        (address, "the status server", "--status-port")
    });
    let ports = http.into_iter().chain([wire]).chain(status);
    // Port 0 picks a free one.
    ports
        .filter(|(address, ..)| address.port() != 0)
        .map(|(address, name, flag)| port(address, name, flag))
        .collect()
}

fn port(address: SocketAddr, name: &str, flag: &str) -> Finding {
    let Err(error) = TcpListener::bind(address) else {
        return Finding::ok(format!("{address} for {name} is free"));
    };
    let other = format!(
        "choose another: {flag} {}",
        address.port().checked_add(1).unwrap_or(0)
    );
    let taken = |by: String| format!("{address} for {name} is taken by {by}");
    if error.kind() == ErrorKind::AddrInUse {
        return match owner(address.port()) {
            Some((pid, program)) if program == "genset" => {
                let by = format!("another genset, process {pid}");
                Finding::warning(taken(by), other)
            }
            Some((pid, program)) => {
                Finding::problem(taken(format!("{program}, process {pid}")), other)
            }
            None => Finding::problem(taken("a process of another user".into()), other),
        };
    }
    if error.kind() == ErrorKind::AddrNotAvailable {
        let mend = "give an address of this machine; 0.0.0.0 is all of them";
        let what = format!("{} is no address of this machine", address.ip());
        return Finding::problem(what, mend);
    }
    let what = format!("{address} for {name} cannot be listened on: {error}");
    Finding::problem(what, other)
}

/// The process that listens on a port, if this user may see it.
fn owner(port: u16) -> Option<(u32, String)> {
    let tables = ["/proc/net/tcp", "/proc/net/tcp6"];
    let tables: String = tables
        .iter()
        .filter_map(|path| fs::read_to_string(path).ok())
        .collect();
    let socket = format!("socket:[{}]", inode(&tables, port)?);
    let processes = fs::read_dir("/proc").ok()?.flatten();
    let pids = processes.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    let mut owners = pids.filter(|pid| {
        let files = fs::read_dir(format!("/proc/{pid}/fd"));
        { files.into_iter().flatten().flatten() }.any(|file| {
            fs::read_link(file.path()).is_ok_and(|target| target.as_os_str() == socket.as_str())
        })
    });
    let pid = owners.next()?;
    let name = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
    Some((pid, name.trim().to_owned()))
}

/// The inode of the socket that listens on a port, from the kernel's table.
fn inode(table: &str, port: u16) -> Option<&str> {
    let end = format!(":{port:04X}");
    table.lines().find_map(|line| {
        let mut columns = line.split_whitespace();
        let (_, local, _, state) = (
            columns.next()?,
            columns.next()?,
            columns.next()?,
            columns.next()?,
        );
        (local.ends_with(&end) && state == LISTENS).then(|| columns.nth(5))?
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_listens_is_found() {
        let table = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n   \
             0: 0100007F:1F90 00000000:0000 01 00000000:00000000 00:00000000 00000000  1000        0 111 1\n   \
             1: 0100007F:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000  1000        0 222 1\n";
        assert_eq!(inode(table, 8080), Some("222"));
        assert_eq!(inode(table, 8081), None);
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        assert_eq!(owner(port).map(|(pid, _)| pid), Some(std::process::id()));
    }
}
