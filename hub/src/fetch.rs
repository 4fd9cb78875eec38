//! [`Hub`]: a model by name becomes a path.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use futures_util::{StreamExt as _, TryStreamExt as _, stream};

use crate::cache::{Cache, is_commit};
use crate::choice::{Choice, Needs, choose};
use crate::client::{Failure, HubClient, RemoteFile, Snapshot};
use crate::download::{Downloads, is_present, partial};
use crate::error::HubError;
use crate::progress::{Event, PlannedFile, Progress, Wait};
use crate::reference::{ModelRef, is_safe_path};
use crate::settings::HubSettings;

/// Files that are fetched at once.
const FILES_AT_ONCE: usize = 4;

/// What stays free on the disk, in bytes.
const SPARE_BYTES: u64 = 64 << 20;

/// Attempts to learn what a repository has.
const LIST_ATTEMPTS: u32 = 3;

/// The longest list of shards that is read, in bytes.
const MAX_INDEX_BYTES: u64 = 64 << 20;

/// Fetches models.
#[derive(Debug, Clone)]
pub struct Hub {
    settings: HubSettings,
    cache: Cache,
}

/// A model that is there.
#[derive(Debug)]
pub struct Fetched {
    /// The folder of its files, or the GGUF file.
    pub path: PathBuf,
    /// The commit that they are of.
    pub commit: String,
    /// Why the hub was not asked whether there is a newer one, where it should have been.
    pub stale: Option<HubError>,
}

impl Hub {
    /// With these settings. Nothing is sent or written yet.
    #[must_use]
    pub fn new(settings: HubSettings) -> Self {
        let cache = Cache::new(&settings.cache);
        Self { settings, cache }
    }

    /// Where files are kept.
    #[must_use]
    pub fn cache(&self) -> &Cache {
        &self.cache
    }

    /// Brings what `needs` says of a model into the cache, as far as it is not there. Where the hub cannot be reached, what is
    /// there from before does, if it is whole.
    ///
    /// # Errors
    /// Why it is not there, and what to do: see [`HubError`].
    ///
    /// # Cancel safety
    /// What has come stays, and the next call goes on from there.
    pub async fn fetch(
        &self,
        model: &ModelRef,
        needs: Needs,
        progress: &dyn Progress,
    ) -> Result<Fetched, HubError> {
        if let Some(fetched) = self.known_commit(model, needs) {
            return Ok(fetched);
        }
        if self.settings.is_offline {
            return self
                .present(model, needs)?
                .ok_or_else(|| HubError::Offline {
                    model: Box::new(model.clone()),
                    cache: self.cache.root().to_owned(),
                });
        }
        let client = HubClient::try_new(&self.settings)?;
        let snapshot = match self.snapshot(&client, model, progress).await {
            Ok(snapshot) => snapshot,
            Err(error @ (HubError::Unreachable { .. } | HubError::TooMany { .. })) => {
                return match self.present(model, needs)? {
                    Some(fetched) => Ok(Fetched {
                        stale: Some(error),
                        ..fetched
                    }),
                    None => Err(error),
                };
            }
            Err(error) => return Err(error),
        };
        let paths = snapshot.files.iter().map(|file| file.path.as_str());
        let choice = choose(model, needs, paths)?;
        let wanted: BTreeSet<&str> = choice.files.iter().map(String::as_str).collect();
        let files: Vec<RemoteFile> = { snapshot.files.iter() }
            .filter(|file| wanted.contains(file.path.as_str()))
            .cloned()
            .collect();
        self.bring(&client, model, &snapshot.commit, &files, progress)
            .await?;
        self.cache
            .set_commit(&model.repo, model.revision(), &snapshot.commit)?;
        Ok(self.fetched(model, snapshot.commit, &choice))
    }

    fn fetched(&self, model: &ModelRef, commit: String, choice: &Choice) -> Fetched {
        let folder = self.cache.snapshot(&model.repo, &commit);
        let path = choice
            .file
            .as_ref()
            .map_or_else(|| folder.clone(), |file| folder.join(file));
        Fetched {
            path,
            commit,
            stale: None,
        }
    }

    /// A commit that was asked for by its hash never changes: the hub need not be asked.
    fn known_commit(&self, model: &ModelRef, needs: Needs) -> Option<Fetched> {
        let is_fixed = model.revision.as_deref().is_some_and(is_commit);
        is_fixed.then(|| self.present(model, needs).ok()?)?
    }

