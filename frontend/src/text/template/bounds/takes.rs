//! [`Takes`]: charges for what filters and methods read, before they do. One instruction may read all of a large value.

use minijinja::{Error, Value};

use super::{VALUE_BYTES, charge, count, part_bytes, weigh};

/// What a filter reads.
#[derive(Debug, Clone, Copy)]
pub(super) enum Takes {
    /// All of a text, once; other values are not charged.
    Text,
    /// All of a text, or each item of a list, once.
    Part,
    /// The items of a list or the letters of a text, to make a list of them.
    Items,
    /// Everything in the items of a list, to compare them.
    All,
    /// A text, to make a list of the pieces between separators.
    Pieces,
    /// A text, to make a list of its lines.
    Lines,
}

impl Takes {
    /// Returns what a filter reads.
    pub(super) fn of_filter(name: &str) -> Self {
        match name {
            "batch" | "chain" | "list" | "map" | "slice" | "sum" | "zip" => Self::Items,
            "dictsort" | "groupby" | "max" | "min" | "reject" | "rejectattr" | "select"
            | "selectattr" | "sort" | "unique" => Self::All,
            "items" | "last" | "reverse" => Self::Part,
            "lines" => Self::Lines,
            "split" => Self::Pieces,
            _ => Self::Text,
        }
    }

    /// Charges for what a filter reads of its arguments, the first of which is its input.
    pub(super) fn count(self, args: &[Value]) -> Result<(), Error> {
        let Some(input) = args.first() else {
            return Ok(());
        };
        let text = input.as_str();
        match (self, text) {
            (Self::Text, None) => Ok(()),
            (Self::Text, Some(text)) => charge(text.len()),
            (Self::Items | Self::All, Some(text)) => count(text.len().saturating_mul(VALUE_BYTES)),
            (Self::Part | Self::Items, _) => charge(part_bytes(input)),
            (Self::All, None) => count(weigh(input)?),
            (Self::Pieces, _) => count(pieces_bytes(text.unwrap_or_default(), &args[1..])),
            (Self::Lines, _) => count(lines_bytes(text.unwrap_or_default())),
        }
    }
}

/// Charges for what a text method reads.
pub(in crate::text::template) fn count_text_method(
    method: &str,
    text: &str,
    args: &[Value],
) -> Result<(), Error> {
    charge(text.len())?;
    match method {
        "split" => count(pieces_bytes(text, args)),
        "splitlines" => count(lines_bytes(text)),
        "strip" | "lstrip" | "rstrip" => {
            let letters = args.first().and_then(Value::as_str).map_or(0, str::len);
            charge(text.len().saturating_mul(letters))
        }
        _ => args.iter().try_for_each(|arg| charge(weigh(arg)?)),
    }
}

/// Charges for what a method of a list or an object reads.
pub(in crate::text::template) fn count_method(
    method: &str,
    value: &Value,
    args: &[Value],
) -> Result<(), Error> {
    match method {
        "count" => count(weigh(value)?),
        "get" => charge(args.first().map_or(0, part_bytes)),
        _ => Ok(()),
    }
}

/// For a text split at the first argument, or at spaces, up to the number of times in the second.
fn pieces_bytes(text: &str, args: &[Value]) -> usize {
    let pieces = match args.first().and_then(Value::as_str) {
        Some(separator) => text.matches(separator).count() + 1,
        None => text.split_whitespace().count(),
    };
    let most = args.get(1).and_then(Value::as_usize);
    let pieces = pieces.min(most.map_or(usize::MAX, |most| most.saturating_add(1)));
    pieces
        .saturating_mul(VALUE_BYTES)
        .saturating_add(text.len())
}

fn lines_bytes(text: &str) -> usize {
    let lines = text.matches('\n').count() + 1;
    lines.saturating_mul(VALUE_BYTES).saturating_add(text.len())
}
