//! A real nats-server on a free port, with a folder of its own.

use std::fs;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use genset_backend_common::MetricsRegistry;
use genset_runtime::plane::{NatsConfig, WireConfig, WirePlane};
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

use crate::support::soon;

const MISSING: &str = "cannot start nats-server, which these tests need: `cargo xtask test` installs it, or run: \
    sudo apt-get install --yes nats-server";

const RETRY: Duration = Duration::from_millis(20);

/// A server. Dropping it kills it.
pub(crate) struct NatsServer {
    folder: TempDir,
    settings: String,
    port: u16,
    child: Child,
}

impl NatsServer {
    pub(crate) async fn start() -> Self {
        Self::start_with("").await
    }

    /// A server with these lines in its configuration.
    pub(crate) async fn start_with(settings: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        // The server chooses a free port and reports it.
        let child = spawn(folder.path(), settings, -1);
        let mut server = Self {
            folder,
            settings: settings.to_owned(),
            port: 0,
            child,
        };
        server.port = server.reported_port().await;
        server
    }

    /// Host and port.
    pub(crate) fn address(&self) -> String {
        format!("127.0.0.1:{}", self.port)
    }

    pub(crate) fn config(&self) -> NatsConfig {
        NatsConfig {
            servers: vec![format!("nats://{}", self.address())],
            ..NatsConfig::default()
        }
    }

    /// The plane of another process.
    pub(crate) fn plane(&self, config: WireConfig) -> WirePlane {
        plane(self.config(), config)
    }

    /// A plain client, for operations that planes never perform.
    pub(crate) async fn client(&self) -> async_nats::Client {
        async_nats::connect(self.address()).await.unwrap()
    }

    /// Kills it with SIGKILL.
    pub(crate) fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Restarts it on the same port, after [`Self::kill`].
    pub(crate) async fn restart(&mut self) {
        let port = self.port;
        soon(async {
            loop {
                self.child = spawn(self.folder.path(), &self.settings, i32::from(port));
                // Another process may hold the port for a moment.
                if self.is_listening().await {
                    return;
                }
            }
        })
        .await;
    }

    async fn is_listening(&mut self) -> bool {
        while self.child.try_wait().unwrap().is_none() {
            if tokio::net::TcpStream::connect(self.address()).await.is_ok() {
                return true;
            }
            tokio::time::sleep(RETRY).await;
        }
        false
    }

    /// Stops the process: its connections stay open and nothing moves.
    pub(crate) fn freeze(&self) {
        kill_process(Pid::from_child(&self.child), Signal::STOP).unwrap();
    }

    pub(crate) fn thaw(&self) {
        kill_process(Pid::from_child(&self.child), Signal::CONT).unwrap();
    }

    async fn reported_port(&mut self) -> u16 {
        soon(async {
            loop {
                if let Some(port) = reported_port(self.folder.path()) {
                    return port;
                }
                let ended = self.child.try_wait().unwrap();
                assert!(ended.is_none(), "nats-server ended: {}", self.log());
                tokio::time::sleep(RETRY).await;
            }
        })
        .await
    }

    fn log(&self) -> String {
        fs::read_to_string(self.folder.path().join("log")).unwrap_or_default()
    }
}

impl Drop for NatsServer {
    fn drop(&mut self) {
        // It may be dead already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

pub(crate) fn plane(nats: NatsConfig, config: WireConfig) -> WirePlane {
    WirePlane::nats(nats, config, &MetricsRegistry::default()).unwrap()
}

fn spawn(folder: &Path, settings: &str, port: i32) -> Child {
    let path = folder.join("nats.conf");
    let own = folder.display();
    let listen = format!(
        "host: \"127.0.0.1\"\nport: {port}\nports_file_dir: \"{own}\"\nlog_file: \"{own}/log\"\n"
    );
    fs::write(&path, listen + settings).unwrap();
    Command::new("nats-server")
        .arg("--config")
        .arg(path)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .expect(MISSING)
}

/// The port in the file that a server writes when it listens; `None` if the file is missing or incomplete.
fn reported_port(folder: &Path) -> Option<u16> {
    let file = fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .find(|path| path.extension().is_some_and(|end| end == "ports"))?;
    let ports: serde_json::Value = serde_json::from_slice(&fs::read(file).ok()?).ok()?;
    let url = ports["nats"][0].as_str()?;
    url.rsplit_once(':')?.1.parse().ok()
}
