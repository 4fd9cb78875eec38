//! Engines that answer with their prompt: [`EchoCore`] echoes the prompt's tokens, [`EchoFull`] takes text and chat
//! messages and echoes their text. For trying out everything around an engine.

mod core;
mod full;

use std::time::Duration;

use genset_backend_common::StopConditions;

pub use core::EchoCore;
pub use full::EchoFull;

/// What both engines are built from; with the feature `cli`, their command-line flags.
#[derive(Debug, Clone)]
#[cfg_attr(feature = "cli", derive(clap::Args))]
pub struct EchoArgs {
    /// Pause before each token, in milliseconds (10 is about 100 tokens a second)
    #[cfg_attr(
        feature = "cli",
        arg(long, default_value_t = 10, env = "GENSET_TOKEN_ECHO_DELAY_MS")
    )]
    pub token_echo_delay_ms: u64,
}

impl Default for EchoArgs {
    fn default() -> Self {
        Self {
            token_echo_delay_ms: 10,
        }
    }
}

impl EchoArgs {
    fn delay(&self) -> Duration {
        Duration::from_millis(self.token_echo_delay_ms)
    }
}

/// Whether an answer that repeats a prompt of `prompt_len` tokens ends before token number `generated`: at the prompt's end,
/// unless `min_tokens` is not reached yet.
fn ends(stop: &StopConditions, prompt_len: usize, generated: u32) -> bool {
    let place = usize::try_from(generated).unwrap_or(usize::MAX);
    let is_at_end = place > 0 && place.is_multiple_of(prompt_len);
    is_at_end && generated >= stop.min_tokens
}

/// Waits before a token. A zero delay does not wait at all, since even an expired timer has a cost.
async fn pause(delay: Duration) {
    if !delay.is_zero() {
        tokio::time::sleep(delay).await;
    }
}
