//! The size of a schema once llguidance has merged its parts, estimated by a simplified merge.
//!
//! llguidance merges neighbouring parts into one schema (`allOf`, `anyOf`, `enum`, a `$ref` with neighbours, the keywords
//! themselves): it copies options for each option, and replaces a reference by a copy of its target. So thirty definitions
//! of two lines can become 2^30 properties. This module does the same with counts alone, until a budget is used up.

mod shape;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::mem;

use serde_json::{Map, Value};

use self::shape::{
    ALL, ARRAY, BOOLEAN, NULL, NUMBER, OBJECT, Plain, STRING, Shape, compare_two, kinds,
};
use super::super::limits::GuideLimits;
use super::check_count;

/// How deep merged parts may nest; llguidance has the same limit.
const MERGED_LEVELS: usize = 128;
/// Optional properties beside a `minProperties` or `maxProperties`: llguidance emits the object once for each of them.
const COUNTED_PROPERTIES: usize = 64;
/// Bytes of a pattern that count as one.
const PATTERN_BYTES: usize = 16;
/// Comparisons of a `oneOf` that cost one.
const COMPARISONS: usize = 8;
/// The cost of checking whether two patterns overlap.
const PATTERN_PAIR: usize = 16;

/// Keywords of the schema itself, which together make one object of llguidance.
const OWN: [&str; 18] = [
    "type",
    "properties",
    "patternProperties",
    "additionalProperties",
    "required",
    "minProperties",
    "maxProperties",
    "items",
    "prefixItems",
    "additionalItems",
    "minItems",
    "maxItems",
    "pattern",
    "format",
    "minLength",
    "maxLength",
    "minimum",
    "maximum",
];

/// Estimates the size that `schema` expands to, within the budget.
///
/// # Errors
/// The size exceeds the limits, or a reference has no target, which llguidance refuses too.
pub(super) fn check(
    limits: &GuideLimits,
    schema: &Value,
    budget: &mut usize,
) -> Result<(), String> {
    let mut expansion = Expansion {
        limits,
        root: schema,
        left: *budget,
        definitions: HashMap::new(),
    };
    expansion.shape(schema)?;
    *budget = expansion.left;
    Ok(())
}

struct Expansion<'a> {
    limits: &'a GuideLimits,
    root: &'a Value,
    /// The rest of the budget.
    left: usize,
    /// Definitions by reference; `None` while one is being computed.
    definitions: HashMap<&'a str, Option<Shape<'a>>>,
}

impl<'a> Expansion<'a> {
    fn charge(&mut self, made: usize) -> Result<(), String> {
        self.left = self.left.checked_sub(made).ok_or_else(|| {
            format!(
                "the schema's parts multiply to more than {}: allOf, anyOf, oneOf, enum and $ref copy what stands beside them",
                self.limits.expansion
            )
        })?;
        Ok(())
    }

