use futures_util::stream;
use genset_backend_common::output::{self, Finish, PredictionTokens, TextChunk};
use genset_backend_common::{FinishReason, MetricsRegistry, OutputStream, RequestContext};
use proptest::prelude::{ProptestConfig, prop_assert_eq, proptest};
use serde_json::{Value, json};

use super::*;
use crate::budget::MemoryBudget;
use crate::error::ApiError;
use crate::markup::Message;
use crate::markup::testing::calls_of;

mod ratings;

type Item = Result<Output, EngineError>;

fn text(text: &str, token_count: u32) -> Item {
    Ok(Output::Text(TextChunk {
        text: text.into(),
        token_count,
    }))
}

fn finished(finish: Finish, tokens: u32) -> Item {
    Ok(Output::Finished(Box::new(finish.into_finished(3, tokens))))
}

fn answer(items: Vec<Item>, stops: &[&str]) -> Answer {
    let outputs = OutputStream::from_raw(Box::pin(stream::iter(items)));
    let stops = stops.iter().map(|stop| (*stop).to_owned()).collect();
    Answer::new(outputs, None, stops, 3)
}

/// A tokenizer of this vocabulary without merges, and of these special tokens.
fn tokenizer(vocab: &Value, special: &[(u32, &str)]) -> Arc<TextTokenizer> {
    let special = special.iter().map(|(id, content)| {
        json!({
            "id": id, "content": content, "special": true, "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false,
        })
    });
    let file = json!({
        "version": "1.0", "truncation": null, "padding": null, "normalizer": null, "pre_tokenizer": null,
        "post_processor": null, "added_tokens": special.collect::<Value>(),
        "decoder": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true},
        "model": {"type": "BPE", "vocab": vocab, "merges": []},
    });
    Arc::new(TextTokenizer::from_bytes(file.to_string().as_bytes()).unwrap())
}

/// Reads an answer on an unlimited memory budget.
async fn collect(answer: Answer) -> Result<Completed, ApiError> {
    let memory = MemoryBudget::new(usize::MAX).share();
    let collected = answer.collect_on(memory).await;
    collected.map(|(completed, _)| completed)
}

async fn collected(answer: Answer) -> Result<(Message, AnswerEnd), ApiError> {
    let Completed { message, end, .. } = collect(answer).await?;
    Ok((message, end))
}

#[tokio::test]
async fn an_answer_ends_at_a_stop_strings_token_or_as_the_engine_says() {
    for (stop, content, reason, tokens) in [
        ("never", "one two three four", FinishReason::Length, 5),
        ("two", "one ", FinishReason::Stop, 4),
    ] {
        let items = vec![
            text("one t", 2),
            text("wo three", 2),
            text(" four", 1),
            finished(Finish::length(), 5),
        ];
        let (read, end) = collected(answer(items, &[stop])).await.unwrap();
        assert_eq!((read.content.as_str(), end.reason), (content, reason));
        let usage = (end.usage.prompt_tokens, end.usage.completion_tokens);
        assert_eq!(usage, (3, tokens));
    }
}

#[tokio::test]
async fn a_stream_without_an_end_is_an_error_and_so_is_reading_on() {
    let mut broken = answer(vec![text("a", 1)], &[]);
    assert_eq!(broken.next_deltas(|_| {}).await.unwrap(), None);
    for _ in 0..2 {
        let error = broken.next_deltas(|_| {}).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::StreamIncomplete);
    }
    let embeddings = vec![Ok(Output::Embeddings(vec![])), finished(Finish::stop(), 0)];
    let error = collect(answer(embeddings, &[])).await.unwrap_err();
    assert_eq!(error.cause, Some(ErrorKind::Internal));
}

#[tokio::test]
async fn a_stop_string_drops_the_engines_stream() {
    let alive = Arc::new(());
    let held = Arc::clone(&alive);
    let items = stream::unfold((0, held), |(count, held)| async move {
        Some((text("ab", 1), (count + 1, held)))
    });
    let outputs = OutputStream::from_raw(Box::pin(items));
    let stops = Arc::from(["aba".to_owned()]);
    let mut answer = Answer::new(outputs, None, stops, 1);
    let mut read = Message::default();
    while answer
        .next_deltas(|delta| read.add(delta))
        .await
        .unwrap()
        .is_none()
    {}
    assert_eq!(Arc::strong_count(&alive), 1);
    assert_eq!(read.content, "");
}

