//! The words of `genset run`: where requests come from (`in=`) and what answers them (`out=`).

use std::path::PathBuf;
use std::str::FromStr;

use genset_backend_common::spelling::{did_you_mean, none_of};
use genset_backend_common::{EngineError, Role};
use genset_engine_launcher::ServerKind;
use genset_runtime::{EndpointName, NameError, WorkerScope};

use crate::engine::apart::Apart;

/// Where requests come from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum InputKind {
    Http,
    Text,
    Stdin,
    /// The prompts in a file, or in the files of a folder.
    Batch(PathBuf),
    /// Other processes, which call a worker of this name; `None` for the name in the flags.
    Dyn(Option<WorkerName>),
}

impl InputKind {
    /// Whether a person reads the screen, so that the log is quiet.
    pub(crate) fn is_interactive(&self) -> bool {
        match self {
            Self::Http | Self::Dyn(_) => false,
            Self::Text | Self::Stdin | Self::Batch(_) => true,
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
            "batch:" => Err(EngineError::invalid_argument(
                "in",
                "batch: needs a file or a folder, as in batch:prompts.jsonl",
            )),
            _ if is_dyn(text) => {
                let name: Option<EndpointName> = dyn_name("in", text)?;
                Ok(Self::Dyn(name.map(|_| WorkerName(text.to_owned()))))
            }
            _ if text.starts_with("batch:") => Ok(Self::Batch(text["batch:".len()..].into())),
            _ => Err(EngineError::invalid_argument(
                "in",
                format!(
                    "{text:?} is none of http, text, stdin, batch:FILE, dyn{}",
                    did_you_mean(text, ["http", "text", "stdin", "batch:", "dyn"])
                ),
            )),
        }
    }
}

fn is_dyn(text: &str) -> bool {
    text == "dyn" || text.starts_with("dyn://")
}

/// Parses the name in `dyn://NAME`; `None` if there is none.
fn dyn_name<T: FromStr<Err = NameError>>(word: &str, text: &str) -> Result<Option<T>, EngineError> {
    match text.strip_prefix("dyn://") {
        None | Some("") => Ok(None),
        Some(_) => match text.parse() {
            Ok(name) => Ok(Some(name)),
            Err(error) => Err(EngineError::invalid_argument(word, error)),
        },
    }
}

/// The name of a worker as it was written, `dyn://NAME`. It may lack parts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct WorkerName(String);

impl WorkerName {
    /// The full name, with the parts of `flags` in place of missing ones.
    ///
    /// # Errors
    /// `InvalidArgument` if it is not a valid name.
    pub(crate) fn or_of_flags(&self, flags: EndpointName) -> Result<EndpointName, EngineError> {
        let name: EndpointName = self
            .0
            .parse()
            .map_err(|error| EngineError::invalid_argument("in", error))?;
        let parts = self.0.strip_prefix("dyn://").unwrap_or(&self.0);
        Ok(match parts.split(['.', '/']).count() {
            1 => EndpointName {
                namespace: name.namespace,
                ..flags
            },
            2 => EndpointName {
                endpoint: flags.endpoint,
                ..name
            },
            _ => name,
        })
    }
}

/// What answers requests.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum OutputKind {
    /// An engine in this process.
    Engine(EngineKind),
    /// Workers in other processes: those of this scope, or all workers.
    Dyn(Option<WorkerScope>),
}

impl OutputKind {
    /// The word after `out=`.
    pub(crate) fn word(&self) -> String {
        match self {
            Self::Engine(engine) => engine.name().into(),
            Self::Dyn(None) => "dyn".into(),
            Self::Dyn(Some(scope)) => format!("dyn://{scope}"),
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
        EngineKind::named(text).map(Self::Engine).ok_or_else(|| {
            let known = EngineKind::all().map(EngineKind::name).chain(["dyn"]);
            EngineError::invalid_argument("out", none_of(text, known))
        })
    }
}

/// Parses the command in `cmd:COMMAND`.
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
    /// Simulates vLLM's timing and memory, without computing.
    Mocker,
    /// In its own process: a program of Genset that is built separately.
    Apart(Apart),
    /// Its own process, started by a command.
    Cmd,
    /// The server of another project.
    Server(ServerKind),
}

impl EngineKind {
    fn all() -> impl Iterator<Item = Self> {
        let own = [
            Self::Candle,
            Self::EchoCore,
            Self::EchoFull,
            Self::Sample,
            Self::Scripted,
            Self::Mocker,
            Self::Apart(Apart::MistralRs),
            Self::Apart(Apart::LibLlama),
            Self::Cmd,
        ];
        own.into_iter().chain(ServerKind::ALL.map(Self::Server))
    }

    /// The engine that a word names.
    fn named(word: &str) -> Option<Self> {
        match word {
            "tensorrt-llm" => Some(Self::Server(ServerKind::Trtllm)),
            _ => Self::all().find(|kind| kind.name() == word),
        }
    }

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Candle => "candle",
            Self::EchoCore => "echo_core",
            Self::EchoFull => "echo_full",
            Self::Sample => "sample",
            Self::Scripted => "scripted",
            Self::Mocker => "mocker",
            Self::Apart(apart) => apart.word(),
            Self::Cmd => "cmd",
            Self::Server(kind) => kind.name(),
        }
    }
}

/// Replaces an engine whose program is missing by one that does the same; returns a remark for the user.
pub(super) fn stand_in(output: &mut OutputKind) -> Option<&'static str> {
    if !output.is(EngineKind::Apart(Apart::MistralRs)) || Apart::MistralRs.program().is_some() {
        return None;
    }
    *output = OutputKind::Engine(EngineKind::Candle);
    Some(Apart::MistralRs.is_missing())
}

/// A remark for the user if a worker has a role's component and not the role: the component is then only a name.
pub(super) fn only_named(
    input: &InputKind,
    name: &EndpointName,
    role: Role,
) -> Option<&'static str> {
    if role != Role::Aggregated || !matches!(input, InputKind::Dyn(_)) {
        return None;
    }
    match name.component.as_str() {
        "prefill" => Some(
            "the component prefill is only a name: this worker serves whole requests; --role prefill makes it compute prompts for decode workers",
        ),
        "decode" => Some(
            "the component decode is only a name: this worker serves whole requests; --role decode makes it continue what prefill workers began",
        ),
        _ => None,
    }
}

impl FromStr for EngineKind {
    type Err = String;

    /// The caller, which reads the command line, adds the flag's name.
    fn from_str(text: &str) -> Result<Self, String> {
        Self::named(text).ok_or_else(|| none_of(text, Self::all().map(Self::name)))
    }
}
