//! Peers that do not know the fleet's secret.

use std::io::Write;

use tempfile::NamedTempFile;

use crate::fleet::{Fleet, is_listed, until_listed};
use crate::load::ask;
use crate::meeting::Meeting;
use crate::support::until;

pub(crate) async fn a_frontend_with_another_secret_serves_nothing<M: Meeting>(fleet: Fleet<M>) {
    let (right, right_flag) = secret("the secret of the fleet");
    let (wrong, wrong_flag) = secret("what a stranger guesses");
    let worker = fleet.worker(&[&right_flag]).await;
    let mut stranger = fleet.frontend(&[&wrong_flag]).await;
    let mut nobody = fleet.frontend(&[]).await;
    let frontend = fleet.frontend(&[&right_flag]).await;
    until_listed(&frontend).await;
    assert_eq!(ask(frontend.address).await, Ok(()));
    for refused in [&mut stranger, &mut nobody] {
        until(async || refused.log().contains("secret")).await;
        assert!(!is_listed(refused).await);
        let refusal = ask(refused.address).await.expect_err("it serves nothing");
        assert!(refusal.starts_with("503 "), "{refusal}");
    }
    assert!(worker.log().contains("secret"), "{}", worker.log());
    drop((right, wrong));
}

fn secret(text: &str) -> (NamedTempFile, String) {
    let mut file = NamedTempFile::new().expect("a file");
    file.write_all(text.as_bytes()).expect("a file");
    let flag = format!("--wire-secret-file={}", file.path().display());
    (file, flag)
}
