//! A real etcd on free ports, with its own data folder.

use std::net::SocketAddr;
use std::process::Stdio;

use rustix::process::Signal;
use tempfile::TempDir;
use tokio::process::{Child, Command};

use crate::meeting::{Meeting, Outage};
use crate::ports::free_ports;
use crate::support::{Exchange, LOOK_AGAIN, send_signal, soon};

const MISSING: &str = "cannot start the etcd server, which these tests need: `cargo xtask test` installs it, or run: \
    sudo apt-get install --yes etcd-server";

/// Etcd and TCP. Dropping it kills the server.
pub(crate) struct Etcd {
    folder: TempDir,
    ports: [u16; 2],
    child: Child,
}

impl Etcd {
    pub(crate) async fn start() -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let ports = free_ports();
        let child = spawn(&folder, ports);
        let mut etcd = Self {
            folder,
            ports,
            child,
        };
        soon(async {
            while !etcd.is_ready().await {
                // It lost the race for its ports.
                etcd.ports = free_ports();
                etcd.child = spawn(&etcd.folder, etcd.ports);
            }
        })
        .await;
        etcd
    }

    /// Waits until it answers; `false` if it has ended instead.
    async fn is_ready(&mut self) -> bool {
        while self.child.try_wait().expect("a child").is_none() {
            // It reports health only once it has a leader.
            let address = SocketAddr::from(([127, 0, 0, 1], self.ports[0]));
            let asked = Exchange::try_begin(address, "GET", "/health", "").await;
            if asked.is_ok_and(|answer| answer.status == 200) {
                return true;
            }
            tokio::time::sleep(LOOK_AGAIN).await;
        }
        false
    }
}

impl Meeting for Etcd {
    fn flags(&self) -> Vec<String> {
        vec![
            "--discovery-backend=etcd".into(),
            format!("--etcd-endpoints=http://127.0.0.1:{}", self.ports[0]),
            // Shorter than the default, so that tests wait less for it.
            "--etcd-lease-ttl=3".into(),
        ]
    }

    async fn interrupt(&mut self, outage: Outage) {
        match outage {
            Outage::Gone => self.child.kill().await.expect("it runs"),
            Outage::Stuck => send_signal(&self.child, Signal::STOP),
        }
    }

    async fn resume(&mut self, outage: Outage) {
        match outage {
            Outage::Gone => self.child = spawn(&self.folder, self.ports),
            Outage::Stuck => send_signal(&self.child, Signal::CONT),
        }
        soon(async {
            while !self.is_ready().await {
                // Another process holds one of its ports for a moment.
                self.child = spawn(&self.folder, self.ports);
            }
        })
        .await;
    }
}

fn spawn(folder: &TempDir, [client_port, peer_port]: [u16; 2]) -> Child {
    let client = format!("http://127.0.0.1:{client_port}");
    let peer = format!("http://127.0.0.1:{peer_port}");
    Command::new("etcd")
        .args(["--name", "test", "--log-level", "fatal", "--data-dir"])
        .arg(folder.path().join("data"))
        .args(["--listen-client-urls", &client])
        .args(["--advertise-client-urls", &client])
        .args(["--listen-peer-urls", &peer])
        .args(["--initial-advertise-peer-urls", &peer])
        .args(["--initial-cluster", &format!("test={peer}")])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .kill_on_drop(true)
        .spawn()
        .expect(MISSING)
}
