//! Many requests, few blocks, slow readers.

use std::num::NonZeroU32;
use std::sync::Arc;

use futures_util::FutureExt;
use genset_backend_common::GuidedDecoding;
use genset_backend_common::kv::hash_blocks;

use super::*;

fn few(num_blocks: usize, max_num_seqs: usize) -> Fake {
    let mut fake = Fake {
        num_blocks,
        block_size: 4,
        ..Fake::default()
    };
    fake.limits.max_num_seqs = max_num_seqs;
    fake
}

#[tokio::test]
async fn answers_do_not_depend_on_their_neighbours() {
    // 24 blocks of 4 tokens for requests of up to 46 tokens: they preempt each other all the time.
    let live = Live::start(few(24, 8)).await;
    live.crowd("no drafts", None, 30).await;
    live.idle().await;
    assert!(
        live.metric("genset_candle_preemptions_total ") > 0,
        "the cache was too large for this test"
    );
}

#[tokio::test]
async fn a_reader_that_is_behind_stops_nobody() {
    let live = Live::start(few(40, 2)).await;
    // Each could hold most of the cache, and together they take every place.
    let slow: Vec<OutputStream> = [
        live.send(request(&[1, 2], 120)).await.unwrap(),
        live.send(request(&[3, 4], 120)).await.unwrap(),
    ]
    .into();
    for number in 0..6 {
        let prompt = prompt(number);
        assert_eq!(
            live.answer(request(&prompt, 20)).await.unwrap().0,
            answer_to(&prompt, 20)
        );
    }
    for (outputs, prompt) in slow.into_iter().zip([[1, 2], [3, 4]]) {
        assert_eq!(read(outputs).await.unwrap().0, answer_to(&prompt, 120));
    }
}

#[tokio::test]
async fn a_prompt_larger_than_the_cache_is_refused_and_an_answer_ends_with_it() {
    let live = Live::start(few(4, 2)).await;
    let error = live.answer(request(&[1; 17], 1)).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ContextLengthExceeded);
    assert!(error.message().contains("--kv-cache-memory"), "{error}");
    for cached in [0, 8] {
        let (tokens, finished) = live.answer(request(&[1; 10], 100)).await.unwrap();
        assert_eq!((tokens.len(), finished.reason), (7, FinishReason::Length));
        assert_eq!(tokens, answer_to(&[1; 10], 7));
        assert_eq!(finished.usage.cached_tokens, Some(cached));
        live.idle().await;
    }
}

/// At most as many compiled grammars may wait as sequences may run. Of the requests behind them, as many as `--max-waiting` says.
#[tokio::test(flavor = "multi_thread")]
async fn compiled_grammars_that_wait_are_few() {
    let mut fake = few(40, 1);
    fake.limits.max_waiting = 1;
    let switches = Arc::clone(&fake.switches);
    let live = Live::start(fake).await;
    let places = || {
        let running = live.engine.state.get().unwrap();
        running.compiled.available_permits()
    };
    let following = |grammar: GuidedDecoding| {
        let mut guided = request(&[1, 2, 3], 5);
        guided.guided = Some(grammar.into());
        guided
    };
    // Long enough that no answer ends by itself.
    let guided = || following(GuidedDecoding::Regex("[0-9]{99}".into()));
    let sent = tokio::task::block_in_place(|| {
        let _held = switches.gate.lock();
        tokio::runtime::Handle::current().block_on(async {
            // It runs, so the second gets its permit.
            let first = live.send(guided()).await.unwrap();
            let second = live.send(guided()).await.unwrap();
            assert_eq!(places(), 0);
            let waits = live.send(guided());
            tokio::pin!(waits);
            assert!((&mut waits).now_or_never().is_none());
            // An invalid grammar is rejected meanwhile.
            for wrong in [
                GuidedDecoding::Regex("[0-9".into()),
                GuidedDecoding::Grammar("start: \"a\" |(".into()),
            ] {
                let refused = live.send(following(wrong)).await.unwrap_err();
                assert_eq!(refused.kind(), ErrorKind::InvalidArgument, "{refused}");
            }
            assert!((&mut waits).now_or_never().is_none());
            let refused = tokio::select! {
                ended = waits => ended,
                ended = live.send(guided()) => ended,
            };
            assert_eq!(refused.unwrap_err().kind(), ErrorKind::Overloaded);
            [first, second]
        })
    });
    for outputs in sent {
        assert_eq!(read(outputs).await.unwrap().0.len(), 5);
    }
    assert_eq!(live.answer(guided()).await.unwrap().0.len(), 5);
    live.idle().await;
    assert_eq!(places(), 1);
}

