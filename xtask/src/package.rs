//! `cargo xtask package`: builds a Debian package and a tarball of the binary, with systemd units, completions, man pages and
//! licences. `cargo xtask test package` installs what CI's tests built into a folder, with the real dpkg.

mod licences;

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, bail, ensure};

use crate::artifacts;
use crate::files::{copy, fresh, write};
use crate::process::{cargo, output, run as run_command};
use crate::repo::Repo;
use crate::system_packages::as_root;

/// The build to package.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Profile {
    /// The build for distribution.
    Dist,
    /// The build of the tests.
    Debug,
}

impl Profile {
    /// The level for gzip. Nobody downloads what the tests pack, and a debug binary is large.
    fn gzip_level(self) -> u8 {
        match self {
            Self::Dist => 9,
            Self::Debug => 1,
        }
    }
}

/// The version of every crate of the workspace.
const VERSION: &str = env!("CARGO_PKG_VERSION");

const UNITS: [&str; 2] = ["genset-frontend.service", "genset-worker@.service"];

/// The folder of the units, below `/`.
const UNITS_FOLDER: &str = "usr/lib/systemd/system";

/// Where each shell looks for completions, below `usr/share`.
const COMPLETIONS: [(&str, &str); 3] = [
    ("bash", "bash-completion/completions/genset"),
    ("fish", "fish/vendor_completions.d/genset.fish"),
    ("zsh", "zsh/vendor-completions/_genset"),
];

/// The Debian package of each library that the binary needs.
const LIBRARIES: [(&str, &str); 6] = [
    ("ld-linux-aarch64.so.1", "libc6"),
    ("ld-linux-x86-64.so.2", "libc6"),
    ("libc.so.6", "libc6"),
    ("libgcc_s.so.1", "libgcc-s1"),
    ("libm.so.6", "libc6"),
    ("libstdc++.so.6", "libstdc++6"),
];

/// The files that were made.
pub(crate) struct Made {
    pub(crate) deb: PathBuf,
    pub(crate) tarball: PathBuf,
}

/// Builds both into `dist/`, or into `target/packages` for the debug binary.
///
/// # Errors
/// When something does not build, or a Debian program is missing.
pub(crate) fn build(repo: &Repo, profile: Profile) -> anyhow::Result<Made> {
    let (binary, folder) = match profile {
        Profile::Dist => {
            let arguments = ["build", "--profile", "dist", "--locked", "-p", "genset"];
            run_command(cargo(repo.root()).args(arguments))?;
            (repo.target().join("dist/genset"), repo.root().join("dist"))
        }
        Profile::Debug => (
            artifacts::binary(repo, "genset")?,
            repo.target().join("packages"),
        ),
    };
    let stage = repo.target().join("package-stage");
    lay_out(repo, &binary, &stage)?;
    fs::create_dir_all(&folder)?;
    let tarball = pack_tarball(&stage, &folder, profile)?;
    let deb = pack_deb(repo, &stage, &folder, profile)?;
    Ok(Made { deb, tarball })
}

/// Lays out every file as it is installed below `/`.
fn lay_out(repo: &Repo, binary: &Path, stage: &Path) -> anyhow::Result<()> {
    fresh(stage)?;
    let installed = stage.join("usr/bin/genset");
    fs::create_dir_all(stage.join("usr/bin"))?;
    let mut strip = Command::new("strip");
    // Keeps function symbols, for stack traces.
    strip
        .arg("--strip-debug")
        .arg("-o")
        .arg(&installed)
        .arg(binary);
    run_command(&mut strip).context("strip is a part of binutils, as the linker is")?;
    let share = stage.join("usr/share");
    for (shell, place) in COMPLETIONS {
        let script = output(Command::new(&installed).args(["completions", shell]))?;
        write(&share.join(place), &script)?;
    }
    let pages = share.join("man/man1");
    run_command(Command::new(&installed).arg("man").arg(&pages))?;
    let mut gzip = Command::new("gzip");
    run_command(gzip.args(["-9", "-n", "--recursive"]).arg(&pages))?;
    let deploy = repo.root().join("deploy/systemd");
    for unit in UNITS {
        copy(&deploy.join(unit), &stage.join(UNITS_FOLDER).join(unit))?;
    }
    let users = stage.join("usr/lib/sysusers.d/genset.conf");
    copy(&deploy.join("sysusers.conf"), &users)?;
    let documents = share.join("doc/genset");
    copy(&repo.root().join("LICENSE"), &documents.join("copyright"))?;
    copy(
        &repo.root().join("CHANGELOG.md"),
        &documents.join("CHANGELOG.md"),
    )?;
    write(
        &documents.join("third-party-licences"),
        &licences::third_party(repo)?,
    )
}

