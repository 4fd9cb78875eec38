//! Runs other programs. Shows each command before it runs; an error names the command.

use std::env;
use std::ffi::{OsStr, OsString};
use std::fs;
use std::io;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::sync_channel;
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, bail};
use rustix::param::clock_ticks_per_second;
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process, waitid};

/// The cargo that runs this program, called from `dir` as a user would: without the variables that it set for this program's
/// package. Build scripts depend on them (that of `ring` does), so half of everything would be rebuilt each time.
pub(crate) fn cargo(dir: &Path) -> Command {
    let cargo = env::var_os("CARGO").unwrap_or_else(|| OsString::from("cargo"));
    let mut command = Command::new(cargo);
    command.current_dir(dir);
    for (name, _) in env::vars_os() {
        let shown = name.to_string_lossy();
        if shown.starts_with("CARGO_PKG_") || shown.starts_with("CARGO_MANIFEST_") {
            command.env_remove(&name);
        }
    }
    command
}

/// Shows the command and runs it with this program's own output.
///
/// # Errors
/// When it cannot be started or does not exit with 0.
pub(crate) fn run(command: &mut Command) -> anyhow::Result<()> {
    let shown = shown(command);
    eprintln!("$ {shown}");
    let status = command
        .stdin(Stdio::null())
        .status()
        .with_context(|| format!("cannot run `{shown}`"))?;
    if !status.success() {
        bail!("`{shown}` failed ({status})");
    }
    Ok(())
}

/// Runs the command and returns what it wrote on stdout; its stderr is this program's.
///
/// # Errors
/// When it cannot be started, does not exit with 0, or writes something that is not UTF-8.
pub(crate) fn output(command: &mut Command) -> anyhow::Result<String> {
    let shown = shown(command);
    let output = command
        .stdin(Stdio::null())
        .stderr(Stdio::inherit())
        .output()
        .with_context(|| format!("cannot run `{shown}`"))?;
    if !output.status.success() {
        bail!("`{shown}` failed ({})", output.status);
    }
    String::from_utf8(output.stdout)
        .with_context(|| format!("`{shown}` wrote something that is not UTF-8"))
}

/// Whether the command exists and exits with 0. Drops its output.
pub(crate) fn succeeds(command: &mut Command) -> bool {
    command
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .is_ok_and(|status| status.success())
}

/// How a program ended.
#[derive(Debug)]
pub(crate) struct Ended {
    /// `None` if it was killed at its limit.
    pub(crate) status: Option<ExitStatus>,
    /// The time on a core, its own and of the descendants that were waited for.
    pub(crate) computed: Duration,
}

/// Waits for a program. Kills it after `limit`, with everything that it began.
///
/// # Errors
/// The system does not say how it ended.
pub(crate) fn wait_within(program: &mut Child, limit: Duration) -> io::Result<Ended> {
    let root = program.id();
    let (sender, ended) = sync_channel(1);
    thread::scope(|scope| {
        scope.spawn(move || drop(sender.send(wait(program))));
        match ended.recv_timeout(limit) {
            Ok(ended) => ended,
            Err(_) => {
                kill_all(root);
                let ended = ended.recv().map_err(io::Error::other)??;
                Ok(Ended {
                    status: None,
                    ..ended
                })
            }
        }
    })
}

fn wait(program: &mut Child) -> io::Result<Ended> {
    let mut computed = Duration::ZERO;
    if let Some(process) = pid(program.id()) {
        // Until somebody takes its status, the kernel keeps the time of a process that ended.
        waitid(
            WaitId::Pid(process),
            WaitIdOptions::EXITED | WaitIdOptions::NOWAIT,
        )?;
        let stat = fs::read_to_string(format!("/proc/{process}/stat", process = program.id()));
        computed = stat
            .ok()
            .and_then(|stat| computed_by(&stat))
            .unwrap_or_default();
    }
    let status = Some(program.wait()?);
    Ok(Ended { status, computed })
}

fn pid(process: u32) -> Option<Pid> {
    i32::try_from(process).ok().and_then(Pid::from_raw)
}

/// The words of a process's `stat` after its name, which may have spaces: the state, the parent, and so on.
fn words_of(stat: &str) -> impl Iterator<Item = &str> {
    let rest = stat.rsplit_once(')').map_or("", |(_, rest)| rest);
    rest.split_whitespace()
}

