//! [`Screen`]: shows an answer as it arrives, with colour on a terminal and unchanged into a pipe.

use std::io::IsTerminal;

use genset_backend_common::terminal::is_shown;
use genset_frontend::markup::Delta;
use genset_runtime::shows_colours;

use super::markdown::Markdown;
use super::{escaped, note, print};

/// The destination of an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Screen {
    /// A terminal that shows colours.
    Colored,
    /// A terminal that cannot or must not show colours.
    Plain,
    /// A terminal that gets only the answer's text.
    Bare,
    /// Not a terminal; gets only the answer's text.
    Pipe,
}

impl Screen {
    /// The kind of standard output. Respects `NO_COLOR` and a dumb terminal.
    pub(super) fn of_output() -> Self {
        let output = std::io::stdout();
        if !output.is_terminal() {
            Self::Pipe
        } else if shows_colours(&output) {
            Self::Colored
        } else {
            Self::Plain
        }
    }

    /// Like [`Self::of_output`], for the answer's text only.
    pub(super) fn of_answer() -> Self {
        match std::io::stdout().is_terminal() {
            true => Self::Bare,
            false => Self::Pipe,
        }
    }

    /// Whether it gets only the answer's text.
    fn is_of_answer(self) -> bool {
        matches!(self, Self::Bare | Self::Pipe)
    }

    /// Shows text that is not part of an answer.
    pub(super) fn tell(self, text: &str) {
        match self {
            Self::Colored | Self::Plain => print(&escaped(text)),
            Self::Bare | Self::Pipe => note(text.trim_end_matches('\n')),
        }
    }

    /// A text of little importance.
    pub(super) fn aside(self, text: &str) -> String {
        match self {
            Self::Colored => format!("\x1b[2m{text}\x1b[0m"),
            Self::Plain | Self::Bare | Self::Pipe => text.to_owned(),
        }
    }
}

/// The state of one answer on the screen. Dropping this shows the rest, and ends all styles.
#[derive(Debug)]
pub(super) struct Shown {
    screen: Screen,
    markdown: Markdown,
    /// The kind of the last piece; `None` before the first.
    part: Option<Part>,
    out: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Part {
    Reasoning,
    Content,
    Call,
}

impl Shown {
    pub(super) fn on(screen: Screen) -> Self {
        Self {
            screen,
            markdown: Markdown::default(),
            part: None,
            out: String::new(),
        }
    }

    /// Adds a piece; [`Self::flush`] shows it.
    pub(super) fn take(&mut self, delta: Delta<'_>) {
        match delta {
            Delta::Content("") | Delta::Reasoning("") => {}
            Delta::Content(text) => self.content(text),
            Delta::Reasoning(text) => self.beside(Part::Reasoning, "reasoning: ", text),
            Delta::ToolCall { name, .. } => {
                self.part = self.part.filter(|part| *part != Part::Call);
                self.beside(Part::Call, "call: ", &format!("{name} "));
            }
            Delta::Arguments { text, .. } => self.beside(Part::Call, "call: ", text),
        }
    }

    /// Shows the added pieces.
    pub(super) fn flush(&mut self) {
        if !self.out.is_empty() {
            print(&self.out);
            self.out.clear();
        }
    }

    fn content(&mut self, text: &str) {
        if self.part.is_some_and(|part| part != Part::Content) {
            self.out.push_str("\n\n");
        }
        self.part = Some(Part::Content);
        match self.screen {
            Screen::Colored => self.markdown.feed(text, &mut self.out),
            Screen::Plain | Screen::Bare => {
                self.out.extend(text.chars().filter(|sign| is_shown(*sign)));
            }
            Screen::Pipe => self.out.push_str(text),
        }
    }

    /// Adds a text beside the answer. Does nothing if only the answer's text is shown.
    fn beside(&mut self, part: Part, word: &str, text: &str) {
        if self.screen.is_of_answer() {
            return;
        }
        if self.part != Some(part) {
            if self.part.is_some() {
                if self.screen == Screen::Colored {
                    self.markdown.finish(&mut self.out);
                }
                self.out.push('\n');
            }
            self.part = Some(part);
            if self.screen == Screen::Plain || part == Part::Call {
                self.out.push_str(&self.screen.aside(word));
            }
        }
        let text: String = text.chars().filter(|sign| is_shown(*sign)).collect();
        self.out.push_str(&self.screen.aside(&text));
    }
}

impl Drop for Shown {
    fn drop(&mut self) {
        if self.screen == Screen::Colored {
            self.markdown.finish(&mut self.out);
        }
        self.flush();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(screen: Screen, deltas: &[Delta<'_>]) -> String {
        let mut shown = Shown::on(screen);
        deltas.iter().for_each(|delta| shown.take(*delta));
        std::mem::take(&mut shown.out)
    }

    const ANSWER: [Delta<'_>; 6] = [
        Delta::Reasoning("Hm"),
        Delta::Reasoning("\x1b[2J."),
        Delta::Content("I **look**."),
        Delta::ToolCall {
            index: 0,
            name: "weather",
            id: "",
            is_custom: false,
        },
        Delta::Arguments {
            index: 0,
            text: "{}",
            is_custom: false,
        },
        Delta::Content("x\x07"),
    ];

    #[test]
    fn a_pipe_gets_the_text_alone() {
        assert_eq!(shown(Screen::Pipe, &ANSWER), "I **look**.x\x07");
    }

    #[test]
    fn a_terminal_gets_no_control_characters_with_the_text_alone_either() {
        assert_eq!(shown(Screen::Bare, &ANSWER), "I **look**.x");
    }

    #[test]
    fn a_terminal_without_colours_gets_words_in_their_place() {
        assert_eq!(
            shown(Screen::Plain, &ANSWER),
            "reasoning: Hm[2J.\n\nI **look**.\ncall: weather {}\n\nx"
        );
    }

    #[test]
    fn reasoning_and_calls_are_dimmed() {
        assert_eq!(
            shown(Screen::Colored, &ANSWER[..4]),
            "\x1b[2mHm\x1b[0m\x1b[2m[2J.\x1b[0m\n\nI \x1b[0m\x1b[1mlook\x1b[0m.\x1b[0m\n\x1b[2mcall: \x1b[0m\x1b[2mweather \x1b[0m"
        );
    }
}
