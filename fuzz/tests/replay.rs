//! Replays the corpora in `fuzz/corpus` through the targets, so that what fuzzing found once is not broken again.
#![expect(clippy::unwrap_used, reason = "a test says what failed by panicking")]

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use genset_fuzz::TARGETS;

/// The limit per target. A committed corpus is for replay; a large one can be generated again.
const MAX_FILES: usize = 60;
const MAX_BYTES: u64 = 200_000;

fn here(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

fn names(folder: &str) -> BTreeSet<String> {
    let entries = fs::read_dir(here(folder)).unwrap();
    let path = entries.map(|entry| entry.unwrap().path());
    path.map(|path| path.file_stem().unwrap().to_str().unwrap().to_owned())
        .collect()
}

#[test]
fn every_target_has_a_binary_and_a_corpus_and_there_are_no_others() {
    let targets: BTreeSet<String> = TARGETS.iter().map(|it| it.name.to_owned()).collect();
    assert_eq!(names("libfuzzer/src/bin"), targets);
    assert_eq!(names("corpus"), targets);
    for name in &targets {
        let source = fs::read_to_string(here(&format!("libfuzzer/src/bin/{name}.rs"))).unwrap();
        assert!(source.contains(&format!("::{name});")), "{source}");
    }
}

#[test]
fn corpora_are_small() {
    for target in TARGETS {
        let entries = fs::read_dir(here("corpus").join(target.name)).unwrap();
        let sizes: Vec<u64> = entries
            .map(|entry| entry.unwrap().metadata().unwrap().len())
            .collect();
        let bytes: u64 = sizes.iter().sum();
        assert!(
            !sizes.is_empty() && sizes.len() <= MAX_FILES,
            "{}",
            target.name
        );
        assert!(bytes <= MAX_BYTES, "{}: {bytes} bytes", target.name);
    }
}

#[test]
fn no_input_of_a_corpus_makes_its_target_panic() {
    // One thread per target: a slow one does not delay the others.
    std::thread::scope(|scope| {
        for target in TARGETS {
            let name = target.name.to_owned();
            let replay = move || {
                for entry in fs::read_dir(here("corpus").join(target.name)).unwrap() {
                    (target.run)(&fs::read(entry.unwrap().path()).unwrap());
                }
                // The empty input needs no file in a corpus.
                (target.run)(b"");
            };
            std::thread::Builder::new()
                .name(name)
                .spawn_scoped(scope, replay)
                .unwrap();
        }
    });
}
