//! Makes the files of a checkout from a GGUF file's metadata: `tokenizer.json`, `tokenizer_config.json`,
//! `generation_config.json` and `config.json`.
//!
//! Anything that cannot be converted exactly is rejected: a tokenizer that splits words differently would silently feed the
//! model unfamiliar text.
//!
//! # Source
//! `transformers`' converters of SentencePiece and tiktoken vocabularies, and llama.cpp's names of pre-tokenizers.

mod bpe;
mod spm;

use std::path::Path;

use serde_json::{Value as Json, json};

use super::config::Metadata;
use super::header::{Header, Value};
use crate::error::LoadError;
use crate::load::ModelFile;
use crate::model::config::ModelConfig;

/// The key of the context length in `config.json`.
const CONTEXT_LENGTH: &str = "max_position_embeddings";

const NORMAL: i64 = 1;
const UNKNOWN: i64 = 2;
const CONTROL: i64 = 3;
const USER_DEFINED: i64 = 4;

/// Tokens that end an answer, which many files have in their vocabulary without marking them. Those of files and repositories
/// end the fill-in-the-middle output of code models.
///
/// # Source
/// llama.cpp's end-of-generation tokens, as far as the models whose tokenizers are read have them.
const END_TOKENS: [&str; 13] = [
    "<|eot_id|>",
    "<|im_end|>",
    "<end_of_turn>",
    "<|eom_id|>",
    "<|end|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<EOT>",
    "<|fim_pad|>",
    "<|repo_name|>",
    "<|file_sep|>",
    "<|return|>",
    "<|call|>",
];

/// The tokens that end an answer of gpt-oss. A vocabulary with both has [`MESSAGE_END`] after each message of an answer, so that
/// one does not end it.
const HARMONY_ENDS: [&str; 2] = ["<|return|>", "<|call|>"];

/// Ends an answer of Phi, and only a message within an answer of gpt-oss.
const MESSAGE_END: &str = "<|end|>";

/// Added tokens of Phi-3 that do not consume the white space after them.
const PHI3_WITHOUT_SPACE: [&str; 3] = ["<unk>", "<s>", "<|endoftext|>"];

/// The vocabulary part of the metadata.
pub(crate) struct Vocabulary<'a> {
    path: &'a Path,
    header: &'a Header,
    architecture: &'a str,
    model: &'a str,
    tokens: &'a [String],
    types: &'a [f64],
}

impl<'a> Vocabulary<'a> {
    /// `None` if the file has no vocabulary.
    ///
    /// # Errors
    /// The vocabulary is invalid.
    pub(crate) fn new(metadata: Metadata<'a>) -> Result<Option<Self>, LoadError> {
        let (path, header) = (metadata.path, metadata.header);
        let find = |key: &str| header.metadata.get(&format!("tokenizer.ggml.{key}"));
        let Some(Value::Text(model)) = find("model") else {
            return Ok(None);
        };
        if matches!(model.as_str(), "none" | "no_vocab") {
            return Ok(None);
        }
        let Some(Value::Texts(tokens)) = find("tokens") else {
            return Ok(None);
        };
        let types: &[f64] = match find("token_type") {
            Some(Value::Numbers(types)) => types,
            Some(_) | None => &[],
        };
        if !types.is_empty() && types.len() != tokens.len() {
            let problem = format!("{} types for {} tokens", types.len(), tokens.len());
            return Err(LoadError::bad_config(
                path,
                "tokenizer.ggml.token_type",
                problem,
            ));
        }
        Ok(Some(Self {
            path,
            header,
            architecture: metadata.architecture,
            model,
            tokens,
            types,
        }))
    }

