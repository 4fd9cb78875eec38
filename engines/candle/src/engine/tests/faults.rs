//! Failing models, and starts that are given up.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::*;

#[tokio::test]
async fn logits_that_are_no_numbers_fail_one_request() {
    let live = Live::start(Fake::default()).await;
    let neighbour = live.send(request(&[1, 2, 3], 200)).await.unwrap();
    let error = live
        .answer(request(&fake::NAN_TOKENS, 5))
        .await
        .unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Internal);
    assert_eq!(read(neighbour).await.unwrap().0, answer_to(&[1, 2, 3], 200));
    assert_eq!(live.start.health.dead_reason(), None);
    live.idle().await;
    let mut again = request(&fake::NAN_TOKENS, 5);
    again.input =
        genset_backend_common::Input::Tokens([&fake::NAN_TOKENS[..], &[7; 40]].concat().into());
    assert_eq!(
        live.answer(again).await.unwrap_err().kind(),
        ErrorKind::Internal
    );
    let kept = live.start.kv_events.subscribe().snapshot.blocks;
    assert!(
        kept.is_empty(),
        "nobody begins with blocks that are in doubt"
    );
}

/// A grammar that cannot continue is the client's fault: the prefix cache stays.
#[tokio::test]
async fn a_grammar_that_is_too_complex_at_a_token_fails_its_request_alone() {
    let live = Live::start(Fake {
        has_small_grammars: true,
        ..Fake::default()
    })
    .await;
    let prompt: Vec<_> = (1..40).collect();
    live.answer(request(&prompt, 5)).await.unwrap();
    let kept = || live.start.kv_events.subscribe().snapshot.blocks.len();
    live.idle().await;
    let before = kept();
    assert!(before > 0);
    let mut guided = request(&[1], 60);
    let pattern = "[a-z]*(ab|yes|no){3,9}".into();
    guided.guided = Some(genset_backend_common::GuidedDecoding::Regex(pattern).into());
    let error = live.answer(guided).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
    assert!(kept() >= before);
}

#[tokio::test]
async fn a_step_that_fails_fails_its_requests_and_the_engine_lives() {
    for panics in [false, true] {
        let fake = Fake::default();
        let switches = Arc::clone(&fake.switches);
        let live = Live::start(fake).await;
        switches.panics.store(panics, Ordering::Relaxed);
        for _ in 0..4 {
            switches.failing_steps.store(1, Ordering::Relaxed);
            let error = live.answer(request(&[1], 5)).await.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Internal);
            assert_eq!(
                live.answer(request(&[1], 5)).await.unwrap().0,
                answer_to(&[1], 5)
            );
        }
        assert_eq!(live.start.health.dead_reason(), None);
    }
}

#[tokio::test]
async fn a_model_that_computes_no_more_is_dead() {
    let fake = Fake::default();
    let switches = Arc::clone(&fake.switches);
    let live = Live::start(fake).await;
    switches.failing_steps.store(u32::MAX, Ordering::Relaxed);
    let error = live.answer(request(&[1], 5)).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Internal);
    assert!(
        in_time(live.start.health.died())
            .await
            .contains("as it was told to")
    );
    assert!(
        live.answer(request(&[1], 5))
            .await
            .unwrap_err()
            .policy()
            .is_retryable
    );
    live.engine.cleanup().await.unwrap();
}

#[tokio::test]
async fn a_start_that_is_given_up_leaves_no_thread() {
    let fake = Fake::default();
    fake.switches
        .loads_until_given_up
        .store(true, Ordering::Relaxed);
    let engine = fake.engine();
    tokio::select! {
        biased;
        _ = engine.start(StartContext::detached(1)) => panic!("loading does not end by itself"),
        () = tokio::task::yield_now() => {}
    }
    // Returns only after the thread has ended.
    in_time(engine.cleanup()).await.unwrap();
}
