//! [`MappedFile`]: maps a file into memory. The only unsafe code of loading.

use std::fs::{self, File};
use std::io;
use std::ops::Deref;
use std::path::{Path, PathBuf};

use memmap2::Mmap;
#[cfg(unix)]
use memmap2::UncheckedAdvice;

use crate::error::LoadError;

/// A file, mapped into memory for reading.
#[derive(Debug)]
pub(crate) struct MappedFile {
    path: PathBuf,
    /// `None` for an empty file, which cannot be mapped.
    map: Option<Mmap>,
}

impl MappedFile {
    pub(crate) fn open(path: &Path) -> Result<Self, LoadError> {
        let read = |error| LoadError::read(path, error);
        // Opening a pipe would wait for a writer.
        if !fs::metadata(path).map_err(read)?.is_file() {
            return Err(read(io::Error::other("it is no regular file")));
        }
        let file = File::open(path).map_err(read)?;
        let map = if file.metadata().map_err(read)?.len() == 0 {
            None
        } else {
            Some(map(&file).map_err(read)?)
        };
        Ok(Self {
            path: path.to_owned(),
            map,
        })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Releases the memory of the pages that were read. A later read loads them from the file again.
    #[cfg_attr(unix, expect(unsafe_code, reason = "advice that takes pages away"))]
    pub(crate) fn release(&self) {
        #[cfg(unix)]
        if let Some(map) = &self.map {
            // SAFETY: the pages are the file's, and nothing here writes to them, so a reload reads the same bytes.
            let released = unsafe { map.unchecked_advise(UncheckedAdvice::DontNeed) };
            if let Err(error) = released {
                tracing::debug!(%error, path = %self.path.display(), "pages that were read stay in memory");
            }
        }
    }
}

#[expect(
    unsafe_code,
    reason = "weights of many gigabytes are read once, straight from the page cache"
)]
fn map(file: &File) -> io::Result<Mmap> {
    // SAFETY: the map is private to this process and only read. Another process that writes to the file during loading could
    // change checked bytes. All of them are numbers or are copied before they are used twice, so no value becomes invalid. A
    // process that truncates the file kills this one with SIGBUS, as for any program that maps model files; the guide warns
    // against it.
    unsafe { Mmap::map(file) }
}

impl Deref for MappedFile {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.map.as_deref().unwrap_or_default()
    }
}

#[cfg(test)]
#[cfg(target_os = "linux")]
mod tests {
    use super::*;

    /// KiB of the file's mapping that are in memory.
    fn resident(path: &Path) -> usize {
        let maps = fs::read_to_string("/proc/self/smaps").unwrap();
        let name = path.display().to_string();
        let mut lines = maps.lines().skip_while(|line| !line.ends_with(&name));
        let line = lines.find(|line| line.starts_with("Rss:")).unwrap();
        line.split_whitespace().nth(1).unwrap().parse().unwrap()
    }

    #[test]
    fn pages_that_were_read_are_given_back_and_come_again() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().canonicalize().unwrap().join("weights");
        let bytes: Vec<u8> = (0..1_000_000u32).map(|n| n.to_le_bytes()[0]).collect();
        fs::write(&path, &bytes).unwrap();
        let file = MappedFile::open(&path).unwrap();
        assert_eq!(*file, *bytes);
        assert!(resident(&path) > 900);
        file.release();
        assert_eq!(resident(&path), 0);
        assert_eq!(*file, *bytes);
    }

    #[test]
    fn what_is_no_regular_file_is_not_opened() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("weights");
        std::os::unix::fs::symlink("/dev/null", &path).unwrap();
        let error = MappedFile::open(&path).unwrap_err();
        assert!(matches!(error, LoadError::Read { .. }), "{error}");
    }
}
