//! Random sequences of operations on an engine (start, generate, poll, cancel, drop, abort, drain, cleanup, advance of time),
//! compared with a reference model of the contract. They find combinations that no single check covers.
//!
//! - `operation`: operations and their text form, which a failure prints and a replay parses.
//! - `strategy`: how sequences are drawn and shrunk.
//! - `model`: what the contract allows; pure.
//! - `driver`: performs a sequence on a fresh engine and consults the model after each operation.
//! - `regressions`: the file of sequences that have failed.
//!
//! Each sequence runs like a check: with its own thread and runtime, on a paused clock if the engine declares virtual time,
//! under a watch on the wall clock. During `drain` and `cleanup` all open streams are read, as clients do (SH16 covers clients
//! that do not). A request that still wants many more tokens is cancelled first, as after a Worker's grace period.

mod driver;
mod model;
mod operation;
mod regressions;
mod strategy;

use std::cell::RefCell;
use std::fmt;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use proptest::test_runner::{Config, RngAlgorithm, TestCaseError, TestRng, TestRunner};
use tokio::time::Instant;

pub use operation::{ParseSequenceError, Sequence};

use crate::check::Stop;
use crate::runner::{Acquaintance, acquaint, run_beside};
use crate::subject::Factory;
use crate::trial::{Trial, Variation};

/// Which sequences to try.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SequenceOptions {
    /// The number of random sequences.
    pub cases: u32,
    /// The maximum length of a sequence.
    pub max_operations: usize,
    /// The seed of the sequences; `None` for a random one, which a failure prints.
    pub seed: Option<u64>,
    /// The time after which no further sequence begins; `None` for no limit.
    pub longest: Option<Duration>,
    /// A file of sequences to try first. A new failure is appended to it.
    pub regressions: Option<PathBuf>,
    /// The beginning of a replay command: it names the engine and takes `--sequence TEXT`. If empty, a failure shows only the
    /// call in Rust.
    pub replay: String,
}

impl Default for SequenceOptions {
    fn default() -> Self {
        Self {
            cases: 64,
            max_operations: 32,
            seed: None,
            longest: None,
            regressions: None,
            replay: String::new(),
        }
    }
}

/// A run in which all sequences held.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SequenceReport {
    /// The seed of the random sequences.
    pub seed: u64,
    /// The number of random sequences; 0 for an engine that takes no prompts.
    pub cases: u32,
    /// The number of sequences from the regressions file.
    pub regressions: usize,
}

/// Why not all sequences held.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SequenceFailure {
    /// The engine breaks the contract.
    #[error("{0}")]
    Violated(Box<Violated>),
    /// The text to replay is not a sequence.
    #[error("this is no sequence of operations: {0}")]
    Parse(#[from] ParseSequenceError),
    /// The regressions file cannot be read.
    #[error("the regressions file {}: {problem}", path.display())]
    Regressions {
        /// The file.
        path: PathBuf,
        /// The problem.
        problem: String,
    },
}

impl SequenceFailure {
    /// The violation; `None` if no sequence was tried.
    #[must_use]
    pub fn violated(&self) -> Option<&Violated> {
        match self {
            Self::Violated(violated) => Some(violated),
            Self::Parse(_) | Self::Regressions { .. } => None,
        }
    }
}

/// A sequence that breaks the contract.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Violated {
    /// The sequence, shrunk if it was random.
    pub sequence: Sequence,
    /// The rule that is broken, and how.
    pub violation: String,
    /// The index of the operation that showed it; the number of operations if the end of the sequence did.
    pub operation: usize,
    /// The seed of the random sequences; `None` for a replay.
    pub seed: Option<u64>,
    /// The command that replays it; empty if none was configured.
    pub replay: String,
    /// Why it could not be added to the regressions file.
    pub unkept: Option<String>,
}

impl Violated {
    /// The violation and its operation.
    pub(crate) fn told(&self) -> String {
        let operations = self.sequence.operations();
        let violation = &self.violation;
        match operations.get(self.operation) {
            Some(operation) => {
                let (place, count) = (self.operation + 1, operations.len());
                format!("at `{operation}` ({place} of {count}): {violation}")
            }
            None => format!("at the end: {violation}"),
        }
    }
}

impl fmt::Display for Violated {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}", self.told())?;
        writeln!(f, "  sequence: {}", self.sequence)?;
        if let Some(seed) = self.seed {
            writeln!(f, "  seed:     {seed}")?;
        }
        if !self.replay.is_empty() {
            writeln!(f, "  replay:   {}", self.replay)?;
        }
        if let Some(problem) = &self.unkept {
            writeln!(f, "  not kept: {problem}")?;
        }
        write!(
            f,
            "  in Rust:  replay_sequence(\"{}\", factory)",
            self.sequence
        )
    }
}

