//! The model directory: which models live workers serve, and their files.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use bytes::Bytes;
use futures_util::stream;
use genset_backend_common::context::Explanation;
use genset_backend_common::ports::Generate;
use genset_backend_common::worker::RequestLimits;
use genset_backend_common::{
    EngineConfig, ErrorKind, ModelCard, RequestContext,
    card::{Artifact, ArtifactRef},
};
use genset_runtime::discovery::{Discovery, Entry, InstanceRecord};
use genset_runtime::plane::Handler;
use genset_runtime::{
    ArtifactRequest, EndpointName, InstanceId, LiveModel, ModelDirectory, SelectionMode,
};

use crate::support::{
    Answering, PATIENCE, ctx, finish, handler, listed, record, request, runtime, sample, shut_down,
    silent, soon, start, streaming, until, worker_config,
};

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
        (live.card.name.as_str(), live.endpoint().to_string()),
        ("mine", "genset.backend.generate".into())
    );
    let client = directory
        .client(&live, SelectionMode::Random, PATIENCE)
        .await
        .unwrap();
    let outputs = client.generate(request(5), ctx()).await.unwrap();
    assert_eq!(finish(outputs).await.unwrap().completion_tokens, 5);

    soon(worker.shutdown()).await;
    until(|| directory.subscribe().borrow().is_empty()).await;
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

#[tokio::test]
async fn a_worker_whose_card_differs_is_kept_apart_and_named() {
    let (runtime, _) = runtime();
    let directory = ModelDirectory::follow(&runtime);
    let first = start(&runtime, 1, sample(0), worker_config(Vec::new())).await;
    let in_use = model(&directory).await.card;
    let mut config = worker_config(Vec::new());
    config.context_length_tokens = Some(100);
    let other = start(&runtime, 2, sample(0), config).await;
    let mut models = directory.subscribe();
    let is_told = |models: &Arc<BTreeMap<String, LiveModel>>| {
        models.values().any(|model| !model.left_out.is_empty())
    };
    let live = soon(models.wait_for(is_told)).await.unwrap().clone();
    let live = live.values().next().unwrap().clone();
    assert_eq!(live.card, in_use);
    let [left_out] = &live.left_out[..] else {
        panic!("one is left out")
    };
    assert_eq!(left_out.instance.0, 2);
    assert_eq!(left_out.differences.len(), 1, "{:?}", left_out.differences);
    assert!(left_out.differences[0].starts_with("context_length_tokens: 100, in use: "));
    // All its requests go to the other worker.
    let client = directory
        .client(&live, SelectionMode::RoundRobin, PATIENCE)
        .await
        .unwrap();
    assert_eq!(client.instances().len(), 1);
    soon(first.shutdown()).await;
    // Now its card is the only one.
    let is_alone = |models: &Arc<BTreeMap<String, LiveModel>>| {
        models
            .values()
            .any(|model| model.card.context_length_tokens == 100 && model.left_out.is_empty())
    };
    soon(models.wait_for(is_alone)).await.unwrap();
    soon(other.shutdown()).await;
}

#[tokio::test]
async fn the_least_loaded_is_selected_by_what_others_ask_of_it_too() {
    let (runtime, _) = runtime();
    let workers = [
        start(&runtime, 1, sample(5), worker_config(Vec::new())).await,
        start(&runtime, 2, sample(5), worker_config(Vec::new())).await,
    ];
    let directory = ModelDirectory::follow(&runtime);
    let live = model(&directory).await;
    let mode = SelectionMode::LeastLoaded;
    let busy = directory.client(&live, mode, PATIENCE).await.unwrap();
    let ours = directory.client(&live, mode, PATIENCE).await.unwrap();
    // Another client keeps the first busy; this one learns of it only from the worker.
    let mut held = Vec::new();
    for _ in 0..3 {
        let id = genset_runtime::InstanceId(1);
        held.push(busy.direct(id, request(100_000), ctx()).await.unwrap());
    }
    until(|| ours.loads()[0].1 == 3).await;
    held.push(ours.generate(request(100_000), ctx()).await.unwrap());
    assert_eq!(ours.loads()[1].1, 1, "{:?}", ours.loads());
    drop(held);
    shut_down(workers).await;
}

