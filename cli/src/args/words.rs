//! The words of `genset run`: where requests come from (`in=`) and who answers (`out=`).

use std::str::FromStr;

use genset_backend_common::EngineError;
use genset_engine_launcher::ServerKind;
use genset_runtime::EndpointName;

/// Where requests come from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum InputKind {
    Http,
    Text,
    Stdin,
    /// Other processes, to a worker of this name; `None` for the one in the flags.
    Dyn(Option<EndpointName>),
}

impl InputKind {
    /// Whether a person reads the screen, so that the log keeps quiet.
    pub(crate) fn is_interactive(&self) -> bool {
        match self {
            Self::Http | Self::Dyn(_) => false,
            Self::Text | Self::Stdin => true,
        }
    }
}

impl FromStr for InputKind {
    type Err = EngineError;

    fn from_str(text: &str) -> Result<Self, EngineError> {
        match text {
            "http" => Ok(Self::Http),
            "text" => Ok(Self::Text),
            "stdin" => Ok(Self::Stdin),
            _ if is_dyn(text) => Ok(Self::Dyn(dyn_name("in", text)?)),
            _ if text.starts_with("batch:") => Err(EngineError::unsupported(
                "in",
                format!("{text:?} is not available in this build; use http, text, stdin or dyn"),
            )),
            _ => Err(EngineError::invalid_argument(
                "in",
                format!("{text:?} is none of http, text, stdin, dyn"),
            )),
        }
    }
}

fn is_dyn(text: &str) -> bool {
    text == "dyn" || text.starts_with("dyn://")
}

/// The name in `dyn://NAME`; `None` when there is none.
fn dyn_name(word: &str, text: &str) -> Result<Option<EndpointName>, EngineError> {
    match text.strip_prefix("dyn://") {
        None | Some("") => Ok(None),
        Some(name) => match name.parse() {
            Ok(name) => Ok(Some(name)),
            Err(error) => Err(EngineError::invalid_argument(word, error)),
        },
    }
}

/// Who answers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum OutputKind {
    /// An engine in this process.
    Engine(EngineKind),
    /// Workers in other processes: those of this name, or all.
    Dyn(Option<EndpointName>),
}

impl OutputKind {
    /// The word after `out=`.
    pub(crate) fn word(&self) -> String {
        match self {
            Self::Engine(engine) => engine.name().into(),
            Self::Dyn(None) => "dyn".into(),
            Self::Dyn(Some(name)) => format!("dyn://{name}"),
        }
    }

    /// Whether it is this engine, in this process.
    pub(crate) fn is(&self, engine: EngineKind) -> bool {
        *self == Self::Engine(engine)
    }
}

impl FromStr for OutputKind {
    type Err = EngineError;

    fn from_str(text: &str) -> Result<Self, EngineError> {
        if is_dyn(text) {
            return Ok(Self::Dyn(dyn_name("out", text)?));
        }
        if command_in(text).is_some() {
            return Ok(Self::Engine(EngineKind::Cmd));
        }
        text.parse().map(Self::Engine)
    }
}

/// The command in `cmd:COMMAND`.
pub(crate) fn command_in(output: &str) -> Option<&str> {
    output.strip_prefix("cmd:")
}

/// Which engine answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum EngineKind {
    /// A language model in this process.
    Candle,
    EchoCore,
    EchoFull,
    Sample,
    Scripted,
    /// A process of its own, started by a command.
    Cmd,
    /// The server of another project.
    Server(ServerKind),
}

impl EngineKind {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Candle => "candle",
            Self::EchoCore => "echo_core",
            Self::EchoFull => "echo_full",
            Self::Sample => "sample",
            Self::Scripted => "scripted",
            Self::Cmd => "cmd",
            Self::Server(kind) => kind.name(),
        }
    }
}

/// Engines that users of the field know and this build does not have.
const ABSENT_ENGINES: &[&str] = &["mistralrs", "mocker"];

impl FromStr for EngineKind {
    type Err = EngineError;

    fn from_str(text: &str) -> Result<Self, EngineError> {
        let own = [
            Self::Candle,
            Self::EchoCore,
            Self::EchoFull,
            Self::Sample,
            Self::Scripted,
            Self::Cmd,
        ];
        let servers = ServerKind::ALL.map(Self::Server);
        let known = own.into_iter().chain(servers);
        let names: Vec<&str> = known.clone().map(Self::name).collect();
        let names = names.join(", ");
        match { known }.find(|kind| kind.name() == text) {
            Some(kind) => Ok(kind),
            None if ABSENT_ENGINES.contains(&text) => Err(EngineError::unsupported(
                "out",
                format!("{text} is not available in this build; use {names} or dyn"),
            )),
            None => Err(EngineError::invalid_argument(
                "out",
                format!("{text:?} is none of {names}, dyn"),
            )),
        }
    }
}
