//! Workers and frontends as separate processes, which meet in a directory of the test.

use std::fs::DirBuilder;
use std::net::SocketAddr;
use std::os::unix::fs::DirBuilderExt;

use tempfile::TempDir;
use tokio::process::Command;

use crate::support::{Ended, Server, genset, run_with, until};
use crate::worker::Worker;

/// Environment variables of one process: names and values.
pub(crate) type Environment<'a> = &'a [(&'a str, &'a str)];

/// Longer than the default, because a busy machine is not a fault.
const PEER_TIMEOUT: &str = "--peer-timeout=60";

/// The place where the processes of one test meet.
pub(crate) struct Fleet {
    folder: TempDir,
}

impl Fleet {
    pub(crate) fn new() -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        // A command that only inspects a fleet creates no directory.
        let made = DirBuilder::new()
            .mode(0o700)
            .create(folder.path().join("discovery"));
        made.expect("a folder");
        Self { folder }
    }

    /// A command of the binary, with the fleet's discovery.
    pub(crate) fn command(&self, words: &[&str], environment: Environment<'_>) -> Command {
        let mut command = genset(words);
        command
            .arg("--discovery-path")
            .arg(self.folder.path().join("discovery"))
            .envs(environment.iter().copied());
        command
    }

    /// Runs another command of the binary to its end, with the fleet's discovery.
    pub(crate) async fn ask(&self, words: &[&str]) -> Ended {
        run_with(self.command(words, &[]), b"").await
    }

    /// Starts a worker of the sample engine and waits until it is ready.
    pub(crate) async fn worker(&self, environment: Environment<'_>) -> Worker {
        self.worker_of(&["in=dyn", "out=sample"], environment).await
    }

    /// Starts a worker and waits until it is ready.
    pub(crate) async fn worker_of(&self, words: &[&str], environment: Environment<'_>) -> Worker {
        let words = [&["run"], words, &["--status-port=0", PEER_TIMEOUT]].concat();
        Worker::ready(self.command(&words, environment)).await
    }

    /// Starts a frontend and waits until it serves a model.
    pub(crate) async fn frontend(&self, environment: Environment<'_>) -> Server {
        let words = ["run", "in=http", "out=dyn", "--http-port=0", PEER_TIMEOUT];
        let server = Server::spawn(self.command(&words, environment)).await;
        until(async || server.get("/ready").await.status == 200).await;
        server
    }

    /// The loopback addresses that the directory contains.
    pub(crate) fn listed_addresses(&self) -> Vec<SocketAddr> {
        let entries = std::fs::read_dir(self.folder.path().join("discovery")).expect("a folder");
        let texts = entries.filter_map(|entry| std::fs::read_to_string(entry.ok()?.path()).ok());
        texts.flat_map(|text| loopback_addresses(&text)).collect()
    }
}

fn loopback_addresses(text: &str) -> Vec<SocketAddr> {
    let starts = text.match_indices("127.0.0.1:").map(|(start, _)| start);
    starts
        .filter_map(|start| {
            let rest = text.get(start..)?;
            let end = rest.find(|c: char| !c.is_ascii_digit() && c != '.' && c != ':');
            rest.get(..end.unwrap_or(rest.len()))?.parse().ok()
        })
        .collect()
}
