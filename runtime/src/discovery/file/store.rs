//! The directory of a store: its marker, access checks, listing, and atomic writes.
//!
//! The marker, a small file with a random id, distinguishes a store from a directory that merely has its name, because the mount
//! is gone or the directory was removed and recreated. A directory without a marker is an outage, not an empty store.

use std::fmt;
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use bytes::Bytes;
use genset_backend_common::prometheus::metrics::gauge::Gauge;
use genset_backend_common::{EngineError, ErrorKind};
use rustix::fs::OFlags;

use super::config::{DirectoryAccess, FileDiscoveryConfig};
use super::format::{self, FormatError};
use super::liveness::FileMark;

/// Name of the marker.
const MARKER: &str = "genset-discovery";

/// The marker's first word: the version of everything in the directory.
const MARKER_VERSION: &str = "1";

/// Larger than any marker.
const MARKER_BYTES: u64 = 256;

const LEASE_SUFFIX: &str = ".lease";

/// Suffix of files being written.
const TEMPORARY_SUFFIX: &str = ".tmp";

/// The id of a lease: random, so that no two processes ever use the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct LeaseId(u64);

/// The id of a store: the content of its marker.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct StoreId(String);

/// A failed file operation and its path.
#[derive(Debug, thiserror::Error)]
pub(super) enum StoreError {
    #[error("discovery cannot {action} {}: {source}", path.display())]
    Io {
        action: &'static str,
        path: PathBuf,
        source: io::Error,
    },
    #[error("{} holds no discovery store; it may not be mounted", path.display())]
    NoMarker { path: PathBuf },
    #[error("{} holds a discovery store of another version, {version:?}; this program knows {MARKER_VERSION:?}", path.display())]
    OtherVersion { path: PathBuf, version: String },
    #[error("the discovery directory {} {problem}", path.display())]
    NotPrivate { path: PathBuf, problem: String },
    #[error("the discovery lease {} cannot be read: {source}", path.display())]
    Format { path: PathBuf, source: FormatError },
    #[error("the discovery lease {} is {bytes} bytes long, more than max_lease_bytes of {most}", path.display())]
    TooLong {
        path: PathBuf,
        bytes: u64,
        most: u64,
    },
}

impl StoreError {
    pub(super) fn is_missing(&self) -> bool {
        matches!(self, Self::Io { source, .. } if source.kind() == io::ErrorKind::NotFound)
    }
}

impl From<StoreError> for EngineError {
    fn from(error: StoreError) -> Self {
        match &error {
            StoreError::OtherVersion { .. } | StoreError::NotPrivate { .. } => {
                EngineError::new(ErrorKind::InvalidArgument, error.to_string()).with_at("path")
            }
            StoreError::Io { .. }
            | StoreError::NoMarker { .. }
            | StoreError::Format { .. }
            | StoreError::TooLong { .. } => {
                EngineError::new(ErrorKind::Unavailable, error.to_string()).with_source(error)
            }
        }
    }
}

/// The result of one listing of the directory.
#[derive(Debug)]
pub(super) struct Listing {
    pub(super) id: StoreId,
    pub(super) leases: Vec<(LeaseId, FileMark)>,
    pub(super) temporaries: Vec<(PathBuf, FileMark)>,
}

/// The directory.
#[derive(Debug)]
pub(super) struct Store {
    path: PathBuf,
    max_lease_bytes: u64,
    access: DirectoryAccess,
    /// The scanner and the leases that cannot use the directory.
    outages: Gauge,
}