#[tokio::test]
async fn a_worker_that_others_have_filled_is_not_asked() {
    let (runtime, _) = runtime();
    let mut small = worker_config(Vec::new());
    small.limits = RequestLimits {
        max_running: 1,
        max_waiting: 0,
        ..small.limits
    };
    let workers = [
        start(&runtime, 1, sample(5), small).await,
        start(&runtime, 2, sample(5), worker_config(Vec::new())).await,
    ];
    let directory = ModelDirectory::follow(&runtime);
    let live = model(&directory).await;
    let mode = SelectionMode::LeastLoaded;
    let others = directory.client(&live, mode, PATIENCE).await.unwrap();
    let ours = directory.client(&live, mode, PATIENCE).await.unwrap();
    let mut held = Vec::new();
    for id in [1, 2, 2, 2] {
        let answer = others.direct(InstanceId(id), request(100_000), ctx());
        held.push(answer.await.unwrap());
    }
    let loads = || ours.loads().into_iter().map(|(_, load)| load);
    until(|| loads().eq([1, 3])).await;
    let explanation = Explanation::default();
    let ctx = ctx().with_explanation(explanation.clone());
    held.push(ours.generate(request(100_000), ctx).await.unwrap());
    let decisions = explanation.decisions();
    assert_eq!(decisions.len(), 1, "{decisions:?}");
    assert_eq!(decisions[0]["instance"], InstanceId(2).to_string());
    drop(held);
    shut_down(workers).await;
}

/// A record with this card, as a worker that ignores all limits would write it.
fn lie(artifacts: Vec<ArtifactRef>) -> Entry {
    lie_of(1, artifacts)
}

fn lie_of(id: u64, artifacts: Vec<ArtifactRef>) -> Entry {
    let mut card = ModelCard::from_config(&EngineConfig::new("lie", 100));
    card.artifacts = artifacts;
    let record = InstanceRecord {
        card: Some(card),
        ..record(&EndpointName::default(), id, "memory", "1".into())
    };
    Entry {
        key: record.key(),
        value: serde_json::to_vec(&record).unwrap().into(),
    }
}

