//! [`Shape`]: the counted properties of a schema, the size of its copy, and the cost of comparing two.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;

use super::PATTERN_BYTES;

/// A set of value types, one bit each.
pub(super) type Kinds = u8;
pub(super) const NULL: Kinds = 1;
pub(super) const BOOLEAN: Kinds = 2;
pub(super) const NUMBER: Kinds = 4;
pub(super) const STRING: Kinds = 8;
pub(super) const ARRAY: Kinds = 16;
pub(super) const OBJECT: Kinds = 32;
pub(super) const ALL: Kinds = 63;

/// The counted properties of a schema.
#[derive(Clone)]
pub(super) enum Shape<'a> {
    Any,
    Never,
    Reference(&'a str),
    AnyOf(Vec<Shape<'a>>),
    OneOf(Vec<Shape<'a>>),
    Plain(Box<Plain<'a>>),
}

/// The schema of values of some types, with the counts for arrays and for objects together.
#[derive(Clone, Default)]
pub(super) struct Plain<'a> {
    pub(super) kinds: Kinds,
    /// The cost of copying everything beside the fields below.
    pub(super) weight: usize,
    pub(super) properties: BTreeMap<&'a str, Shape<'a>>,
    pub(super) patterns: BTreeMap<&'a str, Shape<'a>>,
    pub(super) additional: Option<Shape<'a>>,
    pub(super) required: BTreeSet<&'a str>,
    pub(super) prefix: Vec<Shape<'a>>,
    pub(super) items: Option<Shape<'a>>,
    /// Whether it has a `minProperties` or `maxProperties`.
    pub(super) is_counted: bool,
}

impl<'a> Shape<'a> {
    /// A union. Options that are unions themselves are flattened into it.
    pub(super) fn any_of(options: Vec<Shape<'a>>) -> Self {
        let options = options.into_iter().flat_map(|option| match option {
            Shape::AnyOf(nested) => nested,
            one @ (Shape::Any
            | Shape::Never
            | Shape::Reference(_)
            | Shape::OneOf(_)
            | Shape::Plain(_)) => vec![one],
        });
        Shape::AnyOf(options.collect())
    }

    /// As [`Shape::any_of`].
    pub(super) fn one_of(options: Vec<Shape<'a>>) -> Self {
        let options = options.into_iter().flat_map(|option| match option {
            Shape::OneOf(nested) => nested,
            one @ (Shape::Any
            | Shape::Never
            | Shape::Reference(_)
            | Shape::AnyOf(_)
            | Shape::Plain(_)) => vec![one],
        });
        Shape::OneOf(options.collect())
    }

    /// The cost of a copy.
    pub(super) fn size(&self) -> usize {
        match self {
            Shape::Any | Shape::Never | Shape::Reference(_) => 1,
            Shape::AnyOf(options) | Shape::OneOf(options) => {
                1 + options.iter().map(Shape::size).sum::<usize>()
            }
            Shape::Plain(plain) => plain.size(),
        }
    }
}

impl<'a> Plain<'a> {
    /// The schemas that may apply to a property of that name.
    fn said_of(&self, name: &str) -> Vec<&Shape<'a>> {
        match self.properties.get(name) {
            Some(shape) => vec![shape],
            None => self.patterns.values().chain(&self.additional).collect(),
        }
    }

    /// The cost of finding the patterns that a name matches.
    fn lookup(&self) -> usize {
        let patterns = self.patterns.keys();
        patterns.map(|name| 1 + name.len() / PATTERN_BYTES).sum()
    }

    fn size(&self) -> usize {
        let parts = (self.properties.values())
            .chain(self.patterns.values())
            .chain(&self.additional)
            .chain(&self.prefix)
            .chain(&self.items);
        1 + self.weight + self.required.len() + parts.map(Shape::size).sum::<usize>()
    }
}

/// Subtracts from `left` the cost of checking two schemas for overlap; `None` if the cost is larger.
pub(super) fn compare_two(first: &Shape<'_>, second: &Shape<'_>, left: &mut usize) -> Option<()> {
    *left = left.checked_sub(1)?;
    match (first, second) {
        (Shape::AnyOf(options) | Shape::OneOf(options), other)
        | (other, Shape::AnyOf(options) | Shape::OneOf(options)) => {
            for option in options {
                compare_two(option, other, left)?;
            }
        }
        (Shape::Plain(first), Shape::Plain(second)) => {
            let lookups = 1 + first.lookup() + second.lookup();
            for name in first.required.union(&second.required) {
                *left = left.checked_sub(lookups)?;
                for first in first.said_of(name) {
                    for second in second.said_of(name) {
                        compare_two(first, second, left)?;
                    }
                }
            }
        }
        (Shape::Any | Shape::Never | Shape::Reference(_), _)
        | (_, Shape::Any | Shape::Never | Shape::Reference(_)) => {}
    }
    Some(())
}

/// The types that `type` allows. llguidance rejects other values of it.
pub(super) fn kinds(types: &Value) -> Kinds {
    let kind = |name: &Value| match name.as_str() {
        Some("null") => NULL,
        Some("boolean") => BOOLEAN,
        Some("number" | "integer") => NUMBER,
        Some("string") => STRING,
        Some("array") => ARRAY,
        Some("object") => OBJECT,
        _ => ALL,
    };
    match types.as_array() {
        Some(names) => names.iter().map(kind).fold(0, |all, kind| all | kind),
        None => kind(types),
    }
}
