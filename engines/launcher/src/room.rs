//! [`Room`] delays requests until a server has room for them. If these servers have too many, they end every running request.
//!
//! `llama_cpp.server` ends an answer when the next request arrives. The slots of llama-server share one KV cache, as large as
//! the context of each. When the tokens of all slots exceed it, every running request fails with "Context size has been
//! exceeded." (b11434). So a request waits until its prompt and a part of its answer fit beside the others. Longer answers may
//! still fill the cache; then the requests end, as they do at any full server.

use std::sync::Arc;

use serde_json::Value;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::config::LauncherConfig;
use crate::ranks::said;

/// The room that a server's requests share.
#[derive(Debug, Clone)]
pub(crate) struct Room {
    free: Arc<Semaphore>,
    total: u32,
    /// The share of a slot, in tokens.
    share: u32,
    /// How many tokens the server may generate past the limit.
    past_limit: u32,
}

impl Room {
    /// Admits one request at a time.
    pub(crate) fn one_at_a_time() -> Self {
        Self::new(1, 0, 0)
    }

    /// Admits `total` tokens; the server may generate `past_limit` tokens past the limit.
    pub(crate) fn of_tokens(total: u32, slots: u32, past_limit: u32) -> Self {
        Self::new(total, total / slots.max(1), past_limit)
    }

    fn new(total: u32, share: u32, past_limit: u32) -> Self {
        let permits = usize::try_from(total).unwrap_or(usize::MAX);
        Self {
            free: Arc::new(Semaphore::new(permits.min(Semaphore::MAX_PERMITS))),
            total,
            share,
            past_limit,
        }
    }

    /// Waits for the room of a request with a prompt of `prompt` tokens and an answer of at most `max_tokens`, computed in
    /// `slots` slots. A request larger than the room takes all of it. First come, first served.
    ///
    /// # Cancel safety
    /// Dropping the future gives up the place in the queue.
    pub(crate) async fn enter(
        &self,
        prompt: u32,
        max_tokens: Option<u32>,
        slots: u32,
    ) -> Option<OwnedSemaphorePermit> {
        let tokens = self.tokens(prompt, max_tokens.unwrap_or(u32::MAX));
        let tokens = tokens.saturating_mul(slots).min(self.total);
        // The semaphore is never closed; if it were, no wait would be needed.
        let free = Arc::clone(&self.free);
        free.acquire_many_owned(tokens).await.ok()
    }

    /// The tokens to reserve: all that the request may need, up to its share; after a long prompt, half a share for the answer.
    fn tokens(&self, prompt: u32, max_tokens: u32) -> u32 {
        let behind_prompt = |answer: u32| {
            let tokens = prompt.saturating_add(answer);
            tokens.saturating_add(self.past_limit)
        };
        let least = behind_prompt(max_tokens.min(self.share / 2));
        let tokens = behind_prompt(max_tokens).min(least.max(self.share));
        tokens.clamp(1, self.total)
    }
}

/// The tokens of the KV cache that a llama-server's slots share, each with a context of `slot_tokens`; `None` if each slot has
/// its own cache.
///
/// # Source
/// llama.cpp, `tools/server/README.md` (`--kv-unified`, on unless the number of slots is set). The server does not report it.
pub(crate) fn shared_tokens(config: &LauncherConfig, slot_tokens: u32) -> Option<u32> {
    let is_off = config.setting("kv-unified") == Some(&Value::Bool(false));
    if is_off || said(config, &["--no-kv-unified", "-no-kvu"]).is_some() {
        return None;
    }
    let is_on = said(config, &["--kv-unified", "-kvu"]).is_some();
    if !is_on && said(config, &["--parallel", "-np"]).is_some_and(|(_, slots)| slots != "-1") {
        return None;
    }
    let size = said(config, &["--ctx-size", "-c"]).and_then(|(_, size)| size.parse().ok());
    let size: Option<u32> = config.context_length_tokens.or(size);
    Some(size.unwrap_or(0).max(slot_tokens))
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;

    use super::*;
    use crate::config::ServerInput;
    use crate::extra::ExtraArgs;
    use crate::kind::ServerKind;

    fn shared(command: &str, extra: &str) -> Option<u32> {
        let input = ServerInput::Tokens { vocab_size: None };
        let mut config = LauncherConfig::new(ServerKind::LlamaCpp, "/m.gguf", input);
        config.command = Some(command.split(' ').map(str::to_owned).collect());
        config.extra = Some(ExtraArgs::in_test(extra));
        shared_tokens(&config, 2048)
    }

    #[test]
    fn slots_share_a_cache_unless_each_was_given_its_own() {
        assert_eq!(shared("llama-server", "{}"), Some(2048));
        assert_eq!(shared("llama-server -c 8192", "{}"), Some(8192));
        assert_eq!(shared("llama-server", "ctx_size: 4096"), Some(4096));
        assert_eq!(shared("llama-server -np 4 -kvu", "{}"), Some(2048));
        assert_eq!(shared("llama-server", "parallel: -1"), Some(2048));
        for (command, extra) in [
            ("llama-server -np 4", "{}"),
            ("llama-server --no-kv-unified", "{}"),
            ("llama-server", "parallel: 4"),
            ("llama-server", "kv-unified: false"),
        ] {
            assert_eq!(shared(command, extra), None, "{command} {extra}");
        }
    }

    #[test]
    fn a_request_waits_for_room_for_its_prompt_and_a_share_of_its_answer() {
        let room = Room::of_tokens(2048, 4, 8);
        let enter = |prompt, max_tokens| room.enter(prompt, max_tokens, 1).now_or_never().flatten();
        let first = enter(1500, None);
        assert!(first.is_some());
        assert!(enter(500, None).is_none());
        let short = enter(100, Some(30));
        assert!(short.is_some());
        // A request larger than the room waits for all of it, not forever.
        assert!(enter(4000, None).is_none());
        drop((first, short));
        drop(enter(4000, None).unwrap());
        // With short prompts, one request per slot runs at once.
        let all: Vec<_> = (0..4).map(|_| enter(200, None)).collect();
        assert!(all.iter().all(Option::is_some));
    }
}
