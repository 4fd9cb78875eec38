//! Lines in OpenAI's batch format: requests with the bodies that they would have over HTTP.
//!
//! # Source
//! [OpenAI's batch API](https://platform.openai.com/docs/guides/batch): input and output lines.

use std::time::Duration;

use bytes::Bytes;
use serde::de::DeserializeOwned;
use serde::ser::Error as _;
use serde::{Deserialize, Serialize, Serializer};
use serde_json::Value;
use serde_json::value::RawValue;

use super::pauses::Pauses;
use super::seen::SeenModels;
use crate::error::ApiError;
use crate::http::{LocalAnswer, LocalFrontend};
use crate::json;

/// The endpoints that a batch's request may use.
pub const BATCH_URLS: [&str; 5] = [
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/responses",
    "/v1/messages",
];

/// The longest `custom_id`, in bytes.
const MAX_CUSTOM_ID_BYTES: usize = 512;

/// An invalid name is shown up to this many bytes.
const MAX_SHOWN_BYTES: usize = 100;

/// What is wrong with a line: a stable code, the field, and a sentence.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BadLine {
    /// A stable code.
    pub code: &'static str,
    /// The field of the line.
    pub param: &'static str,
    /// What is wrong and what is expected.
    pub problem: String,
}

/// An input line: a request, kept in a form that takes no more memory than the line.
#[derive(Debug, Deserialize)]
#[serde(expecting = "an object")]
pub struct BatchLine {
    custom_id: Option<Box<RawValue>>,
    method: Option<Box<RawValue>>,
    url: Option<Box<RawValue>>,
    body: Option<Box<RawValue>>,
}

impl BatchLine {
    /// Reads a line.
    ///
    /// # Errors
    /// If it is not a JSON object.
    pub fn parse(line: &[u8]) -> serde_json::Result<Self> {
        if line.trim_ascii_start().starts_with(b"[") {
            return Err(serde_json::Error::custom("it is a list"));
        }
        serde_json::from_slice(line.trim_ascii_end()).map_err(|error| {
            // Which line it is of the file, the caller knows.
            let text = error.to_string();
            serde_json::Error::custom(text.replace(" at line 1 column ", " at column "))
        })
    }

    /// The `custom_id` of its answer, if it is a string.
    #[must_use]
    pub fn custom_id(&self) -> Option<String> {
        text_in(self.custom_id.as_deref())
    }

    /// The name that the output shows: the original value, if it is short.
    pub(crate) fn shown_id(&self) -> Value {
        match self.custom_id() {
            Some(name) => name.into(),
            None => {
                let raw = self.custom_id.as_deref().map(RawValue::get);
                let short = raw.filter(|raw| raw.len() <= MAX_SHOWN_BYTES);
                short
                    .and_then(|raw| serde_json::from_str(raw).ok())
                    .unwrap_or_default()
            }
        }
    }

    /// Returns the endpoint of its request.
    ///
    /// # Errors
    /// If the line is not a batch request. Errors in the request itself are reported in its answer.
    pub fn check(&self) -> Result<&'static str, BadLine> {
        let bad = |code, param, problem: &str| BadLine {
            code,
            param,
            problem: problem.to_owned(),
        };
        let Some(custom_id) = self.custom_id() else {
            let problem = "custom_id must be a string";
            return Err(bad("missing_required_parameter", "custom_id", problem));
        };
        if custom_id.len() > MAX_CUSTOM_ID_BYTES {
            let problem = format!("custom_id must have at most {MAX_CUSTOM_ID_BYTES} bytes");
            return Err(bad("invalid_custom_id", "custom_id", &problem));
        }
        if self.method.is_some() && text_in(self.method.as_deref()).as_deref() != Some("POST") {
            return Err(bad("invalid_method", "method", "method must be POST"));
        }
        let asked = text_in(self.url.as_deref());
        let known = BATCH_URLS
            .into_iter()
            .find(|url| Some(*url) == asked.as_deref());
        let url = known.ok_or_else(|| {
            let problem = format!("url must be one of {}", BATCH_URLS.join(", "));
            bad("invalid_url", "url", &problem)
        })?;
        if !self.body().is_some_and(json::is_object) {
            let problem = "body must be an object: the request as it is sent to url";
            return Err(bad("missing_required_parameter", "body", problem));
        }
        // The route refuses a field of the wrong type.
        if self.field::<bool>("stream") == Some(true) {
            let problem = "body.stream cannot be true: the answer goes into a file";
            return Err(bad("invalid_request", "body.stream", problem));
        }
        Ok(url)
    }

    /// The model that its request names.
    pub(super) fn model(&self) -> Option<String> {
        self.field("model")
    }

    /// A field of the body as its route reads it: of duplicates, the last.
    fn field<T: DeserializeOwned>(&self, name: &str) -> Option<T> {
        let fields = json::fields_of("body", self.body()?).ok()?;
        let (_, text) = fields.into_iter().find(|(known, _)| known == name)?;
        serde_json::from_str(text).ok()
    }

    fn body(&self) -> Option<&str> {
        self.body.as_deref().map(RawValue::get)
    }
}