    fn find(&self, key: &str) -> Option<&'a Value> {
        self.header.metadata.get(&format!("tokenizer.ggml.{key}"))
    }

    fn flag(&self, key: &str) -> Option<bool> {
        match self.find(key) {
            Some(Value::Bool(flag)) => Some(*flag),
            Some(_) | None => None,
        }
    }

    fn text(&self, key: &str) -> Option<&'a str> {
        match self.find(key) {
            Some(Value::Text(text)) => Some(text),
            Some(_) | None => None,
        }
    }

    /// The id under a key such as `bos_token_id`, if it is in the vocabulary.
    fn id(&self, key: &str) -> Option<usize> {
        match self.find(key) {
            Some(Value::Integer(id)) => usize::try_from(*id)
                .ok()
                .filter(|id| *id < self.tokens.len()),
            Some(_) | None => None,
        }
    }

    fn token(&self, key: &str) -> Option<&'a str> {
        let id = self.id(key)?;
        self.tokens.get(id).map(String::as_str)
    }

    #[expect(
        clippy::cast_possible_truncation,
        reason = "the cast saturates, and only small values have a meaning"
    )]
    fn kind(&self, id: usize) -> i64 {
        self.types.get(id).map_or(NORMAL, |kind| *kind as i64)
    }

    /// Tokens that are matched in a text before it is split: the special ones, and those that the model's authors added.
    fn added_tokens(&self) -> Vec<Json> {
        let named = [
            "bos_token_id",
            "eos_token_id",
            "eot_token_id",
            "padding_token_id",
        ]
        .map(|key| self.id(key));
        let added = self.tokens.iter().enumerate().filter_map(|(id, token)| {
            let kind = self.kind(id);
            let is_special = matches!(kind, CONTROL | UNKNOWN) || named.contains(&Some(id));
            if !is_special && kind != USER_DEFINED {
                return None;
            }
            Some(json!({
                "id": id, "content": token, "special": is_special,
                "single_word": false, "lstrip": false, "rstrip": self.takes_space(token),
                "normalized": false,
            }))
        });
        added.collect()
    }

    /// Whether an added token consumes the white space after it. Files do not say; it depends on the model, as in llama.cpp.
    fn takes_space(&self, token: &str) -> bool {
        let is_phi3 = self.architecture == "phi3" && self.model == "llama";
        is_phi3 && !PHI3_WITHOUT_SPACE.contains(&token)
    }

    /// Whether every prompt begins with `<s>` or its equivalent; the default is that of llama.cpp's `llama-vocab.cpp`.
    fn adds_bos(&self) -> bool {
        let by_default = self.model == "llama"
            || self
                .text("pre")
                .is_some_and(|pre| pre == "tekken" || bpe::is_llama3(pre));
        self.flag("add_bos_token").unwrap_or(by_default)
    }

    /// The step that adds special tokens around a prompt.
    fn post_processor(&self) -> Json {
        let bos = self.token("bos_token_id").filter(|_| self.adds_bos());
        let adds_eos = self.flag("add_eos_token").unwrap_or(false);
        let eos = self.token("eos_token_id").filter(|_| adds_eos);
        if bos.is_none() && eos.is_none() {
            return Json::Null;
        }
        let special = |token: &str| json!({"SpecialToken": {"id": token, "type_id": 0}});
        let sequence = |id: &str, type_id: u32| json!({"Sequence": {"id": id, "type_id": type_id}});
        let mut single: Vec<Json> = bos.map(special).into_iter().collect();
        single.push(sequence("A", 0));
        let mut pair = single.clone();
        pair.push(sequence("B", 1));
        single.extend(eos.map(special));
        pair.extend(eos.map(special));
        let tokens: serde_json::Map<String, Json> = [("bos_token_id", bos), ("eos_token_id", eos)]
            .into_iter()
            .filter_map(|(key, token)| {
                let (token, id) = (token?, self.id(key)?);
                let entry = json!({"id": token, "ids": [id], "tokens": [token]});
                Some((token.to_owned(), entry))
            })
            .collect();
        json!({"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": tokens})
    }

    fn tokenizer_json(&self) -> Result<Json, LoadError> {
        match self.model {
            "gpt2" => bpe::tokenizer(self),
            "llama" => spm::tokenizer(self),
            other => Err(LoadError::no_tokenizer(
                self.path,
                format!("its tokenizer is of the kind {other}, which is not supported"),
            )),
        }
    }

    /// Token ids that end an answer, the end-of-sequence token first.
    fn end_ids(&self) -> Vec<usize> {
        let mut ids: Vec<usize> = ["eos_token_id", "eot_token_id", "eom_token_id"]
            .iter()
            .filter_map(|key| self.id(key))
            .collect();
        let named = self.tokens.iter().enumerate().filter(|(id, token)| {
            END_TOKENS.contains(&token.as_str()) && matches!(self.kind(*id), CONTROL | USER_DEFINED)
        });
        for (id, _) in named {
            if !ids.contains(&id) {
                ids.push(id);
            }
        }
        let is = |id: usize, text: &str| self.tokens.get(id).is_some_and(|token| token == text);
        let is_harmony = HARMONY_ENDS
            .into_iter()
            .all(|end| ids.iter().any(|id| is(*id, end)));
        if is_harmony {
            ids.retain(|id| !is(*id, MESSAGE_END));
        }
        ids
    }

    fn tokenizer_config(&self, context_length: &Json) -> Json {
        let mut json = json!({
            "tokenizer_class": "PreTrainedTokenizerFast",
            "add_bos_token": self.adds_bos(),
            "clean_up_tokenization_spaces": false,
            "model_max_length": context_length,
            "bos_token": self.token("bos_token_id"),
            "eos_token": self.token("eos_token_id"),
            "unk_token": self.token("unknown_token_id"),
            "pad_token": self.token("padding_token_id"),
        });
        let template = |key: &str| match self.header.metadata.get(key) {
            Some(Value::Text(template)) => Some(template.as_str()),
            Some(_) | None => None,
        };
        let tool_use = template("tokenizer.chat_template.tool_use");
        let templates = match (template("tokenizer.chat_template"), tool_use) {
            (Some(chat), Some(tool_use)) => json!([
                {"name": "default", "template": chat},
                {"name": "tool_use", "template": tool_use},
            ]),
            (Some(chat), None) => chat.into(),
            (None, _) => return json,
        };
        if let Some(object) = json.as_object_mut() {
            object.insert("chat_template".into(), templates);
        }
        json
    }
}

