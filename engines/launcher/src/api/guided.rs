//! Grammars in the servers' notations.

use std::fmt::Write as _;

/// A regular expression that matches one of several texts.
pub(super) fn choice_regex(choices: &[String]) -> String {
    let escaped: Vec<String> = choices.iter().map(|choice| escape_regex(choice)).collect();
    format!("({})", escaped.join("|"))
}

fn escape_regex(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for c in text.chars() {
        if r"\.+*?()|[]{}^$#&-~/".contains(c) {
            escaped.push('\\');
        }
        escaped.push(c);
    }
    escaped
}

/// A llama.cpp grammar (GBNF) that matches one of several texts.
pub(super) fn choice_gbnf(choices: &[String]) -> String {
    let quoted: Vec<String> = choices.iter().map(|choice| quote_gbnf(choice)).collect();
    format!("root ::= {}", quoted.join(" | "))
}

fn quote_gbnf(text: &str) -> String {
    let mut quoted = String::from("\"");
    for c in text.chars() {
        match c {
            '"' => quoted.push_str("\\\""),
            '\\' => quoted.push_str("\\\\"),
            '\n' => quoted.push_str("\\n"),
            '\r' => quoted.push_str("\\r"),
            '\t' => quoted.push_str("\\t"),
            c if c.is_control() => {
                // Writing to a String cannot fail.
                write!(quoted, "\\x{:02X}", u32::from(c)).unwrap_or_default();
            }
            c => quoted.push(c),
        }
    }
    quoted.push('"');
    quoted
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn choices_become_grammars() {
        let choices = ["a.b".to_owned(), "say \"hi\"\n".to_owned()];
        assert_eq!(choice_regex(&choices), "(a\\.b|say \"hi\"\n)");
        assert_eq!(choice_gbnf(&choices), r#"root ::= "a.b" | "say \"hi\"\n""#);
    }
}
