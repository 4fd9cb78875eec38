//! The conformance kit on an engine whose tokens this crate samples. The model is trivial, so the kit tests the sampling:
//! options, log probabilities, guided decoding.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use genset_backend_common::config::SamplingOption;
use genset_backend_common::output::{self, Finish, OutputStream, TokenChunk};
use genset_backend_common::{
    Capabilities, EngineConfig, EngineError, EngineState, GenerateRequest, LLMEngine,
    RequestContext, StartContext, TokenId, async_trait,
};
use genset_conformance::{Scenario, Subject, Verdict, find, run_check};
use genset_sampling::guided::{Guide, GuideFactory};
use genset_sampling::{Sampled, Sampler, best_token};

const CONTEXT_LENGTH: u32 = 2048;
/// Some tokens of the tokenizer have no logit. Not a multiple of the size of a vector, a mask word or a row's block.
const VOCAB_SIZE: usize = 2045;
/// The first tokens; only these are possible.
const POSSIBLE: usize = 2040;
/// Of `models/tiny-chat`.
const EOS: [TokenId; 2] = [2, 0];
const TOKENIZER: &[u8] = include_bytes!("../../../models/tiny-chat/tokenizer.json");
/// How long a step takes, so that an answer can be cancelled on the way.
const STEP: Duration = Duration::from_millis(1);

static GUIDES: LazyLock<Arc<GuideFactory>> =
    LazyLock::new(|| Arc::new(GuideFactory::try_new(TOKENIZER, VOCAB_SIZE, &EOS).unwrap()));

/// The source of seeds for requests without one.
static NEXT_SEED: AtomicU64 = AtomicU64::new(1);

#[derive(Debug)]
struct Chooser {
    guides: EngineState<Arc<GuideFactory>>,
}

/// The state of a request between steps.
struct Answering {
    sampler: Sampler,
    guide: Option<Guide>,
    /// All tokens so far.
    context: Vec<TokenId>,
}

impl Answering {
    fn new(request: &GenerateRequest, guides: &GuideFactory) -> Result<Self, EngineError> {
        let seed = NEXT_SEED.fetch_add(1, Ordering::Relaxed);
        let context = request.tokens()?.to_vec();
        // The tokens that another instance has generated are part of the text.
        let guide = guides.compile_for(request)?;
        let sampler = Sampler::try_new(request, VOCAB_SIZE, seed)?;
        let ends = guide.as_ref().map_or(&[][..], Guide::ends);
        Ok(Self {
            sampler: sampler.with_ends(ends),
            guide,
            context,
        })
    }

    /// Returns the next token, and how the answer ends if this is its last one.
    fn step(
        &mut self,
        request: &GenerateRequest,
    ) -> Result<(TokenChunk, Option<Finish>), EngineError> {
        let mask = self.guide.as_mut().map(Guide::mask).transpose()?;
        let mut logits = logits_after(&self.context);
        // Like an engine that finds the best token on its device.
        let sampled = if self.sampler.is_argmax() && mask.is_none() {
            Sampled {
                token: best_token(&logits)?,
                logprob: None,
            }
        } else {
            self.sampler.sample(&mut logits, mask.as_ref())?
        };
        let (guide, max_tokens) = (self.guide.as_mut(), request.max_tokens(CONTEXT_LENGTH));
        let (chunk, end) =
            (self.sampler).accept_sampled(sampled, guide, &request.stop, max_tokens)?;
        self.context.extend_from_slice(&chunk.token_ids);
        Ok((chunk, end))
    }
}

#[async_trait]
impl LLMEngine for Chooser {
    async fn start(&self, _ctx: StartContext) -> Result<EngineConfig, EngineError> {
        use SamplingOption as Opt;
        let penalties = [
            Opt::PresencePenalty,
            Opt::FrequencyPenalty,
            Opt::RepetitionPenalty,
        ];
        let mut can = Capabilities::tokens()
            .with_resume()
            .with_virtual_time()
            .with_point_mass_sampling()
            .with_sampling(penalties.into_iter().chain([Opt::LogitBias]));
        can.max_logprobs = Some(20);
        can.guided = GuideFactory::KINDS.into();
        let config = EngineConfig::new("chooser", CONTEXT_LENGTH)
            .with_vocab_size(VOCAB_SIZE.try_into().unwrap())
            .with_capabilities(can);
        let guides = Arc::clone(&GUIDES);
        self.guides.start(async { Ok((guides, config)) }).await
    }

    async fn generate(
        &self,
        request: GenerateRequest,
        ctx: RequestContext,
    ) -> Result<OutputStream, EngineError> {
        let mut answering = Answering::new(&request, &*self.guides.get()?)?;
        Ok(output::stream(ctx, move |out| async move {
            loop {
                tokio::time::sleep(STEP).await;
                let (chunk, end) = answering.step(&request)?;
                match end {
                    Some(finish) if chunk.token_ids.is_empty() => return Ok(finish),
                    Some(finish) => {
                        out.tokens(chunk).await?;
                        return Ok(finish);
                    }
                    None => out.tokens(chunk).await?,
                }
            }
        }))
    }

    async fn cleanup(&self) -> Result<(), EngineError> {
        drop(self.guides.take());
        Ok(())
    }
}

/// FNV-1a over the tokens. Two tokens have high logits, half of the others are negative, and the last ones are impossible.
#[expect(clippy::cast_precision_loss, reason = "a number below 97")]
fn logits_after(context: &[TokenId]) -> Vec<f32> {
    let hash = context.iter().fold(0xcbf2_9ce4_8422_2325, |hash, token| {
        (hash ^ u64::from(*token)).wrapping_mul(0x0100_0000_01b3)
    }) >> 20;
    let mut logits: Vec<f32> = (0..VOCAB_SIZE as u64)
        .map(|token| ((hash ^ token) % 97) as f32 / 97.0 - 0.5)
        .collect();
    logits[POSSIBLE..].fill(f32::NEG_INFINITY);
    for (place, logit) in [(hash, 7.0), (hash / 7919, 6.5)] {
        logits[usize::try_from(place).unwrap() % POSSIBLE] = logit;
    }
    logits
}

fn subject() -> Subject {
    let guides = EngineState::new();
    let text = |tokens: &[TokenId]| {
        let bytes = tokens
            .iter()
            .flat_map(|token| GUIDES.vocabulary().bytes(*token));
        String::from_utf8_lossy(&bytes.copied().collect::<Vec<u8>>()).into_owned()
    };
    Subject::new(Chooser { guides }).with_text(Arc::new(text))
}

genset_conformance::suite!(|_: &Scenario| subject());

/// A check that does not apply passes too, so the kit would not notice a lost declaration.
#[test]
fn what_this_crate_does_is_checked() {
    for id in [
        "DT02", "DT07", "DT11", "DT13", "DT16", "DT17", "DT19", "DT20", "FN16", "GD01", "GD08",
        "MG11", "MG12",
    ] {
        let report = run_check(find(id).unwrap(), |_: &Scenario| subject());
        assert_eq!(report.verdict, Verdict::Pass, "{id}");
    }
}
