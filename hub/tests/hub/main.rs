//! Tests against a local hub that redirects, truncates, hangs, lies and refuses.

#![expect(
    clippy::expect_used,
    clippy::panic,
    clippy::unwrap_used,
    reason = "a test fails by panicking, also in its helpers"
)]

mod server;

use std::fs;
use std::path::Path;
use std::time::Duration;

use genset_hub::{
    Event, Fetched, Hub, HubError, HubSettings, ModelRef, Needs, PlannedFile, Progress, Silent,
};
use parking_lot::Mutex;
use tempfile::TempDir;

use server::{COMMIT, FakeHub, Fault};

const CONFIG: &[u8] = b"{\"model_type\": \"x\"}";
const WEIGHTS: &[u8] = &[7; 100_000];

const FILES: &[(&str, &[u8])] = &[
    ("README.md", b"no"),
    ("config.json", CONFIG),
    ("tokenizer.json", b"{}"),
    ("model.safetensors", WEIGHTS),
    ("model-Q8_0.gguf", b"gguf"),
];

const SHARDED: &[(&str, &[u8])] = &[
    ("config.json", CONFIG),
    ("model-00001-of-00002.safetensors", &[1; 1000]),
    ("model-00002-of-00002.safetensors", &[2; 1000]),
    (
        "model.safetensors.index.json",
        b"{\"weight_map\": {\"a\": \"model-00001-of-00002.safetensors\", \"b\": \"model-00002-of-00002.safetensors\"}}",
    ),
    ("tokenizer.json", b"{}"),
];

/// Only to fail instead of hanging.
const PATIENCE: Duration = Duration::from_secs(60);

fn settings(hub: &FakeHub, cache: &Path) -> HubSettings {
    HubSettings {
        endpoint: format!("http://{}", hub.address),
        cache: cache.to_owned(),
        token: None,
        is_offline: false,
        silence: Duration::from_secs(60),
        retry_pause: Duration::from_millis(1),
    }
}

fn offline(hub: &FakeHub, cache: &Path) -> HubSettings {
    HubSettings {
        is_offline: true,
        ..settings(hub, cache)
    }
}

async fn with_settings(
    settings: HubSettings,
    model: &str,
    needs: Needs,
) -> Result<Fetched, HubError> {
    let model: ModelRef = model.parse()?;
    Hub::new(settings).fetch(&model, needs, &Silent).await
}

async fn weights(settings: HubSettings, model: &str) -> Result<Fetched, HubError> {
    with_settings(settings, model, Needs::Weights).await
}

async fn fetch(hub: &FakeHub, cache: &TempDir, needs: Needs) -> Result<Fetched, HubError> {
    with_settings(settings(hub, cache.path()), "org/model", needs).await
}

#[track_caller]
fn assert_whole(fetched: &Fetched) {
    let weights = fs::read(fetched.path.join("model.safetensors")).unwrap();
    assert_eq!(weights, WEIGHTS);
}

fn folder() -> TempDir {
    tempfile::tempdir().unwrap()
}

#[tokio::test]
async fn a_model_lies_in_the_cache_as_the_hubs_own_tools_put_it() {
    let (hub, cache) = (FakeHub::start(FILES).await, folder());
    let fetched = fetch(&hub, &cache, Needs::Weights).await.unwrap();
    let repo = cache.path().join("models--org--model");
    assert_eq!(fetched.path, repo.join("snapshots").join(COMMIT));
    assert_eq!(fs::read(fetched.path.join("config.json")).unwrap(), CONFIG);
    assert_whole(&fetched);
    assert!(
        !fetched.path.join("README.md").exists(),
        "only what is needed"
    );
    assert!(
        !cache
            .path()
            .join("models--org--model/outside.json")
            .exists()
    );
    assert_eq!(fs::read_to_string(repo.join("refs/main")).unwrap(), COMMIT);
    let link = fs::read_link(fetched.path.join("config.json")).unwrap();
    assert!(link.starts_with("../../blobs"), "{link:?}");
    let before = hub.downloads().len();
    assert_eq!(before, 3);
    fetch(&hub, &cache, Needs::Weights).await.unwrap();
    assert_eq!(hub.downloads().len(), before, "nothing is fetched twice");

    let gguf = with_settings(
        settings(&hub, cache.path()),
        "org/model:q8_0",
        Needs::WeightsOrGguf,
    )
    .await
    .unwrap();
    assert_eq!(fs::read(&gguf.path).unwrap(), b"gguf");
    let listed = Hub::new(settings(&hub, cache.path()))
        .cache()
        .list()
        .unwrap();
    let [model] = &listed[..] else {
        panic!("{listed:?}")
    };
    assert_eq!(
        (model.repo.to_string().as_str(), model.is_partial),
        ("org/model", false)
    );
    assert!(model.bytes >= 100_000 && model.last_used.is_some());
    assert_eq!(model.gguf, ["model-Q8_0.gguf"]);
}

