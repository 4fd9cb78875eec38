//! `out=candle`: the language model that answers by default.

use std::fs;
use std::path::Path;

use serde::Deserialize;
use serde_json::{Value, json};

use crate::fleet::Fleet;
use crate::support::{Server, base_model, genset, run, run_with, tiny_chat};

#[derive(Deserialize)]
struct Golden {
    cases: Vec<Case>,
}

#[derive(Deserialize)]
struct Case {
    messages: Value,
    answer: String,
}

fn golden() -> Vec<Case> {
    let file = fs::read(tiny_chat().join("golden.json")).expect("it is in the repository");
    let golden: Golden = serde_json::from_slice(&file).expect("it is JSON");
    assert!(golden.cases.len() > 20);
    golden.cases
}

async fn chat(server: &Server, mut body: Value) -> Value {
    body["model"] = "tiny-chat".into();
    let answer = server.ask("/v1/chat/completions", &body).await;
    assert_eq!(answer.status, 200, "{}", answer.body);
    serde_json::from_str(&answer.body).expect("JSON")
}

async fn answers_every_golden_question(server: Server) {
    for case in golden() {
        let answer = chat(&server, json!({"messages": case.messages})).await;
        let choice = &answer["choices"][0];
        assert_eq!(choice["message"]["content"], case.answer.as_str());
        assert_eq!(choice["finish_reason"], "stop");
    }
    server.stop().await;
}

#[tokio::test]
async fn the_built_in_model_answers_its_golden_questions() {
    answers_every_golden_question(Server::start(&[]).await).await;
}

/// A flag selects kernels for narrower instructions, which give the same answers.
#[cfg(target_arch = "x86_64")]
#[tokio::test]
async fn narrower_instructions_answer_the_same() {
    answers_every_golden_question(Server::start(&["--isa", "avx2"]).await).await;
}

/// The weights are floats, which are quantized on load.
#[tokio::test]
async fn the_models_folder_answers_the_same() {
    let folder = tiny_chat();
    let folder = folder.to_str().expect("a path in UTF-8");
    answers_every_golden_question(Server::start(&["out=candle", folder]).await).await;
}

/// The tokenizer and the template come from the file.
#[tokio::test]
async fn a_gguf_file_alone_answers_the_same() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("tiny-chat.gguf");
    fs::copy(tiny_chat().join("tiny-chat-q8_0.gguf"), &file).expect("a copy");
    let file = file.to_str().expect("a path in UTF-8");
    let server = Server::start(&[file, "--model-name", "tiny-chat"]).await;
    answers_every_golden_question(server).await;
}

