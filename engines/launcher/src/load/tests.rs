use std::iter::{empty, once, repeat};

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::*;
use crate::key::ApiKey;

/// Only to fail instead of hanging.
const LONG: Duration = Duration::from_secs(120);
/// A short limit, for awaiting a timeout.
const SHORT: Duration = Duration::from_millis(100);

/// A load whose time limits for answers and their validity are all `bound`.
fn load(dialect: Dialect, bound: Duration) -> (Arc<ServerLoad>, watch::Receiver<Load>) {
    let ctx = StartContext::detached(1);
    let published = ctx.load.subscribe();
    let mut load = ServerLoad::new(dialect, &ctx);
    load.pace = Pace {
        pause: Duration::from_millis(5),
        quiet: Duration::from_millis(5),
        answer: bound,
        stale: bound,
        shown: bound,
    };
    (Arc::new(load), published)
}

fn declared(most: Option<u32>, blocks: Option<u64>) -> EngineConfig {
    let mut declared = EngineConfig::new("m", 2048);
    (declared.max_num_seqs, declared.kv_total_blocks) = (most, blocks);
    declared
}

/// Running, waiting, KV blocks in use and in all.
fn figures_of(load: &Load) -> (u32, u32, u64, u64) {
    (
        load.running_requests,
        load.waiting_requests,
        load.kv_used_blocks,
        load.kv_total_blocks,
    )
}

#[test]
fn requests_are_counted_from_their_start_to_their_end() {
    let (load, published) = load(Dialect::Trtllm, LONG);
    let now = || figures_of(&published.borrow());
    load.started(&declared(None, None));
    let first = load.count();
    let second = load.count();
    assert_eq!(now(), (2, 0, 0, 0));
    let held_back = second.held_back();
    assert_eq!(now(), (1, 1, 0, 0));
    drop(held_back);
    assert_eq!(now(), (2, 0, 0, 0));
    drop((first, second));
    assert_eq!(now(), (0, 0, 0, 0));
}

#[test]
fn more_than_a_server_computes_at_once_wait() {
    let (load, published) = load(Dialect::LlamaServer, LONG);
    load.started(&declared(Some(2), None));
    let all: Vec<_> = (0..5).map(|_| load.count()).collect();
    assert_eq!(figures_of(&published.borrow()), (2, 3, 0, 0));
    drop(all);
}

#[test]
fn what_a_server_says_waits_is_never_more_than_there_is() {
    let (load, published) = load(Dialect::Vllm, LONG);
    load.started(&declared(None, Some(8)));
    assert_eq!(figures_of(&published.borrow()), (0, 0, 0, 8));
    let all: Vec<_> = (0..3).map(|_| load.count()).collect();
    let said = Figures {
        waiting: 2,
        blocks: Some(KvBlocks { used: 5, total: 8 }),
    };
    load.change(|known| known.figures = Some((Instant::now(), said)));
    assert_eq!(figures_of(&published.borrow()), (1, 2, 5, 8));
    drop(all);
    assert_eq!(figures_of(&published.borrow()), (0, 0, 5, 8));
}

#[test]
fn what_a_server_has_computed_since_it_was_asked_is_a_step() {
    let ctx = StartContext::detached(1);
    let load = ServerLoad::new(Dialect::LlamaServer, &ctx);
    let told = |decoded: &str| {
        load.told(&format!("llamacpp:n_decode_total {decoded}\n"));
        ctx.health.steps()
    };
    assert_eq!(["7", "7", "NaN", "9"].map(told), [0, 0, 0, 1]);
    // Another server counts from 0.
    drop(Forgets(&load));
    assert_eq!(["100", "101"].map(told), [1, 2]);
}

#[tokio::test]
async fn a_server_that_takes_no_requests_is_full() {
    let (load, mut published) = load(Dialect::Vllm, LONG);
    load.started(&declared(None, Some(8)));
    let gate = Gate::new();
    let steps = async {
        gate.close("it sleeps", SHORT).await;
        let full = published.wait_for(|load| figures_of(load) == (0, 0, 8, 8));
        drop(timeout(LONG, full).await.unwrap().unwrap());
        gate.open();
        let empty = published.wait_for(|load| figures_of(load) == (0, 0, 0, 8));
        drop(timeout(LONG, empty).await.unwrap().unwrap());
    };
    tokio::select! {
        _ = load.follow_gate(&gate) => {}
        () = steps => {}
    }
}

