//! Bounds what one rendering may produce. Fuel bounds its instructions, but a single instruction can double a text.
//!
//! Everything that a template makes is weighed: what it prints, what growing filters and methods return, and the values that
//! `source` passes through [`bounded`]. Operations that only take parts of their input are charged for what they read: one
//! instruction may read all of a large value. So [`Bounds::made_bytes`], plus one step, bounds memory and time for any template.

mod grows;
mod takes;

use std::cell::Cell;

use minijinja::value::{Kwargs, Rest, ValueKind};
use minijinja::{
    Environment, Error, ErrorKind, Output, State, Value, escape_formatter, filters,
    tests as predicates,
};

use super::{iterator, source};
pub(super) use grows::Grows;
use takes::Takes;
pub(super) use takes::{count_method, count_text_method};

/// The limits of one rendering, in bytes.
#[derive(Debug, Clone, Copy)]
pub(super) struct Bounds {
    /// For one value.
    pub(super) value_bytes: usize,
    /// For all values made, kept or not, and read. A text that grows by one message at a time is made anew each time.
    pub(super) made_bytes: usize,
    /// For the template's own literal text, including repetitions.
    pub(super) repeated: usize,
}

impl Bounds {
    /// Allows values of 16 million tokens of text.
    pub(super) const DEFAULT: Self = Self {
        value_bytes: 64 << 20,
        made_bytes: 1 << 30,
        repeated: 1 << 30,
    };

    /// Allows what takes a few milliseconds.
    pub(super) const QUICK: Self = Self {
        value_bytes: 1 << 20,
        made_bytes: 1 << 20,
        // It is only copied. Macros of some kilobytes are in use.
        repeated: 8 << 20,
    };
}

/// The overhead of a value besides its text.
const VALUE_BYTES: usize = 32;

/// The deepest nesting of lists and objects: they are written by recursion.
const MAX_DEPTH: usize = 128;

/// A template exceeded a bound.
#[derive(Debug, thiserror::Error)]
#[error("too large")]
pub(super) struct TooLarge {
    pub(super) limit_bytes: usize,
}

impl TooLarge {
    pub(super) fn error(limit_bytes: usize) -> Error {
        Error::from(ErrorKind::InvalidOperation).with_source(Self { limit_bytes })
    }
}

/// What has been made so far, and the bounds.
#[derive(Debug, Clone, Copy)]
struct Made {
    bounds: Bounds,
    bytes: usize,
}

thread_local! {
    /// The current rendering of this thread: one call on one thread, which does not start another.
    static MADE: Cell<Made> = const {
        Cell::new(Made { bounds: Bounds::DEFAULT, bytes: 0 })
    };
}

/// Counts from zero while `render` runs.
pub(super) fn counted<T>(bounds: Bounds, render: impl FnOnce() -> T) -> T {
    MADE.set(Made { bounds, bytes: 0 });
    render()
}

/// Returns how many bytes a value of the current rendering may have.
pub(super) fn max_value_bytes() -> usize {
    MADE.get().bounds.value_bytes
}

/// Refuses a value of this size if it is too large.
fn check_value(bytes: usize) -> Result<(), Error> {
    let limit_bytes = max_value_bytes();
    if bytes > limit_bytes {
        return Err(TooLarge::error(limit_bytes));
    }
    Ok(())
}

/// Adds the bounds to an environment, whose filters must not be replaced afterwards.
pub(super) fn install(environment: &mut Environment<'_>) {
    environment.set_formatter(print);
    for (name, filter) in growing_filters() {
        bound_filter(environment, name, filter);
    }
    for (name, filter) in reading_filters() {
        count_filter(environment, name, filter);
    }
    for name in ["dict", "namespace"] {
        bound_arguments(environment, name);
    }
}

