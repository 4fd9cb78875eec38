//! Folders for temporary files that a killed process leaves: who makes one holds a lock of it, and the next process removes those that
//! nobody holds.

use std::fs::{self, DirEntry, File};
use std::path::Path;
use std::time::Duration;

/// How old a folder without a lock is that nobody is about to lock.
const LEFT_AFTER: Duration = Duration::from_secs(60);

/// A lock that says that somebody uses the folder, and ends with the process, however that ends. Where there are no locks, nobody
/// removes the folder for want of one.
#[must_use]
pub fn lock_folder(folder: &Path) -> Option<File> {
    let lock = File::open(folder).ok();
    lock.filter(|lock| lock.try_lock().is_ok())
}

/// Removes what in the folder for temporary files has a name that begins with `prefix`, where it is a folder that no process has
/// [locked](lock_folder) any more.
pub fn remove_left_folders(prefix: &str) {
    remove_left(&std::env::temp_dir(), prefix, LEFT_AFTER);
}

/// Removes the folders of `temporary` that nobody uses any more, where they are as old as `age`.
fn remove_left(temporary: &Path, prefix: &str, age: Duration) {
    for entry in fs::read_dir(temporary).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let is_ours = name.as_encoded_bytes().starts_with(prefix.as_bytes());
        if is_ours && is_left(&entry, age) {
            // What cannot be removed is another user's.
            fs::remove_dir_all(entry.path()).unwrap_or_default();
        }
    }
}

/// Whether it is a folder of that age that no process has locked.
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
