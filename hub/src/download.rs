//! Downloads one file: locks it against other processes, resumes an interrupted download, and verifies its hash.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::time::Duration;

use sha1::Digest as _;
use tokio::io::AsyncWriteExt as _;

use crate::cache::Cache;
use crate::client::{Failure, Hash, HubClient, RemoteFile};
use crate::error::HubError;
use crate::progress::{Event, Progress, Wait};
use crate::reference::ModelRef;

/// Consecutive attempts that brought no byte.
const MAX_ATTEMPTS: u32 = 5;

/// The pause before another process's lock is checked again.
const LOCK_PAUSE: Duration = Duration::from_millis(200);

/// What the downloads of one model share.
pub(crate) struct Downloads<'a> {
    pub(crate) client: &'a HubClient,
    pub(crate) cache: &'a Cache,
    pub(crate) model: &'a ModelRef,
    pub(crate) commit: &'a str,
    pub(crate) progress: &'a dyn Progress,
    pub(crate) retry_pause: Duration,
}

/// The path of a partial download: where the hub's own tools keep theirs.
pub(crate) fn partial(blob: &Path) -> PathBuf {
    let mut path = blob.as_os_str().to_owned();
    path.push(".incomplete");
    path.into()
}

/// Whether a blob is complete. Its hash was verified when it was downloaded.
pub(crate) fn is_present(blob: &Path, file: &RemoteFile) -> bool {
    std::fs::metadata(blob).is_ok_and(|about| about.len() == file.bytes)
}

impl Downloads<'_> {
    /// Downloads a file into the cache and links it into the snapshot. `number` is its number among the planned files.
    ///
    /// # Cancel safety
    /// Received bytes are kept, and the next download resumes after them.
    pub(crate) async fn bring(&self, number: usize, file: &RemoteFile) -> Result<(), HubError> {
        let blob = self.cache.blob(&self.model.repo, file.hash.hex());
        if !is_present(&blob, file) {
            let _lock = self.lock(number, file).await?;
            // Another process may have downloaded it in the meantime.
            if !is_present(&blob, file) {
                self.fetch(number, file, &blob).await?;
            }
        }
        self.cache
            .link(&self.model.repo, self.commit, &file.path, file.hash.hex())?;
        self.progress.tell(Event::Done { file: number });
        Ok(())
    }

    /// Waits until no other process fetches the file. Dropping the returned file releases the lock.
    async fn lock(&self, number: usize, file: &RemoteFile) -> Result<File, HubError> {
        let path = self.cache.lock(&self.model.repo, file.hash.hex());
        let lock = self.cache.open_lock(&self.model.repo, file.hash.hex())?;
        loop {
            match lock.try_lock() {
                Ok(()) => return Ok(lock),
                Err(std::fs::TryLockError::WouldBlock) => {
                    let wait = Wait::OtherProcess;
                    self.progress.tell(Event::Waits { file: number, wait });
                    tokio::time::sleep(LOCK_PAUSE).await;
                }
                Err(std::fs::TryLockError::Error(error)) => {
                    return Err(HubError::disk(&path)(error));
                }
            }
        }
    }

    async fn fetch(&self, number: usize, file: &RemoteFile, blob: &Path) -> Result<(), HubError> {
        let part = partial(blob);
        let (mut attempts, mut was_wrong) = (0, false);
        loop {
            let before = length(&part);
            let failure = match self.attempt(number, file, &part).await {
                Ok(()) if has_hash(&part, file).await? => {
                    sync(&part).await?;
                    return std::fs::rename(&part, blob).map_err(HubError::disk(blob));
                }
                Ok(()) => {
                    std::fs::remove_file(&part).map_err(HubError::disk(&part))?;
                    let error = HubError::WrongHash {
                        file: file.path.clone(),
                    };
                    // An older partial download may have been wrong; bytes that came just now are the hub's.
                    if was_wrong || before == 0 {
                        return Err(error);
                    }
                    was_wrong = true;
                    Failure::Passing { error, pause: None }
                }
                Err(failure) => failure,
            };
            let (error, pause) = match failure {
                Failure::Lasting(error) => return Err(error),
                Failure::Passing { error, pause } => (error, pause),
            };
            attempts = if length(&part) > before {
                0
            } else {
                attempts + 1
            };
            if attempts >= MAX_ATTEMPTS {
                return Err(error);
            }
            let pause = pause.unwrap_or(self.retry_pause * 2_u32.pow(attempts));
            tracing::debug!(file = file.path, %error, ?pause, "a download is tried again");
            let wait = Wait::Retry(pause);
            self.progress.tell(Event::Waits { file: number, wait });
            tokio::time::sleep(pause).await;
        }
    }

    /// Requests the missing bytes, once.
    async fn attempt(&self, number: usize, file: &RemoteFile, part: &Path) -> Result<(), Failure> {
        let lasting = |error: io::Error| Failure::Lasting(HubError::disk(part)(error));
        let opened = File::options().create(true).append(true).open(part);
        let mut to = opened.map_err(lasting)?;
        let mut have = to.seek(SeekFrom::End(0)).map_err(lasting)?;
        if have > file.bytes {
            to.set_len(0).map_err(lasting)?;
            have = 0;
        }
        if have == file.bytes {
            return Ok(());
        }
        let (mut from, begins_at) = self
            .client
            .content(self.model, self.commit, file, have)
            .await?;
        if begins_at != have {
            to.set_len(0).map_err(lasting)?;
            have = 0;
        }
        let mut to = tokio::fs::File::from_std(to);
        let received = loop {
            self.progress.tell(Event::Received {
                file: number,
                bytes: have,
            });
            match from.chunk().await {
                Ok(Some(piece)) => {
                    have += u64::try_from(piece.len()).unwrap_or(u64::MAX);
                    if have > file.bytes {
                        let problem =
                            format!("{} is longer than its {} bytes", file.path, file.bytes);
                        break Err(Failure::Lasting(HubError::bad_answer(problem)));
                    }
                    to.write_all(&piece).await.map_err(lasting)?;
                }
                Ok(None) if have == file.bytes => break Ok(()),
                Ok(None) => break Err(self.cut(file)),
                Err(error) => break Err(self.client.passing(&error)),
            }
        };
        // Also the bytes before an interruption: the next attempt resumes after them.
        to.flush().await.map_err(lasting)?;
        received
    }

    fn cut(&self, file: &RemoteFile) -> Failure {
        let error = HubError::bad_answer(format!(
            "{} ended before its {} bytes",
            file.path, file.bytes
        ));
        Failure::Passing { error, pause: None }
    }
}

