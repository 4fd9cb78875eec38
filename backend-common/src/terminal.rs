//! What a terminal may get of a text of others. Whoever shows people what engines, workers and models say calls it; it knows no
//! terminal.

/// Whether a terminal shows a character and obeys nothing in it: no control character, but for ends of lines and tabs.
#[must_use]
pub fn is_shown(sign: char) -> bool {
    !sign.is_control() || matches!(sign, '\n' | '\t')
}

/// A text of others, without what a terminal would obey: what is not [shown](is_shown) is escaped.
#[must_use]
pub fn escaped(text: &str) -> String {
    let mut shown = String::with_capacity(text.len());
    for sign in text.chars() {
        match is_shown(sign) {
            true => shown.push(sign),
            false => shown.extend(sign.escape_default()),
        }
    }
    shown
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_terminal_obeys_nothing_in_a_text_of_others() {
        let text = "m\x1b[2J\u{9b}31m\x07\r\n\té";
        assert_eq!(escaped(text), "m\\u{1b}[2J\\u{9b}31m\\u{7}\\r\n\té");
    }
}
