//! [`Check`]: one promise of the contract, and the test for it.

use std::fmt;
use std::pin::Pin;

use serde::{Deserialize, Serialize};

use crate::trial::Trial;

genset_backend_common::named! {
    /// The importance of a check.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
    #[serde(rename_all = "snake_case")]
    pub enum Level {
        /// A measurement: reported, never judged.
        Info = "info",
        /// MUST: required for the word "conformant".
        Core = "core",
        /// SHOULD.
        Strict = "strict",
        /// Leaks and storms; takes minutes.
        Soak = "soak",
    }
}

impl Level {
    /// The number in the catalogue; 0 for measurements.
    #[must_use]
    pub const fn number(self) -> u8 {
        match self {
            Self::Info => 0,
            Self::Core => 1,
            Self::Strict => 2,
            Self::Soak => 3,
        }
    }
}

genset_backend_common::named! {
    /// What an engine must declare for a check to apply.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
    #[serde(rename_all = "snake_case")]
    pub enum Profile {
        /// Every engine that generates, from tokens or from text.
        Tokens = "tokens",
        /// Engines that declare sampling options.
        Sampling = "sampling",
        /// Engines that declare log probabilities.
        Logprobs = "logprobs",
        /// Engines that declare guided decoding.
        Guided = "guided",
        /// Engines that declare KV events.
        KvEvents = "kv-events",
        /// Engines built for prefill and decode roles.
        Disaggregated = "disaggregated",
        /// Engines that declare resumption, exact or as a longer prompt.
        Resume = "resume",
        /// Engines in a separate process.
        Subprocess = "subprocess",
        /// Engines that declare token sequences to embed among their inputs.
        Embeddings = "embeddings",
        /// Engines that declare pairs of texts to score among their inputs.
        Scores = "scores",
        /// Engines that have controls.
        Controls = "controls",
        /// Engines that declare adapters.
        Adapters = "adapters",
        /// Engines that declare several data-parallel ranks.
        Ranks = "ranks",
        /// Engines that declare whole bodies of OpenAI's API.
        Bodies = "bodies",
    }
}

impl Profile {
    /// Whether it applies only to engines whose prompts may be tokens.
    #[must_use]
    pub const fn needs_tokens(self) -> bool {
        match self {
            Self::Logprobs | Self::KvEvents | Self::Disaggregated | Self::Resume => true,
            Self::Tokens
            | Self::Sampling
            | Self::Guided
            | Self::Subprocess
            // Inputs to embed and pairs to score are tokens, whatever an engine's prompts are.
            | Self::Embeddings
            | Self::Scores
            | Self::Controls
            | Self::Adapters
            | Self::Ranks
            | Self::Bodies => false,
        }
    }
}

/// Why a check does not apply, as a machine-readable code.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SkipReason {
    /// The engine does not declare the ability.
    NotDeclared,
    /// The check needs a probe's counters; it cannot be tested from outside.
    NoProbe,
    /// The check is above the requested level.
    Level,
    /// The check was excluded by name.
    Filtered,
    /// A measurement that was not requested, or for which the engine's answers were unsuitable.
    NotMeasured,
    /// The check needs token ids, but the engine takes only text; or it needs prompts, but the engine takes none.
    NeedsTokens,
    /// The engine's authors waived it.
    Waived,
    /// The run ended before the check: the engine is gone for good, or the run was interrupted.
    Gone,
}

/// Why a check ends early.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Stop {
    /// The engine broke the promise; the text says how.
    Fail(String),
    /// A precondition of the check failed: a first start, or a first plain request. The engine fails, but the promise was not
    /// tested. The text says what was seen.
    Precondition(String),
    /// The check does not apply; the text says why.
    Skip(SkipReason, String),
}

impl fmt::Display for Stop {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Fail(text) | Self::Precondition(text) | Self::Skip(_, text) => f.write_str(text),
        }
    }
}

/// The result of a check; `Ok` is a pass.
pub type CheckResult = Result<(), Stop>;

/// The future of a running check.
pub type CheckFuture = Pin<Box<dyn Future<Output = CheckResult> + Send>>;

/// One promise of the contract, and the test for it.
#[derive(Clone, Copy)]
pub struct Check {
    /// Stable: two letters for the group, two digits.
    pub id: &'static str,
    /// Its importance.
    pub level: Level,
    /// What an engine must declare for it to apply.
    pub profile: Profile,
    /// The promise, as a sentence about the engine, without a final period.
    pub title: &'static str,
    /// The place in the contract, as a path into the documentation of `genset-backend-common`.
    pub clause: &'static str,
    /// What breaks in production for an engine that fails it.
    pub breaks: &'static str,
    /// Whether it needs a multi-threaded runtime, and therefore real time.
    pub is_multi_thread: bool,
    /// Whether it counts resources of the whole process, so that no other check may run at the same time.
    pub is_alone: bool,
    /// Whether it uses token ids, which an engine that takes only text does not understand.
    pub needs_tokens: bool,
    /// Runs it.
    pub run: fn(Trial) -> CheckFuture,
}

genset_backend_common::debug_as!(|it| Check {
    id: it.id,
    title: it.title,
    ..
});

/// Fails a check with a formatted text.
macro_rules! fail {
    ($($text:tt)*) => {
        return Err($crate::check::Stop::Fail(format!($($text)*)))
    };
}

/// Fails a check unless the condition holds.
macro_rules! ensure {
    ($condition:expr, $($text:tt)*) => {
        if !$condition {
            return Err($crate::check::Stop::Fail(format!($($text)*)));
        }
    };
}

/// Skips a check as not applicable.
#[allow(unused_macros, reason = "which groups skip is theirs to say")]
macro_rules! skip {
    ($reason:ident, $($text:tt)*) => {
        return Err($crate::check::Stop::Skip($crate::check::SkipReason::$reason, format!($($text)*)))
    };
}

#[allow(unused_imports, reason = "which groups skip is theirs to say")]
pub(crate) use {ensure, fail, skip};

/// A row of the catalogue; `run` is an `async fn(Trial) -> CheckResult`.
macro_rules! check {
    ($id:literal, $level:ident, $profile:ident, $title:literal, clause: $clause:literal, breaks: $breaks:literal, $run:path) => {
        $crate::check::Check {
            id: $id,
            level: $crate::check::Level::$level,
            profile: $crate::check::Profile::$profile,
            title: $title,
            clause: $clause,
            breaks: $breaks,
            is_multi_thread: false,
            is_alone: false,
            needs_tokens: $crate::check::Profile::$profile.needs_tokens(),
            run: |trial| Box::pin($run(trial)),
        }
    };
    (multi_thread $id:literal, $($rest:tt)*) => {
        $crate::check::Check { is_multi_thread: true, ..$crate::check::check!($id, $($rest)*) }
    };
    (alone $id:literal, $($rest:tt)*) => {
        $crate::check::Check { is_alone: true, ..$crate::check::check!($id, $($rest)*) }
    };
    (tokens $id:literal, $($rest:tt)*) => {
        $crate::check::Check { needs_tokens: true, ..$crate::check::check!($id, $($rest)*) }
    };
}

pub(crate) use check;
