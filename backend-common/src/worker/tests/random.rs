//! Random plans of faults, with stops, lost leases, deaths and requests at random times: checks what holds in all of them.

use std::sync::Arc;
use std::time::Duration;

use futures_util::stream;
use proptest::collection::vec;
use proptest::prelude::*;
use tokio::task::JoinSet;

use super::fakes::{Act, Call, World};
use super::fakes::{
    config, counting, ended, one_token_then_silence, raw, raw_items, request, spawn,
};
use super::transcript::read;
use crate::context::RequestContext;
use crate::error::EngineError;
use crate::output::{Output, OutputStream};
use crate::request::GenerateRequest;
use crate::worker::{CanaryConfig, Report, WorkerConfig};

/// The time of a scenario's last stop, if it needs one.
const END: Duration = Duration::from_secs(120);

/// The behaviour of an engine's stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stream {
    Good,
    Silent,
    Truncated,
    Failing,
    Panicking,
}

/// An external event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum News {
    Stop,
    LeaseLost,
    EngineDies,
    /// A client sends a request and reads the answer.
    Request,
    /// A client sends a request and never reads.
    UnreadRequest,
}

#[derive(Debug, Clone)]
struct Scenario {
    /// The behaviour of successive calls of each kind; later ones succeed.
    acts: Vec<(Call, Vec<Act>)>,
    /// The answers to successive requests, including canaries; later ones succeed.
    streams: Vec<Stream>,
    /// The times of events, in milliseconds.
    news: Vec<(u64, News)>,
}

const CALLS: [Call; 11] = [
    Call::Start,
    Call::Serve,
    Call::Probe,
    Call::Generate,
    Call::List,
    Call::Unlist,
    Call::Drain,
    Call::Close,
    Call::Cleanup,
    Call::Abort,
    Call::Lost,
];

fn act() -> impl Strategy<Value = Act> {
    prop_oneof![
        30 => Just(Act::Succeed),
        1 => Just(Act::Error),
        1 => Just(Act::Panic),
        1 => Just(Act::Hang),
    ]
}

fn stream_kind() -> impl Strategy<Value = Stream> {
    prop_oneof![
        14 => Just(Stream::Good),
        2 => Just(Stream::Silent),
        1 => Just(Stream::Truncated),
        1 => Just(Stream::Failing),
        1 => Just(Stream::Panicking),
    ]
}

fn news() -> impl Strategy<Value = (u64, News)> {
    let kind = prop_oneof![
        2 => Just(News::Stop),
        2 => Just(News::LeaseLost),
        1 => Just(News::EngineDies),
        4 => Just(News::Request),
        1 => Just(News::UnreadRequest),
    ];
    // Many at the very start, where states change without time passing.
    (prop_oneof![0..10_u64, 0..60_000_u64], kind)
}

fn scenario() -> impl Strategy<Value = Scenario> {
    let acts = vec(vec(act(), 0..4), CALLS.len());
    (acts, vec(stream_kind(), 0..8), vec(news(), 0..12)).prop_map(|(acts, streams, mut news)| {
        let acts = CALLS.into_iter().zip(acts).collect();
        news.sort_by_key(|(at, _)| *at);
        Scenario {
            acts,
            streams,
            news,
        }
    })
}

impl Scenario {
    fn first_act(&self, call: Call) -> Act {
        let acts = self.acts.iter().find(|(c, _)| *c == call);
        let first = acts.and_then(|(_, acts)| acts.first());
        first.copied().unwrap_or(Act::Succeed)
    }

    /// Returns whether `start` succeeds, the service is reachable, and the first canary passes.
    fn may_be_listed(&self) -> bool {
        let calls = [Call::Start, Call::Serve, Call::Probe, Call::Generate];
        let succeeds = |call: &Call| self.first_act(*call) == Act::Succeed;
        let first_stream = self.streams.first().copied().unwrap_or(Stream::Good);
        calls.iter().all(succeeds) && first_stream == Stream::Good
    }
}

fn answer(kind: Stream, request: GenerateRequest, ctx: RequestContext) -> OutputStream {
    match kind {
        Stream::Good => counting(request, ctx),
        Stream::Silent => one_token_then_silence(ctx),
        Stream::Truncated => raw_items([Ok(Output::from(0))]),
        Stream::Failing => raw_items([Err(EngineError::internal("as planned"))]),
        Stream::Panicking => raw(stream::poll_fn(|_| panic!("a stream panics as planned"))),
    }
}

