//! The parser of every dialect that puts its thoughts between two markers.

use crate::markup::{Deltas, MarkupParser, Prose, Scan, scan, trim_start_len};

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
    /// Markers that mean nothing as the first and the last of the content, and are text anywhere else.
    pub(super) frame: &'static [&'static str],
    /// Markers of tool calls that may follow the last of the frame: the content ends there too.
    pub(super) frame_ends_at: &'static [&'static str],
}

impl Tags {
    pub(super) fn markers(&self) -> Vec<&'static str> {
        let mut markers = vec![self.start, self.end];
        markers.extend(self.dropped);
        markers.extend(self.frame);
        markers
    }
}

/// How far the content's frame has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Frame {
    /// There was no content yet.
    Awaited,
    /// Its beginning was there.
    Open,
    /// The content began without.
    Absent,
    /// Its end was there.
    Closed,
}

/// Whether a marker is the end of a frame, by what is held behind it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum FrameEnd {
    /// It is: a tool call follows.
    Sure,
    /// White space follows, and it may be the last, or a tool call come.
    Possible,
    /// It is text, for text follows.
    Text,
}

/// White space that is longer than this is not that behind the end of a frame, in bytes.
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

    /// The marker of the frame that may come now.
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

    /// The markers that mean something now; the first two are the dialect's own, and the frame's is behind the dropped.
    fn scan(&self) -> Scan {
        let more = match (self.is_inside, self.has_tools) {
            (true, true) => self.tags.ends_at,
            (true, false) => &[],
            (false, _) => self.tags.dropped,
        };
        let own = [self.tags.start, self.tags.end];
        let markers = own.into_iter().chain(more.iter().copied());
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
        if !self.is_inside && which >= 2 + self.tags.dropped.len() {
            if self.frame == Frame::Open {
                return self.take_end(end, out);
            }
            self.frame = Frame::Open;
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

    /// Takes the frame's end, so many bytes, as text if more text follows; while that is open it waits. Whether to go on.
    fn take_end(&mut self, end: usize, out: &mut Deltas) -> bool {
        match self.frame_end(end) {
            FrameEnd::Sure => self.close(end),
            FrameEnd::Possible => return false,
            FrameEnd::Text => self.give(end, out),
        }
        true
    }

    /// What the marker before `from` is.
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

    /// Drops the frame's end, so many bytes.
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
