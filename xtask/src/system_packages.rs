//! System programs that builds and tests need: found, or installed through apt-get if that needs no interaction.

use std::process::Command;

use anyhow::{Context as _, bail};

use crate::process::{output, run as run_command, succeeds};

/// A program and its Debian package.
struct Program {
    name: &'static str,
    package: &'static str,
}

/// The compiler that builds the GPU kernels for the host.
const COMPILER: Program = Program {
    name: "c++",
    package: "g++",
};

/// The servers of the tests, the compiler, and the browser.
const PROGRAMS: [Program; 4] = [
    Program {
        name: "etcd",
        package: "etcd-server",
    },
    Program {
        name: "nats-server",
        package: "nats-server",
    },
    COMPILER,
    Program {
        name: "chromium",
        package: "chromium",
    },
];

/// Installs the programs that are missing.
///
/// # Errors
/// When they cannot be installed; the error has the command to run by hand.
pub(crate) fn ensure_programs() -> anyhow::Result<()> {
    ensure(&PROGRAMS)
}

/// Installs the compiler if it is missing.
///
/// # Errors
/// As [`ensure_programs`].
pub(crate) fn ensure_compiler() -> anyhow::Result<()> {
    ensure(&[COMPILER])
}

fn ensure(programs: &[Program]) -> anyhow::Result<()> {
    let missing: Vec<_> = programs.iter().filter(|program| !program.runs()).collect();
    if missing.is_empty() {
        let names: Vec<_> = programs.iter().map(|program| program.name).collect();
        eprintln!("installed already: {}", names.join(", "));
        return Ok(());
    }
    let packages: Vec<_> = missing.iter().map(|program| program.package).collect();
    install(&packages)?;
    match missing.into_iter().find(|program| !program.runs()) {
        Some(Program { name, package }) => {
            bail!("apt-get installed {package}, and `{name} --version` still fails")
        }
        None => Ok(()),
    }
}

impl Program {
    fn runs(&self) -> bool {
        succeeds(Command::new(self.name).arg("--version"))
    }
}

/// Installs Debian packages, as root or through a sudo without a password.
///
/// # Errors
/// When apt-get is missing, not permitted, or fails; the error has the command to run by hand.
pub(crate) fn install(packages: &[&str]) -> anyhow::Result<()> {
    let by_hand = by_hand(packages);
    if !succeeds(Command::new("apt-get").arg("--version")) {
        bail!("missing here, with no apt-get to install it; what Debian would do: {by_hand}");
    }
    let Some(prefix) = prefix() else {
        bail!("missing here, and sudo asks for a password; run: {by_hand}");
    };
    let failed = || format!("run it by hand: {by_hand}");
    run_command(without_questions(prefix, "apt-get").arg("update")).with_context(failed)?;
    let mut install = without_questions(prefix, "apt-get");
    run_command(install.args(["install", "--yes"]).args(packages)).with_context(failed)
}

fn by_hand(packages: &[&str]) -> String {
    format!("sudo apt-get install --yes {}", packages.join(" "))
}

/// The command prefix that gives root rights; `None` if there is none.
fn prefix() -> Option<&'static [&'static str]> {
    if output(Command::new("id").arg("-u")).is_ok_and(|id| id.trim() == "0") {
        return Some(&[]);
    }
    succeeds(Command::new("sudo").args(["-n", "true"])).then_some(&["sudo", "-n"])
}

/// A Debian program that needs root: runs as root, or through a sudo without a password.
///
/// # Errors
/// When neither is possible.
pub(crate) fn as_root(program: &str) -> anyhow::Result<Command> {
    let prefix = prefix();
    let prefix = prefix.with_context(|| {
        format!("{program} is for root, and sudo asks for a password; run this as root")
    })?;
    Ok(without_questions(prefix, program))
}

fn without_questions(prefix: &[&str], program: &str) -> Command {
    // env, because sudo does not pass the environment on.
    let words = ["env", "DEBIAN_FRONTEND=noninteractive", program];
    let mut words = prefix.iter().chain(&words);
    let mut command = Command::new(words.next().unwrap_or(&"env"));
    command.args(words);
    command
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ffi::OsStr;

    #[test]
    fn no_question_is_asked_with_and_without_sudo() {
        let words = |prefix: &[&str]| {
            let command = without_questions(prefix, "apt-get");
            let words = std::iter::once(command.get_program()).chain(command.get_args());
            words
                .map(OsStr::to_string_lossy)
                .collect::<Vec<_>>()
                .join(" ")
        };
        assert_eq!(words(&[]), "env DEBIAN_FRONTEND=noninteractive apt-get");
        assert_eq!(
            words(&["sudo", "-n"]),
            "sudo -n env DEBIAN_FRONTEND=noninteractive apt-get"
        );
    }

    #[test]
    fn the_command_to_run_by_hand_names_every_package() {
        assert_eq!(by_hand(&["a", "b"]), "sudo apt-get install --yes a b");
    }
}