fn text_in(raw: Option<&RawValue>) -> Option<String> {
    serde_json::from_str(raw?.get()).ok()
}

/// A line of the output: the response to a request under its `custom_id`, or why it was not sent. The response is raw
/// bytes, which keep their share of the memory budget; as values it would take many times as much.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct OutputLine {
    id: String,
    custom_id: Value,
    response: Option<LineAnswer>,
    error: Option<LineProblem>,
    #[serde(skip)]
    is_for_later: bool,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
struct LineAnswer {
    status_code: u16,
    request_id: String,
    #[serde(serialize_with = "on_one_line")]
    body: Bytes,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
struct LineProblem {
    code: &'static str,
    message: String,
}

impl OutputLine {
    /// Whether the request succeeded.
    pub(super) fn is_answer(&self) -> bool {
        self.status() == Some(200)
    }

    /// The HTTP status of the response; `None` if the request was not sent.
    #[must_use]
    pub fn status(&self) -> Option<u16> {
        let response = self.response.as_ref();
        response.map(|response| response.status_code)
    }

    /// Whether a later run may get an answer: every worker stayed full or away, or the request was lost.
    #[must_use]
    pub fn is_for_later(&self) -> bool {
        self.is_for_later
    }
}

/// Writes JSON as it is, except line breaks.
fn on_one_line<S: Serializer>(json: &Bytes, serializer: S) -> Result<S::Ok, S::Error> {
    let json: &RawValue = serde_json::from_slice(json).map_err(S::Error::custom)?;
    if !json.get().contains(['\n', '\r']) {
        return json.serialize(serializer);
    }
    // Line breaks occur only between its values.
    let on_one_line = json.get().replace(['\n', '\r'], " ");
    let json = RawValue::from_string(on_one_line).map_err(S::Error::custom)?;
    json.serialize(serializer)
}

/// Returns the output line for a request. `id` is unique among all requests. Retries as `pauses` allow: while every
/// worker is full or away, and once if the request was lost with its worker; also if its model is one of `seen` and not
/// served any more.
///
/// # Cancel safety
/// If the future is dropped, the request is cancelled.
pub async fn answer_line(
    routes: &LocalFrontend,
    seen: &SeenModels,
    id: String,
    line: &BatchLine,
    mut pauses: Pauses,
) -> OutputLine {
    let model = line.model().unwrap_or_default();
    loop {
        seen.look(&model);
        // A batch is not urgent.
        let (answered, goes_on) = match ask_once(routes, id.clone(), line).await {
            Attempt::Ended(answered) => return answered,
            Attempt::NoModel(answered) if !seen.has(&model) => return answered,
            Attempt::NoModel(answered) => (answered, pauses.wait(None).await),
            Attempt::Lost(answered) => (answered, pauses.wait_after_loss().await),
            Attempt::Full(answered, retry_after) => (answered, pauses.wait(retry_after).await),
        };
        if !goes_on {
            return OutputLine {
                is_for_later: true,
                ..answered
            };
        }
    }
}

/// The outcome of one attempt at a request.
#[derive(Debug)]
pub(super) enum Attempt {
    /// The line of its output.
    Ended(OutputLine),
    /// No worker serves its model; the line that says so.
    NoModel(OutputLine),
    /// Every worker was full or away, or a quota was used up: the line that says so, and the server's retry delay.
    Full(OutputLine, Option<Duration>),
    /// Its worker died or was unreachable: the line that says so. Another worker may take it, unless the request itself
    /// crashes workers.
    Lost(OutputLine),
}

/// Sends the request once; otherwise like [`answer_line`].
pub(super) async fn ask_once(routes: &LocalFrontend, id: String, line: &BatchLine) -> Attempt {
    let custom_id = line.shown_id();
    let answered = match line.check() {
        Ok(url) => {
            let body = line.body().unwrap_or_default();
            let answer = routes.post(url, body.to_owned()).await;
            answer.map_err(|error| {
                error.log(None);
                ("server_error", error.to_string())
            })
        }
        Err(bad) => Err(("invalid_request", bad.problem)),
    };
    let answer = match answered {
        Ok(answer) => answer,
        Err((code, problem)) => return Attempt::Ended(unasked_line(id, custom_id, code, &problem)),
    };
    let LocalAnswer {
        status,
        request_id,
        retry_after,
        code,
        body,
    } = answer;
    let line = OutputLine {
        id,
        custom_id,
        response: Some(LineAnswer {
            status_code: status,
            request_id,
            body,
        }),
        error: None,
        is_for_later: false,
    };
    match (status, code) {
        (429 | 503, _) => Attempt::Full(line, retry_after),
        (502, _) => Attempt::Lost(line),
        (_, Some(ApiError::MODEL_NOT_FOUND)) => Attempt::NoModel(line),
        (_, _) => Attempt::Ended(line),
    }
}

/// The output line of a request without a response.
pub(crate) fn unasked_line(
    id: String,
    custom_id: Value,
    code: &'static str,
    problem: &str,
) -> OutputLine {
    let message = problem.to_owned();
    OutputLine {
        id,
        custom_id,
        response: None,
        error: Some(LineProblem { code, message }),
        is_for_later: false,
    }
}

#[cfg(test)]
mod tests {
    use genset_runtime::Runtime;
    use serde_json::json;
    use tokio::time::Instant;

