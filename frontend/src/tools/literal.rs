//! Converts Python literals to JSON.

use serde_json::{Map, Number, Value};

/// How deep lists and dictionaries may be nested.
const MAX_DEPTH: usize = 64;

/// Converts the text between a call's parentheses to a JSON object of its keyword arguments; `None` if it is anything else.
pub(super) fn arguments_json(text: &str) -> Option<String> {
    let mut reader = Reader { rest: text };
    let mut arguments = Map::new();
    while reader.peek().is_some() {
        let key = reader.name()?;
        reader.expect('=')?;
        let value = reader.value(0)?;
        arguments.insert(key, value);
        if reader.peek().is_some() {
            reader.expect(',')?;
        }
    }
    Some(Value::Object(arguments).to_string())
}

/// Converts the text of one literal; `None` if it is anything else.
pub(super) fn literal(text: &str) -> Option<Value> {
    let mut reader = Reader { rest: text };
    let value = reader.value(0)?;
    reader.peek().is_none().then_some(value)
}

struct Reader<'a> {
    rest: &'a str,
}

impl Reader<'_> {
    /// The next character that is not white space.
    fn peek(&mut self) -> Option<char> {
        self.rest = self.rest.trim_start();
        self.rest.chars().next()
    }

    fn next(&mut self) -> Option<char> {
        let mut chars = self.rest.chars();
        let c = chars.next();
        self.rest = chars.as_str();
        c
    }

    fn expect(&mut self, wanted: char) -> Option<()> {
        if self.peek()? != wanted {
            return None;
        }
        self.next().map(drop)
    }

    /// Takes a non-empty run of matching characters.
    fn word(&mut self, is_part: impl Fn(char) -> bool) -> Option<&str> {
        let text = self.rest.trim_start();
        let len = text.find(|c| !is_part(c)).unwrap_or(text.len());
        let (word, rest) = text.split_at(len);
        self.rest = rest;
        (!word.is_empty()).then_some(word)
    }

    fn name(&mut self) -> Option<String> {
        let name = self.word(|c| c.is_alphanumeric() || c == '_')?;
        Some(name.to_owned())
    }

    fn value(&mut self, depth: usize) -> Option<Value> {
        if depth > MAX_DEPTH {
            return None;
        }
        match self.peek()? {
            '"' | '\'' => self.strings(),
            '[' => self.list('[', ']', depth),
            '(' => self.list('(', ')', depth),
            '{' => self.dictionary(depth),
            c if c.is_ascii_digit() || matches!(c, '-' | '+' | '.') => self.number(),
            _ => match self.name()?.as_str() {
                "True" | "true" => Some(Value::Bool(true)),
                "False" | "false" => Some(Value::Bool(false)),
                "None" | "null" => Some(Value::Null),
                _ => None,
            },
        }
    }

    fn list(&mut self, open: char, close: char, depth: usize) -> Option<Value> {
        self.expect(open)?;
        let mut items = Vec::new();
        while self.peek()? != close {
            items.push(self.value(depth + 1)?);
            if self.peek()? != close {
                self.expect(',')?;
            }
        }
        self.expect(close)?;
        Some(Value::Array(items))
    }

    fn dictionary(&mut self, depth: usize) -> Option<Value> {
        self.expect('{')?;
        let mut entries = Map::new();
        while self.peek()? != '}' {
            let key = match self.value(depth + 1)? {
                Value::String(key) => key,
                other @ (Value::Number(_) | Value::Bool(_)) => other.to_string(),
                Value::Null | Value::Array(_) | Value::Object(_) => return None,
            };
            self.expect(':')?;
            let value = self.value(depth + 1)?;
            entries.insert(key, value);
            if self.peek()? != '}' {
                self.expect(',')?;
            }
        }
        self.expect('}')?;
        Some(Value::Object(entries))
    }

    fn number(&mut self) -> Option<Value> {
        let word =
            self.word(|c| c.is_ascii_alphanumeric() || matches!(c, '-' | '+' | '.' | '_'))?;
        let word = word.replace('_', "");
        let digits = word.strip_prefix(['-', '+']).unwrap_or(&word);
        if !digits.bytes().all(|byte| byte.is_ascii_digit()) {
            return Number::from_f64(word.parse().ok()?).map(Value::Number);
        }
        // An integer beyond 64 bits would lose digits as a float, so it is refused.
        let number = word.parse::<i64>().map(Value::from);
        number
            .or_else(|_| word.parse::<u64>().map(Value::from))
            .ok()
    }

    /// Adjacent strings are concatenated.
    fn strings(&mut self) -> Option<Value> {
        let mut text = String::new();
        while let Some('"' | '\'') = self.peek() {
            self.string(&mut text)?;
        }
        Some(Value::String(text))
    }

    fn string(&mut self, text: &mut String) -> Option<()> {
        let quote = self.next()?;
        let two = if quote == '"' { "\"\"" } else { "''" };
        let is_long = self.skip(two);
        loop {
            match self.next()? {
                c if c == quote && (!is_long || self.skip(two)) => return Some(()),
                '\\' => self.escape(text)?,
                c => text.push(c),
            }
        }
    }

    fn skip(&mut self, text: &str) -> bool {
        let rest = self.rest.strip_prefix(text);
        self.rest = rest.unwrap_or(self.rest);
        rest.is_some()
    }

    fn escape(&mut self, text: &mut String) -> Option<()> {
        let c = match self.next()? {
            'n' => '\n',
            't' => '\t',
            'r' => '\r',
            'b' => '\u{8}',
            'f' => '\u{c}',
            '0' => '\0',
            '\n' => return Some(()),
            'x' => char::from_u32(self.hex(2)?)?,
            'u' => self.code_unit()?,
            'U' => char::from_u32(self.hex(8)?)?,
            c @ ('\\' | '\'' | '"') => c,
            // As in Python, a backslash before any other character is a backslash.
            other => {
                text.push('\\');
                other
            }
        };
        text.push(c);
        Some(())
    }

    fn hex(&mut self, digits: usize) -> Option<u32> {
        let (hex, rest) = self.rest.split_at_checked(digits)?;
        self.rest = rest;
        u32::from_str_radix(hex, 16).ok()
    }

    /// A character from one `\u` escape, or, as in JSON, from a surrogate pair.
    fn code_unit(&mut self) -> Option<char> {
        let first = self.hex(4)?;
        if !(0xd800..0xdc00).contains(&first) {
            return char::from_u32(first);
        }
        self.rest = self.rest.strip_prefix("\\u")?;
        let low = self.hex(4)?.checked_sub(0xdc00)?;
        if low >= 0x400 {
            return None;
        }
        char::from_u32(0x10000 + ((first - 0xd800) << 10) + low)
    }
}
