//! Cuts a stream of text at the first stop string.
//!
//! A [`StopMatcher`] serves one sequence: it stands between the [`Detokenizer`](super::Detokenizer) and
//! whatever sends the text. Stop strings may lie across any number of tokens; text that might be the
//! beginning of one is held back until it is certain not to be, so no part of a stop string is ever
//! sent. It knows text only: stop token ids are the engine's.
//!
//! Which stop string cuts does not depend on how the text is split, nor on the order they are listed
//! in: the one whose match begins earliest does. If several begin there, the shortest is reported (it
//! is complete first, and the text before it is the same); among equals, the one listed first.
//!
//! # Source
//!
//! Each stop string is followed by a Knuth-Morris-Pratt automaton over bytes. Its state is the length
//! of the longest beginning of the stop string that the text ends with, so what is held back is a
//! beginning of a stop string and needs no buffer.

use std::sync::Arc;

/// What a [`StopMatcher`] made of the text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use = "the sequence must end when a stop string was found"]
pub enum StopOutcome {
    /// No stop string so far.
    Continue,
    /// A stop string was found: the text ends before it.
    Stopped {
        /// Which one, counted from 0 in the list given to [`StopMatcher::new`].
        index: usize,
    },
}

/// Cuts one sequence's text at the first of a list of stop strings.
///
/// # Contract
///
/// For every split of a text into [`push`](Self::push)es, the outputs and the final outcome are the
/// same. Per byte of text it does a constant amount of work for each stop string, amortized; without
/// stop strings it only copies.
///
/// # Examples
///
/// ```
/// use std::sync::Arc;
/// use genset_frontend::text::{StopMatcher, StopOutcome};
///
/// let mut matcher = StopMatcher::new(Arc::from(["\n\nUser:".to_owned(), "END".to_owned()]));
/// let mut out = String::new();
/// assert_eq!(matcher.push("Hello.\n", &mut out), StopOutcome::Continue);
/// assert_eq!(out, "Hello."); // the line break may begin a stop string
/// assert_eq!(matcher.push("\nUse", &mut out), StopOutcome::Continue);
/// assert_eq!(matcher.push("r: hi", &mut out), StopOutcome::Stopped { index: 0 });
/// assert_eq!(out, "Hello.");
/// ```
#[derive(Debug)]
pub struct StopMatcher {
    stops: Arc<[String]>,
    cursors: Box<[Cursor]>,
    /// Bytes of text taken so far.
    taken: usize,
    search: Search,
}

/// How far the search has come.
#[derive(Debug, Clone, Copy)]
enum Search {
    /// No stop string is complete.
    Looking,
    /// Stop string `index` is complete and began at byte `start`, but another that began earlier may
    /// still become complete.
    Contested { index: usize, start: usize },
    /// Decided.
    Stopped { index: usize },
}

/// The automaton of one stop string.
#[derive(Debug)]
struct Cursor {
    /// Where the stop string stands in the list.
    index: usize,
    /// How many of its first bytes the text ends with; less than its length.
    matched: usize,
    /// For each beginning of the stop string, by length - 1: the length of the longest shorter
    /// beginning that it ends with.
    borders: Box<[usize]>,
}

/// The end of the text taken so far, not yet given out: a beginning of a stop string.
#[derive(Debug, Clone, Copy)]
struct Held {
    index: usize,
    len: usize,
}

impl StopMatcher {
    /// A matcher at the start of a sequence. Empty stop strings are ignored.
    #[must_use]
    pub fn new(stops: Arc<[String]>) -> Self {
        let cursors = stops
            .iter()
            .enumerate()
            .filter(|(_, stop)| !stop.is_empty())
            .map(|(index, stop)| Cursor::new(index, stop.as_bytes()))
            .collect();
        Self {
            stops,
            cursors,
            taken: 0,
            search: Search::Looking,
        }
    }

    /// Takes the next part of the text, and appends to `out` what certainly comes before any stop
    /// string. Once stopped, all further text is dropped.
    #[inline]
    pub fn push(&mut self, text: &str, out: &mut String) -> StopOutcome {
        if self.cursors.is_empty() {
            out.push_str(text);
            return StopOutcome::Continue;
        }
        self.search(text, out)
    }

    /// The text ends: appends what was held back, and decides a match that was waiting for an earlier
    /// one. Text pushed after this begins another sequence.
    pub fn finish(&mut self, out: &mut String) -> StopOutcome {
        let held = self.held();
        let start = self.taken - held.len;
        let outcome = match self.search {
            Search::Looking => {
                self.window(start, held, "").emit_until(self.taken, out);
                StopOutcome::Continue
            }
            Search::Contested { index, start: cut } => {
                self.window(start, held, "").emit_until(cut, out);
                StopOutcome::Stopped { index }
            }
            Search::Stopped { index } => StopOutcome::Stopped { index },
        };
        self.restart();
        outcome
    }

    fn search(&mut self, text: &str, out: &mut String) -> StopOutcome {
        if let Search::Stopped { index } = self.search {
            return StopOutcome::Stopped { index };
        }
        let held = self.held();
        let start = self.taken - held.len;
        for &byte in text.as_bytes() {
            self.take(byte);
            if let Search::Contested { index, start: cut } = self.search
                && self.earliest_open() >= cut
            {
                self.search = Search::Stopped { index };
                self.window(start, held, text).emit_until(cut, out);
                return StopOutcome::Stopped { index };
            }
        }
        let open = self.earliest_open();
        self.window(start, held, text).emit_until(open, out);
        StopOutcome::Continue
    }

