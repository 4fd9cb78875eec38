//! Requests that wait for an instance before their answer begins.

use super::*;

const AWAY: [ErrorKind; 4] = [
    ErrorKind::CannotConnect,
    ErrorKind::Disconnected,
    ErrorKind::EngineShutdown,
    ErrorKind::Unavailable,
];

impl Site {
    /// Returns the refusal of a request, and how long it took.
    async fn refusal(&self, ctx: RequestContext) -> (EngineError, Duration) {
        let since = Instant::now();
        let refused = self.migrating.generate(request(), ctx).await;
        (refused.unwrap_err(), since.elapsed())
    }
}

#[tokio::test(start_paused = true)]
async fn an_instance_that_comes_in_time_takes_it() {
    for kind in AWAY {
        let legs = [Leg::Refuses(kind); 3].into_iter().chain([Leg::Finishes]);
        let site = site(legs);
        let ctx = ctx();
        let outputs = site.migrating.generate(request(), ctx.clone()).await;
        let read = read(outputs.unwrap()).await;
        assert_eq!(read.tokens, undisturbed().await.tokens, "{kind}");
        assert_eq!(ctx.moves(), 0);
        let asked = site.fleet.asked();
        let ids: Vec<_> = asked.iter().map(|asked| asked.id.as_str()).collect();
        assert_eq!(ids, ["r", "r-0", "r-0", "r-0"]);
    }
}

#[tokio::test(start_paused = true)]
async fn it_waits_its_time_and_is_refused() {
    let site = site([Leg::Refuses(ErrorKind::CannotConnect)]);
    let (refusal, after) = site.refusal(ctx()).await;
    assert_eq!(refusal.kind(), ErrorKind::Unavailable);
    assert_eq!(after, Duration::from_secs(5));
    let deadline = Instant::now() + Duration::from_secs(2);
    let (refusal, after) = site.refusal(ctx().with_deadline(deadline)).await;
    assert_eq!(refusal.kind(), ErrorKind::DeadlineExceeded);
    assert_eq!(after, Duration::from_secs(2));
}

#[tokio::test(start_paused = true)]
async fn what_another_refusal_says_is_told_at_once() {
    for kind in ErrorKind::ALL {
        if AWAY.contains(&kind) {
            continue;
        }
        let site = site([Leg::Refuses(kind), Leg::Finishes]);
        let (refusal, after) = site.refusal(ctx()).await;
        assert_eq!((refusal.kind(), after), (kind, Duration::ZERO));
    }
}

#[tokio::test(start_paused = true)]
async fn one_that_brings_instances_down_is_kept_from_those_that_come_after() {
    let legs = [Leg::Refuses(ErrorKind::Disconnected); 9];
    let site = site_of(legs, &card(2), MigrationConfig::default());
    let (refusal, _) = site.refusal(ctx()).await;
    assert_eq!(refusal.kind(), ErrorKind::Disconnected);
    assert_eq!(site.fleet.asked().len(), 3);
}

/// A loss before the answer begins, one in its middle, and one while the request looks for its next instance.
#[tokio::test(start_paused = true)]
async fn losses_count_together_wherever_the_answer_is() {
    let lost = Leg::Refuses(ErrorKind::Disconnected);
    let legs = [lost, lost_after(5), lost, Leg::Finishes];
    let site = site_of(legs, &card(2), MigrationConfig::default());
    let read = site.ask(request()).await;
    assert_eq!((read.tokens.len(), site.fleet.asked().len()), (5, 3));
    assert_eq!(kind_of(&read), ErrorKind::Disconnected);
    let message = read.end.unwrap_err().message().to_owned();
    assert!(message.contains("lost as many instances"), "{message}");
    assert_eq!(site.failures("limit"), "1");
}
