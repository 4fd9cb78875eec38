//! README.md shows current code: the blocks between its markers equal the files they were copied from. Rust in the guides
//! compiles.

use std::process::Command;

#[test]
fn code_in_the_readme_is_the_code() {
    let checked = Command::new(env!("CARGO_BIN_EXE_xtask"))
        .args(["readme", "--check"])
        .output()
        .unwrap();
    assert!(
        checked.status.success(),
        "{}",
        String::from_utf8_lossy(&checked.stderr)
    );
}

/// Rust in the guides compiles as doc tests of `genset-frontend`, which names each such guide.
#[test]
fn guides_with_rust_are_doc_tests() {
    let command = cargo_metadata::MetadataCommand::new().no_deps().exec();
    let root = command.unwrap().workspace_root;
    let doc_tests = std::fs::read_to_string(root.join("frontend/src/lib.rs")).unwrap();
    let mut guides = 0;
    for entry in std::fs::read_dir(root.join("docs/guide")).unwrap() {
        let path = entry.unwrap().path();
        if std::fs::read_to_string(&path).unwrap().contains("```rust") {
            let name = path.file_name().unwrap().to_str().unwrap();
            let included = doc_tests.contains(&format!("/docs/guide/{name}\")"));
            assert!(included, "no doc test compiles the Rust code of {name}");
            guides += 1;
        }
    }
    assert!(guides >= 2, "only {guides} guides with Rust were found");
}

/// Only the workspace's manifest has the repository's address. While it has none, README.md says so and no file guesses one,
/// which somebody else may own.
#[test]
fn the_repository_has_one_address_or_none() {
    let metadata = cargo_metadata::MetadataCommand::new().exec().unwrap();
    let packages = metadata.workspace_packages();
    let address = packages[0].repository.clone().unwrap_or_default();
    let readme = std::fs::read_to_string(metadata.workspace_root.join("README.md")).unwrap();
    if address.is_empty() {
        assert!(readme.contains("This repository has no public address yet"));
    } else {
        assert!(readme.contains(&format!("git clone {address}")));
    }
    for package in packages {
        let named = package.repository.clone().unwrap_or_default();
        assert_eq!(named, address, "{}", package.name);
    }
    let guesses = Command::new("git")
        .args(["grep", "--line-number", "--ignore-case", "-E"])
        .args(["(github|gitlab)[.]com/[a-z0-9_-]*/?genset", "--", "."])
        .current_dir(&metadata.workspace_root)
        .output()
        .unwrap();
    let guesses = String::from_utf8_lossy(&guesses.stdout);
    let strangers: Vec<_> = guesses
        .lines()
        .filter(|line| address.is_empty() || !line.contains(&address))
        .collect();
    assert!(strangers.is_empty(), "{strangers:#?}");
}
