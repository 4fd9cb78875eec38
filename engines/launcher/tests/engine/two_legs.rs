//! Disaggregated prefill and decode on stand-ins of vLLM that answer as the real server did: how each is started, which
//! requests it receives, and what happens to blocks that cannot be fetched.

use std::time::Duration;

use genset_backend_common::{
    DrainContext, ErrorKind, FinishReason, GenerateRequest, LLMEngine, RequestContext,
    RequestField, Role, StartContext,
    transfer::{LocalKvCarrier, TransferParams},
};
use genset_engine_launcher::{LauncherConfig, LauncherEngine};
use serde_json::{Value, json};
use tokio::time::timeout;

use crate::support::{self, Answer, LONG, Reports, answer, config};

const PROMPT: [u32; 4] = [5, 6, 7, 8];

/// Workers that can reach each other's blocks.
#[derive(Default)]
struct Workers {
    carrier: LocalKvCarrier,
    count: u64,
}

impl Workers {
    async fn start(&mut self, role: Role, flags: &[&str]) -> LauncherEngine {
        self.start_with(role, config("vllm", flags)).await
    }

    async fn start_with(&mut self, role: Role, config: LauncherConfig) -> LauncherEngine {
        self.count += 1;
        let engine = LauncherEngine::new(config);
        let ctx = StartContext {
            role,
            kv_transfers: self.carrier.join(self.count),
            ..StartContext::detached(self.count)
        };
        engine.start(ctx).await.unwrap();
        engine
    }
}

fn request(max_tokens: u32) -> GenerateRequest {
    support::request(&PROMPT, max_tokens)
}

fn with(mut request: GenerateRequest, transfer: TransferParams) -> GenerateRequest {
    request.transfer = Some(transfer);
    request
}

/// Runs the prefill: returns its token and its transfer parameters.
async fn prefill(engine: &LauncherEngine, request: GenerateRequest) -> (u32, TransferParams) {
    let Answer { tokens, end, .. } = answer(engine, request).await;
    let finished = end.unwrap();
    assert_eq!(
        (tokens.len(), finished.reason),
        (1, FinishReason::Length),
        "{finished:?}"
    );
    (tokens[0], finished.transfer.unwrap())
}

/// The value of a server flag.
fn flag<'a>(start: &'a Value, name: &str) -> Option<&'a str> {
    let args = start["args"].as_array().unwrap();
    let place = args.iter().position(|arg| arg == name)?;
    args[place + 1].as_str()
}

#[tokio::test]
async fn two_legs_answer_as_one_instance() {
    let mut workers = Workers::default();
    let whole = workers.start(Role::Aggregated, &[]).await;
    let (first, second) = (
        workers.start(Role::Prefill, &[]).await,
        workers.start(Role::Decode, &[]).await,
    );
    for temperature in [0.0, 1.0] {
        let mut request = request(6);
        request.sampling.temperature = Some(temperature);
        request.sampling.seed = Some(7);
        let expected = answer(&whole, request.clone()).await.tokens;
        let (token, transfer) = prefill(&first, request.clone()).await;
        let Answer { tokens, end, .. } = answer(&second, with(request, transfer)).await;
        assert_eq!(end.unwrap().reason, FinishReason::Length);
        assert_eq!(
            (token, &tokens),
            (expected[0], &expected),
            "temperature {temperature}"
        );
    }
    for engine in [whole, first, second] {
        engine.cleanup().await.unwrap();
    }
}

#[tokio::test]
async fn each_server_gets_the_flags_of_its_connector() {
    for (role, kv_role) in [
        (Role::Prefill, "kv_producer"),
        (Role::Decode, "kv_consumer"),
    ] {
        let mut reports = Reports::listen().await;
        let mut config = config("vllm", &[&reports.flag()]);
        config.kv_lease = Duration::from_secs(20);
        let engine = Workers::default().start_with(role, config).await;
        let start = reports.next("start").await;
        let said: Value =
            serde_json::from_str(flag(&start, "--kv-transfer-config").unwrap()).unwrap();
        let expected = json!({
            "kv_connector": "NixlConnector",
            "kv_role": kv_role,
            "kv_connector_extra_config": {"kv_lease_duration": 30},
        });
        assert_eq!(said, expected);
        assert_eq!(start["env"]["VLLM_NIXL_SIDE_CHANNEL_HOST"], "127.0.0.1");
        let port = start["env"]["VLLM_NIXL_SIDE_CHANNEL_PORT"]
            .as_str()
            .unwrap();
        assert_ne!(port.parse::<u16>().unwrap(), 0);
        assert_ne!(Some(port), flag(&start, "--port"));
        engine.cleanup().await.unwrap();
    }
}

