//! The environment of a chat template in Python: Jinja as the `transformers` library configures it.
//!
//! # Source
//!
//! `_compile_jinja_template` in `transformers/utils/chat_template_utils.py`, and Python's `json.dumps`.

use std::io::{self, Write};

use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, ValueKind, from_args};
use minijinja::{AutoEscape, Environment, Error, ErrorKind, State, Value};
use minijinja_contrib::pycompat;
use serde::Serialize;
use serde_json::ser::{Formatter, Serializer};

use super::bounds::{self, Grows, TooLarge};

/// More than any time format needs.
const MAX_FORMAT_BYTES: usize = 1024;

/// An environment without templates.
pub(super) fn environment() -> Result<Environment<'static>, Error> {
    let mut environment = Environment::new();
    let syntax = SyntaxConfig::builder()
        .trim_blocks(true)
        .lstrip_blocks(true)
        .build()?;
    environment.set_syntax(syntax);
    environment.set_auto_escape_callback(|_| AutoEscape::None);
    environment.set_unknown_method_callback(python_method);
    bounds::install(&mut environment);
    environment.add_filter("tojson", tojson);
    environment.add_test("iterable", is_iterable);
    environment.add_test("sequence", is_sequence);
    environment.add_function("raise_exception", raise_exception);
    environment.add_function("strftime_now", strftime_now);
    Ok(environment)
}

/// In Python, none cannot be iterated; an undefined value can.
fn is_iterable(value: &Value) -> bool {
    is_sequence(value) || value.kind() == ValueKind::Iterable
}

/// In Python, whatever has a length and items is a sequence.
fn is_sequence(value: &Value) -> bool {
    matches!(
        value.kind(),
        ValueKind::Undefined | ValueKind::String | ValueKind::Seq | ValueKind::Map
    )
}

/// Python's methods on strings, lists and dictionaries.
fn python_method(
    state: &mut State<'_, '_>,
    value: &Value,
    method: &str,
    args: &[Value],
) -> Result<Value, Error> {
    match value.as_str() {
        Some(text) => text_method(state, text, value, method, args),
        None => {
            bounds::count_method(method, value, args)?;
            pycompat::unknown_method_callback(state, value, method, args)
        }
    }
}

fn text_method(
    state: &mut State<'_, '_>,
    text: &str,
    value: &Value,
    method: &str,
    args: &[Value],
) -> Result<Value, Error> {
    bounds::count_text_method(method, text, args)?;
    let strip = match method {
        "removeprefix" => str::strip_prefix::<&str>,
        "removesuffix" => str::strip_suffix::<&str>,
        _ => {
            if let Some((grows, args)) = Grows::of_text_method(method, value, args) {
                grows.check(&args)?;
            }
            let outcome = pycompat::unknown_method_callback(state, value, method, args)?;
            return bounds::bounded(outcome);
        }
    };
    let (affix,): (&str,) = from_args(args)?;
    Ok(strip(text, affix).unwrap_or(text).into())
}

/// An exception that the template raised.
#[derive(Debug, thiserror::Error)]
#[error("{message}")]
pub(super) struct Raised {
    pub(super) message: String,
}

fn raise_exception(message: &Value) -> Result<Value, Error> {
    let message = message.to_string();
    Err(Error::from(ErrorKind::InvalidOperation).with_source(Raised { message }))
}

/// Returns the current local time in a `strftime` format.
fn strftime_now(format: &str) -> Result<String, Error> {
    if format.len() > MAX_FORMAT_BYTES {
        return Err(TooLarge::error(MAX_FORMAT_BYTES));
    }
    jiff::fmt::strtime::format(format, &jiff::Zoned::now()).map_err(|source| {
        Error::new(ErrorKind::InvalidOperation, "invalid strftime format").with_source(source)
    })
}

/// `json.dumps(value, ensure_ascii=False)`, with its other options as keyword arguments.
fn tojson(value: Value, options: Kwargs) -> Result<String, Error> {
    let style = JsonStyle::from_kwargs(&options)?;
    let sort_keys: Option<bool> = options.get("sort_keys")?;
    options.assert_all_used()?;
    if sort_keys == Some(true) {
        let mut value = serde_json::to_value(&value).map_err(json_error)?;
        value.sort_all_objects();
        style.write(&value)
    } else {
        style.write(&value)
    }
}

fn json_error(source: serde_json::Error) -> Error {
    Error::new(ErrorKind::BadSerialization, "cannot write this as JSON").with_source(source)
}

/// Bounds the output by the largest value: indentation can make JSON far longer than the value.
struct Limited {
    bytes: Vec<u8>,
    max_bytes: usize,
    is_full: bool,
}

impl Limited {
    fn new(max_bytes: usize) -> Self {
        Self {
            bytes: Vec::new(),
            max_bytes,
            is_full: false,
        }
    }
}