/// Packs `bin`, `lib` and `share` into a tarball, below a folder that names version and machine.
fn pack_tarball(stage: &Path, folder: &Path, profile: Profile) -> anyhow::Result<PathBuf> {
    let name = format!("genset-{VERSION}-{}-linux", std::env::consts::ARCH);
    let tarball = folder.join(format!("{name}.tar.gz"));
    let mut tar = Command::new("tar");
    tar.args(["--sort=name", "--owner=0", "--group=0", "--numeric-owner"]);
    let level = profile.gzip_level();
    tar.arg(format!("--use-compress-program=gzip -{level}"));
    tar.args(["--mtime=@0", "--transform"]);
    tar.arg(format!("s,^[.],{name},"));
    tar.arg("--directory").arg(stage.join("usr"));
    run_command(tar.arg("--create").arg("--file").arg(&tarball).arg("."))?;
    Ok(tarball)
}

/// Adds the files that only a package has, and packs the stage.
fn pack_deb(repo: &Repo, stage: &Path, folder: &Path, profile: Profile) -> anyhow::Result<PathBuf> {
    let architecture = output(Command::new("dpkg").arg("--print-architecture"));
    let architecture = architecture.context("a Debian package is made with Debian's dpkg")?;
    let architecture = architecture.trim();
    let control = stage.join("DEBIAN");
    let depends = dependencies(&stage.join("usr/bin/genset"))?;
    write(
        &control.join("control"),
        &control_file(architecture, &depends),
    )?;
    for script in ["postinst", "prerm", "postrm"] {
        let to = control.join(script);
        copy(&repo.root().join("deploy/debian").join(script), &to)?;
        fs::set_permissions(&to, Permissions::from_mode(0o755))?;
    }
    for unit in UNITS {
        let unit = stage.join(UNITS_FOLDER).join(unit);
        let text = fs::read_to_string(&unit)?;
        // Files unpacked by hand belong in /usr/local; files unpacked by dpkg do not.
        write(&unit, &text.replace("/usr/local/bin/", "/usr/bin/"))?;
    }
    let deb = folder.join(format!("genset_{VERSION}_{architecture}.deb"));
    let mut pack = Command::new("dpkg-deb");
    let level = profile.gzip_level();
    pack.args(["--root-owner-group", "-Zgzip"]);
    pack.arg(format!("-z{level}")).arg("--build");
    run_command(pack.arg(stage).arg(&deb))?;
    Ok(deb)
}

fn control_file(architecture: &str, depends: &str) -> String {
    format!(
        "Package: genset\n\
         Version: {VERSION}\n\
         Architecture: {architecture}\n\
         Maintainer: The Genset authors <genset@localhost>\n\
         Section: net\n\
         Priority: optional\n\
         Depends: {depends}\n\
         Recommends: ca-certificates\n\
         Description: serve LLM inference engines\n \
         An OpenAI-compatible server for language models, in one process or as a\n \
         fleet of workers and frontends, with an engine of its own.\n"
    )
}

/// The binary's dependencies: the packages of its libraries, and the version of libc6 that introduced its newest symbol.
fn dependencies(binary: &Path) -> anyhow::Result<String> {
    let headers = output(Command::new("objdump").arg("-p").arg(binary))?;
    let needed = headers
        .lines()
        .filter_map(|line| line.trim().strip_prefix("NEEDED"));
    let mut packages = Vec::new();
    for library in needed.map(str::trim) {
        let found = LIBRARIES.iter().find(|(name, _)| *name == library);
        let (_, package) = found.with_context(|| format!("which package has {library}?"))?;
        packages.push(match *package {
            "libc6" => format!("libc6 (>= {})", newest_glibc(&headers)?),
            other => other.to_owned(),
        });
    }
    packages.sort();
    packages.dedup();
    Ok(packages.join(", "))
}

/// The newest version, such as `GLIBC_2.34`, in the output of `objdump -p`.
fn newest_glibc(headers: &str) -> anyhow::Result<String> {
    let versions = headers.split_whitespace().filter_map(|word| {
        let (major, minor) = word.strip_prefix("GLIBC_")?.split_once('.')?;
        Some((major.parse::<u32>().ok()?, minor.parse::<u32>().ok()?))
    });
    let (major, minor) = versions
        .max()
        .context("the binary asks for no symbol of libc")?;
    Ok(format!("{major}.{minor}"))
}

