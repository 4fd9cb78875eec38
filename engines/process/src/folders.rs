//! Temporary folders that killed processes leave behind. The process that creates a folder locks it; a later process removes the
//! folders that are not locked.

use std::fs::{self, DirEntry, File};
use std::path::Path;
use std::time::Duration;

/// The minimum age of an unlocked folder to remove: a younger one may be about to be locked.
const LEFT_AFTER: Duration = Duration::from_secs(60);

/// Locks a folder that is in use. The lock ends with the process, however that ends. Returns `None` if the folder cannot be
/// locked; on a file system without locks, no process removes the folder.
#[must_use]
pub fn lock_folder(folder: &Path) -> Option<File> {
    let lock = File::open(folder).ok();
    lock.filter(|lock| lock.try_lock().is_ok())
}

/// Removes all folders in the system's temporary folder whose name begins with `prefix` and which no process has
/// [locked](lock_folder).
pub fn remove_left_folders(prefix: &str) {
    remove_left(&std::env::temp_dir(), prefix, LEFT_AFTER);
}

/// Removes the unlocked folders in `temporary` that are at least as old as `age`.
fn remove_left(temporary: &Path, prefix: &str, age: Duration) {
    for entry in fs::read_dir(temporary).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let is_ours = name.as_encoded_bytes().starts_with(prefix.as_bytes());
        if is_ours && is_left(&entry, age) {
            // A folder that cannot be removed belongs to another user.
            fs::remove_dir_all(entry.path()).unwrap_or_default();
        }
    }
}

/// Whether the entry is a folder at least as old as `age` that no process has locked.
fn is_left(entry: &DirEntry, age: Duration) -> bool {
    let is_old = entry.metadata().is_ok_and(|found| {
        let modified = found
            .modified()
            .and_then(|at| at.elapsed().map_err(std::io::Error::other));
        found.is_dir() && modified.is_ok_and(|since| since >= age)
    });
    is_old && lock_folder(&entry.path()).is_some()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folders_of_processes_that_were_killed_are_removed() {
        let temporary = tempfile::tempdir().unwrap();
        let [left, used, other] =
            ["genset-some-1", "genset-some-2", "other"].map(|name| temporary.path().join(name));
        for folder in [&left, &used, &other] {
            fs::create_dir(folder).unwrap();
            fs::write(folder.join("file"), "").unwrap();
        }
        let _lock = lock_folder(&used).unwrap();
        remove_left(temporary.path(), "genset-some-", LEFT_AFTER);
        assert!(left.exists(), "it may be about to be locked");
        remove_left(temporary.path(), "genset-some-", Duration::ZERO);
        assert!(!left.exists() && used.exists() && other.exists());
    }
}
