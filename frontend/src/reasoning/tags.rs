//! The parser of every dialect that puts its thoughts between two markers.

use crate::markup::{Deltas, MarkupParser, Prose, Scan, scan};

/// A dialect of two markers.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Tags {
    /// Begins the thoughts.
    pub(super) start: &'static str,
    /// Ends them.
    pub(super) end: &'static str,
    /// Whether the answer begins inside when the prompt does not say.
    pub(super) starts_inside: bool,
    /// Markers of tool calls that end the thoughts too: some models do without the end.
    pub(super) ends_at: &'static [&'static str],
    /// Markers around the content, which mean nothing.
    pub(super) dropped: &'static [&'static str],
}

impl Tags {
    pub(super) fn markers(&self) -> Vec<&'static str> {
        let mut markers = vec![self.start, self.end];
        markers.extend(self.dropped);
        markers
    }
}

pub(super) struct TagsParser {
    tags: &'static Tags,
    has_tools: bool,
    is_inside: bool,
    content: Prose,
    reasoning: Prose,
    /// Text that may be the beginning of a marker.
    held: String,
}

impl TagsParser {
    pub(super) fn new(tags: &'static Tags, is_inside: bool, has_tools: bool) -> Self {
        Self {
            tags,
            has_tools,
            is_inside,
            content: Prose::content(),
            reasoning: Prose::reasoning(),
            held: String::new(),
        }
    }

    /// The markers that mean something now; the first two are the dialect's own.
    fn scan(&self) -> Scan {
        let more = match (self.is_inside, self.has_tools) {
            (true, true) => self.tags.ends_at,
            (true, false) => &[],
            (false, _) => self.tags.dropped,
        };
        let own = [self.tags.start, self.tags.end];
        scan(&self.held, own.into_iter().chain(more.iter().copied()))
    }

    fn give(&mut self, len: usize, out: &mut Deltas) {
        let prose = if self.is_inside {
            &mut self.reasoning
        } else {
            &mut self.content
        };
        prose.push(self.held.get(..len).unwrap_or_default(), out);
        self.held.drain(..len);
    }

    /// Takes what the scan has found: text, or a marker that nothing stands before. Whether to go on.
    fn step(&mut self, is_in_call: bool, out: &mut Deltas) -> bool {
        let (which, start, end) = match self.scan() {
            Scan::Text { sure } => {
                self.give(sure, out);
                return false;
            }
            Scan::Marker { which, start, end } => (which, start, end),
        };
        if start > 0 {
            self.give(start, out);
            return true;
        }
        if is_in_call && !self.is_inside {
            self.give(end, out);
            return true;
        }
        let is_own = which < 2;
        // A marker of a tool call is the tool parser's to read.
        let taken = if is_own || !self.is_inside { end } else { 0 };
        self.held.drain(..taken);
        self.content.markup();
        self.reasoning.markup();
        self.is_inside = which == 0;
        true
    }
}

impl MarkupParser for TagsParser {
    fn push(&mut self, text: &str, out: &mut Deltas) {
        self.held.push_str(text);
        while self.step(false, out) {}
    }

    fn push_to_marker(&mut self, text: &str, is_in_call: bool, out: &mut Deltas) -> bool {
        self.held.push_str(text);
        self.step(is_in_call, out)
    }

    fn finish(&mut self, out: &mut Deltas) {
        self.give(self.held.len(), out);
        self.content.finish(out);
    }

    fn is_thinking(&self) -> Option<bool> {
        Some(self.is_inside)
    }
}
