//! [`End`]: how a process ended without being asked to.

use std::os::unix::process::ExitStatusExt as _;
use std::process::ExitStatus;

use crate::oom::OomKills;

const SIGKILL: i32 = 9;

/// How a process ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// By itself, with a code, 0 included.
    Exited {
        /// The exit code.
        code: i32,
    },
    /// By a signal that a fault raises, such as a segmentation fault or an abort.
    Crashed {
        /// The signal's number.
        signal: i32,
        /// The signal's name.
        name: &'static str,
    },
    /// By SIGKILL from an unknown sender.
    Killed,
    /// By SIGKILL, and its control group counted an out-of-memory kill.
    OutOfMemory,
}

impl End {
    /// Interprets an exit status together with the kernel's count of out-of-memory kills.
    pub(crate) fn of(status: ExitStatus, oom_kills: Option<&OomKills>) -> Self {
        match (status.code(), status.signal()) {
            (Some(code), _) => Self::Exited { code },
            (None, Some(SIGKILL)) if oom_kills.is_some_and(OomKills::have_grown) => {
                Self::OutOfMemory
            }
            (None, Some(SIGKILL)) => Self::Killed,
            (None, signal) => {
                let signal = signal.unwrap_or_default();
                Self::Crashed {
                    signal,
                    name: signal_name(signal),
                }
            }
        }
    }
}

fn signal_name(signal: i32) -> &'static str {
    match signal {
        2 => "SIGINT",
        3 => "SIGQUIT",
        4 => "SIGILL",
        5 => "SIGTRAP",
        6 => "SIGABRT",
        7 => "SIGBUS",
        8 => "SIGFPE",
        11 => "SIGSEGV",
        13 => "SIGPIPE",
        14 => "SIGALRM",
        15 => "SIGTERM",
        24 => "SIGXCPU",
        31 => "SIGSYS",
        _ => "no common one",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exits_crashes_and_kills_are_told_apart() {
        let end = |raw| End::of(ExitStatus::from_raw(raw), None);
        assert_eq!(end(3 << 8), End::Exited { code: 3 });
        assert_eq!(end(0), End::Exited { code: 0 });
        assert_eq!(end(9), End::Killed);
        let aborted = End::Crashed {
            signal: 6,
            name: "SIGABRT",
        };
        assert_eq!(end(6), aborted);
    }

    #[test]
    fn a_kill_is_the_kernels_where_the_count_of_its_group_grew() {
        let root = tempfile::tempdir().unwrap();
        let kills = OomKills::in_test(root.path(), 3);
        let end = |raw| End::of(ExitStatus::from_raw(raw), Some(&kills));
        assert_eq!(end(9), End::Killed);
        OomKills::count_in_test(root.path(), 4);
        assert_eq!(end(9), End::OutOfMemory);
        assert_eq!(end(0), End::Exited { code: 0 });
    }
}
