//! What every engine needs that runs in a child process: to say what it is given, to follow what it prints, to know how it
//! ended, and to leave nothing of it behind. For crates of engines; not a supervisor: when a process is started, told to go or
//! given up is theirs.
//!
//! - [`GuardedGroup`]: a process group that dies with this process, however that ends.
//! - [`InheritedEnv`]: what a child gets of this process's environment.
//! - [`End`] and [`OomKills`]: how a process ended, and whether it was memory that ran out.
//! - [`follow`], [`Tail`], [`last_lines`]: its output, line by line; [`Throttle`]: as much of it as the log takes.
//! - [`leave`]: the time it has to end by itself.

mod end;
mod env;
mod group;
mod leave;
mod lines;
mod oom;
mod throttle;

pub use end::End;
pub use env::{InheritedEnv, InvalidEnv};
pub use group::GuardedGroup;
pub use leave::leave;
pub use lines::{Tail, follow, last_lines};
pub use oom::OomKills;
pub use throttle::{LogLimit, Throttle};
