//! `--chat-template`: an operator's template in place of the model's own.

use std::path::Path;

use genset_backend_common::{EngineError, text_file::read_text};
use genset_frontend::text::ChatTemplate;
use genset_runtime::{ModelFolder, replace_chat_template};

use crate::args::RunConfig;

/// The largest template, in bytes; the longest templates of models are a tenth of it.
const MAX_TEMPLATE_BYTES: u64 = 1 << 20;

/// Publishes the template of the flag, if it is given, with the model's files, in place of the model's own.
///
/// # Errors
/// `InvalidArgument`, naming the file, if it cannot be read, is too large, or is not a template.
pub(super) fn apply(folder: &mut ModelFolder, config: &RunConfig) -> Result<(), EngineError> {
    let Some(path) = &config.engine_args.chat_template else {
        return Ok(());
    };
    let source = read(path).map_err(|problem| {
        let problem = format!("{}: {problem}", path.display());
        EngineError::invalid_argument("--chat-template", problem)
    })?;
    replace_chat_template(&mut folder.artifacts, source.into_bytes());
    Ok(())
}

/// Reads a template that compiles; returns what is wrong with the file otherwise.
fn read(path: &Path) -> Result<String, String> {
    let source = read_text(path, MAX_TEMPLATE_BYTES).map_err(|error| error.to_string())?;
    // The special tokens that it may name matter for rendering, not here.
    ChatTemplate::try_new(&source, None, None).map_err(|error| error.to_string())?;
    Ok(source)
}
