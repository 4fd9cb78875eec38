//! No request blocks an async thread: the server runs on its own thread beside a task that measures how much thread time passes
//! between two of its turns. This is CPU time, not wall time, so a loaded machine changes nothing.

use std::num::NonZeroUsize;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use genset_backend_common::output::Finish;
use genset_backend_common::{Input, config::InputKind};
use genset_frontend::FrontendConfig;
use rustix::time::{ClockId, clock_gettime};
use serde_json::{Value, json};
use tokio::sync::oneshot;
use tokio::task::JoinSet;

use crate::client::post;
use crate::script::Script;
use crate::support::{
    CHAT, COMPLETIONS, Site, chat, completion, config, encode, eventually, with, worker_config,
};

/// The most time that tasks which are ready together may take in one turn each, as promised in architecture.md for a release
/// build. A build without optimization is some ten times slower.
const BOUND: Duration = Duration::from_millis(if cfg!(debug_assertions) { 50 } else { 5 });

/// A server alone on its thread.
struct Alone {
    site: Arc<Site>,
    worst_ns: Arc<AtomicU64>,
    ends: Arc<AtomicBool>,
    thread: JoinHandle<()>,
}

impl Alone {
    async fn start(engine: Arc<Script>) -> Self {
        let (worst_ns, ends) = (Arc::<AtomicU64>::default(), Arc::<AtomicBool>::default());
        let (say, said) = oneshot::channel();
        let (worst, end) = (Arc::clone(&worst_ns), Arc::clone(&ends));
        let thread = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread();
            let runtime = { runtime }.enable_all().build().unwrap();
            runtime.block_on(async move {
                let site = Arc::new(Site::with_worker(config(), worker_config(), engine).await);
                assert!(say.send(Arc::clone(&site)).is_ok());
                // Measures in a spawned task: the future in `block_on` is polled only once in up to 61 task polls.
                let mut measuring = JoinSet::new();
                measuring.spawn(async move { measure_turns(&worst, &end).await });
                measuring.join_all().await;
                let mut site = site;
                let site = loop {
                    match Arc::try_unwrap(site) {
                        Ok(site) => break site,
                        Err(shared) => site = shared,
                    }
                    tokio::task::yield_now().await;
                };
                site.close().await;
            });
        });
        Self {
            site: said.await.unwrap(),
            worst_ns,
            ends,
            thread,
        }
    }

    /// Sends a request. Returns its status and the longest turn until it was answered.
    async fn worst_turn(&self, path: &str, body: &Value) -> (u16, Duration) {
        self.worst_ns.store(0, Ordering::SeqCst);
        let status = self.site.post(path, body).await.status;
        let worst = self.worst_ns.swap(0, Ordering::SeqCst);
        (status, Duration::from_nanos(worst))
    }

    fn end(self) {
        drop(self.site);
        self.ends.store(true, Ordering::SeqCst);
        self.thread.join().unwrap();
    }
}

fn thread_time_ns() -> u64 {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    let (seconds, nanoseconds) = (time.tv_sec.cast_unsigned(), time.tv_nsec.cast_unsigned());
    seconds * 1_000_000_000 + nanoseconds
}

/// Is ready in every round of the thread, and measures the time since its last turn.
async fn measure_turns(worst_ns: &AtomicU64, ends: &AtomicBool) {
    let mut before = thread_time_ns();
    std::future::poll_fn(|cx| {
        let now = thread_time_ns();
        worst_ns.fetch_max(now - before, Ordering::SeqCst);
        before = now;
        if ends.load(Ordering::SeqCst) {
            return std::task::Poll::Ready(());
        }
        cx.waker().wake_by_ref();
        std::task::Poll::Pending
    })
    .await;
}

/// An engine that answers every choice with one token, and embeds.
fn engine() -> Arc<Script> {
    let token = encode("a")[0];
    let engine = Script::new(move |request, out| async move {
        if let Input::Embed(inputs) = &request.input {
            out.embeddings(vec![vec![0.5, -0.25]; inputs.len()]).await?;
            return Ok(Finish::stop());
        }
        out.token(token).await?;
        Ok(Finish::length())
    });
    engine.declaring(|can| can.inputs.extend([InputKind::Embed]))
}

/// A text of this length, made of words that no cache knows.
fn words(bytes: usize) -> String {
    let mut text = String::new();
    for number in 0_u64.. {
        if text.len() >= bytes {
            break;
        }
        let word = number.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        text.push_str(&format!("{word:x} "));
    }
    text
}

