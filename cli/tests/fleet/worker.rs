//! A running worker, observed through its status port and its log.

use std::net::{Shutdown, SocketAddr, TcpStream};
use std::os::fd::RawFd;
use std::process::Stdio;

use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, Signal, pidfd_getfd, pidfd_open};
use tempfile::NamedTempFile;
use tokio::process::{Child, Command};

use crate::support::{Exchange, LOOK_AGAIN, Response, send_signal, soon, until};

pub(crate) struct Worker {
    child: Child,
    /// The process has its own handle: a shared handle has one offset for both reading and writing.
    log: NamedTempFile,
    status: SocketAddr,
}

impl Worker {
    /// Starts `command` and waits until it prints the address of its status port.
    pub(crate) async fn spawn(mut command: Command) -> Self {
        let log = NamedTempFile::new().expect("a file for the log");
        command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log.reopen().expect("a second handle"));
        let child = command.spawn().expect("the binary starts");
        let mut worker = Self {
            child,
            log,
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

    /// Starts `command` and waits until the worker is ready.
    pub(crate) async fn ready(command: Command) -> Self {
        let worker = Self::spawn(command).await;
        until(async || worker.get("/ready").await.status == 200).await;
        worker
    }

    pub(crate) async fn get(&self, path: &str) -> Response {
        let exchange = Exchange::try_begin(self.status, "GET", path, "").await;
        let exchange = exchange.unwrap_or_else(|error| panic!("{error}: {}", self.log()));
        exchange.response().await
    }

    /// The sum of a metric's samples.
    pub(crate) async fn metric(&self, name: &str) -> f64 {
        let text = self.get("/metrics").await.body;
        let samples = text.lines().filter(|line| {
            let rest = line.strip_prefix(name).unwrap_or_default();
            rest.starts_with(['{', ' '])
        });
        let values = samples.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok());
        values.sum::<f64>() + 0.0
    }

    /// Requests in the engine.
    pub(crate) async fn running(&self) -> f64 {
        self.metric("genset_worker_running_requests").await
    }

    /// The number of finished requests, including canaries.
    pub(crate) async fn finished(&self) -> f64 {
        self.metric("genset_worker_requests_total").await
    }

    /// Waits until this many requests are in the engine.
    pub(crate) async fn until_running(&self, count: f64) {
        until(async || self.running().await == count).await;
    }

    pub(crate) fn log(&self) -> String {
        std::fs::read_to_string(self.log.path()).expect("a log")
    }

    /// Waits until the log contains this text.
    pub(crate) async fn until_log(&self, text: &str) {
        until(async || self.log().contains(text)).await;
    }

    pub(crate) fn signal(&self, signal: Signal) {
        send_signal(&self.child, signal);
    }

    /// Shuts down its TCP connections from outside, all at once; returns their number. Both ends notice, as with a cut cable that
    /// the network reports.
    pub(crate) fn cut_connections(&self) -> usize {
        let pid = self
            .child
            .id()
            .and_then(|id| Pid::from_raw(id.cast_signed()));
        let pid = pid.expect("it runs");
        let process = pidfd_open(pid, PidfdFlags::empty()).expect("it runs");
        let open = std::fs::read_dir(format!("/proc/{}/fd", pid.as_raw_pid())).expect("it runs");
        let numbers = open.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
        let copies = numbers.filter_map(|number: RawFd| {
            // A descriptor that was just closed is skipped.
            pidfd_getfd(&process, number, PidfdGetfdFlags::empty()).ok()
        });
        // Only a TCP connection has such a peer address and can be shut down.
        let cut = copies.filter(|copy| {
            let stream = TcpStream::from(copy.try_clone().expect("a descriptor"));
            stream.peer_addr().is_ok() && stream.shutdown(Shutdown::Both).is_ok()
        });
        cut.count()
    }

    /// Whether it has exited by itself.
    pub(crate) fn has_ended(&mut self) -> bool {
        self.child.try_wait().expect("a child").is_some()
    }

    /// Kills it with SIGKILL.
    pub(crate) async fn kill(mut self) {
        self.child.kill().await.expect("it runs");
    }

    /// Sends SIGTERM and expects a clean end; returns the log.
    pub(crate) async fn stop(mut self) -> String {
        self.signal(Signal::TERM);
        let ended = soon(self.child.wait()).await.expect("it ends");
        let log = self.log();
        assert_eq!(ended.code(), Some(0), "{log}");
        log
    }

    /// Sends SIGTERM and waits for its exit, even if its grace period ends before its requests do.
    pub(crate) async fn leave(self) {
        self.signal(Signal::TERM);
        let code = self.exit_code().await;
        // 3 means that it had unfinished requests.
        assert!(matches!(code, Some(0 | 3)), "{code:?}");
    }

    /// Waits until it has exited; `None` if a signal killed it.
    pub(crate) async fn exit_code(mut self) -> Option<i32> {
        soon(self.child.wait()).await.expect("it ends").code()
    }
}

/// The address in a complete line of the log.
fn status_address(log: &str) -> Option<SocketAddr> {
    let (_, rest) = log.split_once("status on http://")?;
    let (address, _) = rest.split_once('\n')?;
    address.trim().parse().ok()
}
