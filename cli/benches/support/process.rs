//! A `genset` process, and its figures in `/proc`.

use std::io;
use std::net::{SocketAddr, TcpListener};
use std::process::Stdio;
use std::time::Duration;

use rustix::param::clock_ticks_per_second;
use rustix::process::{Pid, Signal, kill_process};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::process::{Child, Command};
use tokio::time::Instant;

use super::load::PATIENCE;
use super::round;

/// The polling interval.
const PAUSE: Duration = Duration::from_micros(500);

/// A `genset run` that is killed on drop: the binary that Cargo built, or the one that `GENSET_BENCH_PROGRAM` names, to compare
/// two builds.
pub(crate) struct Genset {
    child: Child,
    pid: Pid,
}

impl Genset {
    pub(crate) fn run(words: &[&str]) -> io::Result<Self> {
        let program = std::env::var("GENSET_BENCH_PROGRAM");
        let program = program.unwrap_or_else(|_| env!("CARGO_BIN_EXE_genset").to_owned());
        let mut command = Command::new(program);
        command
            .arg("run")
            .args(words)
            .env_clear()
            .env("GENSET_LOG", "error")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .kill_on_drop(true);
        let child = command.spawn()?;
        let pid = child.id().and_then(|id| Pid::from_raw(id.cast_signed()));
        let pid = pid.ok_or_else(|| io::Error::other("genset ended at once"))?;
        Ok(Self { child, pid })
    }

    /// Sends a signal and waits for the end.
    pub(crate) async fn end(&mut self, signal: Signal) -> io::Result<()> {
        kill_process(self.pid, signal)?;
        self.child.wait().await.map(drop)
    }

    fn proc_file(&self, name: &str) -> io::Result<String> {
        std::fs::read_to_string(format!("/proc/{}/{name}", self.pid.as_raw_nonzero()))
    }

    /// The CPU time of all its threads so far, in user and kernel mode.
    pub(crate) fn cpu_seconds(&self) -> io::Result<f64> {
        let stat = self.proc_file("stat")?;
        // The name, in parentheses, may contain spaces; utime and stime are fields 14 and 15 of the line.
        let after_name = stat.rsplit(')').next().unwrap_or_default();
        let fields = after_name.split_whitespace().skip(11).take(2);
        let ticks: u64 = fields.filter_map(|field| field.parse::<u64>().ok()).sum();
        Ok(ticks as f64 / clock_ticks_per_second() as f64)
    }

    pub(crate) fn memory_mib(&self, name: &str) -> io::Result<f64> {
        let status = self.proc_file("status")?;
        let line = status.lines().find_map(|line| line.strip_prefix(name));
        let kib = line.and_then(|line| line.split_whitespace().nth(1)?.parse::<f64>().ok());
        Ok(round(kib.unwrap_or(f64::NAN) / 1024.0, 10.0))
    }
}

/// A port that was free a moment ago: waiting for the banner would take longer than readiness.
pub(crate) fn free_address() -> io::Result<SocketAddr> {
    TcpListener::bind("127.0.0.1:0")?.local_addr()
}

/// Waits until a GET of `path` returns 200 and a body that contains `text`.
pub(crate) async fn wait_for(address: SocketAddr, path: &str, text: &str) -> io::Result<()> {
    let until = Instant::now() + PATIENCE;
    loop {
        let answer = get(address, path).await.unwrap_or_default();
        if answer.starts_with("HTTP/1.1 200") && answer.contains(text) {
            return Ok(());
        }
        if Instant::now() > until {
            let problem = format!("{path} does not become 200 with {text:?}: {answer}");
            return Err(io::Error::other(problem));
        }
        tokio::time::sleep(PAUSE).await;
    }
}

/// The answer to a GET of `path` on its own connection.
pub(crate) async fn get(address: SocketAddr, path: &str) -> io::Result<String> {
    let mut stream = TcpStream::connect(address).await?;
    let request = format!("GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).await?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await?;
    Ok(answer)
}
