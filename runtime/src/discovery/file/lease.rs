//! A lease on its holder's side: one file, written as a whole and kept fresh.

use std::fs::File;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime};

use async_trait::async_trait;
use genset_backend_common::{EngineError, ErrorKind, error::At};
use parking_lot::Mutex;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::blocking;
use super::format::{self, Entries, Held};
use super::keeper::KeeperOwner;
use super::store::{LeaseId, Store, StoreError, StoreId, mark};
use crate::discovery::{Entry, Lease, Outage};

/// A file missing at this many consecutive beats is gone. At one beat, its directory may be in the middle of removal.
const BEATS_UNTIL_LOST: u32 = 2;

/// More than the granularity of any file system's times.
const COARSE_TIME: Duration = Duration::from_secs(2);

/// Whether to keep the lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Beat {
    Again,
    Over,
}

/// A lease's file and its entries, shared by the holder and the thread that keeps it alive.
#[derive(Debug)]
pub(super) struct LeaseFile {
    id: LeaseId,
    store: Arc<Store>,
    written: Mutex<Written>,
    /// When its [silence](Self::take_silence) began.
    beaten: Mutex<Instant>,
    is_ended: AtomicBool,
    lost: CancellationToken,
}

/// The contents of the file. The entries here are authoritative: a file that differs is written again.
#[derive(Debug)]
struct Written {
    store_id: StoreId,
    version: u64,
    entries: Entries,
    file: File,
    missed_beats: u32,
    /// While the file cannot be renewed.
    outage: Option<Outage>,
}

/// The state in which the file was found.
enum Found {
    AsLeft,
    /// The file or the store is a different one, as after a mount or a restart of a file server.
    Changed(StoreId),
    Missing,
}

impl LeaseFile {
    /// Creates the file, without entries.
    pub(super) fn create(store: Arc<Store>) -> Result<Self, EngineError> {
        let id = LeaseId::random();
        let store_id = store.id()?;
        let entries = Entries::new();
        let file = store.write(id, &encode(1, &entries)?)?;
        let written = Written {
            store_id,
            version: 1,
            entries,
            file,
            missed_beats: 0,
            outage: None,
        };
        Ok(Self {
            id,
            store,
            written: Mutex::new(written),
            beaten: Mutex::new(Instant::now()),
            is_ended: AtomicBool::new(false),
            lost: CancellationToken::new(),
        })
    }

    /// Shows that the holder is alive.
    pub(super) fn beat(&self) -> Beat {
        let mut written = self.written.lock();
        if self.is_ended.load(Ordering::Acquire) {
            self.store.remove(&self.store.lease_path(self.id));
            return Beat::Over;
        }
        match self.try_beat(&mut written) {
            Ok(beat) => {
                if written.outage.take().is_some() {
                    tracing::info!(lease = %self.id, "the discovery directory is back; the lease continues");
                }
                beat
            }
            Err(error) => {
                if written.outage.is_none() {
                    tracing::warn!(lease = %self.id, %error, "the lease on discovery cannot be renewed; trying again");
                    written.outage = Some(Outage::of(self.store.outages()));
                }
                Beat::Again
            }
        }
    }

    /// Returns how long nobody has tried to keep the lease fresh, and restarts the time.
    pub(super) fn take_silence(&self) -> Duration {
        let now = Instant::now();
        now.duration_since(std::mem::replace(&mut *self.beaten.lock(), now))
    }

    fn try_beat(&self, written: &mut Written) -> Result<Beat, EngineError> {
        match self.find(written) {
            Ok(Found::AsLeft) => {
                written.missed_beats = 0;
                self.touch(&written.file)?;
            }
            Ok(Found::Changed(store_id)) => self.write_again(written, store_id)?,
            Ok(Found::Missing) => {
                written.missed_beats += 1;
                if written.missed_beats >= BEATS_UNTIL_LOST {
                    tracing::warn!(lease = %self.id, "the lease on discovery is lost: its file was removed");
                    self.lost.cancel();
                    return Ok(Beat::Over);
                }
            }
            Err(StoreError::NoMarker { .. }) => {
                let store_id = self.store.restore()?;
                self.write_again(written, store_id)?;
            }
            Err(error) => return Err(error.into()),
        }
        Ok(Beat::Again)
    }

    fn find(&self, written: &Written) -> Result<Found, StoreError> {
        let found = self.store.look_at(self.id)?;
        // Read after the file: if the marker exists now, the lookup was in the store.
        let store_id = self.store.id()?;
        let ours = written.file.metadata().and_then(|metadata| mark(&metadata));
        Ok(match (found, ours) {
            (Some(found), Ok(ours))
                if found.inode == ours.inode && store_id == written.store_id =>
            {
                Found::AsLeft
            }
            (None, _) if store_id == written.store_id => Found::Missing,
            _ => Found::Changed(store_id),
        })
    }

    fn write_again(&self, written: &mut Written, store_id: StoreId) -> Result<(), EngineError> {
        let bytes = encode(written.version, &written.entries)?;
        written.file = self.store.write(self.id, &bytes)?;
        written.store_id = store_id;
        written.missed_beats = 0;
        Ok(())
    }