#[tokio::test]
async fn a_cut_download_goes_on_where_it_stood() {
    let (hub, cache) = (FakeHub::start(FILES).await, folder());
    let faults = [
        Fault::Cut(40_000),
        Fault::Status(503, "", None),
        Fault::Cut(10_000),
        Fault::Break(5_000),
    ];
    hub.fail("model.safetensors", &faults);
    let fetched = fetch(&hub, &cache, Needs::Weights).await.unwrap();
    assert_whole(&fetched);
    let downloads = hub.downloads().into_iter();
    let ranges = downloads.filter(|(path, ..)| path.ends_with("safetensors"));
    let ranges: Vec<_> = ranges
        .map(|(_, range, _)| range.unwrap_or_default())
        .collect();
    let expected = ["", "bytes=40000-", "bytes=40000-", "bytes=50000-"];
    assert_eq!(ranges[..4], expected);
    assert_eq!(ranges.len(), 5);
}

#[tokio::test]
async fn a_process_that_ended_leaves_what_the_next_goes_on_with() {
    let (hub, cache) = (FakeHub::start(FILES).await, folder());
    hub.fail("model.safetensors", &[Fault::Hang(50_000)]);
    let seen = Mutex::new(0);
    let settings = settings(&hub, cache.path());
    let model: ModelRef = "org/model".parse().unwrap();
    struct Seen<'a>(&'a Mutex<u64>, tokio::sync::Notify);
    impl Progress for Seen<'_> {
        fn tell(&self, event: Event<'_>) {
            if let Event::Received { bytes, .. } = event {
                let mut most = self.0.lock();
                *most = bytes.max(*most);
                if *most >= 50_000 {
                    self.1.notify_one();
                }
            }
        }
    }
    let progress = Seen(&seen, tokio::sync::Notify::new());
    let first = Hub::new(settings.clone());
    tokio::select! {
        fetched = first.fetch(&model, Needs::Weights, &progress) => panic!("{fetched:?}"),
        () = progress.1.notified() => {}
    }
    // The last of it is still written although its task has ended.
    let blobs = cache.path().join("models--org--model/blobs");
    let is_kept = || {
        let files = fs::read_dir(&blobs).unwrap().flatten();
        let mut sizes = files.filter_map(|file| Some(file.metadata().ok()?.len()));
        sizes.any(|bytes| bytes == 50_000)
    };
    let kept = async {
        while !is_kept() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(PATIENCE, kept).await.unwrap();
    let planned = Mutex::new(Vec::new());
    struct Planned<'a>(&'a Mutex<Vec<PlannedFile>>);
    impl Progress for Planned<'_> {
        fn tell(&self, event: Event<'_>) {
            if let Event::Planned(files) = event {
                self.0.lock().extend_from_slice(files);
            }
        }
    }
    Hub::new(settings)
        .fetch(&model, Needs::Weights, &Planned(&planned))
        .await
        .unwrap();
    let planned = planned.into_inner();
    let weights = planned
        .iter()
        .find(|file| file.name == "model.safetensors")
        .unwrap();
    assert_eq!((weights.bytes, weights.present_bytes), (100_000, 50_000));
    let downloads = hub.downloads();
    // Files are downloaded concurrently: another may be the last.
    let mut of_weights = downloads
        .iter()
        .filter(|download| download.0.ends_with("model.safetensors"));
    let last = of_weights.next_back().unwrap();
    assert_eq!(last.1.as_deref(), Some("bytes=50000-"), "{last:?}");
}

