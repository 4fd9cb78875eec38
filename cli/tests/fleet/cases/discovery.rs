//! Workers and frontends find each other, and models appear and disappear with their workers.

use crate::fleet::{Fleet, is_listed, until_all_answer, until_listed, until_unlisted};
use crate::load::{ask, burst};
use crate::meeting::Meeting;
use crate::support::{soon, tiny_chat, until};

/// The number of attempts to hit a model's first moment.
const FIRST_MOMENTS: usize = 20;

pub(crate) async fn workers_and_frontend_find_each_other<M: Meeting>(fleet: Fleet<M>) {
    let frontend = fleet.frontend(&[]).await;
    assert!(!is_listed(&frontend).await);
    let [one, two] = fleet.two_workers(&[]).await;
    until_listed(&frontend).await;
    until_all_answer(&frontend, &[&one, &two]).await;
    assert_eq!(burst(&frontend, 100).await, [""; 0]);
    frontend.stop().await;
    one.stop().await;
    two.stop().await;
}

pub(crate) async fn a_listed_model_is_routable_from_the_first_moment<M: Meeting>(fleet: Fleet<M>) {
    let frontend = fleet.frontend(&[]).await;
    for moment in 0..FIRST_MOMENTS {
        let answered = soon(async {
            // Poll without a pause: the timing is what matters.
            while !is_listed(&frontend).await {}
            ask(frontend.address).await
        });
        let (worker, answered) = tokio::join!(fleet.worker(&[]), answered);
        assert_eq!(answered, Ok(()), "the {moment}th time");
        // Alternate, so that a frontend also sees a new worker while it still lists a dead one.
        if moment % 5 == 4 {
            worker.kill().await;
        } else {
            worker.stop().await;
        }
        until_unlisted(&frontend).await;
    }
}

pub(crate) async fn a_model_goes_with_its_last_worker_and_comes_back<M: Meeting>(fleet: Fleet<M>) {
    let frontend = fleet.frontend(&["--model-linger=0.5"]).await;
    for is_killed in [false, true] {
        let worker = fleet.worker(&[]).await;
        until_listed(&frontend).await;
        assert_eq!(ask(frontend.address).await, Ok(()));
        if is_killed {
            worker.kill().await;
        } else {
            worker.stop().await;
        }
        // It is listed until discovery has forgotten the worker; requests meanwhile receive a retryable error.
        until(async || {
            if let Err(refusal) = ask(frontend.address).await {
                let is_clear = refusal.starts_with("503 ")
                    || refusal.starts_with("502 ")
                    || is_unknown(&refusal);
                assert!(is_clear, "{refusal}");
            }
            !is_listed(&frontend).await
        })
        .await;
        // At first the model is expected back, then it is unknown.
        until(async || {
            let refusal = ask(frontend.address).await.expect_err("nobody is there");
            let is_unknown = is_unknown(&refusal);
            assert!(is_unknown || refusal.starts_with("503 "), "{refusal}");
            is_unknown
        })
        .await;
        assert_eq!(frontend.get("/ready").await.status, 503);
    }
    let _worker = fleet.worker(&[]).await;
    until_listed(&frontend).await;
    assert_eq!(ask(frontend.address).await, Ok(()));
}

fn is_unknown(refusal: &str) -> bool {
    refusal.starts_with("404 ")
        && refusal.contains("model_not_found")
        && refusal.contains("'tiny-chat'")
}

pub(crate) async fn a_frontend_needs_no_files_of_the_model<M: Meeting>(fleet: Fleet<M>) {
    // The worker's folder is also deleted, once the worker has read it.
    let folder = tempfile::tempdir().expect("a folder");
    let model = folder.path().join("tiny-chat");
    std::fs::create_dir(&model).expect("a folder");
    for file in std::fs::read_dir(tiny_chat()).expect("a model") {
        let file = file.expect("a file");
        if !file.path().is_file() {
            continue;
        }
        std::fs::copy(file.path(), model.join(file.file_name())).expect("a copy");
    }
    let path = model.display().to_string();
    let _worker = fleet.worker(&[&path]).await;
    drop(folder);
    let empty = tempfile::tempdir().expect("a folder");
    let mut command = fleet.frontend_command(&[]);
    command.current_dir(empty.path());
    let frontend = crate::support::Server::spawn(command).await;
    until_listed(&frontend).await;
    assert_eq!(ask(frontend.address).await, Ok(()));
}

/// The dead worker is listed until its lease ends, and may be the first that a frontend asks for the model's files.
pub(crate) async fn a_frontend_that_comes_after_a_death_serves_at_once<M: Meeting>(
    fleet: Fleet<M>,
) {
    for _ in 0..4 {
        let [dead, _alive] = fleet.two_workers(&[]).await;
        dead.kill().await;
        let frontend = fleet.frontend(&[]).await;
        until_listed(&frontend).await;
        assert_eq!(ask(frontend.address).await, Ok(()));
        let log = frontend.log();
        assert!(!log.contains("ERROR"), "{log}");
    }
}
