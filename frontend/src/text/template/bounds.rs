//! What one rendering may make. Fuel bounds how many instructions it takes, but one of them can double a text.
//!
//! Whatever a template makes is weighed: what it prints, what filters and methods that can grow a value return, and the values
//! that `source` leads through [`bounded`]. What only takes parts of its input is counted by what it reads: an instruction may
//! read all of a large value. So memory and time are bounded whatever the template does, by [`Bounds::made_bytes`] and one step
//! more.

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

/// How many bytes one rendering may make.
#[derive(Debug, Clone, Copy)]
pub(super) struct Bounds {
    /// Of one value.
    pub(super) value_bytes: usize,
    /// In all, kept or not, and read. A text that grows by a message at a time is made anew each time.
    pub(super) made_bytes: usize,
    /// In bytes too: of the template's own text, as often as it is repeated.
    pub(super) repeated: usize,
}

impl Bounds {
    /// Values of 16 million tokens of text.
    pub(super) const DEFAULT: Self = Self {
        value_bytes: 64 << 20,
        made_bytes: 1 << 30,
        repeated: 1 << 30,
    };

    /// What is made within a few milliseconds.
    pub(super) const QUICK: Self = Self {
        value_bytes: 1 << 20,
        made_bytes: 1 << 20,
        // Only copied. Macros of some kilobytes are in use.
        repeated: 8 << 20,
    };
}

/// What a value takes beside its text.
const VALUE_BYTES: usize = 32;

/// How deep lists and objects may lie in each other: they are written out by recursion.
const MAX_DEPTH: usize = 128;

/// A template went beyond a bound.
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

/// What has been made of what may be.
#[derive(Debug, Clone, Copy)]
struct Made {
    bounds: Bounds,
    bytes: usize,
}

thread_local! {
    /// Of this thread's rendering, which is one call on one thread and does not begin another.
    static MADE: Cell<Made> = const {
        Cell::new(Made { bounds: Bounds::DEFAULT, bytes: 0 })
    };
}

/// Counts from nothing while `render` runs.
pub(super) fn counted<T>(bounds: Bounds, render: impl FnOnce() -> T) -> T {
    MADE.set(Made { bounds, bytes: 0 });
    render()
}

/// How many bytes a value of the present rendering may have.
pub(super) fn max_value_bytes() -> usize {
    MADE.get().bounds.value_bytes
}

/// Refuses a value of so many bytes if it is too large.
fn check_value(bytes: usize) -> Result<(), Error> {
    let limit_bytes = max_value_bytes();
    if bytes > limit_bytes {
        return Err(TooLarge::error(limit_bytes));
    }
    Ok(())
}

/// Adds the bounds to an environment, whose filters must not be replaced after.
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

/// The filters of which something larger than their input may come; `tojson` is in `python`.
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

/// The other filters that may read all of their input; what is left does not.
fn reading_filters() -> [(&'static str, Value); 23] {
    [
        ("count", Value::from_function(filters::length)),
        ("dictsort", Value::from_function(filters::dictsort)),
        ("first", Value::from_function(filters::first)),
        ("float", Value::from_function(filters::float)),
        ("groupby", Value::from_function(filters::groupby)),
        ("int", Value::from_function(filters::int)),
        ("items", Value::from_function(filters::items)),
        ("last", Value::from_function(filters::last)),
        ("length", Value::from_function(filters::length)),
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

/// What a filter gives in Python.
fn as_in_python(name: &str, args: &[Value], outcome: Value) -> Result<Value, Error> {
    let is_list = matches!(outcome.kind(), ValueKind::Seq | ValueKind::Iterable);
    if !is_list || !iterator::FILTERS.contains(&name) {
        return Ok(outcome);
    }
    charge(part_bytes(&outcome))?;
    let items = outcome.try_iter()?;
    // Python reads an iterator from its beginning only, so Jinja makes a list of it first.
    if name == "reverse" && args.first().is_some_and(iterator::is_iterator) {
        return Ok(items.collect());
    }
    Ok(iterator::over(items))
}

/// What `chain` makes asks those it is made of whenever it is read: the same without them, as of lists in [`settled`].
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

/// Of a function that makes an object of its arguments.
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

/// Arguments as a function gets them: those with names are the last, if there are any.
fn all(args: Rest<Value>, named: Kwargs) -> Vec<Value> {
    let mut args = args.0;
    let named = Value::from(named);
    if named.is_true() {
        args.push(named);
    }
    args
}

/// Adds what `source` leads values through.
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

/// The value, once what looks into it is counted: a text, or the items of a list that is passed over.
fn read(value: Value) -> Result<Value, Error> {
    charge(
        value
            .as_str()
            .map_or_else(|| value.len(), |text| Some(text.len()))
            .unwrap_or(0),
    )?;
    Ok(value)
}

/// The value, once what it takes to reach an item is counted: lists and objects are not passed over for one.
fn reach(value: Value) -> Result<Value, Error> {
    if matches!(value.kind(), ValueKind::Seq | ValueKind::Map) {
        return Ok(value);
    }
    read(value)
}

/// The value, once what a slice of it takes is counted: letters of a text, or the items of a tuple, which are copied.
fn cut(value: Value) -> Result<Value, Error> {
    match value.as_str() {
        Some(text) => charge(text.len().saturating_mul(size_of::<char>()))?,
        None if value.is_tuple() => charge(part_bytes(&value))?,
        None => charge(value.len().unwrap_or(0))?,
    }
    settled(value)
}

/// The value, if it has an order and the template may have made it. The engine orders lists by kind before items, and part of a
/// list is another kind than a list; here both are lists.
fn ordered(value: Value) -> Result<Value, Error> {
    iterator::check_ordered(&value)?;
    bounded(value)
}

/// The value, but no list that takes its items from another when it is read. Such a one of such a one, and so on, could lie
/// deeper than a stack reaches.
fn settled(value: Value) -> Result<Value, Error> {
    if value.kind() != ValueKind::Iterable || iterator::is_iterator(&value) {
        return Ok(value);
    }
    charge(part_bytes(&value))?;
    Ok(value.try_iter()?.collect())
}

/// The value, if the template may have made it, and may make it an attribute of these namespaces.
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

/// The value, if the template may have made it.
pub(super) fn bounded(value: Value) -> Result<Value, Error> {
    count(weigh(&value)?)?;
    settled(value)
}

fn print(out: &mut Output<'_>, state: &mut State<'_, '_>, value: &Value) -> Result<(), Error> {
    count(weigh(value)?)?;
    escape_formatter(out, state, value)
}

/// Counts bytes that the template is about to make, or has made.
pub(super) fn count(bytes: usize) -> Result<(), Error> {
    check_value(bytes)?;
    charge(bytes)
}

/// Counts bytes that are read, of which nothing so large is made.
fn charge(bytes: usize) -> Result<(), Error> {
    let mut made = MADE.get();
    made.bytes = made.bytes.saturating_add(bytes);
    MADE.set(made);
    if made.bytes > made.bounds.made_bytes {
        return Err(TooLarge::error(made.bounds.made_bytes));
    }
    Ok(())
}

/// The bytes of a text, or of the items of a list without what is in them.
fn part_bytes(value: &Value) -> usize {
    match value.as_str() {
        Some(text) => text.len(),
        None => value.len().unwrap_or(0).saturating_mul(VALUE_BYTES),
    }
}

/// The bytes of a value and all that is in it, as often as it is in it.
fn weigh(value: &Value) -> Result<usize, Error> {
    // Most values are texts.
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

/// Whether the value is this one, or has it anywhere in it.
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
