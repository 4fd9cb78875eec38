//! Request bodies, built as text as an attacker would: no code that makes valid requests gets in the way.

/// The server's default limit. It does not read a larger body.
const BODY_BYTES: usize = 16 << 20;

pub(super) fn list(item: &str, count: usize) -> String {
    let mut list = format!("{item},").repeat(count);
    list.pop();
    list
}

/// A request for 4096 answers.
pub(super) fn choices(field: &str) -> String {
    let prompts = list(r#""a""#, 256);
    format!(r#"{{"model":"tiny-chat","prompt":[{prompts}],"n":16,"max_tokens":1{field}}}"#)
}

/// A request with 256 prompts of `bytes` bytes each.
pub(super) fn prompts(bytes: usize) -> String {
    let prompt = format!("\"{}\"", &words(bytes));
    let prompts = list(&prompt, 256);
    format!(r#"{{"model":"tiny-chat","prompt":[{prompts}],"max_tokens":1}}"#)
}

/// A body with as many items as fit.
pub(super) fn filled(begin: &str, item: &str, end: &str) -> String {
    let count = (BODY_BYTES - begin.len() - end.len()) / item.len();
    format!("{begin}{}{end}", item.repeat(count))
}

/// A chat whose only tool has a schema with as many lists as fit. The server keeps this field whatever it contains.
pub(super) fn nested_schema() -> String {
    filled(
        r#"{"model":"tiny-chat","messages":[{"role":"user","content":"a"}],"max_tokens":1,"tools":[{"type":"function","function":{"name":"f","parameters":{"enum":["#,
        "[[0]],",
        "0]}}}]}",
    )
}

/// A chat whose content is the beginning of an image part, then `item` as often as it fits, then the end of an image part.
pub(super) fn images(item: &str) -> String {
    filled(
        r#"{"model":"tiny-chat","max_tokens":1,"messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"data:image/png;base64,"#,
        item,
        r#"iVBORw0KGgo="}}]}]}"#,
    )
}

/// Words of random letters, the same in every run.
pub(super) fn words(bytes: usize) -> String {
    let mut state = 88_172_645_463_325_252_u64;
    let letter = |_| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        let letter = b' '.max(b'`' + u8::try_from(state % 27).unwrap_or(0));
        char::from(if letter == b'`' { b' ' } else { letter })
    };
    (0..bytes).map(letter).collect()
}

pub(super) fn tokenize_body(text: &str) -> String {
    format!(r#"{{"model":"tiny-chat","prompt":"{text}"}}"#)
}
