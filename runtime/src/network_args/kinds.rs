//! Where processes meet: the words of `--discovery-backend` and `--request-plane`, and which of them holds where none was given.

use std::fmt;
use std::str::FromStr;

use genset_backend_common::EngineError;

use super::NetworkArgs;

/// Where instances are listed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DiscoveryBackend {
    /// In this process.
    Memory,
    /// In a directory.
    File,
    /// In etcd.
    Etcd,
}

/// How requests travel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RequestPlaneKind {
    /// As function calls inside this process.
    Memory,
    /// Over TCP connections from caller to worker.
    Tcp,
    /// Over NATS.
    Nats,
}

/// What a process does when no flag says how it meets others.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reach {
    /// It meets nobody: memory.
    ThisProcess,
    /// It meets the other processes of this user: file and tcp.
    OtherProcesses,
}

impl NetworkArgs {
    /// What holds when one of the two flags is given: the other suits it.
    pub(super) fn kinds(
        &self,
        reach: Reach,
    ) -> Result<(DiscoveryBackend, RequestPlaneKind), EngineError> {
        use {DiscoveryBackend as D, RequestPlaneKind as P};
        let kinds = match (self.discovery_backend, self.request_plane, reach) {
            (None, None, Reach::ThisProcess) => (D::Memory, P::Memory),
            (None, None, Reach::OtherProcesses) => (D::File, P::Tcp),
            (Some(D::Memory), None, _) => (D::Memory, P::Memory),
            (Some(backend), None, _) => (backend, P::Tcp),
            (None, Some(P::Memory), _) => (D::Memory, P::Memory),
            (None, Some(plane), _) => (D::File, plane),
            (Some(backend), Some(plane), _) => (backend, plane),
        };
        let (backend, plane) = kinds;
        if plane == P::Memory && backend != D::Memory {
            let problem = "memory reaches this process alone, and other processes would be told of it; use tcp or nats";
            return Err(EngineError::invalid_argument("--request-plane", problem));
        }
        if backend == D::Memory && reach == Reach::OtherProcesses {
            let problem = "memory lists instances in this process alone, and this command meets others; use file or etcd";
            return Err(EngineError::invalid_argument(
                "--discovery-backend",
                problem,
            ));
        }
        Ok(kinds)
    }
}

/// Parses one of several names; the error lists them.
fn one_of<T: Copy>(text: &str, known: &[(&str, T)]) -> Result<T, String> {
    let found = known.iter().find(|(name, _)| *name == text);
    found.map(|(_, value)| *value).ok_or_else(|| {
        let names: Vec<_> = known.iter().map(|(name, _)| *name).collect();
        format!("{text:?} is none of {}", names.join(", "))
    })
}

impl FromStr for DiscoveryBackend {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        one_of(
            text,
            &[
                ("memory", Self::Memory),
                ("file", Self::File),
                ("etcd", Self::Etcd),
            ],
        )
    }
}

impl FromStr for RequestPlaneKind {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        one_of(
            text,
            &[
                ("memory", Self::Memory),
                ("tcp", Self::Tcp),
                ("nats", Self::Nats),
            ],
        )
    }
}

impl fmt::Display for DiscoveryBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Memory => "memory",
            Self::File => "file",
            Self::Etcd => "etcd",
        })
    }
}

impl fmt::Display for RequestPlaneKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Memory => "memory",
            Self::Tcp => "tcp",
            Self::Nats => "nats",
        })
    }
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
        for words in [["--request-plane=memory"], ["--discovery-backend=memory"]] {
            args(&words).kinds(Reach::OtherProcesses).unwrap_err();
        }
    }
}
