//! Settings in layers: flags override environment variables, which override a file, which overrides defaults. Each setting knows
//! its source. The command line uses it, too.

mod matches;

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};

use clap::builder::Resettable;
use clap::parser::ValueSource;
use clap::{Arg, ArgAction, ArgMatches, Args, Command, Id, ValueEnum};
use genset_backend_common::{EngineError, spelling::did_you_mean, text_file::read_text};
use serde_json::{Map, Number, Value, json};

use self::matches::{has_empty_list, without_empty_lists};
pub use self::matches::{matches_of, matches_with_file, without_environment};

/// The maximum size of the file, in bytes.
const MAX_FILE_BYTES: u64 = 1 << 20;

/// The flags about settings in layers.
#[derive(Debug, Clone, Args)]
pub struct LayerArgs {
    /// TOML file with flags, by their long names
    #[arg(long, env = "GENSET_CONFIG", value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Show every setting with its source, and end
    #[arg(long, value_name = "FORMAT", num_args = 0..=1, default_missing_value = "toml", require_equals = true)]
    pub print_config: Option<PrintFormat>,
}

/// How settings are shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum PrintFormat {
    /// As a file for --config
    Toml,
    /// For programs
    Json,
}

/// Flags that a file may not contain: they concern the file itself or end the program.
const NOT_IN_FILES: &[&str] = &[
    "config",
    "print-config",
    "help",
    "help-all",
    "version",
    "verbose",
];

/// `--name=value`.
#[must_use]
pub fn flag(name: &str, value: impl AsRef<OsStr>) -> OsString {
    let mut flag = OsString::from(format!("--{name}="));
    flag.push(value);
    flag
}

/// Reads flags, environment and file together, by the grammar of a command that has [`LayerArgs`] and no subcommands. Returns the
/// matches and the source of each setting.
///
/// Prints help, or clap's error, and exits if there is nothing to run.
///
/// # Errors
/// Same as [`matches_of`], [`file_as_flags`] and [`matches_with_file`].
pub(crate) fn read(
    command: &Command,
    given: &[OsString],
) -> Result<(ArgMatches, Settings), EngineError> {
    let command = &without_empty_lists(command.clone());
    // A required setting may come from the file. Help and errors use the whole grammar.
    let alone = |arg: Arg| arg.required(false).requires(Resettable::<Id>::Reset);
    let by_hand = command.clone().mut_args(alone).try_get_matches_from(given);
    let by_hand = by_hand.or_else(|_| matches_of(command, given))?;
    let all = match by_hand.get_one::<PathBuf>("config") {
        Some(path) => {
            let from_file = file_as_flags(command, &by_hand, path, UnknownKeys::Refuse)?;
            let (program, rest) = given.split_at(given.len().min(1));
            matches_with_file(command, &[program, &from_file, rest].concat(), path)?
        }
        None => matches_of(command, given)?,
    };
    let settings = Settings::new(command, &by_hand, &all);
    Ok((all, settings))
}

/// The settings of a command, each with its long name.
fn settings(command: &Command) -> impl Iterator<Item = (&str, &Arg)> {
    let flags = command.get_arguments();
    flags
        .filter_map(|arg| Some((arg.get_long()?, arg)))
        .filter(|(name, _)| !NOT_IN_FILES.contains(name))
}

/// What happens to keys of a file that are no settings of the command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum UnknownKeys {
    /// They are errors.
    Refuse,
    /// They are left out: the file may be another program's.
    Skip,
}

fn has_name(arg: &Arg, name: &str) -> bool {
    let aliases = arg.get_all_aliases().unwrap_or_default();
    arg.get_long() == Some(name) || aliases.contains(&name)
}

