//! What every engine needs that runs in a child process: to follow what the process prints, to know how it ended, and to leave
//! nothing of it behind. For crates of engines; not a supervisor: when a process is started, told to go or given up is theirs.
//!
//! - [`Group`] and [`GuardedGroup`]: a process group, killed when dropped; a guarded one is also killed when this process ends,
//!   however it ends.
//! - [`End`] and [`OomKills`]: how a process ended, and whether it was memory that ran out.
//! - [`follow`], [`Tail`], [`last_lines`]: its output, line by line.
//! - [`leave`]: the time it has to end by itself.

mod end;
mod group;
mod leave;
mod lines;
mod oom;

pub use end::End;
pub use group::{Group, GuardedGroup};
pub use leave::leave;
pub use lines::{Tail, follow, last_lines};
pub use oom::OomKills;
