//! The worker binary as operators see it: its flags, its status port, and SIGTERM.

#![allow(
    clippy::expect_used,
    clippy::panic,
    clippy::unwrap_used,
    reason = "a test fails by panicking, also in its helpers"
)]

use std::net::SocketAddr;
use std::path::Path;
use std::process::{Output, Stdio};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader, Lines};
use tokio::net::TcpStream;
use tokio::process::{Child, ChildStderr, Command};

/// The time after which a test fails.
const PATIENCE: Duration = Duration::from_secs(60);

async fn soon<T>(what: impl Future<Output = T>) -> T {
    tokio::time::timeout(PATIENCE, what)
        .await
        .expect("it never came")
}

/// A directory of these tests: in the default one, the fleet of the user who runs them would find their workers.
const DISCOVERY: &str = concat!(env!("CARGO_TARGET_TMPDIR"), "/sample-worker-discovery");

fn worker(words: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_sample-worker"));
    command
        .args(words)
        .env_clear()
        .env("GENSET_DISCOVERY_PATH", DISCOVERY)
        .stdin(Stdio::null())
        .kill_on_drop(true);
    command
}

async fn ended(words: &[&str]) -> Output {
    soon(worker(words).output()).await.expect("it runs")
}

struct Running {
    child: Child,
    log: Lines<BufReader<ChildStderr>>,
}

impl Running {
    fn start(words: &[&str]) -> Self {
        let mut command = worker(words);
        command.stderr(Stdio::piped());
        let mut child = command.spawn().expect("the binary starts");
        let log = child.stderr.take().expect("a pipe");
        let log = BufReader::new(log).lines();
        Self { child, log }
    }

    /// Reads the log up to a line with `text`, and returns the rest of that line.
    async fn logged(&mut self, text: &str) -> String {
        loop {
            let line = soon(self.log.next_line()).await.expect("a pipe");
            let line = line.unwrap_or_else(|| panic!("no {text:?} in the log"));
            if let Some((_, rest)) = line.split_once(text) {
                return rest.to_owned();
            }
        }
    }

    async fn terminate(mut self) -> Option<i32> {
        let pid = self
            .child
            .id()
            .and_then(|id| Pid::from_raw(id.cast_signed()));
        kill_process(pid.expect("it runs"), Signal::TERM).expect("it can be signalled");
        let read_log = async { while let Ok(Some(_)) = self.log.next_line().await {} };
        soon(read_log).await;
        soon(self.child.wait()).await.expect("it ends").code()
    }
}

/// Status and body of a GET.
async fn get(address: SocketAddr, path: &str) -> (u16, String) {
    let mut stream = soon(TcpStream::connect(address)).await.expect("it listens");
    let request = format!("GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n");
    stream
        .write_all(request.as_bytes())
        .await
        .expect("it reads");
    let mut answer = String::new();
    soon(stream.read_to_string(&mut answer))
        .await
        .expect("it answers");
    let (head, body) = answer.split_once("\r\n\r\n").expect("a head");
    let status = head
        .split(' ')
        .nth(1)
        .and_then(|status| status.parse().ok());
    (status.expect("a status"), body.to_owned())
}

#[tokio::test]
async fn the_worker_serves_until_sigterm() {
    let mut worker = Running::start(&["--status-port", "0", "--model-name", "mine"]);
    let address: SocketAddr = worker.logged("status on http://").await.parse().unwrap();
    soon(async { while get(address, "/ready").await.0 != 200 {} }).await;
    assert_eq!(get(address, "/live").await.0, 200);
    assert_eq!(get(address, "/health").await.0, 200);
    let (status, metrics) = get(address, "/metrics").await;
    assert_eq!(status, 200);
    assert!(metrics.contains("genset_worker_"), "{metrics}");
    assert!(metrics.ends_with("# EOF\n"), "{metrics}");
    assert_eq!(worker.terminate().await, Some(0));
}

#[tokio::test]
async fn help_lists_the_flags_every_worker_has() {
    let help = ended(&["--help"]).await;
    assert_eq!(help.status.code(), Some(0));
    let text = String::from_utf8(help.stdout).unwrap();
    for flag in [
        "--model-name",
        "--model-path",
        "--namespace",
        "--component",
        "--endpoint",
        "--endpoint-types",
        "--discovery-backend",
        "--request-plane",
        "--status-port",
        "--grace",
        "--token-delay-ms",
    ] {
        assert!(text.contains(&format!("{flag} <")), "{flag} in {text}");
    }
}

