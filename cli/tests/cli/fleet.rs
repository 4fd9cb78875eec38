//! Workers and frontends as processes of their own, which meet in a directory of the test.

use std::net::SocketAddr;
use std::process::Stdio;
use std::time::Duration;

use rustix::process::Signal;
use tempfile::{NamedTempFile, TempDir};
use tokio::process::{Child, Command};

use crate::support::{Ended, Exchange, Response, Server, genset, run_with, send_signal, soon};

/// How often something that must come is looked for.
const LOOK_AGAIN: Duration = Duration::from_millis(20);

/// Environment of one process: names and values.
pub(crate) type Environment<'a> = &'a [(&'a str, &'a str)];

/// Where the processes of one test meet.
pub(crate) struct Fleet {
    folder: TempDir,
}

impl Fleet {
    pub(crate) fn new() -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        Self { folder }
    }

    fn command(&self, words: &[&str], environment: Environment<'_>) -> Command {
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
        let words = [&["run"], words, &["--status-port=0"]].concat();
        let worker = Worker::spawn(self.command(&words, environment)).await;
        worker.until_ready().await;
        worker
    }

    /// Starts a frontend and waits until it serves a model.
    pub(crate) async fn frontend(&self, environment: Environment<'_>) -> Server {
        let words = ["run", "in=http", "out=dyn", "--http-port=0"];
        let server = Server::spawn(self.command(&words, environment)).await;
        soon(async {
            while server.get("/ready").await.status != 200 {
                tokio::time::sleep(LOOK_AGAIN).await;
            }
        })
        .await;
        server
    }

    /// The addresses of loopback that the directory names.
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

/// A running worker, seen through its status port.
pub(crate) struct Worker {
    child: Child,
    /// Its log. The process has a handle of its own: a shared one has one place, at which both would read and write.
    stderr: NamedTempFile,
    status: SocketAddr,
}

impl Worker {
    async fn spawn(mut command: Command) -> Self {
        let stderr = NamedTempFile::new().expect("a file for the log");
        command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(stderr.reopen().expect("a second handle"));
        let child = command.spawn().expect("the binary starts");
        let mut worker = Self {
            child,
            stderr,
            status: SocketAddr::from(([127, 0, 0, 1], 0)),
        };
        worker.status = soon(async {
            loop {
                if let Some(address) = status_address(&worker.log()) {
                    break address;
                }
                let ended = worker.child.try_wait().expect("a child");
                assert_eq!(ended, None, "{}", worker.log());
                tokio::time::sleep(LOOK_AGAIN).await;
            }
        })
        .await;
        worker
    }

    async fn until_ready(&self) {
        soon(async {
            while self.get("/ready").await.status != 200 {
                tokio::time::sleep(LOOK_AGAIN).await;
            }
        })
        .await;
    }

    pub(crate) async fn get(&self, path: &str) -> Response {
        Exchange::begin(self.status, "GET", path, "")
            .await
            .response()
            .await
    }

    pub(crate) fn log(&self) -> String {
        std::fs::read_to_string(self.stderr.path()).expect("a log")
    }

    /// Sends SIGTERM and expects a clean end; returns the log.
    pub(crate) async fn stop(mut self) -> String {
        send_signal(&self.child, Signal::TERM);
        let ended = soon(self.child.wait()).await.expect("it ends");
        let log = self.log();
        assert_eq!(ended.code(), Some(0), "{log}");
        log
    }
}

/// The address in a whole line of the log.
fn status_address(log: &str) -> Option<SocketAddr> {
    let (_, rest) = log.split_once("status on http://")?;
    let (address, _) = rest.split_once('\n')?;
    address.trim().parse().ok()
}
