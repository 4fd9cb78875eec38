//! The attacks: what each one sends, and what it must not cause in addition to the promises for every attack.

mod bodies;
mod files;
mod keys;
mod programs;
mod requests;

use self::bodies::{choices, filled, images, list, nested_schema, prompts, words};
use self::files::too_many_lines;
use self::keys::{guessed_prompt, replaced_key, stored_responses, told_names, unpaid};
use self::programs::{broken_template, loud_child, open_directory, orphan};
use self::requests::{
    abandoned, at_once, endless_heads, fleet, long_name, one, one_to, other_origin, slow_bodies,
    tokenize,
};
use super::{Attack, wire};

/// The size of texts to tokenize.
const TEXT_BYTES: usize = 10_000_000;
/// Makes the streams of bystanders last as long as an attack.
const SLOWLY: [&str; 2] = ["--token-delay-ms", "20"];

pub(super) const ATTACKS: &[Attack] = &[
    Attack {
        name: "1a",
        what: "256 prompts, `n` 16",
        run: |bench| one(bench, "sample", &choices("")),
    },
    Attack {
        name: "1b",
        what: "the same with annotations",
        run: |bench| {
            let zeros = list("0", 5_000);
            let field = format!(r#","genset":{{"annotations":{{"a":[{zeros}]}}}}"#);
            one(bench, "candle", &choices(&field))
        },
    },
    Attack {
        name: "1c",
        what: "the same with stop ids",
        run: |bench| {
            let ids = list("5", 100_000);
            one(
                bench,
                "sample",
                &choices(&format!(r#","stop_token_ids":[{ids}]"#)),
            )
        },
    },
    Attack {
        name: "1d",
        what: "a chat, `n` 16, with stop ids",
        run: |bench| {
            let ids = list("5", 5_000_000);
            let body = format!(
                r#"{{"model":"tiny-chat","messages":[{{"role":"user","content":"a"}}],"n":16,"max_tokens":1,"stop_token_ids":[{ids}]}}"#
            );
            one_to(bench, "sample", "/v1/chat/completions", &body)
        },
    },
    Attack {
        name: "2a",
        what: "16 requests of 256 long prompts",
        run: |bench| fleet(bench, 16, &prompts(16_000)),
    },
    Attack {
        name: "2b",
        what: "3 requests of 4096 choices with stop ids",
        run: |bench| {
            let ids = list("5", 20_000);
            fleet(bench, 3, &choices(&format!(r#","stop_token_ids":[{ids}]"#)))
        },
    },
    Attack {
        name: "2c",
        what: "4 requests that echo 2 million token ids",
        run: |bench| {
            let ids = list("5", 2_000_000);
            let body =
                format!(r#"{{"model":"tiny-chat","prompt":[{ids}],"echo":true,"max_tokens":1}}"#);
            fleet(bench, 4, &body)
        },
    },
    Attack {
        name: "3a",
        what: "a list of numbers in an unknown field",
        run: |bench| one(bench, "sample", &filled(r#"{"a":["#, "0,", "0]}")),
    },
    Attack {
        name: "3b",
        what: "nested lists in a tool's schema",
        run: |bench| one_to(bench, "sample", "/v1/chat/completions", &nested_schema()),
    },
    Attack {
        name: "3c",
        what: "a list without an end",
        run: |bench| one(bench, "sample", &filled(r#"{"a":["#, "0,", "")),
    },
    Attack {
        name: "3d",
        what: "8 such schemas at once",
        run: |bench| {
            let mut scene = bench.alone("sample", &SLOWLY)?;
            let body = nested_schema();
            Ok(bench.measure(&mut scene, |scene| {
                at_once(scene.http(), 8, "/v1/chat/completions", &body)
            }))
        },
    },
    Attack {
        name: "4a",
        what: "`/tokenize`: one letter",
        run: |bench| tokenize(bench, &"a".repeat(TEXT_BYTES)),
    },
    Attack {
        name: "4b",
        what: "`/tokenize`: random words",
        run: |bench| tokenize(bench, &words(TEXT_BYTES)),
    },
    Attack {
        name: "4c",
        what: "`/tokenize`: a letter with accents",
        run: |bench| tokenize(bench, &format!("e{}", "\u{301}".repeat(TEXT_BYTES / 2))),
    },
    Attack {
        name: "4d",
        what: "`/tokenize`: letters, digits and signs",
        run: |bench| tokenize(bench, &"aA1! ".repeat(TEXT_BYTES / 5)),
    },
    Attack {
        name: "4e",
        what: "5 `/tokenize` whose clients leave",
        run: abandoned,
    },
    Attack {
        name: "5",
        what: "a key with 50 tokens a minute leaves before its streams end",
        run: unpaid,
    },
    Attack {
        name: "6",
        what: "a worker's card names a file of 4 EB, and the worker sends zeros",
        run: wire::endless_file,
    },
    Attack {
        name: "7",
        what: "a page of another origin, and a name that was rebound",
        run: other_origin,
    },
    Attack {
        name: "8",
        what: "a key asks for another key's prompt",
        run: guessed_prompt,
    },
    Attack {
        name: "9",
        what: "one client sends large bodies slowly",
        run: slow_bodies,
    },
    Attack {
        name: "10",
        what: "a key is replaced, with the file's time and length kept",
        run: replaced_key,
    },
    Attack {
        name: "11",
        what: "a model's name of 8 MiB, and one with a line break, in the log",
        run: long_name,
    },
    Attack {
        name: "12",
        what: "40 streams with headers of 8 MiB on a worker's wire",
        run: wire::large_headers,
    },
    Attack {
        name: "13",
        what: "a discovery directory of mode 0777",
        run: open_directory,
    },
    Attack {
        name: "14",
        what: "100 uploads whose first part has a head without an end",
        run: endless_heads,
    },
    Attack {
        name: "16",
        what: "1100 stored responses of one key",
        run: stored_responses,
    },
    Attack {
        name: "17",
        what: "`/metrics` without a key",
        run: told_names,
    },
    Attack {
        name: "18",
        what: "`in=stdin` with a template that does not compile",
        run: broken_template,
    },
    Attack {
        name: "20a",
        what: "a child that prints without pause",
        run: loud_child,
    },
    Attack {
        name: "20b",
        what: "a child of a server that is killed",
        run: orphan,
    },
    Attack {
        name: "21",
        what: "a batch of 50001 requests",
        run: too_many_lines,
    },
    Attack {
        name: "22",
        what: "`/v1/rerank`: as many documents as fit",
        run: |bench| {
            let begin = r#"{"model":"tiny-chat","query":"a","documents":["#;
            let body = filled(begin, r#""a","#, r#""a"]}"#);
            one_to(bench, "sample", "/v1/rerank", &body)
        },
    },
    Attack {
        name: "23a",
        what: "a chat with as many images as fit",
        run: |bench| {
            let body = images(
                r#"iVBORw0KGgo="}},{"type":"image_url","image_url":{"url":"data:image/png;base64,"#,
            );
            one_to(bench, "sample", "/v1/chat/completions", &body)
        },
    },
    Attack {
        name: "23b",
        what: "a chat with one image that is as long",
        run: |bench| {
            one_to(
                bench,
                "sample",
                "/v1/chat/completions",
                &images("iVBORw0KGgoA"),
            )
        },
    },
];
