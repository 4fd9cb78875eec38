//! What the server itself costs: CPU time for each token and request, memory, and the time until it is ready.
//!
//! `cargo bench -p genset --bench http` starts the `genset` binary with `out=sample`, drives it over loopback from this
//! process, and reads the server's own CPU time and memory from `/proc`, so the client's work does not count. With
//! `-- --json` it prints JSON. It takes about half a minute; run by `cargo test` it does nothing.

use std::fmt::Write as _;
use std::io::{self, Write as _};
use std::net::{SocketAddr, TcpListener};
use std::process::{ExitCode, Stdio};
use std::time::Duration;

use rustix::param::clock_ticks_per_second;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::process::{Child, Command};
use tokio::task::JoinSet;
use tokio::time::Instant;

/// How long each load lasts; the clock of `/proc` ticks a hundred times a second, so this is exact to about 1 %.
const LOAD_TIME: Duration = Duration::from_secs(4);

/// Load before the measured one: caches and allocator arenas fill.
const WARM_UP: Duration = Duration::from_millis(500);

/// Starts, of which the median is told.
const STARTS: usize = 10;

/// A server that takes longer than this to start, or to answer, is broken.
const PATIENCE: Duration = Duration::from_secs(20);

struct Load {
    name: &'static str,
    streams: usize,
    tokens: u32,
    token_delay_ms: u32,
}