/// Tries the sequences of the regressions file, and then random ones. Blocks the calling thread. Sequences send prompts, so
/// none is tried with an engine that takes no prompts, but only whole bodies, inputs to embed or pairs to score.
///
/// # Errors
/// The first sequence that breaks the contract, shrunk; or a regressions file that cannot be read. A file that cannot be
/// written does not hide the violation: see [`Violated::unkept`].
///
/// # Examples
/// ```
/// use genset_conformance::{SequenceOptions, run_sequences};
/// # use genset_engine_sample::{SampleArgs, SampleEngine};
/// let args = SampleArgs { vocab_size: 1000, token_delay_ms: 1 };
/// let options = SequenceOptions { cases: 8, ..SequenceOptions::default() };
/// let report = run_sequences(move |_: &_| SampleEngine::from_args(&args), &options);
/// assert_eq!(report.unwrap_or_else(|failure| panic!("{failure}")).cases, 8);
/// ```
pub fn run_sequences(
    factory: impl Factory,
    options: &SequenceOptions,
) -> Result<SequenceReport, SequenceFailure> {
    run_sequences_of(Arc::new(factory), options)
}

pub(crate) fn run_sequences_of(
    factory: Arc<dyn Factory>,
    options: &SequenceOptions,
) -> Result<SequenceReport, SequenceFailure> {
    let bench = Bench::new(factory, options.replay.clone());
    if !bench.known.takes_prompts() {
        return Ok(SequenceReport {
            seed: options.seed.unwrap_or_default(),
            cases: 0,
            regressions: 0,
        });
    }
    let regressions = match &options.regressions {
        Some(path) => regressions::read(path).map_err(|error| unusable(path, &error))?,
        None => Vec::new(),
    };
    for sequence in &regressions {
        bench
            .perform(sequence)
            .map_err(|broken| bench.failure(*broken, None, None))?;
    }
    let seed = options.seed.unwrap_or_else(random_seed);
    if let Err(broken) = bench.explore(options, seed) {
        let unkept = options.regressions.as_ref().and_then(|path| {
            let why = format!("seed {seed}: {}", broken.violation);
            let error = regressions::append(path, &broken.sequence, &why).err()?;
            Some(unusable(path, &error).to_string())
        });
        return Err(bench.failure(*broken, Some(seed), unkept));
    }
    Ok(SequenceReport {
        seed,
        cases: options.cases,
        regressions: regressions.len(),
    })
}

/// Tries one sequence, given as text. Blocks the calling thread.
///
/// # Errors
/// The violation, or the error in the text.
pub fn replay_sequence(text: &str, factory: impl Factory) -> Result<(), SequenceFailure> {
    replay_sequence_with(text, factory, &SequenceOptions::default())
}

/// As [`replay_sequence`], with the replay command from `options`; its other fields are ignored.
///
/// # Errors
/// As [`replay_sequence`].
pub fn replay_sequence_with(
    text: &str,
    factory: impl Factory,
    options: &SequenceOptions,
) -> Result<(), SequenceFailure> {
    let sequence: Sequence = text.parse()?;
    let bench = Bench::new(Arc::new(factory), options.replay.clone());
    bench
        .perform(&sequence)
        .map_err(|broken| bench.failure(*broken, None, None))
}

fn unusable(path: &Path, error: &dyn fmt::Display) -> SequenceFailure {
    SequenceFailure::Regressions {
        path: path.to_owned(),
        problem: error.to_string(),
    }
}

fn random_seed() -> u64 {
    RandomState::new().build_hasher().finish()
}

/// In real time, a sequence may take this many times a check's wall clock limit, since it does as much as many checks.
const REAL_TIME_WALL: u32 = 4;

/// The maximum advance of time in one operation, on a paused clock and in real time.
const LONGEST_ADVANCE_MS: (u64, u64) = (2000, 20);

/// The time limit of shrinking in real time. On a paused clock it takes milliseconds.
const SHRINKING_MS: u32 = 60_000;

/// The maximum number of simpler sequences that shrinking tries.
const SHRINKING_STEPS: u32 = 4096;

/// A sequence that broke the contract, before it is reported.
#[derive(Clone)]
struct Broken {
    sequence: Sequence,
    violation: String,
    operation: usize,
    /// Whether the engine blocked its thread. The thread is lost, so the sequence must not be repeated often.
    is_blocked: bool,
}

