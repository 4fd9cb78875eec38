//! Random bodies of up to 64 KiB, to every route.

use proptest::prelude::*;
use proptest::sample::select;
use proptest::test_runner::{Config, TestRunner};

use crate::{Site, TURN, bound};

const MAX_BYTES: usize = 64 << 10;

const ROUTES: [&str; 12] = [
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/rerank",
    "/v1/score",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/responses",
    "/v1/responses/input_tokens",
    "/tokenize",
    "/detokenize",
    "/v1/responses/resp_1/cancel",
];

const FIELDS: [&str; 34] = [
    "query",
    "documents",
    "text_1",
    "text_2",
    "messages",
    "prompt",
    "input",
    "tokens",
    "tools",
    "system",
    "stop",
    "stop_sequences",
    "logit_bias",
    "genset",
    "nvext",
    "stop_token_ids",
    "annotations",
    "guided_json",
    "guided_choice",
    "response_format",
    "chat_template_kwargs",
    "instructions",
    "metadata",
    "text",
    "reasoning",
    "tool_choice",
    "role",
    "content",
    "type",
    "function",
    "parameters",
    "arguments",
    "x",
    "n",
];

/// JSON as text, so that it can have many values in few bytes, and can be broken.
fn text() -> impl Strategy<Value = String> {
    let leaf = prop_oneof![
        Just("0".to_owned()),
        Just("\"\"".to_owned()),
        Just("{}".to_owned()),
        Just("[]".to_owned()),
        Just("null".to_owned()),
        Just("\"user\"".to_owned()),
        Just("\"function\"".to_owned()),
        Just("\"[0,0,{\\\"a\\\":[]}]\"".to_owned()),
        "\"[ -~&&[^\"\\\\]]{0,20}\"",
        any::<f64>().prop_map(|number| number.to_string()),
    ];
    leaf.prop_recursive(5, 40, 4, |inner| {
        let field = (select(&FIELDS[..]), inner.clone());
        let fields = prop::collection::vec(field, 0..5).prop_map(|fields| {
            let fields = fields
                .iter()
                .map(|(name, value)| format!("\"{name}\":{value}"));
            format!("{{{}}}", fields.collect::<Vec<_>>().join(","))
        });
        let list = prop::collection::vec(inner.clone(), 0..4);
        let list = list.prop_map(|items| format!("[{}]", items.join(",")));
        // One item, as often as it fits.
        let many = (inner.clone(), 0..MAX_BYTES).prop_map(|(item, bytes)| {
            let times = bytes / (item.len() + 1);
            format!("[{item}{}]", format!(",{item}").repeat(times))
        });
        let deep = (inner, 0_usize..2000, select(&["[", "{\"a\":"][..]))
            .prop_map(|(inner, levels, open)| open.repeat(levels) + &inner);
        prop_oneof![3 => fields, 2 => list, 2 => many, 1 => deep]
    })
}

fn body() -> impl Strategy<Value = String> {
    let fields = prop::collection::vec((select(&FIELDS[..]), text()), 0..4);
    let base = select(
        &[
            "",
            r#""messages":[{"role":"user","content":"Hi"}],"max_tokens":4,"#,
            r#""prompt":"Hi","#,
            r#""input":"Hi","#,
        ][..],
    );
    let object = (base, fields).prop_map(|(base, fields)| {
        let fields = fields
            .iter()
            .map(|(name, value)| format!("\"{name}\":{value}"));
        let fields: Vec<String> = std::iter::once("\"model\":\"tiny\"".into())
            .chain(fields)
            .collect();
        format!("{{{base}{}}}", fields.join(","))
    });
    prop_oneof![5 => object, 1 => text()].prop_map(|mut body| {
        body.truncate(body.floor_char_boundary(MAX_BYTES));
        body
    })
}

/// Nothing panics, memory is bounded, and the whole budget is free afterwards.
#[test]
fn whatever_is_sent_takes_a_bounded_amount() {
    let _turn = TURN.blocking_lock();
    let tokio = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    let site = tokio.block_on(Site::start());
    let config = Config {
        cases: 300,
        failure_persistence: None,
        ..Config::default()
    };
    let drawn = (select(&ROUTES[..]), body());
    let checked = TestRunner::new(config).run(&drawn, |(path, body)| {
        let (status, _, peak) = tokio.block_on(site.measure(path, body.as_bytes()));
        prop_assert!(status < 500, "{} gave {}", path, status);
        prop_assert!(peak <= bound(body.as_bytes()), "{}: {} bytes", path, peak);
        Ok(())
    });
    checked.unwrap();
    tokio.block_on(async {
        site.is_whole().await;
        site.close().await;
    });
}