/// These engines need only its tokenizer, whatever its architecture is.
#[tokio::test]
async fn a_gguf_file_gives_engines_without_weights_their_tokens() {
    let file = tiny_chat().join("tiny-chat-q8_0.gguf");
    let folder = tempfile::tempdir().expect("a folder");
    let other = folder.path().join("other.gguf");
    let mut bytes = fs::read(&file).expect("it is in the repository");
    // The architecture, and the keys that begin with it.
    for start in 0..1000 {
        if bytes[start..].starts_with(b"llama") {
            bytes[start..start + 5].copy_from_slice(b"other");
        }
    }
    fs::write(&other, bytes).expect("a file");
    let file = file.to_str().expect("a path in UTF-8");
    let other = other.to_str().expect("a path in UTF-8");
    let refused = run(&["run", "in=stdin", "out=candle", other]).await;
    refused.fails(2, "the architecture other is not supported");
    for (output, file) in [
        ("out=echo_core", other),
        ("out=mocker", file),
        ("out=sample", file),
    ] {
        let server = Server::start(&[output, file, "--model-name", "m"]).await;
        let body = json!({"model": "m", "prompt": "Hello you there", "max_tokens": 2});
        let answer = server.ask("/v1/completions", &body).await;
        let is_whole = answer.body.contains(r#""completion_tokens":2"#);
        assert!(is_whole, "{output}: {}{}", answer.body, server.log());
        server.stop().await;
    }
}

#[tokio::test]
async fn a_question_on_standard_input_is_answered() {
    let ended = run_with(
        genset(&["run", "in=stdin"]),
        b"What is the capital of Spain?",
    )
    .await;
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    assert_eq!(ended.stdout.trim_end(), "The capital of Spain is Madrid.");
}

/// Concurrent answers equal those that each request gets alone, both greedy and seeded.
#[tokio::test]
async fn neighbours_change_nothing() {
    let server = Server::start(&[]).await;
    let cases = golden();
    let body = |case: &Case, seed: u64| {
        let temperature = if seed == 0 { 0.0 } else { 1.0 };
        json!({
            "messages": case.messages, "temperature": temperature, "seed": seed, "max_tokens": 24,
            "logprobs": true, "top_logprobs": 2,
        })
    };
    let jobs: Vec<(usize, u64)> = (0..16).map(|index| (index % 8, index as u64 % 3)).collect();
    let mut alone = Vec::new();
    for (case, seed) in &jobs {
        alone.push(chat(&server, body(&cases[*case], *seed)).await["choices"].clone());
    }
    let together = jobs
        .iter()
        .map(|(case, seed)| chat(&server, body(&cases[*case], *seed)));
    let together = futures_util::future::join_all(together).await;
    for (alone, together) in alone.iter().zip(together) {
        assert!(alone[0]["message"]["content"].is_string(), "{alone}");
        assert!(!alone[0]["logprobs"]["content"].is_null(), "{alone}");
        let together = &together["choices"][0];
        for field in ["message", "logprobs"] {
            assert_eq!(together[field], alone[0][field]);
        }
    }
    server.stop().await;
}

#[tokio::test]
async fn an_answer_keeps_to_its_schema() {
    let server = Server::start(&[]).await;
    let schema = json!({
        "type": "object",
        "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}, "people": {"type": "integer"}},
        "required": ["city", "people"],
        "additionalProperties": false,
    });
    let messages = json!([{"role": "user", "content": "What is the capital of France?"}]);
    let format = json!({"type": "json_schema", "json_schema": {"name": "city", "schema": schema}});
    for temperature in [0, 1] {
        let body = json!({
            "messages": messages, "response_format": format, "temperature": temperature, "seed": 1, "max_tokens": 200,
        });
        let answer = chat(&server, body).await;
        let content = answer["choices"][0]["message"]["content"]
            .as_str()
            .expect("text");
        let object: Value = serde_json::from_str(content).expect("it is JSON");
        assert!(
            ["Paris", "Rome"].contains(&object["city"].as_str().expect("a city")),
            "{content}"
        );
        assert!(
            object["people"].is_i64() || object["people"].is_u64(),
            "{content}"
        );
    }
    let choice = json!({"messages": messages, "guided_choice": ["yes", "no"]});
    let answer = chat(&server, choice).await;
    let content = answer["choices"][0]["message"]["content"]
        .as_str()
        .expect("text");
    assert!(["yes", "no"].contains(&content), "{content}");
    let broken = json!({
        "model": "tiny-chat", "messages": messages, "guided_regex": "(",
    });
    let refused = server.ask("/v1/chat/completions", &broken).await;
    assert_eq!(refused.status, 400, "{}", refused.body);
    assert!(refused.body.contains("guided_regex"), "{}", refused.body);
    server.stop().await;
}

/// A prefix that is cached is not computed again, and usage reports it.
#[tokio::test]
async fn a_repeated_prompt_comes_from_the_cache() {
    let server = Server::start(&[]).await;
    let messages = json!([{"role": "user", "content": "one two three ".repeat(40)}]);
    let cached = async || {
        let body = json!({"messages": messages, "max_tokens": 1});
        let usage = chat(&server, body).await["usage"].clone();
        let cached = usage["prompt_tokens_details"]["cached_tokens"].as_u64();
        (
            cached.expect("a number"),
            usage["prompt_tokens"].as_u64().expect("a number"),
        )
    };
    let (first, prompt) = cached().await;
    let (second, _) = cached().await;
    assert!(
        first < 32 && second + 16 >= prompt && second < prompt,
        "{first}, {second} of {prompt}"
    );
    server.stop().await;
}

#[tokio::test]
async fn a_model_that_cannot_be_served_is_named_with_what_to_do() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = |name: &str| folder.path().join(name).to_str().expect("UTF-8").to_owned();
    let half = path("half");
    fs::create_dir(&half).expect("a folder");
    for file in ["config.json", "tokenizer.json", "tokenizer_config.json"] {
        fs::copy(tiny_chat().join(file), Path::new(&half).join(file)).expect("a copy");
    }
    let cut = path("cut.gguf");
    let whole = fs::read(tiny_chat().join("tiny-chat-q8_0.gguf")).expect("it is there");
    fs::write(&cut, &whole[..whole.len() / 2]).expect("a file");
    let note = path("note.txt");
    fs::write(&note, "no model").expect("a file");
    let empty = path("empty");
    fs::create_dir(&empty).expect("a folder");
    let cases: [(&[&str], i32, &str); 7] = [
        (&[&empty], 2, "error: MODEL: "),
        (&[&half], 1, "model.safetensors"),
        (&[&cut], 2, "cut.gguf"),
        (&[&note], 2, "neither a GGUF file nor a folder"),
        (&["org/model"], 2, "HF_HOME"),
        (&["--kv-cache-memory", "1B"], 2, "--kv-cache-memory"),
        (&["--device", "cuda:0"], 2, "cuda"),
    ];
    for (words, code, says) in cases {
        let words = [&["run", "in=stdin"], words].concat();
        let ended = run(&words).await;
        assert_eq!(ended.code, Some(code), "{words:?}: {}", ended.stderr);
        let said = ended.stderr.to_lowercase();
        // The log does not repeat the error as its cause.
        assert!(
            said.contains(&says.to_lowercase()) && !said.contains("source="),
            "{words:?}: {}",
            ended.stderr
        );
    }
}