#[tokio::test]
async fn a_server_without_ranges_begins_anew() {
    let (hub, cache) = (FakeHub::start(FILES).await, folder());
    hub.fail("model.safetensors", &[Fault::Cut(40_000), Fault::NoRanges]);
    let fetched = fetch(&hub, &cache, Needs::Weights).await.unwrap();
    assert_whole(&fetched);
}

#[tokio::test]
async fn wrong_bytes_are_never_kept() {
    for faults in [
        &[Fault::Wrong][..],
        &[Fault::TooMany],
        &[Fault::Cut(10), Fault::Wrong, Fault::Wrong],
    ] {
        let (hub, cache) = (FakeHub::start(FILES).await, folder());
        hub.fail("model.safetensors", faults);
        let error = fetch(&hub, &cache, Needs::Weights).await.unwrap_err();
        assert!(
            matches!(
                error,
                HubError::WrongHash { .. } | HubError::BadAnswer { .. }
            ),
            "{error}"
        );
        let blobs = fs::read_dir(cache.path().join("models--org--model/blobs")).unwrap();
        let large = blobs.flatten().filter(|blob| blob.file_name().len() == 64);
        assert_eq!(large.count(), 0, "no blob under that name");
        fetch(&hub, &cache, Needs::Weights).await.unwrap();
    }
    // An older partial download is wrong; what arrives now is right.
    let (hub, cache) = (FakeHub::start(FILES).await, folder());
    fetch(&hub, &cache, Needs::Weights).await.unwrap();
    let repo = cache.path().join("models--org--model");
    let blob = fs::canonicalize(
        repo.join("snapshots")
            .join(COMMIT)
            .join("model.safetensors"),
    )
    .unwrap();
    fs::remove_file(&blob).unwrap();
    fs::write(blob.with_extension("incomplete"), [1; 500]).unwrap();
    // An old partial download of a file that the hub no longer has is useless.
    let gone = blob.with_file_name(format!("{}.incomplete", "a".repeat(64)));
    let left = fs::File::create(&gone).unwrap();
    left.set_modified(std::time::UNIX_EPOCH).unwrap();
    fetch(&hub, &cache, Needs::Weights).await.unwrap();
    assert!(!gone.exists());
    assert_eq!(fs::read(blob).unwrap(), WEIGHTS);
}

#[tokio::test]
async fn several_at_once_download_once() {
    let (hub, cache) = (FakeHub::start(FILES).await, folder());
    let all = (0..4).map(|_| fetch(&hub, &cache, Needs::Weights));
    for fetched in futures_util::future::join_all(all).await {
        assert_whole(&fetched.unwrap());
    }
    assert_eq!(hub.downloads().len(), 3, "each file once");
}

#[tokio::test]
async fn refusals_say_what_to_do() {
    let (hub, cache) = (FakeHub::start(FILES).await, folder());
    let ask = async |model: &str| {
        let error = weights(settings(&hub, cache.path()), model).await;
        error.unwrap_err().to_string()
    };
    let missing = ask("org/nothing").await;
    assert!(
        missing.contains("no model org/nothing, or it is private") && missing.contains("HF_TOKEN"),
        "{missing}"
    );
    let revision = ask("org/model@v9").await;
    assert!(revision.contains("no revision \"v9\""), "{revision}");
    let file = ask("org/model:Q8_0").await;
    assert!(file.contains("does not read"), "{file}");
    for (fault, expected) in [
        (Fault::Status(429, "", Some(3600)), "try again in 3600 s"),
        (Fault::Status(403, "", None), "is gated"),
        (
            Fault::Status(404, "RepoNotFound", None),
            "no model org/model",
        ),
    ] {
        hub.fail("api", &[fault]);
        let told = ask("org/model").await;
        assert!(told.contains(expected), "{told}");
    }
    hub.fail(
        "api",
        &[
            Fault::Status(429, "", Some(0)),
            Fault::Status(500, "", None),
        ],
    );
    fetch(&hub, &cache, Needs::Config).await.unwrap();
}

