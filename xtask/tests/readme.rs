//! README.md shows code as it is: the blocks between its markers equal the files they were copied from.

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