/// A base model's folder has no chat template: the model continues the typed text.
#[tokio::test]
async fn a_model_without_a_chat_template_goes_on_from_the_text() {
    let folder = tempfile::tempdir().expect("a folder");
    let base = base_model(folder.path());
    let base = base.to_str().expect("UTF-8");
    let prompt = "The capital of France";
    let server = Server::start(&["out=candle", base]).await;
    let body = json!({"model": "base", "prompt": prompt, "max_tokens": 256});
    let answer = server.ask("/v1/completions", &body).await;
    let answer: Value = serde_json::from_str(&answer.body).expect("JSON");
    let text = answer["choices"][0]["text"].as_str().expect("a text");
    server.stop().await;
    assert!(!text.trim().is_empty());
    for input in ["in=stdin", "in=text"] {
        let command = genset(&["run", input, "out=candle", base]);
        let ended = run_with(command, prompt.as_bytes()).await;
        assert_eq!(ended.code, Some(0), "{ended:?}");
        let said = &ended.stderr;
        assert!(said.contains("base has no chat template"), "{said}");
        assert!(!said.contains("/v1/"), "{said}");
        assert!(ended.stdout.contains(text.trim()), "{text:?}, {ended:?}");
    }
}

/// With YaRN, a model's context is longer than its file states.
#[tokio::test]
async fn a_folder_with_yarn_has_the_longer_context() {
    let folder = tempfile::tempdir().expect("a folder");
    let yarn = folder.path().join("yarn");
    fs::create_dir(&yarn).expect("a folder");
    for file in [
        "tokenizer.json",
        "tokenizer_config.json",
        "model.safetensors",
    ] {
        fs::copy(tiny_chat().join(file), yarn.join(file)).expect("a copy");
    }
    let config = fs::read(tiny_chat().join("config.json")).expect("it is there");
    let mut config: Value = serde_json::from_slice(&config).expect("JSON");
    assert_eq!(config["max_position_embeddings"], 2048);
    config["rope_scaling"] = json!({
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048,
    });
    fs::write(yarn.join("config.json"), config.to_string()).expect("a file");
    let yarn = yarn.to_str().expect("UTF-8");
    for (asked, expected) in [(None, 8192), (Some("4096"), 4096)] {
        let mut words = vec!["out=candle", yarn, "--kv-cache-memory", "64MiB"];
        words.extend(asked.map(|_| "--context-length"));
        words.extend(asked);
        let server = Server::start(&words).await;
        let model = server.get("/v1/models/yarn").await.body;
        let model: Value = serde_json::from_str(&model).expect("JSON");
        assert_eq!(model["max_model_len"], expected, "{model}");
        server.stop().await;
    }
    let words = ["run", "in=stdin", "out=candle", yarn];
    let words = [&words[..], &["--context-length", "8193"]].concat();
    run(&words).await.fails(2, "holds 8192 tokens, not 8193");
}

fn encoder(name: &str) -> String {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../engines/candle/tests/encoders");
    let folder = folder.join(name).canonicalize().expect("it is there");
    folder.into_os_string().into_string().expect("UTF-8")
}

async fn ask(server: &Server, path: &str, body: &Value) -> (u16, Value) {
    let answer = server.ask(path, body).await;
    let body = serde_json::from_str(&answer.body).expect("JSON");
    (answer.status, body)
}

#[derive(Deserialize)]
struct Scored {
    texts: Vec<ScoredPair>,
}

#[derive(Deserialize)]
struct ScoredPair {
    first: String,
    second: String,
    tokens: Vec<u32>,
    score: f64,
}

