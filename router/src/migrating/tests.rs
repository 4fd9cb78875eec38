//! Migrating requests, over a fake fleet whose model is a function of prompt and position.

mod fleet;
mod waiting;

use std::error::Error as _;
use std::sync::Arc;
use std::time::Duration;

use genset_backend_common::output::FinishReason;
use genset_backend_common::ports::Generate;
use genset_backend_common::{
    CancelReason, Capabilities, EngineConfig, EngineError, ErrorKind, GenerateRequest,
    GuidedDecoding, MetricsRegistry, ModelCard, RequestContext, TokenId, request::NotResumable,
};
use genset_runtime::InstanceId;
use proptest::prelude::*;
use tokio::time::Instant;

use self::fleet::{Fleet, Leg};
use super::{Migrating, MigrationConfig, Migrations};
use crate::route::Route;
use crate::testing::{Read, read};

const PROMPT: [TokenId; 3] = [5, 6, 7];
const WHOLE: u32 = 24;
const CONTEXT: u32 = 64;

/// A fleet under the migrating layer, with its metrics.
struct Site {
    fleet: Arc<Fleet>,
    migrating: Migrating,
    registry: MetricsRegistry,
}

fn card(limit: u32) -> ModelCard {
    let can = Capabilities::tokens().with_resume();
    let config = EngineConfig::new("m", CONTEXT).with_capabilities(can);
    let mut card = ModelCard::from_config(&config);
    card.migration_limit = limit;
    card
}

fn site(legs: impl IntoIterator<Item = Leg>) -> Site {
    site_of(legs, &card(3), MigrationConfig::default())
}

fn site_of(legs: impl IntoIterator<Item = Leg>, card: &ModelCard, config: MigrationConfig) -> Site {
    let fleet = Fleet::of(legs);
    let registry = MetricsRegistry::default();
    let migrations = Migrations::register(&registry, config);
    let below: Arc<dyn Route> = fleet.clone();
    Site {
        fleet,
        migrating: Migrating::new(below, card, migrations),
        registry,
    }
}

fn request() -> GenerateRequest {
    let mut request = GenerateRequest::from_tokens("m", PROMPT.to_vec());
    request.stop.max_tokens = Some(WHOLE);
    request
}

fn ctx() -> RequestContext {
    RequestContext::new("r")
}

impl Site {
    async fn ask(&self, request: GenerateRequest) -> Read {
        read(self.migrating.generate(request, ctx()).await.unwrap()).await
    }

    fn metric(&self, line: &str) -> String {
        let text = self.registry.encode();
        let found = text.lines().find_map(|known| known.strip_prefix(line));
        found.unwrap_or("").trim().to_owned()
    }

    fn failures(&self, reason: &str) -> String {
        self.metric(&format!(
            "genset_migration_failures_total{{model=\"m\",reason=\"{reason}\"}}"
        ))
    }
}

fn lost_after(count: u32) -> Leg {
    Leg::Fails(count, ErrorKind::Disconnected)
}

fn kind_of(read: &Read) -> ErrorKind {
    read.end.as_ref().unwrap_err().kind()
}

async fn undisturbed() -> Read {
    site([Leg::Finishes]).ask(request()).await
}

#[tokio::test]
async fn an_answer_that_was_cut_is_the_undisturbed_one() {
    let whole = undisturbed().await;
    let cuts: [&[u32]; 6] = [&[0], &[1], &[12], &[23], &[1, 5], &[0, 4, 9]];
    for cuts in cuts {
        let legs = cuts.iter().map(|cut| lost_after(*cut));
        let site = site(legs.chain([Leg::Finishes]));
        let read = site.ask(request()).await;
        assert_eq!(read.tokens, whole.tokens, "{cuts:?}");
        assert_eq!(
            read.end.unwrap(),
            *whole.end.as_ref().unwrap(),
            "{cuts:?}: usage and reason"
        );
        let moves = site.metric("genset_migrations_total{model=\"m\",reason=\"disconnected\"}");
        assert_eq!(moves, cuts.len().to_string());
        assert_eq!(site.metric("genset_migration_kept_bytes"), "0");
    }
}

