//! What is tested: a [`Subject`], made afresh for each check by a [`Factory`].

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use genset_backend_common::{LLMEngine, Role, TokenId, controls::Adapter};

/// What a factory is asked for.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Scenario {
    /// The part the engine will play.
    pub role: Role,
    /// The check it is for.
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

/// Counters of the engine's own, for evidence from inside. Every method may say `None`: the kit then looks from outside and
/// marks the evidence as indirect.
pub trait Probe: Send + Sync + 'static {
    /// Requests that hold anything now.
    fn active_requests(&self) -> Option<u64> {
        None
    }

    /// Tokens computed, ever, whether or not anybody read them.
    fn produced_tokens(&self) -> Option<u64> {
        None
    }

    /// KV blocks in use now.
    fn kv_used_blocks(&self) -> Option<u64> {
        None
    }

    /// Makes the engine fail at once and for good, as a lost device would; `false` when there is no way to.
    fn crash(&self) -> bool {
        false
    }
}

/// Turns tokens into the text they stand for.
pub type Detokenize = Arc<dyn Fn(&[TokenId]) -> String + Send + Sync>;

/// A command that serves an engine from a process of its own, as `docs/subprocess-protocol.md` says.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ChildCommand {
    /// The program: a path, or a name to be found in `PATH`.
    pub program: PathBuf,
    /// Its arguments.
    pub args: Vec<String>,
    /// Variables added to the environment.
    pub env: BTreeMap<String, String>,
    /// The directory it runs in; `None` for this process's.
    pub cwd: Option<PathBuf>,
}

/// Runs engines in processes of their own: what the checks of SP need of a subject that does. The kit brings processes that
/// misbehave, and speaks with the subject's own process as a worker would.
pub trait Supervise: Send + Sync + 'static {
    /// The command of the subject's own engine.
    fn command(&self) -> ChildCommand;

    /// An engine, not started, whose process is `command`, and which gives that process `patience` to greet, and as long to
    /// start.
    fn supervise(&self, command: ChildCommand, patience: Duration) -> Arc<dyn LLMEngine>;
}

/// An engine to test, not started.
#[derive(Clone)]
pub struct Subject {
    /// The engine.
    pub engine: Arc<dyn LLMEngine>,
    /// Its counters, if it shows them.
    pub probe: Option<Arc<dyn Probe>>,
    /// Whether requests are checked against the declaration on the engine's own side (a worker in another process), so
    /// that the kit must not do it.
    pub checks_itself: bool,
    /// How to read its tokens, for checks of guided decoding.
    pub text: Option<Detokenize>,
    /// How its process is run, if it has one of its own.
    pub process: Option<Arc<dyn Supervise>>,
    /// An adapter that it can load, or has loaded.
    pub adapter: Option<Adapter>,
}

impl Subject {
    /// An engine in this process, behind the checks that a Worker makes before each request.
    #[must_use]
    pub fn new(engine: impl LLMEngine) -> Self {
        Self::of(Arc::new(engine))
    }

    /// As [`Self::new`], an engine that is shared: with its counters, for one.
    #[must_use]
    pub fn of(engine: Arc<dyn LLMEngine>) -> Self {
        Self {
            engine,
            probe: None,
            checks_itself: false,
            text: None,
            process: None,
            adapter: None,
        }
    }

    /// Adds the engine's counters.
    #[must_use]
    pub fn with_probe(mut self, probe: Arc<dyn Probe>) -> Self {
        self.probe = Some(probe);
        self
    }

    /// Adds how to read the engine's tokens; without it, guided decoding cannot be checked.
    #[must_use]
    pub fn with_text(mut self, text: Detokenize) -> Self {
        self.text = Some(text);
        self
    }

    /// Adds how the engine's process is run; without it, the checks of SP do not apply.
    #[must_use]
    pub fn with_process(mut self, process: Arc<dyn Supervise>) -> Self {
        self.process = Some(process);
        self
    }

    /// Names an adapter that the engine can load, or has loaded; without one, adapters cannot be checked.
    #[must_use]
    pub fn with_adapter(mut self, adapter: Adapter) -> Self {
        self.adapter = Some(adapter);
        self
    }

    /// Says that requests are checked on the engine's own side.
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

impl std::fmt::Debug for Subject {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Subject")
            .field("has_probe", &self.probe.is_some())
            .field("checks_itself", &self.checks_itself)
            .field("has_process", &self.process.is_some())
            .finish_non_exhaustive()
    }
}

/// Makes a fresh subject for each check. Closures from a scenario to an engine or a [`Subject`] are factories.
pub trait Factory: Send + Sync + 'static {
    /// Builds, without side effects, an engine that is not started.
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
