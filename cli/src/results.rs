//! Files that a command writes after long work, such as those of `--plot` and `--json`. Checks them before the work. The results
//! are printed first, so that a full disk loses only the file.

use std::fs::File;
use std::io;
use std::path::Path;

use genset_backend_common::EngineError;

/// Checks before the work that the file of the flag `flag` can be written. Changes nothing.
///
/// # Errors
/// `InvalidArgument`, naming the flag and the file.
pub(crate) fn check(flag: &str, path: &Path) -> Result<(), EngineError> {
    let tried = match std::fs::symlink_metadata(path) {
        Ok(there) if there.is_file() || there.is_dir() => {
            File::options().append(true).open(path).map(drop)
        }
        // A pipe's reader would take this for its end, and a link's target need not exist yet.
        Ok(_) => Ok(()),
        Err(_) => File::create_new(path).and_then(|_created| std::fs::remove_file(path)),
    };
    tried.map_err(|error| unwritable(flag, path, &error))
}

/// Writes the file of the flag `flag`.
///
/// # Errors
/// As [`check`].
pub(crate) fn write(flag: &str, path: &Path, text: &str) -> Result<(), EngineError> {
    std::fs::write(path, text).map_err(|error| unwritable(flag, path, &error))
}

fn unwritable(flag: &str, path: &Path, error: &io::Error) -> EngineError {
    let problem = format!("{} cannot be written: {error}", path.display());
    EngineError::invalid_argument(flag, problem)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_cannot_be_written_is_refused_and_what_can_is_left_as_it_is() {
        let folder = tempfile::tempdir().unwrap();
        for path in [folder.path().join("none/file"), folder.path().to_owned()] {
            let error = check("--plot", &path).unwrap_err().to_string();
            let expected = format!("--plot: {} cannot be written: ", path.display());
            assert!(error.starts_with(&expected), "{error}");
        }
        let path = folder.path().join("file");
        check("--plot", &path).unwrap();
        assert!(!path.exists());
        write("--plot", &path, "text").unwrap();
        check("--plot", &path).unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "text");
    }
}