const LOADS: [Load; 4] = [
    Load {
        name: "64 streams, no delay",
        streams: 64,
        tokens: 128,
        token_delay_ms: 0,
    },
    Load {
        name: "256 streams, no delay",
        streams: 256,
        tokens: 128,
        token_delay_ms: 0,
    },
    Load {
        name: "256 streams, a token every 7 ms",
        streams: 256,
        tokens: 128,
        token_delay_ms: 7,
    },
    Load {
        name: "16 streams of one token",
        streams: 16,
        tokens: 1,
        token_delay_ms: 0,
    },
];

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let has = |word: &str| words.iter().any(|given| given == word);
    if !has("--bench") || has("--test") {
        return ExitCode::SUCCESS;
    }
    let measured = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .and_then(|runtime| runtime.block_on(measure()));
    let shown = measured.and_then(|results| {
        let text = if has("--json") {
            format!("{results:#}\n")
        } else {
            table(&results)
        };
        io::stdout().write_all(text.as_bytes())
    });
    match shown {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

async fn measure() -> io::Result<Value> {
    let mut starts = Vec::new();
    for _ in 0..STARTS {
        let mut server = Server::start(0).await?;
        starts.push(server.ready_after);
        server.stop().await?;
    }
    starts.sort();
    let mut loads = Vec::new();
    for load in &LOADS {
        loads.push(measure_load(load).await?);
    }
    Ok(json!({
        "hardware": hardware(),
        "ready_after_ms": starts.get(STARTS / 2).map(|time| round(time.as_secs_f64() * 1e3, 10.0)),
        "loads": loads,
    }))
}

async fn measure_load(load: &Load) -> io::Result<Value> {
    let mut server = Server::start(load.token_delay_ms).await?;
    let idle = server.memory_mib("VmRSS")?;
    drive(server.address, load, WARM_UP).await?;
    let (cpu, began) = (server.cpu_seconds()?, Instant::now());
    let done = drive(server.address, load, LOAD_TIME).await?;
    let wall = began.elapsed().as_secs_f64();
    let cpu = server.cpu_seconds()? - cpu;
    let result = json!({
        "load": load.name,
        "requests": done.requests,
        "tokens": done.tokens,
        "events_per_token": round(ratio(done.events, done.tokens), 100.0),
        "tokens_per_second": per(done.tokens, wall),
        "tokens_per_cpu_second": per(done.tokens, cpu),
        "cpu_us_per_request": round(cpu * 1e6 / done.requests as f64, 10.0),
        "cpu_us_per_token": round(cpu * 1e6 / done.tokens as f64, 100.0),
        "cpu_seconds": round(cpu, 100.0),
        "wall_seconds": round(wall, 100.0),
        "idle_rss_mib": idle,
        "rss_mib": server.memory_mib("VmRSS")?,
        "peak_rss_mib": server.memory_mib("VmHWM")?,
    });
    server.stop().await?;
    Ok(result)
}

fn ratio(part: u64, whole: u64) -> f64 {
    part as f64 / whole as f64
}

/// How many a second.
fn per(count: u64, seconds: f64) -> f64 {
    (count as f64 / seconds).round()
}

fn round(value: f64, digits: f64) -> f64 {
    (value * digits).round() / digits
}

fn hardware() -> String {
    let cpus = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = cpus
        .lines()
        .find_map(|line| line.strip_prefix("model name"));
    let model = model
        .unwrap_or_default()
        .trim_start_matches([' ', '\t', ':']);
    let cores = std::thread::available_parallelism().map_or(0, usize::from);
    format!("{cores} cores, {model}")
}

fn table(results: &Value) -> String {
    let columns = [
        ("requests", "requests"),
        ("tokens/CPU s", "tokens_per_cpu_second"),
        ("tokens/s", "tokens_per_second"),
        ("events/token", "events_per_token"),
        ("CPU us/token", "cpu_us_per_token"),
        ("CPU us/request", "cpu_us_per_request"),
        ("idle MiB", "idle_rss_mib"),
        ("after MiB", "rss_mib"),
        ("peak MiB", "peak_rss_mib"),
    ];
    let mut text = format!(
        "{}\n\n{:<32}",
        results["hardware"].as_str().unwrap_or_default(),
        "load"
    );
    for (title, _) in columns {
        let _ = write!(text, " {title:>14}");
    }
    text.push('\n');
    for load in results["loads"].as_array().into_iter().flatten() {
        let _ = write!(text, "{:<32}", load["load"].as_str().unwrap_or_default());
        for (_, key) in columns {
            let number = load[key].as_f64().unwrap_or(f64::NAN);
            let _ = write!(text, " {number:>14}");
        }
        text.push('\n');
    }
    let _ = writeln!(
        text,
        "\nready after {} ms (median of {STARTS} starts)",
        results["ready_after_ms"]
    );
    text
}

/// The program that is measured.
struct Server {
    child: Child,
    pid: Pid,
    address: SocketAddr,
    ready_after: Duration,
}

impl Server {
    /// Starts it and waits until `/ready` says 200.
    async fn start(token_delay_ms: u32) -> io::Result<Self> {
        // A port that was free a moment ago: the banner would come later than readiness.
        let address = TcpListener::bind("127.0.0.1:0")?.local_addr()?;
        let mut command = Command::new(env!("CARGO_BIN_EXE_genset"));
        command
            .args(["run", "in=http", "out=sample"])
            .args(["--http-port", &address.port().to_string()])
            .args(["--token-delay-ms", &token_delay_ms.to_string()])
            .env_clear()
            .env("GENSET_LOG", "warn")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .kill_on_drop(true);
        let began = Instant::now();
        let child = command.spawn()?;
        let pid = child.id().and_then(|id| Pid::from_raw(id.cast_signed()));
        let pid = pid.ok_or_else(|| io::Error::other("the server ended at once"))?;
        while !is_ready(address).await {
            if began.elapsed() > PATIENCE {
                return Err(io::Error::other("the server does not become ready"));
            }
            tokio::time::sleep(Duration::from_micros(500)).await;
        }
        Ok(Self {
            child,
            pid,
            address,
            ready_after: began.elapsed(),
        })
    }

    async fn stop(&mut self) -> io::Result<()> {
        kill_process(self.pid, Signal::TERM)?;
        self.child.wait().await.map(drop)
    }

    fn proc_file(&self, name: &str) -> io::Result<String> {
        std::fs::read_to_string(format!("/proc/{}/{name}", self.pid.as_raw_nonzero()))
    }

    /// The CPU time of all its threads so far, in user and kernel.
    fn cpu_seconds(&self) -> io::Result<f64> {
        let stat = self.proc_file("stat")?;
        // The name, in parentheses, may hold spaces; utime and stime are the fields 14 and 15 of the whole.
        let after_name = stat.rsplit(')').next().unwrap_or_default();
        let fields = after_name.split_whitespace().skip(11).take(2);
        let ticks: u64 = fields.filter_map(|field| field.parse::<u64>().ok()).sum();
        Ok(ratio(ticks, clock_ticks_per_second()))
    }

    fn memory_mib(&self, name: &str) -> io::Result<f64> {
        let status = self.proc_file("status")?;
        let line = status.lines().find_map(|line| line.strip_prefix(name));
        let kib = line.and_then(|line| line.split_whitespace().nth(1)?.parse::<f64>().ok());
        Ok(round(kib.unwrap_or(f64::NAN) / 1024.0, 10.0))
    }
}

async fn is_ready(address: SocketAddr) -> bool {
    let asked = async {
        let mut stream = TcpStream::connect(address).await?;
        stream
            .write_all(b"GET /ready HTTP/1.1\r\nhost: bench\r\nconnection: close\r\n\r\n")
            .await?;
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).await?;
        io::Result::Ok(answer.starts_with(b"HTTP/1.1 200"))
    };
    asked.await.unwrap_or(false)
}

