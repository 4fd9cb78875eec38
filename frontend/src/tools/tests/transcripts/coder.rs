//! Values and marks of `qwen3_coder` that need care.

use super::{NOW, TWO, Transcript};

pub(super) const CODER: &[Transcript] = &[
    // A value that contains the marker that ends values: the text it cuts off is content after the call.
    (
        "qwen3_coder",
        "<function=write_file>\n<parameter=text>\nsee </parameter> here\n</parameter>\n<parameter=path>\na\n</parameter>\n\
         </function>",
        "here",
        &[("write_file", r#"{"text": "see ", "path": "a"}"#)],
    ),
    // Values whose end markers the model omitted.
    (
        "qwen3_coder",
        "<tool_call>\n<function=write_file>\n<parameter=path>\na\n\n<parameter=options>\n{\"a\": 1}\n</function>\n</tool_call>\n\
         <tool_call>\n<function=now>\n</function>\n</tool_call>",
        "",
        &[
            ("write_file", r#"{"path": "a\n", "options": {"a": 1}}"#),
            NOW,
        ],
    ),
    (
        "qwen3_coder",
        "<function=get_weather>\n<parameter=city>\nOslo\n</function>\n\n",
        "",
        &[("get_weather", r#"{"city": "Oslo"}"#)],
    ),
    // Values whose end markers are wrong.
    (
        "qwen3_coder",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nOslo\n</parameter/>\n<parameter=days>\n3\n</parameter1>\n</function>\n\
         </tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
        "",
        TWO,
    ),
    (
        "qwen3_coder",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nOslo\n</parameter\n<parameter=days>\n3\n</parameter_function>\n\
         </tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
        "",
        TWO,
    ),
    (
        "qwen3_coder",
        "<function=write_file>\n<parameter=text>\n<a>\n</parameters>\n</parameter\n</a>\n</parameter>\n</function>",
        "",
        &[(
            "write_file",
            r#"{"text": "<a>\n</parameters>\n</parameter\n</a>"}"#,
        )],
    ),
    // Lines that look like such ends, but belong to the value: code about tool calls.
    (
        "qwen3_coder",
        "<function=write_file>\n<parameter=text>\n</function>\nSo:\n<parameter=days>\n<parameter=text>\n<parameter=path\n>\n\
         </parameter>\n<parameter=path>\na\n</parameter>\n</function>",
        "",
        &[(
            "write_file",
            r#"{"text": "</function>\nSo:\n<parameter=days>\n<parameter=text>\n<parameter=path\n>", "path": "a"}"#,
        )],
    ),
    // The same markers within a line are text.
    (
        "qwen3_coder",
        "<function=write_file>\n<parameter=text>\nIn <parameter=a> or </function>.\n</parameter>\n</function>",
        "",
        &[(
            "write_file",
            r#"{"text": "In <parameter=a> or </function>."}"#,
        )],
    ),
];
