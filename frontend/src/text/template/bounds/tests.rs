//! Templates that would never end, or take all memory, are stopped; all others render as before.

use minijinja::value::Serde;
use proptest::prelude::*;
use serde_json::json;

use super::*;
use crate::text::template::tests::rendered;
use crate::text::template::{ChatTemplate, DEFAULT_FUEL, TemplateError, python, source};

/// Small bounds, so that they are reached soon.
const BOUNDS: Bounds = Bounds {
    value_bytes: 1 << 20,
    made_bytes: 16 << 20,
    repeated: 16 << 20,
};

fn try_render(source: &str, bounds: Bounds, fuel: u64) -> Result<String, TemplateError> {
    let mut template = ChatTemplate::try_new(source, None, None)?;
    template.bounds = bounds;
    let messages = [json!({ "role": "user", "content": "Hi" })];
    rendered(&template.with_fuel(fuel), &messages)
}

fn outcome(source: &str) -> Result<String, TemplateError> {
    try_render(source, BOUNDS, 1_000_000)
}

fn render_error(source: &str) -> String {
    match outcome(source) {
        Err(TemplateError::Render { message, .. }) => message,
        other => panic!("{source}: {other:?}"),
    }
}

fn is_too_large(source: &str) -> bool {
    matches!(outcome(source), Err(TemplateError::TooLarge { .. }))
}

#[test]
fn loops_without_end_run_out_of_fuel() {
    let many = "{% for x in range(100000) %}".repeat(5) + "{{ x }}" + &"{% endfor %}".repeat(5);
    let alternating = "{% macro a() %}{% for x in range(9) %}{{ b() }}{% endfor %}{% endmacro %}\
        {% macro b() %}{% for x in range(9) %}{{ c() }}{% endfor %}{% endmacro %}\
        {% macro c() %}{% for x in range(100000) %}{% endfor %}{% endmacro %}{{ a() }}";
    let grown = "{% set ns = namespace(l=[0]) %}{% for x in range(12) %}{% set ns.l = ns.l + ns.l %}{% endfor %}\
        {% for x in ns.l %}{% for y in ns.l %}{% endfor %}{% endfor %}";
    for source in [&*many, alternating, grown] {
        let limit = 100_000;
        let error = try_render(source, BOUNDS, limit).unwrap_err();
        assert_eq!(error, TemplateError::OutOfFuel { limit }, "{source}");
    }
    assert!(
        render_error("{% for x in range(10 ** 9) %}{% endfor %}").contains("range has too many")
    );
}

#[test]
fn recursion_without_end_is_an_error() {
    for source in [
        "{% macro m(x) %}{{ m(x ~ 'a') }}{% endmacro %}{{ m('a') }}",
        "{% macro a() %}{{ b() }}{% endmacro %}{% macro b() %}{{ a() }}{% endmacro %}{{ a() }}",
        "{% for x in [1] recursive %}{{ loop([1]) }}{% endfor %}",
        "{% macro m() %}{{ caller() }}{% call m() %}x{% endcall %}{% endmacro %}{% call m() %}x{% endcall %}",
    ] {
        let error = render_error(source);
        assert!(error.contains("recursion limit exceeded"), "{error}");
    }
}

#[test]
fn expressions_without_end_are_refused_before_they_are_compiled() {
    let chain = |count| format!("{{% set a = 'a' %}}{{{{ a{} }}}}", " ~ a".repeat(count));
    assert_eq!(outcome(&chain(99)).unwrap(), "a".repeat(100));
    for endless in [
        chain(100_000),
        format!("{{{{ a{} }}}}", "|upper".repeat(100_000)),
        format!("{{{{ a{} }}}}", ".a".repeat(100_000)),
        format!("{{{{ {}a{} }}}}", "(".repeat(100_000), ")".repeat(100_000)),
        format!("{{% set a = a{} %}}", " or a".repeat(100_000)),
    ] {
        let error = outcome(&endless).unwrap_err();
        assert!(
            matches!(&error, TemplateError::Syntax { message, .. } if message.contains("tokens in a tag")),
            "{error:?}"
        );
    }
}