#[tokio::test]
async fn the_request_that_goes_on_is_the_same_but_for_what_was_given() {
    let site = site([lost_after(5), lost_after(4), Leg::Finishes]);
    let mut request = request();
    request.stop.min_tokens = 7;
    request.priority = 3;
    request.cache_salt = Some("salt".into());
    request.data_parallel_rank = Some(1);
    request.sampling.seed = Some(9);
    site.ask(request.clone()).await;
    let asked = site.fleet.asked();
    let seen: Vec<_> = asked
        .iter()
        .map(|asked| {
            let stop = &asked.request.stop;
            let resumed = asked.request.resumed_tokens;
            (resumed, stop.max_tokens, stop.min_tokens, asked.id.as_str())
        })
        .collect();
    assert_eq!(
        seen,
        [
            (0, Some(24), 7, "r"),
            (5, Some(19), 2, "r-1"),
            (9, Some(15), 0, "r-2")
        ]
    );
    let mut same = asked[2].request.clone();
    same.input = request.input.clone();
    same.stop = request.stop.clone();
    same.resumed_tokens = 0;
    assert_eq!(same, request);
    let left_out: Vec<_> = asked.iter().map(|asked| asked.left_out.clone()).collect();
    assert_eq!(
        left_out,
        [
            vec![],
            vec![InstanceId(1)],
            vec![InstanceId(1), InstanceId(2)]
        ]
    );
}

#[tokio::test]
async fn only_kinds_whose_policy_says_so_move() {
    for kind in ErrorKind::ALL {
        let site = site([Leg::Fails(5, kind), Leg::Finishes]);
        let read = site.ask(request()).await;
        assert_eq!(read.end.is_ok(), kind.policy().is_migratable, "{kind}");
        if let Err(error) = read.end {
            assert_eq!((error.kind(), site.fleet.asked().len()), (kind, 1));
            assert_eq!(error.message(), "the worker is lost");
        }
    }
}

#[tokio::test]
async fn what_this_process_has_no_room_for_does_not_move() {
    let site = site([Leg::FindsNoRoom(5), Leg::Finishes]);
    let read = site.ask(request()).await;
    assert_eq!(kind_of(&read), ErrorKind::Overloaded);
    assert_eq!(site.fleet.asked().len(), 1);
}

#[tokio::test]
async fn a_request_moves_as_often_as_its_model_allows() {
    let site = site_of([lost_after(5); 4], &card(2), MigrationConfig::default());
    let read = site.ask(request()).await;
    assert_eq!((read.tokens.len(), site.fleet.asked().len()), (15, 3));
    assert_eq!(kind_of(&read), ErrorKind::Disconnected);
    let message = read.end.unwrap_err().message().to_owned();
    assert!(message.contains("it had moved 2 times"), "{message}");
    assert_eq!(site.failures("limit"), "1");
}

#[tokio::test]
async fn a_move_is_counted_where_the_request_came_from() {
    let site = site([lost_after(1), lost_after(1), Leg::Finishes]);
    let ctx = ctx();
    let outputs = site.migrating.generate(request(), ctx.sibling(0)).await;
    read(outputs.unwrap()).await.end.unwrap();
    assert_eq!(ctx.moves(), 2);
}

#[tokio::test(start_paused = true)]
async fn an_instance_that_takes_an_answer_on_is_told_when_it_began() {
    let site = site([lost_after(1), lost_after(1), Leg::Finishes]);
    let wait = Duration::from_secs(1);
    *site.fleet.waits.lock() = wait;
    let first = Some(Instant::now() + wait);
    site.ask(request()).await.end.unwrap();
    let asked = site.fleet.asked();
    let began: Vec<_> = asked.iter().map(|asked| asked.began).collect();
    assert_eq!(began, [None, first, first]);
}

#[tokio::test]
async fn what_a_layer_below_found_nobody_for_moves_no_more() {
    let site = site([Leg::HandsToNobody(1), Leg::Finishes]);
    let read = site.ask(request()).await;
    assert_eq!(kind_of(&read), ErrorKind::Unavailable);
    assert_eq!((read.tokens.len(), site.fleet.asked().len()), (1, 1));
    assert_eq!(site.failures("no_instance"), "1");
}

#[tokio::test]
async fn an_engine_that_cannot_resume_goes_on_only_before_its_first_token() {
    let mut card = card(3);
    card.capabilities.resume = false;
    for (given, is_done) in [(0, true), (1, false)] {
        let legs = [lost_after(given), Leg::Finishes];
        let site = site_of(legs, &card, MigrationConfig::default());
        let read = site.ask(request()).await;
        assert_eq!(read.end.is_ok(), is_done, "{given}");
        if let Err(error) = read.end {
            assert_is_lost(&error, NotResumable::Undeclared);
            assert_eq!(site.failures("not_resumable"), "1");
        }
    }
}

