//! Clients of several instances: which instances they skip, and which requests they retry on another instance.

mod gone;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use futures_util::{StreamExt, stream};
use genset_backend_common::ports::Generate;
use genset_backend_common::worker::RequestLimits;
use genset_backend_common::{
    CancelReason, EngineConfig, EngineError, ErrorKind, Finish, GenerateRequest, MetricsRegistry,
    ModelCard, Output, RequestContext, RequestField, async_trait,
    transfer::{KvTransfers, TransferParams},
};
use genset_runtime::discovery::Discovery;
use genset_runtime::plane::{Handler, ResponseStream};
use genset_runtime::selection::Candidate;
use genset_runtime::{
    Client, EjectionConfig, Ejections, EndpointName, GenerateClient, InstanceId, Runtime,
    SelectionMode,
};
use parking_lot::Mutex;
use tokio::time::Instant;

use crate::support::{
    Answering, ctx, endpoint, finish, handler, listed, request, runtime, sample, soon, start,
    streaming, until, worker_config,
};

/// Waits until the client knows `count` instances.
async fn until_known<Req, Resp>(client: &Client<Req, Resp>, count: usize)
where
    Req: genset_runtime::plane::Payload,
    Resp: genset_runtime::plane::Payload,
{
    until(|| client.instances().len() == count).await;
}

type Refusals = Arc<Answering<Box<Refusal>>>;
type Refusal = dyn Fn(GenerateRequest) -> Result<Vec<Output>, EngineError> + Send + Sync;

fn refusing(kind: ErrorKind) -> Refusals {
    Answering::new(Box::new(move |_| Err(EngineError::new(kind, "refused"))))
}

fn lacking_the_adapter() -> Refusals {
    let refusal = || EngineError::not_found("it is not loaded").with_at(RequestField::Adapter);
    Answering::new(Box::new(move |_| Err(refusal())))
}

fn finishing() -> Refusals {
    Answering::new(Box::new(|_| {
        let finished = Finish::stop().into_finished(3, 0);
        Ok(vec![Output::Finished(Box::new(finished))])
    }))
}

/// A client of two instances; round robin starts with the first.
async fn client_of(
    runtime: &Runtime,
    handlers: [&Refusals; 2],
) -> (GenerateClient, [genset_runtime::Serving; 2]) {
    let endpoint = endpoint(runtime, "generate");
    let [first, second] = handlers;
    let servings = [
        listed(&endpoint, 1, first.clone()).await,
        listed(&endpoint, 2, second.clone()).await,
    ];
    let client = endpoint.client();
    until_known(&client, 2).await;
    (
        GenerateClient::new(client, SelectionMode::RoundRobin),
        servings,
    )
}

#[tokio::test]
async fn what_one_instance_refuses_for_now_is_tried_on_another() {
    for kind in ErrorKind::ALL {
        let (runtime, _) = runtime();
        let (refuses, answers) = (refusing(kind), finishing());
        let (client, _servings) = client_of(&runtime, [&refuses, &answers]).await;
        let outcome = soon(client.generate(request(1), ctx())).await;
        assert_eq!(refuses.calls(), 1, "{kind}");
        if kind.policy().is_migratable {
            finish(outcome.unwrap()).await.unwrap();
            assert_eq!(answers.calls(), 1, "{kind}");
        } else {
            assert_eq!(outcome.unwrap_err().kind(), kind);
            assert_eq!(answers.calls(), 0, "{kind}");
        }
    }
}

/// Blocks are given once, so no other instance would get them.
#[tokio::test]
async fn blocks_that_one_instance_could_not_get_are_offered_to_no_other() {
    let blocks = || KvTransfers::new(7).params("blocks".into());
    for (kind, transfer, is_tried) in [
        (ErrorKind::StreamIncomplete, blocks(), false),
        (ErrorKind::StreamIncomplete, TransferParams::none(), true),
        (ErrorKind::Overloaded, blocks(), true),
    ] {
        let (runtime, _) = runtime();
        let (refuses, answers) = (refusing(kind), finishing());
        let (client, _servings) = client_of(&runtime, [&refuses, &answers]).await;
        let mut request = request(1);
        request.transfer = Some(transfer);
        let outcome = soon(client.generate(request, ctx())).await;
        assert_eq!(outcome.is_ok(), is_tried, "{kind}");
        let calls = (refuses.calls(), answers.calls());
        assert_eq!(calls, (1, usize::from(is_tried)), "{kind}");
    }
}

