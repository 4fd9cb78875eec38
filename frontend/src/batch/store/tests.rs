//! Which batches and answers are kept, and which batches a page has.

use super::kept::MAX_ENDED_BATCHES;
use super::*;
use crate::batch::records::BatchTimes;

pub(crate) fn record(id: &str, owner: &str) -> BatchRecord {
    BatchRecord {
        id: id.into(),
        owner: Some(owner.into()),
        endpoint: "/v1/completions".into(),
        input_file_id: "file-0".into(),
        completion_window: "24h".into(),
        status: BatchStatus::Validating,
        errors: Vec::new(),
        output_file_id: None,
        error_file_id: None,
        times: BatchTimes::begin(3600),
        request_counts: Counts::default(),
        metadata: None,
        output_seconds: None,
    }
}

/// A store of these batches. Their records are not synced to the disk, which takes long for many.
fn store_of(folder: &Path, records: &[BatchRecord]) -> BatchStore {
    let batches = folder.join("batches");
    fs::create_dir_all(&batches).unwrap();
    for record in records {
        let path = batches.join(format!("{}.json", record.id));
        fs::write(path, serde_json::to_vec(record).unwrap()).unwrap();
    }
    BatchStore::open(folder.to_owned(), BatchConfig::default()).unwrap()
}

#[test]
fn answers_that_are_counted_while_a_record_is_written_stay_counted() {
    let folder = tempfile::tempdir().unwrap();
    let store = store_of(folder.path(), &[record("batch_0", "a")]);
    let counts = Counts {
        total: 2,
        completed: 1,
        failed: 0,
    };
    let enter = |record: &mut BatchRecord| {
        store.count("batch_0", counts);
        record.enter(BatchStatus::Cancelling);
    };
    store.update("batch_0", enter).unwrap();
    let kept = store.batch("batch_0", Some("a")).unwrap();
    assert_eq!(kept.status, BatchStatus::Cancelling);
    assert_eq!(kept.request_counts, counts);
}

#[test]
fn a_batch_is_cancelled_while_the_disk_takes_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let store = store_of(folder.path(), &[record("batch_0", "a")]);
    let (_, cancelled) = store.run_of("batch_0").unwrap();
    fs::remove_dir_all(folder.path().join("batches")).unwrap();
    let kept = store.cancel("batch_0", Some("a")).unwrap().unwrap();
    assert_eq!(kept.status, BatchStatus::Cancelling);
    assert!(cancelled.is_cancelled());
    // Nothing is written or logged again: the run does it.
    fs::create_dir(folder.path().join("batches")).unwrap();
    let again = store.cancel("batch_0", Some("a")).unwrap().unwrap();
    assert_eq!(again.status, BatchStatus::Cancelling);
    assert!(!folder.path().join("batches/batch_0.json").exists());
}

#[test]
fn the_oldest_batch_is_forgotten_when_one_ends() {
    let folder = tempfile::tempdir().unwrap();
    let mut records = vec![record("batch_0", "b")];
    records.extend((0..MAX_ENDED_BATCHES).map(|index| record(&format!("batch_{index:05}"), "a")));
    for record in &mut records {
        record.enter(BatchStatus::Completed);
    }
    records.push(record("batch_99999", "a"));
    let store = store_of(folder.path(), &records);
    let count = |owner: &str| store.batches(Some(owner), None, usize::MAX).len();
    let finalizing = |record: &mut BatchRecord| record.enter(BatchStatus::Finalizing);
    store.update("batch_99999", finalizing).unwrap();
    assert_eq!(count("a"), MAX_ENDED_BATCHES + 1, "one has not ended");
    let failed = |record: &mut BatchRecord| record.enter(BatchStatus::Failed);
    store.update("batch_99999", failed).unwrap();
    assert_eq!(count("a"), MAX_ENDED_BATCHES);
    assert!(store.batch("batch_00000", Some("a")).is_none());
    assert!(!store.batch_record("batch_00000").exists());
    assert!(store.batch("batch_00001", Some("a")).is_some());
    assert!(store.batch("batch_99999", Some("a")).is_some());
    assert_eq!(count("b"), 1, "another's older one stays");
}

#[test]
fn a_page_has_the_last_of_an_owners_batches() {
    let folder = tempfile::tempdir().unwrap();
    let records = [("1", "a"), ("2", "b"), ("3", "a"), ("4", "a")];
    let records = records.map(|(id, owner)| record(id, owner));
    let store = store_of(folder.path(), &records);
    let page = |before: Option<&str>, most: usize| {
        let page = store.batches(Some("a"), before, most);
        page.iter()
            .map(|batch| batch.id.clone())
            .collect::<Vec<_>>()
    };
    assert_eq!(page(None, 2), ["3", "4"]);
    assert_eq!(page(None, 9), ["1", "3", "4"]);
    assert_eq!(page(Some("4"), 1), ["3"]);
    assert_eq!(page(Some("3"), 9), ["1"]);
}

#[test]
fn answers_stay_while_the_record_of_their_batch_cannot_be_read() {
    let folder = tempfile::tempdir().unwrap();
    let batches = folder.path().join("batches");
    fs::create_dir(&batches).unwrap();
    for name in ["batch_0.json", "batch_0.part", "batch_1.part"] {
        fs::write(batches.join(name), "{").unwrap();
    }
    let store = store_of(folder.path(), &[]);
    let are_kept = |id: &str| store.notes(id).exists();
    assert!(are_kept("batch_0") && store.batch_record("batch_0").exists());
    assert!(!are_kept("batch_1"), "it has no record");
}
