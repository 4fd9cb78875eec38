//! Grammars that explode, over HTTP, with an engine that compiles them. Each is refused with the client's own name for the field,
//! or followed like any other, and the next request is served.

use std::sync::{Arc, OnceLock};

use genset_backend_common::output::{self, Finish, OutputStream};
use genset_backend_common::{
    Capabilities, EngineConfig, EngineError, GenerateRequest, LLMEngine, RequestContext,
    StartContext, async_trait, config::GuidedKind,
};
use genset_sampling::guided::{GuideFactory, GuideLimits};
use serde_json::{Value, json};

use crate::support::{
    CHAT, COMPLETIONS, CONTEXT, Site, TOKENIZER_FILE, chat, completion, config, encode, file,
    parsing,
};

/// The most tokens of an answer: enough for a grammar to become costly.
const TOKENS: u32 = 24;

/// An engine that follows grammars like the built-in one, and picks the first token that each allows.
struct Follower(Arc<GuideFactory>);

fn factory() -> Arc<GuideFactory> {
    static FACTORY: OnceLock<Arc<GuideFactory>> = OnceLock::new();
    Arc::clone(FACTORY.get_or_init(|| Arc::new(new_factory())))
}

fn new_factory() -> GuideFactory {
    GuideFactory::try_new(file(TOKENIZER_FILE), 2048, &[2, 0]).expect("a vocabulary")
}

#[async_trait]
impl LLMEngine for Follower {
    async fn start(&self, _ctx: StartContext) -> Result<EngineConfig, EngineError> {
        use GuidedKind::{Choice, Grammar, JsonObject, JsonSchema, Regex};
        let mut can = Capabilities::tokens();
        can.guided
            .extend([Choice, Grammar, JsonObject, JsonSchema, Regex]);
        let config = EngineConfig::new("follower", CONTEXT).with_vocab_size(2048);
        Ok(config.with_capabilities(can))
    }

    async fn generate(
        &self,
        request: GenerateRequest,
        ctx: RequestContext,
    ) -> Result<OutputStream, EngineError> {
        let tokens = TOKENS.min(request.stop.max_tokens.unwrap_or(TOKENS));
        let Some(guided) = request.guided else {
            return Ok(output::stream(ctx, |out| async move {
                for token in encode("yes") {
                    out.token(token).await?;
                }
                Ok(Finish::stop())
            }));
        };
        let factory = Arc::clone(&self.0);
        let compiling = tokio::task::spawn_blocking(move || factory.compile(&guided));
        let mut guide = compiling.await.expect("no panic")?;
        Ok(output::stream(ctx, move |out| async move {
            for _ in 0..tokens {
                let mask = guide.mask()?;
                let Some(token) = mask.iter().find(|token| !guide.is_end(*token)) else {
                    return Ok(Finish::stop());
                };
                guide.accept(token)?;
                out.token(token).await?;
                if guide.is_finished() {
                    return Ok(Finish::stop());
                }
            }
            Ok(Finish::length())
        }))
    }

    async fn cleanup(&self) -> Result<(), EngineError> {
        Ok(())
    }
}

/// Fields of a request, and the field to blame.
fn explosions() -> Vec<(Value, &'static str)> {
    let choices = |count: usize| {
        (0..count)
            .map(|at| format!("choice {at}"))
            .collect::<Vec<_>>()
    };
    let nested = (0..40).fold(
        json!({"type": "null"}),
        |inner, _| json!({"type": "object", "properties": {"a": inner}, "required": ["a"]}),
    );
    let rules = "a: \"x\"\n".repeat(4000);
    let format = json!({"type": "json_schema", "json_schema": {"name": "n", "schema": nested}});
    let tool = json!([{"type": "function", "function": {"name": "f", "parameters": nested}}]);
    vec![
        (
            json!({"guided_regex": "(a|a)*{1000}{1000}"}),
            "guided_regex",
        ),
        (
            json!({"guided_regex": "((a{1,100}){1,100}){1,100}b"}),
            "guided_regex",
        ),
        (
            json!({"guided_regex": "(a{1,1000}){1,1000}"}),
            "guided_regex",
        ),
        (
            json!({"genset": {"guided_regex": "(".repeat(100_000)}}),
            "genset.guided_regex",
        ),
        (
            json!({"nvext": {"guided_regex": "a".repeat(1 << 20)}}),
            "nvext.guided_regex",
        ),
        (json!({"guided_regex": "(?=a)b"}), "guided_regex"),
        (json!({"guided_choice": choices(100_000)}), "guided_choice"),
        (
            json!({"guided_choice": ["x".repeat(1 << 20)]}),
            "guided_choice",
        ),
        (
            json!({"guided_grammar": format!("start: a\n{rules}")}),
            "guided_grammar",
        ),
        (
            json!({"guided_grammar": "start: ".to_owned() + &"(".repeat(100_000)}),
            "guided_grammar",
        ),
        (
            json!({"guided_grammar": "start: \"a\" ".repeat(100_000)}),
            "guided_grammar",
        ),
        (json!({"guided_json": nested}), "guided_json"),
        (json!({"guided_json": nested.to_string()}), "guided_json"),
        (
            json!({"guided_json": {"enum": choices(50_000)}}),
            "guided_json",
        ),
        (
            json!({"genset": {"guided_json": {"$ref": "#/nowhere"}}}),
            "genset.guided_json",
        ),
        (json!({"guided_json": {"$ref": "#"}}), "guided_json"),
        (json!({"guided_grammar": "start: start"}), "guided_grammar"),
        (json!({"response_format": format}), "response_format"),
        (json!({"tools": tool, "tool_choice": "required"}), "tools"),
    ]
}

