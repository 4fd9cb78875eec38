//! [`Cache`]: the folder that the hub's own tools use, in their layout: `models--OWNER--NAME` with `blobs/HASH`, links to the
//! blobs at `snapshots/COMMIT/PATH`, and `refs/REVISION`, which holds a commit. `.files/COMMIT` is this crate's own addition:
//! the paths of all files of a commit, one per line, as the hub listed them.

use std::collections::BTreeSet;
use std::fs;
use std::hash::{BuildHasher as _, Hasher as _, RandomState};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use crate::error::HubError;
use crate::reference::RepoId;

/// The prefix of a folder that is being deleted; `-` and a part from [`unique`] follow its name.
const DELETING: &str = ".deleting-";

/// A partial download is abandoned if nothing was written to it for this long. It may belong to another revision, whose
/// download resumes after a weekend.
const LEFT_AFTER: Duration = Duration::from_hours(7 * 24);

/// A folder with models.
#[derive(Debug, Clone)]
pub struct Cache {
    root: PathBuf,
}

/// A model in the cache.
#[derive(Debug, Clone)]
pub struct CachedModel {
    /// The repository.
    pub repo: RepoId,
    /// Its size on the disk in bytes, including the remains of interrupted downloads and deletions.
    pub bytes: u64,
    /// Whether a download or its deletion was interrupted.
    pub is_partial: bool,
    /// When it was last read or written, if the file system records that.
    pub last_used: Option<SystemTime>,
    /// The GGUF files in its latest snapshot.
    pub gguf: Vec<String>,
    /// Its folder.
    pub path: PathBuf,
}