#[tokio::test]
async fn a_full_queue_refuses() {
    let mut fake = few(40, 1);
    fake.limits.max_waiting = 2;
    let switches = Arc::clone(&fake.switches);
    let live = Live::start(fake).await;
    let sent: Vec<OutputStream> = {
        let _held = switches.gate.lock();
        (0..8)
            .map(|_| live.send(request(&[1], 3)).now_or_never().unwrap().unwrap())
            .collect()
    };
    let mut refused = 0;
    for outputs in sent {
        match read(outputs).await {
            Ok((tokens, _)) => assert_eq!(tokens, answer_to(&[1], 3)),
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::Overloaded);
                assert!(error.details().retry_after.is_some());
                refused += 1;
            }
        }
    }
    assert_eq!(refused, 5, "of eight: two wait, and one runs");
}

#[tokio::test]
async fn those_that_left_while_they_waited_keep_nobody_out() {
    let mut fake = few(40, 1);
    fake.limits.max_waiting = 2;
    let switches = Arc::clone(&fake.switches);
    let live = Live::start(fake).await;
    let send = || live.send(request(&[1], 3)).now_or_never().unwrap().unwrap();
    let stayed = {
        let _held = switches.gate.lock();
        let runs = send();
        drop([send(), send()]);
        [runs, send(), send()]
    };
    for outputs in stayed {
        assert_eq!(read(outputs).await.unwrap().0, answer_to(&[1], 3));
    }
}

/// Of two with one prompt, the second to be computed finds it in the cache.
#[tokio::test]
async fn larger_priority_is_served_first() {
    let fake = few(200, 1);
    let switches = Arc::clone(&fake.switches);
    let live = Live::start(fake).await;
    let prompt: [TokenId; 10] = [1; 10];
    let send = |prompt: &[TokenId], priority| {
        let mut asked = request(prompt, 3);
        asked.priority = priority;
        live.send(asked).now_or_never().unwrap().unwrap()
    };
    let [first, low, high] = {
        let _held = switches.gate.lock();
        // The first has the only place.
        [send(&[1, 2], 2), send(&prompt, -1), send(&prompt, 1)]
    };
    read(first).await.unwrap();
    for (outputs, cached) in [(high, 0), (low, 8)] {
        let (tokens, finished) = read(outputs).await.unwrap();
        assert_eq!(tokens, answer_to(&prompt, 3));
        assert_eq!(finished.usage.cached_tokens, Some(cached));
    }
}

#[tokio::test]
async fn events_add_up_to_what_is_reused() {
    let live = Live::start(few(16, 4)).await;
    for number in 0..30 {
        live.answer(request(&prompt(number), 5)).await.unwrap();
    }
    let size = NonZeroU32::new(4).unwrap();
    for number in 0..30 {
        let known = live.start.kv_events.subscribe().snapshot.blocks;
        let prompt = prompt(number);
        // The last token is computed in any case.
        let reusable = &prompt[..prompt.len() - 1];
        let hashes = hash_blocks(None, reusable, size);
        let published = hashes
            .iter()
            .take_while(|hash| known.iter().any(|block| block.hash == **hash))
            .count();
        let (_, finished) = live.answer(request(&prompt, 1)).await.unwrap();
        assert_eq!(
            finished.usage.cached_tokens,
            u32::try_from(published * 4).ok()
        );
    }
}
