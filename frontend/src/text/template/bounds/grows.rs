//! [`Grows`]: how large the result of a filter or method would be, before it is made.

use minijinja::value::Kwargs;
use minijinja::{Error, Value};

use super::{VALUE_BYTES, check_value, max_value_bytes, weigh};

/// Why the result of a filter or method may be larger than its input. It is checked before the result is made.
#[derive(Debug, Clone, Copy)]
pub(in crate::text::template) enum Grows {
    /// At most as large as all arguments together, or as a value's written form.
    Little,
    /// Escapes letters as HTML.
    ByEscaping,
    /// Makes a given number of items.
    ByCount,
    /// Puts spaces before each line.
    ByIndent,
    /// Puts text between items.
    ByJoining,
    /// Replaces texts by longer ones.
    ByReplacing,
    /// Pads to the widths in a format.
    ByWidths,
}

impl Grows {
    /// Returns how a filter grows its input.
    pub(super) fn of_filter(name: &str) -> Self {
        match name {
            "batch" | "slice" => Self::ByCount,
            "e" | "escape" => Self::ByEscaping,
            "format" => Self::ByWidths,
            "indent" => Self::ByIndent,
            "join" => Self::ByJoining,
            "replace" => Self::ByReplacing,
            _ => Self::Little,
        }
    }

    /// Returns how a text method grows its input, and its arguments in the order of the equivalent filter.
    pub(in crate::text::template) fn of_text_method(
        method: &str,
        text: &Value,
        args: &[Value],
    ) -> Option<(Self, Vec<Value>)> {
        let text = std::slice::from_ref(text);
        match method {
            "replace" => Some((Self::ByReplacing, [text, args].concat())),
            "format" => Some((Self::ByWidths, [text, args].concat())),
            "join" => Some((Self::ByJoining, [args, text].concat())),
            _ => None,
        }
    }

    /// Refuses arguments if their result would be too large.
    pub(in crate::text::template) fn check(self, args: &[Value]) -> Result<(), Error> {
        let bytes = match self {
            Self::Little => 0,
            Self::ByCount => args.iter().skip(1).map(count_of).sum::<usize>() * VALUE_BYTES,
            Self::ByEscaping => text_of(args, 0).len().saturating_mul("&quot;".len()),
            Self::ByIndent => indented_bytes(args),
            Self::ByJoining => joined_bytes(args)?,
            Self::ByReplacing => replaced_bytes(args),
            Self::ByWidths => formatted_bytes(args)?,
        };
        check_value(bytes)
    }
}

/// Returns a number, capped just above the largest size of a value.
fn count_of(value: &Value) -> usize {
    let too_many = max_value_bytes() + 1;
    value.as_usize().unwrap_or(0).min(too_many)
}

/// For `indent(text, width, ...)`, where the width may be a named argument.
fn indented_bytes(args: &[Value]) -> usize {
    let lines = text_of(args, 0).matches('\n').count() + 1;
    let named = args
        .last()
        .and_then(|last| Kwargs::try_from(last.clone()).ok());
    let named = named.and_then(|named| named.get::<Option<Value>>("width").ok().flatten());
    let width = args.get(1).map_or(0, count_of);
    lines.saturating_mul(width.max(named.as_ref().map_or(0, count_of)))
}

/// For `join(items, text)`.
fn joined_bytes(args: &[Value]) -> Result<usize, Error> {
    let Some(items) = args.first() else {
        return Ok(0);
    };
    let items_bytes = weigh(items)?;
    // An upper bound for the number of items.
    let joiners = items.len().unwrap_or(items_bytes / VALUE_BYTES);
    let between = joiners.saturating_mul(text_of(args, 1).len());
    Ok(items_bytes.saturating_add(between))
}

/// For `replace(text, from, to)`.
fn replaced_bytes(args: &[Value]) -> usize {
    let (text, from, to) = (text_of(args, 0), text_of(args, 1), text_of(args, 2));
    text.matches(from).count().saturating_mul(to.len())
}

/// For `format(text, values...)`: at most the sum of all widths, plus all values.
fn formatted_bytes(args: &[Value]) -> Result<usize, Error> {
    let format = text_of(args, 0);
    let mut bytes: usize = 0;
    for arg in args.iter().skip(1) {
        bytes = bytes.saturating_add(weigh(arg)?);
        if format.contains('*') || format.contains(":{") {
            bytes = bytes.saturating_add(count_of(arg));
        }
    }
    let specs = format.match_indices(['%', '{']).map(|(at, opening)| {
        let rest = &format[at + 1..];
        match opening {
            "{" => rest.split('}').next().unwrap_or_default(),
            _ => after_name(rest)
                .split(char::is_alphabetic)
                .next()
                .unwrap_or_default(),
        }
    });
    let numbers = specs.flat_map(|spec| spec.split(|c: char| !c.is_ascii_digit()));
    let widths = numbers
        .filter(|digits| !digits.is_empty())
        .map(|digits| digits.parse().unwrap_or(usize::MAX));
    Ok(widths.fold(bytes, usize::saturating_add))
}

/// Returns what follows the name in `%(name)s`.
fn after_name(spec: &str) -> &str {
    let named = spec
        .strip_prefix('(')
        .and_then(|named| named.split_once(')'));
    named.map_or(spec, |(_, rest)| rest)
}

fn text_of(args: &[Value], index: usize) -> &str {
    args.get(index).and_then(Value::as_str).unwrap_or_default()
}
