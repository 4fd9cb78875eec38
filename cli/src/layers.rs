//! Settings in layers: words and flags over environment over file over defaults, and where each one comes from.

use std::ffi::OsString;
use std::path::Path;

use clap::parser::ValueSource;
use clap::{Arg, ArgMatches, Args as _};
use genset_backend_common::EngineError;
use genset_runtime::{NetworkArgs, did_you_mean};
use serde_json::{Map, Number, Value, json};

use crate::args::{PrintFormat, flag, quoted};
use crate::urls::without_password;

/// Flags that a file may not hold: they are about the file, or end the program.
const NOT_IN_FILES: &[&str] = &[
    "config",
    "print-config",
    "help",
    "help-all",
    "version",
    "verbose",
];

/// Flags of the network that each process has for itself.
const OF_ONE_PROCESS: &[&str] = &["wire-host", "wire-port", "advertise-host"];

/// The settings of `genset run`, each with its long name.
fn settings(command: &clap::Command) -> impl Iterator<Item = (&str, &Arg)> {
    let run = command.find_subcommand("run").into_iter();
    run.flat_map(clap::Command::get_arguments)
        .filter_map(|arg| Some((arg.get_long()?, arg)))
        .filter(|(name, _)| !NOT_IN_FILES.contains(name))
}

fn has_name(arg: &Arg, name: &str) -> bool {
    let aliases = arg.get_all_aliases().unwrap_or_default();
    arg.get_long() == Some(name) || aliases.contains(&name)
}

/// The settings of the TOML file at `path` as flags, less those that `by_hand` or the environment sets.
///
/// # Errors
/// `InvalidArgument`, naming the file and the key.
pub(crate) fn file_as_flags(
    command: &clap::Command,
    by_hand: &ArgMatches,
    path: &Path,
) -> Result<Vec<OsString>, EngineError> {
    // Left to clap, a list would be joined with the one given.
    let is_given = |arg: &Arg| {
        let run = by_hand.subcommand_matches("run");
        let source = run.and_then(|run| run.value_source(arg.get_id().as_str()));
        source == Some(ValueSource::CommandLine)
    };
    let bad = |problem: String| {
        EngineError::invalid_argument("--config", format!("{}: {problem}", path.display()))
    };
    let text = std::fs::read_to_string(path).map_err(|error| bad(error.to_string()))?;
    let table: toml::Table = text
        .parse()
        .map_err(|error: toml::de::Error| bad(error.to_string()))?;
    let mut flags = Vec::new();
    for (key, value) in table {
        let known = settings(command).find(|(_, arg)| has_name(arg, &key));
        let (name, arg) = known.ok_or_else(|| {
            let names = settings(command).map(|(name, _)| name);
            let meant = did_you_mean(&key, names);
            bad(format!(
                "{key:?} is no setting{meant}; `genset run --help-all` lists them"
            ))
        })?;
        let text = match value {
            toml::Value::String(text) => text,
            toml::Value::Integer(number) => number.to_string(),
            toml::Value::Float(number) => number.to_string(),
            toml::Value::Boolean(value) => value.to_string(),
            toml::Value::Array(_) | toml::Value::Table(_) | toml::Value::Datetime(_) => {
                return Err(bad(format!("{key} must be a string or a number")));
            }
        };
        let is_in_environment = arg
            .get_env()
            .is_some_and(|name| std::env::var_os(name).is_some());
        if !is_in_environment && !is_given(arg) {
            flags.push(flag(name, text));
        }
    }
    Ok(flags)
}

/// Every setting, its value, and where that comes from.
pub(crate) struct Settings(Vec<Setting>);

struct Setting {
    name: String,
    value: Option<Value>,
    source: &'static str,
}

impl Settings {
    /// The settings in `all`; those `by_hand` has too do not come from the file.
    pub(crate) fn new(command: &clap::Command, by_hand: &ArgMatches, all: &ArgMatches) -> Self {
        let run = |matches: &ArgMatches| matches.subcommand_matches("run").cloned();
        let (Some(by_hand), Some(all)) = (run(by_hand), run(all)) else {
            return Self(Vec::new());
        };
        let setting = |(name, arg): (&str, &Arg)| Setting {
            name: name.to_owned(),
            value: value_of(&all, arg),
            source: source_of(&by_hand, &all, arg),
        };
        Self(settings(command).map(setting).collect())
    }

    /// Whether a flag was given by hand or in the file.
    pub(crate) fn is_given(&self, name: &str) -> bool {
        let mut settings = self.0.iter();
        settings.any(|setting| setting.name == name && setting.is_given())
    }

