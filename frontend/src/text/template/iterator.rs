//! Values that Jinja's filters return as iterators in Python, but as lists in the engine used here.
//!
//! Such a value can be read repeatedly, like a list. In comparisons it behaves as an iterator: it equals only itself, and has no
//! order.
//!
//! # Source
//!
//! `jinja2/filters.py`

use std::cmp::Ordering;
use std::fmt;
use std::sync::Arc;

use minijinja::value::{DynObject, Enumerator, Object, ObjectRepr};
use minijinja::{Error, ErrorKind, Value};

/// The filters that return an iterator for a list.
pub(super) const FILTERS: [&str; 10] = [
    "batch",
    "items",
    "map",
    "reject",
    "rejectattr",
    "reverse",
    "select",
    "selectattr",
    "slice",
    "unique",
];

#[derive(Debug)]
struct PythonIterator(Vec<Value>);

impl Object for PythonIterator {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Iterable
    }

    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        self.0.get(key.as_usize()?).cloned()
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        Enumerator::Seq(self.0.len())
    }
}

/// An iterator in a comparison. The engine would compare its items.
#[derive(Debug)]
struct Itself(Arc<PythonIterator>);

impl Object for Itself {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Plain
    }

    fn custom_cmp(self: &Arc<Self>, other: &DynObject) -> Option<Ordering> {
        let other = other.downcast_ref::<Self>()?;
        Some(Arc::as_ptr(&self.0).cmp(&Arc::as_ptr(&other.0)))
    }

    /// The engine compares objects of different types by their text. Writing the items would be work that nothing charges for.
    fn render(self: &Arc<Self>, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("iterator")
    }
}

/// Returns an iterator over the items.
pub(super) fn over(items: impl Iterator<Item = Value>) -> Value {
    Value::from_object(PythonIterator(items.collect()))
}

/// Whether the value is an iterator.
pub(super) fn is_iterator(value: &Value) -> bool {
    value.downcast_object_ref::<PythonIterator>().is_some()
}

/// Returns the value to use in a test for equality.
pub(super) fn compared(value: Value) -> Value {
    match value.downcast_object::<PythonIterator>() {
        Some(iterator) => Value::from_object(Itself(iterator)),
        None => value,
    }
}

/// Refuses an iterator in an ordering comparison.
///
/// # Errors
/// If the value is an iterator.
pub(super) fn check_ordered(value: &Value) -> Result<(), Error> {
    if is_iterator(value) {
        let detail = "an iterator is not ordered; make a list of it";
        return Err(Error::new(ErrorKind::InvalidOperation, detail));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_comparison_does_not_write_the_items() {
        let items = [1, 2].map(Value::from);
        assert_eq!(compared(over(items.into_iter())).to_string(), "iterator");
    }
}
