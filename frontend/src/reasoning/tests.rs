use proptest::prelude::{Just, ProptestConfig, any, prop_assert, prop_assert_eq, proptest};
use proptest::strategy::{Strategy, Union};

use super::ReasoningDialect;
use crate::markup::testing::{characters, cut, parse, soup};

/// Dialect, text, reasoning, content.
const TRANSCRIPTS: &[(&str, &str, &str, &str)] = &[
    (
        "apertus",
        "<|inner_prefix|>Hm.<|inner_suffix|>Yes.",
        "Hm.",
        "Yes.",
    ),
    (
        "apertus",
        "<|inner_prefix|>Hm.<|tools_prefix|>[]",
        "Hm.",
        "<|tools_prefix|>[]",
    ),
    (
        "cohere",
        "<|START_THINKING|>Hm, <b>.<|END_THINKING|><|START_RESPONSE|>Yes.<|END_RESPONSE|>",
        "Hm, <b>.",
        "Yes.",
    ),
    (
        "cohere",
        "<|START_THINKING|>Hm.<|END_THINKING|><|START_TEXT|>Yes.<|END_TEXT|>",
        "Hm.",
        "Yes.",
    ),
    (
        "deepseek_r1",
        "Hm.\nSo.\n</think>\n\nYes, 1 < 2.\n",
        "Hm.\nSo.",
        "Yes, 1 < 2.\n",
    ),
    (
        "deepseek_r1",
        "<think>\nHm.\n</think>\n\nYes.",
        "Hm.",
        "Yes.",
    ),
    ("deepseek_r1", "Hm. No en", "Hm. No en", ""),
    ("deepseek_r1", "Hm.</thin", "Hm.</thin", ""),
    ("deepseek_v31", "<think>Hm.</think>Yes.", "Hm.", "Yes."),
    ("ernie45", "Hm.\n</think>\n\nYes.", "Hm.", "Yes."),
    (
        "ernie45",
        "Hm.\n</think>\n\n<response>\nYes.\n</response>\n",
        "Hm.",
        "Yes.",
    ),
    (
        "ernie45",
        "Hm.\n</think>\n\n<response>\nI look.\n</response>\n\n<tool_call>\n{}\n</tool_call>",
        "Hm.",
        "I look.\n<tool_call>\n{}\n</tool_call>",
    ),
    (
        "gemma4",
        "<|channel>thought\nHm.<channel|>Yes.",
        "Hm.",
        "Yes.",
    ),
    ("glm45", "\n<think>Hm.</think>\nYes.", "Hm.", "Yes."),
    (
        "granite",
        "Here is my thought process:\nHm.\n\nHere is my response:\nYes. Here is my",
        "Hm.",
        "Yes. Here is my",
    ),
    (
        "granite33",
        "<think>\nHm.\n</think>\n\n<response>\nYes.\n</response>",
        "Hm.",
        "Yes.",
    ),
    (
        "granite33",
        "<response>I look.</response><|tool_call|>[]",
        "",
        "I look.<|tool_call|>[]",
    ),
    (
        "hunyuan",
        "<think>\nHm.\n</think>\n<answer>\nYes.\n</answer>",
        "Hm.",
        "Yes.",
    ),
    (
        "hunyuan_a13b",
        "<think>\nHm.\n</think>\n<answer>\nYes.\n</answer>",
        "Hm.",
        "Yes.",
    ),
    (
        "hunyuan_a13b",
        "<think>\nHm.\n<tool_calls>[]",
        "Hm.",
        "<tool_calls>[]",
    ),
    ("hy_v3", "<think>Hm.</think>Yes.", "Hm.", "Yes."),
    (
        "hy_v4",
        "<think:6124c78e>Hm.</think:6124c78e>Yes.",
        "Hm.",
        "Yes.",
    ),
    (
        "kimi",
        "◁think▷Hm ◁.◁/think▷Yes ◁/thi",
        "Hm ◁.",
        "Yes ◁/thi",
    ),
    ("kimi_k2", "<think>Hm.</think>Yes.", "Hm.", "Yes."),
    (
        "kimi_k3",
        "<|open|>think<|sep|>Hm.<|close|>think<|sep|><|open|>response<|sep|>Yes.<|close|>response<|sep|><|close|>message<|sep|>",
        "Hm.",
        "Yes.",
    ),
    (
        "kimi_k3",
        "<|open|>think<|sep|>Hm.<|open|>response<|sep|>Yes.",
        "Hm.",
        "Yes.",
    ),
    ("minimax_m2", "Hm.\n</think>\n\nYes.", "Hm.", "Yes."),
    (
        "minimax_m2_append_think",
        "Hm.\n</think>\n\nYes.",
        "",
        "<think>Hm.\n</think>\n\nYes.",
    ),
    // Without reasoning, it may begin with the last marker.
    ("minimax_m3", "</mm:think>Yes.", "", "Yes."),
    (
        "minimax_m3",
        "<mm:think>Hm.]<]minimax[>[<tool_call>",
        "Hm.",
        "]<]minimax[>[<tool_call>",
    ),
    (
        "mistral",
        "[THINK]Hm [1].[/THINK]Yes [T].",
        "Hm [1].",
        "Yes [T].",
    ),
    ("nemotron", "<think>\nHm.\n</think>\nYes.", "Hm.", "Yes."),
    (
        "nemotron",
        "<think>\nHm.\n<tool_call>\n",
        "Hm.",
        "<tool_call>\n",
    ),
    ("olmo3", "Hm.</think>Yes.", "Hm.", "Yes."),
    ("phi4", "<think>Hm.</think>Yes.", "Hm.", "Yes."),
    ("qwen3", "<think>\nHm.\n</think>\n\nYes.", "Hm.", "Yes."),
    ("qwen3", "  Just yes. <thin", "", "  Just yes. <thin"),
    (
        "qwen3",
        "<think>\n\n</think>\n\nYes.</think> And <think>hm</think> no.",
        "hm",
        "Yes. And no.",
    ),
    (
        "qwen3_thinking",
        "Hm.\n<tool_call>\n",
        "Hm.",
        "<tool_call>\n",
    ),
    (
        "seed_oss",
        "<seed:think>Hm.</seed:think>Yes.",
        "Hm.",
        "Yes.",
    ),
    (
        "solar_open2",
        "<|think:start|>Hm.<|think:end|>Yes.",
        "Hm.",
        "Yes.",
    ),
    ("step3", "Hm.</think>Yes.", "Hm.", "Yes."),
];

