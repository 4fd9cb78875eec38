//! Short prompts and long conversations, answered with one token: the cost of a request before its first token.

use std::path::Path;
use std::time::Duration;
use std::{fs, io};

use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio::time::Instant;

use crate::server::Server;
use crate::support::load::{LOAD_TIME, PATIENCE, WARM_UP, http_request, read_stream};
use crate::support::round;

/// Clients, each with a connection and one request at a time.
const CLIENTS: usize = 4;

/// Questions and answers in the history of a long conversation.
const TURNS: usize = 10;

struct Prompts {
    name: &'static str,
    /// The approximate number of tokens of a prompt.
    tokens: usize,
    turns: usize,
    history: History,
    flags: &'static [&'static str],
}

/// The conversation before the question, which is always new.
#[derive(Clone, Copy, PartialEq, Eq)]
enum History {
    /// A different one each time: no part of the prompt was seen before.
    New,
    /// The client's own, the same each time: everything except the question was seen before.
    Known,
}

const PROMPTS: [Prompts; 4] = [
    Prompts {
        name: "32 tokens",
        tokens: 32,
        turns: 0,
        history: History::New,
        flags: &[],
    },
    Prompts {
        name: "8,000 tokens, new",
        tokens: 8000,
        turns: TURNS,
        history: History::New,
        flags: &[],
    },
    Prompts {
        name: "8,000 tokens, new, no cache",
        tokens: 8000,
        turns: TURNS,
        history: History::New,
        flags: &["--tokenizer-cache-bytes", "0"],
    },
    Prompts {
        name: "8,000 tokens, history known",
        tokens: 8000,
        turns: TURNS,
        history: History::Known,
        flags: &[],
    },
];

/// The server's own metrics about its prompts.
const METRICS: [&str; 6] = [
    "genset_http_prompt_tokens_total",
    "genset_frontend_tokenizer_cached_tokens_total",
    "genset_frontend_template_seconds_sum",
    "genset_frontend_template_seconds_count",
    "genset_frontend_tokenize_seconds_sum",
    "genset_frontend_tokenize_seconds_count",
];

pub(crate) async fn measure() -> io::Result<Value> {
    let mut measured = Vec::new();
    for prompts in &PROMPTS {
        measured.push(measure_prompts(prompts).await?);
    }
    Ok(measured.into())
}

async fn measure_prompts(prompts: &'static Prompts) -> io::Result<Value> {
    let folder = long_model()?;
    let path = folder.path().display().to_string();
    let model = ["--model-path", &path, "--model-name", "tiny-chat"];
    let server = Server::start(&[&model, prompts.flags].concat()).await?;
    let words = words_for(&server, prompts).await?;
    run(&server, prompts, words, WARM_UP).await?;
    let before = server.metrics(METRICS).await?;
    let (cpu, began) = (server.genset.cpu_seconds()?, Instant::now());
    let requests = run(&server, prompts, words, LOAD_TIME).await? as f64;
    let wall = began.elapsed().as_secs_f64();
    let cpu = server.genset.cpu_seconds()? - cpu;
    let after = server.metrics(METRICS).await?;
    let mut more = before;
    for (more, after) in more.iter_mut().zip(after) {
        *more = after - *more;
    }
    let [tokens, cached, template, rendered, tokenize, tokenized] = more;
    let result = json!({
        "prompts": prompts.name,
        "requests": requests,
        "requests_per_second": (requests / wall).round(),
        "cpu_us_per_request": round(cpu * 1e6 / requests, 10.0),
        "prompt_tokens": (tokens / requests).round(),
        "known_prompt_tokens": (cached / requests).round(),
        "template_us": round(template * 1e6 / rendered, 10.0),
        "tokenize_us": round(tokenize * 1e6 / tokenized, 10.0),
        "cpu_seconds": round(cpu, 100.0),
        "wall_seconds": round(wall, 100.0),
    });
    server.end().await?;
    Ok(result)
}

/// The test model's tokenizer and template in their own folder, with a context that has room for the long prompts.
fn long_model() -> io::Result<TempDir> {
    let from = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/tiny-chat");
    let folder = tempfile::tempdir()?;
    for name in [
        "tokenizer.json",
        "tokenizer_config.json",
        "generation_config.json",
    ] {
        fs::copy(from.join(name), folder.path().join(name))?;
    }
    let mut config: Value = serde_json::from_slice(&fs::read(from.join("config.json"))?)?;
    config["max_position_embeddings"] = json!(32_768);
    fs::write(folder.path().join("config.json"), config.to_string())?;
    Ok(folder)
}

/// Keeps every client busy for `time`; returns the number of answered requests.
async fn run(
    server: &Server,
    prompts: &'static Prompts,
    words: usize,
    time: Duration,
) -> io::Result<u64> {
    let (address, until) = (server.address, Instant::now() + time);
    let mut clients = JoinSet::new();
    for _ in 0..CLIENTS {
        clients.spawn(async move {
            let mut connection = TcpStream::connect(address).await?;
            connection.set_nodelay(true)?;
            let known = history(prompts, words);
            let mut requests = 0;
            while Instant::now() < until {
                let mut messages = match prompts.history {
                    History::New => history(prompts, words),
                    History::Known => known.clone(),
                };
                messages.push(message("user", words));
                connection.write_all(&request(messages)).await?;
                tokio::time::timeout(PATIENCE, read_stream(&mut connection)).await??;
                requests += 1;
            }
            io::Result::Ok(requests)
        });
    }
    let mut requests = 0;
    while let Some(client) = clients.join_next().await {
        requests += client.map_err(io::Error::other)??;
    }
    Ok(requests)
}

/// The number of words of each message with which a whole prompt has about the intended number of tokens, as the server counts.
async fn words_for(server: &Server, prompts: &Prompts) -> io::Result<usize> {
    let messages = 2 * prompts.turns + 1;
    let mut words = prompts.tokens / messages / 2 + 1;
    for _ in 0..3 {
        let [before] = server.metrics([METRICS[0]]).await?;
        let mut connection = TcpStream::connect(server.address).await?;
        let mut asked = history(prompts, words);
        asked.push(message("user", words));
        connection.write_all(&request(asked)).await?;
        read_stream(&mut connection).await?;
        let [after] = server.metrics([METRICS[0]]).await?;
        let wanted = words as f64 * prompts.tokens as f64 / (after - before);
        // Through text: a cast would truncate silently.
        words = format!("{wanted:.0}").parse().unwrap_or(words).max(1);
    }
    Ok(words)
}

fn history(prompts: &Prompts, words: usize) -> Vec<Value> {
    let turns = 0..prompts.turns;
    let turns = turns.flat_map(|_| [message("user", words), message("assistant", words)]);
    turns.collect()
}

/// A message of random words.
fn message(role: &str, words: usize) -> Value {
    const WORDS: [&str; 24] = [
        "the", "engine", "turns", "a", "frame", "and", "holds", "power", "when", "you", "start",
        "it", "with", "fuel", "in", "winter", "or", "load", "grows", "under", "steady", "hand",
        "what", "now",
    ];
    let mut content = String::new();
    for _ in 0..words {
        let word: usize = rand::random_range(0..WORDS.len());
        content.push_str(WORDS[word]);
        content.push(' ');
    }
    json!({"role": role, "content": content.trim_end()})
}

fn request(messages: Vec<Value>) -> Vec<u8> {
    http_request(&json!({
        "model": "tiny-chat", "stream": true, "max_tokens": 1, "ignore_eos": true, "messages": messages,
    }))
}