    /// How many settings the file says.
    pub(crate) fn count_of_file(&self) -> usize {
        let of_file = self.0.iter().filter(|setting| setting.source == "file");
        of_file.count()
    }

    /// What was given about the network, as flags behind a command: a process that has them meets this one.
    pub(crate) fn network_flags(&self) -> String {
        let network = NetworkArgs::augment_args(clap::Command::new("network"));
        let is_shared = |setting: &&Setting| {
            let name = setting.name.as_str();
            let mut flags = network.get_arguments();
            flags.any(|flag| flag.get_long() == Some(name)) && !OF_ONE_PROCESS.contains(&name)
        };
        let settings = self.0.iter().filter(is_shared);
        settings.filter_map(Setting::given_flag).collect()
    }

    /// As TOML that `--config` reads, or as JSON.
    pub(crate) fn print(&self, format: PrintFormat) -> String {
        match format {
            PrintFormat::Toml => self.0.iter().map(Setting::toml_line).collect(),
            PrintFormat::Json => {
                let entry = |setting: &Setting| {
                    let shown = json!({"value": setting.value, "source": setting.source});
                    (setting.name.clone(), shown)
                };
                let object: Map<String, Value> = self.0.iter().map(entry).collect();
                format!("{:#}\n", Value::Object(object))
            }
        }
    }
}

impl Setting {
    /// Whether it was given by hand or in the file.
    fn is_given(&self) -> bool {
        matches!(self.source, "flag" | "file")
    }

    /// As a flag behind a space, where it was given by hand or in the file. Passwords of URLs are left out: it is for a terminal.
    fn given_flag(&self) -> Option<String> {
        let value = self.value.as_ref()?;
        let text = value
            .as_str()
            .map_or_else(|| value.to_string(), str::to_owned);
        let shown = |part: &str| match part.contains("://") {
            true => without_password(part),
            false => part.to_owned(),
        };
        let text = text.split(',').map(shown).collect::<Vec<_>>().join(",");
        self.is_given()
            .then(|| format!(" {}", quoted(&format!("--{}={text}", self.name))))
    }

    fn toml_line(&self) -> String {
        let Self {
            name,
            value,
            source,
        } = self;
        match value {
            Some(value) => format!("{:<48} # {source}\n", format!("{name} = {value}")),
            None => format!("{:<48} # {source}\n", format!("# {name} =")),
        }
    }
}

fn value_of(run: &ArgMatches, arg: &Arg) -> Option<Value> {
    let raw = run.get_raw(arg.get_id().as_str())?;
    let values: Vec<String> = raw
        .map(|value| value.to_string_lossy().into_owned())
        .collect();
    Some(number_or_text(values.join(",")))
}

fn source_of(by_hand: &ArgMatches, all: &ArgMatches, arg: &Arg) -> &'static str {
    let id = arg.get_id().as_str();
    match (by_hand.value_source(id), all.value_source(id)) {
        (_, Some(ValueSource::EnvVariable)) => "environment",
        (Some(ValueSource::CommandLine), _) => "flag",
        (_, Some(ValueSource::CommandLine)) => "file",
        (_, Some(_)) => "default",
        (_, None) => "unset",
    }
}

/// A number where a file that has it is read as `text`, so that nothing of the text is lost; else a string.
fn number_or_text(text: String) -> Value {
    let integer = text.parse::<i64>().ok();
    let integer = integer.filter(|number| number.to_string() == text);
    let float = text.parse::<f64>().ok();
    let float = float.filter(|number| number.to_string() == text);
    let number = integer
        .map(Number::from)
        .or_else(|| float.and_then(Number::from_f64));
    number.map_or_else(|| text.into(), Value::Number)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flag_that_is_shown_has_no_password() {
        let setting = |value: &str| Setting {
            name: "nats-server".to_owned(),
            value: Some(value.into()),
            source: "flag",
        };
        let shown = setting("nats://me:secret@one:4222,nats://two:4222").given_flag();
        let expected = " --nats-server=nats://one:4222,nats://two:4222";
        assert_eq!(shown.as_deref(), Some(expected));
        let shown = setting("/srv/a fleet").given_flag();
        assert_eq!(shown.as_deref(), Some(" '--nats-server=/srv/a fleet'"));
    }

    #[test]
    fn what_a_number_would_change_stays_a_text() {
        for text in ["1.0", "1e16", "1e+16", "007", "+1", "NaN", "inf"] {
            assert_eq!(number_or_text(text.to_owned()), Value::from(text));
        }
        for (text, number) in [("2.5", json!(2.5)), ("-3", json!(-3)), ("0", json!(0))] {
            assert_eq!(number_or_text(text.to_owned()), number);
        }
    }
}
