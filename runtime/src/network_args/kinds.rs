//! Where processes meet: the values of `--discovery-backend` and `--request-plane`, and their defaults.

use std::net::IpAddr;

use genset_backend_common::EngineError;

use super::NetworkArgs;

/// The default address of etcd.
const USUAL_ETCD: &str = "http://127.0.0.1:2379";

/// The default address of NATS.
const USUAL_NATS: &str = "nats://127.0.0.1:4222";

genset_backend_common::named! {
    /// Where instances are listed.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub enum DiscoveryBackend: FromStr {
        /// In this process.
        Memory = "memory",
        /// In a directory.
        File = "file",
        /// In etcd.
        Etcd = "etcd",
    }
}

genset_backend_common::named! {
    /// How requests travel.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub enum RequestPlaneKind: FromStr {
        /// As function calls inside this process.
        Memory = "memory",
        /// Over TCP connections from caller to worker.
        Tcp = "tcp",
        /// Over NATS.
        Nats = "nats",
    }
}

/// The default reach of a process, if no flag sets how it meets others.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reach {
    /// This process only: memory.
    ThisProcess,
    /// Other processes: through the named servers, otherwise this user's processes by file and tcp.
    OtherProcesses,
}

impl NetworkArgs {
    /// The discovery backend and the request plane. Defaults depend on the other flag and on the named servers.
    ///
    /// # Errors
    /// `InvalidArgument`, naming the flag, if other processes could not be reached.
    pub fn kinds(&self, reach: Reach) -> Result<(DiscoveryBackend, RequestPlaneKind), EngineError> {
        use {DiscoveryBackend as D, RequestPlaneKind as P};
        let listed = match is_named(&self.etcd_endpoints) && self.discovery_path.is_none() {
            true => D::Etcd,
            false => D::File,
        };
        let carried = match is_named(&self.nats_server) && self.wire_tls.wire_tls_ca.is_none() {
            true => P::Nats,
            false => P::Tcp,
        };
        let kinds = match (self.discovery_backend, self.request_plane, reach) {
            (None, None, Reach::ThisProcess) => (D::Memory, P::Memory),
            (None, None, Reach::OtherProcesses) => (listed, carried),
            (Some(D::Memory), None, _) => (D::Memory, P::Memory),
            (Some(backend), None, _) => (backend, carried),
            (None, Some(P::Memory), _) => (D::Memory, P::Memory),
            (None, Some(plane), _) => (listed, plane),
            (Some(backend), Some(plane), _) => (backend, plane),
        };
        let (backend, plane) = kinds;
        if plane == P::Memory && backend != D::Memory {
            let problem = "memory works inside one process only, but other processes would find this one; use tcp or nats";
            return Err(EngineError::invalid_argument("--request-plane", problem));
        }
        if backend == D::Memory && reach == Reach::OtherProcesses {
            let problem = "memory lists instances of one process only, but this command works with other processes; use file or etcd";
            return Err(EngineError::invalid_argument(
                "--discovery-backend",
                problem,
            ));
        }
        Ok(kinds)
    }

    /// The named servers of etcd, or else the default.
    #[must_use]
    pub fn etcd_servers(&self) -> Vec<String> {
        named_or(&self.etcd_endpoints, USUAL_ETCD)
    }

    /// The named servers of NATS, or else the default.
    #[must_use]
    pub fn nats_servers(&self) -> Vec<String> {
        named_or(&self.nats_server, USUAL_NATS)
    }

    /// Whether processes of several machines meet, that is, share an etcd that is not local to this machine.
    pub(super) fn spans_machines(&self, backend: DiscoveryBackend) -> bool {
        let servers = self.etcd_servers();
        backend == DiscoveryBackend::Etcd && !servers.iter().all(|server| is_local(server))
    }

    /// Describes for operators where processes meet.
    pub(super) fn meeting_place(
        &self,
        (backend, plane): (DiscoveryBackend, RequestPlaneKind),
    ) -> String {
        let at = |servers: Vec<String>| {
            let hosts: Vec<&str> = servers.iter().map(|server| host_of(server)).collect();
            hosts.join(", ")
        };
        let listed = match backend {
            DiscoveryBackend::Memory => backend.to_string(),
            DiscoveryBackend::File => format!("file in {}", self.directory().display()),
            DiscoveryBackend::Etcd => format!("etcd at {}", at(self.etcd_servers())),
        };
        let carried = match plane {
            RequestPlaneKind::Memory | RequestPlaneKind::Tcp => plane.to_string(),
            RequestPlaneKind::Nats => format!("nats at {}", at(self.nats_servers())),
        };
        format!("discovery: {listed}; request plane: {carried}")
    }
}