fn run<'a>(name: &str, pieces: impl IntoIterator<Item = &'a str>) -> (String, String) {
    let dialect = ReasoningDialect::find(name).unwrap();
    let message = parse(dialect.parser(None, true).unwrap(), pieces);
    (message.reasoning, message.content)
}

#[test]
fn transcripts_are_read_whole_and_by_the_character() {
    for (name, text, reasoning, content) in TRANSCRIPTS {
        let expected = ((*reasoning).to_owned(), (*content).to_owned());
        assert_eq!(run(name, [*text]), expected, "{name}: {text:?}");
        assert_eq!(run(name, characters(text)), expected, "{name}: {text:?}");
    }
}

#[test]
fn a_frame_is_around_all_of_the_content_and_text_elsewhere() {
    for (text, content) in [
        ("<response>\n\nYes.\n</response>\n\n", "Yes."),
        ("<response>Yes.</response", "Yes.</response"),
        (
            "\n<response>It ends with </response>.\n</response>",
            "It ends with </response>.",
        ),
        (
            "Write <response>Yes.</response>",
            "Write <response>Yes.</response>",
        ),
        (
            "<response>Write <response>.</response>",
            "Write <response>.",
        ),
        ("</response> ends it.", "</response> ends it."),
        (
            "<response>Yes.</response> And no.",
            "Yes.</response> And no.",
        ),
        (
            "<response>Yes.</response> <tool> is no call.",
            "Yes.</response> <tool> is no call.",
        ),
    ] {
        let text = format!("Hm.</think>{text}");
        let expected = ("Hm.".to_owned(), content.to_owned());
        assert_eq!(run("ernie45", [text.as_str()]), expected, "{text:?}");
        assert_eq!(run("ernie45", characters(&text)), expected, "{text:?}");
    }
}

#[test]
fn every_dialect_has_a_transcript() {
    for dialect in ReasoningDialect::all() {
        let name = dialect.name();
        let is_there = TRANSCRIPTS.iter().any(|(known, ..)| *known == name);
        assert!(is_there || dialect.is_harmony(), "{name}");
        assert_eq!(ReasoningDialect::find(name), Some(*dialect));
    }
}

