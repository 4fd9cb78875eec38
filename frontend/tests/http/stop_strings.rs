//! Stop strings and characters that span several tokens, from the engine to the client.

use proptest::prelude::{ProptestConfig, any};
use proptest::test_runner::TestRunner;
use serde_json::{Value, json};

use crate::client::Response;
use crate::script::Script;
use crate::support::{
    CHAT, COMPLETIONS, Site, chat, completion, echo, echo_text, encode, eventually, tokenizer,
};

/// The text, finish reason and completion tokens of a chat. The whole and the streamed answer must agree.
async fn both_ways(site: &Site, stop: Value) -> (String, String, u64) {
    let further = json!({"stop": stop});
    let whole = site.post(CHAT, &chat("Hello", further)).await;
    let json = whole.json();
    let reason = json["choices"][0]["finish_reason"]
        .as_str()
        .expect("a reason");
    let tokens = json["usage"]["completion_tokens"]
        .as_u64()
        .expect("a usage");
    let further = json!({"stop": stop, "stream": true, "stream_options": {"include_usage": true}});
    let streamed = site.post(CHAT, &chat("Hello", further)).await;
    assert_eq!(
        streamed.streamed(0),
        (whole.content(), Some(reason.to_owned()))
    );
    assert_eq!(streamed_tokens(&streamed), tokens);
    (whole.content(), reason.to_owned(), tokens)
}

fn streamed_tokens(response: &Response) -> u64 {
    let last = response.chunks().pop().expect("chunks");
    last["usage"]["completion_tokens"]
        .as_u64()
        .expect("a number")
}

/// The number of tokens until the text contains `text`.
fn tokens_until(tokens: &[u32], text: &str) -> u64 {
    let has = |count: &usize| {
        let decoded = tokenizer()
            .decode_all(tokens.get(..*count).unwrap_or(tokens), true)
            .expect("they decode");
        decoded.contains(text)
    };
    (1..=tokens.len()).find(has).expect("it comes") as u64
}

#[tokio::test]
async fn a_stop_string_across_tokens_cuts_and_frees_the_engine() {
    let text = "Hello wonderful world, hello again";
    let tokens = encode(text);
    let engine = Script::new({
        let tokens = tokens.clone();
        move |_, out| {
            let tokens = tokens.clone();
            async move {
                for token in tokens {
                    out.token(token).await?;
                }
                // The text is complete; only the stop string ends this.
                std::future::pending().await
            }
        }
    });
    let site = Site::start(engine.clone()).await;
    for stop in ["ful wo", "wonderful", " world", "world, hello", "H", "n"] {
        let expected = text.split(stop).next().expect("a beginning");
        let cost = tokens_until(&tokens, stop);
        assert_eq!(
            both_ways(&site, json!(stop)).await,
            (expected.to_owned(), "stop".into(), cost),
            "{stop}"
        );
        eventually("the engine is freed", || engine.active() == 0).await;
    }
    site.idle().await;
    site.close().await;
}

#[tokio::test]
async fn the_prompt_of_a_cut_answer_is_counted_where_only_the_engine_knows_it() {
    let site = Site::start(echo_text()).await;
    let body = chat("one two three", json!({"stop": "two"}));
    let cut = site.post(CHAT, &body).await;
    assert_eq!(cut.content(), "one ");
    assert_eq!(cut.json()["usage"]["prompt_tokens"], 3);
    site.close().await;
}

#[tokio::test]
async fn the_earliest_in_the_text_wins_whatever_the_order() {
    let site = Site::start(Script::tokens(encode("one two three four"))).await;
    for stops in [
        json!(["three", "two"]),
        json!(["two", "three"]),
        json!(["two three", "two"]),
        json!(["four", "two three four", "wo"]),
    ] {
        let (text, reason, _) = both_ways(&site, stops.clone()).await;
        assert_eq!(
            (text.as_str(), reason.as_str()),
            ("one ", "stop"),
            "{stops}"
        );
    }
    site.close().await;
}

