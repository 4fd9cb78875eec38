//! The conformance kit. It tests whether an engine meets the contract of [`LLMEngine`](genset_backend_common::LLMEngine), and
//! says what breaks in production if it does not.
//!
//! ```
//! use genset_conformance::run_conformance;
//! # use genset_engine_sample::{SampleArgs, SampleEngine};
//! let args = SampleArgs { vocab_size: 1000, token_delay_ms: 1 };
//! run_conformance(move |_: &_| SampleEngine::from_args(&args)).assert_conformant();
//! ```
//!
//! - [`Check`] and [`catalogue`]: the checks, with stable ids.
//! - [`Subject`], [`Factory`], [`Probe`]: the engine under test, and the kit's access to it. [`Supervise`]: an engine in a
//!   separate process.
//! - [`Trial`], [`Live`], [`Answer`]: the tools of a check. [`Medium`]: tokens, or text for engines that take only text.
//! - [`run_sequences`], [`replay_sequence`], [`Sequence`]: random sequences of operations, compared with a reference model.
//! - [`run_conformance`], [`run_conformance_with`], [`run_check`], [`Report`]: running the kit, and its result. [`Observer`]:
//!   following a run. [`Transcript`]: the requests and answers of a failed check.
//!
//! Every check runs on a fresh engine, with its own thread and async runtime. An engine that hangs, panics or blocks its thread
//! fails only that check.

mod answer;
mod check;
mod checks;
mod clause;
mod kv_index;
mod limits;
mod medium;
#[cfg(feature = "mutants")]
pub mod mutants;
mod patience;
mod report;
mod rules;
mod runner;
mod running;
mod starvation;
mod state_machine;
mod subject;
mod suite;
mod transcript;
mod trial;

pub use answer::{Answer, Generated};
pub use check::{Check, CheckFuture, CheckResult, Level, Profile, SkipReason, Stop};
pub use checks::{catalogue, find};
pub use limits::Limits;
pub use medium::Medium;
pub use report::{
    CheckReport, EngineReport, Evidence, HostReport, JSON_SCHEMA, ProfileReport, ReadReportError,
    Report, SCHEMA, Verdict, Waivers, matrix,
};
pub use runner::{
    Observer, Options, run_check, run_conformance, run_conformance_observed, run_conformance_with,
};
pub use running::Running;
pub use state_machine::{
    ParseSequenceError, Sequence, SequenceFailure, SequenceOptions, SequenceReport, Violated,
    replay_sequence, replay_sequence_with, run_sequences,
};
pub use subject::{ChildCommand, Detokenize, Factory, Probe, Scenario, Subject, Supervise};
#[doc(hidden)]
pub use suite::Acquainted;
pub use suite::assert_check;
pub use transcript::{Transcript, TranscriptEvent};
pub use trial::{Live, Trial};
