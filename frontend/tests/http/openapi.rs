//! The server does what `/openapi.json` says: it serves what the document allows, refuses by name what it forbids, and answers
//! everything else with one of the listed answers.
//!
//! A fixed number of bodies is drawn from the document's own schemas. A failing run prints its seed, which `PROPTEST_RNG_SEED`
//! replays, and writes the case into `openapi/regressions.txt`, where it stays. `PROPTEST_CASES` changes the number.

mod document;
mod prose;
mod values;

use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use genset_backend_common::output::{Finish, TokenChunk, TokenLogprob, TopLogprob};
use genset_backend_common::worker::WorkerConfig;
use genset_backend_common::{
    Input, LLMEngine,
    config::{GuidedKind, InputKind},
};
use genset_engine_sample::{SampleArgs, SampleEngine};
use genset_frontend::{BatchConfig, FrontendConfig};
use proptest::prelude::{Just, ProptestConfig, Strategy, TestCaseError, any, prop_oneof};
use proptest::prop_assert;
use proptest::sample::{Index, select};
use proptest::test_runner::{FileFailurePersistence, RngSeed, TestRunner};
use serde_json::{Value, json};

use crate::client::{Response, request};
use crate::messages::VERSION;
use crate::script::Script;
use crate::support::{MODEL, Site, config, encode, pairs_worker_config, with_template};
use document::{Document, Judge, Operation};

/// Accepts every message, in any order, with tools and effort.
const TEMPLATE: &str = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}\
    {% if tools %}{{ tools | length }} tools{% endif %}{{ reasoning_effort }}<|im_start|>assistant\n";

/// An engine that declares every capability.
fn able() -> Arc<Script> {
    use GuidedKind::{Choice, Grammar, JsonObject, JsonSchema, Regex};
    let engine = Script::new(|request, out| async move {
        if let Input::Embed(inputs) = &request.input {
            out.embeddings(vec![vec![0.5, -0.25]; inputs.len()]).await?;
            return Ok(Finish::stop());
        }
        if let Input::Score(pairs) = &request.input {
            out.scores(vec![0.25; pairs.len()]).await?;
            return Ok(Finish::stop());
        }
        let most = request.stop.max_tokens.unwrap_or(u32::MAX);
        for (place, token) in (0..most).zip(encode("It is.")) {
            if request.stop.is_stop(token, place) {
                return Ok(Finish::stop_token(token));
            }
            let rating = |top| TokenLogprob {
                logprob: -0.5,
                top: vec![
                    TopLogprob {
                        token_id: token,
                        logprob: -0.5
                    };
                    usize::from(top > 0)
                ],
            };
            let logprobs = request.output.logprobs.map(rating);
            out.tokens(TokenChunk {
                token_ids: [token].into_iter().collect(),
                logprobs: logprobs.into_iter().collect(),
            })
            .await?;
        }
        Ok(Finish::length())
    });
    engine.widen();
    engine.declaring(|can| {
        can.inputs.extend([InputKind::Embed, InputKind::Score]);
        can.max_logprobs = Some(20);
        can.guided
            .extend([Choice, Grammar, JsonObject, JsonSchema, Regex]);
    })
}

fn sample() -> Arc<dyn LLMEngine> {
    Arc::new(SampleEngine::from_args(&SampleArgs {
        vocab_size: 2048,
        token_delay_ms: 0,
    }))
}

/// A folder of batches with an input that all tests use.
fn folder_of_batches() -> tempfile::TempDir {
    let folder = tempfile::tempdir().expect("a folder");
    let files = folder.path().join("files");
    let record = json!({
        "id": prose::INPUT_FILE, "owner": null, "bytes": 2, "created_at": 0, "expires_at": u64::MAX,
        "filename": "input.jsonl", "purpose": "batch",
    });
    std::fs::create_dir(&files).expect("a folder");
    std::fs::write(files.join(prose::INPUT_FILE), "{}").expect("a file");
    let path = files.join(format!("{}.json", prose::INPUT_FILE));
    std::fs::write(path, record.to_string()).expect("a file");
    folder
}

/// A server, its document, and a runtime to call it from.
struct Server {
    tokio: tokio::runtime::Runtime,
    site: Site,
    document: Document,
    _folder: tempfile::TempDir,
}

impl Server {
    fn start(engine: Arc<dyn LLMEngine>) -> Self {
        let tokio = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .expect("a runtime");
        let worker = WorkerConfig {
            tool_parser: Some("hermes".into()),
            ..with_template(pairs_worker_config(), TEMPLATE)
        };
        let folder = folder_of_batches();
        let batches = BatchConfig {
            folder: Some(folder.path().to_owned()),
            max_batches: usize::MAX,
            ..BatchConfig::default()
        };
        let config = FrontendConfig {
            batches,
            ..config()
        };
        let site = tokio.block_on(Site::with_worker(config, worker, engine));
        let document = tokio.block_on(site.get("/openapi.json")).json();
        Self {
            tokio,
            site,
            document: Document::new(document),
            _folder: folder,
        }
    }

