//! Ten thousand clients that send a byte a second: others are served, memory is bounded, and each slow client is given up.
//!
//! The server is a separate process, because its memory is measured and other tests would add to it. The crowd is another one,
//! because a connection takes a file descriptor at either end. The test binary runs itself again for both, with roles set by the
//! environment. The crowd reads commands from standard input and answers each with one line. Time is virtual: the server's clock
//! moves only when the test advances it.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::mpsc;
use std::time::Duration;

use genset_frontend::FrontendConfig;
use rustix::process::{Resource, getrlimit, setrlimit};
use tokio::sync::oneshot;

use crate::support::{Site, config, echo};

/// Tells the server process its role.
const SERVER: &str = "GENSET_TEST_SLOW_CLIENTS_SERVER";

/// Gives the crowd the server's address and the number of clients: `ADDRESS COUNT`.
const CROWD: &str = "GENSET_TEST_SLOW_CLIENTS";

/// The prefix of the crowd's answers, among the test harness's lines.
const ANSWER: &str = "the crowd answers: ";

/// The number of clients, if the system lets this process open enough files.
const CLIENTS: usize = 10_000;

/// File descriptors for everything else.
const SPARE_FILES: u64 = 500;

/// Seconds for which each client sends a byte.
const SECONDS: u32 = 4;

/// The most memory of the server for one client.
const BYTES_PER_CLIENT: usize = 64 << 10;

/// What clients send, byte by byte: every second one a request's head, the others a body after a head.
const HEAD: &[u8] = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nx-a: b\r\n";
const BODY: &[u8] = b"{\"model\": \"tiny\", \"prompt\": \"one two three\"";
const HEAD_OF_BODY: &[u8] =
    b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000\r\n\r\n";

/// Raises the limit of open files as far as the system allows. Returns the limit.
fn raise_file_limit() -> u64 {
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    setrlimit(Resource::Nofile, limit).expect("a soft limit may be raised");
    limit.current.unwrap_or(u64::MAX)
}

/// This test binary, with one test of this module.
fn again(test: &str) -> Command {
    let (_, module) = module_path!().split_once("::").expect("a path");
    let test = format!("{module}::{test}");
    let mut command = Command::new(std::env::current_exe().expect("a path"));
    command.args(["--exact", &test, "--nocapture", "--test-threads=1"]);
    command
}

/// The crowd, as the test sees it. A blocking thread of the runtime asks it; while that thread lives, the clock does not advance
/// by itself.
struct Crowd {
    questions: mpsc::SyncSender<(&'static str, oneshot::Sender<String>)>,
}

impl Crowd {
    fn start(address: std::net::SocketAddr, count: usize) -> Self {
        let mut process = again("a_crowd_of_slow_clients")
            .env(CROWD, format!("{address} {count}"))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("the test binary runs");
        let commands = process.stdin.take().expect("piped");
        let output = BufReader::new(process.stdout.take().expect("piped"));
        let (questions, asked) = mpsc::sync_channel(1);
        tokio::task::spawn_blocking(move || attend(process, commands, output, &asked));
        Self { questions }
    }

