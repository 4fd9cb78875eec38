use super::*;
use crate::error::ErrorKind;
use crate::request::{ChatInput, GuidedDecoding, Input, MediaKind, ScorePair, TokenId};

fn request() -> GenerateRequest {
    GenerateRequest::from_tokens("m", vec![1, 2])
}

#[test]
fn every_undeclared_ability_is_refused_by_name() {
    let config = EngineConfig::new("m", 16).with_vocab_size(10);
    type Ask = fn(&mut GenerateRequest);
    let cases: &[(&str, Ask)] = &[
        ("temperature", |r| r.sampling.temperature = Some(0.0)),
        ("top_p", |r| r.sampling.top_p = Some(0.5)),
        ("top_k", |r| r.sampling.top_k = Some(1)),
        ("min_p", |r| r.sampling.min_p = Some(0.5)),
        ("presence_penalty", |r| {
            r.sampling.presence_penalty = Some(1.0)
        }),
        ("frequency_penalty", |r| {
            r.sampling.frequency_penalty = Some(1.0)
        }),
        ("repetition_penalty", |r| {
            r.sampling.repetition_penalty = Some(1.1)
        }),
        ("logit_bias", |r| r.sampling.logit_bias = [(1, 1.0)].into()),
        ("seed", |r| r.sampling.seed = Some(1)),
        ("logprobs", |r| r.output.logprobs = Some(0)),
        ("prompt_logprobs", |r| r.output.prompt_logprobs = Some(0)),
        ("guided", |r| {
            r.guided = Some(GuidedDecoding::JsonObject.into())
        }),
        ("guided", |r| {
            r.guided = Some(GuidedDecoding::Regex(".".into()).into())
        }),
        ("priority", |r| r.priority = 1),
        ("adapter", |r| r.adapter = Some("a".into())),
        ("resumed_tokens", |r| r.resumed_tokens = 1),
        ("prompt", |r| r.input = Input::Text("x".into())),
        ("prompt", |r| r.input = Input::Embed([vec![1]].into())),
        ("prompt", |r| {
            let pair = ScorePair {
                token_ids: vec![1],
                first_tokens: 1,
            };
            r.input = Input::Score([pair].into());
        }),
    ];
    config.check(&request()).unwrap();
    for (field, ask) in cases {
        let mut request = request();
        ask(&mut request);
        let error = config.check(&request).unwrap_err();
        assert_eq!(
            (error.kind(), error.at().map(|at| at.name())),
            (ErrorKind::Unsupported, Some(*field))
        );
    }
}

/// An old or hostile frontend sends undeclared media, or URLs that an engine would fetch itself.
#[test]
fn media_that_are_not_declared_are_refused_by_their_place() {
    use serde_json::json;
    let config = |media: &[MediaKind]| {
        let can = Capabilities {
            media: media.iter().copied().collect(),
            ..Capabilities::text()
        };
        EngineConfig::new("m", 16).with_capabilities(can)
    };
    let chat = |url: &str| {
        let image = json!({"type": "image_url", "image_url": {"url": url}});
        let text = json!({"type": "text", "text": "?"});
        let messages = vec![json!({"role": "user", "content": [text, image]})];
        let tools = Vec::new();
        GenerateRequest::from_chat("blind", ChatInput { messages, tools })
    };
    let gif = chat("data:image/gif;base64,R0lGODlhAQABAAAAACw=");
    config(&[MediaKind::Image]).check(&gif).unwrap();
    for blind in [config(&[]), config(&[MediaKind::Audio])] {
        let error = blind.check(&gif).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        assert_eq!(error.at().map(At::name), Some("messages[0].content[1]"));
        assert!(
            error
                .message()
                .starts_with("the model blind takes no images"),
            "{error}"
        );
    }
    let fetched = config(&[MediaKind::Image]).check(&chat("http://169.254.169.254/"));
    assert_eq!(fetched.unwrap_err().kind(), ErrorKind::InvalidArgument);
    let mut no_chats = config(&[MediaKind::Image]);
    no_chats.validate().unwrap();
    no_chats.capabilities.inputs = [InputKind::Tokens].into();
    let error = no_chats.validate().unwrap_err();
    assert_eq!(error.at().map(At::name), Some("capabilities.media"));
}

#[test]
fn options_at_their_neutral_value_ask_for_nothing() {
    let mut request = request();
    request.sampling.top_p = Some(1.0);
    request.sampling.top_k = Some(u32::MAX);
    request.sampling.min_p = Some(0.0);
    request.sampling.presence_penalty = Some(0.0);
    request.sampling.frequency_penalty = Some(0.0);
    request.sampling.repetition_penalty = Some(1.0);
    EngineConfig::new("m", 16).check(&request).unwrap();
}

#[test]
fn prompts_out_of_vocabulary_or_context_are_refused() {
    let config = EngineConfig::new("m", 4).with_vocab_size(10);
    let kind = |tokens| {
        config
            .check(&GenerateRequest::from_tokens("m", tokens))
            .map_err(|e| e.kind())
    };
    assert_eq!(kind(vec![1, 2, 9]), Ok(()));
    assert_eq!(kind(vec![10]), Err(ErrorKind::InvalidArgument));
    assert_eq!(kind(vec![1; 4]), Err(ErrorKind::ContextLengthExceeded));
}

