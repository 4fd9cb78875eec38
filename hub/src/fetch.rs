//! [`Hub`]: a model by name becomes a path.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use futures_util::{StreamExt as _, TryStreamExt as _, stream};

use crate::cache::{Cache, is_commit};
use crate::choice::{Choice, Needs, choose, has_all_shards};
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

/// Weights in one file.
const SINGLE: &str = "model.safetensors";

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
    /// Why it may not be the newest one, where it should have been: the hub was not asked, or not all of the newest came.
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
    /// there from before does, if it is whole: the commit that the revision was last, or an older one.
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
            return self.present(model, needs).ok_or_else(|| HubError::Offline {
                model: Box::new(model.clone()),
                cache: self.cache.root().to_owned(),
            });
        }
        let client = HubClient::try_new(&self.settings)?;
        match self.newest(&client, model, needs, progress).await {
            Err(error) if error.is_passing() => match self.in_its_place(model, needs) {
                Some(fetched) => Ok(Fetched {
                    stale: Some(error),
                    ..fetched
                }),
                None => Err(error),
            },
            fetched => fetched,
        }
    }

    /// What the hub has now.
    async fn newest(
        &self,
        client: &HubClient,
        model: &ModelRef,
        needs: Needs,
        progress: &dyn Progress,
    ) -> Result<Fetched, HubError> {
        let snapshot = self.snapshot(client, model, progress).await?;
        let paths: Vec<&str> = { snapshot.files.iter() }
            .map(|file| file.path.as_str())
            .collect();
        let choice = choose(model, needs, paths.iter().copied())?;
        // Before the first of them comes: it tells later whether all of them did. Without it the hub is asked again.
        if let Err(error) = self.cache.set_list(&model.repo, &snapshot.commit, &paths) {
            tracing::debug!(%error, "the list of a commit's files is not kept");
        }
        let wanted: BTreeSet<&str> = choice.files.iter().map(String::as_str).collect();
        let files: Vec<RemoteFile> = { snapshot.files.iter() }
            .filter(|file| wanted.contains(file.path.as_str()))
            .cloned()
            .collect();
        self.bring(client, model, &snapshot.commit, &files, progress)
            .await?;
        // A cache that may only be read has all of it, all the same.
        let noted = (self.cache).set_commit(&model.repo, model.revision(), &snapshot.commit);
        if let Err(error) = noted {
            tracing::debug!(%error, "which commit a revision is is not kept");
        }
        let hashes = snapshot.files.iter().map(|file| file.hash.hex());
        self.cache.sweep(&model.repo, &hashes.collect());
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

    /// A commit that was asked for by its hash never changes: where its list of files is here, and all that is needed of them,
    /// the hub need not be asked. That there is a folder for the commit says nothing: a download may have been cut.
    fn known_commit(&self, model: &ModelRef, needs: Needs) -> Option<Fetched> {
        let revision = model.revision.as_deref().filter(|text| is_commit(text))?;
        let commit = self.cache.commit(&model.repo, revision)?;
        self.whole(model, needs, commit)
    }

    /// A commit, where the list of its files is here, and all that is needed of them.
    fn whole(&self, model: &ModelRef, needs: Needs, commit: String) -> Option<Fetched> {
        let choice = self.listed(model, needs, &commit)?;
        let files = self.cache.files(&model.repo, &commit);
        let is_whole = choice.files.iter().all(|file| files.contains(file));
        is_whole.then(|| self.fetched(model, commit, &choice))
    }

    /// What does while the hub is away: the commit that the revision was last, or, where of that one not all is here, the one
    /// before it. A revision that was never here has none.
    fn in_its_place(&self, model: &ModelRef, needs: Needs) -> Option<Fetched> {
        self.present(model, needs).or_else(|| {
            let (repo, revision) = (&model.repo, model.revision());
            if is_commit(revision) || self.cache.commit(repo, revision).is_none() {
                return None;
            }
            let before = self.cache.commits_besides(repo, revision);
            before
                .into_iter()
                .find_map(|commit| self.whole(model, needs, commit))
        })
    }

    /// What is needed of a commit, where the list of its files is here.
    fn listed(&self, model: &ModelRef, needs: Needs, commit: &str) -> Option<Choice> {
        let list = self.cache.list_of(&model.repo, commit)?;
        choose(model, needs, list.iter().map(String::as_str)).ok()
    }

    /// What is in the cache, if it is all that is needed. Where the list of files is not here, since an older version or another
    /// tool fetched them, that is as far as their names and the list of shards tell.
    fn present(&self, model: &ModelRef, needs: Needs) -> Option<Fetched> {
        let commit = self.cache.commit(&model.repo, model.revision())?;
        let files = self.cache.files(&model.repo, &commit);
        let listed = self.listed(model, needs, &commit);
        if let Some(choice) = &listed
            && choice.files.iter().all(|file| files.contains(file))
        {
            return Some(self.fetched(model, commit, choice));
        }
        let choice = choose(model, needs, files.iter().map(String::as_str)).ok()?;
        // Another GGUF file than the usual one will do. Of a folder that the list knows, something is missing.
        let is_whole = choice.file.is_some()
            || (listed.is_none() && self.has_shards(model, &commit, &choice, &files));
        is_whole.then(|| self.fetched(model, commit, &choice))
    }

    /// Whether no shard is missing, as far as a folder's own files tell.
    fn has_shards(
        &self,
        model: &ModelRef,
        commit: &str,
        choice: &Choice,
        files: &[String],
    ) -> bool {
        let folder = self.cache.snapshot(&model.repo, commit);
        let named = shards(&folder, choice);
        has_all_shards(&choice.files) && named.iter().all(|shard| files.contains(shard))
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
        // The hub chose the lengths: their sum may not fit into a number.
        let missing = { planned.iter() }
            .map(|file| file.bytes.saturating_sub(file.present_bytes))
            .fold(0, u64::saturating_add);
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
    let named: BTreeSet<String> = shards.filter(|shard| is_safe_path(shard)).collect();
    // As the engines do: a model that was saved anew in one file may lie beside its old list.
    let is_old = choice.files.iter().any(|file| file == SINGLE) && !named.contains(SINGLE);
    if is_old { BTreeSet::new() } else { named }
}