#[tokio::test]
async fn a_gated_model_wants_a_token_which_no_other_host_sees() {
    let (hub, cache) = (FakeHub::start(FILES).await, folder());
    hub.shared.lock().token = Some("hf_good".into());
    let error = fetch(&hub, &cache, Needs::Weights).await.unwrap_err();
    assert!(
        matches!(
            error,
            HubError::Gated {
                has_token: false,
                ..
            }
        ),
        "{error}"
    );
    assert!(error.to_string().contains("then set HF_TOKEN"), "{error}");
    let with = |token: &str| HubSettings {
        token: Some(token.into()),
        ..settings(&hub, cache.path())
    };
    let error = weights(with("hf_bad"), "org/model").await.unwrap_err();
    assert!(
        matches!(
            error,
            HubError::Gated {
                has_token: true,
                ..
            }
        ),
        "{error}"
    );
    weights(with("hf_good"), "org/model").await.unwrap();
    let downloads = hub.downloads();
    assert_eq!(downloads.len(), 3);
    assert!(
        downloads.iter().all(|(.., has_token)| !has_token),
        "{downloads:?}"
    );
}

#[tokio::test]
async fn what_is_there_does_without_the_hub() {
    let cache = folder();
    let hub = FakeHub::start(FILES).await;
    let alone = offline(&hub, cache.path());
    let error = weights(alone.clone(), "org/model").await.unwrap_err();
    assert!(matches!(error, HubError::Offline { .. }), "{error}");
    fetch(&hub, &cache, Needs::Config).await.unwrap();
    let error = weights(alone.clone(), "org/model").await.unwrap_err();
    assert!(
        matches!(error, HubError::Offline { .. }),
        "its weights are not there: {error}"
    );
    let fetched = fetch(&hub, &cache, Needs::Weights).await.unwrap();
    let seen = hub.shared.lock().seen.len();
    for model in ["org/model".to_owned(), format!("org/model@{COMMIT}")] {
        let known = weights(alone.clone(), &model).await.unwrap();
        assert_eq!(known.path, fetched.path);
    }
    let fixed = weights(settings(&hub, cache.path()), &format!("org/model@{COMMIT}")).await;
    assert!(fixed.unwrap().stale.is_none());
    assert_eq!(hub.shared.lock().seen.len(), seen, "a commit never changes");
    hub.fail("api", &[Fault::Status(503, "", None); 3]);
    let stale = fetch(&hub, &cache, Needs::Weights).await.unwrap();
    assert!(stale.stale.is_some() && stale.path == fetched.path);
}

#[tokio::test]
async fn a_whole_model_in_a_cache_that_cannot_be_written_does_with_the_hub_too() {
    let (hub, cache) = (FakeHub::start(FILES).await, folder());
    let fetched = fetch(&hub, &cache, Needs::Weights).await.unwrap();
    // Makes writing impossible for any user, even root: there are files in place of folders.
    let repo = cache.path().join("models--org--model");
    for name in ["refs", ".files"] {
        fs::remove_dir_all(repo.join(name)).unwrap();
        fs::write(repo.join(name), "").unwrap();
    }
    let again = fetch(&hub, &cache, Needs::Weights).await.unwrap();
    assert_eq!(again.path, fetched.path);
}