fn attacks() -> Vec<(&'static str, &'static str, Value, u16)> {
    let many = |prompt: Value| vec![prompt; 256];
    let tool = |index: usize| {
        let properties: Value = (0..60)
            .map(|field| (format!("f{field}"), json!({"type": "string"})))
            .collect::<serde_json::Map<_, _>>()
            .into();
        json!({"type": "function", "function": {
            "name": format!("t{index}"),
            "parameters": {"type": "object", "properties": properties},
        }})
    };
    let messages = vec![json!({"role": "user", "content": "Hello there."}); 10_000];
    let ids: Vec<u32> = (0..1500).map(|id| id % 2000).collect();
    let choices = |further: Value| {
        let body = completion(many("a".into()), json!({"n": 16, "max_tokens": 1}));
        with(body, further)
    };
    let echo = json!({"echo": true, "max_tokens": 1});
    let big = json!({"genset": {"annotations": {"a": vec![0; 5000]}}});
    let stops: Vec<u32> = (0..256).collect();
    let biases: serde_json::Map<_, _> = (0..1024).map(|id| (id.to_string(), json!(1))).collect();
    let tools: Vec<Value> = (0..128).map(tool).collect();
    let lists = vec![json!([[0]]); 600_000];
    let schema =
        json!({"type": "function", "function": {"name": "f", "parameters": {"enum": lists}}});
    let tokenize = |text: String| json!({"model": "tiny", "prompt": text});
    let embed = json!({"model": "tiny", "input": vec![words(400); 2048]});
    vec![
        ("4096 choices", COMPLETIONS, choices(json!({})), 200),
        (
            "4096 choices, streamed",
            COMPLETIONS,
            choices(json!({"stream": true})),
            200,
        ),
        (
            "annotations of 4096 choices",
            COMPLETIONS,
            choices(big),
            200,
        ),
        (
            "stop tokens and biases of 4096 choices",
            COMPLETIONS,
            choices(json!({"stop_token_ids": stops, "logit_bias": biases})),
            200,
        ),
        (
            "100 000 stop tokens",
            COMPLETIONS,
            choices(json!({"stop_token_ids": vec![5; 100_000]})),
            200,
        ),
        (
            "256 prompts of 16 000 bytes",
            COMPLETIONS,
            completion(many(words(16_000).into()), json!({})),
            400,
        ),
        (
            "256 prompts of 2000 bytes",
            COMPLETIONS,
            completion(many(words(2000).into()), json!({"max_tokens": 1})),
            200,
        ),
        (
            "echo of 384 000 token ids",
            COMPLETIONS,
            completion(many(json!(ids)), echo),
            200,
        ),
        (
            "a prompt of 4 MB",
            COMPLETIONS,
            completion(words(4 << 20), json!({})),
            400,
        ),
        (
            "a prompt of 15 MB",
            COMPLETIONS,
            completion("a".repeat(15 << 20), json!({})),
            400,
        ),
        (
            "10 000 messages",
            CHAT,
            json!({"model": "tiny", "messages": messages}),
            400,
        ),
        (
            "128 tools with 60 fields",
            CHAT,
            chat("Hi", json!({"tools": tools, "tool_choice": "none"})),
            200,
        ),
        (
            "4 MB of lists in a tool's schema",
            CHAT,
            chat("Hi", json!({"tools": [schema]})),
            400,
        ),
        ("2048 inputs to embed", "/v1/embeddings", embed, 200),
        (
            "4 MB to tokenize",
            "/tokenize",
            tokenize(words(4 << 20)),
            400,
        ),
        (
            "2000 bytes to tokenize",
            "/tokenize",
            tokenize(words(2000)),
            200,
        ),
        (
            "100 000 ids to detokenize",
            "/detokenize",
            json!({"model": "tiny", "tokens": vec![7; 100_000]}),
            400,
        ),
    ]
}

#[tokio::test]
async fn no_request_keeps_an_async_thread() {
    let alone = Alone::start(engine()).await;
    // The first request makes what is made once.
    alone
        .worst_turn(CHAT, &chat("Hi", json!({"max_tokens": 1})))
        .await;
    let mut kept = Vec::new();
    for (name, path, body, status) in attacks() {
        let (answered, worst) = alone.worst_turn(path, &body).await;
        assert_eq!(answered, status, "{name}");
        println!("{name}: {worst:?}");
        if worst > BOUND {
            kept.push((name, worst));
        }
    }
    alone.end();
    assert!(kept.is_empty(), "longer than {BOUND:?}: {kept:?}");
}

/// A token has five bytes in this request, and fourteen in the answer.
#[tokio::test]
async fn the_text_of_many_tokens_keeps_no_async_thread() {
    let engine = engine();
    engine.widen();
    let alone = Alone::start(engine).await;
    let token = encode(" probabilities")[0];
    let tokens = |count| json!({"model": "tiny", "tokens": vec![token; count]});
    // The first request makes what is made once.
    alone.worst_turn("/detokenize", &tokens(1)).await;
    let (status, worst) = alone.worst_turn("/detokenize", &tokens(600_000)).await;
    alone.end();
    assert_eq!(status, 200);
    assert!(worst <= BOUND, "{worst:?}");
}

/// With one thread for long work: the first prompt is tokenized, the others wait for it, and all clients leave.
#[tokio::test]
async fn prompts_of_clients_that_left_are_not_tokenized() {
    const CLIENTS: u32 = 4;
    let engine = Script::tokens(encode("a"));
    engine.widen();
    let config = FrontendConfig {
        work_threads: NonZeroUsize::MIN,
        ..config()
    };
    let site = Site::with(config, engine).await;
    let body = completion(words(1 << 20), json!({})).to_string();
    let request = post(COMPLETIONS, body);
    let mut clients = Vec::new();
    for _ in 0..CLIENTS {
        let mut client = site.connect().await;
        client.send(&request).await;
        clients.push(client);
    }
    let running = || site.metric("genset_http_requests_in_flight");
    eventually("they arrive", || running() >= f64::from(CLIENTS)).await;
    drop(clients);
    eventually("they leave", || running() == 0.0).await;
    let work = || site.metric("genset_frontend_long_work_running");
    eventually("the work ends", || work() == 0.0).await;
    assert_eq!(site.metric("genset_frontend_long_work_waiting"), 0.0);
    // Work that ends frees its thread before its memory.
    let used = || site.metric("genset_http_memory_used_bytes");
    eventually("its memory is given back", || used() == 0.0).await;
    let tokenized = site.metric("genset_frontend_tokenize_seconds_count");
    assert!(tokenized < f64::from(CLIENTS), "{tokenized} were tokenized");
    site.close().await;
}
