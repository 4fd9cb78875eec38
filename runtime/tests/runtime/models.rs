//! The model directory: which models live workers serve, and their files.

use std::sync::Arc;

use genset_backend_common::ports::Generate;
use genset_backend_common::{Artifact, ArtifactRef, ErrorKind};
use genset_runtime::{LiveModel, ModelDirectory, SelectionMode};

use crate::support::{PATIENCE, ctx, finish, request, runtime, sample, soon, start, worker_config};

/// Waits for the only model.
async fn model(directory: &ModelDirectory) -> LiveModel {
    let mut models = directory.subscribe();
    let some = soon(models.wait_for(|models| !models.is_empty())).await;
    some.unwrap().values().next().unwrap().clone()
}

#[tokio::test]
async fn a_model_is_there_while_a_worker_serves_it() {
    let (runtime, _) = runtime();
    let directory = ModelDirectory::follow(&runtime);
    assert!(directory.subscribe().borrow().is_empty());
    let mut config = worker_config(Vec::new());
    config.model_name = Some("mine".into());
    let worker = start(&runtime, 1, sample(0), config).await;
    let live = model(&directory).await;
    assert_eq!(
        (live.card.name.as_str(), live.endpoint.to_string()),
        ("mine", "genset.backend.generate".into())
    );
    let client = directory
        .client(&live, SelectionMode::Random, PATIENCE)
        .await
        .unwrap();
    let outputs = client.generate(request(5), ctx()).await.unwrap();
    assert_eq!(finish(outputs).await.unwrap().completion_tokens, 5);

    soon(worker.shutdown()).await;
    let mut models = directory.subscribe();
    soon(models.wait_for(|models| models.is_empty()))
        .await
        .unwrap();
}

#[tokio::test]
async fn artifacts_are_fetched_by_hash_whatever_their_size() {
    let (runtime, _) = runtime();
    let sizes = [0, 1, 256 << 10, (256 << 10) + 1, 3_000_000];
    let artifact = |size: usize| {
        let content: Vec<u8> = (0..=250).cycle().take(size).collect();
        Artifact::new(format!("file-{size}"), content)
    };
    let artifacts: Vec<Artifact> = sizes.into_iter().map(artifact).collect();
    let worker = start(&runtime, 1, sample(0), worker_config(artifacts.clone())).await;
    let directory = ModelDirectory::follow(&runtime);
    let live = model(&directory).await;
    for artifact in &artifacts {
        let fetched = directory.fetch(&live, &artifact.reference, PATIENCE).await;
        assert!(
            artifact.matches(&fetched.unwrap()),
            "{:?}",
            artifact.reference
        );
    }

    let unknown = ArtifactRef {
        blake3: "0".repeat(64),
        ..artifacts[1].reference.clone()
    };
    let error = directory
        .fetch(&live, &unknown, PATIENCE)
        .await
        .unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotFound, "{error}");
    soon(worker.shutdown()).await;
}

#[tokio::test]
async fn content_of_another_hash_is_refused() {
    let (runtime, _) = runtime();
    let honest = Artifact::new("tokenizer.json", *b"{}");
    let content_and_length: [&[u8]; 3] = [b"[]", b"{", b"{} and more"];
    for (id, content) in (1..).zip(content_and_length) {
        let forged = Artifact {
            reference: honest.reference.clone(),
            content: Arc::from(content),
        };
        let worker = start(&runtime, id, sample(0), worker_config(vec![forged])).await;
        let directory = ModelDirectory::follow(&runtime);
        let live = model(&directory).await;
        let error = directory
            .fetch(&live, &honest.reference, PATIENCE)
            .await
            .unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Internal);
        assert!(
            error
                .message()
                .contains("tokenizer.json arrived with another hash"),
            "{error}"
        );
        soon(worker.shutdown()).await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_file_of_a_model_that_left_is_not_waited_for_for_ever() {
    let (runtime, _) = runtime();
    let artifact = Artifact::new("tokenizer.json", *b"{}");
    let worker = start(
        &runtime,
        1,
        sample(0),
        worker_config(vec![artifact.clone()]),
    )
    .await;
    let directory = ModelDirectory::follow(&runtime);
    let live = model(&directory).await;
    worker.shutdown().await;
    let error = directory
        .fetch(&live, &artifact.reference, PATIENCE)
        .await
        .unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
}
