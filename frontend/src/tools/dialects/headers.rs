//! How the text before a call's arguments names the tool: each returns the name and the call's id from it.

/// `NAME`
pub(super) fn name_only(header: &str) -> (&str, &str) {
    (header.trim(), "")
}

/// `function<｜tool▁sep｜>NAME`
pub(super) fn behind_kind(header: &str) -> (&str, &str) {
    let name = header.rsplit_once("<｜tool▁sep｜>");
    (name.map_or(header, |(_, name)| name).trim(), "")
}

/// `functions.NAME:0`, which is also the call's id.
pub(super) fn numbered(header: &str) -> (&str, &str) {
    let id = header.trim();
    let name = id.strip_prefix("functions.").unwrap_or(id);
    let name = name.rsplit_once(':').map_or(name, |(name, _)| name);
    (name, id)
}

/// `NAME` or `NAME[CALL_ID]ID`
pub(super) fn with_call_id(header: &str) -> (&str, &str) {
    let (name, id) = header.split_once("[CALL_ID]").unwrap_or((header, ""));
    (name.trim(), id.trim())
}