impl Write for Limited {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.is_full |= self.bytes.len() + bytes.len() > self.max_bytes;
        if self.is_full {
            return Err(io::ErrorKind::StorageFull.into());
        }
        self.bytes.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The format options of `json.dumps`.
struct JsonStyle {
    item_separator: String,
    key_separator: String,
    /// The indentation of one level; `None` for a single line.
    indent: Option<String>,
    ensure_ascii: bool,
    depth: usize,
    /// Whether the innermost list or object has an item yet.
    has_items: bool,
}

impl JsonStyle {
    fn from_kwargs(options: &Kwargs) -> Result<Self, Error> {
        let indent = match options.get::<Option<Value>>("indent")? {
            Some(indent) if indent.is_none() => None,
            Some(indent) => Some(match indent.as_str() {
                Some(text) => text.to_owned(),
                None => " ".repeat(indent_width(indent)?),
            }),
            None => None,
        };
        let separators = match options.get::<Option<Value>>("separators")? {
            Some(separators) if !separators.is_none() => {
                let items = separators.try_iter()?.map(String::from);
                Some(items.collect::<Vec<_>>())
            }
            Some(_) | None => None,
        };
        let (item_separator, key_separator) = match separators.as_deref() {
            Some([item, key]) => (item.clone(), key.clone()),
            Some(_) => {
                let detail = "separators must be an item and a key separator";
                return Err(Error::new(ErrorKind::InvalidOperation, detail));
            }
            None if indent.is_some() => (",".to_owned(), ": ".to_owned()),
            None => (", ".to_owned(), ": ".to_owned()),
        };
        Ok(Self {
            item_separator,
            key_separator,
            indent,
            ensure_ascii: options
                .get::<Option<bool>>("ensure_ascii")?
                .unwrap_or(false),
            depth: 0,
            has_items: false,
        })
    }

    fn write<T: Serialize>(self, value: &T) -> Result<String, Error> {
        let mut out = Limited::new(bounds::max_value_bytes());
        let written = value.serialize(&mut Serializer::with_formatter(&mut out, self));
        if out.is_full {
            return Err(TooLarge::error(out.max_bytes));
        }
        written.map_err(json_error)?;
        bounds::count(out.bytes.len())?;
        String::from_utf8(out.bytes).map_err(|source| {
            Error::new(ErrorKind::BadSerialization, "not UTF-8").with_source(source)
        })
    }

    fn open<W: ?Sized + Write>(&mut self, writer: &mut W, bracket: &[u8]) -> io::Result<()> {
        self.depth += 1;
        self.has_items = false;
        writer.write_all(bracket)
    }

    fn close<W: ?Sized + Write>(&mut self, writer: &mut W, bracket: &[u8]) -> io::Result<()> {
        self.depth -= 1;
        if self.has_items {
            self.new_line(writer)?;
        }
        // This list or object was an item of its parent.
        self.has_items = true;
        writer.write_all(bracket)
    }

    fn begin_item<W: ?Sized + Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        if !first {
            writer.write_all(self.item_separator.as_bytes())?;
        }
        self.has_items = true;
        self.new_line(writer)
    }

    fn new_line<W: ?Sized + Write>(&self, writer: &mut W) -> io::Result<()> {
        if let Some(indent) = &self.indent {
            writer.write_all(b"\n")?;
            for _ in 0..self.depth {
                writer.write_all(indent.as_bytes())?;
            }
        }
        Ok(())
    }
}

/// Caps the indentation at a width that no template exceeds.
fn indent_width(indent: Value) -> Result<usize, Error> {
    Ok(usize::try_from(indent)?.min(64))
}

impl Formatter for JsonStyle {
    fn begin_array<W: ?Sized + Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.open(writer, b"[")
    }

    fn end_array<W: ?Sized + Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.close(writer, b"]")
    }

    fn begin_array_value<W: ?Sized + Write>(
        &mut self,
        writer: &mut W,
        first: bool,
    ) -> io::Result<()> {
        self.begin_item(writer, first)
    }

    fn begin_object<W: ?Sized + Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.open(writer, b"{")
    }

    fn end_object<W: ?Sized + Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.close(writer, b"}")
    }

    fn begin_object_key<W: ?Sized + Write>(
        &mut self,
        writer: &mut W,
        first: bool,
    ) -> io::Result<()> {
        self.begin_item(writer, first)
    }

    fn begin_object_value<W: ?Sized + Write>(&mut self, writer: &mut W) -> io::Result<()> {
        writer.write_all(self.key_separator.as_bytes())
    }

    fn write_f64<W: ?Sized + Write>(&mut self, writer: &mut W, value: f64) -> io::Result<()> {
        writer.write_all(python_float(value).as_bytes())
    }

    fn write_string_fragment<W: ?Sized + Write>(
        &mut self,
        writer: &mut W,
        fragment: &str,
    ) -> io::Result<()> {
        if !self.ensure_ascii {
            return writer.write_all(fragment.as_bytes());
        }
        for c in fragment.chars() {
            if c.is_ascii() {
                write!(writer, "{c}")?;
            } else {
                for unit in c.encode_utf16(&mut [0; 2]) {
                    write!(writer, "\\u{unit:04x}")?;
                }
            }
        }
        Ok(())
    }
}

/// Formats a finite number like Python's `repr`: scientific from 1e16 on and below 1e-4.
fn python_float(value: f64) -> String {
    let magnitude = value.abs();
    if magnitude != 0.0 && !(1e-4..1e16).contains(&magnitude) {
        let text = format!("{value:e}");
        let (digits, exponent) = text.split_once('e').unwrap_or((&text, "0"));
        let (sign, exponent) = match exponent.strip_prefix('-') {
            Some(exponent) => ('-', exponent),
            None => ('+', exponent),
        };
        return format!("{digits}e{sign}{exponent:0>2}");
    }
    format!("{value:?}")
}
