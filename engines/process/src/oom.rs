//! [`OomKills`]: whether the kernel killed for lack of memory in the process's control group. SIGKILL alone does not name its
//! sender; the group's counter does. This needs Linux with control groups v2; elsewhere nothing is known.

use std::fs;
use std::path::{Path, PathBuf};

/// The out-of-memory kill counter of a control group, with its value when the process was started.
#[derive(Debug)]
pub(crate) struct OomKills {
    file: PathBuf,
    at_start: u64,
}

impl OomKills {
    /// Reads the counter of the group that process `pid` is in; `None` if there is none.
    pub(crate) fn of(pid: u32) -> Option<Self> {
        Self::read(
            &PathBuf::from(format!("/proc/{pid}/cgroup")),
            Path::new("/sys/fs/cgroup"),
        )
    }

    fn read(membership: &Path, root: &Path) -> Option<Self> {
        let membership = fs::read_to_string(membership).ok()?;
        // The line of version 2; lines of version 1 have a number or names here.
        let group = membership
            .lines()
            .find_map(|line| line.strip_prefix("0::/"))?;
        let file = root.join(group).join("memory.events");
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

    impl OomKills {
        /// A counter below `root` with the value `kills`.
        pub(crate) fn in_test(root: &Path, kills: u64) -> Self {
            Self::count_in_test(root, kills);
            let membership = root.join("cgroup");
            fs::write(&membership, "1:name=systemd:/other\n0::/pod/engine\n").unwrap();
            Self::read(&membership, root).unwrap()
        }

        /// Sets that counter.
        pub(crate) fn count_in_test(root: &Path, kills: u64) {
            let group = root.join("pod/engine");
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
        fs::remove_dir_all(root.path().join("pod")).unwrap();
        assert!(!kills.have_grown());
    }

    #[test]
    fn without_a_group_of_version_2_nothing_is_known() {
        let root = tempfile::tempdir().unwrap();
        let membership = root.path().join("cgroup");
        assert!(OomKills::read(&membership, root.path()).is_none());
        fs::write(&membership, "4:memory:/engine\n").unwrap();
        assert!(OomKills::read(&membership, root.path()).is_none());
        fs::write(&membership, "0::/engine\n").unwrap();
        assert!(OomKills::read(&membership, root.path()).is_none());
    }
}