    /// Moves every automaton on by one byte, and notes the best complete match.
    #[inline]
    fn take(&mut self, byte: u8) {
        self.taken += 1;
        for cursor in &mut self.cursors {
            let stop = self.stops[cursor.index].as_bytes();
            if cursor.take(stop, byte) {
                let start = self.taken - stop.len();
                let is_earliest = match self.search {
                    Search::Looking => true,
                    Search::Contested { start: best, .. } => start < best,
                    Search::Stopped { .. } => false,
                };
                if is_earliest {
                    let index = cursor.index;
                    self.search = Search::Contested { index, start };
                }
            }
        }
    }

    /// Where the earliest match that may still become complete begins; the text's end if there is none.
    fn earliest_open(&self) -> usize {
        self.taken - self.held().len
    }

    fn held(&self) -> Held {
        let nothing = Held { index: 0, len: 0 };
        self.cursors.iter().fold(nothing, |longest, cursor| {
            if cursor.matched > longest.len {
                Held {
                    index: cursor.index,
                    len: cursor.matched,
                }
            } else {
                longest
            }
        })
    }

    /// The text not yet given out, of which `held` was held back. Asked between pushes, when no
    /// automaton stands inside a code point.
    fn window<'a>(&'a self, start: usize, held: Held, fresh: &'a str) -> Window<'a> {
        Window {
            start,
            held: self
                .stops
                .get(held.index)
                .map_or("", |stop| &stop[..held.len]),
            fresh,
        }
    }

    fn restart(&mut self) {
        self.taken = 0;
        self.search = Search::Looking;
        for cursor in &mut self.cursors {
            cursor.matched = 0;
        }
    }
}

/// The text not yet given out: what was held back, then what has just come.
struct Window<'a> {
    /// Where it begins, in bytes from the start of the sequence.
    start: usize,
    held: &'a str,
    fresh: &'a str,
}

impl Window<'_> {
    /// Gives out the text before byte `end` of the sequence, a boundary between code points.
    fn emit_until(&self, end: usize, out: &mut String) {
        let len = end - self.start;
        let from_held = len.min(self.held.len());
        out.push_str(&self.held[..from_held]);
        out.push_str(&self.fresh[..len - from_held]);
    }
}

impl Cursor {
    fn new(index: usize, stop: &[u8]) -> Self {
        let mut borders = vec![0; stop.len()];
        let mut border = 0;
        for end in 1..stop.len() {
            while border > 0 && stop[border] != stop[end] {
                border = borders[border - 1];
            }
            if stop[border] == stop[end] {
                border += 1;
            }
            borders[end] = border;
        }
        Self {
            index,
            matched: 0,
            borders: borders.into(),
        }
    }

    /// Moves on by one byte; true if that completes the stop string.
    #[inline]
    fn take(&mut self, stop: &[u8], byte: u8) -> bool {
        while self.matched > 0 && stop[self.matched] != byte {
            self.matched = self.borders[self.matched - 1];
        }
        if stop[self.matched] != byte {
            return false;
        }
        self.matched += 1;
        let is_complete = self.matched == stop.len();
        if is_complete {
            self.matched = self.borders[self.matched - 1];
        }
        is_complete
    }
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;

    /// What the whole text makes: the text before the cut, and the stop string that cut.
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

    /// Few letters, so that stop strings occur, overlap and share beginnings.
    fn letters(len: std::ops::Range<usize>) -> impl Strategy<Value = String> {
        let letter = prop::sample::select(vec!['a', 'b', 'é', 'è', '🦊']);
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
            let expected = model(&stops, &parts.concat());
            prop_assert_eq!(run(&mut matcher, &parts), expected.clone());
            // And again, since `finish` begins a new sequence.
            prop_assert_eq!(run(&mut matcher, &parts), expected);
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
                    // No more is held back than can still become a stop string.
                    let held = &taken[out.len()..];
                    prop_assert!(stops.iter().any(|stop| stop.starts_with(held)), "{:?}", held);
                }
            }
        }
    }

    #[test]
    fn the_earliest_match_cuts_whatever_the_order() {
        for stops in [["cd", "abcx"], ["abcx", "cd"]] {
            let (out, _) = run(&mut matcher(&stops), &["zab", "cd"]);
            assert_eq!(out, "zab");
            let (out, _) = run(&mut matcher(&stops), &["zab", "cx"]);
            assert_eq!(out, "z");
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

    #[test]
    fn of_matches_that_begin_together_the_shortest_is_reported() {
        let (out, outcome) = run(&mut matcher(&["ab", "a", "a"]), &["xab"]);
        assert_eq!(
            (out.as_str(), outcome),
            ("x", StopOutcome::Stopped { index: 1 })
        );
    }

    #[test]
    fn stopping_inside_a_push_leaves_other_automata_anywhere() {
        // After the match, the text's `é` agrees with the second stop string's `è` in its first byte.
        let (out, _) = run(&mut matcher(&["b", "bè"]), &["ab", "é"]);
        assert_eq!(out, "a");
        let (out, _) = run(&mut matcher(&["é", "aè"]), &["aé"]);
        assert_eq!(out, "a");
    }

    #[test]
    fn no_stop_strings_pass_everything() {
        let (out, outcome) = run(&mut matcher(&["", ""]), &["a", "", "b"]);
        assert_eq!((out.as_str(), outcome), ("ab", StopOutcome::Continue));
    }
}
