//! Every split of a text has the result of the whole: for any text, and for the text of tokens.

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::{Index, select};

use super::*;
use crate::text::Detokenizer;
use crate::text::detokenize::fixtures::{FAMILIES, Family, PIECES};

/// Returns the result for a whole text: the text before the cut, and the stop string that cut it.
fn model(stops: &[String], text: &str) -> (String, StopOutcome) {
    let matches = stops.iter().enumerate().filter_map(|(index, stop)| {
        let start = text.find(stop.as_str())?;
        (!stop.is_empty()).then_some((start, stop.len(), index))
    });
    match matches.min() {
        Some((start, _, index)) => (text[..start].to_owned(), StopOutcome::Stopped { index }),
        None => (text.to_owned(), StopOutcome::Continue),
    }
}

fn matcher(stops: &[&str]) -> StopMatcher {
    StopMatcher::new(stops.iter().map(|&stop| stop.to_owned()).collect())
}

fn run(matcher: &mut StopMatcher, parts: &[&str]) -> (String, StopOutcome) {
    let mut out = String::new();
    for part in parts {
        if let outcome @ StopOutcome::Stopped { .. } = matcher.push(part, &mut out) {
            let at_stop = out.clone();
            assert_eq!(matcher.push("more", &mut out), outcome);
            assert_eq!(matcher.finish(&mut out), outcome);
            assert_eq!(out, at_stop, "text after the stop string is dropped");
            return (out, outcome);
        }
    }
    let outcome = matcher.finish(&mut out);
    (out, outcome)
}

/// Few letters, so that stop strings occur, overlap and share prefixes.
fn letters(len: std::ops::Range<usize>) -> impl Strategy<Value = String> {
    let letter = select(vec!['a', 'b', 'é', 'è', '🦊']);
    vec(letter, len).prop_map(String::from_iter)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn every_split_agrees_with_the_whole_text(
        stops in vec(letters(0..5), 0..4),
        parts in vec(letters(0..6), 0..8),
    ) {
        let parts: Vec<&str> = parts.iter().map(String::as_str).collect();
        let mut matcher = StopMatcher::new(stops.clone().into());
        prop_assert_eq!(run(&mut matcher, &parts), model(&stops, &parts.concat()));
    }

    #[test]
    fn what_is_given_out_is_never_taken_back(
        stops in vec(letters(1..5), 1..4),
        parts in vec(letters(0..3), 0..12),
    ) {
        let (expected, _) = model(&stops, &parts.concat());
        let mut matcher = StopMatcher::new(stops.clone().into());
        let (mut out, mut taken) = (String::new(), String::new());
        for part in &parts {
            let outcome = matcher.push(part, &mut out);
            taken.push_str(part);
            prop_assert!(expected.starts_with(&out));
            if outcome == StopOutcome::Continue {
                // Only text that can still become a stop string is held back.
                let held = &taken[out.len()..];
                prop_assert!(stops.iter().any(|stop| stop.starts_with(held)), "{:?}", held);
            }
        }
    }
}

#[test]
fn a_complete_match_waits_for_one_that_began_earlier() {
    let mut matcher = matcher(&["abcd", "bc"]);
    let mut out = String::new();
    assert_eq!(matcher.push("xabc", &mut out), StopOutcome::Continue);
    assert_eq!(out, "x");
    assert_eq!(matcher.finish(&mut out), StopOutcome::Stopped { index: 1 });
    assert_eq!(out, "xa");
}

/// Cases that random texts rarely have.
#[test]
fn the_earliest_match_in_the_text_cuts() {
    let stopped = |index| StopOutcome::Stopped { index };
    for (stops, parts, shown, outcome) in [
        // In any order of the stop strings.
        (&["cd", "abcx"][..], &["zab", "cd"][..], "zab", stopped(0)),
        (&["abcx", "cd"], &["zab", "cd"], "zab", stopped(1)),
        (&["cd", "abcx"], &["zab", "cx"], "z", stopped(1)),
        (&["abcx", "cd"], &["zab", "cx"], "z", stopped(0)),
        (&["END", "STOP"], &["a STOP b END c"], "a ", stopped(1)),
        (&["STOP", "END"], &["a STOP b END c"], "a ", stopped(0)),
        // Of matches that begin together, the shortest is reported.
        (&["ab", "a", "a"], &["xab"], "x", stopped(1)),
        // After the match, the text's `é` shares its first byte with the second stop string's `è`.
        (&["b", "bè"], &["ab", "é"], "a", stopped(0)),
        (&["é", "aè"], &["aé"], "a", stopped(0)),
        // A stop string that overlaps itself is found at its first place.
        (&["abab"], &["xababab"], "x", stopped(0)),
        (&["abab"], &["x", "a", "b", "ab", "ab"], "x", stopped(0)),
        // The first `aa` of three letters, although the second matches as well.
        (&["aab"], &["aaa", "b"], "a", stopped(0)),
        (&["", ""], &["a", "", "b"], "ab", StopOutcome::Continue),
    ] {
        let (out, end) = run(&mut matcher(stops), parts);
        assert_eq!((out.as_str(), end), (shown, outcome), "{stops:?} {parts:?}");
    }
}