/// Asserts that an error has the reason why the answer could not migrate, also as a value.
fn assert_is_lost(error: &EngineError, why: NotResumable) {
    assert_eq!(error.kind(), ErrorKind::Disconnected);
    let expected = format!("the worker is lost; {why}; send the request again");
    assert_eq!(error.message(), expected);
    let source = error
        .source()
        .and_then(|source| source.downcast_ref::<NotResumable>());
    assert_eq!(source, Some(&why));
}

/// Returns the card of a model whose engine declares `resume_as_prompt`.
fn card_as_prompt() -> ModelCard {
    let mut card = card(3);
    (card.capabilities.resume, card.capabilities.resume_as_prompt) = (false, true);
    card
}

#[tokio::test]
async fn an_engine_that_resumes_as_prompt_goes_on_with_what_is_each_tokens_own() {
    let whole = undisturbed().await;
    let mut request = request();
    request.stop.min_tokens = 7;
    request.stop.stop_token_ids = [1].into();
    request.sampling.temperature = Some(0.8);
    request.sampling.logit_bias = [(2, 1.0)].into();
    request.output.logprobs = Some(2);
    let legs = [lost_after(5), lost_after(4), Leg::Finishes];
    let site = site_of(legs, &card_as_prompt(), MigrationConfig::default());
    let read = site.ask(request).await;
    assert_eq!(read.tokens, whole.tokens);
    assert_eq!(read.end.unwrap(), whole.end.unwrap(), "usage and reason");
    let asked = site.fleet.asked();
    assert_eq!(asked[2].request.resumed_tokens, 9);
    assert_eq!(asked[2].request.tokens().unwrap().len(), 3 + 9);
    asked[2].request.resumes_as_prompt().unwrap();
}

#[tokio::test]
async fn an_engine_that_resumes_as_prompt_loses_what_counts_on_the_answer_so_far() {
    type Ask = fn(&mut GenerateRequest);
    let asks: [(NotResumable, Ask); 3] = [
        (NotResumable::Seed, |r| r.sampling.seed = Some(9)),
        (NotResumable::Penalty, |r| {
            r.sampling.presence_penalty = Some(0.5);
        }),
        (NotResumable::Guided, |r| {
            r.guided = Some(GuidedDecoding::JsonObject.into());
        }),
    ];
    for (why, ask) in asks {
        let mut request = request();
        ask(&mut request);
        for (given, is_done) in [(0, true), (1, false)] {
            let legs = [lost_after(given), Leg::Finishes];
            let site = site_of(legs, &card_as_prompt(), MigrationConfig::default());
            let read = site.ask(request.clone()).await;
            assert_eq!(read.end.is_ok(), is_done, "{why}: {given}");
            if let Err(error) = read.end {
                assert_is_lost(&error, why);
                assert_eq!(site.failures("not_resumable"), "1");
            }
        }
        // With an engine that resumes exactly, it migrates.
        let site = site([lost_after(1), Leg::Finishes]);
        site.ask(request).await.end.unwrap();
    }
}

#[tokio::test]
async fn text_goes_on_only_before_its_first_piece() {
    let text = GenerateRequest::from_text("m", "hello");
    let site = site([lost_after(0), Leg::Text, Leg::Finishes]);
    let read = site.ask(text).await;
    assert_is_lost(&read.end.unwrap_err(), NotResumable::NotTokens);
    let asked = site.fleet.asked();
    assert_eq!((asked.len(), asked[1].request.resumed_tokens), (2, 0));
}

#[tokio::test]
async fn only_the_terminal_is_made_up_where_nothing_else_is_missing() {
    let mut to_the_end_of_the_context = request();
    to_the_end_of_the_context.stop.max_tokens = None;
    for (request, tokens) in [(request(), 24), (to_the_end_of_the_context, 61)] {
        let site = site([Leg::LosesTerminal]);
        let read = site.ask(request).await;
        let finished = read.end.unwrap();
        assert_eq!(finished.reason, FinishReason::Length);
        assert_eq!(finished.usage.prompt_tokens, 3);
        assert_eq!(finished.usage.completion_tokens, tokens);
        assert_eq!(
            (read.tokens.len(), site.fleet.asked().len()),
            (tokens as usize, 1)
        );
    }
}

