//! Settings in layers: flags over environment over file over defaults, and where each one comes from.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::path::Path;

use clap::parser::ValueSource;
use clap::{Arg, ArgMatches};
use genset_backend_common::EngineError;
use serde_json::{Map, Value, json};

use crate::args::PrintFormat;

/// Flags that a file may not hold: they are about the file, or end the program.
const NOT_IN_FILES: &[&str] = &["config", "print-config", "help", "version", "verbose"];

/// A command line with the file's settings put before the flags, so that the flags win.
pub(crate) struct Layered {
    pub(crate) words: Vec<OsString>,
    /// Long names of the flags that the file sets.
    pub(crate) from_file: BTreeSet<String>,
}

fn run_args(command: &clap::Command) -> impl Iterator<Item = &Arg> {
    command
        .find_subcommand("run")
        .into_iter()
        .flat_map(clap::Command::get_arguments)
}

/// The command line with the settings of the TOML file at `path` put in.
///
/// # Errors
/// `InvalidArgument`, naming the file and the key.
pub(crate) fn with_file(
    command: &clap::Command,
    path: &Path,
    given: &[OsString],
) -> Result<Layered, EngineError> {
    let bad = |problem: String| {
        EngineError::invalid_argument("--config", format!("{}: {problem}", path.display()))
    };
    let text = std::fs::read_to_string(path).map_err(|error| bad(error.to_string()))?;
    let table: toml::Table = text
        .parse()
        .map_err(|error: toml::de::Error| bad(error.to_string()))?;
    let mut from_file = BTreeSet::new();
    let mut words: Vec<OsString> = given.iter().take(2).cloned().collect();
    for (key, value) in table {
        let is_allowed = !NOT_IN_FILES.contains(&key.as_str());
        let arg = run_args(command).find(|arg| is_allowed && arg.get_long() == Some(key.as_str()));
        let arg = arg.ok_or_else(|| {
            bad(format!(
                "{key:?} is no setting; `genset run --help` lists them"
            ))
        })?;
        let is_in_environment = arg
            .get_env()
            .is_some_and(|name| std::env::var_os(name).is_some());
        if is_in_environment {
            continue;
        }
        let text = match value {
            toml::Value::String(text) => text,
            toml::Value::Integer(number) => number.to_string(),
            toml::Value::Float(number) => number.to_string(),
            toml::Value::Boolean(value) => value.to_string(),
            toml::Value::Array(_) | toml::Value::Table(_) | toml::Value::Datetime(_) => {
                return Err(bad(format!("{key} must be a string or a number")));
            }
        };
        words.push(format!("--{key}={text}").into());
        from_file.insert(key);
    }
    words.extend(given.iter().skip(2).cloned());
    Ok(Layered { words, from_file })
}

/// Every setting and its source: as TOML that `--config` reads, or as JSON.
pub(crate) fn print(
    command: &clap::Command,
    run: &ArgMatches,
    from_file: &BTreeSet<String>,
    format: PrintFormat,
) -> String {
    let settings = run_args(command).filter_map(|arg| {
        let name = arg.get_long().filter(|name| !NOT_IN_FILES.contains(name))?;
        Some((
            name,
            value_of(run, arg),
            source_of(run, arg, name, from_file),
        ))
    });
    match format {
        PrintFormat::Toml => settings
            .map(|(name, value, source)| toml_line(name, value.as_deref(), source))
            .collect(),
        PrintFormat::Json => {
            let object: Map<String, Value> = settings
                .map(|(name, value, source)| {
                    (
                        name.to_owned(),
                        json!({"value": value.as_deref().map(json_value), "source": source}),
                    )
                })
                .collect();
            format!("{:#}\n", Value::Object(object))
        }
    }
}

fn value_of(run: &ArgMatches, arg: &Arg) -> Option<String> {
    let raw = run.get_raw(arg.get_id().as_str())?;
    let values: Vec<String> = raw
        .map(|value| value.to_string_lossy().into_owned())
        .collect();
    Some(values.join(","))
}

fn source_of(
    run: &ArgMatches,
    arg: &Arg,
    name: &str,
    from_file: &BTreeSet<String>,
) -> &'static str {
    let id = arg.get_id().as_str();
    match run.value_source(id) {
        None => "unset",
        Some(ValueSource::DefaultValue) => "default",
        Some(ValueSource::EnvVariable) => "environment",
        // The file's settings are words too; a flag that stands beside one has overridden it.
        Some(_)
            if from_file.contains(name)
                && run
                    .indices_of(id)
                    .is_some_and(|mut at| at.all(|i| i <= from_file.len())) =>
        {
            "file"
        }
        Some(_) => "flag",
    }
}

/// A number where the text is one, else a string.
fn json_value(text: &str) -> Value {
    text.parse::<i64>()
        .map(Value::from)
        .or_else(|_| text.parse::<f64>().map(Value::from))
        .unwrap_or_else(|_| text.into())
}

fn toml_line(name: &str, value: Option<&str>, source: &str) -> String {
    match value {
        Some(value) => format!(
            "{:<48} # {source}\n",
            format!("{name} = {}", json_value(value))
        ),
        None => format!("# {name} = {:<40} # {source}\n", ""),
    }
}