#[tokio::test]
async fn explosions_are_refused_by_the_clients_own_name() {
    let site = site().await;
    let mut served = Vec::new();
    for (further, field) in explosions() {
        let mut shown = further.to_string();
        shown.truncate(80);
        for stream in [false, true] {
            let mut further = further.clone();
            further["stream"] = stream.into();
            let response = site.post(CHAT, &chat("Hi", further)).await;
            if response.status == 200 {
                served.push(shown.clone());
                continue;
            }
            let message = response.blames(field);
            assert!(message.contains(field), "{shown}: {message}");
            assert!(message.len() < 1000, "{shown}: {message}");
        }
        site.is_well().await;
    }
    // Nested counts may just fit the limits; their cost is bounded at each token.
    assert!(
        served
            .iter()
            .all(|shown| shown.contains("guided_regex") && shown.contains("{1")),
        "{served:#?}"
    );
    site.idle().await;
    site.close().await;
}

/// Within the limits when compiled, and too complex later: an error of that request, which names what is too complex.
#[tokio::test]
async fn what_grows_too_complex_ends_its_own_answer() {
    let site = site().await;
    for further in [
        json!({"guided_regex": "(a|b)*a(a|b){60}"}),
        json!({"guided_regex": r"(.*a.*b.*c.*d.*e.*f){9}(\w{50,999}|\d{40,998}){5,500}"}),
        json!({"guided_grammar": "start: a{1,100000}\na: b{1,100000}\nb: \"x\" | \"y\" start"}),
        json!({"guided_json": {"type": "string", "minLength": 100_000, "maxLength": 90_000_000}}),
    ] {
        let response = site
            .post(COMPLETIONS, &completion("Hi", further.clone()))
            .await;
        match response.status {
            200 => assert!(!response.content().is_empty()),
            400 => {
                let (_, param, _, message) = response.refusal();
                let field = further.as_object().and_then(|fields| fields.keys().next());
                assert_eq!(param.as_ref(), field, "{further}: {message}");
            }
            other => panic!("{further}: {other} {}", response.text()),
        }
        site.is_well().await;
    }
    site.close().await;
}

/// A grammar that needs more for one token than the engine allows is the client's fault, and the error says so.
#[tokio::test]
async fn what_is_over_the_limit_of_a_token_is_refused() {
    let limits = GuideLimits {
        token_lexer_fuel: 5,
        ..GuideLimits::default()
    };
    let site = site_of(Arc::new(new_factory().with_limits(limits))).await;
    let further = json!({"guided_regex": "[a-z]*(ab|yes|no){3,9}"});
    let response = site.post(COMPLETIONS, &completion("Hi", further)).await;
    let (status, _, _, message) = response.refusal();
    assert_eq!(status, 400, "{message}");
    assert!(message.contains("too complex"), "{message}");
    site.is_well().await;
    site.close().await;
}

async fn site() -> Site {
    site_of(factory()).await
}

async fn site_of(factory: Arc<GuideFactory>) -> Site {
    let engine = Arc::new(Follower(factory));
    Site::with_worker(config(), parsing("hermes", "none"), engine).await
}
