//! The APIs of cross-encoders: reranked documents, scores of pairs.

use std::slice;
use std::sync::Arc;

use genset_backend_common::output::Finish;
use genset_backend_common::{
    Capabilities, EngineError, ErrorKind, Input, config::InputKind, request::ScorePair,
};
use genset_frontend::FrontendConfig;
use serde_json::{Value, json};

use crate::client::Response;
use crate::golden::check;
use crate::script::Script;
use crate::support::{
    CHAT, COMPLETIONS, CONTEXT, MODEL, Site, chat, completion, config, echo, encode,
    pairs_worker_config, tokenizer, with,
};

const RERANK: &str = "/v1/rerank";
const SCORE: &str = "/v1/score";

/// Distinguishes pairs by their second text's length and last token.
fn score_of(pair: &ScorePair) -> f32 {
    let second = u32::try_from(pair.token_ids.len()).expect("short") - pair.first_tokens;
    let last = pair.token_ids.last().copied().unwrap_or(0);
    let small = |number: u32| f32::from(u16::try_from(number).expect("small"));
    small(second) + small(last) / 4096.0
}

/// An engine that only scores pairs.
pub(crate) fn scorer() -> Arc<Script> {
    scorer_that(|_| {})
}

/// Like [`scorer`]; `spoil` changes each call's scores.
fn scorer_that(spoil: impl Fn(&mut Vec<f32>) + Send + Sync + 'static) -> Arc<Script> {
    let engine = Script::new(move |request, out| {
        let Input::Score(pairs) = &request.input else {
            panic!("nothing to score: {request:?}")
        };
        let mut scores: Vec<f32> = pairs.iter().map(score_of).collect();
        spoil(&mut scores);
        async move {
            out.scores(scores).await?;
            Ok(Finish::stop())
        }
    });
    engine.declaring(|can| {
        *can = Capabilities {
            inputs: [InputKind::Score].into(),
            ..Capabilities::default()
        };
    })
}

/// The pairs of every call so far.
fn calls(engine: &Script) -> Vec<Vec<ScorePair>> {
    let requests = engine.requests().into_iter();
    let pairs = requests.map(|request| match request.input {
        Input::Score(pairs) => pairs.into_inner(),
        Input::Tokens(_) | Input::Text(_) | Input::Chat(_) | Input::Embed(_) => Vec::new(),
    });
    pairs.collect()
}

async fn site(engine: Arc<Script>) -> Site {
    Site::with_worker(config(), pairs_worker_config(), engine).await
}

/// A request with further fields.
fn rerank(documents: impl Into<Value>, further: &Value) -> Value {
    let documents = documents.into();
    let body = json!({"model": MODEL, "query": "one two", "documents": documents});
    with(body, further.clone())
}

fn score(text_1: impl Into<Value>, text_2: impl Into<Value>) -> Value {
    json!({"model": MODEL, "text_1": text_1.into(), "text_2": text_2.into()})
}

/// The pair of two texts, as the test tokenizer encodes it.
fn pair(first: &str, second: &str) -> ScorePair {
    let between = tokenizer().token_id("<|im_end|>").expect("it is there");
    let mut token_ids = encode(first);
    token_ids.push(between);
    let first_tokens = u32::try_from(token_ids.len()).expect("short");
    token_ids.extend(encode(second));
    ScorePair {
        token_ids,
        first_tokens,
    }
}

/// The index and score of each result of a successful answer, in its order.
fn results(response: &Response) -> Vec<(usize, f32)> {
    assert_eq!(response.status, 200, "{}", response.text());
    let body = response.json();
    let result = |result: &Value| {
        let index = serde_json::from_value(result["index"].clone()).expect("a place");
        let score = serde_json::from_value(result["relevance_score"].clone()).expect("a number");
        (index, score)
    };
    let results = body["results"].as_array().expect("a list");
    results.iter().map(result).collect()
}

/// The scores of a successful answer, by index.
fn scores(response: &Response) -> Vec<f32> {
    assert_eq!(response.status, 200, "{}", response.text());
    let body = response.json();
    let data = body["data"].as_array().expect("a list");
    let score = |(index, item): (usize, &Value)| {
        assert_eq!(item["index"], index);
        serde_json::from_value(item["score"].clone()).expect("a number")
    };
    data.iter().enumerate().map(score).collect()
}

