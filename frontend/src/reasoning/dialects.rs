//! [`ReasoningDialect`]: how a family of models marks its reasoning.

use super::shown::ShownParser;
use super::tags::{Tags, TagsParser};
use crate::markup::MarkupParser;

/// How a family of models marks its reasoning.
///
/// # Source
/// The chat templates and tokenizers that the models' authors publish.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReasoningDialect {
    name: &'static str,
    /// `None`: harmony.
    tags: Option<&'static Tags>,
}

const THINK: Tags = Tags {
    start: "<think>",
    end: "</think>",
    starts_inside: false,
    ends_at: &[],
    dropped: &[],
    frame: &[],
    frame_ends_at: &[],
    is_shown: false,
    other: None,
};

/// For models whose prompt contains the first marker.
const THINKING: Tags = Tags {
    starts_inside: true,
    ..THINK
};

/// The preview of Hunyuan 3 and Hunyuan A13B have no suffix. The release's prompt always ends with one of its markers.
const HUNYUAN: Tags = Tags {
    ends_at: &["<tool_calls>"],
    other: Some(&Tags {
        start: "<think:opensource>",
        end: "</think:opensource>",
        ends_at: &["<tool_calls:opensource>"],
        ..THINK
    }),
    ..THINK
};

const fn row(name: &'static str, tags: &'static Tags) -> ReasoningDialect {
    ReasoningDialect {
        name,
        tags: Some(tags),
    }
}

/// Every dialect, by name.
static DIALECTS: &[ReasoningDialect] = &[
    row(
        "apertus",
        &Tags {
            start: "<|inner_prefix|>",
            end: "<|inner_suffix|>",
            ends_at: &["<|tools_prefix|>"],
            ..THINK
        },
    ),
    row(
        "cohere",
        &Tags {
            start: "<|START_THINKING|>",
            end: "<|END_THINKING|>",
            ends_at: &["<|START_ACTION|>"],
            dropped: &[
                "<|START_RESPONSE|>",
                "<|END_RESPONSE|>",
                "<|START_TEXT|>",
                "<|END_TEXT|>",
            ],
            ..THINK
        },
    ),
    row("deepseek_r1", &THINKING),
    row(
        "deepseek_v31",
        &Tags {
            ends_at: &[
                "<｜tool▁calls▁begin｜>",
                "<｜DSML｜function_calls>",
                "<｜DSML｜tool_calls>",
            ],
            ..THINK
        },
    ),
    row(
        "ernie45",
        &Tags {
            frame: &["<response>", "</response>"],
            frame_ends_at: &["<tool_call>"],
            ..THINKING
        },
    ),
    row(
        "gemma4",
        &Tags {
            start: "<|channel>thought",
            end: "<channel|>",
            ends_at: &["<|tool_call>"],
            ..THINK
        },
    ),
    row(
        "glm45",
        &Tags {
            ends_at: &["<tool_call>"],
            ..THINK
        },
    ),
    row(
        "granite",
        &Tags {
            start: "Here is my thought process:",
            end: "Here is my response:",
            ..THINK
        },
    ),
    row(
        "granite33",
        &Tags {
            frame: &["<response>", "</response>"],
            frame_ends_at: &["<|tool_call|>"],
            ..THINK
        },
    ),
    ReasoningDialect {
        name: "harmony",
        tags: None,
    },
    // Hunyuan 3 or A13B. The latter's answer is in a frame, whose markers the former may write as text.
    row(
        "hunyuan",
        &Tags {
            frame: &["<answer>", "</answer>"],
            frame_ends_at: &["<tool_calls>"],
            ..HUNYUAN
        },
    ),
    row(
        "hunyuan_a13b",
        &Tags {
            ends_at: &["<tool_calls>"],
            dropped: &["<answer>", "</answer>"],
            ..THINK
        },
    ),
    row("hy_v3", &HUNYUAN),
    row(
        "hy_v4",
        &Tags {
            start: "<think:6124c78e>",
            end: "</think:6124c78e>",
            ends_at: &["<tool_calls:6124c78e>"],
            other: Some(&Tags {
                ends_at: &["<tool_calls>"],
                ..THINK
            }),
            ..THINK
        },
    ),
    row(
        "kimi",
        &Tags {
            start: "◁think▷",
            end: "◁/think▷",
            ..THINK
        },
    ),
    row(
        "kimi_k2",
        &Tags {
            ends_at: &["<|tool_calls_section_begin|>", "<|tool_call_begin|>"],
            ..THINK
        },
    ),
    row(
        "kimi_k3",
        &Tags {
            start: "<|open|>think<|sep|>",
            end: "<|close|>think<|sep|>",
            ends_at: &["<|open|>response<|sep|>", "<|open|>tools<|sep|>"],
            dropped: &[
                "<|open|>response<|sep|>",
                "<|close|>response<|sep|>",
                "<|close|>message<|sep|>",
            ],
            ..THINK
        },
    ),
    row(
        "minimax_m2",
        &Tags {
            ends_at: &["<minimax:tool_call>"],
            ..THINKING
        },
    ),
    row(
        "minimax_m2_append_think",
        &Tags {
            is_shown: true,
            ..THINKING
        },
    ),
    row(
        "minimax_m3",
        &Tags {
            start: "<mm:think>",
            end: "</mm:think>",
            ends_at: &["]<]minimax[>[<tool_call>"],
            ..THINK
        },
    ),
    row(
        "mistral",
        &Tags {
            start: "[THINK]",
            end: "[/THINK]",
            ..THINK
        },
    ),
    row(
        "nemotron",
        &Tags {
            ends_at: &["<tool_call>"],
            ..THINK
        },
    ),
    row("olmo3", &THINKING),
    row("phi4", &THINK),
    row(
        "qwen3",
        &Tags {
            ends_at: &["<tool_call>"],
            ..THINK
        },
    ),
    row(
        "qwen3_thinking",
        &Tags {
            ends_at: &["<tool_call>"],
            ..THINKING
        },
    ),
    row(
        "seed_oss",
        &Tags {
            start: "<seed:think>",
            end: "</seed:think>",
            ends_at: &["<seed:tool_call>"],
            ..THINK
        },
    ),
    row(
        "solar_open2",
        &Tags {
            start: "<|think:start|>",
            end: "<|think:end|>",
            ends_at: &["<|tool_call:start|>"],
            ..THINK
        },
    ),
    row("step3", &THINKING),
];