#[tokio::test]
async fn settings_come_from_flags_then_the_environment_then_the_file() {
    let file = Path::new(env!("CARGO_TARGET_TMPDIR")).join("settings.toml");
    let content = "model-name = \"of-the-file\"\ntoken-delay-ms = 1\ngrace = 1\nvocab-size = 9\n";
    std::fs::write(&file, content).unwrap();
    let mut command = worker(&["--print-config", "--grace=3", "--model-name=mine"]);
    command
        .env("GENSET_CONFIG", &file)
        .env("GENSET_TOKEN_DELAY_MS", "2")
        .env("GENSET_GRACE", "2");
    let shown = soon(command.output()).await.unwrap();
    let text = String::from_utf8(shown.stdout).unwrap();
    assert_eq!(shown.status.code(), Some(0), "{text}");
    for (setting, source) in [
        ("model-name = \"mine\" ", "flag"),
        ("grace = 3 ", "flag"),
        ("token-delay-ms = 2 ", "environment"),
        ("vocab-size = 9 ", "file"),
        ("max-running-requests = 1024 ", "default"),
    ] {
        let line = text.lines().find(|line| line.starts_with(setting));
        let line = line.unwrap_or_else(|| panic!("no {setting}in {text}"));
        assert!(line.ends_with(&format!("# {source}")), "{line}");
    }
}

#[tokio::test]
async fn a_bad_setting_of_the_file_or_the_environment_is_named() {
    let file = Path::new(env!("CARGO_TARGET_TMPDIR")).join("bad.toml");
    std::fs::write(&file, "http-port = 8080\n").unwrap();
    let named = format!("--config={}", file.display());
    let refused = ended(&[named.as_str()]).await;
    let log = String::from_utf8_lossy(&refused.stderr);
    assert_eq!(refused.status.code(), Some(2), "{log}");
    assert!(log.contains("\"http-port\" is no setting"), "{log}");

    let mut command = worker(&["--print-config"]);
    command.env("GENSET_GRACE", "soon");
    let refused = soon(command.output()).await.unwrap();
    let log = String::from_utf8_lossy(&refused.stderr);
    assert_eq!(refused.status.code(), Some(2), "{log}");
    assert!(log.contains("GENSET_GRACE"), "{log}");
}

#[tokio::test]
async fn what_cannot_be_set_up_ends_with_code_2_and_names_the_flag() {
    for (flag, value) in [
        ("--discovery-backend", "zookeeper"),
        ("--request-plane", "udp"),
        ("--namespace", "a b"),
        ("--model-path", "/no/such/folder"),
        ("--endpoint-types", "images"),
        ("--status-host", "192.0.2.1"),
        ("--grace", "-1"),
    ] {
        let flag_and_value = format!("{flag}={value}");
        let words = [flag_and_value.as_str(), "--status-port=0"];
        let refused = ended(&words).await;
        let log = String::from_utf8_lossy(&refused.stderr);
        assert_eq!(refused.status.code(), Some(2), "{flag}: {log}");
        assert!(log.contains(flag), "{flag}: {log}");
    }
}

/// Supervisors start it again after 1, and not after 2.
#[tokio::test]
async fn a_discovery_directory_that_is_not_there_yet_ends_with_code_1() {
    let failed = ended(&["--discovery-path=/dev/null/discovery"]).await;
    let log = String::from_utf8_lossy(&failed.stderr);
    assert_eq!(failed.status.code(), Some(1), "{log}");
    assert!(log.contains("/dev/null/discovery"), "{log}");
}

#[tokio::test]
async fn a_setting_that_the_engine_refuses_ends_with_code_2() {
    for (words, setting) in [
        (["--vocab-size", "0"], "vocab_size"),
        (["--context-length", "99999999"], "context"),
    ] {
        let failed = ended(&words).await;
        assert_eq!(failed.status.code(), Some(2), "{words:?}");
        let log = String::from_utf8_lossy(&failed.stderr);
        assert!(log.contains(setting), "{log}");
    }
}

/// Compose files set it so where nothing is given.
#[tokio::test]
async fn an_empty_endpoint_of_a_collector_is_none() {
    let mut command = worker(&["--vocab-size", "0"]);
    command.env("OTEL_EXPORTER_OTLP_ENDPOINT", "");
    let ended = soon(command.output()).await.unwrap();
    let log = String::from_utf8_lossy(&ended.stderr);
    assert!(log.contains("vocab_size"), "{log}");
    assert!(!log.contains("OTEL"), "{log}");
}