#[tokio::test(start_paused = true)]
async fn without_an_instance_it_waits_its_time_and_says_so() {
    let site = site([lost_after(5)]);
    let since = Instant::now();
    let read = site.ask(request()).await;
    assert_eq!(since.elapsed(), Duration::from_secs(5));
    let error = read.end.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    assert_eq!(error.details().retry_after, Some(Duration::from_secs(1)));
    // Clients read the message; only the log has the cause.
    assert_eq!(
        error.message(),
        "the request lost its instance (disconnected); no other instance took it within 5 s; send the request again"
    );
    assert_eq!(
        error.source().map(ToString::to_string).as_deref(),
        Some("the worker is lost")
    );
    assert_eq!(site.failures("no_instance"), "1");
    // The instance that lost it is asked too, but never first.
    let asked = site.fleet.asked();
    assert_eq!(asked[1].left_out, [InstanceId(1)]);
    assert!(asked[2].left_out.is_empty());
}

/// When the last instance is lost, so are all of its requests.
#[tokio::test(start_paused = true)]
async fn requests_that_no_instance_takes_are_logged_once_a_minute() {
    let site = site([lost_after(5), lost_after(5)]);
    let one = site.migrating.generate(request(), ctx()).await.unwrap();
    let other = site.migrating.generate(request(), ctx()).await.unwrap();
    for outputs in [one, other] {
        assert_eq!(kind_of(&read(outputs).await), ErrorKind::Unavailable);
    }
    tokio::time::advance(Duration::from_secs(60)).await;
    let logged = &site.migrating.parts.logged;
    assert_eq!(logged.unlogged("nobody took it"), Some(1));
}

#[tokio::test(start_paused = true)]
async fn what_has_given_nothing_waits_only_for_an_instance_that_is_gone() {
    for (kind, waits) in [
        (ErrorKind::Disconnected, true),
        (ErrorKind::EngineShutdown, true),
        (ErrorKind::Overloaded, false),
        (ErrorKind::StreamIncomplete, false),
    ] {
        let site = site([Leg::Fails(0, kind)]);
        let since = Instant::now();
        let read = site.ask(request()).await;
        assert_eq!(!since.elapsed().is_zero(), waits, "{kind}");
        assert_eq!(
            kind_of(&read),
            if waits { ErrorKind::Unavailable } else { kind }
        );
        assert_eq!(site.failures("no_instance"), "1");
    }
}

#[tokio::test(start_paused = true)]
async fn an_instance_that_comes_in_time_takes_it_on() {
    for refuses in [Leg::Refuses(ErrorKind::Overloaded), Leg::LacksAdapter] {
        let legs = [lost_after(5)].into_iter().chain([refuses; 6]);
        let site = site(legs.chain([Leg::Finishes]));
        let read = site.ask(request()).await;
        assert_eq!(read.tokens, undisturbed().await.tokens);
        assert_eq!(read.end.unwrap().usage.completion_tokens, WHOLE);
    }
}

#[tokio::test(start_paused = true)]
async fn an_answer_whose_adapter_nobody_has_is_lost_with_its_instance() {
    let legs = [lost_after(5)].into_iter().chain([Leg::LacksAdapter; 40]);
    let site = site(legs);
    let read = site.ask(request()).await;
    assert_eq!(kind_of(&read), ErrorKind::Unavailable);
    assert_eq!(site.failures("no_instance"), "1");
}

#[tokio::test(start_paused = true)]
async fn the_wait_ends_with_the_deadline() {
    let site = site([lost_after(5)]);
    let deadline = Instant::now() + Duration::from_secs(2);
    let outputs = site
        .migrating
        .generate(request(), ctx().with_deadline(deadline))
        .await;
    let read = read(outputs.unwrap()).await;
    assert_eq!(kind_of(&read), ErrorKind::DeadlineExceeded);
    assert_eq!(Instant::now(), deadline);
    assert_eq!(site.failures("deadline"), "1");
}

