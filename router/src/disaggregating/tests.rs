//! Requests in two legs, over scripted pools.

mod pool;
mod waiting;

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use futures_util::{FutureExt, StreamExt, stream};
use genset_backend_common::ports::Generate;
use genset_backend_common::{
    CancelReason, Capabilities, EngineConfig, EngineError, ErrorKind, FinishReason,
    GenerateRequest, MetricsRegistry, ModelCard, Output, RequestContext, Role, TokenId,
    config::SamplingOption,
};
use genset_runtime::plane::{Encoded, Handler, ResponseStream};
use genset_runtime::{InstanceId, KvBlocksClient, KvBlocksRequest, Runtime};
use serde_json::{Value, json};
use tokio::sync::mpsc;

use self::pool::{Does, Fake, token};
use super::{Disaggregating, DisaggregationConfig, Legs, PoolSet, Pools};
use crate::config::RouterConfig;
use crate::migrating::{Migrating, MigrationConfig, Migrations, continued};
use crate::route::{Route, Routed};
use crate::testing::{Read, read};

const PROMPT: [TokenId; 4] = [7, 8, 9, 10];
const CONTEXT: u32 = 64;
/// Where the prefill worker holds its blocks.
const BLOCKS: &str = "test.prefill.kv_blocks";
const HOLDER: InstanceId = InstanceId(1);

/// Pools, and the layer over them.
struct Site {
    layer: Arc<Disaggregating>,
    registry: MetricsRegistry,
    card: ModelCard,
}

type Fakes<'a> = [Option<&'a Arc<Fake>>; 3];

fn site_of(fakes: Fakes<'_>, threshold: u32) -> Site {
    site_configured(fakes, &config(threshold, Duration::ZERO), None)
}

/// Returns a config with this wait between the legs.
fn config(threshold: u32, wait: Duration) -> RouterConfig {
    RouterConfig {
        disaggregation: DisaggregationConfig {
            prefill_threshold_tokens: threshold,
        },
        migration: MigrationConfig {
            wait,
            ..MigrationConfig::default()
        },
        ..RouterConfig::default()
    }
}

fn site_configured(
    fakes: Fakes<'_>,
    config: &RouterConfig,
    blocks: Option<KvBlocksClient>,
) -> Site {
    let can = Capabilities::tokens().with_sampling([SamplingOption::Seed]);
    site_declaring(can.with_resume(), fakes.map(way), config, blocks)
}

fn way(pool: Option<&Arc<Fake>>) -> Option<Arc<dyn Route>> {
    pool.map(|pool| Arc::clone(pool) as Arc<dyn Route>)
}

/// A prefill and a decode pool of an engine that declares this.
fn site_of_two(can: Capabilities, prefill: Arc<dyn Route>, decode: Arc<dyn Route>) -> Site {
    let pools = [None, Some(prefill), Some(decode)];
    site_declaring(can, pools, &config(0, Duration::ZERO), None)
}

fn site_declaring(
    can: Capabilities,
    [aggregated, prefill, decode]: [Option<Arc<dyn Route>>; 3],
    config: &RouterConfig,
    blocks: Option<KvBlocksClient>,
) -> Site {
    let pools = Pools::fixed(PoolSet {
        aggregated,
        prefill,
        decode,
    });
    let can = can
        .with_roles(Role::ALL)
        .with_sampling([SamplingOption::Temperature]);
    let card = ModelCard::from_config(&EngineConfig::new("m", CONTEXT).with_capabilities(can));
    let registry = MetricsRegistry::default();
    let legs = Legs::register(&registry);
    let layer = Disaggregating::new(pools, &card, config, blocks, &legs);
    Site {
        layer: Arc::new(layer),
        registry,
        card,
    }
}

fn site(prefill: &Arc<Fake>, decode: &Arc<Fake>) -> Site {
    site_of([None, Some(prefill), Some(decode)], 0)
}

/// A prefill and a decode pool that do this.
fn pools(
    first: impl IntoIterator<Item = Does>,
    second: impl IntoIterator<Item = Does>,
) -> (Arc<Fake>, Arc<Fake>) {
    (Fake::new(0, first), Fake::new(10, second))
}

