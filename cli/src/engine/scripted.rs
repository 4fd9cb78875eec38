//! The scripted engine with its script loaded, and with a model's tokenizer if it produces tokens.

use std::path::Path;
use std::sync::Arc;

use genset_backend_common::{EngineError, TokenId};
use genset_engine_scripted::{Script, ScriptedEngine, Vocabulary};
use genset_frontend::text::{TextTokenizer, TokenizerError};
use genset_runtime::ModelFolder;

/// The inputs of scripted engines, read once.
#[derive(Clone)]
pub(crate) struct Parts {
    script: Arc<Script>,
    /// With the maximum number of tokens of prompt and answer together; `None` for an engine that takes text.
    vocabulary: Option<(Arc<ModelVocabulary>, u32)>,
}

impl Parts {
    /// For an engine that takes and generates text.
    ///
    /// # Errors
    /// `InvalidArgument`, naming the script's file, line and key.
    pub(crate) fn of_text(script: &Path) -> Result<Self, EngineError> {
        let script = Script::load(script)
            .map_err(|error| EngineError::invalid_argument("--script", error))?;
        Ok(Self {
            script: Arc::new(script),
            vocabulary: None,
        })
    }

    /// For an engine that takes and generates a model's tokens.
    ///
    /// # Errors
    /// `InvalidArgument`, naming the script's file, line and key, or the model's file.
    pub(crate) fn of_tokens(
        script: &Path,
        folder: &ModelFolder,
        context_length_tokens: u32,
    ) -> Result<Self, EngineError> {
        let vocabulary = Arc::new(ModelVocabulary::try_new(folder)?);
        Ok(Self {
            vocabulary: Some((vocabulary, context_length_tokens)),
            ..Self::of_text(script)?
        })
    }

    /// An engine that is not started yet.
    pub(crate) fn engine(&self) -> ScriptedEngine {
        let engine = ScriptedEngine::from_script(Arc::clone(&self.script));
        match &self.vocabulary {
            Some((vocabulary, context)) => engine.with_vocabulary(vocabulary.clone(), *context),
            None => engine,
        }
    }
}

/// A model's tokens, as the frontend reads and writes them.
struct ModelVocabulary {
    tokenizer: TextTokenizer,
    size: u32,
}

impl ModelVocabulary {
    fn try_new(folder: &ModelFolder) -> Result<Self, EngineError> {
        let tokenizer = tokenizer(folder)?;
        // Ids may have gaps; then the configuration's number is the larger one.
        let tokens = u32::try_from(tokenizer.vocab_size()).unwrap_or(u32::MAX);
        let size = tokens.max(folder.vocab_size.unwrap_or(0));
        Ok(Self { tokenizer, size })
    }
}

impl Vocabulary for ModelVocabulary {
    fn size(&self) -> u32 {
        self.size
    }

    fn encode(&self, text: &str) -> Result<Vec<TokenId>, EngineError> {
        self.tokenizer.encode(text, false).map_err(refused)
    }

    fn decode(&self, tokens: &[TokenId]) -> Result<String, EngineError> {
        self.tokenizer.decode_all(tokens, false).map_err(refused)
    }
}

/// A model's tokenizer.
///
/// # Errors
/// `InvalidArgument` if the file is not a tokenizer.
pub(crate) fn tokenizer(folder: &ModelFolder) -> Result<TextTokenizer, EngineError> {
    let mut files = folder.artifacts.iter();
    let bytes = files
        .find(|file| file.reference.name == "tokenizer.json")
        .map_or(&[][..], |file| &file.content);
    TextTokenizer::from_bytes(bytes).map_err(refused)
}

fn refused(error: TokenizerError) -> EngineError {
    EngineError::invalid_argument("tokenizer.json", &error).with_source(error)
}
