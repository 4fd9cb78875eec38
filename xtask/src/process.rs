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
use rustix::process::{Pid, Signal, kill_process};

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

/// Waits for a program. Kills it after `limit`, with everything that it began; the status is then `None`.
///
/// # Errors
/// The system does not say how it ended.
pub(crate) fn wait_within(program: &mut Child, limit: Duration) -> io::Result<Option<ExitStatus>> {
    let root = program.id();
    let (sender, ended) = sync_channel(1);
    thread::scope(|scope| {
        scope.spawn(move || drop(sender.send(program.wait())));
        match ended.recv_timeout(limit) {
            Ok(status) => status.map(Some),
            Err(_) => {
                kill_all(root);
                Ok(None)
            }
        }
    })
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
        if let Some(process) = i32::try_from(process).ok().and_then(Pid::from_raw) {
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
        // After the name, which may have spaces: the state, then the parent.
        let (_, rest) = stat.rsplit_once(')')?;
        let parent = rest.split_whitespace().nth(1)?.parse().ok()?;
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
        assert_eq!(wait_within(&mut program, Duration::ZERO).unwrap(), None);
        // Its child has the same end of the pipe, which is closed once both are gone.
        assert_eq!(output.read(&mut [0]).unwrap(), 0);
        let mut short = Command::new("true").spawn().unwrap();
        let status = wait_within(&mut short, Duration::from_secs(600)).unwrap();
        assert!(status.unwrap().success());
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