#[tokio::test]
async fn documents_are_ranked() {
    let engine = scorer();
    let site = site(engine.clone()).await;
    let documents = json!(["three", {"text": "three four five"}, "six seven"]);
    let further = json!({"top_n": 2, "user": "u"});
    let response = site
        .post(RERANK, &rerank(documents.clone(), &further))
        .await;
    check("rerank", &response);
    let pairs = ["three", "three four five", "six seven"].map(|text| pair("one two", text));
    assert_eq!(calls(&engine), [pairs.to_vec()]);
    let expected = [1, 2, 0].map(|index| (index, score_of(&pairs[index])));
    let bare = json!({"return_documents": false});
    for path in [RERANK, "/v2/rerank", "/rerank"] {
        let response = site.post(path, &rerank(documents.clone(), &bare)).await;
        assert_eq!(results(&response), expected, "{path}");
        let tokens: usize = pairs.iter().map(|pair| pair.token_ids.len()).sum();
        let body = response.json();
        assert_eq!(body["usage"]["total_tokens"], tokens);
        assert_eq!(body["meta"]["tokens"]["input_tokens"], tokens);
        assert!(!response.text().contains("document"), "{}", response.text());
    }
    site.idle().await;
    site.close().await;
}

#[tokio::test]
async fn pairs_are_scored() {
    let engine = scorer();
    let site = site(engine.clone()).await;
    let response = site
        .post(SCORE, &score("one", json!(["two", "three four"])))
        .await;
    check("score", &response);
    for (text_1, text_2, expected) in [
        (json!("one"), json!("two"), vec![pair("one", "two")]),
        (json!(["one"]), json!("two"), vec![pair("one", "two")]),
        (
            json!(["one"]),
            json!(["two", "three"]),
            vec![pair("one", "two"), pair("one", "three")],
        ),
        (
            json!(["one", "two"]),
            json!(["three", {"text": "four five"}]),
            vec![pair("one", "three"), pair("two", "four five")],
        ),
    ] {
        for path in [SCORE, "/score"] {
            let before = calls(&engine).len();
            let response = site
                .post(path, &score(text_1.clone(), text_2.clone()))
                .await;
            let wanted: Vec<f32> = expected.iter().map(score_of).collect();
            assert_eq!(scores(&response), wanted, "{text_1} {text_2}");
            assert_eq!(
                calls(&engine)[before..],
                *slice::from_ref(&expected),
                "{text_1} {text_2}"
            );
        }
    }
    site.idle().await;
    site.close().await;
}

#[tokio::test]
async fn many_documents_go_to_the_engine_in_parts_and_have_the_scores_they_have_alone() {
    let engine = scorer();
    let site = site(engine.clone()).await;
    let documents: Vec<String> = (1..=300)
        .map(|count| "two ".repeat(count % 41 + 1))
        .collect();
    let response = site.post(SCORE, &score("one", json!(documents))).await;
    let together = scores(&response);
    let calls = calls(&engine);
    assert!(calls.len() > 1 && calls.iter().all(|call| call.len() <= 64));
    assert_eq!(calls.iter().map(Vec::len).sum::<usize>(), 300);
    let expected: Vec<f32> = (documents.iter())
        .map(|document| score_of(&pair("one", document)))
        .collect();
    assert_eq!(together, expected);
    let ranked = results(
        &site
            .post(RERANK, &rerank(json!(documents), &json!({})))
            .await,
    );
    assert!(ranked.is_sorted_by(|(_, one), (_, other)| one >= other));
    assert_eq!(ranked.len(), 300);
    site.close().await;
}

