//! Reads [`SlidingWindow`] from the keys of a `config.json`.

use super::Source;
use super::family::{Family, Windows};
use crate::error::LoadError;
use crate::model::config::SlidingWindow;

impl Source<'_> {
    pub(super) fn window(&self) -> Result<Option<SlidingWindow>, LoadError> {
        let raw = &self.raw;
        let is_said = raw.use_sliding_window == Some(true);
        let (by_default, full_every) = match self.family.facts().windows {
            Windows::Never
                if is_said && matches!(self.family, Family::SmolLm3 | Family::Qwen2Moe) =>
            {
                return self.unsupported("use_sliding_window", true, "it must be false");
            }
            Windows::IfSaid if is_said => (None, None),
            Windows::Never | Windows::IfSaid => return Ok(None),
            Windows::Usual {
                size_tokens,
                full_every,
            } => (size_tokens, full_every),
        };
        let size = raw.sliding_window.unwrap_or(by_default);
        let Some(size_tokens) = size.filter(|size| *size > 0) else {
            return Ok(None);
        };
        let window = |full_every| {
            Ok(Some(SlidingWindow {
                size_tokens,
                full_every,
            }))
        };
        if let Some(types) = &raw.layer_types {
            let is_full = |kind: &String| match kind.as_str() {
                "full_attention" => Some(true),
                "sliding_attention" => Some(false),
                _ => None,
            };
            let are_full: Option<Vec<bool>> = types.iter().map(is_full).collect();
            return match are_full.and_then(|are_full| period(&are_full)) {
                Some(Some(1)) => Ok(None),
                Some(full_every) => window(full_every),
                None => {
                    let fix =
                        "every nth layer must be full_attention and all others sliding_attention";
                    self.unsupported("layer_types", types.join(" "), fix)
                }
            };
        }
        if matches!(
            self.family,
            Family::Gemma3 | Family::Exaone4 | Family::Cohere2
        ) && let Some(pattern) = &raw.sliding_window_pattern
        {
            let every = pattern
                .as_u64()
                .and_then(|every| usize::try_from(every).ok());
            return match every {
                Some(every) => window(Some(every.max(1))),
                None => self.unsupported("sliding_window_pattern", pattern, "it must be a size"),
            };
        }
        // All layers of Qwen3-MoE have the window.
        if !matches!(self.family, Family::Qwen2 | Family::Qwen3) {
            return window(full_every);
        }
        match raw.max_window_layers.unwrap_or(28) {
            0 => window(None),
            layers if layers >= raw.num_hidden_layers => Ok(None),
            layers => {
                let fix = "it must be 0 or num_hidden_layers";
                self.unsupported("max_window_layers", layers, fix)
            }
        }
    }
}

/// The period of the marked layers, each the last of its period; `Some(None)` without a marked layer, `None` if they do not
/// repeat.
pub(crate) fn period(is_marked: &[bool]) -> Option<Option<usize>> {
    let Some(first) = is_marked.iter().position(|is_marked| *is_marked) else {
        return Some(None);
    };
    let period = first + 1;
    let mut layers = is_marked.iter().enumerate();
    layers
        .all(|(layer, is_marked)| *is_marked == (layer + 1).is_multiple_of(period))
        .then_some(Some(period))
}