#[tokio::test]
async fn a_rank_that_is_named_computes_the_prompt_and_gives_its_blocks() {
    let mut workers = Workers::default();
    let mut reports = Reports::listen().await;
    let flags = ["--data-parallel-size", "2", &reports.flag()];
    let first = workers.start(Role::Prefill, &flags).await;
    let start = reports.next("start").await;
    let second = workers.start(Role::Decode, &["-dp", "2"]).await;
    let mut asked = request(6);
    asked.data_parallel_rank = Some(1);
    let (_, transfer) = prefill(&first, asked.clone()).await;
    // Each rank has its own port for connectors.
    let port = start["env"]["VLLM_NIXL_SIDE_CHANNEL_PORT"].as_str();
    let port: u16 = port.unwrap().parse().unwrap();
    let params = &transfer.data["kv_transfer_params"];
    assert_eq!(params["remote_port"], port + 1, "{transfer:?}");
    let Answer { tokens, end, .. } = answer(&second, with(asked, transfer)).await;
    assert_eq!(
        (tokens.len(), end.unwrap().reason),
        (6, FinishReason::Length)
    );
    for engine in [first, second] {
        engine.cleanup().await.unwrap();
    }
}

#[tokio::test]
async fn an_address_that_is_not_of_this_machine_is_refused() {
    let mut config = config("vllm", &[]);
    config.kv_transfer_host = "192.0.2.1".parse().unwrap();
    let engine = LauncherEngine::new(config);
    let ctx = StartContext {
        role: Role::Prefill,
        ..StartContext::detached(1)
    };
    let error = engine.start(ctx).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument);
    assert!(format!("{error:?}").contains("--kv-transfer-host"));
    engine.cleanup().await.unwrap();
}

#[tokio::test]
async fn a_prefill_is_asked_whole_and_a_decode_gets_what_it_said_unchanged() {
    let (mut first_reports, mut second_reports) =
        (Reports::listen().await, Reports::listen().await);
    let mut workers = Workers::default();
    let first = workers.start(Role::Prefill, &[&first_reports.flag()]).await;
    let second = workers.start(Role::Decode, &[&second_reports.flag()]).await;
    let mut request = request(6);
    request.stop.min_tokens = 4;
    let (_, transfer) = prefill(&first, request.clone()).await;
    let body = first_reports.next("request").await["body"].take();
    assert_eq!(body["stream"], false);
    assert_eq!(body.get("stream_options"), None);
    assert_eq!(
        (&body["max_tokens"], &body["min_tokens"]),
        (&json!(1), &json!(1))
    );
    assert_eq!(
        body["kv_transfer_params"],
        json!({"do_remote_decode": true, "do_remote_prefill": false})
    );

    assert_eq!(transfer.source_worker_id, 1);
    let said = transfer.data["kv_transfer_params"].clone();
    assert_eq!(said["do_remote_prefill"], true);
    assert_eq!(said["remote_num_tokens"], 4);
    answer(&second, with(request, transfer)).await.end.unwrap();
    let body = second_reports.next("request").await["body"].take();
    assert_eq!(body["kv_transfer_params"], said);
    assert_eq!(
        (&body["stream"], &body["max_tokens"], &body["min_tokens"]),
        (&json!(true), &json!(6), &json!(4))
    );
    first.cleanup().await.unwrap();
    second.cleanup().await.unwrap();
}

#[tokio::test]
async fn what_ends_with_its_first_token_is_an_ordinary_answer() {
    let mut reports = Reports::listen().await;
    let engine = Workers::default()
        .start(Role::Prefill, &[&reports.flag()])
        .await;
    let Answer { tokens, end, .. } = answer(&engine, request(1)).await;
    assert_eq!(end.unwrap().transfer, None);
    let body = reports.next("request").await["body"].take();
    assert_eq!(body.get("kv_transfer_params"), None);
    let mut stopping = request(6);
    stopping.stop.stop_token_ids = tokens.into();
    let Answer { tokens, end, .. } = answer(&engine, stopping).await;
    let finished = end.unwrap();
    assert_eq!(tokens, [0; 0]);
    assert_eq!(
        (finished.reason, finished.transfer),
        (FinishReason::Stop, None)
    );
    engine.cleanup().await.unwrap();
}

#[tokio::test]
async fn an_answer_that_says_nothing_of_its_blocks_may_move() {
    let engine = Workers::default()
        .start(Role::Prefill, &["--fault", "no-params"])
        .await;
    let Answer { tokens, end, .. } = answer(&engine, request(6)).await;
    let error = end.unwrap_err();
    // Before any token, so that the request can start anew.
    assert_eq!(tokens, [0; 0]);
    assert!(error.policy().is_migratable, "{error}");
    assert!(error.message().contains("kv_transfer_params"), "{error}");
    // A request that needs no blocks is answered.
    answer(&engine, request(1)).await.end.unwrap();
    engine.cleanup().await.unwrap();
}