#[test]
fn inputs_and_pairs_may_fill_the_context_and_no_more() {
    let can = Capabilities {
        inputs: [InputKind::Embed, InputKind::Score].into(),
        ..Capabilities::default()
    };
    let config = EngineConfig::new("m", 4)
        .with_vocab_size(10)
        .with_capabilities(can);
    let pair = |tokens| ScorePair {
        token_ids: tokens,
        first_tokens: 1,
    };
    let embed = |tokens| Input::Embed([vec![1], tokens].into());
    let score = |tokens| Input::Score([pair(vec![1]), pair(tokens)].into());
    let asks_of = |word: &str, tokens: Vec<TokenId>| match word {
        "pair 1" => score(tokens),
        _ => embed(tokens),
    };
    for word in ["input 1", "pair 1"] {
        let check = |tokens| {
            let mut request = request();
            request.input = asks_of(word, tokens);
            config.check(&request)
        };
        check(vec![9; 4]).unwrap();
        let unknown = check(vec![10]).unwrap_err();
        assert_eq!(unknown.kind(), ErrorKind::InvalidArgument);
        let long = check(vec![1; 5]).unwrap_err();
        assert_eq!(long.kind(), ErrorKind::ContextLengthExceeded);
        let message = long.message();
        assert!(
            message.contains(word) && !message.contains("answer"),
            "{message}"
        );
    }
}

#[test]
fn options_out_of_the_vocabulary_are_refused_by_name_and_id() {
    type Ask = fn(&mut GenerateRequest, TokenId);
    let asks: [(&str, Ask); 2] = [
        ("stop_token_ids", |request, token| {
            request.stop.stop_token_ids = [1, token].into();
        }),
        ("logit_bias", |request, token| {
            request.sampling.logit_bias = [(1, 1.0), (token, 1.0)].into();
        }),
    ];
    let can = Capabilities::tokens().with_sampling([SamplingOption::LogitBias]);
    let unknown = EngineConfig::new("m", 16).with_capabilities(can);
    let known = unknown.clone().with_vocab_size(10);
    for (field, ask) in asks {
        let mut request = request();
        request.stop.eos_token_ids = [10].into();
        ask(&mut request, 9);
        known.check(&request).unwrap();
        ask(&mut request, 10);
        unknown.check(&request).unwrap();
        let error = known.check(&request).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument);
        assert_eq!(error.at().map(|at| at.name()), Some(field));
        assert!(error.message().contains("token id 10 "), "{error}");
    }
}

#[test]
fn what_an_engine_deviates_in_is_refused_by_name_or_only_told() {
    let mut request = request();
    let deviating = |deviation| {
        let can = Capabilities::tokens().with_deviations([deviation]);
        EngineConfig::new("m", 16).with_capabilities(can)
    };
    request.stop.min_tokens = 1;
    let error = deviating(Deviation::NoMinTokens).check(&request);
    let error = error.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    assert_eq!(error.at().map(|at| at.name()), Some("min_tokens"));
    for told in [
        Deviation::BatchVariant,
        Deviation::PenaltiesCountPrompt,
        Deviation::LogprobsAfterBias,
    ] {
        deviating(told).check(&request).unwrap();
    }
}

#[test]
fn an_engine_that_resumes_as_prompt_takes_what_a_longer_prompt_has_too() {
    type Ask = fn(&mut GenerateRequest);
    let can = Capabilities::tokens()
        .with_sampling([SamplingOption::Temperature, SamplingOption::Seed])
        .with_resume_as_prompt();
    let as_prompt = EngineConfig::new("m", 16).with_capabilities(can.clone());
    let exactly = EngineConfig::new("m", 16).with_capabilities(can.with_resume());
    let asks: [(Option<&str>, Ask); 3] = [
        (None, |_| ()),
        (None, |r| r.sampling.temperature = Some(0.8)),
        (Some("has a seed"), |r| r.sampling.seed = Some(7)),
    ];
    for (problem, ask) in asks {
        let mut request = request();
        ask(&mut request);
        as_prompt.check(&request).unwrap();
        request.resumed_tokens = 1;
        exactly.check(&request).unwrap();
        let Some(problem) = problem else {
            as_prompt.check(&request).unwrap();
            continue;
        };
        let error = as_prompt.check(&request).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        assert_eq!(error.at().map(|at| at.name()), Some("resumed_tokens"));
        assert!(error.message().contains(problem), "{error}");
    }
}

#[test]
fn ranks_that_the_engine_has_not_are_refused() {
    let mut config = EngineConfig::new("m", 16);
    config.data_parallel_size = 2;
    let mut request = request();
    request.data_parallel_rank = Some(1);
    config.check(&request).unwrap();
    request.data_parallel_rank = Some(2);
    let error = config.check(&request).unwrap_err();
    assert_eq!(error.at().map(|at| at.name()), Some("data_parallel_rank"));
}

#[test]
fn a_config_without_model_context_or_input_is_refused() {
    let good = EngineConfig::new("m", 1);
    good.validate().unwrap();
    for bad in [
        EngineConfig::new(" ", 1),
        EngineConfig::new("m", 0),
        good.clone().with_capabilities(Capabilities::default()),
        good.clone().with_capabilities(Capabilities {
            prompt_logprobs: true,
            ..Capabilities::tokens()
        }),
        EngineConfig {
            data_parallel_size: 0,
            ..good
        },
    ] {
        assert_eq!(
            bad.validate().unwrap_err().kind(),
            ErrorKind::InvalidArgument
        );
    }
}
