//! Chaos: many requests and many faults, and no request is lost.
//!
//! Short by default; `cargo xtask chaos` makes it long through the variables below. It prints the seed. The same seed gives the
//! same requests and the same faults, though not at the same times.

mod faults;
mod requests;

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng};
use tokio::task::JoinSet;

use self::faults::Fault;
use self::requests::{Answer, KINDS, Request};
use super::apart::until_all_take_part;
use crate::fleet::{Fleet, metric};
use crate::meeting::Meeting;
use crate::support::until;
use crate::worker::Worker;

/// The flags of every worker. Many answers take longer than the grace period.
const WORKER: [&str; 4] = [
    "--kv-cache-memory=16MiB",
    "--threads=1",
    "--grace=0.3",
    "--migration-limit=100",
];

/// A worker's slot in the fleet: its flags in addition to those of every worker. One slot at a time has a fault.
type Place = &'static [&'static str];

const TOGETHER: [Place; 3] = [&[]; 3];
const PREFILL: Place = &["--role=prefill"];
const DECODE: Place = &["--role=decode"];
const APART: [Place; 4] = [PREFILL, PREFILL, DECODE, DECODE];

/// The settings of a run.
struct Plan {
    seed: u64,
    requests: usize,
    faults: usize,
    clients: usize,
    /// How long discovery is down.
    away: Duration,
}

impl Plan {
    fn from_environment() -> Self {
        let number = |name: &str, default: u64| {
            let value = std::env::var(name).ok();
            value.map_or(default, |value| value.parse().expect("a number"))
        };
        let count =
            |name: &str, default| usize::try_from(number(name, default)).expect("a small number");
        Self {
            seed: number("GENSET_CHAOS_SEED", rand::random()),
            requests: count("GENSET_CHAOS_REQUESTS", 150),
            faults: count("GENSET_CHAOS_FAULTS", 6),
            clients: count("GENSET_CHAOS_CLIENTS", 12),
            away: Duration::from_secs(number("GENSET_CHAOS_AWAY", 4)),
        }
    }
}

/// A request, and its answer without faults.
struct Known {
    request: Request,
    answer: Answer,
}

/// The state that clients share.
struct Run {
    address: SocketAddr,
    known: Vec<Known>,
    /// Indices of the known requests to send, at least.
    requests: Vec<usize>,
    /// The number of requests that were sent.
    taken: AtomicUsize,
    /// Whether all faults are over.
    is_calm: AtomicBool,
}

/// A client: sends one request after another until all were sent and all faults are over. Returns the failures.
async fn client(run: Arc<Run>) -> Vec<String> {
    let mut failures = Vec::new();
    loop {
        let number = run.taken.fetch_add(1, Ordering::Relaxed);
        if number >= run.requests.len() && run.is_calm.load(Ordering::Relaxed) {
            // This one was not sent.
            run.taken.fetch_sub(1, Ordering::Relaxed);
            return failures;
        }
        let Known { request, answer } = &run.known[run.requests[number % run.requests.len()]];
        match request.ask(run.address).await {
            Ok(given) if given == *answer => {}
            Ok(given) => failures.push(format!("{request:?}: {given:?}, undisturbed {answer:?}")),
            Err(failure) => failures.push(format!("{request:?}: {failure}")),
        }
    }
}

async fn start<M: Meeting>(fleet: &Fleet<M>, place: Place) -> Worker {
    fleet.candle(&[&WORKER, place].concat()).await
}

pub(crate) async fn chaos_loses_nothing<M: Meeting>(fleet: Fleet<M>) {
    chaos_in(fleet, &TOGETHER).await;
}

pub(crate) async fn chaos_loses_nothing_of_two_pools<M: Meeting>(fleet: Fleet<M>) {
    chaos_in(fleet, &APART).await;
}

async fn chaos_in<M: Meeting>(mut fleet: Fleet<M>, places: &[Place]) {
    let plan = Plan::from_environment();
    let name = std::any::type_name::<M>();
    eprintln!("{name}, {places:?}: GENSET_CHAOS_SEED={}", plan.seed);
    let mut random = StdRng::seed_from_u64(plan.seed);
    let mut workers = Vec::new();
    for place in places {
        workers.push(start(&fleet, place).await);
    }
    let frontend = fleet.frontend(&["--migration-wait=60"]).await;
    until_all_take_part(&frontend, &workers.iter().collect::<Vec<_>>()).await;

    let mut known = Vec::new();
    for kind in 0..KINDS {
        let request = Request::random(kind, &mut random);
        let answer = request.ask(frontend.address).await.expect("an answer");
        known.push(Known { request, answer });
    }
    let requests = (0..plan.requests).map(|_| random.random_range(0..KINDS));
    let run = Arc::new(Run {
        address: frontend.address,
        known,
        requests: requests.collect(),
        taken: AtomicUsize::new(0),
        is_calm: AtomicBool::new(false),
    });
    let clients: JoinSet<_> = (0..plan.clients)
        .map(|_| client(Arc::clone(&run)))
        .collect();

    let mut faults = BTreeMap::<Fault, usize>::new();
    for fault in Fault::random(plan.faults, &mut random) {
        let struck = random.random_range(0..places.len());
        let worker = workers.remove(struck);
        let start = async |fleet: &Fleet<M>| start(fleet, places[struck]).await;
        let mended = fault.strike(&mut fleet, worker, start, plan.away).await;
        workers.insert(struck, mended);
        *faults.entry(fault).or_default() += 1;
        let pause = Duration::from_millis(random.random_range(0..500));
        tokio::time::sleep(pause).await;
    }
    run.is_calm.store(true, Ordering::Relaxed);
    let failures: Vec<String> = clients.join_all().await.into_iter().flatten().collect();
    let moves = metric(&frontend, "genset_migrations_total").await;
    eprintln!(
        "{name}, {places:?}: {} requests, {faults:?}, {moves} moves, {} lost",
        run.taken.load(Ordering::Relaxed),
        failures.len()
    );
    assert!(failures.is_empty(), "seed {}: {failures:#?}", plan.seed);
    // No request is left in a worker.
    for worker in &workers {
        worker.until_running(0.0).await;
        until(async || worker.metric("genset_candle_kv_usage").await <= 0.0).await;
    }
    assert_eq!(metric(&frontend, "genset_migration_kept_bytes").await, 0.0);
    assert_eq!(
        metric(&frontend, "genset_migration_failures_total").await,
        0.0
    );
}