    /// The operations that take a body.
    fn with_bodies(&self) -> Vec<Target> {
        let operations = self.document.operations().into_iter();
        let targets = operations.filter_map(|operation| {
            let schema = operation.body.clone()?;
            Some(Target {
                path: operation.path.clone(),
                body: self.document.judge(&schema),
                answers: self.document.judges(&operation),
                schema,
            })
        });
        targets.collect()
    }

    /// Sends a request, and then another that the same server must answer.
    fn ask(
        &self,
        method: &str,
        path: &str,
        body: &[u8],
    ) -> Result<Option<Response>, TestCaseError> {
        self.tokio.block_on(async {
            let mut client = self.site.connect().await;
            client.send(request(method, path, "", body)).await;
            let response = client.response_to(method).await;
            prop_assert!(self.site.get("/live").await.status == 200);
            Ok(response)
        })
    }

    fn close(self) {
        self.tokio.block_on(async {
            self.site.is_well().await;
            self.site.idle().await;
            self.site.close().await;
        });
    }
}

/// An operation that takes a body, and validators for the body and its answers.
struct Target {
    path: String,
    schema: Value,
    body: Judge,
    answers: BTreeMap<u16, Option<Judge>>,
}

/// Runs `cases` cases; the same seed gives the same cases.
fn run<S: Strategy>(
    cases: u32,
    strategy: &S,
    test: impl Fn(S::Value) -> Result<(), TestCaseError>,
) {
    let mut config = ProptestConfig {
        cases,
        failure_persistence: Some(Box::new(FileFailurePersistence::Direct(concat!(
            env!("CARGO_MANIFEST_DIR"),
            "/tests/http/openapi/regressions.txt"
        )))),
        max_shrink_iters: 500,
        ..ProptestConfig::default()
    };
    if std::env::var_os("PROPTEST_CASES").is_some() {
        config.cases = ProptestConfig::default().cases;
    }
    if config.rng_seed == RngSeed::Random {
        config.rng_seed = RngSeed::Fixed(rand::random());
    }
    eprintln!("PROPTEST_RNG_SEED={}", config.rng_seed);
    if let Err(error) = TestRunner::new(config).run(strategy, test) {
        panic!("{error}");
    }
}

/// The answer must be one that the document lists, with the documented schema.
fn check_shape(
    answers: &BTreeMap<u16, Option<Judge>>,
    response: &Response,
) -> Result<(), TestCaseError> {
    let (status, text) = (response.status, response.text());
    prop_assert!(status < 500, "{status}: {text}");
    let Some(judge) = answers.get(&status) else {
        return Err(TestCaseError::fail(format!(
            "{status} is not listed: {text}"
        )));
    };
    let kind = response.header("content-type").unwrap_or_default();
    let Some(judge) = judge.as_ref().filter(|_| kind == "application/json") else {
        prop_assert!(status == 200, "{status} {kind}: {text}");
        return Ok(());
    };
    let faults = judge.faults(&response.json());
    prop_assert!(faults.is_empty(), "{faults:?}: {text}");
    Ok(())
}

/// Whether a refusal names the fault: one of the names on the path to it.
fn names(response: &Response, path: &[String]) -> bool {
    let error = &response.json()["error"];
    let message = error["message"].as_str().unwrap_or_default();
    let param = error["param"].as_str().unwrap_or_default();
    let mut parts = param.split(['.', '[', ']']);
    path.is_empty()
        || parts.any(|part| !part.is_empty() && path.iter().any(|name| name == part))
        || path.iter().any(|name| message.contains(name.as_str()))
}

/// The events of a stream must end properly, and none may be an error.
fn check_stream(response: &Response) -> Result<(), TestCaseError> {
    let text = response.text();
    let ends = ["data: [DONE]\n\n", "\"type\":\"message_stop\"}\n\n"];
    let is_response =
        text.contains("event: response.completed") || text.contains("event: response.incomplete");
    prop_assert!(
        is_response || ends.iter().any(|end| text.ends_with(end)),
        "{text}"
    );
    prop_assert!(!text.contains("\"error\":{"), "{text}");
    Ok(())
}