/// A stop string made from a part of the text, so that it occurs: from one code point to another, with its own end.
fn stop_in(text: &str, (from, len, end): &(Index, usize, &str)) -> String {
    let chars: Vec<char> = text.chars().collect();
    let from = from.index(chars.len() + 1);
    let part = chars[from..].iter().take(*len).collect::<String>();
    part + end
}

/// Pushes tokens in chunks of these sizes. Returns the final output, and which stop string cut.
fn run_tokens(
    family: &Family,
    ids: &[u32],
    sizes: &[usize],
    stops: &[String],
) -> (String, StopOutcome) {
    let mut detokenizer = Detokenizer::new(Arc::clone(&family.tokenizer), false);
    let mut matcher = StopMatcher::new(stops.into());
    let mut out = String::new();
    let mut rest = ids;
    for &size in sizes.iter().cycle() {
        let (chunk, after) = rest.split_at(size.min(rest.len()));
        let mut text = String::new();
        for &id in chunk {
            detokenizer.push(id, &mut text);
        }
        if after.is_empty() {
            detokenizer.finish(&mut text);
        }
        if let outcome @ StopOutcome::Stopped { .. } = matcher.push(&text, &mut out) {
            return (out, outcome);
        }
        if after.is_empty() {
            break;
        }
        rest = after;
    }
    let outcome = matcher.finish(&mut out);
    (out, outcome)
}

proptest! {
    /// Tokens contain parts of code points, stop strings, or several of them; some stop strings differ only in their ends.
    #[test]
    fn tokens_of_every_family_agree_with_the_whole_text(
        pieces in vec(prop_oneof![select(PIECES), select(&["ab", "abc", "END", "the"][..])], 1..8),
        noise in vec((any::<Index>(), 0..400_u32), 0..4),
        windows in vec((any::<Index>(), 1..6_usize, select(&["", "", "x", "é", "\u{fffd}"][..])), 0..4),
        sizes in vec(1..6_usize, 1..5),
    ) {
        for family in FAMILIES.iter() {
            let mut ids = family.tokenizer.encode(&pieces.concat(), false).unwrap();
            for (at, id) in &noise {
                ids.insert(at.index(ids.len() + 1), *id);
            }
            let whole = family.tokenizer.decode_all(&ids, false).unwrap();
            let stops: Vec<String> = windows.iter().map(|window| stop_in(&whole, window)).collect();
            let expected = model(&stops, &whole);
            let found = run_tokens(family, &ids, &sizes, &stops);
            prop_assert_eq!(found, expected, "{}: {:?} {:?}", family.name, stops, ids);
        }
    }
}

/// The token that ends the stop string begins the next code point, which is then never output.
#[test]
fn a_token_may_end_inside_the_code_point_after_a_stop_string() {
    let family = &FAMILIES[0];
    let id = |token| family.tokenizer.token_id(token).unwrap();
    let mut ids = family.tokenizer.encode("the END", false).unwrap();
    ids.extend(["ð", "Ł", "¦", "Ĭ"].map(id));
    for sizes in [[1], [2], [7], [100]] {
        let (out, _) = run_tokens(family, &ids, &sizes, &["END".to_owned()]);
        assert_eq!(out, "the ");
        // Half of a stop string does not match it.
        let (out, outcome) = run_tokens(family, &ids, &sizes, &["🦊🦊".to_owned()]);
        assert_eq!((&*out, outcome), ("the END🦊", StopOutcome::Continue));
        let (out, _) = run_tokens(family, &ids, &sizes, &["D🦊".to_owned()]);
        assert_eq!(out, "the EN");
    }
}
