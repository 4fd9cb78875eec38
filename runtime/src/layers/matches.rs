//! Parses a command line by its grammar. An error in a value from the environment names its variable, and one in a value from a
//! file names the file; clap reports all other errors. The parent module re-exports it.

use std::ffi::OsString;
use std::path::Path;

use clap::builder::Resettable;
use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{Arg, ArgMatches, Command};
use genset_backend_common::EngineError;

/// Reads a command line and the environment.
///
/// Prints help, or clap's error, and exits if there is nothing to run.
///
/// # Errors
/// `InvalidArgument`, naming the variable with the invalid value.
pub fn matches_of(command: &Command, given: &[OsString]) -> Result<ArgMatches, EngineError> {
    let command = without_empty_lists(command.clone());
    let matches = command.clone().try_get_matches_from(given);
    matches.or_else(
        |mut error| match variable_at_fault(&command, given, &error) {
            Some(variable) => Err(EngineError::invalid_argument(variable, in_a_line(&error))),
            None => {
                // It proposes to pass an unknown flag as a value, but no value begins with dashes.
                error.remove(ContextKind::Suggested);
                error.exit()
            }
        },
    )
}

/// Like [`matches_of`], for `given` with the flags of the file at `path`. Without these flags, it must have been read already: an
/// invalid value is the file's.
///
/// # Errors
/// `InvalidArgument`, naming the file with the invalid value.
pub fn matches_with_file(
    command: &Command,
    given: &[OsString],
    path: &Path,
) -> Result<ArgMatches, EngineError> {
    let command = without_empty_lists(command.clone());
    command.try_get_matches_from(given).map_err(|error| {
        if !is_of_value(&error) {
            error.exit();
        }
        let problem = format!("{}: {}", path.display(), in_a_line(&error));
        EngineError::invalid_argument("--config", problem)
    })
}

/// The grammar without environment variables.
#[must_use]
pub fn without_environment(whole: Command) -> Command {
    let alone = |arg: Arg| arg.env(Resettable::<clap::builder::OsStr>::Reset);
    whole.mut_args(alone).mut_subcommands(without_environment)
}

/// Whether the flag takes a list and its variable is empty: the variable then counts as unset.
pub(super) fn has_empty_list(arg: &Arg) -> bool {
    let value = arg.get_env().and_then(std::env::var_os);
    arg.get_value_delimiter().is_some() && value.is_some_and(|value| value.is_empty())
}

/// The grammar without the variables that are set to an empty list.
pub(super) fn without_empty_lists(whole: Command) -> Command {
    let read = |arg: Arg| match has_empty_list(&arg) {
        true => arg.env(Resettable::<clap::builder::OsStr>::Reset),
        false => arg,
    };
    whole.mut_args(read).mut_subcommands(without_empty_lists)
}

/// Whether the error is about a value.
fn is_of_value(error: &clap::Error) -> bool {
    matches!(
        error.kind(),
        ErrorKind::ValueValidation | ErrorKind::InvalidValue
    )
}

/// The variable with the invalid value; `None` if the error has another cause, such as a flag.
fn variable_at_fault(command: &Command, given: &[OsString], error: &clap::Error) -> Option<String> {
    if !is_of_value(error) {
        return None;
    }
    let Some(ContextValue::String(flag)) = error.get(ContextKind::InvalidArg) else {
        return None;
    };
    // An invalid flag also fails without the environment.
    let alone = without_environment(command.clone()).try_get_matches_from(given);
    let is_of_flag = |other: clap::Error| {
        other.get(ContextKind::InvalidArg) == error.get(ContextKind::InvalidArg)
    };
    if alone.is_err_and(is_of_flag) {
        return None;
    }
    let name = flag.strip_prefix("--")?.split([' ', '=', '[']).next()?;
    variable_of(command, name)
}

/// The variable of the flag with this long name, if it is set.
fn variable_of(command: &Command, name: &str) -> Option<String> {
    let named = command
        .get_arguments()
        .find(|arg| arg.get_long() == Some(name));
    let variable = named.and_then(Arg::get_env);
    let variable = variable.filter(|variable| std::env::var_os(variable).is_some());
    let variable = variable.map(|variable| variable.to_string_lossy().into_owned());
    let mut below = command.get_subcommands();
    variable.or_else(|| below.find_map(|command| variable_of(command, name)))
}

/// clap's error without its first word and its advice.
fn in_a_line(error: &clap::Error) -> String {
    let text = error.to_string();
    let lines = text.lines().map(str::trim);
    let lines: Vec<&str> = lines.take_while(|line| !line.is_empty()).collect();
    let line = lines.join(" ");
    line.strip_prefix("error: ").unwrap_or(&line).to_owned()
}
