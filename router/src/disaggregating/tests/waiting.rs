//! Requests whose prompt is computed, and which no decode instance takes at once.

use tokio::time::Instant;

use super::*;

const REFUSES: Does = Does::Refuses(ErrorKind::Overloaded);
const WAIT: Duration = Duration::from_secs(60);

/// Both layers, over a prefill and a decode pool.
struct Stack {
    site: Site,
    migrating: Migrating,
    ctx: RequestContext,
}

impl Stack {
    fn of(fakes: Fakes<'_>) -> Self {
        let config = config(0, WAIT);
        let site = site_configured(fakes, &config, None);
        let migrations = Migrations::register(&site.registry, config.migration);
        Self {
            migrating: Migrating::new(site.layer.clone(), &site.card, migrations),
            site,
            ctx: RequestContext::new("r"),
        }
    }

    async fn ask(&self) -> Read {
        let outputs = self.migrating.generate(request(), self.ctx.clone()).await;
        read(outputs.unwrap()).await
    }

    fn counts(&self, sample: &str) -> bool {
        self.site.registry.encode().contains(sample)
    }
}

#[tokio::test(start_paused = true)]
async fn a_decode_pool_that_is_full_for_a_while_costs_no_move() {
    // The last refusal is that of the blocks, or that of the whole request.
    for refusals in [8, 9] {
        let prefill = Fake::new(0, [Does::Prefills]);
        let refused = std::iter::repeat_n(REFUSES, refusals);
        let decode = Fake::new(10, refused.chain([Does::Answers]));
        let stack = Stack::of([None, Some(&prefill), Some(&decode)]);
        let read = stack.ask().await;
        assert_eq!(read.tokens, expected(12));
        assert_eq!(read.end.unwrap().usage.completion_tokens, 12);
        assert_eq!((prefill.count(), stack.ctx.moves()), (1, 0));
        let last = decode.asked().pop().unwrap().transfer.unwrap();
        assert_eq!(last.is_none(), refusals == 9);
        assert_eq!(stack.site.whole("decode_refused"), refusals == 9);
    }
}

#[tokio::test(start_paused = true)]
async fn the_only_decode_instance_may_be_away_for_a_while() {
    let prefill = Fake::new(0, [Does::Prefills; 2]);
    let lost = Does::Dies(3, ErrorKind::Disconnected);
    let away = std::iter::repeat_n(Does::Refuses(ErrorKind::Unavailable), 30);
    let does = [lost].into_iter().chain(away).chain([Does::Answers]);
    let decode = Fake::new(10, does);
    let stack = Stack::of([None, Some(&prefill), Some(&decode)]);
    let read = stack.ask().await;
    assert_eq!(read.tokens, expected(12));
    assert_eq!((prefill.count(), stack.ctx.moves()), (2, 1));
    // The instance that lost it is asked too, but never first.
    let asked = decode.asked.lock();
    let left_out: Vec<_> = asked.iter().map(|(_, left_out)| left_out.len()).collect();
    assert_eq!(left_out[..5], [0, 1, 1, 0, 0]);
}

#[tokio::test(start_paused = true)]
async fn a_request_that_no_decode_instance_takes_in_time_ends_and_names_no_instance() {
    let (prefill, decode) = pools([Does::Prefills; 4], []);
    let stack = Stack::of([None, Some(&prefill), Some(&decode)]);
    let since = Instant::now();
    let read = stack.ask().await;
    assert_eq!(since.elapsed(), WAIT);
    assert_eq!(read.tokens, expected(1));
    let error = read.end.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    // Clients read the message; only the log has the refusal.
    assert_eq!(
        error.message(),
        "no instance took the request over from its prefill instance within 60 s (unavailable); send the request again"
    );
    assert!(error.details().retry_after.is_some());
    assert_eq!((prefill.count(), stack.ctx.moves()), (1, 0));
    let logged = &stack.site.layer.parts.logged;
    assert_eq!(logged.unlogged("in vain"), None, "once a minute");
    let failure = "genset_migration_failures_total{model=\"m\",reason=\"no_instance\"} 1";
    assert!(stack.counts(failure));
}

#[tokio::test(start_paused = true)]
async fn a_request_that_brings_down_whoever_takes_it_over_is_kept_from_others() {
    let prefill = Fake::new(0, [Does::Prefills; 4]);
    let lost = Does::Refuses(ErrorKind::Disconnected);
    let decode = Fake::new(10, std::iter::repeat_n(lost, 30));
    let stack = Stack::of([None, Some(&prefill), Some(&decode)]);
    let read = stack.ask().await;
    assert_eq!(read.tokens, expected(1));
    assert_eq!(read.end.unwrap_err().kind(), ErrorKind::Disconnected);
    let limit = usize::try_from(stack.site.card.migration_limit).unwrap();
    assert_eq!((prefill.count(), decode.count()), (1, limit + 1));
}

#[tokio::test(start_paused = true)]
async fn the_wait_for_a_decode_instance_ends_with_the_deadline() {
    let (prefill, decode) = pools([Does::Prefills; 4], []);
    let mut stack = Stack::of([None, Some(&prefill), Some(&decode)]);
    let deadline = Instant::now() + Duration::from_secs(2);
    stack.ctx = stack.ctx.with_deadline(deadline);
    let read = stack.ask().await;
    assert_eq!(Instant::now(), deadline);
    assert_eq!(read.end.unwrap_err().kind(), ErrorKind::DeadlineExceeded);
}

#[tokio::test(start_paused = true)]
async fn blocks_that_nobody_can_read_or_get_are_offered_once() {
    let lost = Does::Refuses(ErrorKind::StreamIncomplete);
    for useless in [Does::RefusesBlocks, lost] {
        let (prefill, decode) = pools([Does::Prefills], [useless, REFUSES, REFUSES, Does::Answers]);
        let stack = Stack::of([None, Some(&prefill), Some(&decode)]);
        assert_eq!(stack.ask().await.tokens, expected(12));
        let offered = decode.asked().into_iter().map(|request| request.transfer);
        let offered = offered.filter(|transfer| transfer.as_ref().is_some_and(|it| !it.is_none()));
        assert_eq!((offered.count(), prefill.count()), (1, 1), "{useless:?}");
    }
}

/// Clients are told that no instance had room, and when to try again.
#[tokio::test(start_paused = true)]
async fn a_request_whose_blocks_are_lost_ends_as_one_that_nobody_took() {
    let lost = Does::Refuses(ErrorKind::StreamIncomplete);
    let (prefill, decode) = pools([Does::Prefills], [lost]);
    let stack = Stack::of([None, Some(&prefill), Some(&decode)]);
    let error = stack.ask().await.end.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    assert!(error.details().retry_after.is_some());
}

#[tokio::test(start_paused = true)]
async fn losses_of_both_legs_count_together() {
    let lost = Does::Refuses(ErrorKind::Disconnected);
    let (prefill, decode) = pools([lost, lost, Does::Prefills], std::iter::repeat_n(lost, 30));
    let stack = Stack::of([None, Some(&prefill), Some(&decode)]);
    let limit = usize::try_from(stack.site.card.migration_limit).unwrap();
    let outputs = stack.migrating.generate(request(), stack.ctx.clone()).await;
    let error = match outputs {
        Ok(outputs) => read(outputs).await.end.unwrap_err(),
        Err(error) => error,
    };
    assert_eq!(error.kind(), ErrorKind::Disconnected);
    assert_eq!(prefill.count() + decode.count(), limit + 1);
}
