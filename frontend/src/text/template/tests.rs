use serde_json::{Value, json};

use super::*;

fn try_render(source: &str, messages: &[Value]) -> Result<String, TemplateError> {
    let template = ChatTemplate::try_new(source, Some("<s>"), Some("</s>"))?;
    rendered(&template, messages)
}

/// Renders a chat without tools and variables.
pub(super) fn rendered(
    template: &ChatTemplate,
    messages: &[Value],
) -> Result<String, TemplateError> {
    template.render(&TemplateInput {
        messages,
        tools: None,
        add_generation_prompt: true,
        extra: &Map::new(),
    })
}

/// Renders `source` with `value` as its only message, `m`.
fn render(source: &str, value: Value) -> String {
    let source = format!("{{% set m = messages[0] %}}{source}");
    try_render(&source, &[value]).unwrap()
}

fn say(role: &str, content: &str) -> Value {
    json!({ "role": role, "content": content })
}

const CHAT_ML: &str = r"
{%- for message in messages %}
    {%- if loop.first and message.role != 'system' %}
        {{- '<|im_start|>system\nBe helpful.<|im_end|>\n' }}
    {%- endif %}
    {{- '<|im_start|>' + message['role'] + '\n' + (message['content'] | trim) + '<|im_end|>' + '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}
";

#[test]
fn chat_ml() {
    let conversation = [
        say("user", " Hi <b>&amp;</b> "),
        say("assistant", "שלום 🦊"),
    ];
    let prompt = try_render(CHAT_ML, &conversation).unwrap();
    insta::assert_snapshot!(prompt, @r"
    <|im_start|>system
    Be helpful.<|im_end|>
    <|im_start|>user
    Hi <b>&amp;</b><|im_end|>
    <|im_start|>assistant
    שלום 🦊<|im_end|>
    <|im_start|>assistant
    ");
}

#[test]
fn blocks_are_trimmed_as_transformers_trims_them() {
    let source = "a\n  {% if true %}\nb\n  {% endif %}\nc\n";
    assert_eq!(try_render(source, &[]).unwrap(), "a\nb\nc");
}

#[test]
fn python_methods_slices_and_loop_controls_work() {
    let m = json!({ "text": " A-b ", "list": [1, 2, 3], "map": { "z": 1, "a": 2 } });
    let cases = [
        ("{{ m.text.strip().lower().split('-') | join('+') }}", "a+b"),
        (
            "{{ m.text.startswith(' A') and not m.text.endswith('x') }}",
            "True",
        ),
        ("{{ m.map.get('none', 'x') }}{{ m.map.get('a') }}", "x2"),
        (
            "{% for k, v in m.map.items() %}{{ k }}{{ v }}{% endfor %}",
            "z1a2",
        ),
        (
            "{{ m.list[1:] | length }}{{ m.list[::-1][0] }}{{ m.list[-1] }}",
            "233",
        ),
        (
            "{% for i in m.list %}{% if i == 2 %}{% continue %}{% endif %}{{ i }}{% endfor %}",
            "13",
        ),
        (
            "{% for i in m.list %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}",
            "1",
        ),
        (
            "{% set ns = namespace(x=0) %}{% for i in m.list %}{% set ns.x = ns.x + i %}{% endfor %}{{ ns.x }}",
            "6",
        ),
        (
            "{{ m.absent is defined }}{{ m.absent }}{{ none }}",
            "FalseNone",
        ),
        (
            "{{ 'abc'.removeprefix('a').removesuffix('c') }}{{ 'b'.removeprefix('x') }}",
            "bb",
        ),
        (
            "{% macro a(x) %}{{ b(x) }}{% endmacro %}{% macro b(x) %}<{{ x }}>{% endmacro %}{{ a(1) }}",
            "<1>",
        ),
        (
            "{% for i in m.list %}{{ loop.previtem is defined }}{% endfor %}",
            "FalseTrueTrue",
        ),
        (
            "{{ m.map }} {{ m.list | map('string') | list }}",
            "{'z': 1, 'a': 2} ['1', '2', '3']",
        ),
        (
            "{{ bos_token }}{{ eos_token }}{{ documents is none }}{{ tools is none }}",
            "<s></s>TrueTrue",
        ),
        (
            "{{ m.list is iterable and m.text is string and m.map is mapping }}",
            "True",
        ),
    ];
    for (source, expected) in cases {
        assert_eq!(render(source, m.clone()), expected, "{source}");
    }
}

/// The results are those of Jinja in Python.
#[test]
fn an_iterator_is_equal_to_itself_alone_and_has_no_order() {
    let sets =
        "{% set l = [1, 2] %}{% set r = l | reverse %}{% set t = (1, 2) %}{% set d = { 'a': 1 } %}";
    for (comparison, expected) in [
        ("(l | reverse) == [2, 1]", "False"),
        ("[2, 1] == l | reverse", "False"),
        ("(l | reverse) != l", "True"),
        ("(l | reverse) == (l | reverse)", "False"),
        ("r == r", "True"),
        ("r == [2, 1] or [2, 1] == r", "False"),
        ("(r if l else 1) == [2, 1]", "False"),
        ("(t | reverse) == (2, 1)", "False"),
        ("(d | reverse) == ['a']", "False"),
        ("(d | items) == [('a', 1)]", "False"),
        ("l | map('int') == l", "False"),
        ("l | select == l", "False"),
        ("l | unique == l", "False"),
        ("l | batch(1) == [[1], [2]]", "False"),
        ("(l | reverse | list) == l[::-1] == [2, 1]", "True"),
        ("(l | reverse | reverse) == l", "True"),
        ("l | map('int') | reverse == [2, 1]", "True"),
        ("l[::-1] | list < l", "False"),
        ("(l | reverse | reverse) < [2]", "True"),
        ("('ab' | reverse) == 'ba'", "True"),
        ("'ab' | reverse < 'c'", "True"),
        ("2 in l | reverse and l | reverse not in [l]", "True"),
        ("r | join('-') == '2-1'", "True"),
    ] {
        let source = format!("{sets}{{{{ {comparison} }}}}");
        let outcome = try_render(&source, &[]);
        assert_eq!(outcome.as_deref(), Ok(expected), "{comparison}");
    }
    for order in [
        "(l | reverse) < l",
        "l <= l | reverse",
        "r > 1",
        "0 < 1 < r",
    ] {
        let error = try_render(&format!("{sets}{{{{ {order} }}}}"), &[]).unwrap_err();
        assert!(
            matches!(&error, TemplateError::Render { message, .. } if message.contains("iterator")),
            "{order}: {error:?}"
        );
    }
}

/// Qwen3-Coder's template begins with the second.
#[test]
fn kinds_of_values_are_those_of_python() {
    for (test, expected) in [
        ("none is iterable", "False"),
        ("tools is iterable and tools | length > 0", "False"),
        ("absent is iterable and absent | length == 0", "True"),
        ("'a' is iterable and 'a' is sequence", "True"),
        ("{ 'a': 1 } is iterable and [1] is iterable", "True"),
        ("{ 'a': 1 } is sequence and [1] is sequence", "True"),
        ("([1] | reverse) is iterable", "True"),
        ("([1] | reverse) is sequence", "False"),
        ("1 is iterable or 1 is sequence", "False"),
    ] {
        let outcome = try_render(&format!("{{{{ {test} }}}}"), &[]);
        assert_eq!(outcome.as_deref(), Ok(expected), "{test}");
    }
}

#[test]
fn tojson_writes_what_json_dumps_writes() {
    let m = json!({ "b": [1, 2.0, 1e16, 1e-5, 0.5, true, null], "a": "é<&>'\"\n\u{1}", "e": {}, "l": [] });
    insta::assert_snapshot!(
        render("{{ m | tojson }}", m.clone()),
        @r#"{"b": [1, 2.0, 1e+16, 1e-05, 0.5, true, null], "a": "é<&>'\"\n\u0001", "e": {}, "l": []}"#
    );
    insta::assert_snapshot!(render("{{ m | tojson(indent=2) }}", m), @r#"
    {
      "b": [
        1,
        2.0,
        1e+16,
        1e-05,
        0.5,
        true,
        null
      ],
      "a": "é<&>'\"\n\u0001",
      "e": {},
      "l": []
    }
    "#);
    let m = json!({ "b": { "d": "é🦊", "c": [0] }, "a": 1 });
    let cases = [
        (
            "separators=(',', ':')",
            r#"{"b":{"d":"é🦊","c":[0]},"a":1}"#,
        ),
        ("sort_keys=true", r#"{"a": 1, "b": {"c": [0], "d": "é🦊"}}"#),
        (
            "ensure_ascii=true",
            r#"{"b": {"d": "\u00e9\ud83e\udd8a", "c": [0]}, "a": 1}"#,
        ),
        ("indent=none", r#"{"b": {"d": "é🦊", "c": [0]}, "a": 1}"#),
        (
            "indent='\t', separators=(',', '=')",
            "{\n\t\"b\"={\n\t\t\"d\"=\"é🦊\",\n\t\t\"c\"=[\n\t\t\t0\n\t\t]\n\t},\n\t\"a\"=1\n}",
        ),
    ];
    for (options, expected) in cases {
        let source = format!("{{{{ m | tojson({options}) }}}}");
        assert_eq!(render(&source, m.clone()), expected, "{options}");
    }
}

/// DeepSeek-R1's template recognizes tool calls this way; most others test for the key, or join contents.
#[test]
fn the_content_of_nothing_but_calls_is_none_where_the_template_tests_for_that() {
    let calls = json!([{ "function": { "name": "now" } }]);
    let messages = [
        json!({ "role": "assistant", "content": "", "tool_calls": calls }),
        json!({ "role": "assistant", "content": "I look.", "tool_calls": calls }),
        json!({ "role": "assistant", "content": "", "tool_calls": null }),
    ];
    let tests = "{% for m in messages %}[{% if m['content'] is none %}{{ m.tool_calls[0].function.name }}\
        {% else %}{{ m.content + '.' }}{{ 'tool_calls' in m }}{% endif %}]{% endfor %}";
    let prompt = try_render(tests, &messages).unwrap();
    assert_eq!(prompt, "[now][I look..True][.False]");
    let joins = "{% for m in messages %}[{{ m.content + '.' }}]{% endfor %}";
    assert_eq!(try_render(joins, &messages).unwrap(), "[.][I look..][.]");
}

/// The templates of LLaVA and Idefics are of these kinds.
#[test]
fn a_template_that_shows_only_parts_gets_every_text_as_one() {
    let messages = [
        say("system", "Be brief."),
        say("user", "Hi"),
        json!({ "role": "assistant", "content": "", "tool_calls": null }),
        say("tool", "12:00"),
    ];
    let each = |content: &str| {
        format!("{{% for m in messages %}}{{{{ m.role }}}}:{content};{{% endfor %}}")
    };
    let expected = "system:Be brief.;user:Hi;assistant:;tool:12:00;";
    for content in [
        "{% for part in m['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}",
        "{% for part in m['content'] | selectattr('type', 'equalto', 'text') %}{{ part['text'] }}{% endfor %}",
        "{{ m['content'][0]['text'] }}",
    ] {
        let prompt = try_render(&each(content), &messages).unwrap();
        assert_eq!(prompt, expected, "{content}");
    }
    let either = "{% if m.content is string %}{{ m.content }}{% else %}\
        {% for part in m.content %}<{{ part.text }}>{% endfor %}{% endif %}";
    assert_eq!(try_render(&each(either), &messages).unwrap(), expected);
}

#[test]
fn generation_blocks_render_their_body() {
    let source = "{# {% generation %} #}{% for m in messages %}{%- generation -%}
        {% set x = 1 %}{{ m.content }}{%+ endgeneration %}{{ x }}{% endfor %}{% raw %}{% generation %}{% endraw %}";
    let prompt = try_render(source, &[say("assistant", "A"), say("assistant", "B")]).unwrap();
    assert_eq!(prompt, "AB{% generation %}");
}

#[test]
fn rewriting_generation_tags_keeps_everything_else() {
    for source in [
        "",
        "{",
        "{%",
        "{% generations %}",
        "{#",
        "{{ '{' }}",
        "é{%é%}{%-",
        "{#}{% generation %}",
    ] {
        assert_eq!(source::without_generation_tags(source), source);
    }
    let rewritten = source::without_generation_tags("{%\n generation\n%}x{%-endgeneration%}");
    assert_eq!(rewritten, "{%\n with\n%}x{%-endwith%}");
}

#[test]
fn strftime_now_tells_the_date() {
    let year: u32 = render("{{ strftime_now('%Y') }}", Value::Null)
        .parse()
        .unwrap();
    assert!(year >= 2025);
    let date = render("{{ strftime_now('%d %b %Y') }}", Value::Null);
    assert_eq!(date.len(), "26 Jul 2024".len());
    for no_format in ["%", "%99999999999Y"] {
        let error =
            try_render(&format!("\n{{{{ strftime_now('{no_format}') }}}}"), &[]).unwrap_err();
        assert!(
            matches!(&error, TemplateError::Render { line: 2, message } if message.contains("strftime")),
            "{error:?}"
        );
    }
}

#[test]
fn extra_variables_do_not_replace_the_conversation() {
    let source = "{{ enable_thinking }} {{ bos_token }} {{ messages | length }}";
    let template = ChatTemplate::try_new(source, Some("<s>"), None).unwrap();
    let extra = json!({ "enable_thinking": false, "bos_token": "<b>", "messages": [1, 2] });
    let prompt = template.render(&TemplateInput {
        messages: &[],
        tools: None,
        add_generation_prompt: false,
        extra: extra.as_object().unwrap(),
    });
    assert_eq!(prompt.unwrap(), "False <b> 0");
}

#[test]
fn tools_keep_their_keys_in_order_and_choose_their_template() {
    let template = ChatTemplate::try_new("chat", None, None).unwrap();
    let template = template
        .try_with_tool_use("{{ tools[0] | tojson }}")
        .unwrap();
    let tools = [json!({ "type": "function", "function": { "name": "f", "description": "" } })];
    let render = |tools| {
        let prompt = template.render(&TemplateInput {
            messages: &[],
            tools,
            add_generation_prompt: true,
            extra: &Map::new(),
        });
        prompt.unwrap()
    };
    let expected = r#"{"type": "function", "function": {"name": "f", "description": ""}}"#;
    assert_eq!(render(Some(&tools)), expected);
    assert_eq!(render(Some(&[])), "chat");
    assert_eq!(render(None), "chat");
}

#[test]
fn errors_say_who_is_at_fault() {
    let raised = TemplateError::Raised {
        message: "no system role".to_owned(),
    };
    let raise = "{{ raise_exception('no system role') }}";
    assert_eq!(try_render(raise, &[]).unwrap_err(), raised);
    let in_macro = format!("{{% macro m() %}}{raise}{{% endmacro %}}{{{{ m() }}}}");
    assert_eq!(try_render(&in_macro, &[]).unwrap_err(), raised);
    let of_a_message = "{{ raise_exception('no ' + messages[0].role ~ ' role') }}";
    let error = try_render(of_a_message, &[say("system", "")]).unwrap_err();
    assert_eq!(error, raised);
    let of_a_number = try_render("{{ raise_exception(1 + 1) }}", &[]).unwrap_err();
    assert_eq!(of_a_number.to_string(), "2");

    let error = try_render("a\n{% if %}", &[]).unwrap_err();
    assert!(
        matches!(error, TemplateError::Syntax { line: 2, .. }),
        "{error:?}"
    );
    let error = try_render("\n\n{{ messages[0].content.x.y }}", &[]).unwrap_err();
    assert!(
        matches!(error, TemplateError::Render { line: 3, .. }),
        "{error:?}"
    );
}

fn read(config: &Value) -> Result<Option<TemplateSource>, TemplateSourceError> {
    TemplateSource::from_tokenizer_config(config.to_string().as_bytes())
}

#[test]
fn the_source_is_found_in_a_tokenizer_config() {
    let source = read(&json!({
        "chat_template": "x", "bos_token": null, "eos_token": { "content": "</s>", "lstrip": false },
        "model_max_length": 1e30,
    }));
    let expected = TemplateSource {
        chat: "x".to_owned(),
        tool_use: None,
        bos_token: None,
        eos_token: Some("</s>".to_owned()),
    };
    assert_eq!(source.unwrap(), Some(expected));

    let [default, tool_use, rag] =
        ["default", "tool_use", "rag"].map(|name| json!({ "name": name, "template": name }));
    let source = read(&json!({ "chat_template": [rag, tool_use, default], "bos_token": "<s>" }));
    let source = source.unwrap().unwrap();
    assert_eq!(
        (source.chat.as_str(), source.tool_use.as_deref()),
        ("default", Some("tool_use"))
    );
    let template = source.compile().unwrap();
    assert!(template.environment.get_template(TOOL_USE).is_ok());

    assert_eq!(read(&json!({ "bos_token": "<s>" })).unwrap(), None);
    let source =
        TemplateSource::from_jinja("y", br#"{ "chat_template": "x", "bos_token": "<s>" }"#);
    let source = source.unwrap();
    assert_eq!(
        (source.chat.as_str(), source.bos_token.as_deref()),
        ("y", Some("<s>"))
    );

    let source = read(&json!({ "chat_template": [rag, tool_use] })).unwrap();
    let template = source.unwrap().compile().unwrap();
    let tools = [json!({ "type": "function", "function": { "name": "f" } })];
    let render = |tools| {
        let extra = Map::new();
        template.render(&TemplateInput {
            messages: &[],
            tools,
            add_generation_prompt: true,
            extra: &extra,
        })
    };
    assert_eq!(render(Some(&tools[..])).unwrap(), "tool_use");
    let error = render(None).unwrap_err();
    let named = "is named default, but: rag, tool_use";
    assert!(
        matches!(&error, TemplateError::Raised { message } if message.ends_with(named)),
        "{error:?}"
    );
    let error = read(&json!({ "chat_template": 7 })).unwrap_err();
    assert!(matches!(error, TemplateSourceError::Malformed { .. }));
}
