//! Sanitizes untrusted text for terminals. Callers that print text from engines, workers or models use it; it does no I/O.

/// Returns whether a terminal only displays a character: no control character except newlines and tabs.
#[must_use]
pub fn is_shown(sign: char) -> bool {
    !sign.is_control() || matches!(sign, '\n' | '\t')
}

/// Escapes the characters of an untrusted text that a terminal would interpret: those that are not [shown](is_shown).
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