#[derive(Default)]
struct Done {
    requests: u64,
    tokens: u64,
    events: u64,
}

/// Keeps every stream busy for `time`, each on a connection of its own, and lets the last requests finish.
async fn drive(address: SocketAddr, load: &Load, time: Duration) -> io::Result<Done> {
    let until = Instant::now() + time;
    let request = request(load.tokens);
    let mut streams = JoinSet::new();
    for _ in 0..load.streams {
        let request = request.clone();
        streams.spawn(async move {
            let mut connection = TcpStream::connect(address).await?;
            connection.set_nodelay(true)?;
            let (mut requests, mut events) = (0, 0);
            while Instant::now() < until {
                connection.write_all(&request).await?;
                events += tokio::time::timeout(PATIENCE, read_stream(&mut connection)).await??;
                requests += 1;
            }
            io::Result::Ok((requests, events))
        });
    }
    let mut done = Done::default();
    while let Some(stream) = streams.join_next().await {
        let (requests, events) = stream.map_err(io::Error::other)??;
        done.requests += requests;
        done.tokens += requests * u64::from(load.tokens);
        done.events += events;
    }
    Ok(done)
}

fn request(max_tokens: u32) -> Vec<u8> {
    let body = json!({
        "model": "tiny-chat",
        "stream": true,
        "ignore_eos": true,
        "max_tokens": max_tokens,
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
    })
    .to_string();
    let len = body.len();
    format!(
        "POST /v1/chat/completions HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\n\
         content-length: {len}\r\n\r\n{body}"
    )
    .into_bytes()
}

/// Reads one streamed answer and counts its events. The client does as little as it can: it shares the machine.
async fn read_stream(connection: &mut TcpStream) -> io::Result<u64> {
    const LAST_CHUNK: &[u8] = b"data: [DONE]\n\n\r\n0\r\n\r\n";
    let (mut buffer, mut events) = (Vec::with_capacity(16 << 10), 0);
    loop {
        // What may be the beginning of the end, or of an event's end, stays.
        let kept = buffer.len().min(LAST_CHUNK.len());
        buffer.drain(..buffer.len() - kept);
        if connection.read_buf(&mut buffer).await? == 0 {
            return Err(io::Error::other("the server closed inside a stream"));
        }
        let new = buffer.get(kept.saturating_sub(1)..).unwrap_or_default();
        events += new.windows(2).filter(|pair| pair == b"\n\n").count() as u64;
        if buffer.ends_with(LAST_CHUNK) {
            return Ok(events);
        }
        if buffer.starts_with(b"HTTP/1.1 ") && !buffer.starts_with(b"HTTP/1.1 200") {
            let answer = String::from_utf8_lossy(&buffer);
            return Err(io::Error::other(format!("refused: {answer}")));
        }
    }
}