#[tokio::test]
async fn an_older_commit_that_is_whole_does_while_the_newest_cannot_come() {
    const OLDER: &str = "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa";
    let (hub, cache) = (FakeHub::start(FILES).await, folder());
    fetch(&hub, &cache, Needs::Weights).await.unwrap();
    let repo = cache.path().join("models--org--model");
    for folder in ["snapshots", ".files"] {
        let folder = repo.join(folder);
        fs::rename(folder.join(COMMIT), folder.join(OLDER)).unwrap();
    }
    fs::write(repo.join("refs/main"), OLDER).unwrap();
    let newer = ("model.safetensors".to_owned(), (vec![8; 1000], true));
    hub.shared.lock().files.extend([newer]);

    // The list arrives, the files do not.
    hub.fail("model.safetensors", &[Fault::Status(503, "", None); 8]);
    let kept = fetch(&hub, &cache, Needs::Weights).await.unwrap();
    assert_eq!((kept.commit.as_str(), kept.stale.is_some()), (OLDER, true));
    // Only a part of the latest commit was requested, and now nothing arrives.
    fetch(&hub, &cache, Needs::Config).await.unwrap();
    assert_eq!(fs::read_to_string(repo.join("refs/main")).unwrap(), COMMIT);
    let unreachable = [Fault::Status(503, "", None); 3];
    hub.fail("api", &unreachable);
    let kept = fetch(&hub, &cache, Needs::Weights).await.unwrap();
    assert_eq!((kept.commit.as_str(), kept.stale.is_some()), (OLDER, true));

    // Never a commit other than the requested one, or another revision's.
    let online = settings(&hub, cache.path());
    hub.fail("api", &unreachable);
    let named = format!("org/model@{COMMIT}");
    let error = weights(online, &named).await;
    assert!(error.unwrap_err().is_passing());
    // Nor any commit for a revision that was never here.
    hub.fail("api", &unreachable);
    let online = settings(&hub, cache.path());
    let error = weights(online, "org/model@v2").await;
    assert!(error.unwrap_err().is_passing());
    fs::write(repo.join("refs/v1"), OLDER).unwrap();
    hub.fail("api", &unreachable);
    let error = fetch(&hub, &cache, Needs::Weights).await.unwrap_err();
    assert!(error.is_passing(), "{error}");
}

/// Starts to fetch a model of [`SHARDED`] by its commit, and stops when only its configuration and its first shard are there.
async fn stopped_midway(hub: &FakeHub, cache: &TempDir) {
    struct Done(Mutex<u32>, tokio::sync::Notify);
    impl Progress for Done {
        fn tell(&self, event: Event<'_>) {
            if let Event::Done { .. } = event {
                let mut count = self.0.lock();
                *count += 1;
                if *count == 2 {
                    self.1.notify_one();
                }
            }
        }
    }
    for (path, _) in &SHARDED[2..] {
        hub.fail(path, &[Fault::Hang(0); 8]);
    }
    let model: ModelRef = format!("org/model@{COMMIT}").parse().unwrap();
    let progress = Done(Mutex::new(0), tokio::sync::Notify::new());
    let first = Hub::new(settings(hub, cache.path()));
    tokio::select! {
        fetched = first.fetch(&model, Needs::Weights, &progress) => panic!("{fetched:?}"),
        () = progress.1.notified() => {}
    }
    for (path, _) in SHARDED {
        hub.fail(path, &[]);
    }
}

#[tokio::test]
async fn a_commit_that_came_in_part_is_not_taken_for_whole() {
    let (hub, cache) = (FakeHub::start(SHARDED).await, folder());
    let model = format!("org/model@{COMMIT}");
    let online = settings(&hub, cache.path());
    let alone = offline(&hub, cache.path());
    stopped_midway(&hub, &cache).await;
    let lists = cache.path().join("models--org--model/.files");
    for has_list in [true, false] {
        if !has_list {
            // As an older version left it.
            fs::remove_dir_all(&lists).unwrap();
        }
        let error = weights(alone.clone(), &model).await;
        let error = error.unwrap_err();
        assert!(matches!(error, HubError::Offline { .. }), "{error}");
        hub.fail(SHARDED[2].0, &[Fault::Status(404, "", None); 8]);
        let error = weights(online.clone(), &model).await;
        let error = error.unwrap_err();
        assert!(matches!(error, HubError::BadAnswer { .. }), "{error}");
        hub.fail(SHARDED[2].0, &[]);
    }
    let fetched = weights(online, &model).await.unwrap();
    for (path, content) in SHARDED {
        assert_eq!(fs::read(fetched.path.join(path)).unwrap(), *content);
    }
}