fn request() -> GenerateRequest {
    let mut request = GenerateRequest::from_tokens("m", PROMPT.to_vec());
    request.stop.max_tokens = Some(12);
    request.sampling.temperature = Some(0.0);
    request
}

fn expected(count: usize) -> Vec<TokenId> {
    (0..count)
        .map(|place| token(PROMPT.len() + place))
        .collect()
}

impl Site {
    async fn ask(&self, request: GenerateRequest) -> Read {
        let ctx = RequestContext::new("r");
        match self.layer.generate(request, ctx).await {
            Ok(outputs) => read(outputs).await,
            Err(error) => Read {
                tokens: Vec::new(),
                end: Err(error),
            },
        }
    }

    fn whole(&self, reason: &str) -> bool {
        let labels = format!("{{model=\"m\",reason=\"{reason}\"}} 1");
        let line = format!("genset_disaggregated_whole_requests_total{labels}");
        self.registry.encode().contains(&line)
    }
}

#[tokio::test]
async fn two_legs_answer_as_one() {
    let (prefill, decode) = pools([Does::Prefills], [Does::Answers]);
    let site = site(&prefill, &decode);
    let read = site.ask(request()).await;
    assert_eq!(read.tokens, expected(12));
    let finished = read.end.unwrap();
    assert_eq!(finished.reason, FinishReason::Length);
    assert_eq!(finished.usage.completion_tokens, 12);
    assert_eq!(finished.usage.cached_tokens, Some(2));
    assert_eq!(finished.transfer, None);
    assert_eq!(prefill.asked(), [request()]);
    let mut second = decode.asked().remove(0);
    assert_eq!(second.transfer.take().unwrap().data, json!("blocks"));
    assert_eq!(second, request());
    let began = [&prefill, &decode].map(|pool| pool.began.lock().is_some());
    assert_eq!(began, [false, true], "the second leg has what time is left");
    let text = site.registry.encode();
    assert!(text.contains("genset_disaggregated_requests_total{model=\"m\"} 1"));
    assert!(
        text.contains("genset_disaggregated_handover_seconds_count 1"),
        "{text}"
    );
}

#[tokio::test]
async fn the_first_token_does_not_wait_for_the_decode_leg() {
    let (prefill, decode) = pools([Does::Prefills], [Does::Hangs]);
    let ctx = RequestContext::new("r");
    let outputs = site(&prefill, &decode)
        .layer
        .generate(request(), ctx.clone())
        .await;
    let mut outputs = outputs.unwrap();
    let first = outputs.next().await.unwrap().unwrap();
    assert_eq!(first, Output::from(token(PROMPT.len())));
    assert_eq!(decode.count(), 0);
    assert!(outputs.next().now_or_never().is_none());
    assert_eq!(decode.count(), 1);
}

#[tokio::test]
async fn what_ends_with_its_first_token_has_one_leg() {
    for (does, max_tokens, reason) in [
        (Does::Stops, 12, FinishReason::Stop),
        (Does::Prefills, 1, FinishReason::Length),
    ] {
        let (prefill, decode) = pools([does], []);
        let mut request = request();
        request.stop.max_tokens = Some(max_tokens);
        let read = site(&prefill, &decode).ask(request).await;
        assert_eq!((read.tokens, decode.count()), (expected(1), 0));
        let finished = read.end.unwrap();
        assert_eq!((finished.reason, finished.transfer), (reason, None));
    }
}

#[tokio::test]
async fn an_answer_does_not_end_with_a_prefill_that_names_no_blocks() {
    let (prefill, decode) = pools([Does::NamesNoBlocks], [Does::Answers]);
    let site = site(&prefill, &decode);
    let read = site.ask(request()).await;
    assert_eq!(read.tokens, expected(12));
    assert!(decode.asked().remove(0).transfer.unwrap().is_none());
    // Nothing was handed over.
    let text = site.registry.encode();
    let count = "genset_disaggregated_handover_seconds_count 0\n";
    assert!(text.contains(count), "{text}");
}

