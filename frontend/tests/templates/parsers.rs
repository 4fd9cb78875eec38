//! The parsers that chat templates show.

use genset_backend_common::card::TemplateParsers;
use genset_frontend::reasoning::ReasoningDialect;
use genset_frontend::tools::ToolDialect;

use super::{corpus, read};

type Names = (Option<&'static str>, Option<&'static str>);

const NO: Names = (None, None);

/// The parsers of the templates in this folder. Granite's does not say how calls look, and Phi 4's sees no tools of requests.
const FILES: [(&str, Names); 12] = [
    ("deepseek", (Some("deepseek_v31"), Some("deepseek_v31"))),
    ("gemma3", NO),
    ("glm4", (Some("glm45"), Some("glm45"))),
    ("granite", NO),
    ("hermes", (Some("hermes"), None)),
    ("llama2", NO),
    ("llama3", (Some("llama3_json"), None)),
    ("mistral", (Some("mistral"), None)),
    ("phi4", NO),
    ("qwen2", (Some("hermes"), None)),
    ("qwen3", (Some("hermes"), Some("qwen3"))),
    ("zephyr", NO),
];

fn shown(template: &str) -> Names {
    let found = TemplateParsers::of(template);
    (found.tool, found.reasoning)
}

#[test]
fn the_templates_show_their_parsers() {
    assert!(
        FILES
            .iter()
            .map(|(name, _)| name)
            .eq(corpus().templates.keys())
    );
    for (name, parsers) in FILES {
        assert_eq!(shown(&read(&format!("{name}.jinja"))), parsers, "{name}");
    }
}

