//! Runs other programs. Shows each command before it runs; an error names the command.

use std::env;
use std::ffi::{OsStr, OsString};
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context as _, bail};

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
    use super::*;

    #[test]
    fn failure_names_the_command_and_its_status() {
        let error = run(&mut Command::new("false")).unwrap_err().to_string();
        assert_eq!(error, "`false` failed (exit status: 1)");
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
