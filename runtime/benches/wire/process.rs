//! The two processes of a case, and a process's figures in `/proc`.

use std::process::Stdio;

use rustix::param::clock_ticks_per_second;
use serde_json::Value;
use tokio::process::Command;

use super::Outcome;
use super::caller::Case;

/// Runs `case` between a fresh worker and a fresh caller.
pub(crate) async fn run(case: &Case) -> Outcome<Value> {
    let directory = tempfile::tempdir()?;
    let mut worker = itself()?
        .arg("worker")
        .arg(directory.path())
        .stdin(Stdio::null())
        .spawn()?;
    let pid = worker.id().ok_or("the worker ended at once")?.to_string();
    let caller = itself()?
        .arg("caller")
        .arg(directory.path())
        .args([pid, serde_json::to_string(case)?])
        .stderr(Stdio::inherit())
        .output()
        .await?;
    worker.kill().await?;
    if !caller.status.success() {
        return Err(format!("{case}: the caller failed").into());
    }
    Ok(serde_json::from_slice(&caller.stdout)?)
}

fn itself() -> Outcome<Command> {
    let mut command = Command::new(std::env::current_exe()?);
    command.kill_on_drop(true);
    Ok(command)
}

/// The CPU time of all threads of a process so far, user and kernel, in seconds.
pub(crate) fn cpu_seconds(pid: u32) -> Outcome<f64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"))?;
    // The name, in parentheses, may contain spaces; utime and stime are fields 14 and 15 of the whole line.
    let after_name = stat.rsplit(')').next().unwrap_or_default();
    let fields = after_name.split_whitespace().skip(11).take(2);
    let ticks: u64 = fields.filter_map(|field| field.parse::<u64>().ok()).sum();
    Ok(ticks as f64 / clock_ticks_per_second() as f64)
}

/// The resident memory of a process, in KiB.
pub(crate) fn resident_kib(pid: u32) -> Outcome<f64> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status"))?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kib = line.and_then(|line| line.split_whitespace().next()?.parse().ok());
    kib.ok_or_else(|| "the process has no resident memory".into())
}

/// The machine, in words.
pub(crate) fn hardware() -> String {
    let cpus = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let mut lines = cpus.lines();
    let model = lines.find_map(|line| line.strip_prefix("model name"));
    let model = model
        .unwrap_or_default()
        .trim_start_matches([' ', '\t', ':']);
    let cores = std::thread::available_parallelism().map_or(0, usize::from);
    format!("{cores} cores, {model}")
}