#[tokio::test]
async fn a_prompt_that_was_not_computed_has_no_time() {
    for (does, count) in [(Does::Stops, 1), (Does::IsCancelled, 0)] {
        let prefill = Fake::new(0, [does]);
        let site = site(&prefill, &Fake::new(10, []));
        site.ask(request()).await.end.unwrap();
        let text = site.registry.encode();
        let line = format!("genset_disaggregated_prefill_seconds_count {count}\n");
        assert!(text.contains(&line), "{text}");
    }
}

#[tokio::test]
async fn without_a_pool_a_request_stays_whole() {
    let answers = || Fake::new(20, [Does::Answers]);
    let (whole, prefill, decode) = (answers(), Fake::new(0, []), Fake::new(10, []));
    for (fakes, reason) in [
        ([Some(&whole), None, Some(&decode)], "no_prefill"),
        ([Some(&whole), Some(&prefill), None], "no_decode"),
    ] {
        whole.does.lock().push_back(Does::Answers);
        let site = site_of(fakes, 0);
        assert_eq!(site.ask(request()).await.tokens, expected(12));
        assert!(site.whole(reason));
    }
    assert_eq!((prefill.count(), decode.count()), (0, 0));
    assert_eq!(whole.asked(), [request(), request()]);
    // Decode instances must compute the prompt.
    let decode = answers();
    let site = site_of([None, None, Some(&decode)], 0);
    assert_eq!(site.ask(request()).await.tokens, expected(12));
    assert!(decode.asked()[0].transfer.as_ref().unwrap().is_none());
    // Prefill instances alone cannot serve anything.
    let site = site_of([None, Some(&prefill), None], 0);
    let error = site.ask(request()).await.end.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    assert!(error.details().retry_after.is_some());
}

#[tokio::test]
async fn short_prompts_stay_whole_where_their_cache_was_counted() {
    for (threshold, cached, is_whole) in [(4, 0, false), (5, 0, true), (3, 1, false), (4, 1, true)]
    {
        let prefill = Fake::new(0, [Does::Prefills]);
        let mut decode = Fake::new(10, [Does::Answers]);
        Arc::get_mut(&mut decode).unwrap().cached = cached;
        let aggregated = Fake::new(20, []);
        let fakes = [Some(&aggregated), Some(&prefill), Some(&decode)];
        let site = site_of(fakes, threshold);
        assert_eq!(site.ask(request()).await.tokens, expected(12));
        assert_eq!(site.whole("short"), is_whole, "{threshold} {cached}");
        assert_eq!(prefill.count(), usize::from(!is_whole));
        let transfer = decode.asked().remove(0).transfer.unwrap();
        assert_eq!(transfer.is_none(), is_whole);
    }
}

#[tokio::test]
async fn text_stays_whole() {
    let whole = Fake::new(20, [Does::Hangs]);
    let (prefill, decode) = pools([], []);
    let site = site_of([Some(&whole), Some(&prefill), Some(&decode)], 0);
    let text = GenerateRequest::from_text("m", "hello");
    let ctx = RequestContext::new("r");
    // The fake reads only tokens; the test checks only that it was asked.
    drop(site.layer.generate(text, ctx).await);
    assert_eq!((whole.count(), prefill.count()), (1, 0));
}