#[tokio::test]
async fn a_commit_that_another_tool_fetched_is_asked_for_once() {
    let (hub, cache) = (FakeHub::start(SHARDED).await, folder());
    let model = format!("org/model@{COMMIT}");
    let online = settings(&hub, cache.path());
    let alone = offline(&hub, cache.path());
    let fetched = weights(online.clone(), &model).await;
    let path = fetched.unwrap().path;
    // Other tools leave no list.
    fs::remove_dir_all(cache.path().join("models--org--model/.files")).unwrap();
    let known = weights(alone, &model).await;
    assert_eq!(known.unwrap().path, path);
    let (downloads, seen) = (hub.downloads().len(), hub.shared.lock().seen.len());
    for _ in 0..2 {
        let known = weights(online.clone(), &model).await;
        assert_eq!(known.unwrap().path, path);
        assert_eq!(hub.shared.lock().seen.len(), seen + 1, "the list, once");
    }
    assert_eq!(hub.downloads().len(), downloads, "no file again");
}

#[tokio::test]
async fn a_model_in_one_file_is_whole_beside_an_old_list_of_shards() {
    let (_, index) = SHARDED[3];
    let files = [FILES, &[("model.safetensors.index.json", index)]].concat();
    let (hub, cache) = (FakeHub::start(&files).await, folder());
    fetch(&hub, &cache, Needs::Weights).await.unwrap();
    // Other tools leave no list of the files.
    fs::remove_dir_all(cache.path().join("models--org--model/.files")).unwrap();
    let alone = offline(&hub, cache.path());
    let fetched = weights(alone, "org/model").await;
    assert!(fetched.is_ok(), "{fetched:?}");
}

#[tokio::test]
async fn lengths_without_end_find_no_room() {
    let (hub, cache) = (FakeHub::start(FILES).await, folder());
    for path in ["tokenizer.json", "model.safetensors"] {
        hub.shared.lock().sizes.insert(path.into(), u64::MAX);
    }
    let error = fetch(&hub, &cache, Needs::Weights).await.unwrap_err();
    assert!(matches!(error, HubError::NoRoom { .. }), "{error}");
    assert!(hub.downloads().is_empty());
}

#[tokio::test]
async fn a_silent_hub_is_given_up() {
    let (hub, cache) = (FakeHub::start(FILES).await, folder());
    hub.fail("model.safetensors", &[Fault::Hang(0); 6]);
    let impatient = HubSettings {
        silence: Duration::from_millis(100),
        ..settings(&hub, cache.path())
    };
    let error = weights(impatient, "org/model").await.unwrap_err();
    assert!(matches!(error, HubError::Unreachable { .. }), "{error}");
    assert!(error.to_string().contains("silent for too long"), "{error}");
}

#[tokio::test]
async fn a_model_is_removed_whole() {
    let (hub, cache) = (FakeHub::start(FILES).await, folder());
    fetch(&hub, &cache, Needs::Weights).await.unwrap();
    let kept = Hub::new(settings(&hub, cache.path()));
    let repo = "org/model".parse().unwrap();
    assert!(kept.cache().remove(&repo).unwrap().unwrap() >= 100_000);
    assert_eq!(kept.cache().remove(&repo).unwrap(), None);
    assert!(kept.cache().list().unwrap().is_empty());
    let left: Vec<_> = fs::read_dir(cache.path())
        .unwrap()
        .flatten()
        .map(|entry| entry.file_name())
        .collect();
    assert!(left.iter().all(|name| name == ".locks"), "{left:?}");
}