fn length(path: &Path) -> u64 {
    std::fs::metadata(path).map_or(0, |about| about.len())
}

/// Whether the content has the hash that the hub names.
async fn has_hash(path: &Path, file: &RemoteFile) -> Result<bool, HubError> {
    let (at, expected, bytes) = (path.to_owned(), file.hash.clone(), file.bytes);
    let hashed = tokio::task::spawn_blocking(move || {
        let hex = match &expected {
            Hash::Sha256(_) => digest(sha2::Sha256::new(), &at),
            Hash::Git(_) => digest(sha1::Sha1::new_with_prefix(format!("blob {bytes}\0")), &at),
        };
        hex.map(|hex| hex == expected.hex())
    });
    let hashed = hashed
        .await
        .map_err(io::Error::other)
        .and_then(|hashed| hashed);
    hashed.map_err(HubError::disk(path))
}

/// Syncs a file's content to the disk: after a power failure, the name that it gets next must not refer to less.
async fn sync(path: &Path) -> Result<(), HubError> {
    let at = path.to_owned();
    let synced = tokio::task::spawn_blocking(move || File::open(&at)?.sync_all());
    let synced = synced
        .await
        .map_err(io::Error::other)
        .and_then(|synced| synced);
    synced.map_err(HubError::disk(path))
}

fn digest(mut hasher: impl sha1::Digest, path: &Path) -> io::Result<String> {
    let mut from = File::open(path)?;
    let mut piece = vec![0; 1 << 20];
    loop {
        match from.read(&mut piece)? {
            0 => break,
            bytes => hasher.update(&piece[..bytes]),
        }
    }
    let hash = hasher.finalize();
    Ok(hash.iter().map(|byte| format!("{byte:02x}")).collect())
}
