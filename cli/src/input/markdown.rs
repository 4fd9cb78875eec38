//! [`Markdown`]: styles text that arrives in pieces, without delay.
//!
//! It supports what models write most: headings, lists, quotes, fences, and bold, italic and code within a line. The first
//! characters of a line and stars wait until their meaning is clear; everything else is shown immediately. Control characters
//! never reach the terminal: a model could move the cursor and overwrite earlier text.

use std::fmt::Write;

use genset_backend_common::terminal::is_shown;

/// The longest undecided beginning of a line: `######` and a space, or the longest number of a list.
const LONGEST_BEGINNING: usize = 8;

/// The fewest marks of a fence.
const LEAST_FENCE: usize = 3;

const RESET: &str = "\x1b[0m";
const DIM: &str = "\x1b[2m";
const BOLD: &str = "\x1b[1m";
const ITALIC: &str = "\x1b[3m";
const CODE: &str = "\x1b[36m";

/// The state of a text that is shown on a terminal.
#[derive(Debug, Default)]
pub(super) struct Markdown {
    /// Characters whose meaning depends on the next ones.
    held: String,
    place: Place,
    is_bold: bool,
    is_italic: bool,
    is_code: bool,
    is_heading: bool,
    /// The previous character, which says whether a star is between words. In the line of a fence, its mark while it goes on.
    before: Option<char>,
    /// The fence of the block, which ends it.
    fence: Option<Fence>,
}

/// At least three backticks or tildes. A longer fence may have shorter ones in its block.
#[derive(Debug, Clone, Copy)]
struct Fence {
    mark: char,
    length: usize,
}

#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
enum Place {
    #[default]
    LineStart,
    InLine,
    /// Between fences, at the start of a line.
    FencedStart,
    InFenced,
    /// In the line of a fence. `opens` says whether the next line is inside.
    Fence {
        opens: bool,
    },
}

/// The meaning of a line's beginning.
enum Beginning {
    Undecided,
    Text,
    Heading,
    Fence,
    Item(String),
    Quote,
}

impl Markdown {
    /// Shows a piece: appends the terminal output to `out`.
    pub(super) fn feed(&mut self, piece: &str, out: &mut String) {
        for sign in piece.chars().filter(|sign| is_shown(*sign)) {
            self.take(sign, out);
        }
    }

    /// Shows the held characters, and ends all styles.
    pub(super) fn finish(&mut self, out: &mut String) {
        self.release(out);
        // What the beginning of a line held may end with stars.
        self.release(out);
        out.push_str(RESET);
        *self = Self::default();
    }

    fn take(&mut self, sign: char, out: &mut String) {
        match self.place {
            Place::LineStart | Place::FencedStart => self.take_beginning(sign, out),
            Place::InLine => self.take_inline(sign, out),
            Place::InFenced | Place::Fence { .. } => {
                self.measure(sign);
                out.push(sign);
                if sign == '\n' {
                    self.end_line(out);
                }
            }
        }
    }

    /// A fence is as long as its marks go on.
    fn measure(&mut self, sign: char) {
        if let Some(fence) = &mut self.fence
            && self.before == Some(fence.mark)
        {
            match sign == fence.mark {
                true => fence.length += 1,
                false => self.before = None,
            }
        }
    }

    fn take_beginning(&mut self, sign: char, out: &mut String) {
        self.held.push(sign);
        let is_fenced = self.place == Place::FencedStart;
        match beginning(&self.held, self.fence) {
            Beginning::Undecided => {}
            Beginning::Fence => {
                self.place = Place::Fence { opens: !is_fenced };
                if !is_fenced {
                    self.before = Some(sign);
                    self.fence = Some(Fence {
                        mark: sign,
                        length: LEAST_FENCE,
                    });
                }
                let _ = write!(out, "{RESET}{DIM}{}", std::mem::take(&mut self.held));
            }
            Beginning::Heading => {
                self.held.clear();
                self.place = Place::InLine;
                self.is_heading = true;
                self.style(out);
            }
            Beginning::Item(shown) => {
                self.held.clear();
                self.place = Place::InLine;
                out.push_str(&shown);
            }
            Beginning::Quote => {
                self.held.clear();
                self.place = Place::InLine;
                let _ = write!(out, "{DIM}│{RESET} ");
            }
            Beginning::Text => self.release(out),
        }
    }

