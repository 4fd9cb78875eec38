//! Log probabilities against the definition: those of the tokens whose text is in the answer.

use genset_backend_common::output::TopLogprob;
use proptest::prelude::{ProptestConfig, prop_assert, prop_assert_eq, proptest};

use super::*;

/// Tokens that are text, then two halves of `é`, then a special one.
const TEXTS: [&str; 7] = ["a", "b", "ab", "ba", " ", "é", "a b"];
const HALVES: [u32; 2] = [7, 8];
const SPECIAL: u32 = 9;

fn tokenizer() -> Arc<TextTokenizer> {
    let vocab = json!({
        "a": 0, "b": 1, "ab": 2, "ba": 3, "Ġ": 4, "Ã©": 5, "aĠb": 6, "Ã": 7, "©": 8,
    });
    super::tokenizer(&vocab, &[(SPECIAL, "<|x|>")])
}

/// A number that identifies the position, so that no log probability can pass for another.
fn rating(place: usize) -> TokenLogprob {
    let place = u16::try_from(place).unwrap();
    let top = (0..3).map(|token_id| TopLogprob {
        token_id,
        logprob: -1.0,
    });
    TokenLogprob {
        logprob: -f32::from(place),
        top: top.collect(),
    }
}

/// An answer of these tokens, cut into chunks; the last chunk comes with the end.
fn rated_answer(tokens: &[u32], chunks: &[usize], stops: &[&str]) -> Answer {
    let mut sizes = chunks.iter().copied().cycle();
    let mut places = (0..tokens.len()).peekable();
    let mut items: Vec<Item> = Vec::new();
    let mut last = TokenChunk::default();
    while places.peek().is_some() {
        let places: Vec<usize> = places.by_ref().take(sizes.next().unwrap()).collect();
        let chunk = TokenChunk {
            token_ids: places.iter().map(|place| tokens[*place]).collect(),
            logprobs: places.iter().map(|place| rating(*place)).collect(),
        };
        let before = std::mem::replace(&mut last, chunk);
        if !before.is_empty() {
            items.push(Ok(Output::Tokens(before)));
        }
    }
    let before = u32::try_from(tokens.len()).unwrap() - last.len();
    items.push(finished(Finish::length().with_last(last), before));
    let outputs = OutputStream::from_raw(Box::pin(stream::iter(items)));
    let stops = stops.iter().map(|stop| (*stop).to_owned()).collect();
    Answer::new(outputs, Some(tokenizer()), stops, 3).with_logprobs(tokenizer(), 2)
}

fn whole(tokens: &[u32], chunks: &[usize], stops: &[&str]) -> (String, Vec<TokenLogprobs>) {
    let answer = rated_answer(tokens, chunks, stops);
    let read = futures_util::FutureExt::now_or_never(super::collect(answer));
    let completed = read.unwrap().unwrap();
    (completed.message.content, completed.rated.unwrap())
}

/// The same, streamed; a delta never has more tokens than the text so far reveals.
fn streamed(tokens: &[u32], chunks: &[usize], stops: &[&str]) -> (String, Vec<TokenLogprobs>) {
    let deltas = deltas(rated_answer(tokens, chunks, stops));
    let (shown, rated): (Vec<_>, Vec<_>) = deltas.into_iter().unzip();
    (shown.concat(), rated.concat())
}