/// All ways in which a value can be doubled.
const DOUBLINGS: &[&str] = &[
    "set ns.x = ns.x ~ ns.x",
    "set ns.x = ns.x + ns.x",
    "set ns.x = (ns.x) ~ (ns.x)",
    "set ns.x = ns.x * 2",
    "set ns.x = (ns.x ~ ns.x) if true else ''",
    "set ns.x = false or ns.x ~ ns.x",
    "set ns.x = [ns.x, ns.x] | join",
    "set ns.x = [ns.x, ns.x] | join(ns.x)",
    "set ns.x = ''.join([ns.x, ns.x])",
    "set ns.x = 'aa' | replace('a', ns.x)",
    "set ns.x = 'aa'.replace('a', ns.x)",
    "set ns.x = '%s%s' | format(ns.x, ns.x)",
    "set ns.x = '{}{}'.format(ns.x, ns.x)",
    "set ns.x = [ns.x, ns.x] | string",
    "set ns.x = [ns.x, ns.x] | tojson",
    "set ns.x = [ns.x, ns.x]",
    "set ns.x = (ns.x, ns.x)",
    "set ns.x = { 'a': ns.x, 'b': ns.x }",
    "set ns.x = dict(a=ns.x, b=ns.x)",
    "set ns.x = namespace(a=ns.x, b=ns.x)",
    "set ns.x = [ns.x] | chain([ns.x]) | list | tojson",
    "set ns.x = twice(ns.x)",
    "set ns.y %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = ns.y",
];

#[test]
fn what_doubles_again_and_again_is_bounded() {
    for again in DOUBLINGS {
        let source = format!(
            "{{% macro twice(x) %}}{{{{ x }}}}{{{{ x }}}}{{% endmacro %}}{{% set ns = namespace(x='ab', y='') %}}\
             {{% for i in range(60) %}}{{% {again} %}}{{% endfor %}}"
        );
        assert!(is_too_large(&source), "{again}");
    }
}

#[test]
fn what_doubles_otherwise_is_bounded() {
    for again in [
        "ns.x + ns.x",
        "ns.x * 2",
        "ns.x | chain(ns.x)",
        "[ns.x, ns.x] | sum(start=[])",
    ] {
        let source = format!(
            "{{% set ns = namespace(x=['ab']) %}}{{% for i in range(60) %}}{{% set ns.x = {again} %}}{{% endfor %}}"
        );
        assert!(is_too_large(&source), "{again}");
    }
    let thrown_away =
        "{% set x = 'x' * 900000 %}{% for i in range(1000) %}{% set y = x ~ i %}{% endfor %}";
    let limit_bytes = BOUNDS.made_bytes;
    assert_eq!(
        outcome(thrown_away),
        Err(TemplateError::TooLarge { limit_bytes })
    );
    let spelled_out = "{% set x = 'ab' %}".to_owned() + &"{% set x = x ~ x %}".repeat(60);
    assert!(is_too_large(&spelled_out));
}

#[test]
fn one_step_does_not_make_too_much() {
    assert!(render_error("{{ 'x' * 10 ** 9 }}").contains("repeated string is too large"));
    for source in [
        "{{ 'x' * 100000000 }}",
        "{% set x = ['abcdefgh' * 1000000] * 1000 %}",
        "{{ '%900000000s' | format('a') }}",
        "{{ '%*s' | format(900000000, 'a') }}",
        "{{ '%(a)900000000s' | format(a='a') }}",
        "{{ '{:900000000}'.format('a') }}",
        "{{ '{a:>900000000}'.format(a='a') }}",
        "{{ 'a\n' | indent(900000000) }}",
        "{{ 'a\n' | indent(width=900000000) }}",
        "{{ [1] | batch(900000000, 'a') }}",
        "{{ [1] | slice(900000000) }}",
        "{{ range(100000) | join('x' * 1000000) }}",
        "{{ ('x' * 1000000).join(range(100000)) }}",
        "{{ ('a' * 1000000) | replace('a', 'b' * 1000000) }}",
        "{{ ('a' * 1000000).replace('', 'b' * 1000000) }}",
        "{% set x = range(100000) | list %}{{ [[[[[[[[x, x, x]]]]]]]] | tojson(indent=64) }}",
    ] {
        assert!(is_too_large(source), "{source}");
    }
}

