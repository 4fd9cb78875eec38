//! Finds the program to start, and says what to install if there is none.

use std::fmt;
use std::io;
use std::path::Path;
use std::process::Stdio;

use genset_backend_common::{EngineError, ErrorKind};
use tokio::process::Command;

use crate::config::LauncherConfig;
use crate::dialect::Dialect;
use crate::kind::ServerKind;

/// Exits with 0 if the last module is found, and all modules that it needs and its package does not install.
const FIND_MODULES: &str = "import importlib.util as u, sys\n\
    sys.exit(any(u.find_spec(name) is None for name in sys.argv[1:]))";

/// The program to start.
///
/// # Errors
/// `NotFound` with the command that installs what is missing.
pub(crate) async fn dialect(config: &LauncherConfig) -> Result<Dialect, EngineError> {
    if let Some(command) = &config.command {
        let is_module = command.iter().any(|word| word == "llama_cpp.server");
        return Ok(if config.kind == ServerKind::LlamaCpp && is_module {
            Dialect::LlamaCppPython
        } else {
            Dialect::first_of(config.kind)
        });
    }
    match config.kind {
        // The spawn shows whether the program exists.
        ServerKind::Vllm | ServerKind::Trtllm => Ok(Dialect::first_of(config.kind)),
        ServerKind::Sglang if has_modules(config, &["sglang"]).await? => Ok(Dialect::Sglang),
        ServerKind::Sglang => Err(no_module(config, "sglang")),
        ServerKind::LlamaCpp if runs(config, "llama-server").await? => Ok(Dialect::LlamaServer),
        ServerKind::LlamaCpp => {
            // The server's own dependencies come with the extra `server` of the package.
            let python = config.python.display();
            match has_modules(config, &["llama_cpp", "uvicorn", "sse_starlette"]).await {
                Ok(true) => Ok(Dialect::LlamaCppPython),
                Ok(false) => Err(no_llama(format_args!(
                    "{python} has no module llama_cpp with its server"
                ))),
                Err(error) if error.kind() == ErrorKind::NotFound => {
                    Err(no_llama(format_args!("there is no Python `{python}`")))
                }
                Err(error) => Err(error),
            }
        }
    }
}

/// Converts the error of a failed spawn.
pub(crate) fn spawn_error(
    config: &LauncherConfig,
    program: &Path,
    line: &str,
    error: io::Error,
) -> EngineError {
    let shown = program.display();
    let message = if error.kind() == io::ErrorKind::NotFound {
        let install = config.kind.install_line();
        let message = format!(
            "there is no program `{shown}` to start {} with; install it ({install}), or name its command with --server-cmd",
            config.kind.title()
        );
        return EngineError::new(ErrorKind::NotFound, message).with_source(error);
    } else if error.kind() == io::ErrorKind::PermissionDenied {
        format!("{shown} may not be executed; chmod +x it")
    } else {
        format!("the server could not be started with: {line}: {error}")
    };
    EngineError::internal(message).with_source(error)
}

/// Whether the program can be started.
async fn runs(config: &LauncherConfig, program: &str) -> Result<bool, EngineError> {
    let mut command = Command::new(program);
    command.arg("--version");
    match silent(config, command).await {
        Ok(_) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(
            EngineError::internal(format!("{program} cannot be run: {error}")).with_source(error),
        ),
    }
}

async fn has_modules(config: &LauncherConfig, modules: &[&str]) -> Result<bool, EngineError> {
    let python = &config.python;
    let mut command = Command::new(python);
    command.args(["-c", FIND_MODULES]).args(modules);
    match silent(config, command).await {
        Ok(found) => Ok(found),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let message = format!(
                "there is no Python `{}`; install Python 3.10 or newer",
                python.display()
            );
            Err(EngineError::new(ErrorKind::NotFound, message).with_source(error))
        }
        Err(error) => {
            let message = format!("{} cannot be run: {error}", python.display());
            Err(EngineError::internal(message).with_source(error))
        }
    }
}

/// Runs a command without output; returns whether it succeeded.
async fn silent(config: &LauncherConfig, mut command: Command) -> io::Result<bool> {
    config.inherited_env.apply(command.as_std_mut());
    let command = command
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    Ok(command.kill_on_drop(true).status().await?.success())
}

fn no_module(config: &LauncherConfig, module: &str) -> EngineError {
    let (python, kind) = (config.python.display(), config.kind);
    let install = kind.install_line();
    let message = format!(
        "{python} has no module {module}, which starts {}; install it ({install}) or put its environment first in PATH",
        kind.title()
    );
    EngineError::not_found(message)
}

fn no_llama(nor: impl fmt::Display) -> EngineError {
    let install = ServerKind::LlamaCpp.install_line();
    let message = format!(
        "there is no program `llama-server`, and {nor}; install the one \
         (brew install llama.cpp, or a release of llama.cpp) or the other ({install}); or take out=candle, which reads many \
         GGUF files and needs no server, or out=libllama, which is llama.cpp's library"
    );
    EngineError::not_found(message)
}
