//! Texts that models write, and their meaning.

mod coder;

use coder::CODER;

/// Dialect, text, content, calls.
pub(super) type Transcript = (
    &'static str,
    &'static str,
    &'static str,
    &'static [(&'static str, &'static str)],
);

const OSLO: (&str, &str) = ("get_weather", r#"{"city": "Oslo", "days": 3}"#);
const NOW: (&str, &str) = ("now", "{}");
const TWO: &[(&str, &str)] = &[OSLO, NOW];

pub(super) fn transcripts() -> impl Iterator<Item = &'static Transcript> {
    TRANSCRIPTS.iter().chain(CODER)
}

const TRANSCRIPTS: &[Transcript] = &[
    (
        "apertus",
        "I look.<|tools_prefix|>[{\"get_weather\": {\"city\": \"Oslo\", \"days\": 3}}, {\"now\": {}}]<|tools_suffix|>",
        "I look.",
        TWO,
    ),
    (
        "apertus",
        "<|tools_prefix|>[{\"now\": null}, {\"name\": {\"name\": \"}\"}}]<|tools_suffix|> Done.",
        "Done.",
        &[NOW, ("name", "{\"name\": \"}\"}")],
    ),
    (
        "cohere",
        "<|START_ACTION|>[\n    {\"tool_call_id\": \"0\", \"tool_name\": \"get_weather\", \"parameters\": {\"city\": \"Oslo\", \"days\": 3}},\n\
         {\"tool_call_id\": \"1\", \"tool_name\": \"now\", \"parameters\": {}}\n]<|END_ACTION|>",
        "",
        TWO,
    ),
    (
        "deepseek_v3",
        "I look.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n{\"city\": \"Oslo\", \"days\": 3}\n```\
         <｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "I look.",
        TWO,
    ),
    (
        "deepseek_v31",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{\"city\": \"Oslo\", \"days\": 3}<｜tool▁call▁end｜>\
         <｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "",
        TWO,
    ),
    (
        "deepseek_v32",
        "I look.\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name=\"get_weather\">\n\
         <｜DSML｜parameter name=\"city\" string=\"true\">Oslo</｜DSML｜parameter>\n\
         <｜DSML｜parameter name=\"days\" string=\"false\">3</｜DSML｜parameter>\n</｜DSML｜invoke>\n\
         <｜DSML｜invoke name=\"now\">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>",
        "I look.",
        TWO,
    ),
    (
        "functiongemma",
        "<start_function_call>call:get_weather{city:<escape>Oslo<escape>,days:3}<end_function_call>\
         <start_function_call>call:now{}<end_function_call>",
        "",
        TWO,
    ),
    (
        "gemma4",
        "I look.<|tool_call>call:get_weather{city:<|\"|>Oslo<|\"|>,days:3}<tool_call|><|tool_call>call:now{}<tool_call|>",
        "I look.",
        TWO,
    ),
    // What is between marks is text; keys may be between marks, and values in JSON's own quotes.
    (
        "gemma4",
        "<|tool_call>call:write_file{path:\"a, \\\"b\\\"\",text:<|\"|>{\n\"c\": <tool_call|>}<|\"|>,options:{<|\"|>k<|\"|>:[1,-2.5,None,{}],\
         t:[<|\"|>x<|\"|>,[]]},is_new:true,note:10:30 h}<tool_call|> Done.",
        "Done.",
        &[(
            "write_file",
            r#"{"path": "a, \"b\"", "text": "{\n\"c\": <tool_call|>}", "options": {"k": [1, -2.5, null, {}], "t": ["x", []]}, "is_new": true, "note": "10:30 h"}"#,
        )],
    ),
    // What quantized models write.
    (
        "gemma4",
        "<|tool_call>call:get_weather(city: \"Oslo\", days=3)<tool_call|><|tool_call>:now{}<tool_call|>",
        "",
        TWO,
    ),
    (
        "gemma4",
        "<|tool_call>call:write_file{text:<|\"|>a<|\"|>,options={'k':['it\\'s \"b\"\n', \"c\\n\"]}}<tool_call|>",
        "",
        &[(
            "write_file",
            r#"{"text": "a", "options": {"k": ["it's \"b\"\n", "c\n"]}}"#,
        )],
    ),
    // A call without its last brace, and one without its end marker.
    (
        "gemma4",
        "<|tool_call>call:now{a:1<tool_call|><|tool_call>call:now{}<|tool_call>call:now{}",
        "",
        &[("now", r#"{"a": 1"#), NOW, NOW],
    ),
    (
        "gemma3",
        "I look.\n```tool_code\nget_weather(city=\"Oslo\", days=3)\nnow()\n```\n\n```tool_code\nnow()\n```\nDone.",
        "I look.\nDone.",
        &[("get_weather", r#"{"city":"Oslo","days":3}"#), NOW, NOW],
    ),
    (
        "gemma3",
        "```tool_code\nprint(get_weather(city=\"Oslo\", days=3))\n```",
        "",
        &[("get_weather", r#"{"city":"Oslo","days":3}"#)],
    ),
    (
        "gemma3",
        "[get_weather(city=\"Oslo\", days=3), now()]",
        "",
        &[("get_weather", r#"{"city":"Oslo","days":3}"#), NOW],
    ),
    (
        "gigachat3",
        "I look.<|message_sep|>\n\nfunction call<|role_sep|>\n{\"name\": \"get_weather\", \"arguments\": {\"city\": \"Oslo\", \"days\": 3}}\
         <|function_call|>{\"name\": \"now\", \"arguments\": {}}",
        "I look.",
        TWO,
    ),
    (
        "glm45",
        "I look.\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n\
         <arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>\n<tool_call>now\n</tool_call>",
        "I look.",
        TWO,
    ),
    (
        "glm45",
        "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Oslo</arg_value>\
         <arg_key>days</arg_key><arg_value>3</arg_value></tool_call><tool_call>now</tool_call>",
        "",
        TWO,
    ),
    // Marks that are missing, doubled or at a wrong place, as the model writes them under load.
    (
        "glm45",
        "<tool_call>get_weather<arg_key>city</arg_key>Oslo</arg_value><arg_key><arg_key>days</arg_key></arg_key><arg_value>3</arg_value>\
         </tool_call><tool_call>now</arg_value></tool_call>",
        "",
        TWO,
    ),
    (
        "glm45",
        "<tool_call>get_weathercity</arg_key><arg_value>Oslo</arg_value>days</arg_key><arg_value>3</arg_value></tool_call>\
         <tool_call>now</tool_call>",
        "",
        TWO,
    ),
    (
        "glm45",
        "<tool_call>get_weather city</arg_key>\n<arg_value>Oslo</arg_value>\nI look. <arg_key>days</arg_key>3\n</tool_call>\
         <tool_call>now</tool_call>",
        "I look.",
        TWO,
    ),
    (
        "glm45",
        "<tool_call>get_weather<arg_key>city</arg_key></tool_call><tool_call>now</tool_call>",
        "",
        &[("get_weather", r#"{"city": ""}"#), NOW],
    ),
    (
        "granite",
        "<|tool_call|>[{\"name\": \"get_weather\", \"arguments\": {\"city\": \"Oslo\", \"days\": 3}}, {\"name\": \"now\", \"arguments\": {}}]",
        "",
        TWO,
    ),
    (
        "granite-20b-fc",
        "<function_call> {\"name\": \"get_weather\", \"arguments\": {\"city\": \"Oslo\", \"days\": 3}}\n\
         <function_call> {\"name\": \"now\", \"arguments\": {}}",
        "",
        TWO,
    ),
    (
        "harmony",
        "<|channel|>analysis<|message|>Need weather.<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>\
         <|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{\"city\": \"Oslo\", \"days\": 3}<|call|>\
         <|start|>assistant to=functions.now<|channel|>commentary json<|message|>{}<|call|>",
        "I look.",
        TWO,
    ),
    (
        "harmony",
        "<|channel|>analysis<|message|>Easy.<|end|><|start|>assistant<|channel|>final<|message|>Yes, 1 <| 2.<|return|>",
        "Yes, 1 <| 2.",
        &[],
    ),
    (
        "harmony",
        " to=functions.now<|channel|>commentary<|message|>{}",
        "",
        &[NOW],
    ),
    (
        "harmony",
        "<|channel|>commentary to=functions.now<|message|> <|call|><|start|>assistant to=functions.now<|channel|>commentary<|message|>",
        "",
        &[NOW, NOW],
    ),
    (
        "hermes",
        "I look.\n<tool_call>\n{\"name\": \"get_weather\", \"arguments\": {\"city\": \"Oslo\", \"days\": 3}}\n</tool_call>\n\
         <tool_call>\n{\"name\": \"now\", \"arguments\": {}}\n</tool_call>",
        "I look.",
        TWO,
    ),
    // Arguments first, as a string, and in the format of OpenAI's API.
    (
        "hermes",
        "<tool_call>{\"arguments\": {\"city\": \"Oslo\", \"days\": 3}, \"name\": \"get_weather\"}</tool_call> Done.",
        "Done.",
        &[OSLO],
    ),
    (
        "hermes",
        "<tool_call>{\"name\": \"get_weather\", \"arguments\": \"{\\\"city\\\": \\\"Oslo\\\", \\\"days\\\": 3}\"}</tool_call>",
        "",
        &[OSLO],
    ),
    (
        "hermes",
        "<tool_call>{\"id\": 7, \"type\": \"function\", \"function\": {\"name\": \"now\", \"arguments\": {}}}</tool_call>",
        "",
        &[NOW],
    ),
    (
        "hermes",
        "<tool_call>{\"name\": \"now\"}</tool_call>",
        "",
        &[NOW],
    ),
    (
        "hermes",
        "<tool_call>{\"name\": \"now\", \"arguments\": null }</tool_call>",
        "",
        &[NOW],
    ),
    (
        "hermes",
        "<tool_call>{\"name\": \"now\", \"arguments\": \"\"}</tool_call>",
        "",
        &[NOW],
    ),
    // Markup in a string is text.
    (
        "hermes",
        "<tool_call>{\"name\": \"write_file\", \"arguments\": {\"text\": \"</tool_call> \\\"{\"}}</tool_call>",
        "",
        &[("write_file", "{\"text\": \"</tool_call> \\\"{\"}")],
    ),
    (
        "hunyuan_a13b",
        "<tool_calls>\n[{\"name\": \"get_weather\", \"arguments\": {\"city\": \"Oslo\", \"days\": 3}}, {\"name\": \"now\", \"arguments\": {}}]\n</tool_calls>",
        "",
        TWO,
    ),
    (
        "hy_v3",
        "I look.<tool_calls:opensource>\n<tool_call:opensource>get_weather<tool_sep:opensource>\n\
         <arg_key:opensource>city</arg_key:opensource>\n<arg_value:opensource>Oslo</arg_value:opensource>\n\
         <arg_key:opensource>days</arg_key:opensource>\n<arg_value:opensource>3</arg_value:opensource>\n</tool_call:opensource>\n\
         <tool_call:opensource>now<tool_sep:opensource>\n</tool_call:opensource>\n</tool_calls:opensource>",
        "I look.",
        TWO,
    ),
    (
        "hy_v3",
        "<tool_calls><tool_call>get_weather<tool_sep><arg_key>city</arg_key><arg_value>Oslo</arg_value>\
         <arg_key>days</arg_key><arg_value>3</arg_value></tool_call><tool_call>now<tool_sep></tool_call></tool_calls>",
        "",
        TWO,
    ),
    (
        "internlm",
        "I look.<|action_start|><|plugin|>\n{\"name\": \"get_weather\", \"parameters\": {\"city\": \"Oslo\", \"days\": 3}}<|action_end|>\
         <|action_start|> <|plugin|>\n{\"name\": \"now\", \"parameters\": {}}<|action_end|>",
        "I look.",
        TWO,
    ),
    (
        "kimi_k2",
        "I look.<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>\
         {\"city\": \"Oslo\", \"days\": 3}<|tool_call_end|><|tool_call_begin|>functions.now:1<|tool_call_argument_begin|> {} <|tool_call_end|>\
         <|tool_calls_section_end|>",
        "I look.",
        TWO,
    ),
    (
        "kimi_k3",
        "<|open|>response<|sep|>I look.<|close|>response<|sep|><|open|>tools<|sep|><|open|>call tool=\"get_weather\" index=\"1\"<|sep|>\
         <|open|>argument key=\"city\" type=\"string\"<|sep|>Oslo<|close|>argument<|sep|>\
         <|open|>argument key=\"days\" type=\"number\"<|sep|>3<|close|>argument<|sep|><|close|>call<|sep|>\
         <|open|>call tool=\"now\" index=\"2\"<|sep|><|close|>call<|sep|><|close|>tools<|sep|><|close|>message<|sep|>",
        "I look.",
        TWO,
    ),
    // The attribute is before the schema, which has no such parameter.
    (
        "kimi_k3",
        "<|open|>call tool=\"now\" index=\"1\"<|sep|><|open|>argument key=\"a\" type=\"string\"<|sep|>1 <|sep|> 2<|close|>argument<|sep|>\
         <|open|>argument key=\"b\" type=\"object\"<|sep|>{\"c\": 1}<|close|>argument<|sep|><|close|>tools<|sep|>",
        "",
        &[("now", r#"{"a": "1 <|sep|> 2", "b": {"c": 1}}"#)],
    ),
    (
        "lfm2",
        "<|tool_call_start|>[get_weather(city=\"Oslo\", days=3), now()]<|tool_call_end|>Looking.",
        "Looking.",
        &[("get_weather", r#"{"city":"Oslo","days":3}"#), NOW],
    ),
    (
        "lfm2",
        "I look.\n<|tool_call_start|>[{\"name\": \"get_weather\", \"arguments\": {\"city\": \"Oslo\", \"days\": 3}}, \
         {\"name\": \"now\", \"arguments\": {}}]<|tool_call_end|>\nDone.",
        "I look.\nDone.",
        TWO,
    ),
    (
        "llama3_function",
        "<function=get_weather>{\"city\": \"Oslo\", \"days\": 3}</function>\n<function=now>{}</function>",
        "",
        TWO,
    ),
    (
        "llama3_json",
        "{\"name\": \"get_weather\", \"parameters\": {\"city\": \"Oslo\", \"days\": 3}}; {\"name\": \"now\", \"parameters\": {}}",
        "",
        TWO,
    ),
    (
        "llama3_json",
        "<|python_tag|>{\"name\": \"now\", \"parameters\": {}}",
        "",
        &[NOW],
    ),
    (
        "llama3_json",
        "{\"parameters\": \" \", \"name\": \"now\"}",
        "",
        &[NOW],
    ),
    (
        "llama3_json",
        " {\"name\": \"Ada\", \"parameters\": {\"x\": 1}} is JSON.",
        " {\"name\": \"Ada\", \"parameters\": {\"x\": 1}} is JSON.",
        &[],
    ),
    (
        "llama3_json",
        "{\"answer\": {\"name\": \"now\"}}",
        "{\"answer\": {\"name\": \"now\"}}",
        &[],
    ),
    ("llama3_json", "[{\"a\": 1}, 2]", "[{\"a\": 1}, 2]", &[]),
    (
        "llama4_pythonic",
        "<|python_start|>[get_weather(city='Oslo', days=3), now()]<|python_end|>",
        "",
        &[("get_weather", r#"{"city":"Oslo","days":3}"#), NOW],
    ),
    // The list without markers, which the template asks for, and with the end marker alone.
    (
        "llama4_pythonic",
        "[get_weather(city=\"Oslo\", days=3), now()] now()",
        "now()",
        &[("get_weather", r#"{"city":"Oslo","days":3}"#), NOW],
    ),
    ("llama4_pythonic", "\n[now()]<|python_end|>", "", &[NOW]),
    (
        "llama4_pythonic",
        "[1] says [now()].",
        "[1] says [now()].",
        &[],
    ),
    (
        "longcat",
        "I look.\n<longcat_tool_call>\n{\"name\": \"get_weather\", \"arguments\": {\"city\": \"Oslo\", \"days\": 3}}\n</longcat_tool_call>\n\
         <longcat_tool_call>\n{\"name\": \"now\", \"arguments\": {}}\n</longcat_tool_call>",
        "I look.",
        TWO,
    ),
    (
        "dots",
        "I look.\n<dots_function_call>\n<invoke name=\"get_weather\">\n<parameter name=\"city\">Oslo</parameter>\n\
         <parameter name=\"days\">3</parameter>\n</invoke>\n<invoke name=\"now\">\n</invoke>\n</dots_function_call>",
        "I look.",
        TWO,
    ),
    (
        "gigachat35",
        "I look.\n<｜GCML｜tool_calls>\n<｜GCML｜invoke name=\"get_weather\">\n\
         <｜GCML｜parameter name=\"city\" string=\"true\">Oslo</｜GCML｜parameter>\n\
         <｜GCML｜parameter name=\"days\" string=\"false\">3</｜GCML｜parameter>\n</｜GCML｜invoke>\n\
         <｜GCML｜invoke name=\"now\">\n</｜GCML｜invoke>\n</｜GCML｜tool_calls><|message_sep|>",
        "I look.",
        TWO,
    ),
    (
        "hy_v4",
        "I look.\n<tool_calls:6124c78e>\n<tool_call:6124c78e>get_weather\n<arg_key:6124c78e>city</arg_key:6124c78e>\n\
         <arg_value:6124c78e>Oslo</arg_value:6124c78e>\n<arg_key:6124c78e>days</arg_key:6124c78e>\n<arg_value:6124c78e>3</arg_value:6124c78e>\n\
         </tool_call:6124c78e>\n<tool_call:6124c78e>now\n</tool_call:6124c78e>\n</tool_calls:6124c78e>",
        "I look.",
        TWO,
    ),
    (
        "k2_horizon",
        "I look.\n<ifm|tool_calls>\n<ifm|tool_call>get_weather\n<ifm|arg_key>city</ifm|arg_key>\n<ifm|arg_value>Oslo</ifm|arg_value>\n\
         <ifm|arg_key>days</ifm|arg_key><ifm|arg_type>integer</ifm|arg_type><ifm|arg_value>3</ifm|arg_value>\n</ifm|tool_call>\n\
         <ifm|tool_call>now\n</ifm|tool_call>\n</ifm|tool_calls>",
        "I look.",
        TWO,
    ),
    (
        "longcat_flash_lite",
        "I look.\n<longcat_tool_call>get_weather\n<longcat_arg_key>city</longcat_arg_key>\n<longcat_arg_value>Oslo</longcat_arg_value>\n\
         <longcat_arg_key>days</longcat_arg_key>\n<longcat_arg_value>3</longcat_arg_value>\n</longcat_tool_call>\n\
         <longcat_tool_call>now\n</longcat_tool_call>",
        "I look.",
        TWO,
    ),
    (
        "minimax_m2",
        "I look.\n<minimax:tool_call>\n<invoke name=\"get_weather\">\n<parameter name=\"city\">Oslo</parameter>\n\
         <parameter name=\"days\">3</parameter>\n</invoke>\n<invoke name=\"now\">\n</invoke>\n</minimax:tool_call>",
        "I look.",
        TWO,
    ),
    (
        "minimax_m3",
        "I look.\n]<]minimax[>[<tool_call>\n]<]minimax[>[<invoke name=\"get_weather\">]<]minimax[>[<city>Oslo]<]minimax[>[</city>\n\
         ]<]minimax[>[<days>3]<]minimax[>[</days>]<]minimax[>[</invoke>\n]<]minimax[>[<invoke name=\"now\">\n]<]minimax[>[</invoke>\n\
         ]<]minimax[>[</tool_call>",
        "I look.",
        TWO,
    ),
    // Tags in a string are text; a part of another value is an element, and parts of one name are a list.
    (
        "minimax_m3",
        "]<]minimax[>[<invoke name=\"write_file\">]<]minimax[>[<text><b> ]<]minimax[>[<i>]<]minimax[>[</text>]<]minimax[>[<options>\n\
         ]<]minimax[>[<k>]<]minimax[>[<item>1]<]minimax[>[</item>]<]minimax[>[<item>x]<]minimax[>[</item>]<]minimax[>[</k>\
         ]<]minimax[>[<t>a]<]minimax[>[</t>]<]minimax[>[<t>b]<]minimax[>[</t>]<]minimax[>[</options>]<]minimax[>[<is_new>null\
         ]<]minimax[>[</is_new>]<]minimax[>[</invoke>Done.",
        "Done.",
        &[(
            "write_file",
            r#"{"text": "<b> ]<]minimax[>[<i>", "options": {"k":[1,"x"],"t":["a","b"]}, "is_new": null}"#,
        )],
    ),
    // Ends that the model omitted.
    (
        "minimax_m3",
        "]<]minimax[>[<invoke name=\"a\">]<]minimax[>[<b>c]<]minimax[>[</invoke>]<]minimax[>[<invoke name=\"a\">]<]minimax[>[<b>]<]minimax[>[<k>1",
        "",
        &[("a", r#"{"b": "c"}"#), ("a", r#"{"b": {"k":1}}"#)],
    ),
    (
        "mistral",
        "[TOOL_CALLS] [{\"name\": \"get_weather\", \"arguments\": {\"city\": \"Oslo\", \"days\": 3}}, {\"name\": \"now\", \"arguments\": {}}]",
        "",
        TWO,
    ),
    (
        "mistral",
        "I look [1].[TOOL_CALLS]get_weather[ARGS]{\"city\": \"Oslo\", \"days\": 3}[TOOL_CALLS]now[CALL_ID]abcdefghi[ARGS]{}",
        "I look [1].",
        TWO,
    ),
    ("mistral", "[TOOL_CALLS]now{}", "", &[NOW]),
    (
        "nemotron_json",
        "I look.\n<TOOLCALL>[{\"name\": \"get_weather\", \"arguments\": {\"city\": \"Oslo\", \"days\": 3}}, {\"name\": \"now\", \"arguments\": {}}]</TOOLCALL>",
        "I look.",
        TWO,
    ),
    (
        "olmo3",
        "<function_calls>\nget_weather(city=\"Oslo\", days=3)\nnow()\n</function_calls>",
        "",
        &[("get_weather", r#"{"city":"Oslo","days":3}"#), NOW],
    ),
    (
        "phi4",
        "functools[{\"name\": \"get_weather\", \"arguments\": {\"city\": \"Oslo\", \"days\": 3}}, {\"name\": \"now\", \"arguments\": {}}]",
        "",
        TWO,
    ),
    (
        "pythonic",
        "[get_weather(city=\"Oslo\", days=3), now()]",
        "",
        &[("get_weather", r#"{"city":"Oslo","days":3}"#), NOW],
    ),
    (
        "pythonic",
        r#"[write_file(path='a "b"', text="it's (\n\"\u00e9\")", options={'k': [1, -2.5, None], "t": True}, is_new=False)]"#,
        "",
        &[(
            "write_file",
            r#"{"path":"a \"b\"","text":"it's (\n\"é\")","options":{"k":[1,-2.5,null],"t":true},"is_new":false}"#,
        )],
    ),
    (
        "pythonic",
        r#"[write_file(path='', text="""He said: "No (yet)".
''' \""""), get_weather(city='''it's "" ''')]"#,
        "",
        &[
            (
                "write_file",
                r#"{"path":"","text":"He said: \"No (yet)\".\n''' \""}"#,
            ),
            ("get_weather", r#"{"city":"it's \"\" "}"#),
        ],
    ),
    (
        "pythonic",
        "[now(a=12345678901234567890, b=-9_223_372_036_854_775_808, c=1e3)]",
        "",
        &[(
            "now",
            r#"{"a":12345678901234567890,"b":-9223372036854775808,"c":1000.0}"#,
        )],
    ),
    (
        "pythonic",
        "[1] says now(), [get_time()] too.",
        "[1] says now(), [get_time()] too.",
        &[],
    ),
    (
        "qwen3_coder",
        "I look.\n<tool_call>\n<function=get_weather>\n<parameter=city>\nOslo\n</parameter>\n<parameter=days>\n3\n</parameter>\n\
         </function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
        "I look.",
        TWO,
    ),
    (
        "qwen3_coder",
        "<tool_call>\n<function=write_file>\n<parameter=path>\n12\n</parameter>\n<parameter=text>\nfn main() {\n    \"<b>\\n\"\n}\n\n</parameter>\n\
         <parameter=options>\n{\"mode\": 384}\n</parameter>\n<parameter=is_new>\nTrue\n</parameter>\n<parameter=note>\nso what\n</parameter>\n\
         </function>\n</tool_call>",
        "",
        &[(
            "write_file",
            r#"{"path": "12", "text": "fn main() {\n    \"<b>\\n\"\n}\n", "options": {"mode": 384}, "is_new": true, "note": "so what"}"#,
        )],
    ),
    (
        "seed_oss",
        "<seed:tool_call>\n<function=get_weather>\n<parameter=city>Oslo</parameter>\n<parameter=days>3</parameter>\n</function>\n\
         </seed:tool_call><seed:tool_call><function=now></function></seed:tool_call>",
        "",
        TWO,
    ),
    (
        "solar_open2",
        "I look.<|tool_call:start|>get_weather\n<|tool_arg:start|>city<|tool_arg:value|>Oslo<|tool_arg:end|>\n\
         <|tool_arg:start|>days<|tool_arg:value|>3<|tool_arg:end|>\n<|tool_call:end|>\n<|tool_call:start|>now\n<|tool_call:end|>",
        "I look.",
        TWO,
    ),
    (
        "step3",
        "<｜tool_calls_begin｜>\n<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name=\"get_weather\">\n\
         <steptml:parameter name=\"city\">Oslo</steptml:parameter>\n<steptml:parameter name=\"days\">3</steptml:parameter>\n</steptml:invoke>\
         <｜tool_call_end｜>\n<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name=\"now\">\n</steptml:invoke><｜tool_call_end｜>\n<｜tool_calls_end｜>",
        "",
        TWO,
    ),
    (
        "xlam",
        "\n[ {\"name\": \"get_weather\", \"arguments\": {\"city\": \"Oslo\", \"days\": 3}}, {\"name\": \"now\", \"arguments\": {}}]",
        "",
        TWO,
    ),
];