/// Installs the debug package into a folder, runs its programs, and removes it again; unpacks the tarball and runs that.
///
/// # Errors
/// When one cannot be made, or its content is wrong.
pub(crate) fn test(repo: &Repo) -> anyhow::Result<()> {
    let made = build(repo, Profile::Debug)?;
    let root = repo.target().join("package-root");
    remove(&root)?;
    fresh(&root)?;
    for folder in ["etc", "var/lib/dpkg/info", "var/lib/dpkg/updates"] {
        fs::create_dir_all(root.join(folder))?;
    }
    for file in ["var/lib/dpkg/status", "var/lib/dpkg/available"] {
        fs::write(root.join(file), "")?;
    }
    run_command(dpkg(&root)?.arg("--install").arg(&made.deb))?;
    runs(&root.join("usr/bin/genset"))?;
    let units = UNITS.map(|unit| format!("{UNITS_FOLDER}/{unit}"));
    let completions = COMPLETIONS.map(|(_, place)| format!("usr/share/{place}"));
    let others = [
        "usr/share/man/man1/genset-run.1.gz",
        "usr/share/doc/genset/copyright",
    ];
    let secret = "etc/genset/wire-secret".to_owned();
    let expected = units
        .into_iter()
        .chain(completions)
        .chain(others.map(String::from));
    for file in expected.chain([secret.clone()]) {
        ensure!(
            root.join(&file).is_file(),
            "the package did not bring {file}"
        );
    }
    let licences = fs::read_to_string(root.join("usr/share/doc/genset/third-party-licences"))?;
    ensure!(
        licences.contains("Microsoft Corporation"),
        "the licence of the allocator's library, which lies below its crate, is not passed on"
    );
    let mode = fs::metadata(root.join(&secret))?.permissions().mode();
    ensure!(
        mode.trailing_zeros() >= 6,
        "others can read {secret}: {mode:o}"
    );
    units_start("/usr/bin/genset", &root.join(UNITS_FOLDER))?;
    // As the units make them.
    let kept = ["var/cache/genset", "var/lib/genset"];
    for folder in kept {
        fs::create_dir_all(root.join(folder).join("some"))?;
    }
    run_command(dpkg(&root)?.args(["--purge", "genset"]))?;
    for gone in ["usr/bin/genset", "etc/genset"].into_iter().chain(kept) {
        ensure!(!root.join(gone).exists(), "{gone} is left");
    }
    remove(&root)?;

    let unpacked = repo.target().join("package-unpacked");
    fresh(&unpacked)?;
    let mut tar = Command::new("tar");
    tar.arg("--directory")
        .arg(&unpacked)
        .arg("--extract")
        .arg("--file");
    run_command(tar.arg(&made.tarball))?;
    let name = made
        .tarball
        .file_name()
        .unwrap_or_default()
        .to_string_lossy()
        .into_owned();
    let name = name.trim_end_matches(".tar.gz");
    let unpacked = unpacked.join(name);
    units_start(
        "/usr/local/bin/genset",
        &unpacked.join("lib/systemd/system"),
    )?;
    runs(&unpacked.join("bin/genset"))
}

/// Fails unless the units in a folder start this program.
fn units_start(program: &str, folder: &Path) -> anyhow::Result<()> {
    for unit in UNITS {
        let text = fs::read_to_string(folder.join(unit))?;
        ensure!(
            text.contains(&format!("ExecStart={program} run")),
            "{unit} starts another program than {program}"
        );
    }
    Ok(())
}

/// Removes a folder that dpkg installed into: its files belong to root.
fn remove(root: &Path) -> anyhow::Result<()> {
    if root.exists() {
        run_command(as_root("rm")?.args(["--recursive", "--force"]).arg(root))?;
    }
    Ok(())
}

/// The real dpkg, with `root` as the machine's root. The packages of the machine do not matter to it.
fn dpkg(root: &Path) -> anyhow::Result<Command> {
    let mut dpkg = as_root("dpkg")?;
    dpkg.arg(format!("--root={}", root.display()));
    dpkg.args(["--force-script-chrootless", "--force-depends"]);
    Ok(dpkg)
}

fn runs(binary: &Path) -> anyhow::Result<()> {
    let says = output(Command::new(binary).arg("--version"))?;
    if says.trim() != format!("genset {VERSION}") {
        bail!("{} says {says:?}", binary.display());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn the_newest_symbol_decides_which_libc_is_needed() {
        let headers =
            "  0x069691b4 0x00 07 GLIBC_2.4\n  0x0 0x00 02 GLIBC_2.34\n  0x0 0x00 05 GLIBC_2.9\n";
        assert_eq!(newest_glibc(headers).unwrap(), "2.34");
        assert!(newest_glibc("NEEDED libm.so.6").is_err());
    }

    #[test]
    fn removing_the_package_names_every_worker_that_runs_or_is_enabled() {
        let machine = tempfile::tempdir().unwrap();
        let root = machine.path();
        fs::create_dir_all(root.join("run/systemd/system")).unwrap();
        let wants = root.join("etc/systemd/system/multi-user.target.wants");
        fs::create_dir_all(&wants).unwrap();
        let unit = "/usr/lib/systemd/system/genset-worker@.service";
        symlink(unit, wants.join("genset-worker@2.service")).unwrap();
        let called = root.join("called");
        let systemctl = format!(
            "systemctl() {{\n\
             if [ \"$1\" = list-units ]; then echo 'genset-worker@1.service loaded active running A worker'\n\
             else echo \"$*\" >>'{}'; fi\n\
             }}\n",
            called.display()
        );
        let here = |folder: &str| format!("{}{folder}", root.display());
        let script = include_str!("../../deploy/debian/prerm");
        let script = script.replace("/run/systemd", &here("/run/systemd"));
        let script = script.replace("/etc/systemd", &here("/etc/systemd"));
        let mut prerm = Command::new("sh");
        prerm.args(["-c", &format!("{systemctl}{script}"), "prerm", "remove"]);
        run_command(prerm.env_remove("DPKG_ROOT")).unwrap();
        assert_eq!(
            fs::read_to_string(called).unwrap(),
            "disable --now genset-frontend.service genset-worker@1.service genset-worker@2.service\n"
        );
    }
}
