//! Parses JSON texts as clients do.

use serde::de::IgnoredAny;
use serde_json::Value;

/// Parses a JSON text; `None` if it is invalid.
///
/// Numbers in JSON may have any size (RFC 8259, section 6), and grammars allow numbers that no `f64` can represent. They become
/// the largest `f64`.
pub(super) fn value_of(text: &str) -> Option<Value> {
    let _is_json: IgnoredAny = serde_json::from_str(text).ok()?;
    let mut held = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(start) = rest.find(|c: char| c == '"' || c == '-' || c.is_ascii_digit()) {
        let (before, from) = rest.split_at(start);
        let (part, behind) = from.split_at(part_len(from));
        held.push_str(before);
        match part.parse::<f64>() {
            Ok(number) if number.is_infinite() => held.push_str(&large(number)),
            _ => held.push_str(part),
        }
        rest = behind;
    }
    held.push_str(rest);
    serde_json::from_str(&held).ok()
}

/// The number of bytes of the string or number at the start of `text`.
fn part_len(text: &str) -> usize {
    if !text.starts_with('"') {
        let is_of_number = |c: char| c.is_ascii_digit() || "+-.eE".contains(c);
        return text.find(|c| !is_of_number(c)).unwrap_or(text.len());
    }
    let mut is_escaped = false;
    let end = text.bytes().skip(1).position(|byte| {
        let is_end = byte == b'"' && !is_escaped;
        is_escaped = byte == b'\\' && !is_escaped;
        is_end
    });
    end.map_or(text.len(), |end| end + 2)
}

/// The largest number with the sign of an infinite one.
fn large(infinite: f64) -> String {
    format!("{:e}", f64::MAX.copysign(infinite))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_number_that_no_float_holds_is_a_number() {
        let huge = json!(f64::MAX);
        assert_eq!(
            value_of("9999999999999999E9999999999999999"),
            Some(huge.clone())
        );
        assert_eq!(value_of("[1, -1e400]"), Some(json!([1, f64::MIN])));
        let text = r#"{"a\"1e999": "1e999", "b": 1e999}"#;
        assert_eq!(
            value_of(text),
            Some(json!({"a\"1e999": "1e999", "b": huge}))
        );
    }

    #[test]
    fn what_is_no_json_has_no_value() {
        for text in [
            "1e", "01", "1e400e", "1.e999", "-", "[1e400", "\"a", "1e400 2", "", "+1e400",
        ] {
            assert_eq!(value_of(text), None, "{text}");
        }
    }
}