impl Store {
    /// Creates the directory and its marker if they are missing, and checks their owners.
    pub(super) fn open(path: PathBuf, config: &FileDiscoveryConfig) -> Result<Self, StoreError> {
        let store = Self {
            path,
            max_lease_bytes: config.max_lease_bytes,
            access: config.access,
            outages: Gauge::default(),
        };
        store.make_directory(true)?;
        store.make_marker()?;
        Ok(store)
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    pub(super) fn outages(&self) -> &Gauge {
        &self.outages
    }

    pub(super) fn max_lease_bytes(&self) -> u64 {
        self.max_lease_bytes
    }

    /// Recreates the store after its directory was removed. Requires the parent directory: without it, the problem is larger.
    pub(super) fn restore(&self) -> Result<StoreId, StoreError> {
        self.make_directory(false)?;
        self.make_marker()
    }

    fn make_directory(&self, with_parents: bool) -> Result<(), StoreError> {
        if !self.path.is_dir() {
            let made = DirBuilder::new()
                .mode(0o700)
                .recursive(with_parents)
                .create(&self.path);
            match made {
                // Another process was faster.
                Err(error)
                    if error.kind() == io::ErrorKind::AlreadyExists && self.path.is_dir() => {}
                made => made.map_err(self.failed("make the directory", &self.path))?,
            }
        }
        self.check_access()
    }

    /// Checks that no untrusted user can put addresses into the store, neither through the directory nor through a link to it.
    fn check_access(&self) -> Result<(), StoreError> {
        let user = rustix::process::geteuid().as_raw();
        let refused = |problem: String| StoreError::NotPrivate {
            path: self.path.clone(),
            problem,
        };
        let look = self.failed("look at", &self.path);
        let link = fs::symlink_metadata(&self.path).map_err(&look)?;
        let directory = fs::metadata(&self.path).map_err(&look)?;
        for owner in [link.uid(), directory.uid()] {
            let is_roots = self.access == DirectoryAccess::Shared && owner == 0;
            if owner != user && !is_roots {
                return Err(refused(format!(
                    "belongs to user {owner}, not to {user} who runs this program; choose another directory"
                )));
            }
        }
        let mode = directory.mode() & 0o7777;
        if mode & 0o022 == 0 {
            return Ok(());
        }
        match self.access {
            DirectoryAccess::Private => Err(refused(format!(
                "has mode {mode:04o}, so that other users can write to it; run `chmod go-w` on it, or give --discovery-shared if \
                 they are trusted to name workers"
            ))),
            DirectoryAccess::Shared if mode & 0o1000 == 0 => Err(refused(format!(
                "has mode {mode:04o}, so that other users can replace what this one writes; run `chmod +t` on it"
            ))),
            DirectoryAccess::Shared => Ok(()),
        }
    }

    /// The store's id; writes a marker with a new one if there is none. If several processes do so, the last one's stays:
    /// to the others the store looks replaced, which is harmless.
    fn make_marker(&self) -> Result<StoreId, StoreError> {
        match self.id() {
            Err(StoreError::NoMarker { .. }) => {}
            known => return known,
        }
        let marker = format!("{MARKER_VERSION} {:016x}\n", rand::random::<u64>());
        self.replace(&self.path.join(MARKER), marker.as_bytes())?;
        self.id()
    }

    /// The id of the current store.
    pub(super) fn id(&self) -> Result<StoreId, StoreError> {
        let path = self.path.join(MARKER);
        let mut marker = String::new();
        let read = open(&path).and_then(|file| file.take(MARKER_BYTES).read_to_string(&mut marker));
        match read {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Err(StoreError::NoMarker {
                path: self.path.clone(),
            }),
            Err(error) => Err(self.failed("read", &path)(error)),
            Ok(_) => match marker.trim_end().split_once(' ') {
                Some((MARKER_VERSION, id)) => Ok(StoreId(id.to_owned())),
                Some((version, _)) => Err(StoreError::OtherVersion {
                    path: self.path.clone(),
                    version: version.to_owned(),
                }),
                // A crash of the machine may leave such a file.
                None => Err(StoreError::NoMarker {
                    path: self.path.clone(),
                }),
            },
        }
    }

    /// Lists the directory. Skips files that are neither leases nor being written.
    pub(super) fn list(&self) -> Result<Listing, StoreError> {
        let look = self.failed("look into", &self.path);
        let (mut leases, mut temporaries) = (Vec::new(), Vec::new());
        for item in fs::read_dir(&self.path).map_err(&look)? {
            let item = item.map_err(&look)?;
            let name = item.file_name();
            let Some(name) = name.to_str() else { continue };
            let lease = LeaseId::of_file(name);
            if lease.is_none() && !name.ends_with(TEMPORARY_SUFFIX) {
                continue;
            }
            // It was removed after the listing.
            let Ok(metadata) = item.metadata() else {
                continue;
            };
            if !metadata.is_file() {
                continue;
            }
            let mark = mark(&metadata).map_err(&look)?;
            match lease {
                Some(lease) => leases.push((lease, mark)),
                None => temporaries.push((item.path(), mark)),
            }
        }
        // Read after the listing: if the marker exists now, the listing was of the store.
        let id = self.id()?;
        Ok(Listing {
            id,
            leases,
            temporaries,
        })
    }

    pub(super) fn lease_path(&self, lease: LeaseId) -> PathBuf {
        self.path.join(format!("{lease}{LEASE_SUFFIX}"))
    }

    /// A lease file's mark; `None` if there is no file.
    pub(super) fn look_at(&self, lease: LeaseId) -> Result<Option<FileMark>, StoreError> {
        let path = self.lease_path(lease);
        match fs::symlink_metadata(&path).and_then(|metadata| mark(&metadata)) {
            Ok(mark) => Ok(Some(mark)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(self.failed("look at", &path)(error)),
        }
    }

    /// Reads a lease file, unless its version is still `known`.
    pub(super) fn read(
        &self,
        lease: LeaseId,
        known: Option<u64>,
    ) -> Result<Option<Bytes>, StoreError> {
        let path = self.lease_path(lease);
        let fail = self.failed("read", &path);
        let file = open(&path).map_err(&fail)?;
        let mut bytes = Vec::with_capacity(format::HEAD_BYTES);
        let head = format::HEAD_BYTES as u64;
        (&file).take(head).read_to_end(&mut bytes).map_err(&fail)?;
        if known.is_some() && format::version(&bytes).ok() == known {
            return Ok(None);
        }
        let length = file.metadata().map_err(&fail)?.len();
        // The limit covers keys and values only, so allow extra for the list of entries.
        let most = self
            .max_lease_bytes
            .saturating_mul(2)
            .saturating_add(1 << 20);
        if length > most {
            let most = self.max_lease_bytes;
            return Err(StoreError::TooLong {
                path,
                bytes: length,
                most,
            });
        }
        file.take(most).read_to_end(&mut bytes).map_err(&fail)?;
        Ok(Some(bytes.into()))
    }

    /// Replaces a lease file atomically and returns it.
    pub(super) fn write(&self, lease: LeaseId, bytes: &[u8]) -> Result<File, StoreError> {
        self.replace(&self.lease_path(lease), bytes)
    }

    pub(super) fn remove(&self, path: &Path) {
        if let Err(error) = fs::remove_file(path)
            && error.kind() != io::ErrorKind::NotFound
        {
            tracing::debug!(path = %path.display(), %error, "a file of discovery cannot be removed; it times out");
        }
    }

    /// Writes a new file and renames it. Its name is random and never that of an existing file, so that a link planted
    /// there cannot redirect the write to another of our files. Nothing is synced to disk: the store's contents are useless
    /// after a crash of the machine.
    fn replace(&self, path: &Path, bytes: &[u8]) -> Result<File, StoreError> {
        let name = format!("{:016x}{TEMPORARY_SUFFIX}", rand::random::<u64>());
        let temporary = &self.path.join(name);
        let mut file = OpenOptions::new()
            .write(true)
            .create_new(true)
            .open(temporary)
            .map_err(self.failed("make", temporary))?;
        let written = file
            .write_all(bytes)
            .map_err(self.failed("write", temporary))
            .and_then(|()| fs::rename(temporary, path).map_err(self.failed("replace", path)));
        if written.is_err() {
            self.remove(temporary);
        }
        written.map(|()| file)
    }

    fn failed(
        &self,
        action: &'static str,
        path: &Path,
    ) -> impl Fn(io::Error) -> StoreError + use<> {
        let path = path.to_owned();
        move |source| StoreError::Io {
            action,
            path: path.clone(),
            source,
        }
    }
}

/// Opens a file for reading. Refuses links to other files, and never waits on a pipe.
fn open(path: &Path) -> io::Result<File> {
    let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK;
    let file = OpenOptions::new()
        .read(true)
        .custom_flags(flags.bits().cast_signed())
        .open(path)?;
    if file.metadata()?.is_file() {
        return Ok(file);
    }
    let problem = "it is no regular file";
    Err(io::Error::new(io::ErrorKind::InvalidData, problem))
}

impl LeaseId {
    pub(super) fn random() -> Self {
        Self(rand::random())
    }

    fn of_file(name: &str) -> Option<Self> {
        let digits = name.strip_suffix(LEASE_SUFFIX)?;
        let id = Self(u64::from_str_radix(digits, 16).ok()?);
        // One spelling per lease, otherwise two names would mean the same lease.
        (id.to_string() == digits).then_some(id)
    }
}

impl fmt::Display for LeaseId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

/// The mark of a file.
pub(super) fn mark(metadata: &fs::Metadata) -> io::Result<FileMark> {
    Ok(FileMark {
        modified: metadata.modified()?,
        inode: metadata.ino(),
        length: metadata.len(),
    })
}