    /// Releases the held characters as text.
    fn release(&mut self, out: &mut String) {
        let held = std::mem::take(&mut self.held);
        match self.place {
            Place::FencedStart => {
                self.place = Place::InFenced;
                let _ = write!(out, "{RESET}{CODE}{held}");
                if held.ends_with('\n') {
                    self.end_line(out);
                }
            }
            Place::LineStart => {
                self.place = Place::InLine;
                held.chars().for_each(|sign| self.take_inline(sign, out));
            }
            Place::InLine => match held.as_str() {
                "*" => self.star(' ', out),
                "**" => self.two_stars(' ', out),
                _ => out.push_str(&held),
            },
            Place::InFenced | Place::Fence { .. } => {}
        }
    }

    fn take_inline(&mut self, sign: char, out: &mut String) {
        match (self.held.as_str(), sign) {
            ("*", '*') => self.held.push(sign),
            ("*", after) => {
                self.held.clear();
                self.star(after, out);
                self.take_inline(after, out);
            }
            ("**", after) => {
                self.held.clear();
                self.two_stars(after, out);
                self.take_inline(after, out);
            }
            ("\\", escaped) => {
                self.held.clear();
                if !escaped.is_ascii_punctuation() {
                    out.push('\\');
                }
                self.show(escaped, out);
            }
            (_, '*' | '\\') if !self.is_code => self.held.push(sign),
            (_, '`') => {
                self.is_code = !self.is_code;
                self.style(out);
            }
            (_, sign) => self.show(sign, out),
        }
    }

    fn show(&mut self, sign: char, out: &mut String) {
        out.push(sign);
        self.before = Some(sign);
        if sign == '\n' {
            self.end_line(out);
        }
    }

    /// Handles a single star: it begins or ends italics, or is a plain star.
    fn star(&mut self, after: char, out: &mut String) {
        let is_after_space = self.before.is_none_or(char::is_whitespace);
        let begins = !self.is_italic && self.may_begin(after);
        let ends = self.is_italic && !is_after_space;
        if begins || ends {
            self.is_italic = !self.is_italic;
            self.style(out);
        } else {
            self.show('*', out);
        }
    }

    /// Handles two stars: they begin or end bold, or are plain stars.
    fn two_stars(&mut self, after: char, out: &mut String) {
        if self.is_bold || self.may_begin(after) {
            self.is_bold = !self.is_bold;
            self.style(out);
        } else {
            self.show('*', out);
            self.show('*', out);
        }
    }

    /// Whether stars before `after` may begin a style. Those of arithmetic do not: `2*3`, `2 ** 10`. A style without an end would
    /// hide them, because the rest of the line is not known yet.
    fn may_begin(&self, after: char) -> bool {
        let is_within = after.is_ascii_alphanumeric()
            && self
                .before
                .is_some_and(|before| before.is_ascii_alphanumeric());
        !is_within && !after.is_whitespace()
    }

    fn end_line(&mut self, out: &mut String) {
        let is_fenced = match self.place {
            Place::Fence { opens } => opens,
            Place::InFenced | Place::FencedStart => true,
            Place::LineStart | Place::InLine => false,
        };
        let is_styled = self.is_bold || self.is_italic || self.is_code || self.is_heading;
        if is_styled || is_fenced || matches!(self.place, Place::Fence { .. }) {
            out.push_str(RESET);
        }
        let place = match is_fenced {
            true => Place::FencedStart,
            false => Place::LineStart,
        };
        *self = Self {
            place,
            fence: self.fence.filter(|_| is_fenced),
            ..Self::default()
        };
    }

    /// Writes all current styles.
    fn style(&self, out: &mut String) {
        out.push_str(RESET);
        if self.is_bold || self.is_heading {
            out.push_str(BOLD);
        }
        if self.is_italic {
            out.push_str(ITALIC);
        }
        if self.is_code {
            out.push_str(CODE);
        }
    }
}

