//! `/docs`: the routes and their fields for people, made from the document at `/openapi.json`. One page without scripts or
//! external resources.

use std::borrow::Cow;
use std::fmt::Write as _;

use axum::response::{Html, IntoResponse, Response};
use bytes::Bytes;
use futures_util::future::{Ready, ready};
use serde_json::{Map, Value};

use super::openapi;
use crate::config::FrontendConfig;

const HEAD: &str = "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\
<meta name=\"viewport\" content=\"width=device-width\"><title>Genset</title><style>\
body{font:16px/1.5 sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}\
code{font-size:.95em}h2{margin-top:2rem;border-top:1px solid #ccc;padding-top:1rem}\
td,th{text-align:left;vertical-align:top;padding:.1rem 1rem .1rem 0}\
</style></head><body>\n<h1>Genset</h1>\n";

/// Returns the handler that serves the page of a server with this config.
pub(super) fn serve(
    config: &FrontendConfig,
) -> impl FnOnce() -> Ready<Response> + Clone + Send + Sync + 'static {
    let document = serde_json::from_slice(&openapi::document(config)).unwrap_or_default();
    let page = Bytes::from(page(&document));
    move || ready(Html(page).into_response())
}

fn page(document: &Value) -> String {
    let mut page = String::from(HEAD);
    let about = document["info"]["description"].as_str().unwrap_or_default();
    push(
        &mut page,
        format_args!(
            "<p>{} <a href=\"/openapi.json\">The same for programs</a>; \
             what fields do is in the guide that comes with the server.</p>\n",
            prose(about)
        ),
    );
    for (path, methods) in fields(&document["paths"]) {
        for (method, route) in fields(methods) {
            add_route(&mut page, document, (method, path), route);
        }
    }
    page.push_str("</body></html>\n");
    page
}

fn add_route(page: &mut String, document: &Value, (method, path): (&str, &str), route: &Value) {
    let summary = route["summary"].as_str().unwrap_or_default();
    push(
        page,
        format_args!(
            "<h2><code>{} {}</code></h2>\n<p>{}</p>\n",
            escaped(&method.to_uppercase()),
            escaped(path),
            prose(summary)
        ),
    );
    let parameters = route["parameters"].as_array();
    let parameters = parameters.into_iter().flatten().map(|parameter| {
        let name = parameter["name"].as_str().unwrap_or_default();
        (name, &parameter["schema"], parameter["required"] == true)
    });
    add_table(page, document, "parameter", parameters);
    let schema = &route["requestBody"]["content"]["application/json"]["schema"];
    let schema = resolved(document, schema);
    let bodies = match schema["anyOf"].as_array() {
        Some(bodies) => bodies.iter().collect(),
        None => vec![schema],
    };
    for body in bodies {
        let required = body["required"].as_array();
        let rows = fields(&body["properties"]).map(|(name, schema)| {
            let is_required = required.is_some_and(|names| names.iter().any(|known| known == name));
            (name, schema, is_required)
        });
        add_table(page, document, "field", rows);
    }
}

fn add_table<'a>(
    page: &mut String,
    document: &'a Value,
    what: &str,
    rows: impl Iterator<Item = (&'a str, &'a Value, bool)>,
) {
    let mut rows = rows.peekable();
    if rows.peek().is_none() {
        return;
    }
    push(
        page,
        format_args!("<table><tr><th>{what}</th><th>value</th><th></th></tr>\n"),
    );
    for (name, schema, is_required) in rows {
        push(
            page,
            format_args!(
                "<tr><td><code>{}</code></td><td>{}</td><td>{}</td></tr>\n",
                escaped(name),
                prose(&value(document, schema)),
                if is_required { "required" } else { "" }
            ),
        );
    }
    page.push_str("</table>\n");
}

/// What values a field may have, in a few words.
fn value(document: &Value, schema: &Value) -> String {
    let schema = resolved(document, schema);
    let mut words = match (&schema["type"], schema["enum"].as_array()) {
        (_, Some(values)) => {
            let values = values.iter().filter(|value| !value.is_null());
            let values: Vec<String> = values.map(Value::to_string).collect();
            format!("only {}", values.join(" or "))
        }
        (Value::String(kind), None) if kind == "null" => "not available".into(),
        (Value::String(kind), None) => kind.clone(),
        (Value::Array(kinds), None) => {
            let kinds = kinds.iter().filter_map(Value::as_str);
            let kinds: Vec<&str> = kinds.filter(|kind| *kind != "null").collect();
            kinds.join(" or ")
        }
        _ => "any".into(),
    };
    for (name, says) in [
        ("minimum", "from"),
        ("exclusiveMinimum", "more than"),
        ("maximum", "up to"),
        ("minItems", "at least"),
        ("maxItems", "at most"),
    ] {
        if let Some(bound) = schema.get(name) {
            push(&mut words, format_args!(", {says} {bound}"));
        }
    }
    if let Some(more) = schema["description"].as_str() {
        push(&mut words, format_args!(". {more}"));
    }
    words
}

/// A schema, or the one that it refers to.
fn resolved<'a>(document: &'a Value, schema: &'a Value) -> &'a Value {
    let target = schema["$ref"].as_str();
    let target = target.and_then(|target| document.pointer(target.strip_prefix('#')?));
    target.unwrap_or(schema)
}

fn fields(value: &Value) -> impl Iterator<Item = (&str, &Value)> {
    let object = value.as_object().into_iter().flat_map(Map::iter);
    object.map(|(name, value)| (name.as_str(), value))
}

/// Text of the document, whose code is in backticks.
fn prose(text: &str) -> String {
    let parts = escaped(text);
    let parts = parts.split('`').enumerate();
    let parts = parts.map(|(place, part)| match place % 2 {
        0 => Cow::from(part),
        _ => Cow::from(format!("<code>{part}</code>")),
    });
    parts.collect()
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
        .replace('"', "&quot;")
}

fn push(text: &mut String, more: std::fmt::Arguments<'_>) {
    // Writing to a string cannot fail.
    let _infallible = text.write_fmt(more);
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_page_has_routes_fields_and_limits_and_no_markup_of_others() {
        let document = json!({
            "info": {"description": "`null` < b"},
            "paths": {"/v1/x": {"post": {
                "summary": "Do <it>.",
                "parameters": [{"name": "id", "required": true, "schema": {"type": "string"}}],
                "requestBody": {"content": {"application/json": {"schema": {"$ref": "#/components/schemas/X"}}}},
            }}},
            "components": {"schemas": {
                "X": {"properties": {"n": {"$ref": "#/components/schemas/N"}, "tier": {"enum": [null, "auto"]},
                    "audio": {"type": "null"}}, "required": ["n"]},
                "N": {"type": ["integer", "null"], "minimum": 1, "maximum": 7},
            }},
        });
        let page = page(&document);
        for expected in [
            "<code>POST /v1/x</code>",
            "Do &lt;it&gt;.",
            "<p><code>null</code> &lt; b ",
            "<td><code>id</code></td><td>string</td><td>required</td>",
            "<td><code>n</code></td><td>integer, from 1, up to 7</td><td>required</td>",
            "<td><code>tier</code></td><td>only &quot;auto&quot;</td><td></td>",
            "<td><code>audio</code></td><td>not available</td><td></td>",
        ] {
            assert!(page.contains(expected), "{expected}: {page}");
        }
    }
}
