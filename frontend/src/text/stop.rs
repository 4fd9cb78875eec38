//! Cuts a stream of text at the first stop string.
//!
//! A [`StopMatcher`] serves one sequence, between the [`Detokenizer`](super::Detokenizer) and the
//! sender of the text. A stop string may span any number of tokens. Text that may be the beginning of
//! one is held back until it is certain not to be, so no part of a stop string is ever sent. It handles
//! text only: the engine handles stop token ids.
//!
//! The result does not depend on how the text is split, nor on the order of the list: the match that
//! begins earliest cuts. If several begin there, the shortest is reported (it completes first, and the
//! text before it is the same); among equals, the one listed first.
//!
//! # Source
//!
//! Each stop string has a Knuth-Morris-Pratt automaton over bytes. Its state is the length of the
//! longest prefix of the stop string with which the text ends. So held-back text is always a prefix of
//! a stop string and needs no buffer.

use std::sync::Arc;

/// The result of a [`StopMatcher`] for the text so far.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use = "the sequence must end when a stop string was found"]
pub enum StopOutcome {
    /// No stop string so far.
    Continue,
    /// A stop string was found: the text ends before it.
    Stopped {
        /// The index in the list passed to [`StopStrings::new`].
        index: usize,
    },
}

/// The stop strings of a request, prepared for its matchers. Clones share them: prepared, they take nine times their bytes, and a
/// request may have hundreds of running answers.
#[derive(Debug, Clone)]
pub struct StopStrings {
    stops: Arc<[String]>,
    /// For each stop string, for each of its prefixes, by length - 1: the length of the longest shorter prefix with which it ends.
    borders: Arc<[Box<[usize]>]>,
}

impl StopStrings {
    /// Prepares stop strings. Empty ones are ignored later.
    #[must_use]
    pub fn new(stops: Arc<[String]>) -> Self {
        let borders = match stops.is_empty() {
            true => Arc::default(),
            false => stops
                .iter()
                .map(|stop| borders_of(stop.as_bytes()))
                .collect(),
        };
        Self { stops, borders }
    }

    /// The memory that `stops` take when they are prepared.
    pub(crate) fn prepared_bytes(stops: &[String]) -> usize {
        let bytes: usize = stops.iter().map(String::len).sum();
        bytes * (1 + size_of::<usize>())
    }

    /// A stop string, and the borders of its prefixes.
    #[inline]
    fn at(&self, index: usize) -> (&[u8], &[usize]) {
        (self.stops[index].as_bytes(), &self.borders[index])
    }
}

/// Cuts one sequence's text at the first of a list of stop strings.
///
/// # Contract
///
/// For every split of a text into [`push`](Self::push)es, the outputs and the final outcome are the
/// same. Each byte costs an amortized constant amount of work for each stop string; without stop
/// strings it only copies.
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
    stops: StopStrings,
    cursors: Box<[Cursor]>,
    /// Bytes of text taken so far.
    taken: usize,
    search: Search,
}

/// The progress of the search.
#[derive(Debug, Clone, Copy)]
enum Search {
    /// No stop string is complete.
    Looking,
    /// Stop string `index` is complete and began at byte `start`, but another that began earlier may
    /// still complete.
    Contested { index: usize, start: usize },
    /// Decided.
    Stopped { index: usize },
}

/// The automaton of one stop string.
#[derive(Debug)]
struct Cursor {
    /// The stop string's index in the list.
    index: usize,
    /// The length of the longest prefix with which the text ends; less than the stop string's length.
    matched: usize,
}

/// The end of the text taken so far, not yet output: a prefix of a stop string.
#[derive(Debug, Clone, Copy)]
struct Held {
    index: usize,
    len: usize,
}

impl StopMatcher {
    /// Returns a matcher at the start of a sequence. Ignores empty stop strings.
    #[must_use]
    pub fn new(stops: Arc<[String]>) -> Self {
        Self::of(StopStrings::new(stops))
    }

    /// Like [`Self::new`], with stop strings that are prepared already.
    #[must_use]
    pub fn of(stops: StopStrings) -> Self {
        let cursors = stops
            .stops
            .iter()
            .enumerate()
            .filter(|(_, stop)| !stop.is_empty())
            .map(|(index, _)| Cursor { index, matched: 0 })
            .collect();
        Self {
            stops,
            cursors,
            taken: 0,
            search: Search::Looking,
        }
    }

    /// Takes the next part of the text, and appends to `out` what certainly precedes any stop string.
    /// Once stopped, it drops all further text.
    #[inline]
    pub fn push(&mut self, text: &str, out: &mut String) -> StopOutcome {
        if self.cursors.is_empty() {
            out.push_str(text);
            return StopOutcome::Continue;
        }
        self.search(text, out)
    }

    /// Ends the text: appends what was held back, and decides a match that was waiting for an earlier
    /// one. Nothing is pushed after this.
    pub fn finish(&self, out: &mut String) -> StopOutcome {
        let held = self.held();
        let start = self.taken - held.len;
        match self.search {
            Search::Looking => {
                self.window(start, held, "").emit_until(self.taken, out);
                StopOutcome::Continue
            }
            Search::Contested { index, start: cut } => {
                self.window(start, held, "").emit_until(cut, out);
                StopOutcome::Stopped { index }
            }
            Search::Stopped { index } => StopOutcome::Stopped { index },
        }
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

    /// Advances every automaton by one byte, and notes the best complete match.
    #[inline]
    fn take(&mut self, byte: u8) {
        self.taken += 1;
        for cursor in &mut self.cursors {
            let (stop, borders) = self.stops.at(cursor.index);
            if cursor.take(stop, borders, byte) {
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

    /// Returns where the earliest match that may still complete begins; the text's end if there is
    /// none.
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

    /// Returns the text not yet output, of which `held` was held back. Called between pushes, when no
    /// automaton is inside a code point.
    fn window<'a>(&'a self, start: usize, held: Held, fresh: &'a str) -> Window<'a> {
        Window {
            start,
            held: self
                .stops
                .stops
                .get(held.index)
                .map_or("", |stop| &stop[..held.len]),
            fresh,
        }
    }
}

/// The text not yet output: held-back text, then new text.
struct Window<'a> {
    /// Where it begins, in bytes from the start of the sequence.
    start: usize,
    held: &'a str,
    fresh: &'a str,
}

impl Window<'_> {
    /// Outputs the text before byte `end` of the sequence, a boundary between code points.
    fn emit_until(&self, end: usize, out: &mut String) {
        let len = end - self.start;
        let from_held = len.min(self.held.len());
        out.push_str(&self.held[..from_held]);
        out.push_str(&self.fresh[..len - from_held]);
    }
}

/// The borders of a stop string's prefixes.
fn borders_of(stop: &[u8]) -> Box<[usize]> {
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
    borders.into()
}

impl Cursor {
    /// Advances by one byte; true if that completes the stop string, whose borders these are.
    #[inline]
    fn take(&mut self, stop: &[u8], borders: &[usize], byte: u8) -> bool {
        while self.matched > 0 && stop[self.matched] != byte {
            self.matched = borders[self.matched - 1];
        }
        if stop[self.matched] != byte {
            return false;
        }
        self.matched += 1;
        let is_complete = self.matched == stop.len();
        if is_complete {
            self.matched = borders[self.matched - 1];
        }
        is_complete
    }
}

#[cfg(test)]
mod tests;
