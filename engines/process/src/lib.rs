//! Child processes, for the crates of engines that run in one: what a process is given of the environment, what it prints, how
//! it ended, when it is started again, and that nothing of it is left behind.
//!
//! - [`Process`]: a program that runs, in a group that dies with this process, however that ends.
//! - [`Supervision`]: keeps an engine's [`Program`] running: starts it, waits for its end, and starts it again.
//! - [`InheritedEnv`]: what a child gets of this process's environment.
//! - [`End`]: how a process ended, and whether it was memory that ran out.
//! - [`RestartPolicy`]: whether and when one that ended is started again.
//! - [`Tail`], [`LineLimits`], [`LogLimit`]: what is kept of its output, and how much of it the log takes; [`log`] and
//!   [`level_named`] log a line.
//! - [`lock_folder`] and [`remove_left_folders`]: what a process that is killed leaves in the folder for temporary files.

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
