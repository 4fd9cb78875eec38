//! Starts the binary, and has a minimal HTTP client.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Output, Stdio};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use tempfile::NamedTempFile;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpStream;
use tokio::process::{Child, ChildStdout, Command};

/// The time limit of a test. Nothing here takes a tenth of it.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// The interval between looks while waiting for an event. Each look costs time on the machine that all tests share.
pub(crate) const LOOK_AGAIN: Duration = Duration::from_millis(20);

/// Waits for an expected event.
pub(crate) async fn soon<T>(what: impl Future<Output = T>) -> T {
    tokio::time::timeout(PATIENCE, what)
        .await
        .expect("it never came")
}

/// Looks again and again until it is so.
pub(crate) async fn until(mut is_so: impl AsyncFnMut() -> bool) {
    soon(async {
        while !is_so().await {
            tokio::time::sleep(LOOK_AGAIN).await;
        }
    })
    .await;
}

/// The binary, with a clean environment.
pub(crate) fn genset(words: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_genset"));
    command.args(words).env_clear().kill_on_drop(true);
    command
}

/// A temporary file with this content.
pub(crate) fn file(content: &str) -> NamedTempFile {
    let file = NamedTempFile::new().expect("a file");
    std::fs::write(file.path(), content).expect("a file");
    file
}

/// The model folder of this repository.
pub(crate) fn tiny_chat() -> PathBuf {
    repository("models/tiny-chat")
}

/// A copy of tiny-chat in a folder `base`, without the chat template, as base models have none.
pub(crate) fn base_model(folder: &Path) -> PathBuf {
    let base = folder.join("base");
    std::fs::create_dir(&base).expect("a folder");
    for file in ["config.json", "tokenizer.json", "model.safetensors"] {
        std::fs::copy(tiny_chat().join(file), base.join(file)).expect("a copy");
    }
    let config = std::fs::read(tiny_chat().join("tokenizer_config.json")).expect("it is there");
    let mut config: Value = serde_json::from_slice(&config).expect("JSON");
    let template = config["chat_template"].take();
    assert!(template.is_string());
    let written = std::fs::write(base.join("tokenizer_config.json"), config.to_string());
    written.expect("a file");
    base
}

pub(crate) fn repository(path: &str) -> PathBuf {
    [env!("CARGO_MANIFEST_DIR"), "..", path].iter().collect()
}

/// Makes Python cache its bytecode, but not beside the sources. It is for an environment without `PYTHONDONTWRITEBYTECODE`, with
/// which Python would compile even the standard library at every start.
pub(crate) const PYTHON_CACHE: &str = concat!(
    "-X 'pycache_prefix=",
    env!("CARGO_TARGET_TMPDIR"),
    "/pycache'"
);

/// The flag that starts the stand-in for the server of another project, for `api`.
pub(crate) fn stand_in(api: &str) -> String {
    let script = repository("engines/launcher/tests/stand_in");
    format!(
        "--server-cmd=python3 -S {PYTHON_CACHE} '{}' {api}",
        script.display()
    )
}