impl Cache {
    /// The cache in `root`, which need not exist yet.
    #[must_use]
    pub fn new(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into() }
    }

    /// Its folder.
    #[must_use]
    pub fn root(&self) -> &Path {
        &self.root
    }

    pub(crate) fn folder(&self, repo: &RepoId) -> PathBuf {
        self.root.join(folder_name(repo))
    }

    pub(crate) fn blob(&self, repo: &RepoId, hash: &str) -> PathBuf {
        self.folder(repo).join("blobs").join(hash)
    }

    pub(crate) fn lock(&self, repo: &RepoId, hash: &str) -> PathBuf {
        let locks = self.root.join(".locks").join(folder_name(repo));
        locks.join(format!("{hash}.lock"))
    }

    /// Opens the file that is locked while a blob is fetched; creates it if necessary.
    pub(crate) fn open_lock(&self, repo: &RepoId, hash: &str) -> Result<fs::File, HubError> {
        let path = self.lock(repo, hash);
        let made = path.parent().map_or(Ok(()), fs::create_dir_all);
        made.and_then(|()| fs::File::options().create(true).append(true).open(&path))
            .map_err(HubError::disk(&path))
    }

    pub(crate) fn snapshot(&self, repo: &RepoId, commit: &str) -> PathBuf {
        self.folder(repo).join("snapshots").join(commit)
    }

    /// The commit of a revision when it was last looked up; a commit is its own. Its files may be incomplete.
    pub(crate) fn commit(&self, repo: &RepoId, revision: &str) -> Option<String> {
        if self.snapshot(repo, revision).is_dir() && is_commit(revision) {
            return Some(revision.to_owned());
        }
        let commit = fs::read_to_string(self.folder(repo).join("refs").join(revision)).ok()?;
        let commit = commit.trim();
        (is_commit(commit) && self.snapshot(repo, commit).is_dir()).then(|| commit.to_owned())
    }

    /// The commits with files here, newest first, except those of other revisions.
    pub(crate) fn commits_besides(&self, repo: &RepoId, revision: &str) -> Vec<String> {
        let folder = self.folder(repo);
        let own = folder.join("refs").join(revision);
        let others: Vec<String> = files_below(&folder.join("refs"))
            .into_iter()
            .filter(|path| *path != own)
            .filter_map(|path| fs::read_to_string(path).ok())
            .map(|commit| commit.trim().to_owned())
            .collect();
        let snapshots = fs::read_dir(folder.join("snapshots"));
        let mut found: Vec<(Option<SystemTime>, String)> = snapshots
            .into_iter()
            .flatten()
            .flatten()
            .filter_map(|entry| {
                let commit = entry.file_name().into_string().ok()?;
                let written = entry.metadata().and_then(|about| about.modified());
                (is_commit(&commit) && !others.contains(&commit)).then_some((written.ok(), commit))
            })
            .collect();
        found.sort_by(|one, other| other.cmp(one));
        found.into_iter().map(|(_, commit)| commit).collect()
    }

    /// Records the commit of a revision, and that it was looked up now.
    pub(crate) fn set_commit(
        &self,
        repo: &RepoId,
        revision: &str,
        commit: &str,
    ) -> Result<(), HubError> {
        if revision == commit {
            return Ok(());
        }
        let path = self.folder(repo).join("refs").join(revision);
        if fs::read_to_string(&path).is_ok_and(|known| known.trim() == commit) {
            // Its time records when it was looked up. Not every cache allows changing it.
            let file = fs::File::options().write(true).open(&path);
            if let Err(error) = file.and_then(|file| file.set_modified(SystemTime::now())) {
                tracing::debug!(%error, path = %path.display(), "the last use of a model cannot be recorded");
            }
            return Ok(());
        }
        write_whole(&path, commit.as_bytes()).map_err(HubError::disk(&path))
    }

    /// The paths of all files of a commit, if the hub was asked; few of them may be in the cache.
    pub(crate) fn list_of(&self, repo: &RepoId, commit: &str) -> Option<Vec<String>> {
        let list = fs::read_to_string(self.list_path(repo, commit)).ok()?;
        Some(list.lines().map(str::to_owned).collect())
    }

    /// Records the paths of all files of a commit. A commit never changes, so neither does this list.
    pub(crate) fn set_list(
        &self,
        repo: &RepoId,
        commit: &str,
        files: &[&str],
    ) -> Result<(), HubError> {
        if self
            .list_of(repo, commit)
            .is_some_and(|known| known == files)
        {
            return Ok(());
        }
        let path = self.list_path(repo, commit);
        write_whole(&path, files.join("\n").as_bytes()).map_err(HubError::disk(&path))
    }

    fn list_path(&self, repo: &RepoId, commit: &str) -> PathBuf {
        self.folder(repo).join(".files").join(commit)
    }

    /// The paths of a snapshot's files; each file is complete.
    pub(crate) fn files(&self, repo: &RepoId, commit: &str) -> Vec<String> {
        let snapshot = self.snapshot(repo, commit);
        let mut found = Vec::new();
        // Folders within folders, as deep as repositories nest them.
        let mut folders = vec![(snapshot, String::new(), 0)];
        while let Some((folder, prefix, depth)) = folders.pop() {
            for entry in fs::read_dir(&folder).into_iter().flatten().flatten() {
                let Ok(name) = entry.file_name().into_string() else {
                    continue;
                };
                // Follows the link: a link to a missing blob is not a file.
                match fs::metadata(entry.path()) {
                    Ok(about) if about.is_file() => found.push(format!("{prefix}{name}")),
                    Ok(about) if about.is_dir() && depth < 8 => {
                        folders.push((entry.path(), format!("{prefix}{name}/"), depth + 1));
                    }
                    Ok(_) | Err(_) => {}
                }
            }
        }
        found.sort();
        found
    }

    /// Links a file of a snapshot to its blob.
    pub(crate) fn link(
        &self,
        repo: &RepoId,
        commit: &str,
        file: &str,
        hash: &str,
    ) -> Result<(), HubError> {
        let path = self.snapshot(repo, commit).join(file);
        let up = "../".repeat(2 + file.matches('/').count());
        let target = PathBuf::from(format!("{up}blobs/{hash}"));
        if fs::read_link(&path).is_ok_and(|known| known == target) {
            return Ok(());
        }
        replace(&path, |fresh| std::os::unix::fs::symlink(&target, fresh))
            .map_err(HubError::disk(&path))
    }

    /// Deletes abandoned partial downloads: of blobs that are not in `known`, that no process fetches, and that were not
    /// written to for [`LEFT_AFTER`]. Skips what cannot be deleted.
    pub(crate) fn sweep(&self, repo: &RepoId, known: &BTreeSet<&str>) {
        let blobs = fs::read_dir(self.folder(repo).join("blobs"));
        for entry in blobs.into_iter().flatten().flatten() {
            let name = entry.file_name();
            let hash = name.to_str().and_then(|it| it.strip_suffix(".incomplete"));
            let Some(hash) = hash.filter(|hash| is_blob(hash) && !known.contains(hash)) else {
                continue;
            };
            let written = entry.metadata().and_then(|about| about.modified());
            let is_old = written.is_ok_and(|at| at.elapsed().is_ok_and(|age| age >= LEFT_AFTER));
            if !is_old {
                continue;
            }
            // The lock is released on drop.
            let lock = self.open_lock(repo, hash);
            if lock.as_ref().is_ok_and(|lock| lock.try_lock().is_ok())
                && let Err(error) = fs::remove_file(entry.path())
            {
                tracing::debug!(%error, hash, "the rest of an old download cannot be removed");
            }
        }
    }

    /// The models in the cache, by name.
    ///
    /// # Errors
    /// `Disk` if the folder exists and cannot be read.
    pub fn list(&self) -> Result<Vec<CachedModel>, HubError> {
        let entries = match fs::read_dir(&self.root) {
            Ok(entries) => entries,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(error) => return Err(HubError::disk(&self.root)(error)),
        };
        let repos: BTreeSet<RepoId> = entries
            .flatten()
            .filter_map(|entry| {
                let name = entry.file_name().into_string().ok()?;
                repo_of(being_deleted(&name).unwrap_or(&name))
            })
            .collect();
        Ok(repos.into_iter().map(|repo| self.describe(repo)).collect())
    }

    fn describe(&self, repo: RepoId) -> CachedModel {
        let path = self.folder(&repo);
        let mut model = CachedModel {
            bytes: 0,
            is_partial: false,
            last_used: None,
            gguf: Vec::new(),
            path: path.clone(),
            repo,
        };
        let entries = |name: &str| {
            fs::read_dir(path.join(name))
                .into_iter()
                .flatten()
                .flatten()
        };
        for entry in entries("blobs").chain(entries("refs")) {
            let Ok(about) = entry.metadata() else {
                continue;
            };
            model.bytes += about.len();
            model.is_partial |= entry
                .path()
                .extension()
                .is_some_and(|end| end == "incomplete");
            let used = [about.accessed().ok(), about.modified().ok()];
            model.last_used = used.into_iter().flatten().chain(model.last_used).max();
        }
        for left in self.being_deleted(&model.repo) {
            let files = files_below(&left).into_iter();
            let sizes = files.filter_map(|file| fs::symlink_metadata(file).ok());
            model.bytes += sizes.map(|about| about.len()).sum::<u64>();
            model.is_partial |= !path.is_dir();
        }
        for snapshot in entries("snapshots") {
            let Ok(commit) = snapshot.file_name().into_string() else {
                continue;
            };
            let files = self.files(&model.repo, &commit).into_iter();
            model
                .gguf
                .extend(files.filter(|file| file.ends_with(".gguf")));
        }
        model.gguf.sort();
        model.gguf.dedup();
        model
    }

    /// The folders left by interrupted deletions.
    fn being_deleted(&self, repo: &RepoId) -> Vec<PathBuf> {
        let name = folder_name(repo);
        fs::read_dir(&self.root)
            .into_iter()
            .flatten()
            .flatten()
            .filter(|entry| {
                let found = entry.file_name();
                found.to_str().and_then(being_deleted) == Some(name.as_str())
            })
            .map(|entry| entry.path())
            .collect()
    }

    /// Deletes a model and returns how many bytes that frees; `None` if it is not in the cache. A process that has its files
    /// open keeps them until it ends.
    ///
    /// # Errors
    /// `Disk` if something cannot be deleted.
    pub fn remove(&self, repo: &RepoId) -> Result<Option<u64>, HubError> {
        let folder = self.folder(repo);
        // Also removes the remains of an interrupted deletion.
        let mut doomed = self.being_deleted(repo);
        if !folder.is_dir() && doomed.is_empty() {
            return Ok(None);
        }
        let bytes = self.describe(repo.clone()).bytes;
        if folder.is_dir() {
            // First renames it, atomically: nobody sees a half-deleted model.
            let name = format!("{DELETING}{}-{}", folder_name(repo), unique());
            let path = self.root.join(name);
            fs::rename(&folder, &path).map_err(HubError::disk(&folder))?;
            doomed.push(path);
        }
        for path in doomed {
            match fs::remove_dir_all(&path) {
                // Another process may delete it at the same time.
                Err(error) if error.kind() != io::ErrorKind::NotFound => {
                    return Err(HubError::disk(&path)(error));
                }
                Ok(()) | Err(_) => {}
            }
        }
        match fs::remove_dir_all(self.root.join(".locks").join(folder_name(repo))) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                Err(HubError::disk(&self.root)(error))
            }
            Ok(()) | Err(_) => Ok(Some(bytes)),
        }
    }
}

