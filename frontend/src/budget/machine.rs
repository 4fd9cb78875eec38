//! How much memory this process may use: the machine's, or its control group's limit if that is lower. Linux only. The
//! config's default derives from it.

use std::fs;
use std::path::Path;
use std::sync::OnceLock;

/// Used if the amount is unknown.
const UNKNOWN_BYTES: usize = 4 << 30;

/// A quarter of the memory that this process may use, looked up once.
pub(crate) fn quarter_of_machine() -> usize {
    static BYTES: OnceLock<usize> = OnceLock::new();
    *BYTES.get_or_init(|| memory_below(Path::new("/")).unwrap_or(UNKNOWN_BYTES) / 4)
}

/// The memory of the machine whose files lie below `root`, or the limit of this process's control group.
fn memory_below(root: &Path) -> Option<usize> {
    let machine = read(&root.join("proc/meminfo")).and_then(|text| total(&text));
    let groups = read(&root.join("proc/self/cgroup")).unwrap_or_default();
    let group = groups.lines().filter_map(|line| of_group(root, line)).min();
    machine.into_iter().chain(group).min()
}

fn read(path: &Path) -> Option<String> {
    fs::read_to_string(path).ok()
}

fn total(meminfo: &str) -> Option<usize> {
    let mut lines = meminfo.lines();
    let line = lines.find_map(|line| line.strip_prefix("MemTotal:"))?;
    let kibibytes: usize = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kibibytes.checked_mul(1024)
}

/// The lowest limit of the group in a line of `/proc/self/cgroup` and of its ancestors.
fn of_group(root: &Path, line: &str) -> Option<usize> {
    let base = root.join("sys/fs/cgroup");
    let mut parts = line.splitn(3, ':');
    let (_, controllers, path) = (parts.next()?, parts.next()?, parts.next()?);
    let (base, name) = if controllers.is_empty() {
        (base, "memory.max")
    } else if controllers.split(',').any(|name| name == "memory") {
        (base.join("memory"), "memory.limit_in_bytes")
    } else {
        return None;
    };
    let own = base.join(path.trim_start_matches('/'));
    let folders = own
        .ancestors()
        .take_while(|folder| folder.starts_with(&base));
    let limits = folders.filter_map(|folder| read(&folder.join(name))?.trim().parse().ok());
    limits.min()
}

#[cfg(test)]
mod tests {
    use super::*;

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
            assert_eq!(memory_below(root.path()), expected, "{files:?}");
        }
        assert!(quarter_of_machine() > 0);
    }
}
