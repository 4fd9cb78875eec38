//! Percent-encoded text in queries and file names. What is encoded beyond that, such as spaces of a query, callers know.

/// The text without its encoding; `None` if it is wrongly encoded, or no UTF-8.
pub(crate) fn decoded(text: &str) -> Option<String> {
    let mut parts = text.split('%');
    let mut bytes = parts.next().unwrap_or_default().as_bytes().to_vec();
    for part in parts {
        // The standard library takes a sign for a part of a number.
        let split = part.split_at_checked(2);
        let (digits, rest) = split.filter(|(digits, _)| !digits.starts_with('+'))?;
        bytes.push(u8::from_str_radix(digits, 16).ok()?);
        bytes.extend_from_slice(rest.as_bytes());
    }
    String::from_utf8(bytes).ok()
}

#[cfg(test)]
mod tests {
    use super::decoded;

    #[test]
    fn two_digits_are_a_byte() {
        assert_eq!(decoded("a%20%C3%A9+"), Some("a é+".to_owned()));
        for text in ["%", "%2", "%zz", "%+1", "%C3"] {
            assert_eq!(decoded(text), None, "{text}");
        }
    }
}