/// An instruction that reads a large value costs more than one that adds two numbers.
#[test]
fn what_reads_a_large_value_again_and_again_is_bounded() {
    for again in [
        "set y = x | reverse",
        "set y = x | trim",
        "set y = x | length",
        "set y = x.strip()",
        "set y = x.find('b')",
        "set y = x[::-1]",
        "set y = x[:1]",
        "set y = x[-1]",
        "set y = x[i]",
        "set y = 'b' in x",
        "set y = x == z",
        "set y = x is eq(z)",
        "set y = x is upper",
        "set y = {}[x]",
        "set y = {}.get(x)",
        "set y = l | sort",
        "set y = l | select('eq', z) | list",
        "set y = l.count(z)",
        "for y in x %}{% break %}{% endfor %}{% set y = 1",
    ] {
        let source = format!(
            "{{% set x = 'a' * 30000 %}}{{% set z = 'a' * 30000 %}}{{% set l = [x, x] %}}\
             {{% for i in range(9000) %}}{{% {again} %}}{{% endfor %}}"
        );
        let limit_bytes = BOUNDS.made_bytes;
        assert_eq!(
            outcome(&source),
            Err(TemplateError::TooLarge { limit_bytes }),
            "{again}"
        );
    }
}

/// A list of letters takes more memory than their text.
#[test]
fn lists_of_letters_are_refused_before_they_are_made() {
    for list in [
        "x | list",
        "x | sort",
        "x | unique | list",
        "x | map('upper') | list",
        "x | split('a')",
        "x.split('a')",
        "(x | replace('a', '\n')) | lines",
        "(x | replace('a', '\n')).splitlines()",
    ] {
        let source = format!("{{% set x = 'a' * 100000 %}}{{% set y = {list} %}}");
        assert!(is_too_large(&source), "{list}");
    }
}

/// Each list would read from the previous one, which reads from its predecessor.
#[test]
fn lists_that_read_others_do_not_lie_too_deep() {
    for again in [
        "ns.x[:]",
        "ns.x[::-1]",
        "ns.x | reverse",
        "ns.x * 1",
        "ns.x[:] + []",
        "ns.x | chain([])",
        "ns.x[:] | chain([])",
        "ns.x | zip",
    ] {
        let source = format!(
            "{{% set ns = namespace(x=[1, 2]) %}}{{% for i in range(50000) %}}{{% set ns.x = {again} %}}{{% endfor %}}{{{{ ns.x | length }}}}"
        );
        match outcome(&source) {
            Ok(length) => assert_eq!(length, "2", "{again}"),
            Err(TemplateError::Render { message, .. }) => {
                assert!(message.contains("too deep"), "{again}: {message}");
            }
            Err(error) => assert!(matches!(error, TemplateError::TooLarge { .. }), "{again}"),
        }
    }
    let objects = "{% set ns = namespace(x={'a': 1}) %}{% for i in range(20000) %}{% set ns.x = ns.x | chain({'b': 2}) %}{% endfor %}{{ ns.x.a }}{{ ns.x.b }}";
    assert_eq!(outcome(objects).unwrap(), "12");
}

#[test]
fn a_number_in_a_format_is_no_width() {
    let source =
        "{{ 'call 900000000 {} 900000000'.format(1) }} {{ '900000000 %s 9%%' | format(2) }}";
    assert_eq!(
        outcome(source).unwrap(),
        "call 900000000 1 900000000 900000000 2 9%"
    );
}

