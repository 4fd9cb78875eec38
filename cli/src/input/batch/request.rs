//! Lines in OpenAI's batch format: requests with the bodies that they would have over HTTP.
//!
//! # Source
//! [OpenAI's batch API](https://platform.openai.com/docs/guides/batch): input and output lines.

use genset_frontend::{LocalAnswer, LocalFrontend};
use serde_json::{Map, Value, json};

use super::pauses::Pauses;

/// What a request may be sent to.
const URLS: [&str; 5] = [
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/responses",
    "/v1/messages",
];

/// The line of the output for the request of this number, from 0: what it was answered under its `custom_id`, or why it was not
/// asked.
pub(super) async fn line_of(
    routes: &LocalFrontend,
    index: usize,
    mut fields: Map<String, Value>,
) -> Map<String, Value> {
    let custom_id = fields.get("custom_id").cloned().unwrap_or_default();
    let answered = match request_of(&mut fields) {
        Ok((url, body)) => ask_until_there_is_room(routes, url, body).await,
        Err(problem) => Err(problem),
    };
    let (response, error) = match answered {
        Ok(answer) => {
            let LocalAnswer {
                status,
                request_id,
                body,
                ..
            } = answer;
            let response = json!({"status_code": status, "request_id": request_id, "body": body});
            (response, Value::Null)
        }
        Err(problem) => {
            let error = json!({"code": "invalid_request", "message": problem});
            (Value::Null, error)
        }
    };
    let id = format!("batch_req_{}", index + 1);
    Map::from_iter([
        ("id".into(), id.into()),
        ("custom_id".into(), custom_id),
        ("response".into(), response),
        ("error".into(), error),
    ])
}

/// Where a line's request goes, and its body; or what is wrong with the line.
fn request_of(fields: &mut Map<String, Value>) -> Result<(&'static str, String), String> {
    if !fields.get("custom_id").is_some_and(Value::is_string) {
        return Err("custom_id must be a string".into());
    }
    if fields.get("method").is_some_and(|method| method != "POST") {
        return Err("method must be POST".into());
    }
    let asked = fields.get("url").and_then(Value::as_str);
    let known = URLS.into_iter().find(|url| Some(*url) == asked);
    let url = known.ok_or_else(|| format!("url must be one of {}", URLS.join(", ")))?;
    match fields.remove("body") {
        Some(body) if body["stream"] == true => {
            Err("body.stream cannot be true: the answer goes into a file".into())
        }
        Some(Value::Object(body)) => Ok((url, Value::Object(body).to_string())),
        _ => Err("body must be an object: the request as it is sent to url".into()),
    }
}

/// Asks, and asks again while every worker is full or away: a batch has time.
async fn ask_until_there_is_room(
    routes: &LocalFrontend,
    url: &'static str,
    body: String,
) -> Result<LocalAnswer, String> {
    let mut pauses = Pauses::new();
    loop {
        let answer = routes.post(url, body.clone()).await;
        let answer = answer.map_err(|error| error.to_string())?;
        let is_full = matches!(answer.status, 429 | 503);
        if !is_full || !pauses.wait(answer.retry_after).await {
            return Ok(answer);
        }
    }
}