/// Several in one token, one within another, and one that begins in a token and ends in the next.
#[tokio::test]
async fn several_in_one_token_cut_at_the_earliest() {
    let text = "the capital of";
    let tokens = encode(text);
    let capital = tokens.iter().map(|token| tokenizer().token_text(*token));
    assert!(capital.into_iter().any(|token| token == " capital"));
    let site = Site::start(Script::tokens(tokens)).await;
    for (stops, shown) in [
        (["tal", "pit"], "the ca"),
        (["pit", "tal"], "the ca"),
        (["apit", "pi"], "the c"),
        (["pi", "apit"], "the c"),
        (["al of", "tal"], "the capi"),
        (["pital ox", "ital"], "the cap"),
        (["e capital", "p"], "th"),
    ] {
        let (text, reason, _) = both_ways(&site, json!(stops)).await;
        assert_eq!(
            (text.as_str(), reason.as_str()),
            (shown, "stop"),
            "{stops:?}"
        );
    }
    site.close().await;
}

#[tokio::test]
async fn half_a_stop_string_at_the_end_is_text() {
    let text = "one two three";
    let tokens = encode(text);
    let count = tokens.len() as u64;
    let site = Site::start(Script::tokens(tokens)).await;
    for stop in ["three!", "two three four", "e\n", "zzz"] {
        assert_eq!(
            both_ways(&site, json!(stop)).await,
            (text.to_owned(), "stop".into(), count)
        );
    }
    site.close().await;
}

/// Characters that span several tokens arrive whole, and special tokens are not shown.
#[tokio::test]
async fn characters_of_several_tokens_come_whole() {
    let site = Site::start(echo()).await;
    let text = "🦀🎉 naïve 日本語 👩‍👩‍👧 <|im_end|>end🔌";
    let shown = text.replace("<|im_end|>", "");
    let count = encode(text).len();
    assert!(
        count > text.chars().count(),
        "the test needs characters of several tokens"
    );
    let further = json!({"ignore_eos": true, "max_tokens": count, "stream": true});
    let response = site.post(COMPLETIONS, &completion(text, further)).await;
    assert_eq!(response.streamed(0), (shown.clone(), Some("length".into())));
    assert!(!response.text().contains('\u{fffd}'));
    let further = json!({"nvext": {"ignore_eos": true}, "max_tokens": count});
    let response = site.post(COMPLETIONS, &completion(text, further)).await;
    assert_eq!(response.content(), shown);
    assert_eq!(response.json()["usage"]["completion_tokens"], count);
    let response = site
        .post(COMPLETIONS, &completion(text, json!({"max_tokens": 500})))
        .await;
    assert_eq!(
        response.content(),
        shown.split("end").next().unwrap_or_default()
    );

    let further = json!({"max_tokens": 500, "stop": ["日本", "語"], "stream": true});
    let response = site.post(COMPLETIONS, &completion(text, further)).await;
    assert_eq!(response.streamed(0).0, "🦀🎉 naïve ");
    for max_tokens in 1..count {
        let further = json!({"max_tokens": max_tokens, "ignore_eos": true});
        let whole = site
            .post(COMPLETIONS, &completion(text, further.clone()))
            .await
            .content();
        let begun = whole.trim_end_matches('\u{fffd}');
        assert!(shown.starts_with(begun), "{max_tokens}: {whole:?}");
        let mut further = further;
        further["stream"] = true.into();
        let streamed = site.post(COMPLETIONS, &completion(text, further)).await;
        assert_eq!(streamed.streamed(0).0, whole);
    }
    site.close().await;
}

/// Compared with the definition of stop strings: the text before the earliest one.
#[test]
fn any_text_is_cut_at_its_earliest_stop_string() {
    let tokio = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .expect("a runtime");
    let site = tokio.block_on(Site::start(echo()));
    let config = ProptestConfig {
        cases: 150,
        failure_persistence: None,
        ..ProptestConfig::default()
    };
    let text = "[ab é🦀\n\"]{1,40}";
    let stops = proptest::collection::vec("[ab é🦀\n\"]{1,4}", 0..4);
    let case = (text, stops, any::<bool>());
    let checked = TestRunner::new(config).run(&case, |(text, stops, is_stream)| {
        let cut = stops
            .iter()
            .filter_map(|stop| text.find(stop.as_str()))
            .min();
        let expected = text.get(..cut.unwrap_or(text.len())).unwrap_or(&text);
        let further = json!({"stop": stops, "stream": is_stream, "max_tokens": 1000});
        let response = tokio.block_on(site.post(COMPLETIONS, &completion(text.as_str(), further)));
        let got = if is_stream {
            response.streamed(0).0
        } else {
            response.content()
        };
        proptest::prop_assert_eq!(got, expected);
        Ok(())
    });
    checked.expect("every text is cut right");
    tokio.block_on(site.close());
}