/// The files of a folder and its subfolders.
fn files_below(folder: &Path) -> Vec<PathBuf> {
    let (mut found, mut folders) = (Vec::new(), vec![folder.to_owned()]);
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).into_iter().flatten().flatten() {
            match entry.file_type() {
                Ok(kind) if kind.is_dir() => folders.push(entry.path()),
                Ok(_) => found.push(entry.path()),
                Err(_) => {}
            }
        }
    }
    found
}

fn folder_name(repo: &RepoId) -> String {
    format!("models--{}--{}", repo.owner(), repo.name())
}

/// The model to which a folder with this name belongs.
fn repo_of(folder_name: &str) -> Option<RepoId> {
    let (owner, name) = folder_name.strip_prefix("models--")?.split_once("--")?;
    format!("{owner}/{name}").parse().ok()
}

/// The name that a folder had before its deletion started.
fn being_deleted(name: &str) -> Option<&str> {
    let (folder_name, unique) = name.strip_prefix(DELETING)?.rsplit_once('-')?;
    let is_ours = !unique.is_empty() && unique.bytes().all(|byte| byte.is_ascii_hexdigit());
    is_ours.then_some(folder_name)
}

/// Whether it is a commit hash.
pub(crate) fn is_commit(text: &str) -> bool {
    text.len() == 40 && text.bytes().all(|byte| byte.is_ascii_hexdigit())
}

