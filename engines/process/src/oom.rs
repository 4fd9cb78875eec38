//! [`OomKills`]: whether the kernel killed for lack of memory in the process's control group. SIGKILL alone does not name its
//! sender; the group's counter does. This needs Linux with control groups v2; elsewhere nothing is known.

use std::fs;
use std::path::{Path, PathBuf};

use genset_backend_common::machine::ControlGroup;

/// The out-of-memory kill counter of a control group, with its value when the process was started.
#[derive(Debug)]
pub(crate) struct OomKills {
    file: PathBuf,
    at_start: u64,
}

impl OomKills {
    /// Reads the counter of the group that process `pid` is in; `None` if there is none.
    pub(crate) fn of(pid: u32) -> Option<Self> {
        Self::below(Path::new("/"), pid)
    }

    /// As [`of`](Self::of), with another root than `/`, for tests.
    fn below(root: &Path, pid: u32) -> Option<Self> {
        let groups = ControlGroup::of_process(root, &pid.to_string(), "memory");
        // Its own comes before the ancestors.
        let own = groups.into_iter().find_map(|group| match group {
            ControlGroup::Second(folder) => Some(folder),
            ControlGroup::First(_) => None,
        })?;
        let file = own.join("memory.events");
        let at_start = count(&file)?;
        Some(Self { file, at_start })
    }

    /// Whether the counter has increased since the start.
    pub(crate) fn have_grown(&self) -> bool {
        count(&self.file).is_some_and(|now| now > self.at_start)
    }
}

fn count(file: &Path) -> Option<u64> {
    let events = fs::read_to_string(file).ok()?;
    let line = events
        .lines()
        .find_map(|line| line.strip_prefix("oom_kill "))?;
    line.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    const PID: u32 = 7;

    /// Makes the process a member of these groups.
    fn join(root: &Path, groups: &str) {
        let folder = root.join("proc").join(PID.to_string());
        fs::create_dir_all(&folder).unwrap();
        fs::write(folder.join("cgroup"), groups).unwrap();
    }

    impl OomKills {
        /// A counter below `root` with the value `kills`.
        pub(crate) fn in_test(root: &Path, kills: u64) -> Self {
            Self::count_in_test(root, kills);
            join(root, "1:name=systemd:/other\n0::/pod/engine\n");
            Self::below(root, PID).unwrap()
        }

        /// Sets that counter.
        pub(crate) fn count_in_test(root: &Path, kills: u64) {
            let group = root.join("sys/fs/cgroup/pod/engine");
            fs::create_dir_all(&group).unwrap();
            let events =
                format!("low 0\nhigh 0\nmax 7\noom 3\noom_kill {kills}\noom_group_kill 9\n");
            fs::write(group.join("memory.events"), events).unwrap();
        }
    }

    #[test]
    fn kills_since_the_start_are_seen() {
        let root = tempfile::tempdir().unwrap();
        let kills = OomKills::in_test(root.path(), 2);
        assert!(!kills.have_grown());
        OomKills::count_in_test(root.path(), 3);
        assert!(kills.have_grown());
        fs::remove_dir_all(root.path().join("sys")).unwrap();
        assert!(!kills.have_grown());
    }

    #[test]
    fn without_a_group_of_version_2_nothing_is_known() {
        let root = tempfile::tempdir().unwrap();
        assert!(OomKills::below(root.path(), PID).is_none());
        for groups in ["4:memory:/engine\n", "0::/engine\n"] {
            join(root.path(), groups);
            assert!(OomKills::below(root.path(), PID).is_none(), "{groups}");
        }
    }
}