    fn copy(&mut self, shape: &Shape<'a>) -> Result<Shape<'a>, String> {
        self.charge(shape.size())?;
        Ok(shape.clone())
    }

    fn shape(&mut self, schema: &'a Value) -> Result<Shape<'a>, String> {
        self.charge(1)?;
        let entries = match schema {
            Value::Object(entries) => entries,
            Value::Bool(false) => return Ok(Shape::Never),
            // `true`, or an invalid schema, which llguidance will reject.
            Value::Bool(true)
            | Value::Null
            | Value::Number(_)
            | Value::String(_)
            | Value::Array(_) => return Ok(Shape::Any),
        };
        let mut shape = Shape::Any;
        for (keyword, value) in entries {
            shape = self.applied(shape, keyword, value)?;
        }
        if OWN.iter().any(|keyword| entries.contains_key(*keyword)) {
            let own = self.own(entries)?;
            shape = self.merge(shape, own, 0)?;
        }
        Ok(shape)
    }

    /// Merges `shape` with the schema that a keyword contains; returns it unchanged for other keywords.
    fn applied(
        &mut self,
        shape: Shape<'a>,
        keyword: &str,
        value: &'a Value,
    ) -> Result<Shape<'a>, String> {
        let part = match (keyword, value) {
            ("const", value) => self.constant(value)?,
            ("enum", Value::Array(values)) => {
                let options = values.iter().map(|value| self.constant(value));
                Shape::AnyOf(options.collect::<Result<Vec<_>, String>>()?)
            }
            ("anyOf", Value::Array(schemas)) => Shape::any_of(self.shapes(schemas)?),
            ("oneOf", Value::Array(schemas)) => Shape::one_of(self.shapes(schemas)?),
            ("allOf", Value::Array(schemas)) => {
                let mut all = shape;
                for schema in schemas {
                    let part = self.shape(schema)?;
                    all = self.merge(all, part, 0)?;
                }
                return Ok(all);
            }
            ("$ref", Value::String(reference)) => {
                self.define(reference)?;
                Shape::Reference(reference)
            }
            _ => return Ok(shape),
        };
        self.merge(shape, part, 0)
    }

    fn shapes(&mut self, schemas: &'a [Value]) -> Result<Vec<Shape<'a>>, String> {
        schemas.iter().map(|schema| self.shape(schema)).collect()
    }

    /// The schema of exactly this value.
    fn constant(&mut self, value: &'a Value) -> Result<Shape<'a>, String> {
        let kinds = match value {
            Value::Null => NULL,
            Value::Bool(_) => BOOLEAN,
            Value::Number(_) => NUMBER,
            Value::String(_) => STRING,
            Value::Array(_) => ARRAY,
            Value::Object(_) => OBJECT,
        };
        let weight = values(self.limits, value)?;
        self.charge(1 + weight)?;
        Ok(Shape::Plain(Box::new(Plain {
            kinds,
            weight,
            ..Plain::default()
        })))
    }

    /// The schema of the keywords in [`OWN`].
    fn own(&mut self, entries: &'a Map<String, Value>) -> Result<Shape<'a>, String> {
        check_types(entries.get("type"))?;
        let items = entries.get("items");
        let (listed, items) = match items {
            Some(Value::Array(_)) => (items, entries.get("additionalItems")),
            items => (entries.get("prefixItems"), items),
        };
        let pattern = entries.get("pattern").and_then(Value::as_str);
        let required = entries.get("required").and_then(Value::as_array);
        let is_given = |keyword: &str| entries.get(keyword).is_some_and(|value| *value != 0);
        let mut plain = Plain {
            kinds: entries.get("type").map_or(ALL, kinds),
            weight: pattern.map_or(0, str::len) / PATTERN_BYTES,
            properties: self.named(entries.get("properties"))?,
            patterns: self.named(entries.get("patternProperties"))?,
            additional: self.optional(entries.get("additionalProperties"))?,
            required: required
                .into_iter()
                .flatten()
                .filter_map(Value::as_str)
                .collect(),
            prefix: self.shapes(
                listed
                    .and_then(Value::as_array)
                    .map_or(&[][..], Vec::as_slice),
            )?,
            items: self.optional(items)?,
            is_counted: is_given("minProperties") || entries.contains_key("maxProperties"),
        };
        // Each property merges with the pattern that its name matches; assume the largest.
        let largest = plain.patterns.values().map(Shape::size).max().unwrap_or(0);
        plain.weight += largest.saturating_mul(plain.properties.len());
        self.charge(plain.weight + plain.required.len())?;
        self.whole(plain)
    }

    fn named(
        &mut self,
        schemas: Option<&'a Value>,
    ) -> Result<BTreeMap<&'a str, Shape<'a>>, String> {
        let schemas = schemas.and_then(Value::as_object).into_iter().flatten();
        schemas
            .map(|(name, schema)| Ok((name.as_str(), self.shape(schema)?)))
            .collect()
    }

    fn optional(&mut self, schema: Option<&'a Value>) -> Result<Option<Shape<'a>>, String> {
        schema.map(|schema| self.shape(schema)).transpose()
    }

    /// The intersection of two schemas, as in llguidance's `Schema::intersect`.
    fn merge(
        &mut self,
        first: Shape<'a>,
        second: Shape<'a>,
        level: usize,
    ) -> Result<Shape<'a>, String> {
        self.charge(1)?;
        if level > MERGED_LEVELS {
            return Err("the schema's parts contain each other too deeply".into());
        }
        let merged = match (first, second) {
            (Shape::Any, shape) | (shape, Shape::Any) => shape,
            (Shape::Never, _) | (_, Shape::Never) => Shape::Never,
            (Shape::Reference(reference), shape) | (shape, Shape::Reference(reference)) => {
                let named = self.named_by(reference)?;
                self.merge(named, shape, level + 2)?
            }
            (Shape::OneOf(options), shape) | (shape, Shape::OneOf(options)) => {
                Shape::one_of(self.merge_each(options, &shape, level)?)
            }
            (Shape::AnyOf(options), shape) | (shape, Shape::AnyOf(options)) => {
                Shape::any_of(self.merge_each(options, &shape, level)?)
            }
            (Shape::Plain(first), Shape::Plain(second)) => self.both(*first, *second, level)?,
        };
        if let Shape::OneOf(options) = &merged {
            self.compare(options)?;
        }
        Ok(merged)
    }

    /// The options that remain after each is merged with `shape`.
    fn merge_each(
        &mut self,
        options: Vec<Shape<'a>>,
        shape: &Shape<'a>,
        level: usize,
    ) -> Result<Vec<Shape<'a>>, String> {
        let mut merged = Vec::with_capacity(options.len());
        for option in options {
            let copy = self.copy(shape)?;
            let option = self.merge(option, copy, level + 1)?;
            if !matches!(option, Shape::Never) {
                merged.push(option);
            }
        }
        Ok(merged)
    }

    /// Charges the cost of checking each pair of a `oneOf`'s options for overlap.
    fn compare(&mut self, options: &[Shape<'a>]) -> Result<(), String> {
        let all = self.left.saturating_mul(COMPARISONS);
        let mut left = all;
        for (at, first) in options.iter().enumerate() {
            for second in &options[at + 1..] {
                if compare_two(first, second, &mut left).is_none() {
                    return self.charge(usize::MAX);
                }
            }
        }
        self.charge((all - left) / COMPARISONS)
    }

    fn both(
        &mut self,
        mut first: Plain<'a>,
        mut second: Plain<'a>,
        level: usize,
    ) -> Result<Shape<'a>, String> {
        let kinds = first.kinds & second.kinds;
        if kinds == 0 {
            return Ok(Shape::Never);
        }
        let mut properties = BTreeMap::new();
        for (name, shape) in mem::take(&mut first.properties) {
            let other = self.property(&second, name)?;
            properties.insert(name, self.merge(shape, other, level + 1)?);
        }
        for (name, shape) in mem::take(&mut second.properties) {
            if properties.contains_key(name) {
                continue;
            }
            let other = self.property(&first, name)?;
            properties.insert(name, self.merge(other, shape, level + 1)?);
        }
        let mut patterns = BTreeMap::new();
        for (name, shape) in mem::take(&mut first.patterns) {
            let other = (second.patterns.remove(name)).or_else(|| second.additional.clone());
            patterns.insert(name, self.merged_with(shape, other, level)?);
        }
        for (name, shape) in mem::take(&mut second.patterns) {
            let other = first.additional.clone();
            patterns.insert(name, self.merged_with(shape, other, level)?);
        }
        let length = first.prefix.len().max(second.prefix.len());
        self.fill(&mut first, length)?;
        self.fill(&mut second, length)?;
        let mut prefix = Vec::with_capacity(length);
        for (shape, other) in first.prefix.into_iter().zip(second.prefix) {
            prefix.push(self.merge(shape, other, level + 1)?);
        }
        first.required.append(&mut second.required);
        let merged = Plain {
            kinds,
            weight: first.weight + second.weight,
            properties,
            patterns,
            additional: self.either(first.additional, second.additional, level)?,
            required: first.required,
            prefix,
            items: self.either(first.items, second.items, level)?,
            is_counted: first.is_counted || second.is_counted,
        };
        self.whole(merged)
    }

    /// The schema that `plain` has for a property of that name.
    fn property(&mut self, plain: &Plain<'a>, name: &str) -> Result<Shape<'a>, String> {
        if let Some(shape) = plain.properties.get(name) {
            return self.copy(shape);
        }
        // Assume that any of the patterns may match.
        let shapes = plain.patterns.values().chain(&plain.additional);
        match shapes.max_by_key(|shape| shape.size()) {
            Some(shape) => self.copy(shape),
            None => Ok(Shape::Any),
        }
    }

    fn merged_with(
        &mut self,
        shape: Shape<'a>,
        other: Option<Shape<'a>>,
        level: usize,
    ) -> Result<Shape<'a>, String> {
        match other {
            Some(other) => {
                self.charge(other.size())?;
                self.merge(shape, other, level + 1)
            }
            None => Ok(shape),
        }
    }

    fn either(
        &mut self,
        first: Option<Shape<'a>>,
        second: Option<Shape<'a>>,
        level: usize,
    ) -> Result<Option<Shape<'a>>, String> {
        match (first, second) {
            (Some(first), Some(second)) => self.merge(first, second, level + 1).map(Some),
            (first, second) => Ok(first.or(second)),
        }
    }

    /// Adds schemas of first items until there are `length`, the number that the other part has.
    fn fill(&mut self, plain: &mut Plain<'a>, length: usize) -> Result<(), String> {
        while plain.prefix.len() < length {
            let item = match &plain.items {
                Some(items) => self.copy(items)?,
                None => Shape::Any,
            };
            plain.prefix.push(item);
        }
        Ok(())
    }

    /// Completes a schema once its parts are known, as it is stored.
    fn whole(&mut self, mut plain: Plain<'a>) -> Result<Shape<'a>, String> {
        if plain.kinds & ARRAY == 0 {
            (plain.prefix, plain.items) = (Vec::new(), None);
        }
        if plain.kinds & OBJECT == 0 {
            plain.properties.clear();
            plain.patterns.clear();
            plain.required.clear();
            plain.additional = None;
        }
        // llguidance also creates properties for names that are only required.
        let is_unnamed = |name: &&&str| !plain.properties.contains_key(**name);
        let unnamed = plain.required.iter().filter(is_unnamed).count();
        check_properties(self.limits, plain.properties.len() + unnamed)?;
        let patterns = plain.patterns.len();
        check_count(
            "patternProperties in one object",
            patterns,
            self.limits.patterns,
        )?;
        self.charge(patterns * patterns.saturating_sub(1) / 2 * PATTERN_PAIR)?;
        let is_optional = |name: &&&str| !plain.required.contains(**name);
        if plain.is_counted
            && plain.properties.keys().filter(is_optional).count() > COUNTED_PROPERTIES
        {
            return Err(format!(
                "minProperties and maxProperties go with at most {COUNTED_PROPERTIES} optional properties"
            ));
        }
        Ok(Shape::Plain(Box::new(plain)))
    }

    fn define(&mut self, reference: &'a str) -> Result<(), String> {
        if self.definitions.contains_key(reference) {
            return Ok(());
        }
        self.definitions.insert(reference, None);
        let schema = find(self.root, reference).ok_or_else(|| {
            let start: String = reference.chars().take(100).collect();
            format!("$ref leads to nothing within the schema: {start}")
        })?;
        let shape = self.shape(schema)?;
        self.definitions.insert(reference, Some(shape));
        Ok(())
    }

    /// A copy of a reference's target. If the target contains itself, returns a schema of anything; llguidance refuses it.
    fn named_by(&mut self, reference: &'a str) -> Result<Shape<'a>, String> {
        self.define(reference)?;
        let shape = self.definitions.get(reference).and_then(Option::as_ref);
        let size = shape.map_or(1, Shape::size);
        self.charge(size)?;
        let shape = self.definitions.get(reference).cloned().flatten();
        Ok(shape.unwrap_or(Shape::Any))
    }
}

/// The target of `#/...`, resolved as llguidance does: no escapes, and numbers as Rust parses them.
fn find<'a>(root: &'a Value, reference: &str) -> Option<&'a Value> {
    if reference == "#" || reference == "#/" {
        return Some(root);
    }
    let mut at = root;
    for segment in reference.strip_prefix("#/")?.split('/') {
        at = if at.is_array() {
            at.get(segment.parse::<usize>().ok()?)?
        } else {
            at.get(segment)?
        };
    }
    Some(at)
}

/// Rejects repeated types: llguidance builds the whole schema for each name.
fn check_types(types: Option<&Value>) -> Result<(), String> {
    let mut seen = BTreeSet::new();
    let names = types.and_then(Value::as_array).into_iter().flatten();
    if names
        .filter_map(Value::as_str)
        .all(|name| seen.insert(name))
    {
        return Ok(());
    }
    Err("a `type` of the schema names a type more than once".into())
}

fn check_properties(limits: &GuideLimits, count: usize) -> Result<(), String> {
    check_count("properties in one object", count, limits.properties)
}

/// The number of values inside `value`, itself excluded. Rejects objects with too many properties.
fn values(limits: &GuideLimits, value: &Value) -> Result<usize, String> {
    let (mut count, mut open) = (0, vec![value]);
    while let Some(value) = open.pop() {
        let before = open.len();
        if let Some(items) = value.as_array() {
            open.extend(items);
        }
        if let Some(entries) = value.as_object() {
            check_properties(limits, entries.len())?;
            open.extend(entries.values());
        }
        count += open.len() - before;
    }
    Ok(count)
}
