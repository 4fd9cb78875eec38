//! [`MappedFile`]: a file's bytes without reading it. The only unsafe code of loading.

use std::fs::File;
use std::ops::Deref;
use std::path::{Path, PathBuf};

use memmap2::Mmap;

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
}

#[expect(
    unsafe_code,
    reason = "weights of many gigabytes are read once, straight from the page cache"
)]
fn map(file: &File) -> std::io::Result<Mmap> {
    // SAFETY: the map is private to this process and only read. Another process that writes to the file while it is
    // loaded could change bytes that were checked; all of them are numbers or are copied out before they are looked at
    // twice, so no value becomes invalid. One that cuts the file short ends this process with SIGBUS, as it would any
    // program that maps model files; the guide says not to.
    unsafe { Mmap::map(file) }
}

impl Deref for MappedFile {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.map.as_deref().unwrap_or_default()
    }
}
