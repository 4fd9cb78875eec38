//! Marks that several dialects have in common: a row names what differs.

use crate::tools::json::{JsonMarks, Shape};
use crate::tools::xml::XmlMarks;

/// One JSON object or a list of them between two markers.
pub(super) const TAGGED: JsonMarks = JsonMarks {
    starts: &["<tool_call>"],
    ends: &["</tool_call>"],
    ignored: &[],
    shape: Shape::Object,
    is_bare: false,
};

/// Tags named after the function and its parameters.
pub(super) const FUNCTION_TAGS: XmlMarks = XmlMarks {
    ignored: &["<tool_call>", "</tool_call>"],
    call: "<function=",
    name_end: Some(">"),
    call_end: "</function>",
    key: "<parameter=",
    key_end: ">",
    value: None,
    value_end: "</parameter>",
    value_stops: Some(["\n</function>", "\n<parameter=", "\n</parameter"]),
    is_on_lines: true,
    other: None,
};

/// Tags whose attributes name the function and its parameters.
pub(super) const INVOKES: XmlMarks = XmlMarks {
    ignored: &["<minimax:tool_call>", "</minimax:tool_call>"],
    call: "<invoke name=\"",
    name_end: Some("\">"),
    call_end: "</invoke>",
    key: "<parameter name=\"",
    key_end: "\">",
    value: None,
    value_end: "</parameter>",
    value_stops: None,
    is_on_lines: false,
    other: None,
};