    /// What is in the cache, if it is all that is needed.
    ///
    /// # Errors
    /// When the repository, as far as it is there, has nothing of the kind.
    fn present(&self, model: &ModelRef, needs: Needs) -> Result<Option<Fetched>, HubError> {
        let Some(commit) = self.cache.commit(&model.repo, model.revision()) else {
            return Ok(None);
        };
        let files = self.cache.files(&model.repo, &commit);
        let Ok(choice) = choose(model, needs, files.iter().map(String::as_str)) else {
            return Ok(None);
        };
        let folder = self.cache.snapshot(&model.repo, &commit);
        let is_whole = shards(&folder, &choice)
            .iter()
            .all(|shard| files.contains(shard));
        Ok(is_whole.then(|| self.fetched(model, commit, &choice)))
    }

    async fn snapshot(
        &self,
        client: &HubClient,
        model: &ModelRef,
        progress: &dyn Progress,
    ) -> Result<Snapshot, HubError> {
        let mut pause = self.settings.retry_pause;
        for attempt in 1.. {
            match client.snapshot(model).await {
                Ok(snapshot) => return Ok(snapshot),
                Err(Failure::Lasting(error)) => return Err(error),
                Err(Failure::Passing { error, .. }) if attempt == LIST_ATTEMPTS => {
                    return Err(error);
                }
                Err(Failure::Passing { pause: asked, .. }) => {
                    let wait = Wait::Retry(asked.unwrap_or(pause));
                    progress.tell(Event::Waits { file: 0, wait });
                    tokio::time::sleep(asked.unwrap_or(pause)).await;
                    pause *= 2;
                }
            }
        }
        Err(HubError::bad_answer("it was not asked"))
    }

    async fn bring(
        &self,
        client: &HubClient,
        model: &ModelRef,
        commit: &str,
        files: &[RemoteFile],
        progress: &dyn Progress,
    ) -> Result<(), HubError> {
        let blobs = self.cache.folder(&model.repo).join("blobs");
        std::fs::create_dir_all(&blobs).map_err(HubError::disk(&blobs))?;
        let planned: Vec<PlannedFile> =
            files.iter().map(|file| self.planned(model, file)).collect();
        let missing = planned
            .iter()
            .map(|file| file.bytes - file.present_bytes)
            .sum();
        self.check_room(&blobs, missing)?;
        progress.tell(Event::Planned(&planned));
        let downloads = Downloads {
            client,
            cache: &self.cache,
            model,
            commit,
            progress,
            retry_pause: self.settings.retry_pause,
        };
        stream::iter(
            files
                .iter()
                .enumerate()
                .map(|(number, file)| downloads.bring(number, file)),
        )
        .buffer_unordered(FILES_AT_ONCE)
        .try_collect()
        .await
    }

    fn planned(&self, model: &ModelRef, file: &RemoteFile) -> PlannedFile {
        let blob = self.cache.blob(&model.repo, file.hash.hex());
        let part = || std::fs::metadata(partial(&blob)).map_or(0, |about| about.len());
        let present_bytes = if is_present(&blob, file) {
            file.bytes
        } else {
            part().min(file.bytes)
        };
        PlannedFile {
            name: file.path.clone(),
            bytes: file.bytes,
            present_bytes,
        }
    }

    /// Before a byte is fetched: a disk that is full after an hour helps nobody.
    fn check_room(&self, folder: &Path, missing: u64) -> Result<(), HubError> {
        if missing == 0 {
            return Ok(());
        }
        let disk =
            rustix::fs::statvfs(folder).map_err(|error| HubError::disk(folder)(error.into()))?;
        let free = disk.f_bavail.saturating_mul(disk.f_frsize);
        if missing.saturating_add(SPARE_BYTES) <= free {
            return Ok(());
        }
        Err(HubError::NoRoom {
            needed: gibibytes(missing),
            free: gibibytes(free),
            cache: self.cache.root().to_owned(),
        })
    }
}

#[expect(clippy::cast_precision_loss, reason = "for people")]
fn gibibytes(bytes: u64) -> String {
    format!("{:.1} GiB", bytes as f64 / f64::from(1 << 30))
}

/// The files that a list of shards names: without one of them the model is not whole.
fn shards(folder: &Path, choice: &Choice) -> BTreeSet<String> {
    #[derive(serde::Deserialize)]
    struct Index {
        weight_map: std::collections::BTreeMap<String, String>,
    }
    let has_weights = choice
        .files
        .iter()
        .any(|file| file.ends_with(".safetensors"));
    let path = folder.join("model.safetensors.index.json");
    let is_small = std::fs::metadata(&path).is_ok_and(|about| about.len() <= MAX_INDEX_BYTES);
    if choice.file.is_some() || !has_weights || !is_small {
        return BTreeSet::new();
    }
    let index = std::fs::read(&path)
        .ok()
        .and_then(|json| serde_json::from_slice::<Index>(&json).ok());
    let shards = index
        .map(|index| index.weight_map.into_values())
        .into_iter()
        .flatten();
    shards.filter(|shard| is_safe_path(shard)).collect()
}
