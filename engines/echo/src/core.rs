//! Echoes tokens.

use std::time::Duration;

use genset_backend_common::output::{self, Finish, OutputStream};
use genset_backend_common::{
    Capabilities, EngineConfig, EngineError, EngineState, GenerateRequest, LLMEngine,
    RequestContext, StartContext, async_trait,
};

use crate::{EchoArgs, ends, pause};

/// Echoes the prompt's tokens, including the template. Stops at an end-of-sequence token in the prompt, unless the request
/// ignores those, and at the prompt's end. If it must not end yet (`ignore_eos`, `min_tokens`), starts the prompt again.
#[derive(Debug)]
pub struct EchoCore {
    delay: Duration,
    vocab_size: u32,
    context_length_tokens: u32,
    repeats: bool,
    started: EngineState<()>,
}

impl EchoCore {
    /// Creates an engine for a model with this vocabulary and context.
    #[must_use]
    pub fn from_args(args: &EchoArgs, vocab_size: u32, context_length_tokens: u32) -> Self {
        Self {
            delay: args.delay(),
            vocab_size,
            context_length_tokens,
            repeats: true,
            started: EngineState::new(),
        }
    }

    /// Makes `ignore_eos` show the whole template once, for people: end-of-sequence tokens in the template do not end the answer,
    /// but the prompt's end does. The engine contract would continue to `max_tokens`.
    #[must_use]
    pub fn once(self) -> Self {
        Self {
            repeats: false,
            ..self
        }
    }
}

#[async_trait]
impl LLMEngine for EchoCore {
    async fn start(&self, _ctx: StartContext) -> Result<EngineConfig, EngineError> {
        let can = Capabilities::tokens()
            .with_point_mass_sampling()
            .with_virtual_time();
        let config = EngineConfig::new("echo_core", self.context_length_tokens)
            .with_vocab_size(self.vocab_size)
            .with_capabilities(can);
        self.started.start(async { Ok(((), config)) }).await
    }

    async fn generate(
        &self,
        request: GenerateRequest,
        ctx: RequestContext,
    ) -> Result<OutputStream, EngineError> {
        self.started.get()?;
        let max_tokens = request.max_tokens(self.context_length_tokens);
        let tokens = request.tokens()?.to_vec();
        let (delay, repeats) = (self.delay, self.repeats);
        Ok(output::stream(ctx, move |out| async move {
            for (generated, token) in (0..).zip(tokens.iter().copied().cycle()) {
                if generated == max_tokens {
                    return Ok(Finish::length());
                }
                let must_go_on = repeats && request.stop.ignore_eos;
                if !must_go_on && ends(&request.stop, tokens.len(), generated) {
                    break;
                }
                pause(delay).await;
                if request.stop.is_stop(token, generated) {
                    return Ok(Finish::stop_token(token));
                }
                out.token(token).await?;
            }
            Ok(Finish::stop())
        }))
    }

    async fn cleanup(&self) -> Result<(), EngineError> {
        drop(self.started.take());
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use futures_util::StreamExt;
    use genset_backend_common::{FinishReason, Output};

    use super::*;

    async fn echo(change: impl FnOnce(&mut GenerateRequest)) -> (u32, FinishReason) {
        echo_of(EchoCore::from_args(&EchoArgs::default(), 100, 20), change).await
    }

    async fn echo_of(
        engine: EchoCore,
        change: impl FnOnce(&mut GenerateRequest),
    ) -> (u32, FinishReason) {
        engine.start(StartContext::detached(1)).await.unwrap();
        let mut request = GenerateRequest::from_tokens("m", vec![5, 6, 9, 7]);
        request.stop.eos_token_ids = [9].into();
        change(&mut request);
        let ctx = RequestContext::new("r").with_prompt_tokens(4);
        let mut outputs = engine.generate(request, ctx).await.unwrap();
        while let Some(item) = outputs.next().await {
            if let Output::Finished(finished) = item.unwrap() {
                return (finished.usage.completion_tokens, finished.reason);
            }
        }
        panic!("no terminal");
    }

    #[tokio::test(start_paused = true)]
    async fn the_prompt_comes_back_until_its_end_of_sequence() {
        assert_eq!(echo(|_| {}).await, (2, FinishReason::Stop));
        assert_eq!(
            echo(|request| request.stop.ignore_eos = true).await,
            (16, FinishReason::Length)
        );
        assert_eq!(
            echo(|request| request.stop.max_tokens = Some(1)).await,
            (1, FinishReason::Length)
        );
    }

    #[tokio::test(start_paused = true)]
    async fn once_is_once_unless_more_is_asked_for() {
        let once = || EchoCore::from_args(&EchoArgs::default(), 100, 20).once();
        let ignoring = echo_of(once(), |request| request.stop.ignore_eos = true).await;
        assert_eq!(ignoring, (4, FinishReason::Stop));
        let longer = echo_of(once(), |request| {
            request.stop.ignore_eos = true;
            request.stop.min_tokens = 6;
        });
        assert_eq!(longer.await, (8, FinishReason::Stop));
    }
}