/// The settings of the TOML file at `path` as flags of `command`, except those that `by_hand` or the environment sets.
///
/// # Errors
/// `InvalidArgument`, naming the file and the key.
pub fn file_as_flags(
    command: &Command,
    by_hand: &ArgMatches,
    path: &Path,
    unknown_keys: UnknownKeys,
) -> Result<Vec<OsString>, EngineError> {
    // Clap would append the file's list to the given one.
    let is_given = |arg: &Arg| {
        let source = by_hand.value_source(arg.get_id().as_str());
        source == Some(ValueSource::CommandLine)
    };
    let bad = |problem: String| {
        EngineError::invalid_argument("--config", format!("{}: {problem}", path.display()))
    };
    let text = read_text(path, MAX_FILE_BYTES).map_err(|error| bad(error.to_string()))?;
    let table: toml::Table = text
        .parse()
        .map_err(|error: toml::de::Error| bad(error.to_string()))?;
    let mut flags = Vec::new();
    for (key, value) in table {
        let known = settings(command).find(|(_, arg)| has_name(arg, &key));
        let Some((name, arg)) = known else {
            if unknown_keys == UnknownKeys::Skip {
                continue;
            }
            let names = settings(command).map(|(name, _)| name);
            let meant = did_you_mean(&key, names);
            return Err(bad(format!(
                "{key:?} is no setting{meant}; --print-config lists them"
            )));
        };
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
        if (is_in_environment && !has_empty_list(arg)) || is_given(arg) {
            continue;
        }
        // A switch takes no value.
        let is_switch = matches!(arg.get_action(), ArgAction::SetTrue);
        match text.as_str() {
            "true" if is_switch => flags.push(format!("--{name}").into()),
            "false" if is_switch => {}
            _ => flags.push(flag(name, text)),
        }
    }
    Ok(flags)
}

/// Every setting, its value, and its source.
#[derive(Debug)]
pub struct Settings(Vec<Setting>);

#[derive(Debug)]
struct Setting {
    name: String,
    value: Option<Value>,
    source: &'static str,
    /// Whether the value is the default.
    is_default: bool,
    /// Whether it is printed as a comment.
    is_comment: bool,
}

impl Settings {
    /// The settings of `command` in `all`; those also in `by_hand` do not come from the file.
    #[must_use]
    pub fn new(command: &Command, by_hand: &ArgMatches, all: &ArgMatches) -> Self {
        let setting = |(name, arg): (&str, &Arg)| {
            let value = value_of(all, arg);
            Setting {
                name: name.to_owned(),
                is_default: value == default_of(arg),
                value,
                source: source_of(by_hand, all, arg),
                is_comment: false,
            }
        };
        Self(settings(command).map(setting).collect())
    }

    /// Whether somebody chose the value of a flag: by hand, or in the file. A default in the file does not count, because
    /// [`Settings::print`] writes all of them.
    #[must_use]
    pub fn is_chosen(&self, name: &str) -> bool {
        let mut settings = self.0.iter().filter(|setting| setting.is_given());
        settings.any(|setting| {
            setting.name == name && (setting.source == "flag" || !setting.is_default)
        })
    }

    /// The number of settings from the file.
    #[must_use]
    pub fn count_of_file(&self) -> usize {
        let of_file = self.0.iter().filter(|setting| setting.source == "file");
        of_file.count()
    }

    /// The settings given by hand or in the file: names, and values in flag syntax.
    pub fn given(&self) -> impl Iterator<Item = (&str, String)> {
        let given = self.0.iter().filter(|setting| setting.is_given());
        given.filter_map(|setting| {
            let value = setting.value.as_ref()?;
            let text = value.as_str();
            let text = text.map_or_else(|| value.to_string(), str::to_owned);
            Some((setting.name.as_str(), text))
        })
    }

    /// Makes comments in TOML of the settings that a variable sets and nothing reads. Variables may be for other processes, but a
    /// file with such a setting may be refused.
    pub fn comment_out(&mut self, is_unread: impl Fn(&str) -> bool) {
        for setting in &mut self.0 {
            setting.is_comment = setting.source == "environment" && is_unread(&setting.name);
        }
    }