#[tokio::test(start_paused = true)]
async fn a_request_that_is_cancelled_moves_no_more() {
    for (reason, is_finished) in [
        (CancelReason::Client, true),
        (CancelReason::Shutdown, false),
    ] {
        let site = site([lost_after(5)]);
        let ctx = ctx();
        let outputs = site.migrating.generate(request(), ctx.clone()).await;
        let cancel = async {
            tokio::time::sleep(Duration::from_secs(1)).await;
            ctx.cancel(reason);
        };
        let (read, ()) = tokio::join!(read(outputs.unwrap()), cancel);
        assert_eq!(read.end.is_ok(), is_finished, "{reason:?}");
        match read.end {
            Ok(finished) => {
                assert_eq!(finished.reason, FinishReason::Cancelled);
                assert_eq!(finished.usage.completion_tokens, 5);
            }
            Err(error) => assert_eq!(error.kind(), reason.error_kind()),
        }
        let asked = site.fleet.asked().len();
        tokio::time::sleep(Duration::from_secs(60)).await;
        assert_eq!(site.fleet.asked().len(), asked);
    }
    let site = site([lost_after(5), Leg::Finishes]);
    let ctx = ctx();
    let outputs = site.migrating.generate(request(), ctx.clone()).await;
    ctx.cancel(CancelReason::Client);
    let read = read(outputs.unwrap()).await;
    assert_eq!(kind_of(&read), ErrorKind::Disconnected);
    assert_eq!(site.fleet.asked().len(), 1);
}

#[tokio::test(start_paused = true)]
async fn where_nobody_comes_any_more_the_wait_ends_with_what_was_wrong() {
    let site = site([lost_after(5)]);
    let since = Instant::now();
    let ask = site.ask(request());
    let ends = async {
        tokio::time::sleep(Duration::from_secs(1)).await;
        site.migrating.parts.nobody_comes.cancel();
    };
    let (read, ()) = tokio::join!(ask, ends);
    assert_eq!(since.elapsed(), Duration::from_secs(1));
    assert_eq!(read.end.unwrap_err().message(), "the worker is lost");
}

#[tokio::test]
async fn a_refusal_by_another_kind_ends_it() {
    let site = site([lost_after(5), Leg::Refuses(ErrorKind::InvalidArgument)]);
    let read = site.ask(request()).await;
    assert_eq!(kind_of(&read), ErrorKind::InvalidArgument);
}

#[tokio::test]
async fn what_is_kept_is_bounded_and_given_back() {
    // Memory for the prompt, and for one piece of 64 tokens of one request.
    let config = MigrationConfig {
        max_kept_bytes: 4 * (3 + 64 + 3),
        ..MigrationConfig::default()
    };
    let legs = [
        Leg::Hangs,
        lost_after(1),
        Leg::Hangs,
        lost_after(1),
        Leg::Hangs,
    ];
    let site = site_of(legs, &card(3), config);
    let generate = || site.migrating.generate(request(), ctx());
    let one = generate().await.unwrap();
    assert_eq!(site.metric("genset_migration_kept_bytes"), "12");
    let mut two = Box::pin(read(generate().await.unwrap()));
    let hanging = tokio::time::timeout(Duration::from_millis(1), &mut two).await;
    // It migrated, and the next instance is silent: its 64 tokens and both prompts use up the memory.
    assert!(hanging.is_err());
    assert_eq!(site.metric("genset_migration_kept_bytes"), "280");
    let three = site.ask(request()).await;
    assert_eq!(kind_of(&three), ErrorKind::Disconnected);
    assert_eq!(site.failures("not_kept"), "1");
    drop((one, two));
    assert_eq!(site.metric("genset_migration_kept_bytes"), "0");
    let first = generate().await.unwrap();
    assert_eq!(site.metric("genset_migration_kept_bytes"), "12");
    drop(first);

    let none = MigrationConfig {
        max_kept_bytes: 0,
        ..MigrationConfig::default()
    };
    let site = site_of([lost_after(1), Leg::Finishes], &card(3), none);
    let read = site.ask(request()).await;
    assert_eq!(kind_of(&read), ErrorKind::Disconnected);
    assert_eq!(site.failures("not_kept"), "1");
}

proptest! {
    #[test]
    fn wherever_it_is_cut_the_answer_is_whole(cuts in prop::collection::vec(0..10_u32, 0..4)) {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(async {
            let legs = cuts.iter().map(|cut| lost_after(*cut));
            let read = site(legs.chain([Leg::Finishes])).ask(request()).await;
            let whole = undisturbed().await;
            assert_eq!(read.tokens, whole.tokens);
            let (mut finished, expected) = (read.end.unwrap(), whole.end.unwrap());
            // If only the terminal was missing, the cached tokens are unknown.
            finished.usage.cached_tokens = expected.usage.cached_tokens;
            assert_eq!(finished, expected);
        });
    }
}