/// The filters whose result may be larger than their input; `tojson` is in `python`.
fn growing_filters() -> [(&'static str, Value); 18] {
    [
        ("batch", Value::from_function(filters::batch)),
        ("capitalize", Value::from_function(filters::capitalize)),
        ("chain", Value::from_function(filters::chain)),
        ("e", Value::from_function(filters::escape)),
        ("escape", Value::from_function(filters::escape)),
        ("format", Value::from_function(filters::format)),
        ("indent", Value::from_function(filters::indent)),
        ("join", Value::from_function(filters::join)),
        ("lower", Value::from_function(filters::lower)),
        ("map", Value::from_function(filters::map)),
        ("pprint", Value::from_function(filters::pprint)),
        ("replace", Value::from_function(filters::replace)),
        ("slice", Value::from_function(filters::slice)),
        ("string", Value::from_function(filters::string)),
        ("sum", Value::from_function(filters::sum)),
        ("title", Value::from_function(filters::title)),
        ("upper", Value::from_function(filters::upper)),
        ("zip", Value::from_function(filters::zip)),
    ]
}

/// Other filters that may read all of their input; the remaining filters do not.
fn reading_filters() -> [(&'static str, Value); 23] {
    [
        ("count", Value::from_function(length)),
        ("dictsort", Value::from_function(filters::dictsort)),
        ("first", Value::from_function(filters::first)),
        ("float", Value::from_function(filters::float)),
        ("groupby", Value::from_function(filters::groupby)),
        ("int", Value::from_function(filters::int)),
        ("items", Value::from_function(filters::items)),
        ("last", Value::from_function(filters::last)),
        ("length", Value::from_function(length)),
        ("lines", Value::from_function(filters::lines)),
        ("list", Value::from_function(filters::list)),
        ("max", Value::from_function(filters::max)),
        ("min", Value::from_function(filters::min)),
        ("reject", Value::from_function(filters::reject)),
        ("rejectattr", Value::from_function(filters::rejectattr)),
        ("reverse", Value::from_function(filters::reverse)),
        ("safe", Value::from_function(filters::safe)),
        ("select", Value::from_function(filters::select)),
        ("selectattr", Value::from_function(filters::selectattr)),
        ("sort", Value::from_function(filters::sort)),
        ("split", Value::from_function(filters::split)),
        ("trim", Value::from_function(filters::trim)),
        ("unique", Value::from_function(filters::unique)),
    ]
}

/// In Jinja, an undefined value has no items.
fn length(value: &Value) -> Result<usize, Error> {
    if value.is_undefined() {
        return Ok(0);
    }
    filters::length(value)
}

fn count_filter(environment: &mut Environment<'_>, name: &'static str, filter: Value) {
    let takes = Takes::of_filter(name);
    let filter = move |state: &mut State<'_, '_>, args: Rest<Value>, named: Kwargs| {
        let mut args = all(args, named);
        takes.count(&args)?;
        if let (Takes::Part, Some(input)) = (takes, args.first_mut()) {
            *input = settled(std::mem::take(input))?;
        }
        let outcome = filter.call(state, &args)?;
        as_in_python(name, &args, outcome)
    };
    environment.add_filter(name, filter);
}

fn bound_filter(environment: &mut Environment<'_>, name: &'static str, filter: Value) {
    let (grows, takes) = (Grows::of_filter(name), Takes::of_filter(name));
    let filter = move |state: &mut State<'_, '_>, args: Rest<Value>, named: Kwargs| {
        let args = all(args, named);
        takes.count(&args)?;
        grows.check(&args)?;
        let mut value = filter.call(state, &args)?;
        if name == "chain" {
            value = chained(value)?;
        }
        as_in_python(name, &args, bounded(value)?)
    };
    environment.add_filter(name, filter);
}

/// Converts a filter's result to what the filter returns in Python.
fn as_in_python(name: &str, args: &[Value], outcome: Value) -> Result<Value, Error> {
    let is_list = matches!(outcome.kind(), ValueKind::Seq | ValueKind::Iterable);
    if !is_list || !iterator::FILTERS.contains(&name) {
        return Ok(outcome);
    }
    charge(part_bytes(&outcome))?;
    let items = outcome.try_iter()?;
    // Python reads an iterator only from its beginning, so Jinja makes a list of it first.
    if name == "reverse" && args.first().is_some_and(iterator::is_iterator) {
        return Ok(items.collect());
    }
    Ok(iterator::over(items))
}

/// Copies the result of `chain`, which otherwise reads its sources at every access; like lists in [`settled`].
fn chained(object: Value) -> Result<Value, Error> {
    count(weigh(&object)?)?;
    if object.kind() != ValueKind::Map {
        return Ok(object.try_iter()?.collect());
    }
    let keys = object.try_iter()?;
    let pairs = keys.map(|key| {
        charge(VALUE_BYTES)?;
        let value = object.get_item(&key)?;
        Ok((key, value))
    });
    Ok(Value::from_pairs(pairs.collect::<Result<Vec<_>, Error>>()?))
}

/// Bounds a function that makes an object of its arguments.
fn bound_arguments(environment: &mut Environment<'_>, name: &'static str) {
    let mut globals = environment.globals();
    let Some(make) = globals.find_map(|(global, value)| (global == name).then_some(value)) else {
        return;
    };
    drop(globals);
    let make = move |state: &mut State<'_, '_>, args: Rest<Value>, named: Kwargs| {
        let args = all(args, named);
        for arg in &args {
            count(weigh(arg)?)?;
        }
        make.call(state, &args)
    };
    environment.add_function(name, make);
}

/// Returns the arguments as a function receives them: named ones last, if there are any.
fn all(args: Rest<Value>, named: Kwargs) -> Vec<Value> {
    let mut args = args.0;
    let named = Value::from(named);
    if named.is_true() {
        args.push(named);
    }
    args
}

/// Adds the functions through which `source` passes values.
pub(super) fn add_functions(environment: &mut Environment<'_>, function: &str) {
    environment.add_function(function.to_owned(), bounded_in);
    environment.add_function(format!("{function}{}", source::PART), read);
    environment.add_function(format!("{function}{}", source::ITEM), reach);
    environment.add_function(format!("{function}{}", source::BASE), cut);
    environment.add_filter(
        format!("{function}{}", source::COMPARED),
        iterator::compared,
    );
    environment.add_filter(format!("{function}{}", source::ORDERED), ordered);
}

/// Returns the value after charging for a read of it: a text, or the items of an iterated list.
fn read(value: Value) -> Result<Value, Error> {
    charge(
        value
            .as_str()
            .map_or_else(|| value.len(), |text| Some(text.len()))
            .unwrap_or(0),
    )?;
    Ok(value)
}

/// Returns the value after charging for access to one item. Lists and objects are not iterated for that.
fn reach(value: Value) -> Result<Value, Error> {
    if matches!(value.kind(), ValueKind::Seq | ValueKind::Map) {
        return Ok(value);
    }
    read(value)
}

/// Returns the value after charging for a slice of it: a text's letters, or a tuple's items, which are copied.
fn cut(value: Value) -> Result<Value, Error> {
    match value.as_str() {
        Some(text) => charge(text.len().saturating_mul(size_of::<char>()))?,
        None if value.is_tuple() => charge(part_bytes(&value))?,
        None => charge(value.len().unwrap_or(0))?,
    }
    settled(value)
}

/// Returns the value if it can be ordered and is within the bounds. The engine orders lists by kind before items, and a slice is
/// another kind than a list; here both become lists.
fn ordered(value: Value) -> Result<Value, Error> {
    iterator::check_ordered(&value)?;
    bounded(value)
}

/// Returns the value, but copies a list that would read its items from another list on access. A chain of such lists could be
/// deeper than the stack.
fn settled(value: Value) -> Result<Value, Error> {
    if value.kind() != ValueKind::Iterable || iterator::is_iterator(&value) {
        return Ok(value);
    }
    charge(part_bytes(&value))?;
    Ok(value.try_iter()?.collect())
}

/// Returns the value if it is within the bounds and does not contain any of these namespaces, whose attribute it becomes.
fn bounded_in(value: Value, namespaces: Rest<Value>) -> Result<Value, Error> {
    let value = bounded(value)?;
    for namespace in namespaces.iter() {
        if holds(&value, namespace, 0)? {
            let detail = "a namespace cannot be an attribute of itself";
            return Err(Error::new(ErrorKind::InvalidOperation, detail));
        }
    }
    Ok(value)
}

/// Returns the value if it is within the bounds.
pub(super) fn bounded(value: Value) -> Result<Value, Error> {
    count(weigh(&value)?)?;
    settled(value)
}

fn print(out: &mut Output<'_>, state: &mut State<'_, '_>, value: &Value) -> Result<(), Error> {
    count(weigh(value)?)?;
    escape_formatter(out, state, value)
}

/// Counts bytes that the template has made or is about to make.
pub(super) fn count(bytes: usize) -> Result<(), Error> {
    check_value(bytes)?;
    charge(bytes)
}

/// Counts bytes that are read without making a value of that size.
fn charge(bytes: usize) -> Result<(), Error> {
    let mut made = MADE.get();
    made.bytes = made.bytes.saturating_add(bytes);
    MADE.set(made);
    if made.bytes > made.bounds.made_bytes {
        return Err(TooLarge::error(made.bounds.made_bytes));
    }
    Ok(())
}

/// Returns the bytes of a text, or those of a list's items without their content.
fn part_bytes(value: &Value) -> usize {
    match value.as_str() {
        Some(text) => text.len(),
        None => value.len().unwrap_or(0).saturating_mul(VALUE_BYTES),
    }
}

/// Returns the bytes of a value and everything in it, counting repeated values each time.
fn weigh(value: &Value) -> Result<usize, Error> {
    // Fast path: most values are texts.
    if let Some(text) = value.as_str() {
        return Ok(text.len());
    }
    let mut weight = 0;
    add_weight(value, 0, &mut weight)?;
    Ok(weight)
}

fn add_weight(value: &Value, depth: usize, weight: &mut usize) -> Result<(), Error> {
    *weight += VALUE_BYTES + value.as_str().map_or(0, str::len);
    check_value(*weight)?;
    each_in(value, depth, |inner| add_weight(inner, depth + 1, weight))
}

/// Whether the value is this namespace, or contains it at any depth.
fn holds(value: &Value, namespace: &Value, depth: usize) -> Result<bool, Error> {
    if value.as_object().is_some() && predicates::is_sameas(value, namespace) {
        return Ok(true);
    }
    let mut is_in = false;
    each_in(value, depth, |inner| {
        is_in = is_in || holds(inner, namespace, depth + 1)?;
        Ok(())
    })?;
    Ok(is_in)
}

/// Calls `visit` with the items of a list, or the keys and values of an object.
fn each_in(
    value: &Value,
    depth: usize,
    mut visit: impl FnMut(&Value) -> Result<(), Error>,
) -> Result<(), Error> {
    let kind = value.kind();
    let is_list = matches!(kind, ValueKind::Seq | ValueKind::Iterable);
    if !is_list && kind != ValueKind::Map {
        return Ok(());
    }
    if depth == MAX_DEPTH {
        let detail = "lists and objects lie too deep in each other";
        return Err(Error::new(ErrorKind::InvalidOperation, detail));
    }
    for item in value.try_iter()? {
        visit(&item)?;
        if !is_list {
            visit(&value.get_item(&item)?)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
