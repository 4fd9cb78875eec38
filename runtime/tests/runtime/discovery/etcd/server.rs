//! A real etcd on free ports, with a data folder of its own.

use std::fs;
use std::net::TcpListener;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};
use tempfile::TempDir;

use super::admin::Admin;
use crate::support::soon;

const MISSING: &str = "cannot start the etcd server, which these tests need: `cargo xtask test` installs it, or run: \
    sudo apt-get install --yes etcd-server";

/// A server. Dropping it kills it.
pub(super) struct EtcdServer {
    folder: TempDir,
    client_port: u16,
    peer_port: u16,
    options: Vec<String>,
    scheme: &'static str,
    child: Child,
}

impl EtcdServer {
    pub(super) async fn start() -> Self {
        let mut server = Self::spawned("http", Vec::new());
        soon(Box::pin(async {
            while !server.is_ready().await {
                // It lost the race for its ports.
                [server.client_port, server.peer_port] = free_ports();
                server.respawn();
            }
        }))
        .await;
        server
    }

    /// A server with TLS and the certificates in `options`. It may not be ready yet.
    pub(super) fn start_with_tls(options: Vec<String>) -> Self {
        Self::spawned("https", options)
    }

    fn spawned(scheme: &'static str, options: Vec<String>) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let [client_port, peer_port] = free_ports();
        let child = spawn(
            folder.path().join("data"),
            client_port,
            peer_port,
            scheme,
            &options,
        );
        Self {
            folder,
            client_port,
            peer_port,
            options,
            scheme,
            child,
        }
    }

    pub(super) fn endpoint(&self) -> String {
        format!("{}://{}", self.scheme, self.address())
    }

    /// Host and port.
    pub(super) fn address(&self) -> String {
        format!("127.0.0.1:{}", self.client_port)
    }

    /// For operations that discovery does not have.
    pub(super) fn admin(&self) -> Admin {
        Admin::new(self.address())
    }

    /// Like [`Self::admin`], after the server accepts this user.
    pub(super) async fn admin_as(&self, user: &str, password: &str) -> Admin {
        soon(async {
            loop {
                match self.admin().authenticated(user, password).await {
                    Ok(admin) => return admin,
                    Err(_) => tokio::time::sleep(RETRY).await,
                }
            }
        })
        .await
    }

    /// Kills it with SIGKILL.
    pub(super) fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Restarts it with its data on the same ports, after [`Self::kill`].
    pub(super) async fn restart(&mut self) {
        soon(Box::pin(async {
            loop {
                self.respawn();
                // Another process may hold a port for a moment.
                if self.is_ready().await {
                    return;
                }
            }
        }))
        .await;
    }

    /// Like [`Self::restart`], without waiting until it responds.
    pub(super) fn respawn(&mut self) {
        let data = self.folder.path().join("data");
        self.child = spawn(
            data,
            self.client_port,
            self.peer_port,
            self.scheme,
            &self.options,
        );
    }

    /// Restarts it without data, after [`Self::kill`].
    pub(super) async fn restart_empty(&mut self) {
        fs::remove_dir_all(self.folder.path().join("data")).unwrap();
        self.restart().await;
    }

    /// Stops the process: its connections stay open, and it responds to nothing.
    pub(super) fn freeze(&self) {
        kill_process(self.pid(), Signal::STOP).unwrap();
        // Returns when the last thread has stopped.
        waitpid(Some(self.pid()), WaitOptions::UNTRACED).unwrap();
    }

    pub(super) fn thaw(&self) {
        kill_process(self.pid(), Signal::CONT).unwrap();
    }

    fn pid(&self) -> Pid {
        Pid::from_child(&self.child)
    }

    /// Waits until it responds; `false` if it has ended instead.
    async fn is_ready(&mut self) -> bool {
        while self.child.try_wait().unwrap().is_none() {
            // Linearizable, so it has a leader.
            if self.admin().revision().await.is_ok() {
                return true;
            }
            tokio::time::sleep(RETRY).await;
        }
        false
    }
}

impl Drop for EtcdServer {
    fn drop(&mut self) {
        // It may be dead already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

const RETRY: std::time::Duration = std::time::Duration::from_millis(20);

fn spawn(
    data: PathBuf,
    client_port: u16,
    peer_port: u16,
    scheme: &str,
    options: &[String],
) -> Child {
    let client = format!("{scheme}://127.0.0.1:{client_port}");
    let peer = format!("http://127.0.0.1:{peer_port}");
    Command::new("etcd")
        .args(["--name", "test", "--log-level", "fatal", "--data-dir"])
        .arg(data)
        .args(["--listen-client-urls", &client])
        .args(["--advertise-client-urls", &client])
        .args(["--listen-peer-urls", &peer])
        .args(["--initial-advertise-peer-urls", &peer])
        .args(["--initial-cluster", &format!("test={peer}")])
        .args(options)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .expect(MISSING)
}

/// Ports that were free a moment ago.
fn free_ports<const N: usize>() -> [u16; N] {
    let listeners: [TcpListener; N] =
        std::array::from_fn(|_| TcpListener::bind("127.0.0.1:0").unwrap());
    listeners.map(|listener| listener.local_addr().unwrap().port())
}
