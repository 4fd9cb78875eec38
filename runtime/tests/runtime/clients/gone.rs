//! Which instances a client skips, and for how long it tries them, because they cannot be reached.

use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::future::join_all;
use genset_backend_common::ports::Generate;
use genset_backend_common::{EngineError, ErrorKind, GenerateRequest, Output, RequestContext};
use genset_runtime::discovery::{Discovery, Lease};
use genset_runtime::plane::ResponseStream;
use genset_runtime::selection::RoundRobin;
use genset_runtime::{Client, Endpoint, GenerateClient, InstanceId, SelectionMode};
use tokio::time::Instant;

use super::{finishing, until_known};
use crate::support::{
    Answering, ctx, endpoint, finish, handler, listed, record, request, runtime, soon, until,
};

/// Lists an instance that no process serves.
async fn list_dead(discovery: &dyn Discovery, endpoint: &Endpoint, id: u64) -> Box<dyn Lease> {
    let record = record(endpoint.name(), id, "memory", "nowhere".into());
    let lease = discovery.lease().await.unwrap();
    lease.put(record.to_entry().unwrap()).await.unwrap();
    lease
}

async fn call(client: &Client<u8, u8>, selector: &RoundRobin) -> Result<u8, ErrorKind> {
    let items = client.call(selector, 1, ctx()).await;
    let mut items = items.map_err(|error| error.kind())?;
    Ok(items.next().await.unwrap().unwrap())
}

#[tokio::test(start_paused = true)]
async fn an_instance_that_cannot_be_reached_is_left_out_for_a_while() {
    let (runtime, discovery) = runtime();
    let endpoint = endpoint(&runtime, "e");
    let lease = list_dead(&discovery, &endpoint, 1).await;
    let handler = Answering::new(|number: u8| Ok(vec![number]));
    let _serving = listed(&endpoint, 2, handler).await;
    let client = endpoint.client::<u8, u8>();
    until_known(&client, 2).await;

    let turns = RoundRobin::default();
    assert_eq!(call(&client, &turns).await, Err(ErrorKind::CannotConnect));
    for _ in 0..10 {
        assert_eq!(call(&client, &turns).await, Ok(1));
    }
    tokio::time::sleep(Duration::from_secs(10)).await;
    let turns = RoundRobin::default();
    assert_eq!(call(&client, &turns).await, Err(ErrorKind::CannotConnect));
    assert_eq!(call(&client, &turns).await, Ok(1));
    drop(lease);
    until_known(&client, 1).await;
    assert_eq!(call(&client, &turns).await, Ok(1));
}

#[tokio::test(start_paused = true)]
async fn an_instance_that_is_announced_anew_is_no_longer_left_out() {
    let (runtime, discovery) = runtime();
    let endpoint = endpoint(&runtime, "e");
    let _lease = list_dead(&discovery, &endpoint, 1).await;
    let client = endpoint.client::<u8, u8>();
    until_known(&client, 1).await;
    let turns = RoundRobin::default();
    assert_eq!(call(&client, &turns).await, Err(ErrorKind::CannotConnect));
    // The only instance is tried again although marked down: a wrong mark must not cause an outage.
    assert_eq!(call(&client, &turns).await, Err(ErrorKind::CannotConnect));

    let other = Answering::new(|_: u8| Ok(vec![2_u8]));
    let _other = listed(&endpoint, 2, other).await;
    let handler = Answering::new(|number: u8| Ok(vec![number]));
    let _serving = listed(&endpoint, 1, handler).await;
    until_known(&client, 2).await;
    until(|| client.instances()[0].address.location != "nowhere").await;
    let calls = [call(&client, &turns).await, call(&client, &turns).await];
    assert!(calls.contains(&Ok(1)), "{calls:?}");
}

#[tokio::test]
async fn instances_that_have_not_seen_the_request_are_no_losses() {
    let (runtime, discovery) = runtime();
    let endpoint = endpoint(&runtime, "generate");
    let mut leases = Vec::new();
    for id in 1..=5 {
        leases.push(list_dead(&discovery, &endpoint, id).await);
    }
    let answers = finishing();
    let _serving = listed(&endpoint, 6, answers.clone()).await;
    let client = endpoint.client();
    until_known(&client, 6).await;
    let client = GenerateClient::new(client, SelectionMode::RoundRobin);
    let outputs = client.generate(request(1), ctx().with_loss_limit(0));
    finish(soon(outputs).await.unwrap()).await.unwrap();
    assert_eq!(answers.calls(), 1);
}

/// As behind a broken network, where each takes as long as connecting may.
#[tokio::test(start_paused = true)]
async fn instances_that_are_marked_as_gone_are_tried_for_a_while() {
    let (runtime, _) = runtime();
    let endpoint = endpoint(&runtime, "generate");
    let gone = handler(|_: GenerateRequest, _ctx: RequestContext| async {
        tokio::time::sleep(Duration::from_secs(1)).await;
        let error = EngineError::new(ErrorKind::CannotConnect, "no answer");
        Err::<ResponseStream<Output>, _>(error)
    });
    let mut servings = Vec::new();
    for id in 1..=10 {
        servings.push(listed(&endpoint, id, Arc::clone(&gone)).await);
    }
    let client = endpoint.client();
    until_known(&client, 10).await;
    let client = GenerateClient::new(client, SelectionMode::RoundRobin);
    let each = (1..=10).map(|id| client.direct(InstanceId(id), request(1), ctx()));
    join_all(each).await;
    let since = Instant::now();
    let error = client.generate(request(1), ctx()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::CannotConnect);
    assert_eq!(since.elapsed().as_secs(), 3);
}
