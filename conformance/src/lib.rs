//! The conformance kit: says whether an engine keeps the contract of [`LLMEngine`](genset_backend_common::LLMEngine), and
//! what breaks in production where it does not.
//!
//! ```
//! use genset_conformance::run_conformance;
//! # use genset_engine_sample::{SampleArgs, SampleEngine};
//! let args = SampleArgs { vocab_size: 1000, token_delay_ms: 1 };
//! run_conformance(move |_: &_| SampleEngine::from_args(&args)).assert_conformant();
//! ```
//!
//! - [`Check`] and [`catalogue`]: what is checked, by stable ids.
//! - [`Subject`], [`Factory`], [`Probe`]: what is tested, and how the kit gets at it. [`Supervise`]: an engine in a process of
//!   its own.
//! - [`Trial`], [`Live`], [`Answer`]: what a check works with. [`Medium`]: tokens, or text for engines that take only that.
//! - [`run_sequences`], [`replay_sequence`], [`Sequence`]: random sequences of operations, compared with a reference model.
//! - [`run_conformance`], [`run_conformance_with`], [`run_check`], [`Report`]: running, and what came out; [`Transcript`]:
//!   what a failed check asked and what came back.
//!
//! Every check runs on a fresh engine, on a thread and an async runtime of its own: an engine that hangs, panics or
//! blocks its thread fails the check and stops nothing else.

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
    Report, SCHEMA, Verdict, WaiverProblem, Waivers, matrix,
};
pub use runner::{
    Options, run_check, run_conformance, run_conformance_while, run_conformance_with,
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
