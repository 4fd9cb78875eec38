//! [`Bench`]: measures a model with some flags, in a process of its own.

use std::os::unix::process::ExitStatusExt as _;
use std::path::Path;
use std::process::{ExitStatus, Stdio};

use genset_backend_common::EngineError;
use genset_runtime::layers::flag;
use tokio::process::Command;
use tokio::runtime::Runtime;
use tokio::signal::unix::SignalKind;
use tokio_util::sync::CancellationToken;

use super::{KV_MEMORY, TuneArgs};
use crate::bench::CUT;
use crate::bench::engine::Measured;

/// Why the search ends early.
pub(super) enum Ended {
    /// By Ctrl-C.
    Cut,
    Failed(EngineError),
}

impl From<EngineError> for Ended {
    fn from(error: EngineError) -> Self {
        Self::Failed(error)
    }
}

/// Runs `genset bench engine` for one model.
pub(super) struct Bench<'a> {
    pub(super) args: &'a TuneArgs,
    pub(super) model: &'a Path,
    pub(super) runtime: Runtime,
    pub(super) stop: CancellationToken,
}

impl Bench<'_> {
    pub(super) fn measure(
        &self,
        flags: &[String],
        sequences: &[u32],
        prefill_tokens: u32,
    ) -> Result<Measured, Ended> {
        let failed = |problem: &dyn std::fmt::Display| {
            let problem = format!("{} cannot be measured: {problem}", self.model.display());
            EngineError::invalid_argument("MODEL", problem)
        };
        let program = std::env::current_exe().map_err(|error| failed(&error))?;
        let sequences: Vec<String> = sequences.iter().map(u32::to_string).collect();
        let mut bench = Command::new(program);
        bench.args(["bench", "engine"]).arg(self.model);
        bench.args([
            "--ends-with-input",
            "--json",
            "--breakdown=false",
            "--repeats=1",
            "--context-tokens=32",
            "--new-tokens=16",
            "--prefix-tokens=32",
        ]);
        bench.arg(flag("sequences", sequences.join(",")));
        bench.arg(flag("prefill-tokens", prefill_tokens.to_string()));
        bench.arg(flag("kv-cache-memory", KV_MEMORY.to_string()));
        bench.arg(flag("device", &self.args.device));
        bench.arg(flag("quantize", self.args.quantize.to_string()));
        bench.args(flags).kill_on_drop(true);
        bench.stdin(Stdio::piped());
        bench.stdout(Stdio::piped()).stderr(Stdio::piped());
        let ended = self.runtime.block_on(async {
            let mut trial = bench
                .spawn()
                .map_err(|error| Ended::Failed(failed(&error)))?;
            // Closes when the trial has ended, or with this process, however that ends.
            let _input = trial.stdin.take();
            tokio::select! {
                biased;
                () = self.stop.cancelled() => Err(Ended::Cut),
                ended = trial.wait_with_output() => ended.map_err(|error| Ended::Failed(failed(&error))),
            }
        })?;
        if is_cut(ended.status) {
            return Err(Ended::Cut);
        }
        if !ended.status.success() {
            let said = String::from_utf8_lossy(&ended.stderr);
            let said = said
                .lines()
                .rfind(|line| !line.is_empty())
                .unwrap_or("it said nothing");
            let said = said.trim_start_matches("error: ");
            return Err(match said.strip_prefix("MODEL: ") {
                Some(problem) => EngineError::invalid_argument("MODEL", problem).into(),
                None => failed(&said).into(),
            });
        }
        serde_json::from_slice(&ended.stdout).map_err(|error| failed(&error).into())
    }
}

/// Whether Ctrl-C ended a trial: at a terminal it goes to both processes, and perhaps before the trial listens.
fn is_cut(trial: ExitStatus) -> bool {
    let by_signal = trial.signal() == Some(SignalKind::interrupt().as_raw_value());
    by_signal || trial.code() == Some(CUT.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ctrl_c_cuts_a_trial_that_listens_and_one_that_does_not_yet() {
        // As the system encodes them: a signal, or an exit code in the second byte.
        let ended = |status| is_cut(ExitStatus::from_raw(status));
        assert!(ended(SignalKind::interrupt().as_raw_value()));
        assert!(ended(i32::from(CUT) << 8));
        assert!(!ended(SignalKind::terminate().as_raw_value()));
        assert!(!ended(0) && !ended(1 << 8));
    }
}