    /// The settings as TOML for `--config`, or as JSON.
    #[must_use]
    pub fn print(&self, format: PrintFormat) -> String {
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

    fn toml_line(&self) -> String {
        let Self {
            name,
            value,
            source,
            is_comment,
            ..
        } = self;
        let line = match value {
            Some(value) if *is_comment => format!("# {name} = {value}"),
            Some(value) => format!("{name} = {value}"),
            None => format!("# {name} ="),
        };
        format!("{line:<48} # {source}\n")
    }
}

fn value_of(all: &ArgMatches, arg: &Arg) -> Option<Value> {
    all.get_raw(arg.get_id().as_str()).map(joined)
}

fn default_of(arg: &Arg) -> Option<Value> {
    let values = arg.get_default_values();
    (!values.is_empty()).then(|| joined(values))
}

/// The values of a flag as one.
fn joined(values: impl IntoIterator<Item: AsRef<OsStr>>) -> Value {
    let values = values.into_iter();
    let values: Vec<String> = values
        .map(|value| value.as_ref().to_string_lossy().into_owned())
        .collect();
    number_or_text(values.join(","))
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

/// A number if `text` reads back unchanged as one, so that nothing is lost; otherwise a string.
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
    use std::io::Write as _;

    use clap::{CommandFactory as _, Parser};

    use super::*;

    #[derive(Parser)]
    struct Alone {
        #[command(flatten)]
        layers: LayerArgs,
        #[arg(long, required = true)]
        weights: Option<String>,
        #[arg(long, requires = "weights")]
        rate: Option<f64>,
        #[arg(long, value_delimiter = ',')]
        names: Vec<String>,
        #[arg(long)]
        eager: bool,
        #[arg(long, default_value_t = 16)]
        size: u32,
    }

    /// Reads these words and a file with `content`.
    fn read_with(content: &str, words: &[&str]) -> Result<(ArgMatches, Settings), EngineError> {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(content.as_bytes()).unwrap();
        let mut given = vec!["alone".into(), flag("config", file.path())];
        given.extend(words.iter().map(OsString::from));
        read(&Alone::command(), &given)
    }

    #[test]
    fn a_file_that_never_ends_is_refused() {
        let words = ["alone".into(), flag("config", "/dev/zero")];
        let error = read(&Alone::command(), &words).unwrap_err();
        assert!(error.message().contains("larger than"), "{error}");
    }

    #[test]
    fn what_one_layer_requires_another_may_have() {
        let file = "weights = \"a\"\nnames = \"x,y\"\neager = true\n";
        let (matches, settings) = read_with(file, &["--rate=0.5", "--names=z"]).unwrap();
        let alone = <Alone as clap::FromArgMatches>::from_arg_matches(&matches).unwrap();
        assert!(alone.layers.config.is_some());
        assert_eq!(alone.weights.as_deref(), Some("a"));
        assert_eq!((alone.rate, alone.eager), (Some(0.5), true));
        assert_eq!(alone.size, 16);
        assert_eq!(alone.names, ["z"]);
        let shown: Value = serde_json::from_str(&settings.print(PrintFormat::Json)).unwrap();
        assert_eq!(shown["weights"], json!({"value": "a", "source": "file"}));
        assert_eq!(shown["rate"], json!({"value": 0.5, "source": "flag"}));
        assert_eq!(shown["names"], json!({"value": "z", "source": "flag"}));
        assert_eq!(shown["eager"]["source"], "file");
        assert_eq!(shown.get("config"), None);

        let (matches, _) = read_with(&settings.print(PrintFormat::Toml), &[]).unwrap();
        assert!(matches.get_flag("eager"));
        let (matches, _) = read_with("weights = \"a\"\neager = false\n", &[]).unwrap();
        assert!(!matches.get_flag("eager"));
    }

    #[test]
    fn a_default_in_the_file_is_not_chosen() {
        let is_chosen = |content: &str, words: &[&str]| {
            let (_, settings) = read_with(content, words).unwrap();
            settings.is_chosen("size")
        };
        assert!(!is_chosen("weights = \"a\"\nsize = 16\n", &[]));
        assert!(is_chosen("weights = \"a\"\nsize = 17\n", &[]));
        assert!(is_chosen("weights = \"a\"\n", &["--size=16"]));
    }

    #[test]
    fn what_is_no_setting_is_refused_with_the_nearest() {
        let error = read_with("weigths = \"a\"\n", &[]).unwrap_err();
        let message = error.to_string();
        assert!(message.contains("did you mean \"weights\"?"), "{message}");
    }

    #[test]
    fn a_wrong_value_in_the_file_is_told_with_the_file() {
        let error = read_with("weights = \"a\"\nsize = \"x\"\n", &[]).unwrap_err();
        let message = error.to_string();
        assert!(message.starts_with("--config: /"), "{message}");
        let expected = ": invalid value 'x' for '--size <SIZE>': ";
        assert!(message.contains(expected), "{message}");
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