/// As in a decode pool of two layouts. If the blocks are at fault, a third instance would refuse them too.
#[tokio::test]
async fn blocks_that_one_instance_cannot_read_are_offered_to_one_more() {
    let (runtime, _) = runtime();
    let endpoint = endpoint(&runtime, "generate");
    let refusal = || EngineError::invalid_argument(RequestField::Transfer, "another layout");
    let refuses: Refusals = Answering::new(Box::new(move |_| Err(refusal())));
    let mut servings = Vec::new();
    for id in 1..=3 {
        servings.push(listed(&endpoint, id, refuses.clone()).await);
    }
    let client = endpoint.client();
    until_known(&client, 3).await;
    let client = GenerateClient::new(client, SelectionMode::RoundRobin);
    let mut request = request(1);
    request.transfer = Some(KvTransfers::new(7).params("blocks".into()));
    soon(client.generate(request, ctx())).await.unwrap_err();
    assert_eq!(refuses.calls(), 2);
}

#[tokio::test(start_paused = true)]
async fn the_next_instance_learns_when_the_lost_one_got_the_request() {
    let (runtime, _) = runtime();
    let endpoint = endpoint(&runtime, "generate");
    // What each request says of an earlier instance.
    let told = Arc::new(Mutex::new(Vec::new()));
    let began = Arc::clone(&told);
    let loses_first = handler(move |_: GenerateRequest, ctx: RequestContext| {
        let is_first = {
            let mut began = began.lock();
            began.push(ctx.began());
            began.len() == 1
        };
        async move {
            if is_first {
                tokio::time::sleep(Duration::from_secs(1)).await;
                return Err(EngineError::new(ErrorKind::Disconnected, "lost"));
            }
            let finished = Finish::stop().into_finished(3, 0);
            let items = [Ok(Output::Finished(Box::new(finished)))];
            streaming(stream::iter(items)).await
        }
    });
    let mut servings = Vec::new();
    for id in [1, 2] {
        servings.push(listed(&endpoint, id, Arc::clone(&loses_first)).await);
    }
    let client = endpoint.client();
    until_known(&client, 2).await;
    let client = GenerateClient::new(client, SelectionMode::RoundRobin);
    let since = Instant::now();
    let routed = client.route(request(1), ctx(), &[]).await.unwrap();
    assert_eq!((routed.began, since.elapsed().as_secs()), (since, 1));
    finish(routed.outputs).await.unwrap();
    assert_eq!(*told.lock(), [None, Some(since)]);
}

#[tokio::test]
async fn that_one_is_full_is_told_rather_than_that_another_is_gone_or_lost_the_adapter() {
    for gone in [true, false] {
        for is_full_first in [true, false] {
            let (runtime, _) = runtime();
            let full = refusing(ErrorKind::Overloaded);
            let other = match gone {
                true => refusing(ErrorKind::EngineShutdown),
                false => lacking_the_adapter(),
            };
            let handlers = match is_full_first {
                true => [&full, &other],
                false => [&other, &full],
            };
            let (client, _servings) = client_of(&runtime, handlers).await;
            let error = soon(client.generate(request(1), ctx())).await.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Overloaded);
            assert_eq!((full.calls(), other.calls()), (1, 1));
        }
    }
}

#[tokio::test]
async fn a_routed_request_says_who_answers_and_leaves_out_whom_it_was_told_to() {
    let (runtime, _) = runtime();
    let (one, two) = (finishing(), finishing());
    let (client, _servings) = client_of(&runtime, [&one, &two]).await;
    for _ in 0..3 {
        let routed = soon(client.route(request(1), ctx(), &[InstanceId(1)]));
        let routed = routed.await.unwrap();
        assert_eq!(routed.holder.id(), Some(InstanceId(2)));
        finish(routed.outputs).await.unwrap();
    }
    assert_eq!((one.calls(), two.calls()), (0, 3));
    let nobody = [InstanceId(1), InstanceId(2)];
    let error = soon(client.route(request(1), ctx(), &nobody)).await;
    assert_eq!(error.unwrap_err().kind(), ErrorKind::Unavailable);
}

