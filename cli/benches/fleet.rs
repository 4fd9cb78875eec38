//! The cost of two processes: a frontend and a worker joined over TCP, with `--router-mode round-robin` and `kv`, compared with
//! one process for both, in the same run.
//!
//! `cargo bench -p genset --bench fleet` drives them over loopback from this process and reads the CPU time of the others from
//! `/proc`, so the client's work does not count. Then it measures how soon a new worker is used, and how soon a worker's death is
//! detected. With `-- --quick` each load is short and less exact; with `-- --json` the figures are JSON. It takes about a minute;
//! run by `cargo test` it does nothing.

mod support;

use std::fmt::Write as _;
use std::io;
use std::net::SocketAddr;
use std::process::ExitCode;
use std::time::Duration;

use rustix::process::Signal;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::Instant;

use self::support::load::{LOAD_TIME, Load, PATIENCE, WARM_UP, drive, request};
use self::support::process::{Genset, free_address, wait_for};
use self::support::{hardware, per, round};

const LOADS: [Load; 4] = [
    Load::FULL_SPEED,
    Load::PACED,
    Load::SHORT_ANSWERS,
    Load {
        name: "1 stream of one token",
        streams: 1,
        tokens: 1,
        token_delay_ms: 0,
    },
];

/// The router modes measured with two processes.
const MODES: [&str; 2] = ["round-robin", "kv"];

/// The number of starts and deaths that are measured; the median is shown.
const TIMES: usize = 5;

/// Times of a worker's start and death, in milliseconds.
#[derive(Default)]
struct Lives {
    to_first_answer: Vec<f64>,
    to_broken_answer: Vec<f64>,
    to_unlisted: Vec<f64>,
}

fn main() -> ExitCode {
    support::main(|words| measure(words.has("--quick")), table)
}

async fn measure(is_quick: bool) -> io::Result<Value> {
    let (time, times) = if is_quick {
        (LOAD_TIME / 10, 1)
    } else {
        (LOAD_TIME, TIMES)
    };
    let mut loads = Vec::new();
    for load in &LOADS {
        loads.push(measure_load(load, time).await?);
    }
    let mut lives = Lives::default();
    for _ in 0..times {
        measure_life(&mut lives).await?;
    }
    Ok(json!({
        "hardware": hardware(),
        "loads": loads,
        "lives": times,
        "ms_from_start_to_first_answer": median(lives.to_first_answer),
        "ms_from_kill_to_broken_answer": median(lives.to_broken_answer),
        "ms_from_kill_to_unlisted": median(lives.to_unlisted),
    }))
}

fn median(mut values: Vec<f64>) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied()
}

async fn measure_load(load: &Load, time: Duration) -> io::Result<Value> {
    let one = Deployment::one(load.token_delay_ms).await?;
    let one = one.measure(load, time).await?;
    let mut measured = json!({"load": load.name, "one": one});
    for mode in MODES {
        let two = Deployment::two(load.token_delay_ms, mode).await?;
        measured[mode] = two.measure(load, time).await?;
    }
    Ok(measured)
}

/// Processes that answer HTTP together.
struct Deployment {
    address: SocketAddr,
    frontend: Genset,
    worker: Option<Genset>,
    /// The directory for discovery.
    _directory: Option<tempfile::TempDir>,
}

impl Deployment {
    /// Frontend and engine in one process.
    async fn one(token_delay_ms: u32) -> io::Result<Self> {
        let address = free_address()?;
        let port = address.port().to_string();
        let delay = token_delay_ms.to_string();
        let words = ["in=http", "out=sample", "--http-port", &port];
        let frontend = Genset::run(&[&words[..], &["--token-delay-ms", &delay]].concat())?;
        wait_for(address, "/v1/models", "tiny-chat").await?;
        Ok(Self {
            address,
            frontend,
            worker: None,
            _directory: None,
        })
    }

    /// Frontend and worker, which meet in their own directory.
    async fn two(token_delay_ms: u32, mode: &str) -> io::Result<Self> {
        let directory = tempfile::tempdir()?;
        let address = free_address()?;
        let frontend = frontend(address, &directory, mode)?;
        let worker = worker(token_delay_ms, &directory)?;
        wait_for(address, "/v1/models", "tiny-chat").await?;
        Ok(Self {
            address,
            frontend,
            worker: Some(worker),
            _directory: Some(directory),
        })
    }

    async fn measure(mut self, load: &Load, time: Duration) -> io::Result<Value> {
        drive(self.address, load, WARM_UP).await?;
        let (before, began) = (self.cpu_seconds()?, Instant::now());
        let done = drive(self.address, load, time).await?;
        let wall = began.elapsed().as_secs_f64();
        let after = self.cpu_seconds()?;
        let (frontend, worker) = (after.0 - before.0, after.1 - before.1);
        let cpu = frontend + worker;
        let micros = |cpu: f64, count: u64| round(cpu * 1e6 / count as f64, 100.0);
        let result = json!({
            "requests": done.requests,
            "tokens": done.tokens,
            "tokens_per_second": per(done.tokens, wall),
            "tokens_per_cpu_second": per(done.tokens, cpu),
            "cpu_us_per_token": micros(cpu, done.tokens),
            "cpu_us_per_request": micros(cpu, done.requests),
            "frontend_cpu_us_per_request": micros(frontend, done.requests),
            "worker_cpu_us_per_request": micros(worker, done.requests),
            "frontend_peak_mib": self.frontend.memory_mib("VmHWM")?,
            "worker_peak_mib": self.worker.as_ref().map(|it| it.memory_mib("VmHWM")).transpose()?,
        });
        self.frontend.end(Signal::TERM).await?;
        if let Some(worker) = &mut self.worker {
            worker.end(Signal::TERM).await?;
        }
        Ok(result)
    }

