//! An engine in a process of its own, in any language: [`SubprocessEngine`] starts the process, speaks frames with it over a
//! socket, and makes it an `LLMEngine`. `docs/subprocess-protocol.md` says what the process has to do; the Python package
//! `genset` does it for engines in Python.
//!
//! - [`SubprocessConfig`]: the program, and how long it may take for what.
//! - [`InheritedEnv`], [`LogLimit`]: what it is given of our environment, and how much of what it prints is logged.
//! - [`RestartPolicy`]: whether a process that ended is started again.
//! - [`ChildFailure`]: how a process can fail; the source of the errors that its requests end with.
//! - [`worker_socket`], [`serve`]: the process's own side, for engines in Rust. With the feature `cli`, `run_program`: the `main`
//!   around it.
//! - With the feature `conformance`, `SupervisedProcess`: a process as the subject of the conformance kit.

mod batch;
mod call;
mod config;
#[cfg(feature = "conformance")]
mod conformance;
mod ending;
mod engine;
mod events;
mod failure;
mod launch;
mod lines;
mod link;
mod outputs;
mod process;
#[cfg(feature = "cli")]
mod program;
mod serve;
mod tasks;

pub use config::SubprocessConfig;
#[cfg(feature = "conformance")]
pub use conformance::SupervisedProcess;
pub use engine::SubprocessEngine;
pub use failure::ChildFailure;
pub use genset_process::{InheritedEnv, InvalidEnv, LogLimit, RestartPolicy};
#[cfg(feature = "cli")]
pub use program::run_program;
pub use serve::{ServeError, serve, worker_socket};