/// The time on a core that `stat` says, the children's with it.
fn computed_by(stat: &str) -> Option<Duration> {
    // `utime`, `stime`, `cutime` and `cstime` are the words 14 to 17 (`man 5 proc_pid_stat`); the state is the third.
    let times = words_of(stat).skip(11).take(4);
    let ticks: u64 = times.map(str::parse::<u64>).sum::<Result<_, _>>().ok()?;
    let milliseconds = ticks
        .checked_mul(1000)?
        .checked_div(clock_ticks_per_second())?;
    Some(Duration::from_millis(milliseconds))
}

/// Kills a process and its descendants, whose process groups may be their own. Those whose parent has ended are not found.
fn kill_all(root: u32) {
    let parents = parents();
    let mut found = vec![root];
    let mut next = 0;
    while let Some(&parent) = found.get(next) {
        let children = parents.iter().filter(|(_, of)| *of == parent);
        found.extend(children.map(|(process, _)| *process));
        next += 1;
    }
    for process in found {
        if let Some(process) = pid(process) {
            // One that has ended needs no signal.
            let _ = kill_process(process, Signal::KILL);
        }
    }
}

/// Each process of the machine, with its parent.
fn parents() -> Vec<(u32, u32)> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    let parent = |entry: fs::DirEntry| {
        let process: u32 = entry.file_name().to_str()?.parse().ok()?;
        let stat = fs::read_to_string(entry.path().join("stat")).ok()?;
        let parent = words_of(&stat).nth(1)?.parse().ok()?;
        Some((process, parent))
    };
    entries.filter_map(parent).collect()
}

/// The command as a person would type it: the program without its folder, then the arguments.
fn shown(command: &Command) -> String {
    let program = Path::new(command.get_program());
    let name = program.file_name().unwrap_or(program.as_os_str());
    let words = std::iter::once(name)
        .chain(command.get_args())
        .map(OsStr::to_string_lossy);
    words.collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;

    use super::*;

    #[test]
    fn failure_names_the_command_and_its_status() {
        let error = run(&mut Command::new("false")).unwrap_err().to_string();
        assert_eq!(error, "`false` failed (exit status: 1)");
    }

    #[test]
    fn a_program_that_does_not_end_is_killed_with_what_it_began() {
        let script = "setsid sleep infinity & echo; wait";
        let mut program = Command::new("sh")
            .args(["-c", script])
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut output = program.stdout.take().unwrap();
        output.read_exact(&mut [0]).unwrap();
        let ended = wait_within(&mut program, Duration::ZERO).unwrap();
        assert_eq!(ended.status, None);
        // Its child has the same end of the pipe, which is closed once both are gone.
        assert_eq!(output.read(&mut [0]).unwrap(), 0);
        let mut short = Command::new("true").spawn().unwrap();
        let ended = wait_within(&mut short, Duration::from_secs(600)).unwrap();
        assert!(ended.status.unwrap().success());
    }

    #[test]
    fn the_time_on_a_core_is_of_the_program_and_its_children() {
        let stat = "7 (a (b) c) Z 1 7 7 0 -1 0 0 0 0 0 100 20 3 4 20 0 1";
        let tick = Duration::from_secs(1) / u32::try_from(clock_ticks_per_second()).unwrap();
        assert_eq!(computed_by(stat), Some(127 * tick));
        assert_eq!(computed_by("7 (a) Z 1"), Some(Duration::ZERO));
        // The child counts to a number that takes it some hundredths of a second at the least.
        let script = "sh -c 'i=0; while test $i -lt 200000; do i=$((i+1)); done'; :";
        let mut program = Command::new("sh").args(["-c", script]).spawn().unwrap();
        let ended = wait_within(&mut program, Duration::from_secs(600)).unwrap();
        assert!(ended.status.unwrap().success());
        assert!(ended.computed > Duration::ZERO);
    }

    #[test]
    fn missing_program_does_not_succeed() {
        assert!(!succeeds(&mut Command::new("no-program-has-this-name")));
        assert!(succeeds(&mut Command::new("true")));
    }

    #[test]
    fn shown_command_leaves_out_the_folder() {
        assert_eq!(
            shown(Command::new("/usr/bin/env").args(["a", "b"])),
            "env a b"
        );
    }
}