#[test]
fn lists_do_not_lie_too_deep_in_each_other() {
    for inner in [
        "[ns.x]",
        "(ns.x,)",
        "{ 'a': ns.x }",
        "dict(a=ns.x)",
        "[ns.x] + []",
    ] {
        let source = format!(
            "{{% set ns = namespace(x=0) %}}{{% for i in range(100000) %}}{{% set ns.x = {inner} %}}{{% endfor %}}{{{{ ns.x }}}}"
        );
        assert!(render_error(&source).contains("too deep"), "{inner}");
    }
}

#[test]
fn a_namespace_is_no_attribute_of_itself() {
    for cycle in [
        "set a.x = a",
        "set a.x = [1, { 'k': a }]",
        "set a.x, b.x = b, a",
        "set b.x = a %}{% set a.x = b",
        "set b.x = [a] %}{% set a.x = (b, 1)",
    ] {
        let source = format!(
            "{{% set a = namespace() %}}{{% set b = namespace() %}}{{% {cycle} %}}{{% set s = a ~ b %}}{{{{ a }}}}"
        );
        let error = render_error(&source);
        assert!(error.contains("attribute of itself"), "{cycle}: {error}");
    }
    let other = "{% set a = namespace(x=1) %}{% set b = namespace() %}{% set b.a = a %}{{ b.a.x }}";
    assert_eq!(outcome(other).unwrap(), "1");
}

/// Repeating a template's own text costs instructions.
#[test]
fn repeated_text_costs_fuel() {
    let text = "x".repeat(100_000);
    let limit = u64::try_from(2 * (BOUNDS.repeated / text.len())).unwrap();
    for (begin, end) in [
        (
            "{% for a in range(100000) %}{% if false %}",
            "{% endif %}{% endfor %}",
        ),
        (
            "{% macro m() %}",
            "{% endmacro %}{% for a in range(100000) %}{% endfor %}",
        ),
    ] {
        let source = format!("{begin}{text}{end}");
        assert_eq!(outcome(&source), Err(TemplateError::OutOfFuel { limit }));
    }
    // Text that is not repeated costs nothing.
    let once = text.clone() + "{% for a in range(20000) %}{% endfor %}";
    assert_eq!(outcome(&once), Ok(text));
}

/// Repeating long literal texts is left to a thread that may take longer.
#[test]
fn a_quick_rendering_repeats_little() {
    let quick = |source: &str| {
        let template = ChatTemplate::try_new(source, None, None)?.into_quick(50_000);
        rendered(&template, &[])
    };
    let text = "x".repeat(5000);
    let few = format!("{{% macro m() %}}{text}{{% endmacro %}}{{{{ m() }}}}{{{{ m() }}}}");
    assert_eq!(quick(&few), Ok(text.repeat(2)));
    let many = format!("{{% for a in range(10000) %}}{text}{{% endfor %}}");
    let limit = u64::try_from(2 * (Bounds::QUICK.repeated / text.len())).unwrap();
    assert_eq!(quick(&many), Err(TemplateError::OutOfFuel { limit }));
}

/// Conversations of usual length are not refused.
#[test]
fn a_text_may_grow_by_a_message_at_a_time() {
    let source = "{% set ns = namespace(text='', list=[]) %}{% for i in range(2000) %}\
        {% set ns.text = ns.text + 'a message of some length, ' ~ i %}{% set ns.list = ns.list + [i] %}\
        {% endfor %}{{ ns.text | length }} {{ ns.list | length }}";
    let grown = try_render(source, Bounds::DEFAULT, DEFAULT_FUEL);
    assert_eq!(grown.unwrap(), "58890 2000");
}

/// Templates that look at the previous message do this.
#[test]
fn items_of_a_long_list_may_be_taken_one_by_one() {
    let source = "{% set l = range(2000) | list %}{% for i in range(2000) %}{% set y = l[i] %}\
        {% endfor %}{{ l | length }}";
    let taken = try_render(source, Bounds::QUICK, DEFAULT_FUEL);
    assert_eq!(taken.unwrap(), "2000");
}

