//! The memory of this machine, and the control groups that limit a process on it. Linux only: elsewhere nothing is known.
//!
//! Engines ask for what they may allocate and how many threads they start, the frontend for its memory budget. It is not about
//! GPUs. Each call reads the kernel's files, which lie below `root`: `/`, except in tests.

use std::fs;
use std::path::{Path, PathBuf};

/// The folder of a control group of version 1 or 2, which name their files differently.
#[derive(Debug, PartialEq, Eq)]
pub enum ControlGroup {
    /// Version 1: `memory.limit_in_bytes` and the like.
    First(PathBuf),
    /// Version 2: `memory.max` and the like.
    Second(PathBuf),
}

impl ControlGroup {
    /// The groups of a process (its id, or `self`) that belong to a controller, such as `memory`. Each is followed by its
    /// ancestors. In a container the ancestors of its own group are often hidden; the visible tree then begins with its own
    /// group.
    #[must_use]
    pub fn of_process(root: &Path, process: &str, controller: &str) -> Vec<Self> {
        let file = root.join("proc").join(process).join("cgroup");
        let groups = fs::read_to_string(file).unwrap_or_default();
        let groups = groups.lines().filter_map(|line| {
            let mut parts = line.splitn(3, ':');
            let (_, controllers, path) = (parts.next()?, parts.next()?, parts.next()?);
            Some((controllers, path.trim_start_matches('/')))
        });
        let base = root.join("sys/fs/cgroup");
        groups
            .flat_map(|(controllers, path)| {
                if controllers.is_empty() {
                    with_ancestors(&base, path, Self::Second)
                } else if controllers.split(',').any(|name| name == controller) {
                    with_ancestors(&base.join(controller), path, Self::First)
                } else {
                    Vec::new()
                }
            })
            .collect()
    }

    /// Its own memory limit in bytes, if it has one.
    #[must_use]
    pub fn memory_limit(&self) -> Option<u64> {
        let file = match self {
            Self::First(folder) => folder.join("memory.limit_in_bytes"),
            Self::Second(folder) => folder.join("memory.max"),
        };
        fs::read_to_string(file).ok()?.trim().parse().ok()
    }
}

fn with_ancestors(
    base: &Path,
    path: &str,
    version: fn(PathBuf) -> ControlGroup,
) -> Vec<ControlGroup> {
    let own = base.join(path);
    let folders = own
        .ancestors()
        .take_while(|folder| folder.starts_with(base));
    folders.map(|folder| version(folder.to_owned())).collect()
}

/// The bytes that a line of `/proc/meminfo` tells, such as `MemAvailable`.
#[must_use]
pub fn meminfo(root: &Path, name: &str) -> Option<u64> {
    let text = fs::read_to_string(root.join("proc/meminfo")).ok()?;
    let line = text
        .lines()
        .find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
    let kibibytes: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kibibytes.checked_mul(1024)
}

/// The most memory that this process may use, in bytes: the machine's, or the lowest limit of its control groups.
#[must_use]
pub fn usable_memory(root: &Path) -> Option<u64> {
    let groups = ControlGroup::of_process(root, "self", "memory");
    let limits = groups.iter().filter_map(ControlGroup::memory_limit);
    limits.chain(meminfo(root, "MemTotal")).min()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A root with these files.
    fn tree(files: &[(&str, &str)]) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        for (path, content) in files {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, content).unwrap();
        }
        root
    }

    #[test]
    fn groups_have_folders_of_their_own_and_of_those_above() {
        let groups = "3:cpu,cpuacct:/a\n2:memory:/b\n0::/c/d\n";
        let root = tree(&[("proc/self/cgroup", groups), ("proc/7/cgroup", "0::/e\n")]);
        let at = |path: &str| root.path().join("sys/fs/cgroup").join(path);
        let first = ["cpu/a", "cpu"].map(|path| ControlGroup::First(at(path)));
        let second = |path| ControlGroup::Second(at(path));
        let own: Vec<_> = first
            .into_iter()
            .chain(["c/d", "c", ""].map(second))
            .collect();
        let groups = |process| ControlGroup::of_process(root.path(), process, "cpu");
        assert_eq!(groups("self"), own);
        assert_eq!(groups("7"), ["e", ""].map(second));
        assert_eq!(groups("8"), []);
    }

    #[test]
    fn the_least_of_machine_and_groups_counts() {
        let machine = ("proc/meminfo", "MemFree: 1 kB\nMemTotal:     4096 kB\n");
        let second = ("proc/self/cgroup", "0::/a/b\n");
        for (files, expected) in [
            (&[machine][..], Some(4 << 20)),
            (&[], None),
            (
                &[machine, second, ("sys/fs/cgroup/a/b/memory.max", "max\n")],
                Some(4 << 20),
            ),
            (
                &[machine, second, ("sys/fs/cgroup/a/memory.max", "77\n")],
                Some(77),
            ),
            (&[second, ("sys/fs/cgroup/memory.max", "78\n")], Some(78)),
            (
                &[
                    machine,
                    ("proc/self/cgroup", "2:cpu:/x\n1:memory:/y\n"),
                    ("sys/fs/cgroup/memory/y/memory.limit_in_bytes", "79\n"),
                ],
                Some(79),
            ),
        ] {
            let root = tree(files);
            assert_eq!(usable_memory(root.path()), expected, "{files:?}");
        }
    }
}