    async fn ask(&self, command: &'static str) -> String {
        let (answer, answered) = oneshot::channel();
        self.questions
            .send((command, answer))
            .expect("the crowd lives");
        answered.await.expect("the crowd answers")
    }
}

/// Passes questions on until no sender is left.
fn attend(
    mut process: Child,
    mut commands: ChildStdin,
    mut output: BufReader<ChildStdout>,
    asked: &mpsc::Receiver<(&'static str, oneshot::Sender<String>)>,
) {
    while let Ok((command, answer)) = asked.recv() {
        writeln!(commands, "{command}").expect("the crowd listens");
        loop {
            let mut line = String::new();
            let read = output.read_line(&mut line).expect("lines");
            assert!(read > 0, "the crowd has gone");
            if let Some((_, said)) = line.split_once(ANSWER) {
                drop(answer.send(said.trim().to_owned()));
                break;
            }
        }
    }
    drop(commands);
    process.wait().expect("the crowd ends");
}

/// The memory of this process, in bytes.
fn resident() -> usize {
    let text = std::fs::read_to_string("/proc/self/statm").expect("Linux");
    let pages: usize = text
        .split(' ')
        .nth(1)
        .and_then(|pages| pages.parse().ok())
        .expect("a number");
    pages * rustix::param::page_size()
}

/// Waits for a condition without using the clock.
async fn until(mut is_so: impl FnMut() -> bool) {
    while !is_so() {
        tokio::task::yield_now().await;
    }
}

#[test]
fn ten_thousand_clients_that_send_a_byte_a_second() {
    let mut server = again("the_server_of_slow_clients");
    let output = server.env(SERVER, "").output().expect("it runs");
    let said = [output.stdout, output.stderr].concat();
    let said = String::from_utf8_lossy(&said);
    assert!(output.status.success(), "{said}");
    assert!(said.contains(" slow clients: "), "no test ran: {said}");
    println!("{said}");
}

/// The server, if the environment says so.
#[tokio::test]
async fn the_server_of_slow_clients() {
    if std::env::var_os(SERVER).is_none() {
        return;
    }
    let files = raise_file_limit().saturating_sub(SPARE_FILES);
    let clients = usize::try_from(files).map_or(CLIENTS, |files| files.min(CLIENTS));
    let config = FrontendConfig {
        max_connections: clients + 100,
        ..config()
    };
    let limit = config.header_timeout.max(config.body_timeout);
    let site = Site::with(config, echo()).await;
    site.is_well().await;
    let crowd = Crowd::start(site.server.address(), clients);
    tokio::time::pause();
    let before = resident();
    assert_eq!(crowd.ask("open").await, format!("opened {clients}"));
    for _ in 0..SECONDS {
        assert_eq!(crowd.ask("send").await, format!("sent {clients}"));
        tokio::time::advance(Duration::from_secs(1)).await;
        site.is_well().await;
    }
    // Clients that send a body count as requests; the others have not sent a whole head.
    until(|| site.metric("genset_http_requests_in_flight") >= (clients / 2) as f64).await;
    assert!(site.metric("genset_http_connections") >= clients as f64);
    let taken = resident().saturating_sub(before) / clients;
    println!("{clients} slow clients: {taken} bytes of the server each");
    assert!(taken < BYTES_PER_CLIENT, "{taken} bytes each");
    tokio::time::advance(limit).await;
    // Heads are given up silently, because there is no request to answer; bodies get a 408.
    let (heads, bodies) = (clients.div_ceil(2), clients / 2);
    assert_eq!(
        crowd.ask("end").await,
        format!("closed {heads}, refused {bodies}, else 0")
    );
    until(|| site.metric("genset_http_connections") < 3.0).await;
    site.is_well().await;
    tokio::time::resume();
    drop(crowd);
    site.idle().await;
    site.close().await;
}

/// The crowd, if the environment says so.
#[test]
fn a_crowd_of_slow_clients() {
    let Ok(told) = std::env::var(CROWD) else {
        return;
    };
    let (address, count) = told.split_once(' ').expect("an address and a count");
    let count: usize = count.parse().expect("a count");
    assert!(usize::try_from(raise_file_limit()).is_ok_and(|files| files > count));
    let mut clients: Vec<TcpStream> = Vec::new();
    let mut sent = 0;
    for command in std::io::stdin().lines() {
        match command.expect("lines").as_str() {
            "open" => {
                for index in 0..count {
                    clients.push(connect(address, index % 2 == 1));
                }
                println!("{ANSWER}opened {}", clients.len());
            }
            "send" => {
                let done = clients
                    .iter_mut()
                    .enumerate()
                    .filter_map(|(index, client)| {
                        let bytes = if index % 2 == 1 { BODY } else { HEAD };
                        client.write_all(bytes.get(sent..=sent)?).ok()
                    });
                println!("{ANSWER}sent {}", done.count());
                sent += 1;
            }
            "end" => {
                let (mut closed, mut refused, mut other) = (0, 0, 0);
                for client in &mut clients {
                    match ending(client) {
                        Ending::Closed => closed += 1,
                        Ending::Refused => refused += 1,
                        Ending::Other => other += 1,
                    }
                }
                println!("{ANSWER}closed {closed}, refused {refused}, else {other}");
            }
            other => panic!("no command: {other}"),
        }
    }
}

fn connect(address: &str, has_body: bool) -> TcpStream {
    let mut client = TcpStream::connect(address).expect("the server accepts");
    client.set_nodelay(true).expect("an open socket");
    let patience = Some(Duration::from_secs(120));
    client.set_read_timeout(patience).expect("an open socket");
    if has_body {
        client.write_all(HEAD_OF_BODY).expect("the server listens");
    }
    client
}

enum Ending {
    Closed,
    Refused,
    Other,
}

/// How the server ended a connection.
fn ending(client: &mut TcpStream) -> Ending {
    let mut said = Vec::new();
    let ended = client.read_to_end(&mut said);
    if ended.is_ok() && said.is_empty() {
        Ending::Closed
    } else if said.starts_with(b"HTTP/1.1 408 ") {
        Ending::Refused
    } else {
        Ending::Other
    }
}