/// Covers all steps from the texts: the tokenizer's pairs, the token types, the model, and the checkout's activation function.
#[tokio::test]
async fn a_cross_encoder_gives_the_scores_of_its_reference() {
    for name in [
        "bert-scores",
        "xlm-roberta-scores",
        "modernbert-scores",
        "modernbert-mean-scores",
    ] {
        let folder = encoder(name);
        let expected = fs::read(Path::new(&folder).join("expected.json")).expect("it is there");
        let Scored { texts } = serde_json::from_slice(&expected).expect("JSON");
        let server = Server::start(&["out=candle", &folder, "--quantize", "none"]).await;
        let side = |of: fn(&ScoredPair) -> &String| texts.iter().map(of).collect::<Vec<_>>();
        let (first, second) = (side(|pair| &pair.first), side(|pair| &pair.second));
        let body = json!({"model": name, "text_1": first, "text_2": second});
        let (status, together) = ask(&server, "/v1/score", &body).await;
        assert_eq!(status, 200, "{together}");
        let tokens: usize = texts.iter().map(|pair| pair.tokens.len()).sum();
        assert_eq!(together["usage"]["total_tokens"], tokens, "{name}");
        for (place, pair) in texts.iter().enumerate() {
            let score = &together["data"][place]["score"];
            let far = (score.as_f64().expect("a number") - pair.score).abs();
            assert!(far < 1e-4, "{name}: {:?} is {far} off", pair.second);
            let body = json!({"model": name, "query": pair.first, "documents": [pair.second]});
            let (status, alone) = ask(&server, "/v1/rerank", &body).await;
            assert_eq!(status, 200, "{alone}");
            assert_eq!(&alone["results"][0]["relevance_score"], score, "{name}");
        }
        server.stop().await;
    }
}

#[tokio::test]
async fn a_cross_encoder_ranks_and_refuses_what_it_cannot_read() {
    let name = "bert-scores";
    let mut server = Server::start(&["out=candle", &encoder(name)]).await;
    server.line_with("/v1/rerank").await;
    let documents = ["the cat sat", "a", "what is a cat?", "paris"];
    let body = json!({"model": name, "query": "what is a cat?", "documents": documents,
        "top_n": 3});
    let (status, ranked) = ask(&server, "/v1/rerank", &body).await;
    assert_eq!(status, 200, "{ranked}");
    let results = ranked["results"].as_array().expect("a list");
    assert_eq!(results.len(), 3);
    let scores = results
        .iter()
        .map(|result| result["relevance_score"].as_f64());
    assert!(scores.is_sorted_by(|one, other| one >= other), "{ranked}");
    for result in results {
        let index = result["index"].as_u64().expect("a place");
        let text = documents[usize::try_from(index).expect("small")];
        assert_eq!(result["document"]["text"], text);
    }
    let long = "cat ".repeat(150);
    for (path, body, param) in [
        (
            "/v1/rerank",
            json!({"model": name, "query": "a", "documents": ["b", long]}),
            "documents[1]",
        ),
        (
            "/v1/embeddings",
            json!({"model": name, "input": "a"}),
            "model",
        ),
        (
            "/v1/completions",
            json!({"model": name, "prompt": "a"}),
            "model",
        ),
    ] {
        let (status, refused) = ask(&server, path, &body).await;
        assert_eq!(
            (status, &refused["error"]["param"]),
            (400, &json!(param)),
            "{refused}"
        );
    }
    server.stop().await;
}

#[tokio::test]
async fn an_embedder_has_no_use_for_a_chat_template_and_nobody_talks_to_it() {
    let template = tempfile::NamedTempFile::new().expect("a file");
    let template = template.path().to_str().expect("UTF-8");
    for name in ["bert", "bert-scores"] {
        let folder = encoder(name);
        let ended = run(&["run", "in=http", &folder, "--chat-template", template]).await;
        ended.fails(2, "--chat-template");
        // The kind of model is known only after loading; such errors exit with 1.
        let ended = run_with(genset(&["run", "in=stdin", &folder]), b"Hello").await;
        ended.fails(1, "in=http");
    }
}

/// Pairs and scores cross the wire unchanged.
#[tokio::test]
async fn a_cross_encoder_in_another_process_gives_the_same_scores() {
    let name = "bert-scores";
    let body =
        json!({"model": name, "text_1": "what is a cat?", "text_2": ["the cat sat", "paris"]});
    let here = Server::start(&["out=candle", &encoder(name)]).await;
    let (status, expected) = ask(&here, "/v1/score", &body).await;
    assert_eq!(status, 200, "{expected}");
    here.stop().await;
    let fleet = Fleet::new();
    let folder = encoder(name);
    let worker = fleet
        .worker_of(&["in=dyn", "out=candle", &folder], &[])
        .await;
    let frontend = fleet.frontend(&[]).await;
    let (status, scored) = ask(&frontend, "/v1/score", &body).await;
    assert_eq!(status, 200, "{scored}");
    assert_eq!(scored["data"], expected["data"]);
    assert_eq!(scored["usage"], expected["usage"]);
    frontend.stop().await;
    let log = worker.stop().await;
    assert!(!log.contains("ERROR"), "{log}");
}