/// The command of an engine in `python/`, and the environment that it needs. `cargo xtask test python-package` installs the
/// interpreter.
pub(crate) fn python_engine(script: &str) -> (String, [(&'static str, PathBuf); 1]) {
    let target = PathBuf::from(env!("CARGO_TARGET_TMPDIR"));
    let python = target.with_file_name("venv-engine/bin/python");
    assert!(
        python.exists(),
        "{} is not there: run `cargo xtask test python-package`, which makes it",
        python.display()
    );
    let script = repository("python").join(script);
    let command = format!(
        "'{}' {PYTHON_CACHE} '{}'",
        python.display(),
        script.display()
    );
    (command, [("PYTHONPATH", repository("python/src"))])
}

/// The result of a run.
#[derive(Debug)]
pub(crate) struct Ended {
    pub(crate) code: Option<i32>,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl Ended {
    pub(crate) fn of(output: &Output) -> Self {
        Self {
            code: output.status.code(),
            stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
            stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
        }
    }

    /// The end has this exit code, and this text is on standard error.
    #[track_caller]
    pub(crate) fn fails(&self, code: i32, text: &str) {
        assert_eq!(self.code, Some(code), "{text:?}: {self:?}");
        assert!(self.stderr.contains(text), "{text:?}: {self:?}");
    }
}

/// Runs the command to its end, with `input` on standard input.
pub(crate) async fn run_with(mut command: Command, input: &[u8]) -> Ended {
    command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let mut child = command.spawn().expect("the binary starts");
    let mut stdin = child.stdin.take().expect("a pipe");
    let output = soon(async {
        // A program that does not read its input may have exited already.
        drop(stdin.write_all(input).await);
        drop(stdin);
        child.wait_with_output().await.expect("it ends")
    })
    .await;
    Ended::of(&output)
}

/// Runs the command to its end with empty standard input.
pub(crate) async fn run(words: &[&str]) -> Ended {
    run_with(genset(words), b"").await
}

/// A running `genset run in=http`.
#[derive(Debug)]
pub(crate) struct Server {
    child: Child,
    stdout: BufReader<ChildStdout>,
    /// The log. The process has its own handle: a shared handle has one offset for both reading and writing.
    stderr: NamedTempFile,
    pub(crate) address: SocketAddr,
}

impl Server {
    /// Starts `genset run in=http --http-port 0` with additional words, and waits until it prints its address.
    pub(crate) async fn start(words: &[&str]) -> Self {
        let mut command = genset(&["run", "in=http", "--http-port", "0"]);
        command.args(words);
        Self::spawn(command).await
    }

    /// Starts `command` and waits until it prints its address.
    pub(crate) async fn spawn(mut command: Command) -> Self {
        let stderr = NamedTempFile::new().expect("a file for the log");
        command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(stderr.reopen().expect("a second handle"));
        let mut child = command.spawn().expect("the binary starts");
        let stdout = BufReader::new(child.stdout.take().expect("a pipe"));
        let address = SocketAddr::from(([127, 0, 0, 1], 0));
        let mut server = Self {
            child,
            stdout,
            stderr,
            address,
        };
        let line = server.line_with("listening on http://").await;
        let shown = line.rsplit("http://").next().expect("an address");
        server.address = shown.parse().expect("an address");
        server
    }

    /// Reads standard output up to a line that contains `text`.
    pub(crate) async fn line_with(&mut self, text: &str) -> String {
        loop {
            let mut line = String::new();
            let read = soon(self.stdout.read_line(&mut line)).await;
            if read.expect("a pipe") == 0 {
                panic!("no line with {text:?}; the log: {}", self.log());
            }
            if line.contains(text) {
                return line.trim_end().to_owned();
            }
        }
    }

    /// The log so far.
    pub(crate) fn log(&self) -> String {
        std::fs::read_to_string(self.stderr.path()).expect("a log")
    }

    pub(crate) fn signal(&self, signal: Signal) {
        send_signal(&self.child, signal);
    }

    /// The exit code.
    pub(crate) async fn exit_code(&mut self) -> Option<i32> {
        soon(self.child.wait()).await.expect("it ends").code()
    }

    /// Sends SIGTERM and expects a clean end.
    pub(crate) async fn stop(mut self) {
        self.signal(Signal::TERM);
        assert_eq!(self.exit_code().await, Some(0), "{}", self.log());
    }

    pub(crate) async fn get(&self, path: &str) -> Response {
        Exchange::begin(self.address, "GET", path, "")
            .await
            .response()
            .await
    }

    /// Posts a body; returns the answer when its head has arrived.
    pub(crate) async fn post(&self, path: &str, body: &str) -> Exchange {
        Exchange::begin(self.address, "POST", path, body).await
    }

    /// Posts a body; returns the whole answer.
    pub(crate) async fn ask(&self, path: &str, body: &Value) -> Response {
        let begun = self.post(path, &body.to_string()).await;
        begun.response().await
    }

    /// A streamed chat of `max_tokens` tokens that ignores end-of-sequence tokens.
    pub(crate) async fn stream(&self, max_tokens: u32) -> Exchange {
        let body = serde_json::json!({
            "model": "tiny-chat",
            "stream": true,
            "ignore_eos": true,
            "max_tokens": max_tokens,
            "messages": [{"role": "user", "content": "hello"}],
        });
        self.post("/v1/chat/completions", &body.to_string()).await
    }
}

pub(crate) fn send_signal(child: &Child, signal: Signal) {
    let pid = child.id().and_then(|id| Pid::from_raw(id.cast_signed()));
    kill_process(pid.expect("it runs"), signal).expect("it can be signalled");
}

/// The end of a run that gets SIGINT as soon as it has printed `line` on standard error.
pub(crate) async fn ended_after(words: &[&str], line: &str) -> Ended {
    let mut command = genset(words);
    command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let mut child = command.spawn().expect("the binary starts");
    let mut lines = BufReader::new(child.stderr.take().expect("a pipe")).lines();
    let mut said = String::new();
    let mut is_sent = false;
    let output = async {
        while let Some(next) = lines.next_line().await.expect("text") {
            if next.contains(line) && !std::mem::replace(&mut is_sent, true) {
                send_signal(&child, Signal::INT);
            }
            said += &(next + "\n");
        }
        child.wait_with_output().await.expect("it ends")
    };
    let mut output = soon(output).await;
    output.stderr = said.into_bytes();
    Ended::of(&output)
}

/// A complete answer.
#[derive(Debug)]
pub(crate) struct Response {
    pub(crate) status: u16,
    pub(crate) head: String,
    pub(crate) body: String,
}

/// A request whose answer has begun.
#[derive(Debug)]
pub(crate) struct Exchange {
    reader: BufReader<TcpStream>,
    pub(crate) status: u16,
    head: String,
}

impl Exchange {
    pub(crate) async fn begin(address: SocketAddr, method: &str, path: &str, body: &str) -> Self {
        Self::try_begin(address, method, path, body)
            .await
            .expect("the server answers")
    }

    /// Like [`begin`](Self::begin), for a server that may be gone.
    pub(crate) async fn try_begin(
        address: SocketAddr,
        method: &str,
        path: &str,
        body: &str,
    ) -> std::io::Result<Self> {
        let mut reader = BufReader::new(soon(TcpStream::connect(address)).await?);
        let request = format!(
            "{method} {path} HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\ncontent-type: application/json\r\n\
             content-length: {}\r\n\r\n{body}",
            body.len()
        );
        soon(reader.write_all(request.as_bytes())).await?;
        let mut head = String::new();
        while !head.ends_with("\r\n\r\n") {
            if soon(reader.read_line(&mut head)).await? == 0 {
                return Err(std::io::ErrorKind::UnexpectedEof.into());
            }
        }
        head.make_ascii_lowercase();
        let status = head
            .split(' ')
            .nth(1)
            .and_then(|status| status.parse().ok());
        Ok(Self {
            reader,
            status: status.expect("a status"),
            head,
        })
    }

    /// The next piece of the body; `None` at its end. Our server sends streams in chunks and everything else in one piece.
    async fn piece(&mut self) -> Option<String> {
        let mut piece = Vec::new();
        if self.head.contains("transfer-encoding: chunked") {
            let mut size = String::new();
            soon(self.reader.read_line(&mut size))
                .await
                .expect("a size");
            let size = usize::from_str_radix(size.trim(), 16).expect("a chunk's size");
            piece.resize(size + 2, 0);
            let read = soon(self.reader.read_exact(&mut piece)).await;
            read.expect("a whole chunk");
            piece.truncate(size);
        } else {
            let read = soon(self.reader.read_to_end(&mut piece)).await;
            read.expect("a body");
        }
        (!piece.is_empty()).then(|| String::from_utf8(piece).expect("text"))
    }

    /// Waits for a first piece of the stream.
    pub(crate) async fn first_piece(&mut self) -> String {
        self.piece().await.expect("a stream with something in it")
    }

    /// The rest of the body.
    pub(crate) async fn rest(&mut self) -> String {
        let mut body = String::new();
        while let Some(piece) = self.piece().await {
            body += &piece;
        }
        body
    }

    pub(crate) async fn response(mut self) -> Response {
        let body = self.rest().await;
        Response {
            status: self.status,
            head: self.head,
            body,
        }
    }
}

/// The data of a stream's events, without the last one, which must be `[DONE]`.
pub(crate) fn done_events(stream: &str) -> Vec<Value> {
    let events = stream.strip_suffix("data: [DONE]\n\n");
    events_of(events.unwrap_or_else(|| panic!("no [DONE] at the end of {stream:?}")))
}

/// The data of a stream's events, which must all be JSON. Comments, which a stream has after a long silence, are left out.
pub(crate) fn events_of(stream: &str) -> Vec<Value> {
    let events = stream.split_terminator("\n\n");
    let events = events.filter(|event| !event.starts_with(':')).map(|event| {
        let data = event.strip_prefix("data: ").expect("an event");
        serde_json::from_str(data).unwrap_or_else(|error| panic!("{error} in {data:?}"))
    });
    events.collect()
}

/// The text of a streamed chat.
pub(crate) fn text_of(events: &[Value]) -> String {
    let pieces = events
        .iter()
        .filter_map(|event| event["choices"][0]["delta"]["content"].as_str());
    pieces.collect()
}

/// The finish reason of a streamed chat.
pub(crate) fn finish_reason(events: &[Value]) -> Option<&str> {
    events
        .iter()
        .find_map(|event| event["choices"][0]["finish_reason"].as_str())
}