/// Expressions of all kinds, with brackets where they do and do not matter.
fn expression() -> impl Strategy<Value = String> {
    let leaf = prop::sample::select(vec![
        "1",
        "2.5",
        "-3",
        "'a'",
        "'b' 'c'",
        "text",
        "number",
        "list",
        "map",
        "map.k",
        "list[0]",
        "none",
        "true",
        "absent",
        "text.upper()",
        "m(text)",
        "m(x=number)",
        "list | length",
        "['a', text]",
        "{'k': text}",
        "('a', 1)",
        "[]",
        "{}",
        "text[1:]",
        "list[::-1]",
        "map.get('k', 1)",
        "'é🦊'",
    ]);
    let leaf = leaf.prop_map(str::to_owned);
    leaf.prop_recursive(5, 40, 3, |inner| {
        let operator = prop::sample::select(vec![
            "+", "~", "*", "-", "/", "//", "%", "==", "in", "not in", "and", "or",
        ]);
        prop_oneof![
            4 => (inner.clone(), operator, inner.clone()).prop_map(|(a, op, b)| format!("{a} {op} {b}")),
            3 => inner.clone().prop_map(|a| format!("({a})")),
            // Not for lists, whose order differs between Jinja and the engine.
            1 => (inner.clone(), inner.clone()).prop_map(|(a, b)| format!("(({a}) | string < ({b}) | string)")),
            1 => inner.clone().prop_map(|a| format!("not {a}")),
            1 => inner.clone().prop_map(|a| format!("-{a}")),
            1 => inner.clone().prop_map(|a| format!("{a} | string")),
            1 => inner.clone().prop_map(|a| format!("({a}) | join('-')")),
            1 => inner.clone().prop_map(|a| format!("m({a})")),
            1 => inner.clone().prop_map(|a| format!("m(x={a})")),
            1 => (inner.clone(), inner.clone()).prop_map(|(a, b)| format!("[{a}, {b}]")),
            1 => (inner.clone(), inner.clone()).prop_map(|(a, b)| format!("({a}, {b})")),
            1 => (inner.clone(), inner.clone()).prop_map(|(a, b)| format!("{{'k': {a}, {b}: 1}}")),
            1 => (inner.clone(), inner.clone()).prop_map(|(a, b)| format!("list[{a}:{b}]")),
            1 => (inner.clone(), inner.clone()).prop_map(|(a, b)| format!("{a} if {b}")),
            1 => (inner.clone(), inner.clone(), inner).prop_map(|(a, b, c)| format!("{a} if {b} else {c}")),
        ]
    })
}

/// Returns the engine's result for `source`, and for the bounded source; all errors are alike.
fn both(source: &str) -> (Option<String>, Option<String>) {
    let mut environment = python::environment().unwrap();
    let render = |environment: &Environment<'_>, source: &str| {
        let context =
            json!({ "text": "Ab c", "number": 2, "list": ["x", "y", 3], "map": { "k": "v" } });
        counted(Bounds::DEFAULT, || {
            environment.render_str(source, Value::from(Serde(context)))
        })
        .ok()
    };
    let plain = render(&environment, source);
    let changed = source::Bounded::try_new(source, environment.syntax().clone());
    let bound = changed.ok().and_then(|changed| {
        add_functions(&mut environment, &changed.function);
        render(&environment, &changed.source)
    });
    (plain, bound)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2_000))]

    #[test]
    fn bounding_changes_nothing_else(a in expression(), b in expression()) {
        let source = format!(
            "{{% macro m(x=[1] + [2]) %}}<{{{{ x ~ x }}}}>{{% endmacro %}}{{% set s = {a} %}}{{{{ s }}}}\n\
             {{%- set t = {b}, s %}}{{% set n = namespace(v={a}) %}}{{% set n.w = {b} %}}{{% set n.x, n.y =s,{a} %}}\
             {{{{ t }}}} {{{{ n.v }}}} {{{{ n.w }}}} {{{{ n.y }}}}\
             {{%- for i in [s, {b}] if i is not in ['a' ~ 'b'] %}} {{{{ {b} }}}}{{% endfor %}}{{{{ s is sameas s }}}}"
        );
        let (plain, bound) = both(&source);
        prop_assert_eq!(plain, bound, "{}", source);
    }
}