/// What the templates of families have: the parts with calls and reasoning, and the parsers; an empty name is none.
const FAMILIES: &[(&str, &str, &str)] = &[
    (
        "'<|inner_prefix|>' '<|tools_prefix|>'",
        "apertus",
        "apertus",
    ),
    ("<|START_THINKING|> <|START_ACTION|>", "cohere", "cohere"),
    // DeepSeek V3.1, V3.2, and V3 and R1 with a template that shows tools.
    (
        "'<｜Assistant｜></think>' name + '<｜tool▁sep｜>' + arguments",
        "deepseek_v31",
        "deepseek_v31",
    ),
    (
        "<｜Assistant｜><{{ dsml }}invoke> dsml = '｜DSML｜' '</think>'",
        "deepseek_v32",
        "deepseek_v31",
    ),
    (
        r"type + '<｜tool▁sep｜>' + name + '\n```json' '</think>' if add_generation_prompt %}{{ '<｜Assistant｜><think>\n' }}",
        "deepseek_v3",
        "deepseek_r1",
    ),
    ("<start_function_call>call:", "functiongemma", ""),
    (
        "<start_of_turn> [func_name1(a=b), func_name2(c)]",
        "gemma3",
        "",
    ),
    (
        "<|tool_call>call: text.split('<channel|>') '<|channel>'",
        "gemma4",
        "gemma4",
    ),
    ("role + '<|role_sep|>' 'function call'", "gigachat3", ""),
    (
        "<tool_call>{name}<arg_key>{key} '<think></think>'",
        "glm45",
        "glm45",
    ),
    // Granite 3.2, 3.3 and 4.
    (
        "<|start_of_role|> <|tool_call|> Here is my thought process:",
        "granite",
        "granite",
    ),
    (
        "<|start_of_role|> <|tool_call|> <think></think> <response></response>",
        "granite",
        "granite33",
    ),
    (
        r#"<|start_of_role|> <tool_call>\n{\"name\": <name>}\n</tool_call>"#,
        "hermes",
        "",
    ),
    (
        r#"<|function_call_library|> \"<function_call> {\"name\": "#,
        "granite-20b-fc",
        "",
    ),
    (
        "<|channel|>analysis<|message|> 'functions.' + name + '<|channel|>commentary",
        "harmony",
        "harmony",
    ),
    // QwQ and the thinking Qwen3, and Qwen3.5.
    (
        r#"<tool_call>\n{"name": </tool_call> '</think>' if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}"#,
        "hermes",
        "qwen3_thinking",
    ),
    (
        r"<tool_call>\n<function=' + name + '>\n<parameter=' if add_generation_prompt %}{% if no %}<think></think>{% else %}<think>",
        "qwen3_coder",
        "qwen3",
    ),
    (
        r"<tool_call>\n<function=example_function_name>\n<parameter=a>",
        "qwen3_coder",
        "",
    ),
    (
        r#"<tool_calls>[{\"name\": \"f\"}]</tool_calls> '<think>\n\n</think>\n'"#,
        "hunyuan_a13b",
        "hunyuan_a13b",
    ),
    (
        "<tool_call:opensource><tool_sep:opensource><arg_key:opensource><think:opensource>",
        "hy_v3",
        "hy_v3",
    ),
    ("<tool_call><tool_sep><arg_key></think>", "hy_v3", "hy_v3"),
    ("<|action_start|><|plugin|>", "internlm", ""),
    (
        "<|tool_call_begin|>id<|tool_call_argument_begin|>{} '</think>'",
        "kimi_k2",
        "kimi_k2",
    ),
    ("◁think▷ ◁/think▷", "", "kimi"),
    (
        "'<|open|>' + tag + '<|sep|>' '<|close|>' open_tag('think')",
        "kimi_k3",
        "kimi_k3",
    ),
    ("List of tools: <|tool_list_start|>[", "lfm2", ""),
    (
        "<|tool_call_start|>[' + calls <think></think>",
        "lfm2",
        "qwen3",
    ),
    (r"<|tool_call_start|>\n```python\n", "", ""),
    ("<function=example_function_name>{", "llama3_function", ""),
    // Llama 3 and 4.
    (
        r#"format {"name": function name, "parameters": dictionary of"#,
        "llama3_json",
        "",
    ),
    ("<|header_start|> [func_name1(a=b)]", "llama4_pythonic", ""),
    ("<|start_header_id|> [func_name1(a=b)]", "pythonic", ""),
    ("<longcat_tool_call>", "longcat", ""),
    (
        "<longcat_tool_call>name<longcat_arg_key>",
        "longcat_flash_lite",
        "",
    ),
    (
        r#"'<minimax:tool_call>' <invoke name="a"> </think> <response> if add_generation_prompt -%}']~b]ai' ~ '<think>'"#,
        "minimax_m2",
        "minimax_m2",
    ),
    (
        "]<]minimax[>[<tool_call> <mm:think>",
        "minimax_m3",
        "minimax_m3",
    ),
    (
        "[AVAILABLE_TOOLS] [TOOL_CALLS]name[ARGS] [THINK] [/THINK]",
        "mistral",
        "mistral",
    ),
    // Nemotron Nano 2.
    (
        r#"<TOOLCALL>[{"name": if add_generation_prompt %}{% if no %}<think></think>{% else %}<think>"#,
        "nemotron_json",
        "nemotron",
    ),
    (
        "<functions> <function_calls> if add_generation_prompt %}<think></think>",
        "olmo3",
        "qwen3",
    ),
    (r#"functools[{"name": "#, "phi4", ""),
    (
        r"<seed:tool_call>\n<function=name>\n<parameter=a> <seed:think>",
        "seed_oss",
        "seed_oss",
    ),
    (
        "<|tool_call:start|> <|think:start|>",
        "solar_open2",
        "solar_open2",
    ),
    (r#"<steptml:invoke name="f">"#, "step3", ""),
    (
        r#"[{"name": "tool_call_name", "arguments": {}}]"#,
        "xlam",
        "",
    ),
    // ERNIE's frame around an answer, of a model that always thinks.
    (
        r#"<response> '</think>' <tool_call>{"name": </tool_call> if add_generation_prompt %}<think>"#,
        "hermes",
        "ernie45",
    ),
];

#[test]
fn the_templates_of_families_show_parsers_that_exist() {
    for (template, tool, reasoning) in FAMILIES {
        let found = TemplateParsers::of(&format!("{{% if tools %}}{template}"));
        assert_eq!(found.tool.unwrap_or_default(), *tool, "{template}");
        assert_eq!(
            found.reasoning.unwrap_or_default(),
            *reasoning,
            "{template}"
        );
        let known = found
            .tool
            .map(|name| ToolDialect::find(name).map(ToolDialect::name));
        assert_eq!(known, found.tool.map(Some), "{template}");
        let known = found.reasoning;
        let known = known.map(|name| ReasoningDialect::find(name).map(ReasoningDialect::name));
        assert_eq!(known, found.reasoning.map(Some), "{template}");
    }
}

/// The templates of DeepSeek V3 and R1 have calls, and do not show the tools. Another shows those in a variable of its own.
#[test]
fn what_fits_two_parsers_or_shows_no_tools_is_only_likely() {
    for (template, likely) in [
        (
            "if tools [AVAILABLE_TOOLS] [TOOL_CALLS] functools[",
            &["mistral", "phi4"][..],
        ),
        ("'<｜tool▁sep｜>' '```json'", &["deepseek_v3"]),
        (
            r#"if xml_tools is defined <tool_call>\n{"name": \n</tool_call>"#,
            &["hermes"],
        ),
        ("if tools <tool_call>", &[]),
    ] {
        let found = TemplateParsers::of(template);
        assert_eq!(found.tool, None, "{template}");
        assert_eq!(found.likely_tools, likely, "{template}");
    }
    assert_eq!(shown("[THINK] [/THINK] <think></think>").1, None);
}