#[tokio::test]
async fn bad_requests_name_the_field() {
    let config = FrontendConfig {
        max_score_pairs: 3,
        ..config()
    };
    let site = Site::with_worker(config, pairs_worker_config(), scorer()).await;
    let long = "one ".repeat(CONTEXT as usize);
    let half = "one ".repeat(CONTEXT as usize / 2);
    let cases = [
        ("model", json!({"model": null})),
        ("model", json!({"model": 1})),
        ("query", json!({"query": null})),
        ("query", json!({"query": ""})),
        ("query", json!({"query": ["a"]})),
        ("query", json!({"query": long})),
        ("documents", json!({"documents": null})),
        ("documents", json!({"documents": []})),
        ("documents", json!({"documents": {}})),
        ("documents", json!({"documents": 1})),
        ("documents", json!({"documents": ""})),
        ("documents", json!({"documents": ["a", "b", "c", "d"]})),
        ("documents[1]", json!({"documents": ["a", ""]})),
        ("documents[1]", json!({"documents": ["a", {"text": ""}]})),
        ("documents[1].text", json!({"documents": ["a", {}]})),
        (
            "documents[1].text",
            json!({"documents": ["a", {"text": 1}]}),
        ),
        (
            "documents[0].title",
            json!({"documents": [{"title": "t", "text": "a"}]}),
        ),
        ("documents[1]", json!({"documents": ["a", 1]})),
        ("documents[1]", json!({"documents": ["a", [1, 2]]})),
        ("documents[1]", json!({"documents": ["a", null]})),
        ("documents[1]", json!({"documents": ["a", long]})),
        (
            "documents[1]",
            json!({"query": half, "documents": ["a", half]}),
        ),
        ("top_n", json!({"top_n": 0})),
        ("top_n", json!({"top_n": -1})),
        ("top_n", json!({"top_n": "2"})),
        ("return_documents", json!({"return_documents": 1})),
        ("rank_fields", json!({"rank_fields": ["title"]})),
        ("max_chunks_per_doc", json!({"max_chunks_per_doc": 2})),
        ("max_tokens_per_doc", json!({"max_tokens_per_doc": 100})),
        ("truncate", json!({"truncate": true})),
    ];
    for (field, further) in cases {
        let response = site.post(RERANK, &rerank(json!(["a"]), &further)).await;
        let message = response.blames(field);
        assert!(message.contains(field) && message.len() < 1000, "{message}");
        assert!(!message.contains("answer"), "{message}");
    }
    let cases = [
        ("model", json!({"model": null})),
        ("text_1", json!({"text_1": null})),
        ("text_2", json!({"text_2": null})),
        ("text_1", json!({"text_1": ["a", "b", "c", "d"]})),
        ("text_2", json!({"text_2": ["a", "b", "c", "d"]})),
        (
            "text_2",
            json!({"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}),
        ),
        ("text_2", json!({"text_1": ["a", "b"]})),
        (
            "text_1[1]",
            json!({"text_1": ["a", ""], "text_2": ["a", "b"]}),
        ),
        (
            "text_1[1]",
            json!({"text_1": ["a", long], "text_2": ["a", "b"]}),
        ),
        ("text_2", json!({"text_1": half, "text_2": half})),
        ("activation", json!({"activation": false})),
    ];
    for (field, further) in cases {
        let response = site.post(SCORE, &with(score("a", "b"), further)).await;
        let message = response.blames(field);
        assert!(message.contains(field) && message.len() < 1000, "{message}");
    }
    site.close().await;
}

#[tokio::test]
async fn a_pair_may_fill_the_context_and_one_token_more_is_too_long() {
    let site = site(scorer()).await;
    let (query, added) = (encode("one two").len(), 1);
    let room = CONTEXT as usize - query - added;
    // Each of these words is one token.
    let words = |count: usize| " one".repeat(count);
    assert_eq!(encode(&words(room)).len(), room);
    let response = site
        .post(RERANK, &rerank(json!([words(room)]), &json!({})))
        .await;
    assert_eq!(response.json()["usage"]["prompt_tokens"], CONTEXT);
    let documents = json!(["a", words(room + 1)]);
    let response = site.post(RERANK, &rerank(documents, &json!({}))).await;
    let message = response.blames("documents[1]");
    let code = response.refusal().2;
    assert_eq!(code.as_deref(), Some("context_length_exceeded"));
    assert!(
        message.contains("query") && message.contains("2048"),
        "{message}"
    );
    site.close().await;
}

#[tokio::test]
async fn an_engines_faults_are_told_as_what_they_are() {
    let spoils: [fn(&mut Vec<f32>); 2] = [
        |scores| scores.truncate(scores.len() - 1),
        |scores| scores[0] = f32::NAN,
    ];
    for spoil in spoils {
        let engine = scorer_that(spoil);
        let site = site(engine.clone()).await;
        let full = EngineError::new(ErrorKind::Overloaded, "the queue is full");
        engine.refuse(Some(full));
        let response = site.post(RERANK, &rerank(json!(["a"]), &json!({}))).await;
        assert!(response.header("retry-after").is_some());
        assert_eq!(response.status, 429, "{}", response.text());
        engine.refuse(None);
        let response = site.post(RERANK, &rerank(json!(["a"]), &json!({}))).await;
        assert_eq!(response.status, 500);
        let text = response.text();
        assert!(text.contains("The server failed on this request"), "{text}");
        site.idle().await;
        site.close().await;
    }
}

#[tokio::test]
async fn models_do_what_they_declare_and_no_more() {
    let site_of_echo = Site::start(echo()).await;
    for (path, body) in [
        (RERANK, rerank(json!(["a"]), &json!({}))),
        (SCORE, score("a", "b")),
    ] {
        let message = site_of_echo.post(path, &body).await.blames("model");
        assert!(
            message.contains(MODEL) && message.contains("scores"),
            "{message}"
        );
        let other = with(body, json!({"model": "other"}));
        assert_eq!(site_of_echo.post(path, &other).await.status, 404);
    }
    site_of_echo.close().await;
    let site = site(scorer()).await;
    let embeddings = json!({"model": MODEL, "input": "a"});
    for (path, body) in [
        (CHAT, chat("Hello", json!({}))),
        (COMPLETIONS, completion("a", json!({}))),
        ("/v1/embeddings", embeddings),
    ] {
        site.post(path, &body).await.blames("model");
    }
    site.close().await;
}

/// The tokenizer of a model that reads one text puts nothing between two.
#[tokio::test]
async fn a_tokenizer_without_pairs_is_refused_with_the_file() {
    let site = Site::start(scorer()).await;
    let response = site.post(RERANK, &rerank(json!(["a"]), &json!({}))).await;
    let message = response.blames("model");
    assert!(
        message.contains("post_processor") && message.contains("tokenizer.json"),
        "{message}"
    );
    site.close().await;
}
