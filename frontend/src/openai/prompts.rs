//! Prompts and inputs: texts, lists of token ids, or lists of either, parsed without an intermediate JSON value.

use super::common::at_most;
use super::completions::Prompt;
use super::fields::Fields;
use crate::error::ApiError;
use crate::json::{Meter, is_list, items};

/// Takes the field `name`, of at most `max` prompts.
///
/// # Errors
/// A 400 that names the prompt.
pub(super) fn read_prompts(
    fields: &mut Fields<'_>,
    name: &str,
    max: usize,
) -> Result<Option<Vec<Prompt>>, ApiError> {
    let Some(text) = fields.text(name)? else {
        return Ok(None);
    };
    let meter = fields.meter();
    if is_text(text) || is_token_ids(text) {
        return Ok(Some(vec![read_prompt(name, text, meter)?]));
    }
    if !is_list(text) || items(text).next().is_none() {
        let problem =
            "expected a string, a list of strings, a list of token ids or a list of such lists";
        return Err(ApiError::invalid(name, problem));
    }
    at_most(name, max, items(text).count(), &format!("{name}s"))?;
    let prompts = items(text)
        .enumerate()
        .map(|(index, prompt)| read_prompt(&format!("{name}[{index}]"), prompt, meter));
    prompts.collect::<Result<_, _>>().map(Some)
}

fn read_prompt(name: &str, text: &str, meter: &Meter) -> Result<Prompt, ApiError> {
    if is_text(text) {
        return meter.text(name, text).map(Prompt::Text);
    }
    if is_list(text) && items(text).next().is_some() {
        return meter.token_ids(name, text).map(Prompt::Tokens);
    }
    let problem = "expected a string or a list of at least one token id";
    Err(ApiError::invalid(name, problem))
}

fn is_text(text: &str) -> bool {
    text.starts_with('"')
}

/// Whether it is a list that begins with a number.
fn is_token_ids(text: &str) -> bool {
    let first = items(text).next().and_then(|item| item.chars().next());
    is_list(text) && first.is_some_and(|first| first == '-' || first.is_ascii_digit())
}
