//! A checkout's tokenizer as GGUF metadata, where its way of splitting text has a name there.

use std::collections::HashMap;

use serde_json::Value as Json;

use super::Entry;
use crate::load::gguf::tokenizer::split_name;
use crate::load::{OpenModel, Source};

const NORMAL: i32 = 1;
const CONTROL: i32 = 3;
const USER_DEFINED: i32 = 4;
const UNUSED: i32 = 5;

/// The entries, or those that say that there is no vocabulary.
pub(super) fn entries(model: &OpenModel) -> Vec<(String, Entry)> {
    let files = match &model.source {
        Source::Folder { .. } => model.files(None).unwrap_or_default(),
        Source::Gguf(_) => Vec::new(),
    };
    let json = |name: &str| {
        let file = files.iter().find(|file| file.name == name)?;
        serde_json::from_slice::<Json>(&file.content).ok()
    };
    let found = json("tokenizer.json")
        .and_then(|tokenizer| byte_level(&tokenizer, model.config.vocab_size));
    let Some(vocabulary) = found else {
        tracing::warn!(
            model = model.name,
            "the GGUF file gets no tokenizer: GGUF has no name for what the model's does; run it with --model-config"
        );
        let none = Entry::Text("no_vocab".into());
        return vec![("tokenizer.ggml.model".into(), none)];
    };
    let config = json("tokenizer_config.json").unwrap_or_default();
    let mut entries = vocabulary.entries(&config);
    let template = files.iter().find(|file| file.name == "chat_template.jinja");
    let template = template
        .map(|file| String::from_utf8_lossy(&file.content).into_owned())
        .or_else(|| Some(config.get("chat_template")?.as_str()?.to_owned()));
    if let Some(template) = template {
        entries.push(("tokenizer.chat_template".into(), Entry::Text(template)));
    }
    entries
}

/// A byte-level BPE vocabulary.
struct Vocabulary {
    pre: &'static str,
    tokens: Vec<String>,
    types: Vec<i32>,
    merges: Vec<String>,
}

/// `None` if the tokenizer is of another kind, or splits text in a way that has no name.
fn byte_level(tokenizer: &Json, vocab_size: usize) -> Option<Vocabulary> {
    let model = tokenizer.get("model")?;
    if model.get("type")?.as_str()? != "BPE"
        || model.get("byte_fallback") == Some(&Json::Bool(true))
    {
        return None;
    }
    let pre = split_name(tokenizer)?;
    let mut tokens: Vec<String> = (0..vocab_size).map(|id| format!("[PAD{id}]")).collect();
    let mut types = vec![UNUSED; vocab_size];
    let mut set = |id: u64, token: &str, kind: i32| {
        let place = usize::try_from(id).ok();
        let place = place.and_then(|id| Some((tokens.get_mut(id)?, types.get_mut(id)?)));
        if let Some((text, own)) = place {
            token.clone_into(text);
            *own = kind;
        }
    };
    for (token, id) in model.get("vocab")?.as_object()? {
        set(id.as_u64()?, token, NORMAL);
    }
    for added in tokenizer.get("added_tokens")?.as_array()? {
        let is_special = added.get("special")?.as_bool()?;
        let kind = if is_special { CONTROL } else { USER_DEFINED };
        set(
            added.get("id")?.as_u64()?,
            added.get("content")?.as_str()?,
            kind,
        );
    }
    let merges = model.get("merges")?.as_array()?;
    Some(Vocabulary {
        pre,
        merges: merges.iter().map(merge).collect::<Option<_>>()?,
        tokens,
        types,
    })
}

/// A merge as `tokenizer.json` files have it: a pair, or in older ones a text with a space.
fn merge(merge: &Json) -> Option<String> {
    match merge {
        Json::String(text) => Some(text.clone()),
        Json::Array(pair) => match pair.as_slice() {
            [first, second] => Some(format!("{} {}", first.as_str()?, second.as_str()?)),
            _ => None,
        },
        Json::Null | Json::Bool(_) | Json::Number(_) | Json::Object(_) => None,
    }
}

impl Vocabulary {
    fn entries(self, config: &Json) -> Vec<(String, Entry)> {
        let mut entries: Vec<(String, Entry)> = Vec::new();
        let mut push = |key: &str, entry| entries.push((format!("tokenizer.ggml.{key}"), entry));
        let ids: HashMap<&str, usize> = self
            .tokens
            .iter()
            .enumerate()
            .map(|(id, token)| (token.as_str(), id))
            .collect();
        push("model", Entry::Text("gpt2".into()));
        push("pre", Entry::Text(self.pre.into()));
        for (key, name) in [
            ("bos_token_id", "bos_token"),
            ("eos_token_id", "eos_token"),
            ("padding_token_id", "pad_token"),
        ] {
            let id = token_text(config.get(name)).and_then(|token| ids.get(token));
            if let Some(id) = id.and_then(|id| u32::try_from(*id).ok()) {
                push(key, Entry::U32(id));
            }
        }
        let adds_bos = config.get("add_bos_token").and_then(Json::as_bool);
        push("add_bos_token", Entry::Bool(adds_bos.unwrap_or(false)));
        push("token_type", Entry::I32s(self.types));
        push("merges", Entry::Texts(self.merges));
        push("tokens", Entry::Texts(self.tokens));
        entries
    }
}

/// A token in `tokenizer_config.json`: its text, or an object with it.
fn token_text(token: Option<&Json>) -> Option<&str> {
    let token = token?;
    token.as_str().or_else(|| token.get("content")?.as_str())
}
