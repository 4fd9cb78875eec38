//! How long the detection of a fault takes, with the default limits. Prints the medians, which `docs/guide/faults.md` quotes;
//! asserts only that each time is finite.

use std::time::Duration;

use rustix::process::Signal;
use tokio::time::Instant;

use crate::answers::{End, Stream};
use crate::fleet::Fleet;
use crate::meeting::Meeting;
use crate::support::{Server, soon, until};
use crate::worker::Worker;

/// The defaults of the flags that fleets of tests override.
const DEFAULTS: [&str; 2] = ["--peer-timeout=1.5", "--etcd-lease-ttl=10"];

/// The number of rounds for the median.
const ROUNDS: usize = 3;

/// A worker with its own model, so that `/v1/models` shows when it leaves.
struct Alone {
    worker: Worker,
    model: String,
}

pub(crate) async fn deaths_and_births_take_a_while<M: Meeting>(fleet: Fleet<M>) {
    let frontend = fleet.frontend(&DEFAULTS).await;
    let [mut births, mut errors, mut silences] = [const { Vec::new() }; 3];
    let (mut dead, mut frozen, mut stopped) = (Vec::new(), Vec::new(), Vec::new());
    for round in 0..ROUNDS {
        for (kind, workers) in [
            ("dead", &mut dead),
            ("frozen", &mut frozen),
            ("stopped", &mut stopped),
        ] {
            let spawned = Instant::now();
            workers.push(start(&fleet, &frontend, format!("{kind}-{round}")).await);
            births.push(spawned.elapsed());
        }
    }
    show::<M>("a worker's start to its first answer", births);

    let mut gone = Vec::new();
    for Alone { worker, model } in dead {
        let stream = begin(&frontend, &model).await;
        let killed = Instant::now();
        worker.kill().await;
        errors.push(until_error(stream, killed).await);
        gone.push((model, killed));
    }
    show::<M>("SIGKILL to the error event", errors);
    show::<M>("SIGKILL to the model's end", ends(&frontend, gone).await);

    for Alone { worker, model } in &frozen {
        let stream = begin(&frontend, model).await;
        let stopped = Instant::now();
        worker.signal(Signal::STOP);
        silences.push(until_error(stream, stopped).await);
        worker.signal(Signal::CONT);
    }
    show::<M>("SIGSTOP to the error event", silences);

    let mut leaving = Vec::new();
    for Alone { worker, model } in &stopped {
        leaving.push((model.clone(), Instant::now()));
        worker.signal(Signal::TERM);
    }
    show::<M>("SIGTERM to the model's end", ends(&frontend, leaving).await);
}

/// Starts a worker for `model`; returns after a request to it was answered.
async fn start<M: Meeting>(fleet: &Fleet<M>, frontend: &Server, model: String) -> Alone {
    let name = format!("--model-name={model}");
    // The test measures how soon a client learns of the fault.
    let mut words = vec!["--token-delay-ms=5", "--migration-limit=0", &name];
    words.extend(DEFAULTS);
    let command = fleet.worker_command("out=sample", &words);
    let answered = soon(async {
        loop {
            if let Ok(stream) = Stream::begin_of(&model, frontend.address, 1).await {
                return stream.end().await;
            }
        }
    });
    let (worker, answer) = tokio::join!(Worker::spawn(command), answered);
    assert!(matches!(answer, End::Done(1)), "{answer:?}");
    Alone { worker, model }
}

/// A stream of `model` that has text and does not end by itself.
async fn begin(frontend: &Server, model: &str) -> Stream {
    let begun = Stream::begin_of(model, frontend.address, 1_000_000).await;
    let mut stream = begun.expect("a stream");
    stream.until_text().await;
    stream
}

async fn until_error(stream: Stream, since: Instant) -> Duration {
    let end = stream.end().await;
    assert!(matches!(end, End::Error(_)), "{end:?}");
    since.elapsed()
}

/// For each model, the time from its moment until it is no longer listed.
async fn ends(frontend: &Server, mut models: Vec<(String, Instant)>) -> Vec<Duration> {
    let mut ends = Vec::new();
    until(async || {
        let listed = frontend.get("/v1/models").await.body;
        models.retain(|(model, since)| {
            let is_listed = listed.contains(&format!("\"{model}\""));
            if !is_listed {
                ends.push(since.elapsed());
            }
            is_listed
        });
        models.is_empty()
    })
    .await;
    ends
}

fn show<M>(what: &str, mut times: Vec<Duration>) {
    times.sort();
    let median = times.get(times.len() / 2).expect("some times");
    let fleet = std::any::type_name::<M>().rsplit("::").next();
    eprintln!("{}: {what}: {median:.1?}", fleet.expect("a name"));
}
