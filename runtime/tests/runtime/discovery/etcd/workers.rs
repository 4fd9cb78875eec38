//! Whole Workers, listed in etcd.

use std::sync::Arc;

use genset_backend_common::{GenerateRequest, Output};
use genset_runtime::discovery::all_instances;
use genset_runtime::plane::MemoryPlane;
use genset_runtime::{Client, EndpointName, Runtime};

use super::server::EtcdServer;
use super::{TTL, connect};
use crate::discovery::suite::{Follower, everything};
use crate::support::{PATIENCE, ctx, finish, request, sample, soon, start, worker_config};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_worker_is_listed_again_after_etcd_lost_everything_and_answers_all_the_while() {
    let mut server = EtcdServer::start().await;
    let plane = Arc::new(MemoryPlane::new());
    let runtime_of = async || {
        let discovery = Arc::new(connect(&server.endpoint(), TTL).await);
        Runtime::new(discovery, plane.clone())
    };
    let (worker_side, client_side) = (runtime_of().await, runtime_of().await);
    let worker = start(&worker_side, 7, sample(0), worker_config(Vec::new())).await;
    let client: Client<GenerateRequest, Output> =
        client_side.endpoint(EndpointName::default()).client();
    soon(client.wait_for_instances(PATIENCE)).await.unwrap();
    let observer = connect(&server.endpoint(), TTL).await;
    let listed = everything(&observer).await;
    let mut follower = Follower::of(&observer, all_instances()).await;
    let answers = async || {
        let items = soon(client.random(request(3), ctx())).await.unwrap();
        let outputs = genset_backend_common::OutputStream::from_raw(items);
        finish(outputs).await.unwrap();
    };

    server.kill();
    answers().await;
    server.restart_empty().await;
    answers().await;
    // All of its endpoints come back, under the same id.
    soon(async {
        while everything(&observer).await != listed {
            answers().await;
            assert_eq!(follower.entries.len(), listed.len());
        }
    })
    .await;
    while follower.snapshots < 2 {
        follower.next().await;
    }
    assert_eq!(follower.entries, listed);
    answers().await;
    soon(worker.shutdown()).await;
    follower.until(|entries| entries.is_empty()).await;
}