/// Names that other servers use.
const ALIASES: &[(&str, &str)] = &[
    ("apertus2509", "apertus"),
    ("basic", "nemotron"),
    ("cohere_command3", "cohere"),
    ("cohere_command4", "cohere"),
    ("deepseek", "deepseek_r1"),
    ("deepseek-r1", "deepseek_r1"),
    ("deepseek-v3", "deepseek_v31"),
    ("deepseek-v4", "deepseek_v31"),
    ("deepseek_v3", "deepseek_v31"),
    ("deepseek_v3_1", "deepseek_v31"),
    ("deepseek_v3_2", "deepseek_v31"),
    ("deepseek_v4", "deepseek_v31"),
    ("deepseekv4", "deepseek_v31"),
    ("gemma-4", "gemma4"),
    ("glm", "glm45"),
    ("glm47", "glm45"),
    ("gpt-oss", "harmony"),
    ("gpt_oss", "harmony"),
    ("holo2", "deepseek_r1"),
    ("interns1", "qwen3"),
    ("kimi_k25", "kimi_k2"),
    ("mimo", "qwen3"),
    ("minimax", "minimax_m2"),
    ("minimax-append-think", "minimax_m2_append_think"),
    ("minimax-m3", "minimax_m3"),
    ("minimax_append_think", "minimax_m2_append_think"),
    ("nano_v3", "nemotron"),
    ("nemotron3", "nemotron"),
    ("nemotron_3", "nemotron"),
    ("nemotron_deci", "nemotron"),
    ("nemotron_nano", "nemotron"),
    ("nemotron_v3", "nemotron"),
    ("openai_gptoss", "harmony"),
    ("poolside_v1", "qwen3"),
    ("qwen3-thinking", "qwen3_thinking"),
    ("step3p5", "step3"),
];

impl ReasoningDialect {
    /// Finds a dialect by its name or an alias from other servers.
    ///
    /// # Examples
    /// ```
    /// use genset_frontend::reasoning::ReasoningDialect;
    ///
    /// let dialect = ReasoningDialect::find("qwen3").expect("it is known");
    /// assert_eq!(dialect.name(), "qwen3");
    /// assert!(ReasoningDialect::find("gpt2").is_none());
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

    /// Whether this is harmony, which only its tool parser reads.
    #[must_use]
    pub fn is_harmony(self) -> bool {
        self.tags.is_none()
    }

    /// The markers, which the detokenizer must not skip.
    pub(crate) fn markers(self) -> Vec<&'static str> {
        self.tags.map(Tags::markers).unwrap_or_default()
    }

    /// A parser for one answer; `None` for harmony. `prompt`, if known, tells whether the reasoning has already begun: many
    /// templates end with the first marker, or, if reasoning is disabled, with the last. With `has_tools`, a tool call ends
    /// the reasoning.
    #[must_use]
    pub fn parser(self, prompt: Option<&str>, has_tools: bool) -> Option<Box<dyn MarkupParser>> {
        let tags = self.tags?;
        let prompt = prompt.map(str::trim_end);
        let ends_with = |marker: &str| prompt.is_some_and(|prompt| prompt.ends_with(marker));
        let other = tags.other;
        let other = other.filter(|tags| ends_with(tags.start) || ends_with(tags.end));
        let tags = other.unwrap_or(tags);
        let is_inside = if ends_with(tags.start) {
            true
        } else {
            tags.starts_inside && !ends_with(tags.end)
        };
        if tags.is_shown {
            let start = is_inside.then_some(tags.start);
            return Some(Box::new(ShownParser::new(start)));
        }
        Some(Box::new(TagsParser::new(tags, is_inside, has_tools)))
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
        assert_python_knows("REASONING", names, aliases);
    }

    #[test]
    fn the_guide_has_the_names() {
        let names = DIALECTS.iter().map(|dialect| dialect.name);
        let aliases = ALIASES.iter().map(|(alias, _)| *alias);
        assert_guide_knows("Reasoning", names.chain(aliases));
    }
}