/// Follows a server that answers with these heads and bodies in turn, and then not at all, until the load is as wanted.
async fn follow(
    dialect: Dialect,
    bound: Duration,
    mut answers: impl Iterator<Item = String>,
    wanted: (u32, u32, u64, u64),
) {
    let (load, mut published) = load(dialect, bound);
    load.started(&declared(None, Some(100)));
    let _requests: Vec<_> = (0..4).map(|_| load.count()).collect();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let over = CancellationToken::new();
    let client = Client::new(port, &ApiKey::random(), TaskTracker::new(), over);
    let serve = async {
        let mut open = Vec::new();
        loop {
            let (mut stream, _) = listener.accept().await.unwrap();
            let mut asked = [0; 1024];
            drop(stream.read(&mut asked).await);
            match answers.next() {
                // The client closes the connection when it has read enough.
                Some(answer) => drop(stream.write_all(answer.as_bytes()).await),
                None => open.push(stream),
            }
        }
    };
    // The borrow of the load must end before the other side, which writes the load, is dropped.
    let reached = async {
        let reached = published.wait_for(|load| figures_of(load) == wanted);
        drop(timeout(LONG, reached).await.unwrap().unwrap());
    };
    tokio::select! {
        _ = load.follow(&client) => {}
        () = serve => {}
        () = reached => {}
    }
    // Nobody follows the server any more.
    let (running, waiting, ..) = figures_of(&load.known.lock().load());
    assert_eq!((running, waiting), (4, 0));
    assert_eq!(load.known.lock().figures, None);
}

fn answer(body: &str) -> String {
    let length = body.len();
    format!("HTTP/1.1 200 OK\r\ncontent-length: {length}\r\n\r\n{body}")
}

const VLLM: &str = "vllm:num_requests_waiting{engine=\"0\"} 1.0\nvllm:kv_cache_usage_perc{engine=\"0\"} 0.5\n\
                    vllm:cache_config_info{engine=\"0\",num_gpu_blocks=\"100\"} 1.0\n";
const SGLANG: &str =
    r#"{"loads": [{"num_waiting_reqs": 1, "num_used_tokens": 800, "max_total_num_tokens": 1600}]}"#;

#[tokio::test]
async fn what_a_server_says_is_published() {
    let said = (3, 1, 50, 100);
    follow(Dialect::Vllm, LONG, repeat(answer(VLLM)), said).await;
    follow(Dialect::Sglang, LONG, repeat(answer(SGLANG)), said).await;
    let llama = repeat(answer("llamacpp:requests_deferred 2\n"));
    follow(Dialect::LlamaServer, LONG, llama, (2, 2, 0, 0)).await;
}

#[tokio::test]
async fn what_a_server_says_no_more_is_not_known() {
    // The server hangs.
    let nothing = (4, 0, 0, 0);
    follow(Dialect::Vllm, SHORT, once(answer(VLLM)), nothing).await;
    follow(Dialect::Sglang, SHORT, empty(), nothing).await;
}

#[tokio::test]
async fn what_cannot_be_read_is_not_known_and_is_read_again() {
    let said = (3, 1, 50, 100);
    let huge = answer(&"vllm:num_requests_waiting 1.0\n".repeat(400_000));
    let broken = "HTTP/1.1 200 OK\r\ncontent-length: 50\r\n\r\nvllm".to_owned();
    let refused = "HTTP/1.1 501 No\r\ncontent-length: 0\r\n\r\n".to_owned();
    let odd = answer("vllm:num_requests_waiting{ 5\n}}\u{0}\"\n");
    let no_http = "\r\n\r\nvllm:num_requests_waiting 1.0".to_owned();
    let answers = [huge, broken, refused, odd, no_http].into_iter();
    let answers = answers.chain(repeat(answer(VLLM)));
    follow(Dialect::Vllm, LONG, answers, said).await;
    let odd = ["[]", "no metrics", "{\"loads\": 5}"].map(answer);
    let answers = odd.into_iter().chain(repeat(answer(SGLANG)));
    follow(Dialect::Sglang, LONG, answers, said).await;
}
