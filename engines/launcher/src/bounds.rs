//! [`bounded`]: limits a request's numbers to what every server accepts. The servers use signed 32-bit integers for most
//! numbers; a larger number wraps in some and crashes others.

use std::num::NonZeroU32;

use genset_backend_common::{EngineError, GenerateRequest, Input, TokenId};

/// The largest number that is sent, except seeds.
const MAX: u32 = u32::MAX >> 1;

/// The `top_k` that is no limit. Each server has a number of its own for it.
pub(crate) const NO_TOP_K: u32 = u32::MAX;

/// Returns an equivalent request without numbers above [`MAX`], except [`NO_TOP_K`].
///
/// A grammar allows the end of the sequence only where the grammar may end, so `ignore_eos` is dropped; with it, some servers
/// continue past a finished grammar.
///
/// # Errors
/// `InvalidArgument` for a token id above it, which no vocabulary contains.
pub(crate) fn bounded(
    mut request: GenerateRequest,
    vocab_size: Option<NonZeroU32>,
) -> Result<GenerateRequest, EngineError> {
    if let Input::Tokens(prompt) = &request.input {
        check("prompt", prompt.iter())?;
    }
    check("stop_token_ids", &request.stop.stop_token_ids)?;
    check("logit_bias", request.sampling.logit_bias.keys())?;
    // As many candidates as tokens are all tokens.
    let all = vocab_size.map_or(MAX, |size| size.get().min(MAX));
    let top_k = request.sampling.top_k;
    request.sampling.top_k = top_k.map(|top_k| if top_k < all { top_k } else { NO_TOP_K });
    request.stop.max_tokens = request.stop.max_tokens.map(|tokens| tokens.min(MAX));
    request.stop.min_tokens = request.stop.min_tokens.min(MAX);
    request.priority = request.priority.max(-i32::MAX);
    request.stop.ignore_eos &= request.guided.is_none();
    Ok(request)
}

fn check<'t>(
    field: &str,
    tokens: impl IntoIterator<Item = &'t TokenId>,
) -> Result<(), EngineError> {
    match tokens.into_iter().find(|token| **token > MAX) {
        None => Ok(()),
        Some(token) => Err(EngineError::invalid_argument(
            field,
            format!("token id {token} is in no vocabulary"),
        )),
    }
}

#[cfg(test)]
mod tests {
    use genset_backend_common::{ErrorKind, GuidedDecoding};

    use super::*;

    fn largest() -> GenerateRequest {
        let mut request = GenerateRequest::from_tokens("m", vec![1]);
        request.sampling.top_k = Some(MAX);
        request.stop.max_tokens = Some(u32::MAX);
        request.stop.min_tokens = u32::MAX;
        request.priority = i32::MIN;
        request
    }

    #[test]
    fn no_number_is_larger_than_a_server_can_hold() {
        let request = bounded(largest(), NonZeroU32::new(1000)).unwrap();
        assert_eq!(request.sampling.top_k, Some(NO_TOP_K));
        assert_eq!(request.stop.max_tokens, Some(MAX));
        assert_eq!(
            (request.stop.min_tokens, request.priority),
            (MAX, -i32::MAX)
        );
        let mut request = largest();
        request.sampling.top_k = Some(MAX - 1);
        let request = bounded(request, None).unwrap();
        assert_eq!(request.sampling.top_k, Some(MAX - 1));
    }

    #[test]
    fn token_ids_that_no_model_has_are_refused_by_name() {
        type Set = fn(&mut GenerateRequest);
        let sets: [(&str, Set); 3] = [
            ("prompt", |r| r.input = Input::Tokens(vec![MAX + 1].into())),
            ("stop_token_ids", |r| {
                r.stop.stop_token_ids = [MAX + 1].into()
            }),
            ("logit_bias", |r| {
                r.sampling.logit_bias = [(MAX + 1, 1.0)].into()
            }),
        ];
        for (field, set) in sets {
            let mut request = GenerateRequest::from_tokens("m", vec![1]);
            set(&mut request);
            let error = bounded(request, None).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{field}");
            assert!(
                format!("{:?}", error.details()).contains(field),
                "{error:?}"
            );
        }
    }

    #[test]
    fn a_grammar_ends_where_it_ends() {
        let mut request = GenerateRequest::from_tokens("m", vec![1]);
        request.stop.ignore_eos = true;
        assert!(bounded(request.clone(), None).unwrap().stop.ignore_eos);
        request.guided = Some(GuidedDecoding::JsonObject.into());
        assert!(!bounded(request, None).unwrap().stop.ignore_eos);
    }
}
