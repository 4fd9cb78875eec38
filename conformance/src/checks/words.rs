//! How long a text is in tokens, which only its engine knows: told by how it counts two others.

use crate::check::Stop;
use crate::trial::Live;

/// Words of a prompt of at most `tokens` tokens, and of nearly as many. For an engine of tokens each word is one, and so it is
/// where the engine does not count.
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
    // What a template adds; a text of words that are more than a token each is not as even as two samples say.
    let fixed = many.saturating_sub(u64::from(more) * grown / steps);
    let words = u64::from(tokens).saturating_sub(fixed) * steps / grown;
    let words = if grown == steps {
        words
    } else {
        words * 9 / 10
    };
    Ok(u32::try_from(words.max(1)).ok())
}
