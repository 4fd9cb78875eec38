//! An error after the first byte has the type, param, code and message that it would have had before.

use genset_backend_common::{EngineError, ErrorKind, RequestField, error::At};
use serde_json::{Value, json};

use crate::client::Response;
use crate::golden::check;
use crate::script::Script;
use crate::support::{CHAT, COMPLETIONS, MODEL, Site, chat, completion};

const RESPONSES: &str = "/v1/responses";
const MESSAGES: &str = "/v1/messages";

/// One error of each kind, and some that name a field.
fn errors() -> Vec<EngineError> {
    let kinds = [
        ErrorKind::InvalidArgument,
        ErrorKind::ContextLengthExceeded,
        ErrorKind::Unsupported,
        ErrorKind::NotFound,
        ErrorKind::Overloaded,
        ErrorKind::Unavailable,
        ErrorKind::EngineShutdown,
        ErrorKind::CannotConnect,
        ErrorKind::Disconnected,
        ErrorKind::StreamIncomplete,
        ErrorKind::DeadlineExceeded,
        ErrorKind::Cancelled,
        ErrorKind::Internal,
    ];
    let named = [
        EngineError::invalid_argument(RequestField::Prompt, "is not to its taste"),
        EngineError::unsupported(RequestField::TopK, "not today"),
        EngineError::invalid_argument(At::other("stop"), "is of no use"),
    ];
    let kinds =
        kinds.map(|kind| EngineError::new(kind, format!("the engine says {}", kind.name())));
    kinds.into_iter().chain(named).collect()
}

fn body(path: &str, stream: bool) -> Value {
    let further = json!({"stream": stream});
    match path {
        CHAT => chat("Hello", further),
        COMPLETIONS => completion("Hello", further),
        RESPONSES => json!({"model": MODEL, "input": "Hello", "stream": stream}),
        _ => chat("Hello", json!({"max_tokens": 9, "stream": stream})),
    }
}

/// The data of the last event.
fn last_event(response: &Response) -> Value {
    let text = response.text();
    let event = text.trim_end().rsplit("\n\n").next().unwrap_or_default();
    let (_, data) = event.split_once("data: ").expect("an event");
    serde_json::from_str(data).expect("an event is JSON")
}

#[tokio::test]
async fn an_error_in_a_stream_is_the_error_it_would_have_been() {
    for error in errors() {
        let site = Site::start(Script::failing(vec![100], error.clone())).await;
        for path in [CHAT, COMPLETIONS, RESPONSES, MESSAGES] {
            let whole = site.post(path, &body(path, false)).await;
            let streamed = site.post(path, &body(path, true)).await;
            assert!(whole.status >= 400, "{error}: {}", whole.text());
            assert_eq!(streamed.status, 200);
            let (plain, last) = (whole.json(), last_event(&streamed));
            let said = format!("{path} {error}:\n{plain}\n{last}");
            match path {
                RESPONSES => {
                    let failed = &last["response"]["error"];
                    assert_eq!(last["type"], "response.failed", "{said}");
                    assert_eq!(failed["message"], plain["error"]["message"], "{said}");
                    assert!(failed["code"].is_string(), "{said}");
                    assert_eq!(last["response"]["store"], false, "{said}");
                }
                MESSAGES => {
                    assert_eq!(last["type"], "error", "{said}");
                    assert_eq!(last["error"], plain["error"], "{said}");
                }
                _ => {
                    assert_eq!(last["error"], plain["error"], "{said}");
                    assert!(!streamed.text().contains("[DONE]"), "{said}");
                }
            }
        }
        site.idle().await;
        site.close().await;
    }
}

#[tokio::test]
async fn errors_that_name_a_field_and_a_code_in_streams() {
    let error = EngineError::new(ErrorKind::ContextLengthExceeded, "prompt: no room is left");
    let error = error.with_at(RequestField::Prompt);
    let site = Site::start(Script::failing(vec![100], error)).await;
    for (name, path) in [
        ("stream_error_chat", CHAT),
        ("stream_error_completion", COMPLETIONS),
    ] {
        check(name, &site.post(path, &body(path, true)).await);
    }
    site.close().await;
}
