//! The length of a text in tokens, which only its engine knows: estimated from the engine's counts of two others.

use crate::check::Stop;
use crate::trial::Live;

/// The number of words of a prompt with at most, and nearly, `tokens` tokens. For an engine of tokens, or one that does not
/// count, each word is one token.
pub(super) async fn words_of(live: &Live, tokens: u32) -> Result<usize, Stop> {
    let words = match live.medium().is_tokens() {
        true => None,
        false => counted(live, tokens).await?,
    };
    Ok(usize::try_from(words.unwrap_or(tokens)).unwrap_or(usize::MAX))
}

async fn counted(live: &Live, tokens: u32) -> Result<Option<u32>, Stop> {
    let more = (live.config.context_length_tokens / 8).clamp(2, 128);
    let fewer = more / 2;
    let mut counts = Vec::new();
    for words in [fewer, more] {
        let len = usize::try_from(words).unwrap_or(usize::MAX);
        let Some(usage) = live.answer(live.request(len, 1)).await?.usage() else {
            return Ok(None);
        };
        counts.push(u64::from(usage.prompt_tokens));
    }
    let [few, many] = counts[..] else {
        return Ok(None);
    };
    let steps = u64::from(more - fewer);
    let Some(grown) = many.checked_sub(few).filter(|grown| *grown >= steps) else {
        return Ok(None);
    };
    // The tokens that a template adds. If words are more than one token each, two samples do not predict the count exactly.
    let fixed = many.saturating_sub(u64::from(more) * grown / steps);
    let words = u64::from(tokens).saturating_sub(fixed) * steps / grown;
    let words = if grown == steps {
        words
    } else {
        words * 9 / 10
    };
    Ok(u32::try_from(words.max(1)).ok())
}
