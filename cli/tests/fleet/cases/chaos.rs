//! Chaos: many requests, many faults, and nothing lost.
//!
//! Short by default. `cargo xtask chaos` makes it long by the variables below. The seed is printed; the same seed gives the same
//! requests and the same faults, though not at the same moments.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use rand::rngs::StdRng;
use rand::{Rng, RngExt as _, SeedableRng};
use rustix::process::Signal;
use serde_json::{Value, json};
use tokio::task::JoinSet;

use super::apart::until_all_take_part;
use crate::fleet::Fleet;
use crate::meeting::Meeting;
use crate::support::{Exchange, Server};
use crate::worker::Worker;

/// The flags of every worker. The grace is shorter than most answers.
const WORKER: [&str; 3] = [
    "--token-delay-ms=10",
    "--grace=0.3",
    "--migration-limit=100",
];

/// A worker's place in the fleet: its flags beside those of every worker. One place at a time has a fault.
type Place = &'static [&'static str];

const TOGETHER: [Place; 3] = [&[]; 3];
const PREFILL: Place = &["--role=prefill"];
const DECODE: Place = &["--role=decode"];
const APART: [Place; 4] = [PREFILL, PREFILL, DECODE, DECODE];

/// Different requests, each asked once before anything is wrong.
const KINDS: usize = 12;

/// How long a worker is stopped: longer than the silence after which its peers count it as dead.
const FROZEN: Duration = Duration::from_secs(6);

/// What a run does.
struct Plan {
    seed: u64,
    requests: usize,
    faults: usize,
    clients: usize,
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
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Fault {
    Killed,
    Frozen,
    Drained,
}

/// A request, as a client sends it.
fn request(random: &mut impl Rng) -> Value {
    let token = random.random_range(3..1900);
    let max_tokens = [4, 40, 200][random.random_range(0..3)];
    // The answer is a function of the prompt's last token.
    let mut body = json!({
        "model": "tiny-chat",
        "prompt": [token],
        "ignore_eos": true,
        "max_tokens": max_tokens,
    });
    if random.random_bool(0.2) {
        body["n"] = 2.into();
    }
    if random.random_bool(0.5) {
        body["stream"] = true.into();
        body["stream_options"] = json!({"include_usage": true});
    }
    body
}

/// What a client has at the end: the text of each choice and why it ended, and the tokens of all.
///
/// # Errors
/// Anything but a whole answer.
async fn ask(address: SocketAddr, body: &Value) -> Result<(BTreeMap<u64, String>, u64), String> {
    let exchange = Exchange::try_begin(address, "POST", "/v1/completions", &body.to_string())
        .await
        .map_err(|error| error.to_string())?;
    let response = exchange.response().await;
    let failure = || format!("{} {}", response.status, response.body);
    if response.status != 200 {
        return Err(failure());
    }
    let parts: Vec<Value> = if body["stream"] == true {
        let events = response.body.strip_suffix("data: [DONE]\n\n");
        crate::support::events_of(events.ok_or_else(failure)?)
    } else {
        vec![serde_json::from_str(&response.body).map_err(|_| failure())?]
    };
    let (mut texts, mut tokens) = (BTreeMap::<u64, String>::new(), 0);
    for part in &parts {
        for choice in part["choices"].as_array().into_iter().flatten() {
            let text = texts
                .entry(choice["index"].as_u64().unwrap_or(0))
                .or_default();
            *text += choice["text"].as_str().unwrap_or_default();
            *text += choice["finish_reason"].as_str().unwrap_or_default();
        }
        tokens += part["usage"]["completion_tokens"].as_u64().unwrap_or(0);
    }
    Ok((texts, tokens))
}

/// A request, and what it is answered when nothing is wrong.
struct Known {
    body: Value,
    answer: (BTreeMap<u64, String>, u64),
}

/// One of the clients: sends one request after the other until all were taken. What failed.
async fn client(
    address: SocketAddr,
    known: Arc<Vec<Known>>,
    requests: Arc<Vec<usize>>,
    taken: Arc<AtomicUsize>,
) -> Vec<String> {
    let mut failures = Vec::new();
    while let Some(index) = requests.get(taken.fetch_add(1, Ordering::Relaxed)) {
        let Known { body, answer } = &known[*index];
        match ask(address, body).await {
            Ok(given) if given == *answer => {}
            Ok(given) => failures.push(format!("{body}: {given:?}, undisturbed {answer:?}")),
            Err(failure) => failures.push(format!("{body}: {failure}")),
        }
    }
    failures
}

async fn start<M: Meeting>(fleet: &Fleet<M>, place: Place) -> Worker {
    fleet.worker(&[&WORKER, place].concat()).await
}

/// Makes one fault, and mends it before it returns.
async fn strike<M: Meeting>(
    fleet: &Fleet<M>,
    place: Place,
    worker: Worker,
    fault: Fault,
) -> Worker {
    match fault {
        Fault::Killed => {
            worker.kill().await;
            start(fleet, place).await
        }
        Fault::Drained => {
            // The next one is there before this one has gone.
            let (next, ()) = tokio::join!(start(fleet, place), worker.leave());
            next
        }
        Fault::Frozen => {
            worker.signal(Signal::STOP);
            tokio::time::sleep(FROZEN).await;
            worker.signal(Signal::CONT);
            worker
        }
    }
}

/// The value of a metric without labels, or the sum over its labels.
pub(crate) async fn metric(frontend: &Server, name: &str) -> f64 {
    let text = frontend.get("/metrics").await.body;
    let samples = text.lines().filter(|line| line.starts_with(name));
    let values = samples.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok());
    values.sum()
}

