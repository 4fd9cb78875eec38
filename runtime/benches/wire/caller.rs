//! The caller process: sends requests and measures both processes.

use std::fmt;
use std::io::Write as _;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use futures_util::StreamExt;
use genset_backend_common::{Output, RequestContext};
use genset_runtime::Client;
use genset_runtime::plane::{Payload, ResponseStream};
use rustix::process::{Pid, Signal, kill_process};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tokio::task::JoinSet;
use tokio::time::Instant;

use super::process::{cpu_seconds, resident_kib};
use super::worker::{Ask, now_ns};
use super::{Outcome, component};

/// Time limit of every operation.
const PATIENCE: Duration = Duration::from_secs(20);

/// The start of a case, which is not measured: caches and allocator arenas fill.
const WARM_UP: Duration = Duration::from_millis(500);

/// The pause between the items of an active stream, in microseconds.
const ACTIVE_PAUSE_US: u64 = 100_000;

/// How long active streams run before their memory is read.
const ACTIVE_TIME: Duration = Duration::from_secs(2);

/// A measurement.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub(crate) enum Case {
    /// Items per CPU second.
    Items {
        streams: usize,
        pause_us: u64,
        measured_ms: u64,
    },
    /// Time from a request to its first item, one request at a time.
    RoundTrip { samples: usize },
    /// Time from the creation of an item to its arrival at the reader, one stream.
    OneWay { samples: usize },
    /// Memory of idle streams.
    Idle { streams: usize },
    /// Memory of streams that carry items.
    Active { streams: usize },
    /// Time until the caller detects the death of the worker.
    Kill,
}

impl Case {
    pub(crate) fn items(streams: usize, pause_us: u64, measured_ms: u64) -> Self {
        Self::Items {
            streams,
            pause_us,
            measured_ms,
        }
    }
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Items {
                streams,
                pause_us: 0,
                ..
            } => write!(f, "{streams} streams at full speed"),
            Self::Items {
                streams, pause_us, ..
            } => write!(f, "{streams} streams, an item every {pause_us} us"),
            Self::RoundTrip { .. } => write!(f, "from request to first item, 1 stream"),
            Self::OneWay { .. } => write!(f, "from worker to caller, 1 stream"),
            Self::Idle { streams } => write!(f, "{streams} idle streams"),
            Self::Active { streams } => write!(f, "{streams} streams, 10 items a second each"),
            Self::Kill => write!(f, "kill -9 of the worker"),
        }
    }
}

/// Runs a case and prints its figures.
pub(crate) async fn run(directory: &str, worker: &str, case: &str) -> Outcome<()> {
    let component = component(Path::new(directory))?;
    let bench = Bench {
        tokens: Arc::new(component.endpoint("tokens")?.client()),
        times: component.endpoint("times")?.client(),
        worker: worker.parse()?,
    };
    bench.tokens.wait_for_instances(PATIENCE).await?;
    bench.times.wait_for_instances(PATIENCE).await?;
    // The connection exists before the measurement starts.
    drop(ask(&bench.tokens, Ask::ONE).await?);
    let figures = match serde_json::from_str(case)? {
        Case::Items {
            streams,
            pause_us,
            measured_ms,
        } => {
            let time = Duration::from_millis(measured_ms);
            bench.items(streams, pause_us, time).await?
        }
        Case::RoundTrip { samples } => bench.round_trips(samples).await?,
        Case::OneWay { samples } => bench.one_way(samples).await?,
        Case::Idle { streams } => bench.idle(streams).await?,
        Case::Active { streams } => bench.active(streams).await?,
        Case::Kill => bench.kill().await?,
    };
    writeln!(std::io::stdout(), "{figures}")?;
    Ok(())
}

async fn ask<T: Payload>(client: &Client<Ask, T>, ask: Ask) -> Outcome<ResponseStream<T>> {
    Ok(client.random(ask, RequestContext::new("bench")).await?)
}

struct Bench {
    tokens: Arc<Client<Ask, Output>>,
    times: Client<Ask, u64>,
    worker: u32,
}

impl Bench {
    async fn items(&self, streams: usize, pause_us: u64, time: Duration) -> Outcome<Value> {
        let mut reading = self.read(streams, pause_us).await?;
        tokio::time::sleep(WARM_UP).await;
        let (items, cpu, began) = (reading.items(), self.cpu()?, Instant::now());
        tokio::time::sleep(time).await;
        let items = reading.items() - items;
        let (caller, worker) = self.cpu()?;
        reading.is_flowing()?;
        let (caller, worker) = (caller - cpu.0, worker - cpu.1);
        let (items, wall) = (items as f64, began.elapsed().as_secs_f64());
        Ok(json!({
            "items_per_cpu_second": (items / (caller + worker)).round(),
            "items_per_second": (items / wall).round(),
            "worker_cpu_us_per_item": hundredths(worker * 1e6 / items),
            "caller_cpu_us_per_item": hundredths(caller * 1e6 / items),
        }))
    }