/// The second instance has two ranks.
async fn two_ranks(client: &GenerateClient, servings: &[genset_runtime::Serving; 2]) {
    let mut card = ModelCard::from_config(&EngineConfig::new("sample", 64));
    card.data_parallel_size = 2;
    servings[1].list(Some(card)).await.unwrap();
    until(|| client.instances().iter().any(|record| record.ranks() == 2)).await;
}

#[tokio::test]
async fn a_rank_that_is_named_goes_to_instances_that_have_it() {
    let (runtime, _) = runtime();
    let (one, two) = (finishing(), finishing());
    let (client, servings) = client_of(&runtime, [&one, &two]).await;
    two_ranks(&client, &servings).await;
    // If no instance has the rank, one refuses.
    for (rank, calls) in [(1, (0, 4)), (0, (2, 6)), (2, (4, 8))] {
        for _ in 0..4 {
            let mut named = request(1);
            named.data_parallel_rank = Some(rank);
            finish(soon(client.generate(named, ctx())).await.unwrap())
                .await
                .unwrap();
        }
        assert_eq!((one.calls(), two.calls()), calls, "{rank}");
    }
}

#[tokio::test]
async fn a_rank_whose_instances_are_full_goes_to_no_other() {
    let (runtime, _) = runtime();
    let (one, full) = (finishing(), refusing(ErrorKind::Overloaded));
    let (client, servings) = client_of(&runtime, [&one, &full]).await;
    two_ranks(&client, &servings).await;
    let mut named = request(1);
    named.data_parallel_rank = Some(1);
    let error = soon(client.generate(named, ctx())).await.unwrap_err();
    assert_eq!((error.kind(), one.calls()), (ErrorKind::Overloaded, 0));
}

#[tokio::test]
async fn a_cancelled_request_is_tried_nowhere_else() {
    let (runtime, _) = runtime();
    let (full, answers) = (refusing(ErrorKind::Overloaded), finishing());
    let (client, _servings) = client_of(&runtime, [&full, &answers]).await;
    let ctx: RequestContext = ctx();
    ctx.cancel(CancelReason::Client);
    let error = soon(client.generate(request(1), ctx)).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Overloaded);
    assert_eq!(answers.calls(), 0);
}

#[tokio::test]
async fn a_full_worker_leaves_its_requests_to_another() {
    let (runtime, _) = runtime();
    let mut config = worker_config(Vec::new());
    config.limits = RequestLimits {
        max_running: 1,
        max_waiting: 0,
        ..config.limits
    };
    let full = start(&runtime, 1, sample(5), config.clone()).await;
    let other = start(&runtime, 2, sample(0), worker_config(Vec::new())).await;
    let client = runtime.endpoint(EndpointName::default()).client();
    until_known(&client, 2).await;
    let client = GenerateClient::new(client, SelectionMode::RoundRobin);

    let mut held = client
        .direct(InstanceId(1), request(10_000), ctx())
        .await
        .unwrap();
    soon(held.next()).await.unwrap().unwrap();
    let refused = client.direct(InstanceId(1), request(1), ctx()).await;
    assert_eq!(refused.unwrap_err().kind(), ErrorKind::Overloaded);
    for _ in 0..4 {
        let outputs = soon(client.generate(request(7), ctx())).await.unwrap();
        assert_eq!(finish(outputs).await.unwrap().completion_tokens, 7);
    }
    drop(held);
    for worker in [full, other] {
        soon(worker.shutdown()).await;
    }
}

#[tokio::test(start_paused = true)]
async fn of_many_full_instances_a_request_asks_few() {
    let (runtime, _) = runtime();
    let endpoint = endpoint(&runtime, "generate");
    let full = refusing(ErrorKind::Overloaded);
    let mut servings = Vec::new();
    for id in 1..=40 {
        servings.push(listed(&endpoint, id, full.clone()).await);
    }
    let client = endpoint.client();
    until_known(&client, 40).await;
    let client = GenerateClient::new(client, SelectionMode::RoundRobin);
    // Nothing is known about the instances of the first request.
    for calls in [40, 56, 72] {
        let error = soon(client.generate(request(1), ctx())).await.unwrap_err();
        assert_eq!((error.kind(), full.calls()), (ErrorKind::Overloaded, calls));
    }
    servings.push(listed(&endpoint, 41, finishing()).await);
    until(|| client.instances().len() == 41).await;
    let outputs = soon(client.generate(request(1), ctx())).await.unwrap();
    finish(outputs).await.unwrap();
    assert_eq!(full.calls(), 72);
}