#[tokio::test]
async fn a_request_that_no_instance_of_a_leg_takes_stays_whole() {
    let overloaded = Does::Refuses(ErrorKind::Overloaded);
    for (first, second, reason) in [
        (overloaded, Does::Hangs, "prefill_refused"),
        (Does::Prefills, overloaded, "decode_refused"),
        (Does::Prefills, Does::RefusesBlocks, "decode_refused"),
        (Does::LacksAdapter, Does::Hangs, "prefill_refused"),
        (Does::Prefills, Does::LacksAdapter, "decode_refused"),
    ] {
        let whole = Fake::new(20, [Does::Answers]);
        let (prefill, decode) = pools([first], [second]);
        let site = site_of([Some(&whole), Some(&prefill), Some(&decode)], 0);
        let read = site.ask(request()).await;
        assert_eq!(read.tokens, expected(12));
        assert_eq!(read.end.unwrap().usage.completion_tokens, 12);
        assert!(site.whole(reason), "{reason}");
        let has_first = reason == "decode_refused";
        let given = expected(usize::from(has_first));
        assert_eq!(whole.asked(), [continued(&request(), &given)]);
    }
    // Other refusals are about the request.
    let invalid = Does::Refuses(ErrorKind::InvalidArgument);
    for (first, second) in [(invalid, Does::Hangs), (Does::Prefills, invalid)] {
        let whole = Fake::new(20, []);
        let (prefill, decode) = pools([first], [second]);
        let site = site_of([Some(&whole), Some(&prefill), Some(&decode)], 0);
        let error = site.ask(request()).await.end.unwrap_err();
        assert_eq!(
            (error.kind(), whole.count()),
            (ErrorKind::InvalidArgument, 0)
        );
    }
}

/// During a rollout the instances have other weights.
#[tokio::test]
async fn an_instance_that_refuses_the_blocks_goes_on_after_the_first_token() {
    let does = [Does::RefusesBlocks, Does::AnswersOtherwise];
    let (prefill, decode) = pools([Does::Prefills], does);
    let read = site(&prefill, &decode).ask(request()).await;
    let others = expected(12).into_iter().skip(1).map(|token| token + 1);
    let tokens: Vec<TokenId> = expected(1).into_iter().chain(others).collect();
    assert_eq!(read.tokens, tokens);
    let usage = read.end.unwrap().usage;
    assert_eq!((usage.prompt_tokens, usage.completion_tokens), (4, 12));
    let mut asked = decode.asked().remove(1);
    assert!(asked.transfer.take().unwrap().is_none());
    assert_eq!(asked, continued(&request(), &expected(1)));
    assert_eq!((asked.resumed_tokens, asked.stop.max_tokens), (1, Some(11)));
}

/// Such an engine begins anew, and its first token must be that of the prefill instance.
#[tokio::test]
async fn an_engine_that_cannot_resume_repeats_the_first_token() {
    for (second, is_same) in [(Does::Answers, true), (Does::AnswersOtherwise, false)] {
        let (prefill, decode) = pools([Does::Prefills], [Does::RefusesBlocks, second]);
        let site = site_of_two(Capabilities::tokens(), prefill, decode.clone());
        let read = site.ask(request()).await;
        assert_eq!(read.tokens, expected(if is_same { 12 } else { 1 }));
        assert_eq!(read.end.is_ok(), is_same);
        assert_eq!(decode.asked()[1].resumed_tokens, 0);
    }
}

#[tokio::test]
async fn blocks_that_nobody_can_read_are_not_the_clients_fault() {
    let (prefill, decode) = pools([Does::Prefills], [Does::RefusesBlocks]);
    let error = site(&prefill, &decode)
        .ask(request())
        .await
        .end
        .unwrap_err();
    assert_eq!(error.kind(), ErrorKind::StreamIncomplete);
    assert!(error.message().contains("another layout"), "{error}");
    // It was also asked to compute the prompt itself.
    assert_eq!(decode.count(), 2);
}

/// Reports which blocks of the prefill worker are released.
struct Releases(mpsc::Sender<Value>);

#[async_trait]
impl Handler<KvBlocksRequest, Encoded> for Releases {
    async fn handle(
        &self,
        request: KvBlocksRequest,
        _ctx: RequestContext,
    ) -> Result<ResponseStream<Encoded>, EngineError> {
        if let KvBlocksRequest::Release(data) = request {
            self.0.send(data).await.unwrap();
        }
        Ok(Box::pin(stream::empty()))
    }
}

