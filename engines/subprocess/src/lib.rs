//! An engine in a separate process, in any language. [`SubprocessEngine`] starts the process, exchanges frames with it over a
//! socket, and implements `LLMEngine`. `docs/subprocess-protocol.md` specifies the process's side; the Python package `genset`
//! implements it for engines in Python.
//!
//! - [`SubprocessConfig`]: the program, its environment and its time limits.
//! - [`InheritedEnv`], [`LogLimit`]: which environment variables it inherits, and how much of its output is logged.
//! - [`RestartPolicy`]: whether and when a process that ended is restarted.
//! - [`ChildFailure`]: how a process can fail; the source of its requests' errors.
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
mod messages;
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