    /// Sets the file's time to now, or two seconds later if that changes nothing. Needs no disk space.
    fn touch(&self, file: &File) -> Result<(), EngineError> {
        let touched = (|| {
            let before = file.metadata()?.modified()?;
            file.set_modified(SystemTime::now())?;
            if file.metadata()?.modified()? == before {
                file.set_modified(before + COARSE_TIME)?;
            }
            Ok::<_, io::Error>(())
        })();
        touched.map_err(|error| {
            let path = self.store.lease_path(self.id);
            let problem = format!("discovery cannot touch {}: {error}", path.display());
            EngineError::new(ErrorKind::Unavailable, problem).with_source(error)
        })
    }

    fn put(&self, entry: Entry, stamp: u64) -> Result<(), EngineError> {
        let mut written = self.written.lock();
        let mut entries = written.entries.clone();
        let last = entries.get(&entry.key).map_or(0, |held| held.stamp);
        let stamp = stamp.max(last.saturating_add(1));
        let value = entry.value;
        entries.insert(entry.key, Held { value, stamp });
        self.check_length(&entries)?;
        self.replace(&mut written, entries)
    }

    fn remove(&self, key: &str) -> Result<(), EngineError> {
        let mut written = self.written.lock();
        let mut entries = written.entries.clone();
        match entries.remove(key) {
            Some(_) => self.replace(&mut written, entries),
            None => Ok(()),
        }
    }

    /// Writes new entries; on failure, the old ones stay.
    fn replace(&self, written: &mut Written, entries: Entries) -> Result<(), EngineError> {
        if self.lost.is_cancelled() || self.is_ended.load(Ordering::Acquire) {
            return Err(self.gone());
        }
        match self.find(written)? {
            Found::AsLeft => {}
            Found::Changed(store_id) => written.store_id = store_id,
            Found::Missing => return Err(self.gone()),
        }
        let version = written.version + 1;
        written.file = self.store.write(self.id, &encode(version, &entries)?)?;
        written.version = version;
        written.entries = entries;
        written.missed_beats = 0;
        Ok(())
    }

    fn gone(&self) -> EngineError {
        let path = self.store.lease_path(self.id);
        let problem = format!(
            "the lease on discovery is lost, its file {} is gone; take a new one",
            path.display()
        );
        EngineError::new(ErrorKind::Unavailable, problem)
    }

    fn check_length(&self, entries: &Entries) -> Result<(), EngineError> {
        let lengths = entries
            .iter()
            .map(|(key, held)| key.len() + held.value.len());
        let length = lengths.sum::<usize>() as u64;
        let most = self.store.max_lease_bytes();
        if length > most {
            let problem =
                format!("the lease's entries would take {length} bytes; max_lease_bytes is {most}");
            return Err(EngineError::invalid_argument(At::other("value"), problem));
        }
        Ok(())
    }

    /// Releases the lease. Unlinks the file here rather than on the thread: an exiting process may leave the thread no time.
    /// If another operation has the file, the thread unlinks it.
    fn end(&self) {
        self.is_ended.store(true, Ordering::Release);
        if let Some(_written) = self.written.try_lock() {
            self.store.remove(&self.store.lease_path(self.id));
        }
    }

    pub(super) fn is_ended(&self) -> bool {
        self.is_ended.load(Ordering::Acquire)
    }
}

fn encode(version: u64, entries: &Entries) -> Result<Vec<u8>, EngineError> {
    format::encode(version, entries).map_err(|error| {
        EngineError::internal("a lease's entries cannot be listed as JSON").with_source(error)
    })
}

/// The holder's handle.
#[derive(Debug)]
pub(super) struct FileLease {
    file: Arc<LeaseFile>,
    /// Held by the current write, even after its caller is gone, so that writes never overtake each other.
    turn: Arc<tokio::sync::Mutex<()>>,
    keeper: Arc<KeeperOwner>,
}

impl FileLease {
    pub(super) fn new(file: Arc<LeaseFile>, keeper: Arc<KeeperOwner>) -> Self {
        Self {
            file,
            turn: Arc::default(),
            keeper,
        }
    }

    async fn in_turn(
        &self,
        work: impl FnOnce(&LeaseFile, &KeeperOwner) -> Result<(), EngineError> + Send + 'static,
    ) -> Result<(), EngineError> {
        let turn = Arc::clone(&self.turn).lock_owned().await;
        let (file, keeper) = (Arc::clone(&self.file), Arc::clone(&self.keeper));
        blocking(move || {
            let _turn = turn;
            work(&file, &keeper)?;
            keeper.poke();
            Ok(())
        })
        .await
    }
}

#[async_trait]
impl Lease for FileLease {
    async fn put(&self, entry: Entry) -> Result<(), EngineError> {
        self.in_turn(|file, keeper| {
            let stamp = keeper.stamp_after(&entry.key)?;
            file.put(entry, stamp)
        })
        .await
    }

    async fn remove(&self, key: &str) -> Result<(), EngineError> {
        let key = key.to_owned();
        self.in_turn(move |file, _| file.remove(&key)).await
    }

    async fn lost(&self) {
        self.file.lost.cancelled().await;
    }
}

impl Drop for FileLease {
    fn drop(&mut self) {
        self.file.end();
        self.keeper.poke();
    }
}
