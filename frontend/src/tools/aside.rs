//! [`Aside`]: a call's text between its parameters, which becomes content after the call. The APIs' encoders rely on a call's
//! arguments being contiguous.

use crate::markup::{Delta, Deltas, Prose};

/// The limit in bytes on kept text: it is held in memory until the call ends.
const MAX_BYTES: usize = 64 << 10;

/// Content that waits for the end of its call.
#[derive(Default)]
pub(super) struct Aside {
    deltas: Deltas,
    /// The length in bytes of the text that came.
    bytes: usize,
}

impl Aside {
    /// Takes text of this content.
    pub(super) fn push(&mut self, text: &str, content: &mut Prose) {
        let room = MAX_BYTES.saturating_sub(self.bytes);
        self.bytes = self.bytes.saturating_add(text.len());
        let kept = &text[..text.floor_char_boundary(room)];
        content.push(kept, &mut self.deltas);
    }

    /// The arguments have ended: emits the content that waited.
    pub(super) fn give(&mut self, out: &mut Deltas) {
        for delta in self.deltas.iter() {
            if let Delta::Content(text) = delta {
                out.content(text);
            }
        }
        self.deltas.clear();
        self.bytes = 0;
    }
}