    /// The CPU time of the frontend, and of the worker if it is another process.
    fn cpu_seconds(&self) -> io::Result<(f64, f64)> {
        let worker = self.worker.as_ref().map(Genset::cpu_seconds).transpose()?;
        Ok((self.frontend.cpu_seconds()?, worker.unwrap_or_default()))
    }
}

fn frontend(address: SocketAddr, directory: &tempfile::TempDir, mode: &str) -> io::Result<Genset> {
    let port = address.port().to_string();
    let path = directory.path().to_string_lossy();
    let words = ["in=http", "out=dyn", "--http-port", &port];
    let routing = ["--discovery-path", &path, "--router-mode", mode];
    Genset::run(&[&words[..], &routing].concat())
}

fn worker(token_delay_ms: u32, directory: &tempfile::TempDir) -> io::Result<Genset> {
    let delay = token_delay_ms.to_string();
    let path = directory.path().to_string_lossy();
    let words = ["in=dyn", "out=sample", "--token-delay-ms", &delay];
    Genset::run(&[&words[..], &["--discovery-path", &path]].concat())
}

/// Starts a worker beside a running frontend, and kills it during an answer.
async fn measure_life(lives: &mut Lives) -> io::Result<()> {
    let directory = tempfile::tempdir()?;
    let address = free_address()?;
    let mut frontend = frontend(address, &directory, MODES[0])?;
    wait_for(address, "/live", "").await?;
    let began = Instant::now();
    let mut worker = worker(1, &directory)?;
    let mut answer = first_answer(address).await?;
    lives.to_first_answer.push(ms(began));

    let died = Instant::now();
    worker.end(Signal::KILL).await?;
    tokio::time::timeout(PATIENCE, answer.read_to_end(&mut Vec::new())).await??;
    lives.to_broken_answer.push(ms(died));
    wait_for(address, "/v1/models", "\"data\":[]").await?;
    lives.to_unlisted.push(ms(died));
    frontend.end(Signal::TERM).await
}

fn ms(since: Instant) -> f64 {
    round(since.elapsed().as_secs_f64() * 1e3, 10.0)
}

/// Sends requests until a worker answers. The answer is still running, and closes the connection at its end.
async fn first_answer(address: SocketAddr) -> io::Result<TcpStream> {
    let request = String::from_utf8(request(2000)).map_err(io::Error::other)?;
    let request = request.replacen("\r\n", "\r\nconnection: close\r\n", 1);
    let until = Instant::now() + PATIENCE;
    while Instant::now() < until {
        let mut connection = TcpStream::connect(address).await?;
        connection.write_all(request.as_bytes()).await?;
        let mut beginning = vec![0; 1024];
        let read = connection.read(&mut beginning).await?;
        if beginning
            .get(..read)
            .is_some_and(|it| it.starts_with(b"HTTP/1.1 200"))
        {
            return Ok(connection);
        }
        tokio::time::sleep(Duration::from_micros(500)).await;
    }
    Err(io::Error::other("no worker answers"))
}

fn table(results: &Value) -> String {
    let columns = [
        ("tokens/CPU s", "tokens_per_cpu_second"),
        ("tokens/s", "tokens_per_second"),
        ("CPU us/token", "cpu_us_per_token"),
        ("CPU us/request", "cpu_us_per_request"),
        ("of frontend", "frontend_cpu_us_per_request"),
        ("of worker", "worker_cpu_us_per_request"),
        ("frontend MiB", "frontend_peak_mib"),
        ("worker MiB", "worker_peak_mib"),
    ];
    let mut text = results["hardware"].as_str().unwrap_or_default().to_owned();
    let _ = write!(text, "\n\n{:<42}", "load");
    for (title, _) in columns {
        let _ = write!(text, " {title:>14}");
    }
    text.push('\n');
    for load in results["loads"].as_array().into_iter().flatten() {
        for processes in ["one"].into_iter().chain(MODES) {
            let name = load["load"].as_str().unwrap_or_default();
            let _ = write!(text, "{:<42}", format!("{name}, {processes}"));
            for (_, key) in columns {
                let number = &load[processes][key];
                let number = number.as_f64().map_or("-".into(), |it| it.to_string());
                let _ = write!(text, " {number:>14}");
            }
            text.push('\n');
        }
    }
    let _ = writeln!(
        text,
        "\nmedians of {}: worker start to first routed answer {} ms; kill -9 of a worker to the end of its answer {} ms, \
         to its model being unlisted {} ms",
        results["lives"],
        results["ms_from_start_to_first_answer"],
        results["ms_from_kill_to_broken_answer"],
        results["ms_from_kill_to_unlisted"],
    );
    text
}