/// The files of a GGUF model. `config` is the start of `config.json`. Without a tokenizer, the tokenizer files are left out.
///
/// # Errors
/// The kind of tokenizer is not supported.
pub(crate) fn files(metadata: Metadata<'_>, mut config: Json) -> Result<Vec<ModelFile>, LoadError> {
    let vocabulary = Vocabulary::new(metadata)?;
    let bos = vocabulary.as_ref().and_then(|it| it.id("bos_token_id"));
    let ends = vocabulary
        .as_ref()
        .map(Vocabulary::end_ids)
        .unwrap_or_default();
    if let Some(object) = config.as_object_mut() {
        if let Some(bos) = bos {
            object.insert("bos_token_id".into(), bos.into());
        }
        if !ends.is_empty() {
            object.insert("eos_token_id".into(), ends.as_slice().into());
        }
    }
    let mut files = vec![config_file(&config)];
    if let Some(vocabulary) = vocabulary {
        files.push(file("tokenizer.json", &vocabulary.tokenizer_json()?));
        let tokenizer_config = vocabulary.tokenizer_config(&config[CONTEXT_LENGTH]);
        files.push(file("tokenizer_config.json", &tokenizer_config));
        let generation = json!({
            "bos_token_id": bos,
            "eos_token_id": ends,
            "pad_token_id": vocabulary.id("padding_token_id"),
        });
        files.push(file("generation_config.json", &generation));
    }
    Ok(files)
}

/// `config.json` alone, for a model whose tokenizer comes from another source.
pub(crate) fn config_file(config: &Json) -> ModelFile {
    file("config.json", config)
}

fn file(name: &'static str, json: &Json) -> ModelFile {
    ModelFile {
        name,
        content: json.to_string().into_bytes(),
    }
}

/// The part of the configuration that a frontend reads, for a model that the decoder computes. The engine reads all of it from
/// the metadata.
pub(crate) fn computed(metadata: Metadata<'_>, config: &ModelConfig) -> Json {
    json!({
        "model_type": metadata.architecture,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        CONTEXT_LENGTH: config.context_length,
        "tie_word_embeddings": config.is_tied,
    })
}

/// The same for a model that other engines compute: the metadata that every architecture has.
///
/// # Errors
/// The context length is not a number.
pub(crate) fn said(metadata: Metadata<'_>, vocab_size: usize) -> Result<Json, LoadError> {
    Ok(json!({
        "model_type": metadata.architecture,
        "vocab_size": vocab_size,
        CONTEXT_LENGTH: metadata.size("context_length")?,
    }))
}
