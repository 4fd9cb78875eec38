//! [`Served`]: a `genset` process under test, and what the system reports about it.
#![expect(
    clippy::disallowed_types,
    clippy::disallowed_methods,
    reason = "real processes are waited for, in real time"
)]

use std::fs;
use std::io::{BufRead as _, BufReader, Read};
use std::net::{SocketAddr, TcpListener};
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};

use crate::http::{self, Request};

/// Longer than a debug build takes to start on a busy machine.
const START_LIMIT: Duration = Duration::from_secs(120);
/// The number of log bytes to keep.
const LOG_BYTES: usize = 4 << 20;
/// Ticks of `/proc/PID/stat` in a second, on every Linux.
const TICKS: f64 = 100.0;

/// A running process. Dropping it kills it.
#[derive(Debug)]
pub(crate) struct Served {
    child: Child,
    /// Where it answers `/ready`: its HTTP port, or a worker's status port.
    pub(crate) address: SocketAddr,
    log: Arc<Mutex<Log>>,
}

#[derive(Debug, Default)]
struct Log {
    /// The beginning of the log.
    text: Vec<u8>,
    bytes: u64,
}

/// Which port to give a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Port {
    Http,
    Status,
}

impl Served {
    /// Starts `genset run` with these arguments and waits until it is ready.
    ///
    /// # Errors
    /// It cannot be started, ends, or is not ready in time.
    pub(crate) fn start(binary: &Path, port: Port, arguments: &[&str]) -> anyhow::Result<Self> {
        let served = Self::begin(binary, port, arguments)?;
        let ready = served.wait_until(START_LIMIT, |served| {
            let ready = http::exchange(served.address, Request::get("/ready"));
            ready.is_ok_and(|answer| answer.status == 200)
        });
        if !ready {
            bail!(
                "genset run {} is not ready: {}",
                arguments.join(" "),
                served.log_text()
            );
        }
        Ok(served)
    }

    /// Starts `genset run` with these arguments.
    ///
    /// # Errors
    /// It cannot be started.
    pub(crate) fn begin(binary: &Path, port: Port, arguments: &[&str]) -> anyhow::Result<Self> {
        Self::begin_with(binary, port, arguments, Stdio::null())
    }

    /// Like [`Self::begin`], with something on standard input.
    ///
    /// # Errors
    /// It cannot be started.
    pub(crate) fn begin_with(
        binary: &Path,
        port: Port,
        arguments: &[&str],
        stdin: Stdio,
    ) -> anyhow::Result<Self> {
        let address = free_address()?;
        let flag = match port {
            Port::Http => "--http-port",
            Port::Status => "--status-port",
        };
        let mut child = Command::new(binary)
            .arg("run")
            .args(arguments)
            .args([flag, &address.port().to_string()])
            .env_remove("GENSET_LOG")
            .env_remove("GENSET_CONFIG")
            .stdin(stdin)
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .with_context(|| format!("cannot start {}", binary.display()))?;
        let log = Arc::default();
        if let Some(stderr) = child.stderr.take() {
            let log = Arc::clone(&log);
            thread::spawn(move || keep(stderr, &log));
        }
        Ok(Self {
            child,
            address,
            log,
        })
    }

    /// Polls until `is_done`, the process has ended, or `limit` is over; returns whether it was done.
    pub(crate) fn wait_until(&self, limit: Duration, is_done: impl Fn(&Self) -> bool) -> bool {
        let begun = Instant::now();
        while begun.elapsed() < limit {
            if is_done(self) {
                return true;
            }
            if !self.is_alive() {
                return false;
            }
            thread::sleep(Duration::from_millis(50));
        }
        false
    }

    /// The exit status, if it ends within `limit`.
    pub(crate) fn wait_for_end(&mut self, limit: Duration) -> Option<ExitStatus> {
        let begun = Instant::now();
        while begun.elapsed() < limit {
            if let Ok(Some(status)) = self.child.try_wait() {
                return Some(status);
            }
            thread::sleep(Duration::from_millis(50));
        }
        None
    }

    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    /// Whether it runs and is not a zombie.
    pub(crate) fn is_alive(&self) -> bool {
        is_alive(self.id())
    }

    /// SIGKILL.
    pub(crate) fn kill(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
    }

    /// The beginning of its standard error.
    pub(crate) fn log_text(&self) -> String {
        let log = self.log.lock().unwrap_or_else(PoisonError::into_inner);
        String::from_utf8_lossy(&log.text).into_owned()
    }

    /// The number of bytes that it wrote to standard error.
    pub(crate) fn log_bytes(&self) -> u64 {
        self.log
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .bytes
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        self.kill();
    }
}

fn keep(stderr: impl Read, log: &Mutex<Log>) {
    let mut stderr = BufReader::with_capacity(1 << 16, stderr);
    loop {
        let read = match stderr.fill_buf() {
            Ok([]) | Err(_) => return,
            Ok(piece) => {
                let mut log = log.lock().unwrap_or_else(PoisonError::into_inner);
                let room = LOG_BYTES.saturating_sub(log.text.len()).min(piece.len());
                log.text.extend_from_slice(&piece[..room]);
                log.bytes += piece.len() as u64;
                piece.len()
            }
        };
        stderr.consume(read);
    }
}

fn free_address() -> anyhow::Result<SocketAddr> {
    let listener = TcpListener::bind("127.0.0.1:0").context("no free port")?;
    Ok(listener.local_addr()?)
}

/// Whether a process runs and is not a zombie.
pub(crate) fn is_alive(process: u32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
    stat.rsplit_once(')')
        .is_some_and(|(_, rest)| !rest.trim_start().starts_with('Z'))
}

/// The memory of a process that is in RAM, in bytes; 0 if it is gone.
pub(crate) fn resident_bytes(process: u32) -> u64 {
    status_bytes(process, "VmRSS:")
}

/// The peak since [`forget_peak`].
pub(crate) fn peak_bytes(process: u32) -> u64 {
    status_bytes(process, "VmHWM:")
}

/// Resets the peak.
pub(crate) fn forget_peak(process: u32) {
    // If this fails, the peak counts from the start, which is no less.
    drop(fs::write(format!("/proc/{process}/clear_refs"), "5"));
}

fn status_bytes(process: u32, field: &str) -> u64 {
    let status = fs::read_to_string(format!("/proc/{process}/status")).unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix(field));
    let kibibytes = line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok());
    kibibytes.unwrap_or(0) * 1024
}

/// What a process and its ended children computed, in seconds.
pub(crate) fn cpu_seconds(process: u32) -> f64 {
    let stat = fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
    let Some((_, rest)) = stat.rsplit_once(')') else {
        return 0.0;
    };
    // After the name: state is field 3, utime and stime are 14 and 15.
    let ticks = rest.split_whitespace().skip(11).take(2);
    ticks
        .filter_map(|word| word.parse::<f64>().ok())
        .sum::<f64>()
        / TICKS
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_process_lives_takes_memory_and_computes() {
        let this = std::process::id();
        assert!(is_alive(this));
        assert!(resident_bytes(this) > 0 && peak_bytes(this) >= resident_bytes(this));
        let begun = cpu_seconds(this);
        let mut sum = 0_u64;
        while cpu_seconds(this) - begun < 0.05 {
            sum = std::hint::black_box(sum.wrapping_add(1));
        }
        assert!(!is_alive(u32::MAX));
        assert_eq!(resident_bytes(u32::MAX), 0);
    }
}