/// Whether it is a blob hash: SHA-1 or SHA-256.
fn is_blob(name: &str) -> bool {
    [40, 64].contains(&name.len()) && name.bytes().all(|byte| byte.is_ascii_hexdigit())
}

/// Writes a file atomically, so that nobody sees a part of it, even after a power failure.
fn write_whole(path: &Path, content: &[u8]) -> io::Result<()> {
    replace(path, |fresh| {
        let mut file = fs::File::create_new(fresh)?;
        file.write_all(content)?;
        file.sync_all()
    })
}

/// Creates something under a temporary name and moves it to `path` atomically.
fn replace(path: &Path, make: impl Fn(&Path) -> io::Result<()>) -> io::Result<()> {
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder)?;
    }
    let mut fresh = path.as_os_str().to_owned();
    fresh.push(format!(".{}.new", unique()));
    let fresh = PathBuf::from(fresh);
    let made = make(&fresh).and_then(|()| fs::rename(&fresh, path));
    if made.is_err() {
        // Nobody else knows its name.
        drop(fs::remove_file(&fresh));
    }
    made
}

/// A unique part of a name. A process id is not unique: containers that share a cache all have 1.
fn unique() -> String {
    format!("{:016x}", RandomState::new().build_hasher().finish())
}

#[cfg(test)]
mod tests {
    use super::*;

    const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

