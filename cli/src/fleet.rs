//! `genset models`, `genset top` and `genset control`: commands for operators of a running fleet.

mod control;
mod models;
mod top;

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use genset_backend_common::{EngineError, ErrorKind};
use genset_runtime::{DiscoveryBackend, NetworkArgs, Reach, Runtime};
use serde_json::{Value, json};
use unicode_width::UnicodeWidthStr as _;

pub(crate) use control::{ControlArgs, HELP as CONTROL_HELP, control};
pub(crate) use models::{ModelsArgs, models};
pub(crate) use top::{TopArgs, top, unanswered};

use crate::threads;

/// The time limit for finding workers.
const FIND_TIMEOUT: Duration = Duration::from_secs(5);

/// The exit code if a worker refused, failed or did not answer.
const FAILED: u8 = 1;

/// Where the fleet is found.
#[derive(Debug, Args)]
pub(crate) struct FleetArgs {
    /// TOML file with flags of genset run, by their long names
    #[arg(long, env = "GENSET_CONFIG", value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) network: NetworkArgs,
}

/// Runs `ask` on a runtime that reaches other processes, and then shuts it down.
///
/// # Errors
/// A network setting is wrong, discovery is unreachable, or the error of `ask`.
fn with_runtime<T>(
    network: &NetworkArgs,
    ask: impl AsyncFnOnce(&Runtime) -> Result<T, EngineError>,
) -> Result<T, EngineError> {
    check_directory(network)?;
    threads::two()?.block_on(async {
        let runtime = network.runtime(Reach::OtherProcesses).await?;
        let answer = ask(&runtime).await;
        runtime.shutdown().await;
        answer
    })
}

/// Refuses a discovery directory that does not exist: a command that inspects a fleet creates none.
///
/// # Errors
/// `Unavailable`, naming the flag.
fn check_directory(network: &NetworkArgs) -> Result<(), EngineError> {
    let path = match network.discovery_backend {
        Some(DiscoveryBackend::File) | None => network.discovery_path.as_deref(),
        Some(DiscoveryBackend::Memory | DiscoveryBackend::Etcd) => None,
    };
    let Some(path) = path.filter(|path| !path.exists()) else {
        return Ok(());
    };
    let problem = format!(
        "{} is not there; the first worker or frontend of a fleet makes it",
        path.display()
    );
    Err(EngineError::new(ErrorKind::Unavailable, problem).with_at("--discovery-path"))
}

/// The error of a worker as JSON.
fn error_in_json(error: &EngineError) -> Value {
    json!({"kind": error.kind().name(), "message": error.to_string()})
}

/// Rows under their headings, with columns as wide as their cells.
fn table<const COLUMNS: usize>(headings: [&str; COLUMNS], rows: &[[String; COLUMNS]]) -> String {
    let mut widths = headings.map(str::len);
    for row in rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = cell.width().max(*width);
        }
    }
    let mut text = String::new();
    for row in std::iter::once(&headings.map(String::from)).chain(rows) {
        let mut line = String::new();
        for (cell, width) in row.iter().zip(widths) {
            line.push_str(cell);
            line.push_str(&" ".repeat(width + 2 - cell.width()));
        }
        text.push_str(line.trim_end());
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sign_that_takes_two_columns_is_counted_so() {
        let rows = ["通义", "qwen"].map(|name| [name.to_owned(), "here".to_owned()]);
        let shown = table(["M", "IS"], &rows);
        assert_eq!(shown, "M     IS\n通义  here\nqwen  here\n");
    }
}
