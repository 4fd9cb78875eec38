//! Child processes, for engine crates that run one: its environment, its output, how it ended, when it is restarted, and how all
//! of it is removed.
//!
//! - [`Process`]: a running program in a process group that dies with this process, however that ends.
//! - [`Supervision`]: keeps an engine's [`Program`] running: starts it, waits for its end, and restarts it.
//! - [`InheritedEnv`]: which environment variables a child inherits.
//! - [`End`]: how a process ended, including whether it ran out of memory.
//! - [`RestartPolicy`]: whether and when a process is restarted.
//! - [`Tail`], [`LineLimits`], [`LogLimit`]: which of its output is kept, and how much of it is logged; [`log`] and
//!   [`level_named`] log a line.
//! - [`lock_folder`] and [`remove_left_folders`]: remove the temporary folders of killed processes.

mod end;
mod env;
mod folders;
mod group;
mod lines;
mod oom;
mod process;
mod restart;
mod supervise;
mod throttle;

pub use end::End;
pub use env::{InheritedEnv, InvalidEnv};
pub use folders::{lock_folder, remove_left_folders};
pub use lines::{Tail, level_named, log};
pub use process::{LineLimits, Process};
pub use restart::RestartPolicy;
pub use supervise::{Program, Started, Supervised, Supervision, Terms};
pub use throttle::LogLimit;