pub(crate) async fn chaos_loses_nothing<M: Meeting>(fleet: Fleet<M>) {
    chaos_in(fleet, &TOGETHER).await;
}

pub(crate) async fn chaos_loses_nothing_of_two_pools<M: Meeting>(fleet: Fleet<M>) {
    chaos_in(fleet, &APART).await;
}

async fn chaos_in<M: Meeting>(fleet: Fleet<M>, places: &[Place]) {
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
    for _ in 0..KINDS {
        let body = request(&mut random);
        let answer = ask(frontend.address, &body).await.expect("an answer");
        known.push(Known { body, answer });
    }
    let requests = (0..plan.requests).map(|_| random.random_range(0..KINDS));
    let requests: Arc<Vec<usize>> = Arc::new(requests.collect());
    let (known, taken) = (Arc::new(known), Arc::new(AtomicUsize::new(0)));
    let clients: JoinSet<_> = (0..plan.clients)
        .map(|_| {
            let (known, requests) = (Arc::clone(&known), Arc::clone(&requests));
            client(frontend.address, known, requests, Arc::clone(&taken))
        })
        .collect();

    let mut faults = BTreeMap::<Fault, usize>::new();
    for _ in 0..plan.faults {
        if taken.load(Ordering::Relaxed) >= plan.requests {
            break;
        }
        let fault = [Fault::Killed, Fault::Frozen, Fault::Drained][random.random_range(0..3)];
        let struck = random.random_range(0..places.len());
        let worker = workers.remove(struck);
        let mended = strike(&fleet, places[struck], worker, fault).await;
        workers.insert(struck, mended);
        *faults.entry(fault).or_default() += 1;
        let pause = Duration::from_millis(random.random_range(0..500));
        tokio::time::sleep(pause).await;
    }
    let failures: Vec<String> = clients.join_all().await.into_iter().flatten().collect();
    let moves = metric(&frontend, "genset_migrations_total").await;
    eprintln!(
        "{name}, {places:?}: {} requests, {faults:?}, {moves} moves, {} lost",
        plan.requests,
        failures.len()
    );
    assert!(failures.is_empty(), "seed {}: {failures:#?}", plan.seed);
    // Nothing is left behind.
    for worker in &workers {
        worker.until_running(0.0).await;
    }
    assert_eq!(metric(&frontend, "genset_migration_kept_bytes").await, 0.0);
    assert_eq!(
        metric(&frontend, "genset_migration_failures_total").await,
        0.0
    );
}
