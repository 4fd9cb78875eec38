//! Finds the end of a JSON value, one character at a time.

/// Follows one JSON value. It checks brackets and strings, not grammar.
#[derive(Debug, Default)]
pub(crate) struct ValueScan {
    depth: usize,
    has_begun: bool,
    is_in_string: bool,
    is_escaped: bool,
}

/// What a character means for the value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ValueStep {
    /// A part of the value; more follows.
    Inside,
    /// Its last character.
    Last,
    /// The first character after it, for a number or a word.
    Behind,
}

impl ValueScan {
    pub(crate) fn is_in_string(&self) -> bool {
        self.is_in_string
    }

    /// Takes the next character, beginning with the value's first.
    pub(crate) fn take(&mut self, c: char) -> ValueStep {
        let is_first = !std::mem::replace(&mut self.has_begun, true);
        if self.is_in_string {
            return self.take_in_string(c);
        }
        match c {
            '"' => {
                self.is_in_string = true;
                ValueStep::Inside
            }
            '{' | '[' => {
                self.depth += 1;
                ValueStep::Inside
            }
            '}' | ']' if self.depth > 0 => {
                self.depth -= 1;
                self.step()
            }
            '}' | ']' | ',' if self.depth == 0 && !is_first => ValueStep::Behind,
            _ if self.depth == 0 && c.is_whitespace() => ValueStep::Behind,
            _ => ValueStep::Inside,
        }
    }

    fn take_in_string(&mut self, c: char) -> ValueStep {
        match c {
            _ if std::mem::take(&mut self.is_escaped) => ValueStep::Inside,
            '\\' => {
                self.is_escaped = true;
                ValueStep::Inside
            }
            '"' => {
                self.is_in_string = false;
                self.step()
            }
            _ => ValueStep::Inside,
        }
    }

    /// The step after something was closed.
    fn step(&self) -> ValueStep {
        if self.depth == 0 {
            ValueStep::Last
        } else {
            ValueStep::Inside
        }
    }
}
