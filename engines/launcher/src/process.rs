//! The server's process, in a group that dies with this process.

use std::io;
use std::net::SocketAddr;
use std::process::Stdio;
use std::time::Duration;

use genset_process::{GuardedGroup, OomKills};
use rustix::process::{Pid, Signal, kill_process};
use tempfile::NamedTempFile;
use tokio::process::{Child, Command};

use crate::command::Plan;
use crate::config::LauncherConfig;
use crate::key::ApiKey;
use crate::launch::Ports;

/// A server that runs.
#[derive(Debug)]
pub(crate) struct Process {
    /// Dropped first: the group is killed while its leader is still ours.
    pub(crate) group: GuardedGroup,
    pub(crate) child: Child,
    pub(crate) oom_kills: Option<OomKills>,
    /// Where the server reads its key.
    _settings: Option<NamedTempFile>,
}

impl Process {
    /// Starts the program, listening on its port for who has the key.
    ///
    /// # Errors
    /// As the system says; `NotFound` when there is no such program.
    pub(crate) fn spawn(
        config: &LauncherConfig,
        plan: &Plan,
        ports: &Ports,
        key: &ApiKey,
    ) -> io::Result<Self> {
        let group = GuardedGroup::start(Duration::ZERO)?;
        let mut command = Command::new(&plan.program);
        config.inherited_env.apply(command.as_std_mut());
        command
            .args(plan.args(ports.http))
            // Without it, Python holds its lines back while it has a pipe to write to.
            .env("PYTHONUNBUFFERED", "1")
            .envs(&config.env)
            .envs(plan.env.iter().map(|(name, value)| (name, value)))
            .envs(ports.side_channel.iter().flat_map(side_channel))
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .process_group(group.id())
            .kill_on_drop(true);
        let settings = key.give(plan.dialect.flags().key, &mut command)?;
        let child = command.spawn()?;
        Ok(Self {
            oom_kills: child.id().and_then(OomKills::of),
            child,
            group,
            _settings: settings,
        })
    }

    /// Asks the server itself to go; what it started is its own to end.
    pub(crate) fn terminate(&self) {
        let pid = self
            .child
            .id()
            .and_then(|id| i32::try_from(id).ok())
            .and_then(Pid::from_raw);
        if let Some(pid) = pid {
            // It is gone already: then there is nothing to ask.
            kill_process(pid, Signal::TERM).unwrap_or_default();
        }
    }

    /// Kills whoever is left and reaps them.
    pub(crate) async fn end(mut self) {
        // By itself too: it may have left the group. It is gone already: the usual case.
        self.child.start_kill().unwrap_or_default();
        self.group.kill();
        // Killed, so this ends; a process that the kernel cannot end is the kernel's to report.
        drop(self.child.wait().await);
        self.group.end().await;
    }
}

/// What vLLM is told about where the connectors of others ask it for KV blocks.
fn side_channel(address: &SocketAddr) -> [(&'static str, String); 2] {
    [
        ("VLLM_NIXL_SIDE_CHANNEL_HOST", address.ip().to_string()),
        ("VLLM_NIXL_SIDE_CHANNEL_PORT", address.port().to_string()),
    ]
}
