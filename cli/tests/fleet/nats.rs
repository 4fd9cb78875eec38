//! A real nats-server on a free port, beside an etcd.

use std::process::Stdio;

use tokio::net::TcpStream;
use tokio::process::{Child, Command};

use crate::etcd::Etcd;
use crate::meeting::{Meeting, Outage};
use crate::ports::free_ports;
use crate::support::{LOOK_AGAIN, soon};

const MISSING: &str = "cannot start nats-server, which these tests need: `cargo xtask test` installs it, or run: \
    sudo apt-get install --yes nats-server";

/// Listed in etcd, called over NATS. Dropping it kills both servers.
pub(crate) struct EtcdAndNats {
    etcd: Etcd,
    port: u16,
    child: Child,
}

impl EtcdAndNats {
    pub(crate) async fn start() -> Self {
        let etcd = Etcd::start().await;
        let [port] = free_ports();
        let child = spawn(port);
        let mut both = Self { etcd, port, child };
        both.until_listening().await;
        both
    }

    /// Kills nats-server with SIGKILL.
    pub(crate) async fn kill_nats(&mut self) {
        self.child.kill().await.expect("it runs");
    }

    /// Starts it again on the same port.
    pub(crate) async fn start_nats_again(&mut self) {
        self.child = spawn(self.port);
        self.until_listening().await;
    }

    async fn until_listening(&mut self) {
        soon(async {
            while TcpStream::connect(("127.0.0.1", self.port)).await.is_err() {
                // Another process may briefly have the port.
                if self.child.try_wait().expect("a child").is_some() {
                    self.child = spawn(self.port);
                }
                tokio::time::sleep(LOOK_AGAIN).await;
            }
        })
        .await;
    }
}

impl Meeting for EtcdAndNats {
    fn flags(&self) -> Vec<String> {
        let mut flags = self.etcd.flags();
        flags.push("--request-plane=nats".into());
        flags.push(format!("--nats-server=nats://127.0.0.1:{}", self.port));
        flags
    }

    async fn interrupt(&mut self, outage: Outage) {
        self.etcd.interrupt(outage).await;
    }

    async fn resume(&mut self, outage: Outage) {
        self.etcd.resume(outage).await;
    }
}

fn spawn(port: u16) -> Child {
    Command::new("nats-server")
        .args(["--addr", "127.0.0.1", "--port", &port.to_string()])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .kill_on_drop(true)
        .spawn()
        .expect(MISSING)
}
