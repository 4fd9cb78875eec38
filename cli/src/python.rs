//! Commands of the Python package: `genset serve`, `genset deploy` and `genset offer` are Python modules, because they serve
//! Python classes and endpoints. This process is replaced by the interpreter.

use std::env;
use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::Command;

/// The variable that names the interpreter.
const PYTHON: &str = "GENSET_PYTHON";
/// Python code that exits with 1 if the package is not installed.
const IS_THERE: &str =
    "import importlib.util, sys; sys.exit(importlib.util.find_spec('genset') is None)";

/// Replaces this process by `python -m MODULE ARGUMENTS`; returns an error message if that fails.
pub(crate) fn become_module(module: &str, arguments: &[OsString]) -> String {
    let python = interpreter();
    let looked = Command::new(&python).args(["-c", IS_THERE]).output();
    if looked.is_ok_and(|looked| looked.status.code() == Some(1)) {
        return format!(
            "this command is a part of the Python package genset, which {} does not have. Install the wheel that `cargo xtask wheel` \
             makes, with pip; or name in {PYTHON} an interpreter that has it",
            python.display()
        );
    }
    let error = Command::new(&python)
        .args(["-m", module])
        .args(arguments)
        .exec();
    format!(
        "{} cannot be run ({error}); {PYTHON} names the interpreter that has the package genset",
        python.display()
    )
}

/// The interpreter that `GENSET_PYTHON` names. Otherwise the one beside this program, as where the package installed the program;
/// else that of the virtual environment; else the one in PATH. An empty variable counts as unset.
fn interpreter() -> PathBuf {
    let given = |name: &str| env::var_os(name).filter(|value| !value.is_empty());
    if let Some(named) = given(PYTHON) {
        return named.into();
    }
    let beside = env::current_exe()
        .ok()
        .and_then(|program| Some(program.parent()?.join("python3")));
    let of_environment =
        given("VIRTUAL_ENV").map(|folder| PathBuf::from(folder).join("bin/python3"));
    let mut found = [beside, of_environment].into_iter().flatten();
    found
        .find(|python| python.is_file())
        .unwrap_or_else(|| "python3".into())
}