#[test]
fn a_prompt_counts_once_however_many_answers() {
    let usage = Usage {
        prompt_tokens: 10,
        completion_tokens: 2,
        cached_tokens: Some(8),
        predictions: Some(PredictionTokens {
            accepted: 1,
            rejected: 3,
        }),
    };
    let end = |pays_for_prompt| AnswerEnd {
        reason: FinishReason::Stop,
        usage,
        pays_for_prompt,
        stop_string: None,
    };
    let mut sum = Usage::default();
    for pays in [true, false, false, true] {
        end(pays).add_to(&mut sum);
    }
    assert_eq!(
        (sum.prompt_tokens, sum.completion_tokens, sum.cached_tokens),
        (20, 8, Some(16))
    );
    let predictions = sum.predictions.unwrap();
    assert_eq!((predictions.accepted, predictions.rejected), (4, 12));
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    /// However the engine cuts its text, the result is the text before the earliest stop string.
    #[test]
    fn pieces_make_no_difference(
        pieces in proptest::collection::vec("[abé ]{0,4}", 0..12),
        stops in proptest::collection::vec("[abé ]{1,3}", 0..3),
    ) {
        let whole: String = pieces.concat();
        let cut = stops.iter().filter_map(|stop| whole.find(stop.as_str())).min();
        let mut items: Vec<Item> = pieces.iter().map(|piece| text(piece, 1)).collect();
        items.push(finished(Finish::length(), u32::try_from(pieces.len()).unwrap()));
        let stops: Vec<&str> = stops.iter().map(String::as_str).collect();
        let read = futures_util::FutureExt::now_or_never(collected(answer(items, &stops)));
        let (read, end) = read.unwrap().unwrap();
        prop_assert_eq!(read.content.as_str(), whole.get(..cut.unwrap_or(whole.len())).unwrap());
        let reason = if cut.is_some() { FinishReason::Stop } else { FinishReason::Length };
        prop_assert_eq!(end.reason, reason);
    }
}

/// Special tokens are skipped, except those of the expected markup.
#[tokio::test]
async fn special_tokens_of_markup_are_read_and_others_skipped() {
    let vocab = json!({"now": 0, "{": 1, "}": 2});
    let tokenizer = tokenizer(&vocab, &[(3, "[TOOL_CALLS]"), (4, "<|eot|>")]);
    let read = async |has_splitter: bool| {
        let (ctx, tokens) = (RequestContext::new("a"), [3, 4, 0, 1, 2]);
        let outputs = output::stream(ctx, move |out| async move {
            for token in tokens {
                out.token(token).await?;
            }
            Ok(Finish::stop())
        });
        let mut answer = Answer::new(outputs, Some(Arc::clone(&tokenizer)), Arc::default(), 1);
        if has_splitter {
            answer = answer.with_splitter(calls_of("mistral"), [3].into());
        }
        collect(answer).await.unwrap().message
    };
    assert_eq!(read(false).await.content, "now{}");
    let message = read(true).await;
    assert_eq!(message.content, "");
    assert_eq!(
        (
            message.tool_calls[0].name.as_str(),
            message.tool_calls[0].arguments.as_str()
        ),
        ("now", "{}")
    );
}

/// The marker after a call ends the answer and is not shown. Only the finish reason tells a call without arguments from
/// one that was cut before them.
#[tokio::test]
async fn a_call_that_was_cut_before_its_arguments_has_none() {
    let header = "<|channel|>commentary to=functions.now<|message|>";
    for (end, arguments) in [
        (finished(Finish::stop(), 4), "{}"),
        (finished(Finish::length(), 4), ""),
        (text("END", 1), ""),
    ] {
        let answer = answer(vec![text(header, 4), end], &["END"]);
        let answer = answer.with_splitter(calls_of("harmony"), Arc::default());
        let Completed { message, .. } = collect(answer).await.unwrap();
        let call = &message.tool_calls[0];
        assert_eq!(
            (call.name.as_str(), call.arguments.as_str()),
            ("now", arguments)
        );
    }
}

#[tokio::test]
async fn a_whole_answer_is_refused_where_there_is_no_memory_for_it() {
    let budget = MemoryBudget::new(100_000);
    let long = || {
        let said = "a".repeat(1000);
        let pieces = (0..50).map(|_| text(&said, 1));
        pieces.chain([finished(Finish::stop(), 50)]).collect()
    };
    let refused = answer(long(), &[]).collect_on(budget.share()).await;
    assert_eq!(refused.unwrap_err().status, 413);
    assert_eq!(budget.used(), 0);
    let budget = MemoryBudget::new(1 << 20);
    let (completed, memory) = answer(long(), &[])
        .collect_on(budget.share())
        .await
        .unwrap();
    assert_eq!(completed.message.content.len(), 50_000);
    assert!(memory.bytes() >= 200_000, "{memory:?}");
    drop(memory);
    assert_eq!(budget.used(), 0);
}

/// An engine may count the tokens of all its objects in the last one.
#[tokio::test]
async fn an_answer_in_objects_is_queued_until_the_first_one_with_text() {
    let object = |delta: Value| text(&json!({"choices": [{"delta": delta}]}).to_string(), 0);
    let items = vec![
        object(json!({"role": "assistant"})),
        object(json!({"content": "Hi"})),
        text(r#"{"choices": [], "usage": {"completion_tokens": 2}}"#, 2),
        finished(Finish::stop(), 2),
    ];
    let registry = MetricsRegistry::default();
    let steps = StepMetrics::register(&registry);
    let account = Arc::new(Account::new(None, TokenCounters::default()));
    let mut answer = answer(items, &[])
        .with_splitter(Splitter::of_objects(), Arc::default())
        .measured(&steps, Instant::now(), account);
    for queued in [1, 0] {
        assert_eq!(answer.next_deltas(|_| {}).await.unwrap(), None);
        let shown = registry.encode();
        let line = format!("genset_http_answers_queued {queued}\n");
        assert!(shown.contains(&line), "{shown}");
    }
    let shown = registry.encode();
    assert!(
        shown.contains("genset_http_time_to_first_token_seconds_count 1\n"),
        "{shown}"
    );
}