    use super::*;
    use crate::config::FrontendConfig;
    use crate::model::Models;

    fn answered(body: &'static str) -> OutputLine {
        OutputLine {
            id: "1".into(),
            custom_id: "a".into(),
            response: Some(LineAnswer {
                status_code: 200,
                request_id: "r".into(),
                body: body.into(),
            }),
            error: None,
            is_for_later: false,
        }
    }

    #[test]
    fn a_line_has_its_answer_as_it_came_and_stays_one_line() {
        let line = serde_json::to_string(&answered(r#"{"a":1.50,"b":"\n"}"#)).unwrap();
        let expected = r#"{"id":"1","custom_id":"a","response":{"status_code":200,"request_id":"r","body":{"a":1.50,"b":"\n"}},"error":null}"#;
        assert_eq!(line, expected);
        let pretty = answered("{\n  \"a\": [1,\r\n2]\n}\n");
        let line = serde_json::to_string(&pretty).unwrap();
        assert!(!line.contains(['\n', '\r']), "{line}");
        let pretty = serde_json::to_value(&pretty).unwrap();
        assert_eq!(pretty["response"]["body"], json!({"a": [1, 2]}));
        assert!(serde_json::to_string(&answered("{")).is_err());
    }

    #[test]
    fn a_line_that_was_not_asked_says_why() {
        let line = unasked_line("1".into(), Value::Null, "unreadable", "It is.");
        let error = json!({"code": "unreadable", "message": "It is."});
        let expected = json!({"id": "1", "custom_id": null, "response": null, "error": error});
        assert_eq!(serde_json::to_value(&line).unwrap(), expected);
        assert!(!line.is_answer());
    }

    /// A line whose body has these fields.
    fn line_of(fields: &str) -> BatchLine {
        let url = "/v1/completions";
        let line = format!(r#"{{"custom_id": "a", "url": "{url}", "body": {{{fields}}}}}"#);
        BatchLine::parse(line.as_bytes()).unwrap()
    }

    #[test]
    fn a_line_is_an_object() {
        let list = json!(["a", "POST", "/v1/completions", {"model": "m", "prompt": "Hello"}]);
        let problem = |line: &str| BatchLine::parse(line.as_bytes()).unwrap_err().to_string();
        assert_eq!(problem(&format!(" {list}")), "it is a list");
        let null = "invalid type: null, expected an object at column 4";
        assert_eq!(problem("null\n"), null);
        assert_eq!(problem("{\n"), "EOF while parsing an object at column 1");
    }

    #[test]
    fn of_fields_with_one_name_the_last_counts_as_on_its_route() {
        let refused = |fields: &str| line_of(fields).check().err().map(|bad| bad.param);
        let streamed = Some("body.stream");
        assert_eq!(refused(r#""stream": true"#), streamed);
        assert_eq!(refused(r#""stream": false, "stream": true"#), streamed);
        assert_eq!(refused(r#""stream": true, "stream": false"#), None);
        // The route refuses it.
        assert_eq!(refused(r#""stream": 1"#), None);
        let model = line_of(r#""model": "a", "model": "b""#).model();
        assert_eq!(model.as_deref(), Some("b"));
    }

    #[tokio::test(start_paused = true)]
    async fn a_model_that_was_there_is_asked_for_again_and_then_left_for_later() {
        let (runtime, config) = (Runtime::in_process(), FrontendConfig::default());
        let models = Models::follow(&runtime, &config);
        let routes = LocalFrontend::new(&runtime, models.clone(), config);
        let seen = SeenModels::new(models);
        let body = json!({"model": "m", "prompt": "Hello"});
        let line = json!({"custom_id": "a", "url": "/v1/completions", "body": body});
        let line = BatchLine::parse(line.to_string().as_bytes()).unwrap();
        let answer = || answer_line(&routes, &seen, "1".into(), &line, Pauses::new());
        let answered = answer().await;
        assert_eq!(answered.status(), Some(404));
        assert!(!answered.is_for_later());
        seen.insert("m");
        let (begun, answered) = (Instant::now(), answer().await);
        assert_eq!(answered.status(), Some(404));
        assert!(answered.is_for_later() && !begun.elapsed().is_zero());
    }
}
