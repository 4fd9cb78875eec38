use super::*;

/// The example of the guide parses.
#[test]
fn the_guides_example_is_a_script() {
    let page = include_str!("../../../../docs/guide/scripted-engine.md");
    let example = page.split("```toml\n").nth(1).unwrap();
    let example = example.split("\n```").next().unwrap();
    assert!(example.parse::<Script>().unwrap().replies.len() >= 5);
}

fn problem(script: &str) -> String {
    script.parse::<Script>().unwrap_err().to_string()
}

#[test]
fn what_is_wrong_is_named_with_its_line_and_key() {
    let reply = |body: &str| format!("# one\n\n[[reply]]\n{body}");
    let cases = [
        (
            "times = 0\ntext = 'x'",
            "line 3: reply 1: times: must be at least 1",
        ),
        ("", "line 3: reply 1: text: a reply needs text or chunks"),
        (
            "text = 'x'\nchunks = ['y']",
            "line 3: reply 1: chunks: give either",
        ),
        (
            "chunks = ['y', '']",
            "line 3: reply 1: chunks, chunk 2: must not be empty",
        ),
        (
            "text = 'x'\nchunk_chars = 0",
            "line 3: reply 1: chunk_chars: must be at least 1",
        ),
        (
            "chunks = ['x']\nchunk_chars = 3",
            "line 3: reply 1: chunk_chars: cuts text",
        ),
        (
            "text = 'hi {{name}}'",
            "line 3: reply 1: text: {{name}} is none of",
        ),
        (
            "match.regex = '('\ntext = 'x'",
            "line 3: reply 1: match.regex: ",
        ),
        (
            "match.contains = ''\ntext = 'x'",
            "line 3: reply 1: match.contains: must not be empty",
        ),
        (
            "match = {}\ntext = 'x'",
            "line 3: reply 1: match: needs exact",
        ),
        (
            "text = 'x'\nlogprobs = [{ logprob = -1 }, { logprob = 0.5 }]",
            "line 3: reply 1: logprobs, token 2: must be finite and at most 0, got 0.5",
        ),
        (
            "text = 'x'\nfault = { action = 'error' }",
            "line 3: reply 1: fault.kind: say which error: one of invalid_argument",
        ),
        (
            "fault = { action = 'refuse', kind = 'overloaded', after_chunks = 1 }",
            "line 3: reply 1: fault.after_chunks: a refused",
        ),
        (
            "text = 'x'\nfault = { action = 'hang', message = 'm' }",
            "line 3: reply 1: fault.message: only",
        ),
        (
            "text = 'x'\nfault = { action = 'error', kind = 'internal', message = ' ' }",
            "line 3: reply 1: fault.message: must not be empty",
        ),
        (
            "fault = { action = 'hang', after_chunks = 2 }",
            "line 3: reply 1: text: a reply needs",
        ),
        (
            "text = 'all'\n[[reply]]\ntext = 'x'",
            "line 5: reply 2: match: never used: reply 1",
        ),
    ];
    for (body, expected) in cases {
        let problem = problem(&reply(body));
        assert!(problem.starts_with(expected), "{body}: {problem}");
    }
}

/// Serde's errors name line, column and key.
#[test]
fn unknown_keys_and_wrong_types_are_named() {
    let cases = [
        (
            "[[reply]]\ntext = 'x'\ntoken_msec = 1",
            ["line 3", "token_msec"],
        ),
        ("[[reply]]\ntext = 'x'\ntoken_ms = -1", ["line 3", "-1"]),
        (
            "[[reply]]\ntext = 'x'\nfault = { action = 'explode' }",
            ["line 3", "explode"],
        ),
        (
            "[[reply]]\ntext = 'x'\nfinish_reason = 'cancelled'",
            ["line 3", "cancelled"],
        ),
        (
            "[[reply]]\ntext = 'x'\nfault = { action = 'error', kind = 'bad' }",
            ["line 3", "bad"],
        ),
        (
            "[[reply]]\nmatch.contain = 'x'\ntext = 'x'",
            ["line 2", "contain"],
        ),
        ("[prompt]\nstart = 'x'", ["line 2", "start"]),
        ("guided = ['xml']\n", ["line 1", "xml"]),
        ("[[replies]]\ntext = 'x'", ["line 1", "replies"]),
    ];
    for (script, expected) in cases {
        let problem = problem(script);
        for part in expected {
            assert!(problem.contains(part), "{script}: {problem}");
        }
    }
}

#[test]
fn a_script_without_replies_and_bad_tables_are_refused() {
    assert_eq!(problem(""), "a script needs at least one [[reply]]");
    assert_eq!(
        problem("[defaults]\nchunk_chars = 0\n[[reply]]\ntext = 'x'"),
        "defaults.chunk_chars: must be at least 1"
    );
    assert_eq!(
        problem("[prompt]\nuser_end = ''\n[[reply]]\ntext = 'x'"),
        "prompt.user_end: must not be empty"
    );
}

#[test]
fn a_file_that_is_missing_or_wrong_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("script.toml");
    let missing = Script::load(&path).unwrap_err().to_string();
    assert!(
        missing.starts_with("cannot read ") && missing.contains("script.toml"),
        "{missing}"
    );
    std::fs::write(&path, "[[reply]]\ntimes = 0\ntext = 'x'").unwrap();
    let wrong = Script::load(&path).unwrap_err().to_string();
    assert!(
        wrong.ends_with("script.toml: line 1: reply 1: times: must be at least 1"),
        "{wrong}"
    );
}
