//! [`BareValue`]: converts a parameter's value from unquoted text to JSON.

use serde_json::Value;

use crate::markup::Deltas;

/// The current value. A string is emitted as it arrives; any other value when it is complete.
pub(in crate::tools) struct BareValue {
    is_string: bool,
    is_on_lines: bool,
    has_begun: bool,
    /// The trailing line break, which may belong to the value's frame; or the whole text, if it is not a string.
    held: String,
}

impl BareValue {
    /// With `is_on_lines`, one line break before the value and one after it are not part of it.
    pub(in crate::tools) fn new(is_string: bool, is_on_lines: bool) -> Self {
        Self {
            is_string,
            is_on_lines,
            has_begun: false,
            held: String::new(),
        }
    }

    pub(in crate::tools) fn push(&mut self, text: &str, mut emit: impl FnMut(&str)) {
        if text.is_empty() {
            return;
        }
        let is_first = !std::mem::replace(&mut self.has_begun, true);
        if is_first && self.is_string {
            emit("\"");
        }
        let frame = if is_first && self.is_on_lines {
            "\n"
        } else {
            ""
        };
        self.held.push_str(text.strip_prefix(frame).unwrap_or(text));
        if !self.is_string {
            return;
        }
        let sure = match self.held.strip_suffix('\n') {
            Some(sure) if self.is_on_lines => sure.len(),
            _ => self.held.len(),
        };
        if sure > 0 {
            emit(escaped(&Value::from(&self.held[..sure]).to_string()));
            self.held.drain(..sure);
        }
    }

    /// Ends the value. `guess` converts text that is not a string to JSON.
    pub(in crate::tools) fn close(&mut self, guess: impl FnOnce(&str) -> String, out: &mut Deltas) {
        if self.is_string {
            out.arguments(if self.has_begun { "\"" } else { "\"\"" });
            return;
        }
        let text = match self.held.strip_suffix('\n') {
            Some(text) if self.is_on_lines => text,
            _ => &self.held,
        };
        out.arguments(&guess(text));
    }

    /// The answer ends within the value, which is emitted as it was written.
    pub(in crate::tools) fn cut_short(&mut self, out: &mut Deltas) {
        if self.is_string {
            let rest = Value::from(self.held.as_str()).to_string();
            out.arguments(escaped(&rest));
        } else {
            out.arguments(&self.held);
        }
    }
}

/// A JSON string's text without its quotes.
fn escaped(json: &str) -> &str {
    json.strip_prefix('"')
        .and_then(|json| json.strip_suffix('"'))
        .unwrap_or(json)
}