#[tokio::test(start_paused = true)]
async fn blocks_that_no_decode_instance_takes_are_released_once() {
    let overloaded = Does::Refuses(ErrorKind::Overloaded);
    for (second, instead, releases) in [
        (Does::Answers, Does::Hangs, 0),
        (overloaded, Does::Answers, 1),
        (Does::RefusesBlocks, Does::Answers, 1),
        (Does::RefusesBlocks, overloaded, 1),
    ] {
        let runtime = Runtime::in_process();
        let (sender, mut released) = mpsc::channel(8);
        let endpoint = runtime.endpoint(BLOCKS.parse().unwrap());
        let handler = Arc::new(Releases(sender));
        let _serving = endpoint.serve_as(HOLDER, handler).await.unwrap();
        let whole = Fake::new(20, [instead]);
        let (prefill, decode) = pools([Does::Prefills], [second]);
        let fakes = [Some(&whole), Some(&prefill), Some(&decode)];
        let blocks = KvBlocksClient::new(&runtime);
        let site = site_configured(fakes, &config(0, Duration::ZERO), Some(blocks));
        site.ask(request()).await;
        let mut seen = Vec::new();
        let minute = Duration::from_secs(60);
        while let Ok(Some(data)) = tokio::time::timeout(minute, released.recv()).await {
            seen.push(data);
        }
        assert_eq!(seen, vec![json!("blocks"); releases], "{second:?}");
        let handed_over = format!(
            "genset_disaggregated_handover_seconds_count {}",
            1 - releases
        );
        let text = site.registry.encode();
        assert!(text.contains(&handed_over), "{second:?}: {text}");
    }
}

#[tokio::test]
async fn a_lost_leg_begins_anew_with_a_prefill_and_without_who_lost_it() {
    let lost = |count| Does::Dies(count, ErrorKind::Disconnected);
    for (firsts, seconds, lost_at) in [
        (vec![lost(0), Does::Prefills], vec![Does::Answers], 1),
        (vec![Does::Prefills; 2], vec![lost(0), Does::Answers], 11),
        (vec![Does::Prefills; 2], vec![lost(1), Does::Answers], 11),
        (vec![Does::Prefills; 2], vec![lost(7), Does::Answers], 11),
    ] {
        let (prefill, decode) = pools(firsts, seconds);
        let site = site(&prefill, &decode);
        let migrations = Migrations::register(&site.registry, MigrationConfig::default());
        let migrating = Migrating::new(site.layer.clone(), &site.card, migrations);
        let outputs = migrating
            .generate(request(), RequestContext::new("r"))
            .await;
        let read = read(outputs.unwrap()).await;
        assert_eq!(read.tokens, expected(12));
        assert_eq!(read.end.unwrap().usage.completion_tokens, 12);
        assert_eq!(prefill.count(), 2);
        let left_out = prefill.asked.lock()[1].1.clone();
        assert_eq!(left_out, [InstanceId(lost_at)]);
    }
}

#[tokio::test]
async fn chance_is_settled_for_both_legs() {
    let mut random = request();
    // Without a temperature the engine decides whether to sample.
    for temperature in [None, Some(0.8)] {
        random.sampling.temperature = temperature;
        let (prefill, decode) = pools([Does::Prefills], [Does::Answers]);
        let site = site(&prefill, &decode);
        assert_eq!(site.ask(random.clone()).await.tokens, expected(12));
        let seed = prefill.asked()[0].sampling.seed;
        assert!(seed.is_some());
        assert_eq!(decode.asked()[0].sampling.seed, seed);
    }
    // An engine without seeds may choose another first token: the second leg's token counts.
    let (prefill, decode) = pools([Does::Prefills], [Does::AnswersOtherwise]);
    let site = site_of_two(Capabilities::tokens().with_resume(), prefill, decode);
    let tokens = site.ask(random).await.tokens;
    assert_eq!(tokens.len(), 12);
    assert_eq!(tokens[0], token(PROMPT.len()) + 1);
}

