//! Runs while the disk or the models are unavailable.

use std::fs::File;
use std::num::NonZeroUsize;
use std::path::Path;

use genset_runtime::Runtime;
use tokio::time::timeout;

use super::*;
use crate::batch::store::tests::record;
use crate::config::{BatchConfig, FrontendConfig};

/// The memory budget of all requests.
const MEMORY_BYTES: usize = 1 << 20;

/// A batch of one request, whose model no worker serves.
struct Site {
    _runtime: Runtime,
    batches: Batches,
    record: BatchRecord,
    batch: Arc<Mutex<OpenBatch>>,
}

impl Site {
    fn new(folder: &Path) -> Self {
        let config = FrontendConfig {
            memory_budget_bytes: MEMORY_BYTES,
            max_stored_bytes: 0,
            ..FrontendConfig::default()
        };
        let runtime = Runtime::in_process();
        let models = Models::follow(&runtime, &config);
        let routes = LocalFrontend::new(&runtime, models.clone(), config);
        let store = BatchStore::open(folder.to_owned(), BatchConfig::default()).unwrap();
        let record = BatchRecord {
            owner: None,
            ..record("batch_0", "nobody")
        };
        let line =
            r#"{"custom_id":"a","url":"/v1/completions","body":{"model":"m","prompt":"Hello"}}"#;
        std::fs::write(store.content(&record.input_file_id), line).unwrap();
        let batch = OpenBatch::open(&store, &record).unwrap();
        let asked = (routes, models);
        Self {
            batches: Batches::new(store, asked, Duration::ZERO, None, Stops::default()),
            _runtime: runtime,
            record,
            batch: Arc::new(Mutex::new(batch)),
        }
    }

    /// The same with a stored batch that expires at `expires_at`. Its input cannot be read: it is a folder.
    fn unreadable(folder: &Path, expires_at: u64) -> Self {
        let mut kept = BatchRecord {
            owner: None,
            ..record("batch_0", "nobody")
        };
        kept.times.expires_at = expires_at;
        let batches = folder.join("batches");
        std::fs::create_dir(&batches).unwrap();
        let kept = serde_json::to_vec(&kept).unwrap();
        std::fs::write(batches.join("batch_0.json"), kept).unwrap();
        let site = Self::new(folder);
        let input = site.batches.store.content(&site.record.input_file_id);
        std::fs::remove_file(&input).unwrap();
        std::fs::create_dir(&input).unwrap();
        site
    }

    /// The stored record of its batch.
    fn kept(&self) -> BatchRecord {
        self.batches.store.batch("batch_0", None).unwrap()
    }

    /// Its run, which waits for no model that was never served.
    fn run(&self) -> BatchRun<'_> {
        BatchRun {
            record: &self.record,
            batch: &self.batch,
            places: self.batches.places.of(None),
            any_until: Instant::now(),
            seen: SeenModels::new(self.batches.models.clone()),
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_line_is_read_again_until_the_disk_gives_it_and_holds_no_place_meanwhile() {
    let folder = tempfile::tempdir().unwrap();
    let mut site = Site::new(folder.path());
    site.batches.places = Places::new(NonZeroUsize::MIN);
    let run = site.run();
    // A folder cannot be read as a file.
    let unreadable = || File::open(folder.path()).unwrap();
    site.batch.lock().read_from(unreadable);
    let mut line = Box::pin(site.batches.line(&run, 0));
    let waited = timeout(DISK_PAUSE / 2, &mut line).await;
    assert!(waited.is_err(), "{waited:?}");
    let others = site.batches.places.of(Some("another"));
    let place = timeout(Duration::ZERO, others.take()).await;
    drop(place.expect("the line holds a place while it waits"));
    let waited = timeout(4 * DISK_PAUSE, &mut line).await;
    assert!(waited.is_err(), "{waited:?}");
    let input = site.batches.store.content(&site.record.input_file_id);
    let readable = || File::open(&input).unwrap();
    site.batch.lock().read_from(readable);
    let end = line.await;
    assert!(matches!(end, LineEnd::Noted), "{end:?}");
}

#[tokio::test(start_paused = true)]
async fn a_line_waits_for_memory_and_holds_no_place_meanwhile() {
    let folder = tempfile::tempdir().unwrap();
    let mut site = Site::new(folder.path());
    site.batches.places = Places::new(NonZeroUsize::MIN);
    let run = site.run();
    let mut of_others = site.batches.routes.memory();
    of_others.grow(MEMORY_BYTES).unwrap();
    let mut line = Box::pin(site.batches.line(&run, 0));
    // Between two attempts, which hold a place for a moment.
    let waited = timeout(DISK_PAUSE / 2, &mut line).await;
    assert!(waited.is_err(), "{waited:?}");
    let others = site.batches.places.of(Some("another"));
    let place = timeout(Duration::ZERO, others.take()).await;
    drop(place.expect("the line holds a place while it waits"));
    drop(of_others);
    let end = line.await;
    assert!(matches!(end, LineEnd::Noted), "{end:?}");
    assert_eq!(site.batches.routes.memory().budget().used(), 0);
}

#[tokio::test(start_paused = true)]
async fn a_batch_that_is_answered_neither_waits_for_a_model_nor_expires() {
    let folder = tempfile::tempdir().unwrap();
    let mut site = Site::new(folder.path());
    let line = unasked_line("1".into(), "a".into(), "unreadable", "It is.");
    site.batch.lock().note(0, &line).unwrap();
    for expires_at in [site.record.times.expires_at, 0] {
        site.record.times.expires_at = expires_at;
        let cancelled = CancellationToken::new();
        let batches = &site.batches;
        let end = batches.answer(&site.record, &site.batch, cancelled, true);
        assert_eq!(end.await, End::Answered);
    }
}

#[tokio::test(start_paused = true)]
async fn a_batch_whose_input_cannot_be_read_is_cancelled() {
    let folder = tempfile::tempdir().unwrap();
    let site = Site::unreadable(folder.path(), u64::MAX);
    let mut run = Box::pin(site.batches.run("batch_0", true));
    let waited = timeout(4 * DISK_PAUSE, &mut run).await;
    assert!(waited.is_err(), "{:?}", site.kept());
    site.batches.store.cancel("batch_0", None).unwrap();
    timeout(DISK_PAUSE, run).await.expect("it waits on");
    assert_eq!(site.kept().status, BatchStatus::Cancelled);
}

#[tokio::test(start_paused = true)]
async fn a_batch_whose_input_cannot_be_read_fails_when_its_time_is_over() {
    let folder = tempfile::tempdir().unwrap();
    let site = Site::unreadable(folder.path(), 0);
    let run = site.batches.run("batch_0", true);
    timeout(4 * DISK_PAUSE, run).await.expect("it waits on");
    let kept = site.kept();
    assert_eq!(kept.status, BatchStatus::Failed);
    assert_eq!(kept.errors, [unreadable_input()]);
}

#[tokio::test(start_paused = true)]
async fn a_batch_that_is_cancelled_is_cancelled_even_if_its_input_is_wrong() {
    let folder = tempfile::tempdir().unwrap();
    let site = Site::unreadable(folder.path(), u64::MAX);
    let input = site.batches.store.content(&site.record.input_file_id);
    std::fs::remove_dir(&input).unwrap();
    std::fs::write(&input, "no request\n").unwrap();
    site.batches.store.cancel("batch_0", None).unwrap();
    site.batches.run("batch_0", false).await;
    assert_eq!(site.kept().status, BatchStatus::Cancelled);
}
