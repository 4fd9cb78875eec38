//! Asking the workers of a model for their load.

use std::collections::BTreeMap;
use std::time::Duration;

use genset_backend_common::{EngineConfig, ErrorKind, ModelCard, Role, handles::Load};
use genset_runtime::{EndpointName, InstanceId, LiveModel, LoadClient, Pool, endpoints};

use crate::support::{Answering, endpoint, listed, runtime, silent, until};

#[tokio::test(start_paused = true)]
async fn each_worker_of_a_model_says_its_load_or_why_there_is_none() {
    let (runtime, _) = runtime();
    let busy = |running_requests| Load {
        running_requests,
        ..Load::default()
    };
    let load = endpoint(&runtime, endpoints::LOAD);
    let prefill = Answering::new(move |()| Ok(vec![busy(3), busy(4)]));
    let decode = Answering::new(move |()| Ok(vec![busy(5)]));
    let _prefill = listed(&load, 1, prefill).await;
    let _silent = listed::<(), Load>(&load, 2, silent()).await;
    let _decode = listed(&load, 3, decode).await;
    let pool = |instances: &[u64]| Pool {
        endpoint: endpoint(&runtime, "generate").name().clone(),
        instances: instances.iter().copied().map(InstanceId).collect(),
    };
    let model = LiveModel {
        card: ModelCard::from_config(&EngineConfig::new("m", 10)),
        pools: BTreeMap::from([
            (Role::Prefill, pool(&[1, 2])),
            (Role::Decode, pool(&[3, 4])),
        ]),
        adapters: BTreeMap::new(),
        left_out: Vec::new(),
        others: Vec::new(),
    };
    let mut told = LoadClient::new(&runtime).of_model(&model).await;
    told.sort_by_key(|told| told.worker);
    let found = told.into_iter().map(|told| {
        let load = told.load.map(|load| load.running_requests);
        (told.worker.0, told.role, load.map_err(|error| error.kind()))
    });
    assert_eq!(
        found.collect::<Vec<_>>(),
        [
            (1, Role::Prefill, Ok(3)),
            (2, Role::Prefill, Err(ErrorKind::Unavailable)),
            (3, Role::Decode, Ok(5)),
            (4, Role::Decode, Err(ErrorKind::NotFound)),
        ]
    );
}

#[tokio::test(start_paused = true)]
async fn an_endpoint_that_nobody_asked_of_late_is_not_followed() {
    let (runtime, _) = runtime();
    let loads = LoadClient::new(&runtime);
    for component in ["first", "second"] {
        let generate = EndpointName::try_new("test", component, "generate").unwrap();
        let told = loads.of_worker(&generate, InstanceId(1)).await;
        assert_eq!(told.unwrap_err().kind(), ErrorKind::Unavailable);
        until(|| runtime.tasks() == 1).await;
        tokio::time::advance(Duration::from_secs(60)).await;
    }
}