/// As in Jinja, where a slice of a list is a list.
#[test]
fn lists_are_ordered_by_their_items() {
    for (order, expected) in [
        ("l[::-1] < l[::-1]", "False"),
        ("l < l[:1]", "False"),
        ("l < l[1:]", "True"),
        ("l + l < l[:]", "False"),
        ("l[:] < l * 2 <= l[::-1]", "True"),
        ("l < (l[:1] | default([]))", "False"),
    ] {
        let source = format!("{{% set l = [1, 2] %}}{{{{ {order} }}}}");
        assert_eq!(outcome(&source).unwrap(), expected, "{order}");
    }
}

#[test]
fn the_source_is_changed_where_values_grow_and_nowhere_else() {
    for (source, expected) in [
        ("{{ a + b ~ c }}", "{{ a + b ~ c }}"),
        (
            "{% set x = a + b ~ c %}",
            "{% set x = _bounded(a + b ~ c) %}",
        ),
        (
            "{% set x = (a) + (b | upper) %}",
            "{% set x = _bounded((a) + (b | upper)) %}",
        ),
        (
            "{{ 'a' * 3 }}",
            "{{ _bounded(_bounded('a') * _bounded(3)) }}",
        ),
        (
            "{{ f(a + b)[c ~ d] }}",
            "{{ _bounded_item(f(_bounded(a + b)))[_bounded(c ~ d)] }}",
        ),
        (
            "{% if a == b + c or [1, 2] %}{% endif %}",
            "{% if a | _bounded_compared == _bounded(b + c) or [1, 2] %}{% endif %}",
        ),
        (
            "{{ a.b[0].c[1:] }}{{ (a).b['k'][-1] }}{{ (a | f)[::-1] }}",
            "{{ _bounded_base(a.b[0].c)[1:] }}{{ _bounded_item((a).b['k'])[-1] }}{{ (a | f)[::-1] }}",
        ),
        (
            "{{ a in b.c and a == 'b' and a.b == c }}{{ a[b] is none }}",
            "{{ a in _bounded(b.c) and a == 'b' and _bounded(a.b | _bounded_compared) == c | _bounded_compared }}{{ _bounded_item(a)[_bounded_part(b)] is none }}",
        ),
        (
            "{{ a == 1 and a < b[1:] }}",
            "{{ a == 1 and a | _bounded_ordered < _bounded_base(b)[1:] | _bounded_ordered }}",
        ),
        (
            "{% for x in a if x is in b %}{% endfor %}",
            "{% for x in _bounded_part(a) if _bounded(x) is in _bounded(b) %}{% endfor %}",
        ),
        (
            "{% set x = [a, [b]] %}",
            "{% set x = _bounded([a, _bounded([b])]) %}",
        ),
        (
            "é{%- set x = 'é' ~ y -%}\n\né",
            "é{%- set x = _bounded('é' ~ y) -%}\n\né",
        ),
        (
            "{% set _bounded = a + b %}",
            "{% set _bounded = _bounded_(a + b) %}",
        ),
        (
            "{# a + b #}{% raw %}{{ a + b }}{% endraw %}",
            "{# a + b #}{% raw %}{{ a + b }}{% endraw %}",
        ),
    ] {
        let syntax = python::environment().unwrap().syntax().clone();
        let changed = source::Bounded::try_new(source, syntax).unwrap();
        assert_eq!(changed.source, expected);
    }
}
