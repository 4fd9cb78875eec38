//! [`Room`] holds requests back until a server has room for them. These servers end every running request when they have too many.
//!
//! `llama_cpp.server` ends an answer when the next request comes. The slots of llama-server have one KV cache together, as large as
//! the context of each: when the tokens of all of them are more, it fails every request that runs, with "Context size has been
//! exceeded." (b11434). So a request waits until its prompt and a part of its answer have room beside the others. Answers that
//! become longer than that may still fill the cache; then the requests end, as they end at any server that is full.

use std::sync::Arc;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::config::LauncherConfig;
use crate::extra::ExtraArgs;
use crate::ranks::said;

/// What the requests of a server have together.
#[derive(Debug, Clone)]
pub(crate) struct Room {
    free: Arc<Semaphore>,
    total: u32,
    /// The part of a slot, in tokens.
    share: u32,
    /// How much more than it was asked for the server may generate, in tokens.
    past_limit: u32,
}

impl Room {
    /// For one request.
    pub(crate) fn one_at_a_time() -> Self {
        Self::new(1, 0, 0)
    }

    /// For `total` tokens of a server that may generate `past_limit` more than it was asked for.
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

    /// Waits for the room of a request with a prompt of so many tokens and an answer of at most so many, which the server computes in
    /// so many slots; one that has no room in them has all. Those that came before have theirs first.
    ///
    /// # Cancel safety
    /// Dropping the future gives the place in the queue up.
    pub(crate) async fn enter(
        &self,
        prompt: u32,
        max_tokens: Option<u32>,
        slots: u32,
    ) -> Option<OwnedSemaphorePermit> {
        let tokens = self.tokens(prompt, max_tokens.unwrap_or(u32::MAX));
        let tokens = tokens.saturating_mul(slots).min(self.total);
        // It is never closed; were it, there would be nothing to wait for.
        let free = Arc::clone(&self.free);
        free.acquire_many_owned(tokens).await.ok()
    }

    /// All that it may need, or no more than its share; behind a long prompt half a share.
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

/// Tokens of the KV cache that the slots of a llama-server share, each with a context of `slot_tokens`; `None` where each has a
/// cache of its own.
///
/// # Source
/// llama.cpp, `tools/server/README.md` (`--kv-unified`, on where the number of slots is not said). The server does not tell.
pub(crate) fn shared_tokens(config: &LauncherConfig, slot_tokens: u32) -> Option<u32> {
    let extra = |name: &str| {
        config
            .extra
            .as_ref()
            .and_then(|extra: &ExtraArgs| extra.get(name))
    };
    let is_off = extra("kv-unified").is_some_and(|on| *on == serde_json::Value::Bool(false));
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
    use crate::kind::ServerKind;

    fn shared(command: &str, extra: &str) -> Option<u32> {
        let input = ServerInput::Tokens { vocab_size: None };
        let mut config = LauncherConfig::new(ServerKind::LlamaCpp, "/m.gguf", input);
        config.command = Some(command.split(' ').map(str::to_owned).collect());
        let file = tempfile::NamedTempFile::with_suffix(".yaml").unwrap();
        std::fs::write(&file, extra).unwrap();
        config.extra = Some(ExtraArgs::load(file.path()).unwrap());
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
        // One that is larger than all waits for all, not for ever.
        assert!(enter(4000, None).is_none());
        drop((first, short));
        drop(enter(4000, None).unwrap());
        // As many as there are slots run at once where their prompts are short.
        let all: Vec<_> = (0..4).map(|_| enter(200, None)).collect();
        assert!(all.iter().all(Option::is_some));
    }
}