    /// Opens `streams` streams, each read by a task, and waits until every one has yielded an item.
    async fn read(&self, streams: usize, pause_us: u64) -> Outcome<Reading> {
        let mut reading = Reading::default();
        for _ in 0..streams {
            let client = Arc::clone(&self.tokens);
            let count = Arc::new(AtomicU64::new(0));
            reading.counts.push(Arc::clone(&count));
            reading.tasks.spawn(async move {
                let mut items = ask(&client, Ask::endless(pause_us)).await?;
                while let Some(item) = items.next().await {
                    item?;
                    count.fetch_add(1, Ordering::Relaxed);
                }
                Ok(())
            });
        }
        let until = Instant::now() + PATIENCE;
        while !reading.is_flowing()? {
            if Instant::now() > until {
                return Err("not every stream brings items".into());
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        Ok(reading)
    }

    async fn round_trips(&self, samples: usize) -> Outcome<Value> {
        let mut times = Vec::with_capacity(samples);
        for _ in 0..samples {
            let began = Instant::now();
            let items = ask(&self.tokens, Ask::ONE).await?;
            times.push(began.elapsed());
            drop(items.collect::<Vec<_>>().await);
        }
        Ok(quantiles(times))
    }

    async fn one_way(&self, samples: usize) -> Outcome<Value> {
        let mut times = Vec::with_capacity(samples);
        let mut items = ask(&self.times, Ask::endless(1000)).await?.take(samples);
        while let Some(sent) = items.next().await {
            times.push(Duration::from_nanos(now_ns().saturating_sub(sent?)));
        }
        Ok(quantiles(times))
    }

    async fn idle(&self, streams: usize) -> Outcome<Value> {
        let before = self.resident()?;
        let quiet = Ask {
            stays_open: true,
            ..Ask::ONE
        };
        let mut open = Vec::with_capacity(streams);
        for _ in 0..streams {
            let mut items = ask(&self.tokens, quiet).await?;
            items.next().await.ok_or("the stream ended")??;
            open.push(items);
        }
        self.memory_per_stream(before, open.len())
    }

    async fn active(&self, streams: usize) -> Outcome<Value> {
        let before = self.resident()?;
        let mut reading = self.read(streams, ACTIVE_PAUSE_US).await?;
        tokio::time::sleep(ACTIVE_TIME).await;
        reading.is_flowing()?;
        self.memory_per_stream(before, reading.tasks.len())
    }

    fn memory_per_stream(&self, before: (f64, f64), streams: usize) -> Outcome<Value> {
        let (caller, worker) = self.resident()?;
        let per_stream = |kib: f64| hundredths(kib / streams as f64);
        Ok(json!({
            "worker_kib_per_stream": per_stream(worker - before.1),
            "caller_kib_per_stream": per_stream(caller - before.0),
        }))
    }

    async fn kill(&self) -> Outcome<Value> {
        let mut items = ask(&self.tokens, Ask::endless(1000)).await?;
        let pid = Pid::from_raw(self.worker.cast_signed()).ok_or("the worker has no id")?;
        let began = Instant::now();
        kill_process(pid, Signal::KILL)?;
        while let Some(Ok(_)) = items.next().await {}
        let error_after = began.elapsed();
        while !self.tokens.instances().is_empty() {
            if began.elapsed() > PATIENCE {
                return Err("the dead worker stays listed".into());
            }
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        Ok(json!({
            "ms_to_the_error": ms(error_after),
            "ms_until_it_is_unlisted": ms(began.elapsed()),
        }))
    }

    /// The CPU seconds of caller and worker.
    fn cpu(&self) -> Outcome<(f64, f64)> {
        Ok((cpu_seconds(std::process::id())?, cpu_seconds(self.worker)?))
    }

    /// The resident KiB of caller and worker.
    fn resident(&self) -> Outcome<(f64, f64)> {
        Ok((
            resident_kib(std::process::id())?,
            resident_kib(self.worker)?,
        ))
    }
}

/// Streams being read, and the number of items each has yielded.
#[derive(Default)]
struct Reading {
    tasks: JoinSet<Outcome<()>>,
    counts: Vec<Arc<AtomicU64>>,
}

impl Reading {
    /// Whether every stream has yielded an item. No stream ends during the measurement.
    fn is_flowing(&mut self) -> Outcome<bool> {
        if let Some(ended) = self.tasks.try_join_next() {
            ended??;
            return Err("a stream ended".into());
        }
        let mut counts = self.counts.iter();
        Ok(counts.all(|count| count.load(Ordering::Relaxed) > 0))
    }

    fn items(&self) -> u64 {
        let counts = self.counts.iter();
        counts.map(|count| count.load(Ordering::Relaxed)).sum()
    }
}

fn quantiles(mut times: Vec<Duration>) -> Value {
    times.sort();
    let at = |percent: usize| {
        let index = times.len() * percent / 100;
        times
            .get(index)
            .map(|time| hundredths(time.as_secs_f64() * 1e6))
    };
    json!({"p50_us": at(50), "p99_us": at(99)})
}

fn ms(time: Duration) -> f64 {
    hundredths(time.as_secs_f64() * 1e3)
}

fn hundredths(value: f64) -> f64 {
    (value * 100.0).round() / 100.0
}
