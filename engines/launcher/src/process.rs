//! The server's process, in a group that dies with this process.

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use genset_process::{LineLimits, Process};
use tokio::process::Command;
use tokio_util::task::TaskTracker;

use crate::command::Plan;
use crate::config::LauncherConfig;
use crate::key::ApiKey;
use crate::launch::Ports;
use crate::lines::log;

/// Starts the program, listening on its port for who has the key. What it prints goes to the log.
///
/// # Errors
/// As the system says; `NotFound` when there is no such program.
pub(crate) fn spawn(
    config: &LauncherConfig,
    plan: &Plan,
    ports: &Ports,
    key: &ApiKey,
    tasks: &TaskTracker,
) -> io::Result<Process> {
    let mut command = Command::new(&plan.program);
    config.inherited_env.apply(command.as_std_mut());
    command
        .args(plan.args(ports.http))
        // Without it, Python holds its lines back while it has a pipe to write to.
        .env("PYTHONUNBUFFERED", "1")
        .envs(&config.env)
        .envs(plan.env.iter().map(|(name, value)| (name, value)))
        .envs(ports.side_channel.iter().flat_map(side_channel));
    // The server reads its key there.
    let settings = key.give(plan.dialect.flags().key, &mut command)?;
    let mut process = Process::spawn(command, Duration::ZERO, settings)?;
    let limits = LineLimits {
        kept: config.log_lines,
        keeps_stdout: true,
        log: config.log_limit,
    };
    let server = config.kind.name();
    process.follow(tasks, limits, move |_, line| log(server, line));
    Ok(process)
}

/// What vLLM is told about where the connectors of others ask it for KV blocks.
fn side_channel(address: &SocketAddr) -> [(&'static str, String); 2] {
    [
        ("VLLM_NIXL_SIDE_CHANNEL_HOST", address.ip().to_string()),
        ("VLLM_NIXL_SIDE_CHANNEL_PORT", address.port().to_string()),
    ]
}
