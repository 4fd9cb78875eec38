//! [`Hub`] turns a model's name into a path.

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

/// Files that are fetched concurrently.
const FILES_AT_ONCE: usize = 4;

/// The bytes to leave free on the disk.
const SPARE_BYTES: u64 = 64 << 20;

/// Attempts to get a repository's file list.
const LIST_ATTEMPTS: u32 = 3;

/// The name of weights in a single file.
const SINGLE: &str = "model.safetensors";

/// The longest shard index that is read, in bytes.
const MAX_INDEX_BYTES: u64 = 64 << 20;

/// Fetches models.
#[derive(Debug, Clone)]
pub struct Hub {
    settings: HubSettings,
    cache: Cache,
}

/// A model in the cache.
#[derive(Debug)]
pub struct Fetched {
    /// The folder of its files, or the GGUF file.
    pub path: PathBuf,
    /// The commit of the files.
    pub commit: String,
    /// Why it may not be the latest commit although it should be: the hub was not asked, or the latest files did not all
    /// arrive.
    pub stale: Option<HubError>,
}

impl Hub {
    /// A hub with these settings. Sends and writes nothing yet.
    #[must_use]
    pub fn new(settings: HubSettings) -> Self {
        let cache = Cache::new(&settings.cache);
        Self { settings, cache }
    }

    /// The cache of its files.
    #[must_use]
    pub fn cache(&self) -> &Cache {
        &self.cache
    }

    /// Fetches the files that `needs` selects into the cache, unless they are there. If the hub cannot be reached, an earlier
    /// complete download serves: of the commit that the revision last had, or an older one.
    ///
    /// # Errors
    /// Why it is not available, and what to do: see [`HubError`].
    ///
    /// # Cancel safety
    /// Received bytes are kept, and the next call resumes after them.
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

    /// Fetches what the hub has at the revision now.
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
        // Written before the first file arrives: it tells later whether all of them did. Without it the hub is asked again.
        if let Err(error) = self.cache.set_list(&model.repo, &snapshot.commit, &paths) {
            tracing::debug!(%error, "the list of a commit's files cannot be kept");
        }
        let wanted: BTreeSet<&str> = choice.files.iter().map(String::as_str).collect();
        let files: Vec<RemoteFile> = { snapshot.files.iter() }
            .filter(|file| wanted.contains(file.path.as_str()))
            .cloned()
            .collect();
        self.bring(client, model, &snapshot.commit, &files, progress)
            .await?;
        // A read-only cache still has all of it.
        let noted = (self.cache).set_commit(&model.repo, model.revision(), &snapshot.commit);
        if let Err(error) = noted {
            tracing::debug!(%error, "the commit of a revision cannot be kept");
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

    /// A commit that was requested by its hash never changes: if its file list and all needed files are here, the hub need
    /// not be asked. The commit's folder proves nothing: a download may have been interrupted.
    fn known_commit(&self, model: &ModelRef, needs: Needs) -> Option<Fetched> {
        let revision = model.revision.as_deref().filter(|text| is_commit(text))?;
        let commit = self.cache.commit(&model.repo, revision)?;
        self.whole(model, needs, commit)
    }

    /// A commit, if its file list and all needed files are here.
    fn whole(&self, model: &ModelRef, needs: Needs, commit: String) -> Option<Fetched> {
        let choice = self.listed(model, needs, &commit)?;
        let files = self.cache.files(&model.repo, &commit);
        let is_whole = choice.files.iter().all(|file| files.contains(file));
        is_whole.then(|| self.fetched(model, commit, &choice))
    }

    /// The replacement while the hub is unreachable: the commit that the revision last had, or, if that one is incomplete,
    /// the newest complete one that is not another revision's. A revision that was never here has none.
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

    /// The needed files of a commit, if its file list is here.
    fn listed(&self, model: &ModelRef, needs: Needs, commit: &str) -> Option<Choice> {
        let list = self.cache.list_of(&model.repo, commit)?;
        choose(model, needs, list.iter().map(String::as_str)).ok()
    }

    /// The files in the cache, if they include all that is needed. If the file list is not here (an older version or another
    /// tool fetched the files), judges by their names and the shard index.
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
        // A GGUF file other than the default is fine. If the list knows the folder, something is missing.
        let is_whole = choice.file.is_some()
            || (listed.is_none() && self.has_shards(model, &commit, &choice, &files));
        is_whole.then(|| self.fetched(model, commit, &choice))
    }

    /// Whether no shard is missing, judged by the folder's own files.
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
        // The hub chose the lengths: their sum may overflow.
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

    /// Checked before a byte is fetched: a disk that fills up after an hour helps nobody.
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

/// The files that a shard index names: without any of them the model is incomplete.
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
    // As engines do: a model saved again in one file may have its old index next to it.
    let is_old = choice.files.iter().any(|file| file == SINGLE) && !named.contains(SINGLE);
    if is_old { BTreeSet::new() } else { named }
}