    #[test]
    fn processes_of_one_number_do_not_take_what_the_others_write() {
        let folder = tempfile::tempdir().unwrap();
        let (cache, repo) = (Cache::new(folder.path()), "org/model".parse().unwrap());
        std::thread::scope(|scope| {
            for writer in 0..4 {
                let (cache, repo) = (&cache, &repo);
                scope.spawn(move || {
                    for round in 0..200 {
                        let hash = format!("{writer}-{round}");
                        cache.link(repo, COMMIT, "config.json", &hash).unwrap();
                    }
                });
            }
        });
        let names = fs::read_dir(cache.snapshot(&repo, COMMIT)).unwrap();
        assert_eq!(names.count(), 1, "nothing is left of those in between");
    }

    #[test]
    fn a_deletion_that_was_cut_short_is_seen_and_finished() {
        let folder = tempfile::tempdir().unwrap();
        let (cache, repo) = (Cache::new(folder.path()), "org/model".parse().unwrap());
        let leave = |name: &str| {
            let blobs = folder.path().join(name).join("blobs");
            fs::create_dir_all(&blobs).unwrap();
            fs::write(blobs.join("x"), [7; 1000]).unwrap();
        };
        // One by an older version, and one of another model.
        leave(".deleting-models--org--model-1");
        leave(".deleting-models--org--model-2-1");
        let listed = cache.list().unwrap();
        let names: Vec<String> = listed.iter().map(|model| model.repo.to_string()).collect();
        assert_eq!(names, ["org/model", "org/model-2"]);
        assert!(listed.iter().all(|model| model.is_partial));
        assert_eq!(cache.remove(&repo).unwrap(), Some(1000));
        assert_eq!(cache.remove(&repo).unwrap(), None);
        // Together with a model that is there again.
        leave("models--org--model");
        leave(".deleting-models--org--model-00ff");
        assert_eq!(cache.remove(&repo).unwrap(), Some(2000));
        let listed = cache.list().unwrap();
        assert_eq!(listed.len(), 1, "the other one's: {listed:?}");
    }

    #[test]
    fn what_is_left_of_a_download_is_swept_once_nobody_goes_on_with_it() {
        let folder = tempfile::tempdir().unwrap();
        let (cache, repo) = (Cache::new(folder.path()), "org/model".parse().unwrap());
        let blobs = cache.folder(&repo).join("blobs");
        fs::create_dir_all(&blobs).unwrap();
        let hashes = ["a", "b", "c"].map(|digit| digit.repeat(64));
        let [gone, fetched, known] = &hashes;
        let recent = "d".repeat(64);
        let left = hashes.iter().map(String::as_str).chain(["other"]);
        let long_ago = SystemTime::now() - LEFT_AFTER;
        for (name, written) in left
            .map(|name| (name, long_ago))
            .chain([(recent.as_str(), long_ago + Duration::from_secs(600))])
        {
            let file = fs::File::create(blobs.join(format!("{name}.incomplete"))).unwrap();
            file.set_modified(written).unwrap();
        }
        let is_left = |hash: &str| blobs.join(format!("{hash}.incomplete")).exists();
        let lock = cache.open_lock(&repo, fetched).unwrap();
        lock.lock().unwrap();
        let wanted = BTreeSet::from([known.as_str()]);
        cache.sweep(&repo, &wanted);
        assert!(!is_left(gone));
        assert!(is_left(fetched), "another process fetches it");
        assert!(is_left(known) && is_left("other"));
        assert!(is_left(&recent), "somebody may go on with it");
        drop(lock);
        cache.sweep(&repo, &wanted);
        assert!(!is_left(fetched));
    }

    #[test]
    fn a_revision_that_is_the_same_commit_is_not_written_again() {
        let folder = tempfile::tempdir().unwrap();
        let (cache, repo) = (Cache::new(folder.path()), "org/model".parse().unwrap());
        cache.set_commit(&repo, "main", COMMIT).unwrap();
        let path = cache.folder(&repo).join("refs/main");
        let file = fs::File::options().write(true).open(&path).unwrap();
        file.set_modified(SystemTime::UNIX_EPOCH).unwrap();
        cache.set_commit(&repo, "main", COMMIT).unwrap();
        let used = file.metadata().unwrap().modified().unwrap();
        assert!(
            used > SystemTime::UNIX_EPOCH,
            "it is the same file, and its use is noted"
        );
    }
}