/// Whether servers are named; an empty variable names none.
fn is_named(servers: &[String]) -> bool {
    servers.iter().any(|server| !server.trim().is_empty())
}

fn named_or(servers: &[String], usual: &str) -> Vec<String> {
    match is_named(servers) {
        true => servers.to_vec(),
        false => vec![usual.to_owned()],
    }
}

/// The host and port of a URL, without scheme and password.
fn host_of(server: &str) -> &str {
    let rest = server.split_once("://").map_or(server, |(_, rest)| rest);
    let rest = rest.rsplit_once('@').map_or(rest, |(_, host)| host);
    rest.trim_end_matches('/')
}

/// Whether a server is reachable only from its own machine.
fn is_local(server: &str) -> bool {
    let host = host_of(server);
    let is_port = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit());
    let host = match host.rsplit_once(':') {
        Some((name, port)) if is_port(port) => name,
        Some(_) | None => host,
    };
    let address = host.trim_matches(['[', ']']).parse::<IpAddr>();
    host == "localhost" || address.is_ok_and(|address| address.is_loopback())
}

#[cfg(test)]
mod tests {
    use super::super::tests::args;
    use super::*;

    #[test]
    fn one_flag_makes_the_other_suit_it() {
        use {DiscoveryBackend as D, RequestPlaneKind as P};
        for (words, reach, kinds) in [
            (&[][..], Reach::ThisProcess, (D::Memory, P::Memory)),
            (&[], Reach::OtherProcesses, (D::File, P::Tcp)),
            (
                &["--discovery-backend=etcd"],
                Reach::ThisProcess,
                (D::Etcd, P::Tcp),
            ),
            (
                &["--request-plane=nats"],
                Reach::OtherProcesses,
                (D::File, P::Nats),
            ),
        ] {
            assert_eq!(args(words).kinds(reach).unwrap(), kinds, "{words:?}");
        }
        for (words, kinds) in [
            (&["--etcd-endpoints=http://e:2379"][..], (D::Etcd, P::Tcp)),
            (&["--nats-server=nats://n:4222"], (D::File, P::Nats)),
            (
                &["--etcd-endpoints=e", "--nats-server=n"],
                (D::Etcd, P::Nats),
            ),
            // An empty variable is read like this.
            (&["--etcd-endpoints=", "--nats-server="], (D::File, P::Tcp)),
            // An explicit directory or tcp takes precedence.
            (
                &["--etcd-endpoints=e", "--discovery-path=d"],
                (D::File, P::Tcp),
            ),
            (
                &["--nats-server=n", "--wire-tls-ca=ca.pem"],
                (D::File, P::Tcp),
            ),
            (
                &["--etcd-endpoints=e", "--discovery-backend=file"],
                (D::File, P::Tcp),
            ),
            (
                &["--nats-server=n", "--request-plane=tcp"],
                (D::File, P::Tcp),
            ),
        ] {
            let args = args(words);
            let met = args.kinds(Reach::OtherProcesses);
            assert_eq!(met.unwrap(), kinds, "{words:?}");
        }
        let named = args(&["--etcd-endpoints=e", "--nats-server=n"]);
        let alone = named.kinds(Reach::ThisProcess);
        assert_eq!(alone.unwrap(), (D::Memory, P::Memory));
        for words in [["--request-plane=memory"], ["--discovery-backend=memory"]] {
            args(&words).kinds(Reach::OtherProcesses).unwrap_err();
        }
    }

    #[test]
    fn an_etcd_of_this_machine_alone_lists_its_processes_alone() {
        for (servers, spans) in [
            ("", false),
            ("http://127.0.0.1:2379", false),
            ("localhost:2379,http://[::1]:2379", false),
            ("http://etcd:2379", true),
            ("http://localhost:2379,http://192.0.2.7", true),
        ] {
            let args = args(&[&format!("--etcd-endpoints={servers}")]);
            let etcd = args.spans_machines(DiscoveryBackend::Etcd);
            assert_eq!(etcd, spans, "{servers}");
            assert!(!args.spans_machines(DiscoveryBackend::File));
        }
    }

    #[test]
    fn an_operator_is_told_where_processes_meet_and_no_password() {
        let words = [
            "--etcd-endpoints=http://a:2379,http://b:2379",
            "--nats-server=nats://me:secret@n:4222/",
        ];
        let args = args(&words);
        let told = args.meeting_place(args.kinds(Reach::OtherProcesses).unwrap());
        let expected = "discovery: etcd at a:2379, b:2379; request plane: nats at n:4222";
        assert_eq!(told, expected);
    }
}