#[tokio::test]
async fn a_worker_that_drains_leaves_new_requests_to_another() {
    let (runtime, discovery) = runtime();
    let drains = start(&runtime, 1, sample(5), worker_config(Vec::new())).await;
    let other = start(&runtime, 2, sample(0), worker_config(Vec::new())).await;
    let client = runtime.endpoint(EndpointName::default()).client();
    until_known(&client, 2).await;
    let client = GenerateClient::new(client, SelectionMode::RoundRobin);
    let mut held = client
        .direct(InstanceId(1), request(200), ctx())
        .await
        .unwrap();
    soon(held.next()).await.unwrap().unwrap();
    let listed_record = client.instances().remove(0);

    drains.stop();
    until(|| client.instances().len() == 1).await;
    // Like a client that has not been notified yet: the instance is still listed.
    let lease = discovery.lease().await.unwrap();
    lease.put(listed_record.to_entry().unwrap()).await.unwrap();
    until(|| client.instances().len() == 2).await;
    let refused = client.direct(InstanceId(1), request(1), ctx()).await;
    assert_eq!(refused.unwrap_err().kind(), ErrorKind::EngineShutdown);
    for _ in 0..4 {
        let outputs = soon(client.generate(request(2), ctx())).await.unwrap();
        assert_eq!(finish(outputs).await.unwrap().completion_tokens, 2);
    }
    // The request in progress completes.
    assert_eq!(finish(held).await.unwrap().completion_tokens, 200);
    assert_eq!(soon(drains.shutdown()).await.outcome.exit_code(), 0);
    soon(other.shutdown()).await;
}

/// Answers, or fails each request after its first token.
struct Fails {
    kind: ErrorKind,
    is_broken: AtomicBool,
    calls: AtomicUsize,
}

impl Fails {
    fn new(kind: ErrorKind) -> Arc<Self> {
        Arc::new(Self {
            kind,
            is_broken: AtomicBool::new(true),
            calls: AtomicUsize::new(0),
        })
    }

    fn calls(&self) -> usize {
        self.calls.load(Ordering::SeqCst)
    }
}

#[async_trait]
impl Handler<GenerateRequest, Output> for Fails {
    async fn handle(
        &self,
        _request: GenerateRequest,
        _ctx: RequestContext,
    ) -> Result<ResponseStream<Output>, EngineError> {
        self.calls.fetch_add(1, Ordering::SeqCst);
        let finished = Finish::stop().into_finished(3, 1);
        let end = match self.is_broken.load(Ordering::SeqCst) {
            true => Err(EngineError::new(self.kind, "broken")),
            false => Ok(Output::Finished(Box::new(finished))),
        };
        Ok(Box::pin(stream::iter([Ok(Output::from(7)), end])))
    }
}

/// Sends a request to the first instance that it may go to; returns how it ends.
async fn ask_first(client: &GenerateClient) -> Result<(), ErrorKind> {
    let mut first = |_: &mut GenerateRequest, _: &[Candidate]| Some(0_usize);
    let routed = client.route_by(&mut first, request(1), ctx(), &[]).await;
    let ended = match routed {
        Ok(routed) => finish(routed.outputs).await.map(drop),
        Err(error) => Err(error),
    };
    ended.map_err(|error| error.kind())
}

/// A client of two instances, of which the first fails three requests in a row before it is ejected.
async fn ejecting(
    runtime: &Runtime,
    fails: Arc<dyn Handler<GenerateRequest, Output>>,
    metrics: &MetricsRegistry,
) -> (GenerateClient, [genset_runtime::Serving; 2]) {
    let endpoint = endpoint(runtime, "generate");
    let servings = [
        listed(&endpoint, 1, fails).await,
        listed::<GenerateRequest, Output>(&endpoint, 2, finishing()).await,
    ];
    let client = endpoint.client();
    until_known(&client, 2).await;
    let config = EjectionConfig {
        after: 3,
        time: Duration::from_secs(5),
    };
    let client = GenerateClient::new(client, SelectionMode::LeastLoaded);
    let ejections = Ejections::register(metrics, config);
    (client.with_ejections(&ejections, "m"), servings)
}