#[tokio::test]
async fn a_decode_that_cannot_fetch_loses_the_blocks_and_not_the_worker() {
    let mut workers = Workers::default();
    let first = workers.start(Role::Prefill, &[]).await;
    let second = workers
        .start(Role::Decode, &["--fault", "fetch-fails"])
        .await;
    let (_, transfer) = prefill(&first, request(6)).await;
    let Answer { tokens, end, .. } = answer(&second, with(request(6), transfer)).await;
    let error = end.unwrap_err();
    assert_eq!(tokens, [0; 0]);
    assert_eq!(error.kind(), ErrorKind::StreamIncomplete, "{error}");
    assert!(error.message().contains("cannot be fetched"), "{error}");
    // A decode instance computes the prompt itself if told to.
    let whole = answer(&second, with(request(6), TransferParams::none())).await;
    assert_eq!(whole.tokens.len(), 6);
    first.cleanup().await.unwrap();
    second.cleanup().await.unwrap();
}

#[tokio::test]
async fn blocks_are_fetched_once_and_in_their_time_and_from_a_worker_that_is_there() {
    let mut workers = Workers::default();
    let mut brief = config("vllm", &[]);
    brief.kv_lease = Duration::from_millis(1);
    let brief = workers.start_with(Role::Prefill, brief).await;
    let first = workers.start(Role::Prefill, &[]).await;
    let second = workers.start(Role::Decode, &[]).await;
    let (_, fetched) = prefill(&first, request(6)).await;
    answer(&second, with(request(6), fetched.clone()))
        .await
        .end
        .unwrap();
    let (_, late) = prefill(&brief, request(6)).await;
    let (_, gone) = prefill(&first, request(6)).await;
    let drain = DrainContext { deadline: LONG };
    timeout(LONG, brief.drain(drain)).await.unwrap().unwrap();
    first.cleanup().await.unwrap();
    for transfer in [fetched, late, gone] {
        let Answer { tokens, end, .. } = answer(&second, with(request(6), transfer)).await;
        let error = end.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::StreamIncomplete, "{error}");
        assert_eq!(tokens, [0; 0]);
    }
    brief.cleanup().await.unwrap();
    second.cleanup().await.unwrap();
}

#[tokio::test]
async fn a_drain_waits_for_blocks_until_they_are_fetched() {
    let mut workers = Workers::default();
    let first = workers.start(Role::Prefill, &[]).await;
    let second = workers.start(Role::Decode, &[]).await;
    let (_, transfer) = prefill(&first, request(6)).await;
    let drain = first.drain(DrainContext { deadline: LONG });
    let fetched = answer(&second, with(request(6), transfer));
    tokio::pin!(drain, fetched);
    assert!(futures_util::poll!(&mut drain).is_pending());
    let (drained, fetched) = tokio::join!(timeout(LONG, drain), fetched);
    drained.unwrap().unwrap();
    assert_eq!(fetched.tokens.len(), 6);
    first.cleanup().await.unwrap();
    second.cleanup().await.unwrap();
}

#[tokio::test]
async fn parameters_that_no_connector_can_be_told_are_refused() {
    let engine = Workers::default().start(Role::Decode, &[]).await;
    let of = |data| TransferParams {
        source_worker_id: 9,
        source: None,
        data,
    };
    let large = "x".repeat(2 << 20);
    let refused = [
        None,
        Some(of(json!({"of": "another engine"}))),
        Some(of(json!({"hold": "7", "kv_transfer_params": null}))),
        Some(of(json!({"hold": "7", "kv_transfer_params": {}}))),
        Some(of(json!({"hold": "7", "kv_transfer_params": {"a": large}}))),
        Some(of(json!({"hold": "x", "kv_transfer_params": {"a": 1}}))),
    ];
    for transfer in refused {
        let mut request = request(6);
        request.transfer = transfer;
        let refused = engine.generate(request, RequestContext::new("r")).await;
        let error = refused.err().unwrap();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument);
        assert_eq!(error.at(), Some(&RequestField::Transfer.into()));
    }
    engine.cleanup().await.unwrap();
}

#[tokio::test]
async fn servers_that_cannot_play_a_role_are_not_started() {
    for (api, named) in [
        ("sglang", "at the same time"),
        ("trtllm", "not driven"),
        ("llama", "in one server"),
    ] {
        for role in [Role::Prefill, Role::Decode] {
            let mut config = config(api, &[]);
            config.command = Some(vec!["/no/such/server".into()]);
            let engine = LauncherEngine::new(config);
            let ctx = StartContext {
                role,
                ..StartContext::detached(1)
            };
            let error = engine.start(ctx).await.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Unsupported, "{api}");
            assert!(error.message().contains(named), "{error}");
            assert!(error.message().contains("out=vllm"), "{error}");
            engine.cleanup().await.unwrap();
        }
    }
}