/// Runs sequences.
struct Bench {
    factory: Arc<dyn Factory>,
    known: Acquaintance,
    replay: String,
}

impl Bench {
    fn new(factory: Arc<dyn Factory>, replay: String) -> Self {
        let known = acquaint(&factory);
        Self {
            factory,
            known,
            replay,
        }
    }

    /// Tries random sequences. The error is boxed since it is large and rare.
    fn explore(&self, options: &SequenceOptions, seed: u64) -> Result<(), Box<Broken>> {
        let config = Config {
            cases: options.cases,
            failure_persistence: None,
            max_shrink_time: SHRINKING_MS,
            max_shrink_iters: SHRINKING_STEPS,
            ..Config::default()
        };
        let mut seed_bytes = [0; 32];
        seed_bytes[..8].copy_from_slice(&seed.to_le_bytes());
        let rng = TestRng::from_seed(RngAlgorithm::ChaCha, &seed_bytes);
        let (virtual_ms, real_ms) = LONGEST_ADVANCE_MS;
        let longest_ms = if self.known.is_virtual_time {
            virtual_ms
        } else {
            real_ms
        };
        let sequences = strategy::sequences(options.max_operations, longest_ms);
        // The last failure is the simplest: shrinking proceeds from a failure to simpler sequences.
        let broken: RefCell<Option<Box<Broken>>> = RefCell::new(None);
        let begun = Instant::now();
        let is_over = || {
            options
                .longest
                .is_some_and(|longest| begun.elapsed() > longest)
        };
        let explored = TestRunner::new_with_rng(config, rng).run(&sequences, |sequence| {
            if broken.borrow().is_none() && is_over() {
                return Ok(());
            }
            if broken
                .borrow()
                .as_ref()
                .is_some_and(|found| found.is_blocked)
            {
                return Ok(());
            }
            self.perform(&sequence).map_err(|found| {
                broken.replace(Some(found));
                TestCaseError::fail("the contract is broken")
            })
        });
        match (explored, broken.into_inner()) {
            (Err(_), Some(broken)) => Err(self.prune(broken)),
            // Without a failure of ours there is no other error, since no draft is ever rejected.
            (Ok(()), _) | (Err(_), None) => Ok(()),
        }
    }

    /// Removes operations that the failure does not need. The strategy's own shrinking keeps operations that became unnecessary
    /// only after others had shrunk.
    fn prune(&self, mut broken: Box<Broken>) -> Box<Broken> {
        let started = Instant::now();
        // Operations after the failure were not performed.
        broken.sequence = broken.sequence.up_to(broken.operation);
        let mut place = 0;
        while place < broken.sequence.len() && !broken.is_blocked {
            if started.elapsed() >= Duration::from_millis(SHRINKING_MS.into()) {
                break;
            }
            match self.perform(&broken.sequence.without(place)) {
                Err(simpler) if !simpler.is_blocked => (broken, place) = (simpler, 0),
                Err(_) | Ok(()) => place += 1,
            }
        }
        broken
    }

    fn perform(&self, sequence: &Sequence) -> Result<(), Box<Broken>> {
        let limits = self.known.limits;
        let wall = if self.known.is_virtual_time {
            limits.wall
        } else {
            limits.wall * REAL_TIME_WALL
        };
        let factory = Arc::clone(&self.factory);
        let variation = Variation {
            medium: self.known.medium,
            keeps_virtual_time: self.known.is_virtual_time,
            ..Variation::default()
        };
        let trial = Trial::new(factory, "sequence", limits, variation);
        let progress = driver::Progress::default();
        let (ours, theirs) = (sequence.clone(), Arc::clone(&progress));
        let started = Instant::now();
        let result = run_beside(&self.known, &trial, wall, move |trial| {
            driver::perform(trial, ours, theirs)
        });
        match result {
            Ok(()) | Err(Stop::Skip(..)) => Ok(()),
            Err(Stop::Fail(violation) | Stop::Precondition(violation)) => Err(Box::new(Broken {
                sequence: sequence.clone(),
                violation,
                operation: progress.load(Ordering::Acquire),
                is_blocked: started.elapsed() >= wall,
            })),
        }
    }

    fn failure(
        &self,
        broken: Broken,
        seed: Option<u64>,
        unkept: Option<String>,
    ) -> SequenceFailure {
        let replay = match self.replay.as_str() {
            "" => String::new(),
            begin => format!("{begin} --sequence '{}'", broken.sequence),
        };
        SequenceFailure::Violated(Box::new(Violated {
            sequence: broken.sequence,
            violation: broken.violation,
            operation: broken.operation,
            seed,
            replay,
            unkept,
        }))
    }
}