/// As one whose GPU is in an error state: it is always idle, and so attracts requests.
#[tokio::test(start_paused = true)]
async fn an_instance_that_fails_one_request_after_another_is_passed_over() {
    let (runtime, _) = runtime();
    let (broken, metrics) = (Fails::new(ErrorKind::Internal), MetricsRegistry::default());
    let (client, _servings) = ejecting(&runtime, broken.clone(), &metrics).await;
    let failed: Result<(), _> = Err(ErrorKind::Internal);
    let ejections = |count: u32| {
        let line = format!("genset_router_ejections_total{{model=\"m\"}} {count}\n");
        metrics.encode().contains(&line)
    };
    assert!(ejections(0), "{}", metrics.encode());
    for expected in [failed, failed, failed, Ok(()), Ok(())] {
        assert_eq!(ask_first(&client).await, expected);
    }
    assert!(ejections(1), "{}", metrics.encode());
    // One request tries it again. It fails, and the next one tries it after twice the time.
    tokio::time::sleep(Duration::from_secs(5)).await;
    for expected in [failed, Ok(())] {
        assert_eq!(ask_first(&client).await, expected);
    }
    tokio::time::sleep(Duration::from_secs(9)).await;
    assert_eq!(ask_first(&client).await, Ok(()));
    assert_eq!(broken.calls(), 4);
    assert!(ejections(2), "{}", metrics.encode());
    // An answer ends it: three more failures are needed.
    tokio::time::sleep(Duration::from_secs(1)).await;
    broken.is_broken.store(false, Ordering::SeqCst);
    assert_eq!(ask_first(&client).await, Ok(()));
    assert_eq!(broken.calls(), 5);
    broken.is_broken.store(true, Ordering::SeqCst);
    for expected in [failed, failed, failed, Ok(())] {
        assert_eq!(ask_first(&client).await, expected);
    }
    assert_eq!(broken.calls(), 8);
}

/// Answers with a stop string end like this, since workers do not know the string.
#[tokio::test]
async fn an_answer_that_is_dropped_after_its_first_token_counts() {
    let (runtime, _) = runtime();
    let broken = Fails::new(ErrorKind::Internal);
    let (client, _servings) = ejecting(&runtime, broken.clone(), &MetricsRegistry::default()).await;
    let failed: Result<(), _> = Err(ErrorKind::Internal);
    for expected in [failed, failed] {
        assert_eq!(ask_first(&client).await, expected);
    }
    let mut first = |_: &mut GenerateRequest, _: &[Candidate]| Some(0_usize);
    let routed = client.route_by(&mut first, request(1), ctx(), &[]).await;
    let mut outputs = routed.unwrap().outputs;
    assert!(soon(outputs.next()).await.unwrap().is_ok());
    drop(outputs);
    for expected in [failed, failed, failed, Ok(())] {
        assert_eq!(ask_first(&client).await, expected);
    }
    assert_eq!(broken.calls(), 6);
}

/// Neither the request's faults nor a lack of room.
#[tokio::test]
async fn only_an_instances_own_faults_eject_it() {
    for kind in ErrorKind::ALL {
        let (runtime, _) = runtime();
        let fails = Fails::new(kind);
        let metrics = MetricsRegistry::default();
        let (client, _servings) = ejecting(&runtime, fails, &metrics).await;
        for _ in 0..3 {
            assert_eq!(ask_first(&client).await, Err(kind));
            // One that is marked down for a moment is another matter.
            if kind.is_instance_gone() {
                break;
            }
        }
        let is_ejected = matches!(kind, ErrorKind::Internal | ErrorKind::StreamIncomplete);
        let line = format!(
            "genset_router_ejections_total{{model=\"m\"}} {}\n",
            u32::from(is_ejected)
        );
        assert!(metrics.encode().contains(&line), "{kind}");
    }
}

#[tokio::test]
async fn a_stream_that_just_ends_is_a_failure() {
    let (runtime, _) = runtime();
    let ends: Refusals = Answering::new(Box::new(|_| Ok(vec![Output::from(7)])));
    let (client, _servings) = ejecting(&runtime, ends.clone(), &MetricsRegistry::default()).await;
    let failed: Result<(), _> = Err(ErrorKind::StreamIncomplete);
    for expected in [failed, failed, failed, Ok(())] {
        assert_eq!(ask_first(&client).await, expected);
    }
    assert_eq!(ends.calls(), 3);
}
