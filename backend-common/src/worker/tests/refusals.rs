//! The engine never receives what it does not declare.

use super::fakes::Call::Generate;
use super::fakes::{CONTEXT_LENGTH, VOCAB_SIZE, config, request, served, stop_cleanly};
use crate::context::RequestContext;
use crate::error::ErrorKind;
use crate::request::{GenerateRequest, Input};

#[tokio::test(start_paused = true)]
async fn a_refused_request_never_reaches_the_engine() {
    use ErrorKind::{ContextLengthExceeded, InvalidArgument, Unsupported};
    type Ask = fn(&mut GenerateRequest);
    let table: &[(&str, ErrorKind, Ask)] = &[
        ("temperature", Unsupported, |r| {
            r.sampling.temperature = Some(0.5)
        }),
        ("max_tokens", InvalidArgument, |r| {
            r.stop.max_tokens = Some(0)
        }),
        ("prompt", InvalidArgument, |r| {
            r.input = Input::Tokens(vec![VOCAB_SIZE].into())
        }),
        ("prompt", ContextLengthExceeded, |r| {
            r.input = Input::Tokens(vec![1; CONTEXT_LENGTH as usize].into())
        }),
    ];
    let (world, handle) = served(config()).await;
    let seen = world.count(Generate);
    for (field, kind, ask) in table {
        let mut request = request();
        ask(&mut request);
        let refused = world.generate(request, RequestContext::new("r")).await;
        let error = refused.unwrap_err();
        assert_eq!(error.kind(), *kind, "{field}");
        assert_eq!(error.at().map(|at| at.name()), Some(*field));
    }
    assert_eq!(world.count(Generate), seen);
    stop_cleanly(&handle).await;
}

#[tokio::test(start_paused = true)]
async fn the_operators_context_length_is_the_one_enforced() {
    let mut config = config();
    config.context_length_tokens = Some(4);
    let (world, handle) = served(config).await;
    let mut long = request();
    long.input = Input::Tokens(vec![1; 4].into());
    let refused = world.generate(long, RequestContext::new("r")).await;
    assert_eq!(
        refused.unwrap_err().kind(),
        ErrorKind::ContextLengthExceeded
    );
    assert_eq!(world.offer().card.context_length_tokens, 4);
    stop_cleanly(&handle).await;
}