#[test]
fn the_prompt_says_whether_the_thoughts_have_begun() {
    let run = |name: &str, prompt: &str| {
        let dialect = ReasoningDialect::find(name).unwrap();
        let message = parse(
            dialect.parser(Some(prompt), false).unwrap(),
            ["Hm.</think>Yes."],
        );
        (message.reasoning, message.content)
    };
    let thinks = ("Hm.".to_owned(), "Yes.".to_owned());
    let does_not = (String::new(), "Hm.Yes.".to_owned());
    for name in ["qwen3", "deepseek_r1", "glm45"] {
        assert_eq!(
            run(name, "<|im_start|>assistant\n<think>\n"),
            thinks,
            "{name}"
        );
        assert_eq!(
            run(name, "assistant\n<think>\n\n</think>\n\n"),
            does_not,
            "{name}"
        );
    }
    assert_eq!(
        run("minimax_append_think", "<think>\n").1,
        "<think>Hm.</think>Yes."
    );
    assert_eq!(
        run("minimax_append_think", "</think>\n").1,
        "Hm.</think>Yes."
    );
    assert_eq!(run("qwen3", "assistant\n"), does_not);
    assert_eq!(run("deepseek_r1", "assistant\n"), thinks);
}

#[test]
fn the_prompt_says_which_markers_the_model_has() {
    let dialect = ReasoningDialect::find("hunyuan").unwrap();
    for (prompt, text, reasoning) in [
        ("<think:opensource>", "Hm.</think:opensource>Yes.", "Hm."),
        ("<think:opensource></think:opensource>", "Yes.", ""),
        ("<think>", "Hm.</think>Yes.", "Hm."),
        ("<think></think>", "Yes.", ""),
    ] {
        let message = parse(dialect.parser(Some(prompt), false).unwrap(), [text]);
        assert_eq!(message.reasoning, reasoning, "{prompt}");
        assert_eq!(message.content, "Yes.", "{prompt}");
    }
}

#[test]
fn without_tools_a_call_in_the_thoughts_is_thought() {
    let dialect = ReasoningDialect::find("qwen3").unwrap();
    let text = "<think>I could <tool_call>.</think>Yes.";
    let message = parse(dialect.parser(None, false).unwrap(), [text]);
    assert_eq!(message.reasoning, "I could <tool_call>.");
    assert_eq!(message.content, "Yes.");
}

#[test]
fn without_tools_the_beginning_of_the_content_ends_the_thoughts() {
    let dialect = ReasoningDialect::find("kimi_k3").unwrap();
    let text = "<|open|>think<|sep|>No <|open|>tools<|sep|>.<|open|>response<|sep|>Yes.";
    for pieces in [vec![text], characters(text)] {
        let message = parse(dialect.parser(None, false).unwrap(), pieces);
        assert_eq!(message.reasoning, "No <|open|>tools<|sep|>.");
        assert_eq!(message.content, "Yes.");
    }
}

fn dialects() -> impl Strategy<Value = ReasoningDialect> {
    let all = ReasoningDialect::all().iter().copied();
    Union::new(all.filter(|dialect| !dialect.is_harmony()).map(Just))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// However any dialect's transcripts are cut, and wherever they break off, the result is that of the whole text, and no
    /// marker is content.
    #[test]
    fn any_cutting_is_read_alike(end: usize, cuts in proptest::collection::vec(any::<usize>(), 0..12)) {
        for (name, text, ..) in TRANSCRIPTS {
            let text = cut(text, &[end])[0];
            let whole = run(name, [text]);
            prop_assert_eq!(&run(name, cut(text, &cuts)), &whole);
            let is_shown = name.ends_with("append_think");
            for marker in ReasoningDialect::find(name).unwrap().markers() {
                prop_assert!(is_shown || !whole.1.contains(marker), "{:?}", whole);
            }
        }
    }
}

proptest! {
    /// The same for text that no model would write.
    #[test]
    fn any_soup_is_read_alike(
        (name, text) in dialects().prop_flat_map(|dialect| {
            let parts = vec![" ", "\n", "a", "<", "é", "</", "think>", "[", "◁"];
            (Just(dialect.name()), soup(parts, dialect.markers()))
        }),
        cuts in proptest::collection::vec(any::<usize>(), 0..12),
    ) {
        prop_assert_eq!(run(name, cut(&text, &cuts)), run(name, [text.as_str()]));
    }

    /// Text without markers passes unchanged.
    #[test]
    fn plain_text_is_content(
        text in "[<|>/◁▷a-z \\n\\[\\]THINK]{0,60}", cuts in proptest::collection::vec(any::<usize>(), 0..12),
    ) {
        for name in ["qwen3", "kimi", "mistral", "cohere", "granite", "gemma4", "seed_oss"] {
            let markers = ReasoningDialect::find(name).unwrap().markers();
            if !markers.iter().any(|marker| text.contains(marker)) {
                prop_assert_eq!(run(name, cut(&text, &cuts)), (String::new(), text.clone()));
            }
        }
    }
}
