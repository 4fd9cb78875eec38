//! [`folders`]: finds the Linux control groups of this process and their limits. `load` reads the memory limits there,
//! `cores` the CPU limits.

use std::fs;
use std::path::{Path, PathBuf};

/// The folder of a control group in cgroup v1 or v2, which name their files differently.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Folder {
    /// Version 1: `memory.limit_in_bytes` and the like.
    First(PathBuf),
    /// Version 2: `memory.max` and the like.
    Second(PathBuf),
}

/// The folders of this process's groups and of all their ancestors that belong to a controller, such as `memory`. `root` is
/// `/`, except in tests. In a container the ancestors of its own group are often hidden; the visible tree then begins with
/// its own group.
pub(crate) fn folders(root: &Path, controller: &str) -> Vec<Folder> {
    let groups = fs::read_to_string(root.join("proc/self/cgroup")).unwrap_or_default();
    let groups = groups.lines().filter_map(|line| {
        let mut parts = line.splitn(3, ':');
        let (_, controllers, path) = (parts.next()?, parts.next()?, parts.next()?);
        Some((controllers, path.trim_start_matches('/')))
    });
    let base = root.join("sys/fs/cgroup");
    groups
        .flat_map(|(controllers, path)| {
            if controllers.is_empty() {
                with_ancestors(&base, path, Folder::Second)
            } else if controllers.split(',').any(|name| name == controller) {
                with_ancestors(&base.join(controller), path, Folder::First)
            } else {
                Vec::new()
            }
        })
        .collect()
}

fn with_ancestors(base: &Path, path: &str, version: fn(PathBuf) -> Folder) -> Vec<Folder> {
    let own = base.join(path);
    let folders = own
        .ancestors()
        .take_while(|folder| folder.starts_with(base));
    folders.map(|folder| version(folder.to_owned())).collect()
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// A root with these files.
    pub(crate) fn tree(files: &[(&str, &str)]) -> tempfile::TempDir {
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
        let root = tree(&[(
            "proc/self/cgroup",
            "3:cpu,cpuacct:/a\n2:memory:/b\n0::/c/d\n",
        )]);
        let at = |path: &str| root.path().join("sys/fs/cgroup").join(path);
        let first = ["cpu/a", "cpu"].map(|path| Folder::First(at(path)));
        let second = ["c/d", "c", ""].map(|path| Folder::Second(at(path)));
        let expected: Vec<Folder> = first.into_iter().chain(second).collect();
        assert_eq!(folders(root.path(), "cpu"), expected);
        assert_eq!(folders(Path::new("/nowhere"), "cpu"), []);
    }
}
