//! [`Subject`]: the engine under test, made for each check by a [`Factory`].

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use genset_backend_common::{LLMEngine, Role, TokenId, controls::Adapter};

/// The parameters for a factory.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Scenario {
    /// The role of the engine.
    pub role: Role,
    /// The check that it is for, or `sequence` for one sequence of [`run_sequences`](crate::run_sequences).
    pub check: &'static str,
}

impl Scenario {
    /// The scenario of a check, for an engine that does both prefill and decode.
    #[must_use]
    pub fn of(check: &'static str) -> Self {
        Self {
            role: Role::Aggregated,
            check,
        }
    }
}

/// Counters of the engine, for direct evidence. Every method may return `None`: the kit then tests from outside and marks the
/// evidence as indirect.
pub trait Probe: Send + Sync + 'static {
    /// The number of requests that hold any resource now.
    fn active_requests(&self) -> Option<u64> {
        None
    }

    /// The total number of tokens computed, read or not.
    fn produced_tokens(&self) -> Option<u64> {
        None
    }

    /// The number of KV blocks in use now.
    fn kv_used_blocks(&self) -> Option<u64> {
        None
    }

    /// Makes the engine fail at once and permanently, like a lost device; `false` if that is not possible.
    fn crash(&self) -> bool {
        false
    }
}

/// Converts tokens to their text.
pub type Detokenize = Arc<dyn Fn(&[TokenId]) -> String + Send + Sync>;

/// A command that serves an engine from a separate process, as `docs/subprocess-protocol.md` specifies.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ChildCommand {
    /// The program: a path, or a name to look up in `PATH`.
    pub program: PathBuf,
    /// Its arguments.
    pub args: Vec<String>,
    /// Variables to add to the environment.
    pub env: BTreeMap<String, String>,
    /// The directory it runs in; `None` for this process's.
    pub cwd: Option<PathBuf>,
}

/// Runs engines in separate processes; the checks of SP need it. The kit brings processes that misbehave, and also talks to the
/// subject's own process as a worker would.
pub trait Supervise: Send + Sync + 'static {
    /// The command of the subject's own engine.
    fn command(&self) -> ChildCommand;

    /// Creates an engine, not started, with the process `command`. It gives the process `patience` to send its Hello, and as
    /// long to start.
    fn supervise(&self, command: ChildCommand, patience: Duration) -> Arc<dyn LLMEngine>;
}

/// An engine to test, not started.
#[derive(Clone)]
pub struct Subject {
    /// The engine.
    pub engine: Arc<dyn LLMEngine>,
    /// Its counters, if available.
    pub probe: Option<Arc<dyn Probe>>,
    /// Whether the engine's side checks requests against the declaration (a worker in another process), so that the kit must
    /// not.
    pub checks_itself: bool,
    /// Decodes its tokens, for checks of guided decoding.
    pub text: Option<Detokenize>,
    /// How its process is run, if it has one.
    pub process: Option<Arc<dyn Supervise>>,
    /// An adapter that it can load or has loaded.
    pub adapter: Option<Adapter>,
    /// How long its start may take, if a minute is too short.
    pub start_timeout: Duration,
}

impl Subject {
    /// An engine in this process. The kit checks requests as a Worker does.
    #[must_use]
    pub fn new(engine: impl LLMEngine) -> Self {
        Self::of(Arc::new(engine))
    }

    /// As [`Self::new`], for a shared engine, for example one with counters.
    #[must_use]
    pub fn of(engine: Arc<dyn LLMEngine>) -> Self {
        Self {
            engine,
            probe: None,
            checks_itself: false,
            text: None,
            process: None,
            adapter: None,
            start_timeout: Duration::ZERO,
        }
    }

    /// Adds the engine's counters.
    #[must_use]
    pub fn with_probe(mut self, probe: Arc<dyn Probe>) -> Self {
        self.probe = Some(probe);
        self
    }

    /// Adds a decoder for the engine's tokens; without it, guided decoding cannot be checked.
    #[must_use]
    pub fn with_text(mut self, text: Detokenize) -> Self {
        self.text = Some(text);
        self
    }

    /// Adds a supervisor for the engine's process; without it, the checks of SP do not apply.
    #[must_use]
    pub fn with_process(mut self, process: Arc<dyn Supervise>) -> Self {
        self.process = Some(process);
        self
    }

    /// Adds an adapter that the engine can load or has loaded; without one, adapters cannot be checked.
    #[must_use]
    pub fn with_adapter(mut self, adapter: Adapter) -> Self {
        self.adapter = Some(adapter);
        self
    }

    /// Gives its start this long, for an engine that loads or compiles for more than a minute.
    #[must_use]
    pub fn with_start_timeout(mut self, timeout: Duration) -> Self {
        self.start_timeout = timeout;
        self
    }

    /// Marks that the engine's side checks requests.
    #[must_use]
    pub fn checking_itself(mut self) -> Self {
        self.checks_itself = true;
        self
    }
}

impl<E: LLMEngine> From<E> for Subject {
    fn from(engine: E) -> Self {
        Self::new(engine)
    }
}

genset_backend_common::debug_as!(|it| Subject {
    has_probe: it.probe.is_some(),
    checks_itself: it.checks_itself,
    has_process: it.process.is_some(),
    ..
});

/// Makes a new subject for each check. Closures from a scenario to an engine or a [`Subject`] are factories.
pub trait Factory: Send + Sync + 'static {
    /// Builds an engine that is not started, without side effects.
    fn build(&self, scenario: &Scenario) -> Subject;
}

impl<F, S> Factory for F
where
    F: Fn(&Scenario) -> S + Send + Sync + 'static,
    S: Into<Subject>,
{
    fn build(&self, scenario: &Scenario) -> Subject {
        self(scenario).into()
    }
}
