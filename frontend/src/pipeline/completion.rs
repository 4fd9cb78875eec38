//! From the prompts of a completions request to their tokens.

use std::sync::Arc;

use genset_backend_common::{Input, RequestField};

use super::encode::{Plain, refuse_too_many};
use super::{Job, Room, bind, refuse_token_options};
use crate::error::ApiError;
use crate::model::{ServedModel, TextFiles};
use crate::openai::{CompletionRequest, Prompt};
use crate::work::Owner;

impl Job {
    /// Tokenizes the prompts of a completion request.
    ///
    /// # Errors
    /// A 400 if a prompt's kind is not supported by the model, or it exceeds the context.
    ///
    /// # Cancel safety
    /// If the future is dropped, work that has not started never starts, and running work stops soon.
    pub async fn completion(
        model: Arc<ServedModel>,
        request: CompletionRequest,
        room: Room,
    ) -> Result<Self, ApiError> {
        let CompletionRequest {
            mut params,
            prompts,
            echo,
            suffix,
        } = request;
        if model.card.capabilities.whole_bodies {
            let why = "this model's engine now reads the bodies of completions itself; send the request again";
            return Err(ApiError::unsupported("model", why));
        }
        let schema_bytes = params.guided.as_ref().map_or(0, |guided| guided.bytes);
        let (guided, bound_by) = bind(&model, &mut params)?.unzip();
        let is_text = |prompt: &Prompt| matches!(prompt, Prompt::Text(_));
        if model.text.is_none() && prompts.iter().any(is_text) {
            refuse_token_options(&params)?;
        }
        let with_model = Arc::clone(&model);
        let bytes = bytes_of(&prompts, echo, suffix.as_deref());
        let work = move |owner: &Owner| {
            let _room = room.memory;
            let count = prompts.len();
            let (mut inputs, mut echoes) = (Vec::with_capacity(count), Vec::new());
            for (index, prompt) in prompts.into_iter().enumerate() {
                owner.check()?;
                let made = made(prompt, echo, suffix.as_deref(), &with_model, owner);
                let (input, echoed) = made.map_err(|error| error.of_prompt(index, count))?;
                inputs.push(input);
                echoes.extend(echoed);
            }
            Ok((inputs, echoes))
        };
        let (inputs, echoes) = model.work.run(bytes, room.deadline, work).await?;
        Ok(Self {
            model,
            params,
            inputs,
            splitting: None,
            guided: guided.map(Into::into),
            schema_bytes,
            may_call_instead: false,
            bound_by,
            continues_prompts: true,
            echoes,
        })
    }
}

/// The bytes to process, over all prompts.
fn bytes_of(prompts: &[Prompt], echo: bool, suffix: Option<&str>) -> usize {
    let suffix = suffix.map_or(0, str::len);
    let bytes = |prompt: &Prompt| match prompt {
        Prompt::Text(text) => text.len().saturating_add(suffix),
        // Detokenizing a token takes about as long as tokenizing a byte of text.
        Prompt::Tokens(tokens) if echo => tokens.len(),
        Prompt::Tokens(_) => 0,
    };
    prompts.iter().map(bytes).fold(0, usize::saturating_add)
}

/// The prepared prompt, and the text with which its answers begin if they echo it.
fn made(
    prompt: Prompt,
    echo: bool,
    suffix: Option<&str>,
    model: &ServedModel,
    owner: &Owner,
) -> Result<(Input, Option<Arc<str>>), ApiError> {
    if let Prompt::Tokens(tokens) = &prompt {
        refuse_too_many(tokens.len(), model)?;
    }
    let echoed = echo.then(|| shown(&prompt, model)).transpose()?;
    let prompt = match suffix {
        Some(suffix) => between(prompt, suffix, model)?,
        None => prompt,
    };
    Ok((input(prompt, model, owner)?, echoed))
}

/// A completion's prompt as the engine takes it.
fn input(prompt: Prompt, model: &ServedModel, owner: &Owner) -> Result<Input, ApiError> {
    match (prompt, &model.text) {
        (Prompt::Tokens(tokens), Some(_)) => Ok(Input::Tokens(tokens.into())),
        (Prompt::Tokens(_), None) => {
            let why = "this model takes text, not token ids";
            Err(ApiError::unsupported("prompt", why))
        }
        (Prompt::Text(text), None) => Ok(Input::Text(text.into())),
        (Prompt::Text(text), Some(files)) => tokens(&text, model, files, owner),
    }
}

fn tokens(
    text: &str,
    model: &ServedModel,
    files: &TextFiles,
    owner: &Owner,
) -> Result<Input, ApiError> {
    let plain = Plain {
        for_answer: true,
        text,
        add_special: true,
        salt: None,
        param: &RequestField::Prompt.into(),
    };
    let tokens = model.timings.tokenize(|| plain.encode(model, files, owner));
    Ok(Input::Tokens(tokens?.into()))
}

/// The fill-in-the-middle prompt for the text between `prompt` and `suffix`.
fn between(prompt: Prompt, suffix: &str, model: &ServedModel) -> Result<Prompt, ApiError> {
    let infill = model.text.as_ref().and_then(|text| text.infill);
    let Some(infill) = infill else {
        let why = "this model's tokenizer has no tokens that ask for text between two others; leave the field out";
        return Err(ApiError::unsupported("suffix", why));
    };
    match prompt {
        Prompt::Text(text) => Ok(Prompt::Text(infill.prompt(&text, suffix))),
        Prompt::Tokens(_) => {
            let problem = "expected a text, not token ids, beside a 'suffix'";
            Err(ApiError::invalid("prompt", problem))
        }
    }
}

/// A prompt as its echo shows it: token ids as text with all special tokens.
fn shown(prompt: &Prompt, model: &ServedModel) -> Result<Arc<str>, ApiError> {
    match (prompt, &model.text) {
        (Prompt::Text(text), _) => Ok(text.as_str().into()),
        (Prompt::Tokens(tokens), Some(text)) => match text.tokenizer.decode_all(tokens, false) {
            Ok(text) => Ok(text.into()),
            Err(error) => Err(ApiError::invalid(
                "prompt",
                format!("cannot be shown as text: {error}"),
            )),
        },
        (Prompt::Tokens(_), None) => Ok(Arc::default()),
    }
}