#[test]
fn what_the_document_allows_is_served() {
    let server = Server::start(able());
    for target in server.with_bodies() {
        let bodies = values::allowed(&server.document, &target.schema);
        run(120, &bodies, |mut body| {
            prop_assert!(target.body.allows(&body), "the generator errs: {body}");
            prose::mend(&target.path, &mut body);
            prop_assert!(
                target.body.allows(&body),
                "mended to what is forbidden: {body}"
            );
            let response = server.ask("POST", &target.path, body.to_string().as_bytes())?;
            let Some(response) = response else {
                return Err(TestCaseError::fail("no answer"));
            };
            prop_assert!(
                response.status == 200,
                "{} {body}: {} {}",
                target.path,
                response.status,
                response.text()
            );
            check_shape(&target.answers, &response)?;
            if response.header("content-type") != Some("application/json") {
                check_stream(&response)?;
            }
            Ok(())
        });
    }
    server.close();
}

#[test]
fn what_the_document_forbids_is_refused_by_name() {
    let server = Server::start(able());
    for target in server.with_bodies() {
        let bodies = values::allowed(&server.document, &target.schema);
        let spoils = (bodies, any::<(Index, Index)>());
        let forbidden = Cell::new(0);
        run(250, &spoils, |(mut body, at)| {
            prose::mend(&target.path, &mut body);
            let (path, body) = values::spoil(&server.document, &target.schema, &body, at);
            let is_allowed = target.body.allows(&body);
            forbidden.set(forbidden.get() + u32::from(!is_allowed));
            let response = server.ask("POST", &target.path, body.to_string().as_bytes())?;
            let Some(response) = response else {
                return Err(TestCaseError::fail("no answer"));
            };
            check_shape(&target.answers, &response)?;
            let said = || format!("{} {path:?} {body}: {}", target.path, response.text());
            // An allowed body may still break a rule between fields: it is served, or properly refused.
            prop_assert!(is_allowed || response.status == 400, "{}", said());
            if response.status == 400 && !is_allowed {
                prop_assert!(names(&response, &path), "{}", said());
            }
            Ok(())
        });
        // Otherwise the test would prove little.
        assert!(
            forbidden.get() > 125,
            "{}: {} of 250",
            target.path,
            forbidden.get()
        );
    }
    server.close();
}

/// The smallest body that an operation takes.
fn least(path: &str) -> Value {
    let messages = json!([{"role": "user", "content": "Hi"}]);
    match path {
        "/v1/completions" | "/tokenize" => json!({"model": MODEL, "prompt": "Hi"}),
        "/v1/embeddings" | "/v1/responses" | "/v1/responses/input_tokens" => {
            json!({"model": MODEL, "input": "Hi"})
        }
        "/detokenize" => json!({"model": MODEL, "tokens": [5]}),
        path if path.ends_with("/rerank") => {
            json!({"model": MODEL, "query": "Hi", "documents": ["Ho"]})
        }
        path if path.ends_with("/score") => {
            json!({"model": MODEL, "text_1": "Hi", "text_2": "Ho"})
        }
        "/v1/batches" => json!({
            "input_file_id": prose::INPUT_FILE,
            "endpoint": "/v1/chat/completions",
            "completion_window": "24h",
        }),
        "/v1/messages" => json!({"model": MODEL, "messages": messages, "max_tokens": 5}),
        _ => json!({"model": MODEL, "messages": messages}),
    }
}

/// A field that only some requests have is refused by the others: the document lists every field that the server takes.
#[test]
fn fields_that_are_not_listed_are_refused() {
    let server = Server::start(able());
    let targets = server.with_bodies();
    let mut fields: BTreeSet<String> = BTreeSet::new();
    for target in &targets {
        fields.extend(names_in(&server.document, &target.schema));
    }
    assert!(fields.len() > 70, "{fields:?}");
    for target in &targets {
        let plain = server.ask(
            "POST",
            &target.path,
            least(&target.path).to_string().as_bytes(),
        );
        assert_eq!(plain.unwrap().unwrap().status, 200, "{}", target.path);
        for field in &fields {
            let mut body = least(&target.path);
            body[field] = json!({"x": [1]});
            if target.body.allows(&body) {
                continue;
            }
            let response = server.ask("POST", &target.path, body.to_string().as_bytes());
            let response = response.unwrap().unwrap();
            assert_eq!(
                response.status,
                400,
                "{} {body}: {}",
                target.path,
                response.text()
            );
        }
    }
    server.close();
}

/// The field names of a body.
fn names_in(document: &Document, schema: &Value) -> Vec<String> {
    let schema = document.resolve(schema);
    let branches = schema["anyOf"].as_array().into_iter().flatten();
    let own = schema["properties"].as_object().into_iter().flatten();
    let own = own.map(|(name, _)| name.clone());
    branches
        .flat_map(|branch| names_in(document, branch))
        .chain(own)
        .collect()
}

