//! How often a long prompt is copied between the socket and the KV cache: HTTP, frontend, Worker and the candle engine in one
//! process.
//!
//! A separate binary, for its allocator, which counts for all threads.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "counted/allocator.rs"]
mod allocator;
#[path = "counted/site.rs"]
mod site;

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use genset_backend_common::byte_size::ByteSize;
use genset_engine_candle::{CandleArgs, CandleEngine, DeviceChoice};
use genset_frontend::FrontendConfig;
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

/// Tokens of the prompt. Each is one digit in the body, so that no piece of text is as large as the list of their ids.
const PROMPT_TOKENS: usize = 100_000;

/// Blocks large enough for the prompt, allocated by any thread: new ones, and those reallocated to that size.
static LARGE_BLOCKS: AtomicU64 = AtomicU64::new(0);

fn resized(_from: usize, to: usize) {
    if to >= PROMPT_TOKENS * size_of::<u32>() {
        LARGE_BLOCKS.fetch_add(1, Ordering::Relaxed);
    }
}

#[global_allocator]
static ALLOCATOR: allocator::Counting = allocator::Counting;

/// Writes a model with room for the prompt that computes it in no time: one narrow layer, which attends to a few tokens. All its
/// weights, and so all logits, are 0.
fn write_model(folder: &Path) {
    let config = json!({
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "vocab_size": 2048,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "max_position_embeddings": 1 << 17,
        "sliding_window": 64,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": true,
    });
    std::fs::write(folder.join("config.json"), config.to_string()).unwrap();
    let layer = |name: &str| format!("model.layers.0.{name}.weight");
    let tensors = [
        ("model.embed_tokens.weight".to_owned(), vec![2048, 32]),
        ("model.norm.weight".to_owned(), vec![32]),
        (layer("input_layernorm"), vec![32]),
        (layer("post_attention_layernorm"), vec![32]),
        (layer("self_attn.q_proj"), vec![32, 32]),
        (layer("self_attn.k_proj"), vec![32, 32]),
        (layer("self_attn.v_proj"), vec![32, 32]),
        (layer("self_attn.o_proj"), vec![32, 32]),
        (layer("mlp.gate_proj"), vec![64, 32]),
        (layer("mlp.up_proj"), vec![64, 32]),
        (layer("mlp.down_proj"), vec![32, 64]),
    ];
    let (mut header, mut bytes) = (serde_json::Map::new(), 0);
    for (name, shape) in tensors {
        let end = bytes + 2 * shape.iter().product::<usize>();
        let entry = json!({"dtype": "BF16", "shape": shape, "data_offsets": [bytes, end]});
        header.insert(name, entry);
        bytes = end;
    }
    let header = serde_json::to_vec(&header).unwrap();
    let mut file = u64::try_from(header.len()).unwrap().to_le_bytes().to_vec();
    file.extend(header);
    file.resize(file.len() + bytes, 0);
    std::fs::write(folder.join("model.safetensors"), file).unwrap();
}

/// A completion request for `prompt` as bytes on the wire.
fn request(prompt: &[u32]) -> String {
    let body =
        json!({"model": "tiny", "prompt": prompt, "max_tokens": 3, "ignore_eos": true}).to_string();
    let length = body.len();
    let head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close";
    format!("{head}\r\ncontent-length: {length}\r\n\r\n{body}")
}

/// Returns the server's answer to `request`.
async fn ask(address: SocketAddr, request: &str) -> String {
    let mut stream = TcpStream::connect(address).await.unwrap();
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.unwrap();
    answer
}

/// The ids are parsed from the body into one list, which everything down to the engine shares. The engine makes the only copy:
/// the sequence to which its answer is appended.
#[tokio::test]
async fn a_prompt_is_copied_once_between_http_and_the_candle_engine() {
    let folder = tempfile::tempdir().unwrap();
    write_model(folder.path());
    let args = CandleArgs {
        device: DeviceChoice::Cpu,
        kv_cache_memory: Some(ByteSize(64 << 20)),
        max_num_batched_tokens: Some(512),
        ..CandleArgs::default()
    };
    let engine = Arc::new(CandleEngine::from_args(&args, folder.path()));
    let site = site::Site::start(engine, FrontendConfig::default()).await;
    ask(site.server.address(), &request(&[1; 600])).await;

    let prompt: Vec<u32> = (0..9).cycle().take(PROMPT_TOKENS).collect();
    let request = request(&prompt);
    assert!(request.len() < PROMPT_TOKENS * size_of::<u32>());
    let before = LARGE_BLOCKS.load(Ordering::Relaxed);
    let answer = ask(site.server.address(), &request).await;
    let large = LARGE_BLOCKS.load(Ordering::Relaxed) - before;
    assert!(answer.contains("\"completion_tokens\":3"), "{answer}");
    assert!(answer.contains("\"prompt_tokens\":100000"), "{answer}");
    assert_eq!(large, 2, "the list of ids, and one copy");

    site.close().await;
}