/// The text of each delta and the log probabilities that come with it; those of the end come last.
fn deltas(mut answer: Answer) -> Vec<(String, Vec<TokenLogprobs>)> {
    let mut deltas = Vec::new();
    let mut cx = Context::from_waker(std::task::Waker::noop());
    loop {
        let each = |delta: Delta<'_>, ready: &[TokenLogprobs]| {
            let Delta::Content(text) = delta else {
                panic!("nothing is taken apart");
            };
            deltas.push((text.to_owned(), ready.to_vec()));
        };
        let Poll::Ready(end) = answer.poll_deltas(&mut cx, each) else {
            panic!("nothing waits");
        };
        if end.unwrap().is_some() {
            let ending = answer.end(|_, _| panic!("nothing is taken apart"));
            deltas.push((String::new(), ending.rated));
            return deltas;
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    /// With tokens that are whole text: those that end before the cut.
    #[test]
    fn they_are_those_of_the_tokens_in_the_text(
        tokens in proptest::collection::vec(0..7_u32, 0..12),
        chunks in proptest::collection::vec(1..4_usize, 1..4),
        stops in proptest::collection::vec("[ab é]{1,3}", 0..3),
    ) {
        let texts: Vec<&str> = tokens.iter().map(|token| TEXTS[*token as usize]).collect();
        let all = texts.concat();
        let cut = stops.iter().filter_map(|stop| all.find(stop.as_str())).min().unwrap_or(all.len());
        let (mut end, mut expected) = (0, Vec::new());
        for (place, text) in texts.iter().enumerate() {
            let text_offset = all[..end].chars().count();
            end += text.len();
            if end <= cut {
                expected.push((text.as_bytes().to_vec(), -f32::from(u16::try_from(place).unwrap()), text_offset));
            }
        }
        let stops: Vec<&str> = stops.iter().map(String::as_str).collect();
        let (shown, rated) = whole(&tokens, &chunks, &stops);
        prop_assert_eq!(shown.as_str(), &all[..cut]);
        let got: Vec<_> = rated.iter().map(|token| {
            (token.chosen.bytes.clone(), token.chosen.logprob, token.text_offset)
        }).collect();
        prop_assert_eq!(got, expected);
        prop_assert!(rated.iter().all(|token| token.top.len() == 2));
        prop_assert_eq!(streamed(&tokens, &chunks, &stops), (shown, rated));
    }

    /// With any tokens: all of them if nothing is cut, else a prefix whose text is in the answer. They do not depend on
    /// how the engine cuts its output or how the client reads it.
    #[test]
    fn no_token_tells_what_was_cut(
        tokens in proptest::collection::vec(0..10_u32, 0..12),
        chunks in proptest::collection::vec(1..4_usize, 1..4),
        stops in proptest::collection::vec("[ab é]{1,3}", 0..3),
    ) {
        let stops: Vec<&str> = stops.iter().map(String::as_str).collect();
        let (shown, rated) = whole(&tokens, &chunks, &stops);
        let tokenizer = tokenizer();
        let all = tokenizer.decode_all(&tokens, true).unwrap();
        if shown == all && stops.iter().all(|stop| !all.contains(stop)) {
            prop_assert_eq!(rated.len(), tokens.len());
        }
        let beginning = tokenizer.decode_all(&tokens[..rated.len()], true).unwrap();
        prop_assert!(shown.starts_with(&beginning), "{:?} is not in {:?}", beginning, shown);
        prop_assert_eq!(&streamed(&tokens, &chunks, &stops), &(shown, rated.clone()));
        prop_assert_eq!(whole(&tokens, &[1], &stops).1, rated);
    }
}

#[test]
fn halves_of_a_code_point_come_together_and_special_tokens_with_what_follows() {
    let [lead, tail] = HALVES;
    let deltas = deltas(rated_answer(&[0, SPECIAL, lead, tail, 1], &[1], &[]));
    let counts: Vec<_> = deltas
        .iter()
        .map(|(text, ready)| (text.as_str(), ready.len()))
        .collect();
    assert_eq!(counts, [("a", 1), ("é", 3), ("b", 1), ("", 0)]);
    let (_, rated) = whole(&[lead, tail, 1], &[1], &[]);
    assert_eq!(offsets(&rated), [0, 0, 1]);
    assert_eq!(rated[0].chosen.bytes, [0xc3]);
}

fn offsets(rated: &[TokenLogprobs]) -> Vec<usize> {
    rated.iter().map(|token| token.text_offset).collect()
}

#[test]
fn a_token_begins_behind_the_replacement_that_comes_with_it() {
    let (shown, rated) = whole(&[HALVES[0], 0, 1], &[1], &[]);
    assert_eq!(shown, "\u{fffd}ab");
    assert_eq!(offsets(&rated), [0, 1, 2]);
}

/// The second lead byte makes the first one's replacement certain, and is itself half of what the stop string cuts.
#[test]
fn half_of_what_was_cut_is_not_told() {
    let [lead, tail] = HALVES;
    let (shown, rated) = whole(&[lead, lead, tail], &[1], &["é"]);
    assert_eq!((shown.as_str(), rated.len()), ("\u{fffd}", 1));
}

#[test]
fn an_engine_that_leaves_one_out_is_told() {
    let chunk: TokenChunk = [0, 1].into_iter().collect();
    let items = vec![Ok(Output::Tokens(chunk)), finished(Finish::stop(), 2)];
    let outputs = OutputStream::from_raw(Box::pin(stream::iter(items)));
    let answer = Answer::new(outputs, Some(tokenizer()), Arc::default(), 1);
    let answer = answer.with_logprobs(tokenizer(), 0);
    let read = futures_util::FutureExt::now_or_never(super::collect(answer));
    let error = read.unwrap().unwrap_err();
    assert_eq!(error.cause, Some(ErrorKind::Internal));
    assert!(error.to_string().contains("Its log says why"), "{error:?}");
}

#[tokio::test]
async fn an_echo_comes_first_and_is_not_searched() {
    let items = vec![text("one two", 1), finished(Finish::length(), 1)];
    let answer = answer(items, &["two"]).with_echo("two: ".into());
    let completed = super::collect(answer).await.unwrap();
    assert_eq!(completed.message.content, "two: one ");
}