/// Damaged bodies, and arbitrary bytes.
fn garbage(document: &Document, schema: &Value) -> impl Strategy<Value = Vec<u8>> + use<> {
    let body = values::allowed(document, schema).prop_map(|body| body.to_string().into_bytes());
    let damage = (body.clone(), any::<Index>(), any::<u8>());
    let damaged = damage.prop_map(|(mut body, at, byte)| {
        let at = at.index(body.len());
        body[at] = byte;
        body
    });
    let cut = (body.clone(), any::<Index>()).prop_map(|(mut body, at)| {
        body.truncate(at.index(body.len()));
        body
    });
    let doubled = body.clone().prop_map(|body| [body.clone(), body].concat());
    let deep = (1..100_000_usize, select(&["[", "{\"a\":", "[{\"a\":"][..]))
        .prop_map(|(depth, open)| open.repeat(depth).into_bytes());
    let bytes = proptest::collection::vec(any::<u8>(), 0..64);
    let other = values::anything().prop_map(|value| value.to_string().into_bytes());
    prop_oneof![4 => body, 4 => damaged, 1 => cut, 1 => doubled, 1 => deep, 1 => bytes, 2 => other]
}

#[test]
fn whatever_body_is_sent_the_answer_is_one_of_the_documents() {
    for engine in [able() as Arc<dyn LLMEngine>, sample()] {
        let server = Server::start(engine);
        for target in server.with_bodies() {
            let bodies = garbage(&server.document, &target.schema);
            run(60, &bodies, |body| {
                let Some(response) = server.ask("POST", &target.path, &body)? else {
                    return Err(TestCaseError::fail("no answer"));
                };
                check_shape(&target.answers, &response)
            });
        }
        server.close();
    }
}

/// Values for a path parameter.
fn parameter() -> impl Strategy<Value = String> {
    let odd = [
        MODEL,
        "resp_0",
        prose::INPUT_FILE,
        "batch_0",
        "",
        "/",
        "//",
        "..",
        "%2e%2e%2f",
        "%00",
        "%ff%fe",
        "%",
        "%zz",
        "a/b/../c",
        "%F0%9F%A6%80",
        "?limit=0",
        "x?limit=101&order=up",
        "x?after=%ff",
        "x?stream=true",
        "x?tpyo",
        "*",
        "{id}",
        "a;b=c",
        "a%20b",
    ];
    prop_oneof![
        3 => select(odd.map(str::to_owned).to_vec()),
        1 => "[!-\"$-~]{0,20}",
        1 => Just("a".repeat(5000)),
    ]
}

#[test]
fn whatever_path_is_asked_for_the_answer_is_one_of_the_documents() {
    let server = Server::start(able());
    let operations: Vec<Operation> = server.document.operations();
    let judged: Vec<_> = operations
        .iter()
        .filter(|operation| operation.body.is_none())
        .map(|operation| (operation, server.document.judges(operation)))
        .collect();
    for (operation, answers) in judged {
        let cases = if operation.has_parameter { 100 } else { 3 };
        run(cases, &parameter(), |parameter| {
            let path = operation.path.replace("{id}", &parameter);
            let response = server.ask(&operation.method, &path, b"")?;
            let Some(response) = response else {
                return Err(TestCaseError::fail("no answer"));
            };
            // A parameter may turn the path into another route, which does not exist or lacks this method.
            if operation.has_parameter && response.status == 405 {
                return Ok(());
            }
            // An invalid path is refused before there is a request.
            if path.parse::<http::Uri>().is_err() && response.body.is_empty() {
                prop_assert!(response.status == 400);
                return Ok(());
            }
            check_shape(&answers, &response).map_err(|error| {
                TestCaseError::fail(format!("{} {path}: {error}", operation.method))
            })
        });
    }
    server.close();
}

#[test]
fn what_anthropics_clients_are_told_of_models_is_in_the_document_too() {
    let server = Server::start(able());
    let operations = server.document.operations();
    for (path, of, status) in [
        ("/v1/models", "/v1/models", 200),
        ("/v1/models?limit=0", "/v1/models", 400),
        ("/v1/models/tiny", "/v1/models/{id}", 200),
        ("/v1/models/%ff", "/v1/models/{id}", 400),
        ("/v1/models/nobody", "/v1/models/{id}", 404),
    ] {
        let operation = operations.iter().find(|operation| operation.path == of);
        let answers = server.document.judges(operation.expect("it is listed"));
        let asked = server.site.send(request("GET", path, VERSION, ""));
        let response = server.tokio.block_on(asked);
        assert_eq!(response.status, status, "{path}");
        check_shape(&answers, &response).unwrap();
    }
    server.close();
}
