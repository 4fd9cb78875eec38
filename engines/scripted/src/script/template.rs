//! Texts with placeholders for values of the request: `{{last_user}}`, `{{request_id}}`, `{{n_messages}}`.

/// A text with placeholders.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Template(Vec<Part>);

#[derive(Debug, Clone, PartialEq, Eq)]
enum Part {
    Literal(String),
    Value(Name),
}

/// A value that a text can name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Name {
    LastUser,
    RequestId,
    MessageCount,
}

impl Name {
    fn parse(name: &str) -> Option<Self> {
        match name {
            "last_user" => Some(Self::LastUser),
            "request_id" => Some(Self::RequestId),
            "n_messages" => Some(Self::MessageCount),
            _ => None,
        }
    }
}

/// The values of one request.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Values<'a> {
    pub(crate) last_user: &'a str,
    pub(crate) request_id: &'a str,
    pub(crate) message_count: usize,
}

impl Template {
    /// A text without placeholders.
    pub(crate) fn literal(text: String) -> Self {
        Self(vec![Part::Literal(text)])
    }

    /// Finds the placeholders in a text. Braces without a name, such as those of JSON, are text.
    ///
    /// # Errors
    /// The problem, if a placeholder names no known value.
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        let mut parts = Vec::new();
        let mut literal = String::new();
        let mut rest = text;
        while let Some((before, after)) = rest.split_once("{{") {
            literal.push_str(before);
            let name = after
                .split_once("}}")
                .map(|(name, after)| (name.trim(), after));
            match name.filter(|(name, _)| is_name(name)) {
                Some((name, after)) => {
                    let value = Name::parse(name).ok_or_else(|| unknown(name))?;
                    parts.push(Part::Literal(std::mem::take(&mut literal)));
                    parts.push(Part::Value(value));
                    rest = after;
                }
                None => {
                    // Takes one brace, so that `{{{last_user}}` is a brace and a value.
                    literal.push('{');
                    rest = rest.get(before.len() + 1..).unwrap_or_default();
                }
            }
        }
        literal.push_str(rest);
        parts.push(Part::Literal(literal));
        Ok(Self(parts))
    }

    /// Whether it names the number of messages, which a prompt of tokens does not show.
    pub(crate) fn names_message_count(&self) -> bool {
        self.0.contains(&Part::Value(Name::MessageCount))
    }

    pub(crate) fn fill(&self, values: &Values<'_>) -> String {
        let mut text = String::new();
        for part in &self.0 {
            match part {
                Part::Literal(literal) => text.push_str(literal),
                Part::Value(Name::LastUser) => text.push_str(values.last_user),
                Part::Value(Name::RequestId) => text.push_str(values.request_id),
                Part::Value(Name::MessageCount) => text.push_str(&values.message_count.to_string()),
            }
        }
        text
    }
}

fn is_name(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|b| matches!(b, b'a'..=b'z' | b'_'))
}

fn unknown(name: &str) -> String {
    format!(
        "{{{{{name}}}}} is none of {{{{last_user}}}}, {{{{request_id}}}}, {{{{n_messages}}}}; \
         substitute = false keeps such text as it is"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fill(text: &str) -> String {
        let values = Values {
            last_user: "U{{n_messages}}",
            request_id: "R",
            message_count: 3,
        };
        Template::parse(text).unwrap().fill(&values)
    }

    #[test]
    fn values_are_filled_in_once() {
        assert_eq!(
            fill("a {{last_user}}, {{ request_id }}{{n_messages}}."),
            "a U{{n_messages}}, R3."
        );
    }

    #[test]
    fn braces_of_json_are_text() {
        for text in [
            r#"{"a": {"b": {}}}"#,
            "{{",
            "}}",
            "{{ }}",
            "{{\"a\"}}",
            "{ {x} }",
        ] {
            assert_eq!(fill(text), text);
        }
        assert_eq!(
            fill(r#"{"id":{"v":"{{request_id}}"}}"#),
            r#"{"id":{"v":"R"}}"#
        );
        assert_eq!(fill("{{{request_id}}}"), "{R}");
    }

    #[test]
    fn an_unknown_name_is_refused() {
        let problem = Template::parse("hi {{user}}").unwrap_err();
        assert!(
            problem.starts_with("{{user}} is none of {{last_user}}"),
            "{problem}"
        );
    }
}
