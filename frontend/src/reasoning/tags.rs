//! The parser for dialects that put reasoning between two markers.

use crate::markup::{Deltas, MarkupParser, Prose, Scan, scan, trim_start_len};

/// A dialect with two markers.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Tags {
    /// Begins the reasoning.
    pub(super) start: &'static str,
    /// Ends it.
    pub(super) end: &'static str,
    /// Whether the answer begins inside the reasoning if the prompt does not tell.
    pub(super) starts_inside: bool,
    /// Markers that also end the reasoning, since some models omit the end marker. Those of tool calls do so only if the request
    /// has tools; those that are in [`Tags::dropped`] too begin the content.
    pub(super) ends_at: &'static [&'static str],
    /// Markers around the content, which are dropped.
    pub(super) dropped: &'static [&'static str],
    /// Markers that are dropped at the beginning and the end of the content, and are text anywhere else.
    pub(super) frame: &'static [&'static str],
    /// Markers of tool calls that may follow the end of the frame: the content ends there too.
    pub(super) frame_ends_at: &'static [&'static str],
    /// Whether the reasoning stays in the content.
    pub(super) is_shown: bool,
    /// The same dialect with other markers, if the prompt ends with one of them.
    pub(super) other: Option<&'static Tags>,
}

impl Tags {
    pub(super) fn markers(&self) -> Vec<&'static str> {
        let mut markers = vec![self.start, self.end];
        markers.extend(self.dropped);
        markers.extend(self.frame);
        markers.extend(self.other.into_iter().flat_map(Tags::markers));
        markers
    }
}

/// The state of the content's frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Frame {
    /// No content has come yet.
    Awaited,
    /// The frame has begun.
    Open,
    /// The content began without a frame.
    Absent,
    /// The frame has ended.
    Closed,
}

/// Whether a marker ends the frame, judged by the text after it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum FrameEnd {
    /// Yes: a tool call follows.
    Sure,
    /// White space follows: the answer may end, or a tool call may come.
    Possible,
    /// No: text follows.
    Text,
}

/// White space longer than this (in bytes) does not follow the end of a frame.
const MAX_BLANK_BYTES: usize = 64;

pub(super) struct TagsParser {
    tags: &'static Tags,
    has_tools: bool,
    is_inside: bool,
    frame: Frame,
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
            frame: Frame::Awaited,
            content: Prose::content(),
            reasoning: Prose::reasoning(),
            held: String::new(),
        }
    }

    /// The frame's marker that may come now.
    fn framing(&self) -> &'static [&'static str] {
        let frame = self.tags.frame;
        if self.is_inside {
            return &[];
        }
        let framing = match self.frame {
            Frame::Awaited => frame.get(..1),
            Frame::Open => frame.get(1..),
            Frame::Absent | Frame::Closed => None,
        };
        framing.unwrap_or_default()
    }

    /// Scans for the markers that are valid now: first the dialect's two, then the others that end the reasoning (inside it) or
    /// the dropped ones (outside), then the frame's.
    fn scan(&self) -> Scan {
        let tags = self.tags;
        let more = if self.is_inside {
            tags.ends_at
        } else {
            tags.dropped
        };
        let is_valid = |marker: &&str| self.has_tools || tags.dropped.contains(marker);
        let more = more.iter().copied().filter(is_valid);
        let markers = [tags.start, tags.end].into_iter().chain(more);
        scan(&self.held, markers.chain(self.framing().iter().copied()))
    }

    fn give(&mut self, len: usize, out: &mut Deltas) {
        let text = self.held.get(..len).unwrap_or_default();
        if self.is_inside {
            self.reasoning.push(text, out);
        } else {
            if self.frame == Frame::Awaited && !text.trim().is_empty() {
                self.frame = Frame::Absent;
            }
            self.content.push(text, out);
        }
        self.held.drain(..len);
    }

    /// Takes what the scan found: text, or a marker at the beginning. Returns whether to continue.
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
        if !self.is_inside && which >= 2 + self.tags.dropped.len() {
            if self.frame == Frame::Open {
                return self.take_end(end, out);
            }
            self.frame = Frame::Open;
        }
        let is_own = which < 2;
        // The tool parser reads the marker of a tool call.
        let taken = if is_own || !self.is_inside { end } else { 0 };
        self.held.drain(..taken);
        self.content.markup();
        self.reasoning.markup();
        self.is_inside = which == 0;
        true
    }

    /// Takes the frame's end marker (`end` bytes) as text if more text follows; waits while that is open. Returns whether to
    /// continue.
    fn take_end(&mut self, end: usize, out: &mut Deltas) -> bool {
        match self.frame_end(end) {
            FrameEnd::Sure => self.close(end),
            FrameEnd::Possible => return false,
            FrameEnd::Text => self.give(end, out),
        }
        true
    }

    /// Classifies the marker before `from`.
    fn frame_end(&self, from: usize) -> FrameEnd {
        let rest = self.held.get(from..).unwrap_or_default();
        let blank = trim_start_len(rest);
        let behind = rest.get(blank..).unwrap_or_default();
        let calls = self.tags.frame_ends_at;
        if blank > MAX_BLANK_BYTES {
            FrameEnd::Text
        } else if calls.iter().any(|call| behind.starts_with(*call)) {
            FrameEnd::Sure
        } else if behind.is_empty() || calls.iter().any(|call| call.starts_with(behind)) {
            FrameEnd::Possible
        } else {
            FrameEnd::Text
        }
    }

    /// Drops the frame's end marker (`end` bytes).
    fn close(&mut self, end: usize) {
        self.held.drain(..end);
        self.content.markup();
        self.frame = Frame::Closed;
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
        let mut framing = self.framing().iter();
        let last = framing.find(|marker| self.held.starts_with(**marker));
        if self.frame == Frame::Open
            && let Some(last) = last
            && self.frame_end(last.len()) != FrameEnd::Text
        {
            self.close(last.len());
        }
        self.give(self.held.len(), out);
        self.content.finish(out);
    }

    fn is_thinking(&self) -> Option<bool> {
        Some(self.is_inside)
    }
}
