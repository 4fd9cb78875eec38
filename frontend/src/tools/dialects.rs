//! [`ToolDialect`]: how a family of models writes tool calls.

mod aliases;
mod headers;
mod shared;

use std::sync::Arc;

use aliases::ALIASES;
use headers::{behind_kind, name_only, numbered, with_call_id};
use shared::{FUNCTION_TAGS, INVOKES, TAGGED};

use super::ToolSchemas;
use super::harmony::{self, HarmonyParser};
use super::json::{Header, JsonMarks, JsonParser, Shape};
use super::keyed::{KeyedMarks, KeyedParser};
use super::nested::{self, NestedParser};
use super::pythonic::{PythonicMarks, PythonicParser};
use super::xml::{XmlMarks, XmlParser};
use crate::markup::{IdStyle, MarkupParser};

/// How a family of models writes tool calls.
///
/// # Source
/// The chat templates that the models' authors publish.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ToolDialect {
    name: &'static str,
    marks: Marks,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Marks {
    Json(&'static JsonMarks),
    Xml(&'static XmlMarks),
    Pythonic(&'static PythonicMarks),
    Keyed(&'static KeyedMarks),
    Nested,
    Harmony,
}

const fn json(name: &'static str, marks: &'static JsonMarks) -> ToolDialect {
    let marks = Marks::Json(marks);
    ToolDialect { name, marks }
}

const fn xml(name: &'static str, marks: &'static XmlMarks) -> ToolDialect {
    let marks = Marks::Xml(marks);
    ToolDialect { name, marks }
}

const fn pythonic(name: &'static str, marks: &'static PythonicMarks) -> ToolDialect {
    let marks = Marks::Pythonic(marks);
    ToolDialect { name, marks }
}

const fn keyed(name: &'static str, marks: &'static KeyedMarks) -> ToolDialect {
    let marks = Marks::Keyed(marks);
    ToolDialect { name, marks }
}

/// Hunyuan 3's tags with this suffix. Hunyuan 4 leaves out the end of the name.
macro_rules! hunyuan_tags {
    ($suffix:literal, $other:expr) => {
        XmlMarks {
            ignored: &[
                concat!("<tool_calls", $suffix, ">"),
                concat!("</tool_calls", $suffix, ">"),
            ],
            call: concat!("<tool_call", $suffix, ">"),
            name_end: Some(concat!("<tool_sep", $suffix, ">")),
            call_end: concat!("</tool_call", $suffix, ">"),
            key: concat!("<arg_key", $suffix, ">"),
            key_end: concat!("</arg_key", $suffix, ">"),
            value: Some(concat!("<arg_value", $suffix, ">")),
            value_end: concat!("</arg_value", $suffix, ">"),
            other: $other,
            ..INVOKES
        }
    };
}

/// Every dialect, by name.
static DIALECTS: &[ToolDialect] = &[
    json(
        "apertus",
        &JsonMarks {
            starts: &["<|tools_prefix|>"],
            ends: &["<|tools_suffix|>"],
            shape: Shape::Keyed,
            ..TAGGED
        },
    ),
    json(
        "cohere",
        &JsonMarks {
            starts: &["<|START_ACTION|>"],
            ends: &["<|END_ACTION|>"],
            ..TAGGED
        },
    ),
    json(
        "deepseek_v3",
        &JsonMarks {
            starts: &["<｜tool▁call▁begin｜>"],
            ends: &["<｜tool▁call▁end｜>"],
            ignored: &["<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"],
            shape: Shape::Named(Header {
                end: "```json",
                read: behind_kind,
            }),
            is_bare: false,
        },
    ),
    json(
        "deepseek_v31",
        &JsonMarks {
            starts: &["<｜tool▁call▁begin｜>"],
            ends: &["<｜tool▁call▁end｜>"],
            ignored: &["<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"],
            shape: Shape::Named(Header {
                end: "<｜tool▁sep｜>",
                read: name_only,
            }),
            is_bare: false,
        },
    ),
    xml(
        "deepseek_v32",
        &XmlMarks {
            ignored: &[
                "<｜DSML｜function_calls>",
                "</｜DSML｜function_calls>",
                "<｜DSML｜tool_calls>",
                "</｜DSML｜tool_calls>",
            ],
            call: "<｜DSML｜invoke name=\"",
            call_end: "</｜DSML｜invoke>",
            key: "<｜DSML｜parameter name=\"",
            key_end: "\"",
            value: Some(">"),
            value_end: "</｜DSML｜parameter>",
            ..INVOKES
        },
    ),
    xml(
        "dots",
        &XmlMarks {
            ignored: &["<dots_function_call>", "</dots_function_call>"],
            ..INVOKES
        },
    ),
    keyed(
        "functiongemma",
        &KeyedMarks {
            quote: "<escape>",
            start: "<start_function_call>",
            end: "<end_function_call>",
        },
    ),
    pythonic(
        "gemma3",
        &PythonicMarks {
            starts: &["```tool_code"],
            ends: &[],
            is_bare: true,
            json: None,
        },
    ),
    keyed(
        "gemma4",
        &KeyedMarks {
            quote: "<|\"|>",
            start: "<|tool_call>",
            end: "<tool_call|>",
        },
    ),
    json(
        "gigachat3",
        &JsonMarks {
            starts: &["function call<|role_sep|>", "<|function_call|>"],
            ends: &[],
            ignored: &["<|message_sep|>"],
            ..TAGGED
        },
    ),
    xml(
        "gigachat35",
        &XmlMarks {
            ignored: &[
                "<｜GCML｜tool_calls>",
                "</｜GCML｜tool_calls>",
                "<|message_sep|>",
            ],
            call: "<｜GCML｜invoke name=\"",
            call_end: "</｜GCML｜invoke>",
            key: "<｜GCML｜parameter name=\"",
            key_end: "\"",
            value: Some(">"),
            value_end: "</｜GCML｜parameter>",
            ..INVOKES
        },
    ),
    xml(
        "glm45",
        &XmlMarks {
            ignored: &[],
            call: "<tool_call>",
            name_end: None,
            call_end: "</tool_call>",
            key: "<arg_key>",
            key_end: "</arg_key>",
            value: Some("<arg_value>"),
            value_end: "</arg_value>",
            ..INVOKES
        },
    ),
    json(
        "granite",
        &JsonMarks {
            starts: &["<|tool_call|>", "<tool_call>"],
            ends: &["</tool_call>"],
            ..TAGGED
        },
    ),
    json(
        "granite-20b-fc",
        &JsonMarks {
            starts: &["<function_call>"],
            ends: &[],
            ..TAGGED
        },
    ),
    ToolDialect {
        name: "harmony",
        marks: Marks::Harmony,
    },
    json("hermes", &TAGGED),
    json(
        "hunyuan_a13b",
        &JsonMarks {
            starts: &["<tool_calls>"],
            ends: &["</tool_calls>"],
            ..TAGGED
        },
    ),
    // The preview has no suffix.
    xml(
        "hy_v3",
        &hunyuan_tags!(":opensource", Some(&hunyuan_tags!("", None))),
    ),
    xml(
        "hy_v4",
        &hunyuan_tags!(":6124c78e", Some(&hunyuan_tags!("", None))),
    ),
    json(
        "internlm",
        &JsonMarks {
            starts: &["<|action_start|><|plugin|>", "<|action_start|> <|plugin|>"],
            ends: &["<|action_end|>"],
            ..TAGGED
        },
    ),
    // Its template can be told to name the type of each parameter, too.
    xml(
        "k2_horizon",
        &XmlMarks {
            ignored: &["<ifm|tool_calls>", "</ifm|tool_calls>"],
            call: "<ifm|tool_call>",
            name_end: None,
            call_end: "</ifm|tool_call>",
            key: "<ifm|arg_key>",
            key_end: "</ifm|arg_key>",
            value: Some("<ifm|arg_value>"),
            value_end: "</ifm|arg_value>",
            ..INVOKES
        },
    ),
    json(
        "kimi_k2",
        &JsonMarks {
            starts: &["<|tool_call_begin|>"],
            ends: &["<|tool_call_end|>"],
            ignored: &["<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"],
            shape: Shape::Named(Header {
                end: "<|tool_call_argument_begin|>",
                read: numbered,
            }),
            is_bare: false,
        },
    ),
    xml(
        "kimi_k3",
        &XmlMarks {
            ignored: &[
                "<|open|>tools<|sep|>",
                "<|close|>tools<|sep|>",
                "<|open|>response<|sep|>",
                "<|close|>response<|sep|>",
                "<|close|>message<|sep|>",
            ],
            call: "<|open|>call tool=\"",
            name_end: Some("<|sep|>"),
            call_end: "<|close|>call<|sep|>",
            key: "<|open|>argument key=\"",
            key_end: "\"",
            value: Some("<|sep|>"),
            value_end: "<|close|>argument<|sep|>",
            ..INVOKES
        },
    ),
    pythonic(
        "lfm2",
        &PythonicMarks {
            starts: &["<|tool_call_start|>"],
            ends: &["<|tool_call_end|>"],
            is_bare: false,
            json: Some(&JsonMarks {
                starts: &["<|tool_call_start|>"],
                ends: &["<|tool_call_end|>"],
                ..TAGGED
            }),
        },
    ),
    json(
        "llama3_function",
        &JsonMarks {
            starts: &["<function="],
            ends: &["</function>"],
            shape: Shape::Named(Header {
                end: ">",
                read: name_only,
            }),
            ..TAGGED
        },
    ),
    json(
        "llama3_json",
        &JsonMarks {
            starts: &["<|python_tag|>"],
            ends: &[],
            is_bare: true,
            ..TAGGED
        },
    ),
    pythonic(
        "llama4_pythonic",
        &PythonicMarks {
            starts: &["<|python_start|>"],
            ends: &["<|python_end|>"],
            is_bare: true,
            json: None,
        },
    ),
    json(
        "longcat",
        &JsonMarks {
            starts: &["<longcat_tool_call>"],
            ends: &["</longcat_tool_call>"],
            ..TAGGED
        },
    ),
    xml(
        "longcat_flash_lite",
        &XmlMarks {
            ignored: &[],
            call: "<longcat_tool_call>",
            name_end: None,
            call_end: "</longcat_tool_call>",
            key: "<longcat_arg_key>",
            key_end: "</longcat_arg_key>",
            value: Some("<longcat_arg_value>"),
            value_end: "</longcat_arg_value>",
            ..INVOKES
        },
    ),
    xml("minimax_m2", &INVOKES),
    ToolDialect {
        name: "minimax_m3",
        marks: Marks::Nested,
    },
    json(
        "mistral",
        &JsonMarks {
            starts: &["[TOOL_CALLS]"],
            ends: &[],
            shape: Shape::Either(Header {
                end: "[ARGS]",
                read: with_call_id,
            }),
            ..TAGGED
        },
    ),
    json(
        "nemotron_json",
        &JsonMarks {
            starts: &["<TOOLCALL>"],
            ends: &["</TOOLCALL>"],
            ..TAGGED
        },
    ),
    pythonic(
        "olmo3",
        &PythonicMarks {
            starts: &["<function_calls>"],
            ends: &["</function_calls>"],
            is_bare: false,
            json: None,
        },
    ),
    json(
        "phi4",
        &JsonMarks {
            starts: &["functools["],
            ends: &[],
            ..TAGGED
        },
    ),
    pythonic(
        "pythonic",
        &PythonicMarks {
            starts: &[],
            ends: &[],
            is_bare: true,
            json: None,
        },
    ),
    xml("qwen3_coder", &FUNCTION_TAGS),
    xml(
        "seed_oss",
        &XmlMarks {
            ignored: &["<seed:tool_call>", "</seed:tool_call>"],
            ..FUNCTION_TAGS
        },
    ),
    xml(
        "solar_open2",
        &XmlMarks {
            ignored: &[],
            call: "<|tool_call:start|>",
            name_end: None,
            call_end: "<|tool_call:end|>",
            key: "<|tool_arg:start|>",
            key_end: "<|tool_arg:value|>",
            value_end: "<|tool_arg:end|>",
            ..INVOKES
        },
    ),
    xml(
        "step3",
        &XmlMarks {
            ignored: &[
                "<｜tool_calls_begin｜>",
                "<｜tool_calls_end｜>",
                "<｜tool_call_begin｜>",
                "<｜tool_call_end｜>",
                "function<｜tool_sep｜>",
            ],
            call: "<steptml:invoke name=\"",
            call_end: "</steptml:invoke>",
            key: "<steptml:parameter name=\"",
            value_end: "</steptml:parameter>",
            ..INVOKES
        },
    ),
    json(
        "xlam",
        &JsonMarks {
            starts: &["[TOOL_CALLS]", "<tool_call>"],
            is_bare: true,
            ..TAGGED
        },
    ),
];

impl ToolDialect {
    /// Finds a dialect by its name or an alias.
    ///
    /// # Examples
    /// ```
    /// use genset_frontend::tools::ToolDialect;
    ///
    /// assert_eq!(ToolDialect::find("hermes").map(ToolDialect::name), Some("hermes"));
    /// assert_eq!(ToolDialect::find("qwen"), ToolDialect::find("hermes"));
    /// assert_eq!(ToolDialect::find("gpt2"), None);
    /// ```
    #[must_use]
    pub fn find(name: &str) -> Option<Self> {
        let alias = ALIASES.iter().find(|(alias, _)| *alias == name);
        let name = alias.map_or(name, |(_, name)| name);
        DIALECTS
            .iter()
            .find(|dialect| dialect.name == name)
            .copied()
    }

    /// Every dialect, by name.
    #[must_use]
    pub fn all() -> &'static [Self] {
        DIALECTS
    }

    /// The name that flags and model cards use.
    #[must_use]
    pub fn name(self) -> &'static str {
        self.name
    }

    /// Whether this is harmony, whose parser also reads reasoning.
    #[must_use]
    pub fn is_harmony(self) -> bool {
        self.marks == Marks::Harmony
    }

    /// The format of the ids that this server generates for calls.
    #[must_use]
    pub fn id_style(self) -> IdStyle {
        if self.name == "mistral" {
            IdStyle::Nine
        } else {
            IdStyle::Call
        }
    }

    /// The markers.
    pub(crate) fn markers(self) -> Vec<&'static str> {
        match self.marks {
            Marks::Json(marks) => {
                let header = match marks.shape {
                    Shape::Object | Shape::Keyed => None,
                    Shape::Named(header) | Shape::Either(header) => Some(header.end),
                };
                let own = [marks.starts, marks.ends, marks.ignored].concat();
                own.into_iter().chain(header).collect()
            }
            Marks::Xml(marks) => marks.all(),
            Marks::Pythonic(marks) => [marks.starts, marks.ends].concat(),
            Marks::Keyed(marks) => marks.all().to_vec(),
            Marks::Nested => vec![nested::MARKER],
            Marks::Harmony => harmony::MARKERS.to_vec(),
        }
    }

    /// Text that may be special tokens, which the detokenizer must not skip: the markers, and tags inside calls.
    pub(crate) fn tokens(self) -> Vec<&'static str> {
        let mut tokens = self.markers();
        tokens.extend(["<｜tool▁sep｜>", "[CALL_ID]", "｜DSML｜", "｜GCML｜"]);
        if self.marks == Marks::Nested {
            tokens.extend(nested::TAGS);
        }
        tokens
    }

    /// A parser for one answer to a request with these tools.
    #[must_use]
    pub fn parser(self, tools: Arc<ToolSchemas>) -> Box<dyn MarkupParser> {
        match self.marks {
            Marks::Json(marks) => Box::new(JsonParser::new(marks, tools)),
            Marks::Xml(marks) => Box::new(XmlParser::new(marks, tools)),
            Marks::Pythonic(marks) => Box::new(PythonicParser::new(marks, tools)),
            Marks::Keyed(marks) => Box::new(KeyedParser::new(marks)),
            Marks::Nested => Box::new(NestedParser::new(tools)),
            Marks::Harmony => Box::new(HarmonyParser::new(true)),
        }
    }

    /// A harmony parser for an answer without tools: calls are content.
    #[must_use]
    pub fn harmony_without_tools() -> Box<dyn MarkupParser> {
        Box::new(HarmonyParser::new(false))
    }
}

#[cfg(test)]
mod tests {
    use super::{ALIASES, DIALECTS};
    use crate::markup::testing::{assert_guide_knows, assert_python_knows};

    #[test]
    fn python_knows_the_names() {
        let names = DIALECTS.iter().map(|dialect| dialect.name);
        let aliases = ALIASES.iter().map(|(alias, _)| *alias);
        assert_python_knows("TOOL", names, aliases);
    }

    #[test]
    fn the_guide_has_the_names() {
        let names = DIALECTS.iter().map(|dialect| dialect.name);
        let aliases = ALIASES.iter().map(|(alias, _)| *alias);
        assert_guide_knows("Tools", names.chain(aliases));
    }
}
