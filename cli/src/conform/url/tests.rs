//! What a server of OpenAI's API may answer, and how the kit takes it.

use super::*;

#[test]
fn every_group_and_every_exception_is_in_the_catalogue() {
    for group in GROUPS {
        assert!(
            catalogue().any(|check| check.id.starts_with(group)),
            "{group}"
        );
    }
    for id in UNSEEN.iter().map(|(id, _)| *id).chain(FILLING) {
        assert!(catalogue().any(|check| check.id == id), "{id}");
    }
    assert!(askable(&["SP01".into()]).is_err());
    assert_eq!(askable(&["FN01".into()]).unwrap(), ["FN01"]);
}

#[test]
fn refusals_have_the_kind_that_their_status_and_code_say() {
    let body = |code: &str| json!({"error": {"message": "no", "code": code}});
    let kind =
        |status: u16, code: &str| refusal(StatusCode::from_u16(status).ok(), &body(code)).kind();
    assert_eq!(kind(400, ""), ErrorKind::InvalidArgument);
    assert_eq!(
        kind(400, "context_length_exceeded"),
        ErrorKind::ContextLengthExceeded
    );
    assert_eq!(kind(400, "unsupported_parameter"), ErrorKind::Unsupported);
    assert_eq!(kind(429, ""), ErrorKind::Overloaded);
    assert_eq!(kind(500, ""), ErrorKind::Internal);
}

#[test]
fn a_server_has_the_seats_that_were_told() {
    let server = Server {
        base: "http://a:1".into(),
        key: None,
        model: None,
    };
    let engine = UrlEngine {
        server: Arc::new(server),
        model: "m".into(),
        context: 8,
        max_num_seqs: Some(1),
        http: EngineState::new(),
    };
    let runtime = tokio::runtime::Builder::new_current_thread().build();
    let start = engine.start(StartContext::detached(1));
    let config = runtime.unwrap().block_on(start).unwrap();
    assert_eq!(config.max_num_seqs, Some(1));
}

#[test]
fn a_password_in_the_url_is_not_told() {
    let server = Server {
        base: base_of("user:secret@host:8000/v1"),
        key: None,
        model: None,
    };
    let told = server.unusable(&"no").to_string();
    assert_eq!(told, "--url: http://host:8000: no");
}