fn world(scenario: &Scenario) -> Arc<World> {
    let world = World::new();
    for (call, acts) in &scenario.acts {
        world.plan(*call, acts.iter().copied());
    }
    let streams = parking_lot::Mutex::new(scenario.streams.clone().into_iter());
    world.answer_with(move |request, ctx| {
        let kind = streams.lock().next().unwrap_or(Stream::Good);
        Ok(answer(kind, request, ctx))
    });
    world
}

fn worker_config() -> WorkerConfig {
    let seconds = Duration::from_secs;
    let mut config = WorkerConfig {
        start_timeout: seconds(20),
        register_timeout: seconds(3),
        grace: seconds(8),
        drain_timeout: seconds(4),
        cleanup_timeout: seconds(5),
        canary: CanaryConfig {
            interval: Some(seconds(7)),
            timeout: seconds(2),
            max_failures: 2,
        },
        ..config()
    };
    (config.limits.max_running, config.limits.max_waiting) = (2, 1);
    config.limits.idle_timeout = Some(seconds(11));
    config
}

/// Runs a scenario. Every client that reads must see a legal stream or a refusal.
async fn live(scenario: &Scenario, world: &Arc<World>) -> Report {
    let handle = spawn(world, worker_config());
    let start = tokio::time::Instant::now();
    let (mut readers, mut unread) = (JoinSet::new(), JoinSet::new());
    for (at, news) in &scenario.news {
        tokio::time::sleep_until(start + Duration::from_millis(*at)).await;
        match news {
            News::Stop => handle.stop(),
            News::LeaseLost => world.lose_lease(),
            News::EngineDies => world.kill_engine(),
            // Clients know only listed instances.
            News::Request | News::UnreadRequest if world.count(Call::List) == 0 => {}
            News::Request => {
                let world = Arc::clone(world);
                readers.spawn(async move {
                    let ctx = RequestContext::new("read");
                    if let Ok(outputs) = world.generate(request(), ctx).await {
                        read(outputs).await;
                    }
                });
            }
            News::UnreadRequest => {
                let world = Arc::clone(world);
                unread.spawn(async move {
                    let ctx = RequestContext::new("unread");
                    world.generate(request(), ctx).await
                });
            }
        }
    }
    tokio::time::sleep_until(start + END).await;
    handle.stop();
    let report = ended(&handle).await;
    while let Some(reader) = readers.join_next().await {
        reader.unwrap();
    }
    drop(unread);
    ended(&handle).await;
    report
}

fn check(scenario: &Scenario, world: &World) {
    let calls = world.calls();
    let place_of = |call: Call| calls.iter().position(|c| *c == call);
    let last_place_of = |call: Call| calls.iter().rposition(|c| *c == call);

    assert!(world.count(Call::Start) <= 1);
    assert_eq!(world.count(Call::Cleanup), world.count(Call::Start));
    assert!(!world.cleanup_met_start());
    assert_eq!(
        place_of(Call::Cleanup),
        calls.len().checked_sub(1),
        "cleanup is the last"
    );
    assert!(world.count(Call::Unlist) <= 1 && world.count(Call::Close) <= 1);
    assert!(world.count(Call::Serve) <= 1 && world.count(Call::Drain) <= 1);

    if let Some(listed) = last_place_of(Call::List) {
        assert!(scenario.may_be_listed());
        let (unlisted, closed) = (
            place_of(Call::Unlist).unwrap(),
            place_of(Call::Close).unwrap(),
        );
        assert!(place_of(Call::Probe).unwrap() < place_of(Call::List).unwrap());
        assert!(listed < unlisted && unlisted < closed);
    } else {
        assert_eq!(place_of(Call::Unlist), None, "what was never listed");
    }
    if let (Some(unlisted), Some(drained)) = (place_of(Call::Unlist), place_of(Call::Drain)) {
        assert!(unlisted < drained);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn no_plan_of_faults_breaks_a_promise(scenario in scenario()) {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_time()
            .start_paused(true)
            .build()
            .unwrap();
        let world = world(&scenario);
        let report = runtime.block_on(live(&scenario, &world));
        check(&scenario, &world);
        assert!(report.outcome.exit_code() != 1 || report.error.is_some());
    }
}
