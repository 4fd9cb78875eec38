//! Checks free disk space before the tests. A build that runs out of it fails with compiler and linker errors that do not mention
//! the disk.

use std::path::Path;

use anyhow::{Context as _, bail};

use crate::repo::Repo;

/// The size of a complete target directory, with a reserve.
const FROM_NOTHING: u64 = 10 * GIB;

/// The growth of a target directory that already has a build.
const AGAIN: u64 = 4 * GIB;

const GIB: u64 = 1 << 30;

/// Returns an error if the disk has too little space.
///
/// # Errors
/// There is less space than the tests need, or the space cannot be determined.
pub(crate) fn ensure(repo: &Repo) -> anyhow::Result<()> {
    let has_built = repo.target().join("debug/deps").exists();
    let needed = if has_built { AGAIN } else { FROM_NOTHING };
    // The target directory may not exist yet, and may be on another disk than the repository.
    let place = repo.target().ancestors().find(|place| place.exists());
    check(place.unwrap_or(repo.root()), needed)
}

fn check(place: &Path, needed: u64) -> anyhow::Result<()> {
    let status = rustix::fs::statvfs(place)
        .with_context(|| format!("cannot tell how much room {} has", place.display()))?;
    let free = status.f_bavail.saturating_mul(status.f_frsize);
    let shown = format!("{} has {:.1} GiB free", place.display(), gib(free));
    if free < needed {
        bail!(
            "{shown}, and building and testing takes {:.0} GiB; make room, or set CARGO_TARGET_DIR to a folder on a larger disk",
            gib(needed)
        );
    }
    eprintln!("{shown}");
    Ok(())
}

#[expect(clippy::cast_precision_loss, reason = "shown to a person")]
fn gib(bytes: u64) -> f64 {
    bytes as f64 / GIB as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn too_little_room_is_refused_with_both_figures() {
        check(Path::new("."), 1).unwrap();
        let error = check(Path::new("."), u64::MAX).unwrap_err().to_string();
        assert!(
            error.starts_with(". has ") && error.contains("takes 17179869184 GiB"),
            "{error}"
        );
    }

    #[test]
    fn a_place_that_is_not_there_is_named() {
        let error = check(Path::new("/no/such/place"), 1).unwrap_err();
        assert!(error.to_string().contains("/no/such/place"), "{error}");
    }
}