/// What a line begins with, in a block with this fence or outside.
fn beginning(line: &str, fence: Option<Fence>) -> Beginning {
    let text = line.trim_start_matches(' ');
    let indent = line.len() - text.len();
    let Some(first) = text.chars().next() else {
        return match line.len() <= LONGEST_BEGINNING {
            true => Beginning::Undecided,
            false => Beginning::Text,
        };
    };
    let is_mark = fence.map_or(matches!(first, '`' | '~'), |fence| first == fence.mark);
    let least = fence.map_or(LEAST_FENCE, |fence| fence.length);
    if is_mark && indent + 2 <= LONGEST_BEGINNING && text.chars().all(|sign| sign == first) {
        return match text.len() < least {
            true => Beginning::Undecided,
            false => Beginning::Fence,
        };
    }
    if fence.is_some() {
        return Beginning::Text;
    }
    if text.len() <= 6 && text.bytes().all(|byte| byte == b'#') {
        return Beginning::Undecided;
    }
    if matches!(text, "-" | "*" | "+" | ">") {
        return Beginning::Undecided;
    }
    match text.strip_suffix(' ') {
        Some(marks) if marks.bytes().all(|byte| byte == b'#') => Beginning::Heading,
        Some("-" | "*" | "+") => Beginning::Item(format!("{:indent$}• ", "")),
        Some(">") => Beginning::Quote,
        _ => Beginning::Text,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The output for a text, with the styles by name.
    fn shown(text: &str, piece: usize) -> String {
        let (mut markdown, mut out) = (Markdown::default(), String::new());
        let signs: Vec<char> = text.chars().collect();
        for piece in signs.chunks(piece) {
            markdown.feed(&piece.iter().collect::<String>(), &mut out);
        }
        markdown.finish(&mut out);
        for (code, name) in [
            (RESET, "{/}"),
            (DIM, "{dim}"),
            (BOLD, "{bold}"),
            (ITALIC, "{italic}"),
            (CODE, "{code}"),
        ] {
            out = out.replace(code, name);
        }
        out
    }

    #[test]
    fn what_models_write_is_shown_with_style_in_pieces_of_any_size() {
        for (text, expected) in [
            ("plain text", "plain text{/}"),
            ("a **b** c", "a {/}{bold}b{/} c{/}"),
            ("*a* b", "{/}{italic}a{/} b{/}"),
            ("2 * 3 * 4", "2 * 3 * 4{/}"),
            ("5*4 = 2*10", "5*4 = 2*10{/}"),
            ("2**10 or 2 ** 10", "2**10 or 2 ** 10{/}"),
            ("日**本**語", "日{/}{bold}本{/}語{/}"),
            ("it *ends*", "it {/}{italic}ends{/}{/}"),
            ("it **ends**", "it {/}{bold}ends{/}{/}"),
            ("a line\n*", "a line\n*{/}"),
            ("`a*b` c", "{/}{code}a*b{/} c{/}"),
            ("# Title\ntext", "{/}{bold}Title\n{/}text{/}"),
            ("#hashtag", "#hashtag{/}"),
            ("- one\n  * two\n-5", "• one\n  • two\n-5{/}"),
            ("> said\n", "{dim}│{/} said\n{/}"),
            (
                "```rust\nlet a = b ** c;\n```\nafter",
                "{/}{dim}```rust\n{/}{/}{code}let a = b ** c;\n{/}{/}{dim}```\n{/}after{/}",
            ),
            (
                "~~~\na\n~~~\nb",
                "{/}{dim}~~~\n{/}{/}{code}a\n{/}{/}{dim}~~~\n{/}b{/}",
            ),
            (
                "````md\n```\n````\nb",
                "{/}{dim}````md\n{/}{/}{code}```\n{/}{/}{dim}````\n{/}b{/}",
            ),
            ("~~gone~~", "~~gone~~{/}"),
            (r"5 \* 3 C:\dir", r"5 * 3 C:\dir{/}"),
            ("snake_case_name", "snake_case_name{/}"),
            ("an open **end\nnext", "an open {/}{bold}end\n{/}next{/}"),
            ("ends with *", "ends with *{/}"),
        ] {
            for piece in [1, 2, 3, 100] {
                assert_eq!(shown(text, piece), expected, "{text:?} by {piece}");
            }
        }
    }

    #[test]
    fn a_model_cannot_move_the_cursor() {
        assert_eq!(shown("a\x1b[2Jb\x07\u{9b}1A\rc", 1), "a[2Jb1Ac{/}");
    }

    proptest! {
        /// Only marks are removed, and the splitting into pieces does not matter.
        #[test]
        fn letters_are_all_shown(text in "[a-z *_`#>\\-\\\\\n]{0,200}", piece in 1_usize..9) {
            let whole = shown(&text, usize::MAX);
            prop_assert_eq!(&shown(&text, piece), &whole);
            let letters = |text: &str| text.chars().filter(char::is_ascii_lowercase).collect::<String>();
            let mut bare = whole;
            for name in ["{/}", "{dim}", "{bold}", "{italic}", "{code}"] {
                bare = bare.replace(name, "");
            }
            prop_assert_eq!(letters(&bare), letters(&text));
        }
    }
}