#[tokio::test]
async fn a_file_without_end_is_left_at_the_length_that_its_card_names() {
    for (size, chunk, most) in [
        (3 << 20, 1 << 20, 4 << 20),
        (64 << 20, 16 << 20, 80 << 20),
        (100, 0, 1),
    ] {
        let (runtime, discovery) = runtime();
        let sent = Arc::new(AtomicUsize::new(0));
        let (zeros, counted) = (Bytes::from(vec![0_u8; chunk]), Arc::clone(&sent));
        // As long as the reader reads.
        let endless = handler(move |_: ArtifactRequest, _ctx: RequestContext| {
            let (chunk, sent) = (zeros.clone(), Arc::clone(&counted));
            streaming(stream::repeat_with(move || {
                sent.fetch_add(chunk.len().max(1), Ordering::SeqCst);
                Ok(chunk.clone())
            }))
        });
        let name = EndpointName::default().sibling("artifacts").unwrap();
        let _artifacts = listed(&runtime.endpoint(name), 1, endless).await;
        let artifact = ArtifactRef {
            name: "tokenizer.json".into(),
            blake3: "0".repeat(64),
            size,
        };
        let lease = discovery.lease().await.unwrap();
        lease.put(lie(vec![artifact.clone()])).await.unwrap();
        let directory = ModelDirectory::follow(&runtime);
        let live = model(&directory).await;
        let error = soon(directory.fetch(&live, &artifact, PATIENCE))
            .await
            .unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Internal, "{error}");
        let sent = sent.load(Ordering::SeqCst);
        assert!(sent <= most, "{sent} bytes of a file of {size} were taken");
        let larger = ArtifactRef {
            size: u64::MAX,
            ..artifact
        };
        let error = soon(directory.fetch(&live, &larger, PATIENCE))
            .await
            .unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_worker_that_says_nothing_keeps_nobody_from_the_others() {
    let (runtime, discovery) = runtime();
    let artifact = Artifact::new("tokenizer.json", *b"{}");
    let content = Bytes::from_static(b"{}");
    let honest: Arc<dyn Handler<ArtifactRequest, Bytes>> =
        Answering::new(move |_: ArtifactRequest| Ok(vec![content.clone()]));
    let name = EndpointName::default().sibling("artifacts").unwrap();
    let endpoint = runtime.endpoint(name);
    let _silent = listed::<ArtifactRequest, Bytes>(&endpoint, 1, silent()).await;
    let _honest = listed(&endpoint, 2, honest).await;
    let lease = discovery.lease().await.unwrap();
    for id in [1, 2] {
        let entry = lie_of(id, vec![artifact.reference.clone()]);
        lease.put(entry).await.unwrap();
    }
    let directory = ModelDirectory::follow(&runtime);
    let live = model(&directory).await;
    // Whichever it starts with.
    for _ in 0..8 {
        let fetched = directory.fetch(&live, &artifact.reference, PATIENCE).await;
        assert!(artifact.matches(&fetched.unwrap()));
    }
}

#[tokio::test]
async fn a_scope_has_the_workers_of_a_namespace_or_of_an_endpoint() {
    let (runtime, discovery) = runtime();
    let lease = discovery.lease().await.unwrap();
    let workers = [
        ("p", "a.prefill.generate"),
        ("d", "a.decode.generate"),
        ("b", "ab.backend.generate"),
    ];
    for (id, (model, name)) in (1..).zip(workers) {
        let record = InstanceRecord {
            card: Some(ModelCard::from_config(&EngineConfig::new(model, 100))),
            ..record(&name.parse().unwrap(), id, "memory", "1".into())
        };
        let entry = Entry {
            key: record.key(),
            value: serde_json::to_vec(&record).unwrap().into(),
        };
        lease.put(entry).await.unwrap();
    }
    for (scope, expected) in [("a", "dp"), ("a.decode", "d"), ("ab", "b")] {
        let directory = ModelDirectory::follow_scope(&runtime, &scope.parse().unwrap());
        let mut models = directory.subscribe();
        let all = soon(models.wait_for(|models| models.len() == expected.len())).await;
        let names: String = all.unwrap().keys().map(String::as_str).collect();
        assert_eq!(names, expected);
    }
}

#[tokio::test]
async fn a_card_that_names_too_much_is_no_model_and_is_counted() {
    let (runtime, discovery) = runtime();
    let directory = ModelDirectory::follow(&runtime);
    let artifact = |size| ArtifactRef {
        name: "tokenizer.json".into(),
        blake3: "0".repeat(64),
        size,
    };
    let lease = discovery.lease().await.unwrap();
    lease.put(lie(vec![artifact(1); 1000])).await.unwrap();
    let counted = "genset_discovery_refused_records_total{reason=\"artifacts\"} 1\n";
    until(|| runtime.metrics().encode().contains(counted)).await;
    assert!(directory.subscribe().borrow().is_empty());
    // A valid record in its place is accepted.
    lease.put(lie(vec![artifact(60 << 20)])).await.unwrap();
    assert_eq!(model(&directory).await.card.name, "lie");
    lease.put(lie(vec![artifact(1); 1000])).await.unwrap();
    until(|| directory.subscribe().borrow().is_empty()).await;
}

#[tokio::test]
async fn a_worker_does_not_publish_what_others_would_refuse() {
    let (runtime, _) = runtime();
    let files = (0..17).map(|number| Artifact::new(format!("file-{number}"), *b"{}"));
    let name = EndpointName::default();
    let registrar = Arc::new(genset_runtime::RuntimeRegistrar::new(runtime.clone(), name));
    let worker = genset_backend_common::worker::Worker::new(
        1,
        sample(0),
        worker_config(files.collect()),
        registrar,
        genset_backend_common::MetricsRegistry::default(),
    );
    let report = soon(worker.spawn().join()).await;
    let error = report.error.unwrap();
    assert_eq!(error.at().map(|at| at.name()), Some("artifacts"), "{error}");
}