/// An engine with `resume_as_prompt` refuses a seed together with tokens of another instance.
#[tokio::test]
async fn what_goes_on_as_from_a_longer_prompt_gets_no_seed() {
    let as_prompt = |prefill: &Arc<Fake>, decode: &Arc<Fake>| {
        let can = Capabilities::tokens().with_sampling([SamplingOption::Seed]);
        site_of_two(can.with_resume_as_prompt(), prefill.clone(), decode.clone())
    };
    let mut resumed = request();
    resumed.resumed_tokens = 1;
    for temperature in [None, Some(0.8)] {
        resumed.sampling.temperature = temperature;
        let (prefill, decode) = pools([Does::Prefills], [Does::AnswersOtherwise]);
        let site = as_prompt(&prefill, &decode);
        let tokens = site.ask(resumed.clone()).await.tokens;
        assert_eq!((tokens.len(), tokens[0]), (12, token(PROMPT.len()) + 1));
        for asked in [prefill.asked(), decode.asked()] {
            assert_eq!(asked[0].sampling.seed, None);
        }
    }
    // Greedy decoding chooses the same token in both legs.
    resumed.sampling.temperature = Some(0.0);
    let (prefill, decode) = pools([Does::Prefills], [Does::Answers]);
    let site = as_prompt(&prefill, &decode);
    assert_eq!(site.ask(resumed).await.tokens, expected(12));
}

#[tokio::test]
async fn legs_that_disagree_are_an_error() {
    let (prefill, decode) = pools([Does::Prefills], [Does::AnswersOtherwise]);
    let read = site(&prefill, &decode).ask(request()).await;
    assert_eq!(read.tokens, expected(1));
    assert_eq!(read.end.unwrap_err().kind(), ErrorKind::StreamIncomplete);
}

/// A pool whose instances accept requests as over the wire: with their first item, after a second.
struct Distant(Arc<Fake>);

#[async_trait]
impl Route for Distant {
    async fn route(
        &self,
        request: GenerateRequest,
        ctx: RequestContext,
        left_out: &[InstanceId],
    ) -> Result<Routed, EngineError> {
        tokio::time::sleep(Duration::from_secs(1)).await;
        self.0.route(request, ctx, left_out).await
    }
}

#[tokio::test(start_paused = true)]
async fn each_leg_is_timed_from_when_an_instance_is_asked() {
    let prefill = Distant(Fake::new(0, [Does::Prefills]));
    let decode = Distant(Fake::new(10, [Does::Answers]));
    let can = Capabilities::tokens().with_resume();
    let site = site_of_two(can, Arc::new(prefill), Arc::new(decode));
    assert_eq!(site.ask(request()).await.tokens, expected(12));
    let text = site.registry.encode();
    for leg in ["prefill", "handover"] {
        let sum = format!("genset_disaggregated_{leg}_seconds_sum 1.0");
        assert!(text.contains(&sum), "{text}");
    }
}

/// A pool that never accepts a request.
struct Stuck;

#[async_trait]
impl Route for Stuck {
    async fn route(
        &self,
        _request: GenerateRequest,
        _ctx: RequestContext,
        _left_out: &[InstanceId],
    ) -> Result<Routed, EngineError> {
        std::future::pending().await
    }
}

#[tokio::test(start_paused = true)]
async fn a_cancel_between_the_legs_ends_the_answer() {
    for (reason, is_finished) in [
        (CancelReason::Client, true),
        (CancelReason::Deadline, false),
    ] {
        let prefill = Fake::new(0, [Does::Prefills]);
        let can = Capabilities::tokens().with_resume();
        let site = site_of_two(can, prefill, Arc::new(Stuck));
        let ctx = RequestContext::new("r");
        let outputs = site.layer.generate(request(), ctx.clone()).await.unwrap();
        let cancel = async {
            tokio::time::sleep(Duration::from_secs(1)).await;
            ctx.cancel(reason);
        };
        let (read, ()) = tokio::join!(read(outputs), cancel);
        assert_eq!(read.tokens, expected(1));
        assert_eq!(read.end.is_ok(), is_finished, "{reason:?}");
        match read.end {
            Ok(finished) => {
                assert_eq!(finished.reason, FinishReason::Cancelled);
                assert_eq!(finished.usage.completion_tokens, 1);
            }
            Err(error) => assert_eq!(error.kind(), reason.error_kind()),
        }
    }
}
