//! [`ModelFolder`]: the files of a local model checkout that a worker publishes, read and checked but not interpreted.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use genset_backend_common::card::{Artifact, MAX_ARTIFACT_BYTES};
use serde_json::Value;

/// The chat template for all chats.
const CHAT_TEMPLATE: &str = "chat_template.jinja";
/// The same in an older checkout.
const CHAT_TEMPLATE_JSON: &str = "chat_template.json";
/// The chat template for chats with tools.
const TOOL_USE_TEMPLATE: &str = "additional_chat_templates/tool_use.jinja";

/// Files a frontend uses, and whether a model needs them.
const FILES: [(&str, bool); 8] = [
    ("config.json", true),
    ("tokenizer.json", true),
    ("tokenizer_config.json", true),
    ("generation_config.json", false),
    (CHAT_TEMPLATE, false),
    (CHAT_TEMPLATE_JSON, false),
    (TOOL_USE_TEMPLATE, false),
    ("config_sentence_transformers.json", false),
];

/// A model's files and the facts about it that a worker needs.
#[derive(Debug, Clone)]
pub struct ModelFolder {
    /// The name clients use by default: the folder's name.
    pub name: String,
    /// The files, ready to publish.
    pub artifacts: Vec<Artifact>,
    /// `max_position_embeddings` of `config.json`, or of the language model in it.
    pub context_length_tokens: Option<u32>,
    /// `vocab_size` of `config.json`, or of the language model in it.
    pub vocab_size: Option<u32>,
}

/// Why a folder is not a model.
#[derive(Debug, thiserror::Error)]
pub enum ModelFolderError {
    /// The path is not a folder.
    #[error("{} is not a folder; give the folder of a local model checkout, with {}", path.display(), required())]
    NotAFolder {
        /// The path.
        path: PathBuf,
    },
    /// A required file is not there.
    #[error("{} has no {file}; a model folder needs {}", path.display(), required())]
    Missing {
        /// The folder.
        path: PathBuf,
        /// The file.
        file: &'static str,
    },
    /// A file cannot be read.
    #[error("cannot read {}: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// A file is larger than any tokenizer file.
    #[error("{} has {size} bytes, over the limit of {MAX_ARTIFACT_BYTES}; is it the right file?", path.display())]
    TooLarge {
        /// The file.
        path: PathBuf,
        /// Its size.
        size: u64,
    },
    /// A file is not JSON.
    #[error("{} is not valid JSON ({source}); was its download cut short?", path.display())]
    NotJson {
        /// The file.
        path: PathBuf,
        /// The position of the error.
        source: serde_json::Error,
    },
}

/// Puts a chat template in place of a model's own: all those that are files.
///
/// # Examples
/// ```
/// use genset_backend_common::card::Artifact;
/// use genset_runtime::replace_chat_template;
///
/// let mut artifacts = vec![Artifact::new("chat_template.json", b"{}".to_vec())];
/// replace_chat_template(&mut artifacts, b"{{ messages }}".to_vec());
/// assert_eq!(artifacts.len(), 1);
/// assert_eq!(artifacts[0].reference.name, "chat_template.jinja");
/// ```
pub fn replace_chat_template(artifacts: &mut Vec<Artifact>, template: Vec<u8>) {
    let own = [CHAT_TEMPLATE, CHAT_TEMPLATE_JSON, TOOL_USE_TEMPLATE];
    artifacts.retain(|artifact| !own.contains(&artifact.reference.name.as_str()));
    artifacts.push(Artifact::new(CHAT_TEMPLATE, template));
}

fn required() -> String {
    let names: Vec<&str> = FILES
        .iter()
        .filter(|(_, is_required)| *is_required)
        .map(|(name, _)| *name)
        .collect();
    names.join(", ")
}

/// The keys under which configs of multimodal models hold the config of their language model.
const LANGUAGE_MODELS: [&str; 4] = [
    "text_config",
    "llm_config",
    "language_config",
    "thinker_config",
];

/// A number of a config: its own, or that of its language model.
fn number(config: &Value, name: &str) -> Option<u32> {
    let own = config.get(name).and_then(Value::as_u64);
    own.and_then(|own| u32::try_from(own).ok())
        .or_else(|| {
            LANGUAGE_MODELS
                .iter()
                .find_map(|part| number(config.get(part)?, name))
        })
        .or_else(|| usual(config, name))
}

/// Values that the configs of some kinds of models omit.
///
/// # Source
/// The defaults of `transformers`: `Gemma3TextConfig`.
fn usual(config: &Value, name: &str) -> Option<u32> {
    match (config.get("model_type")?.as_str()?, name) {
        ("gemma3_text", "max_position_embeddings") => Some(131_072),
        ("gemma3_text", "vocab_size") => Some(262_208),
        _ => None,
    }
}

impl ModelFolder {
    /// Reads a local checkout.
    ///
    /// # Errors
    /// [`ModelFolderError`], naming the file and what was expected.
    pub fn load(path: &Path) -> Result<Self, ModelFolderError> {
        if !path.is_dir() {
            return Err(ModelFolderError::NotAFolder {
                path: path.to_owned(),
            });
        }
        let mut files = Vec::new();
        for (file, is_required) in FILES {
            match read(&path.join(file))? {
                Some(content) => files.push((file, content)),
                None if is_required => {
                    return Err(ModelFolderError::Missing {
                        path: path.to_owned(),
                        file,
                    });
                }
                None => {}
            }
        }
        let full = path.canonicalize().unwrap_or_else(|_| path.to_owned());
        let name = full.file_name().map_or_else(
            || "model".into(),
            |name| name.to_string_lossy().into_owned(),
        );
        Self::from_files(name, path, files)
    }

    /// Uses files that are in memory already; errors name `origin` as their path.
    ///
    /// # Errors
    /// [`ModelFolderError::NotJson`].
    pub fn from_files(
        name: impl Into<String>,
        origin: &Path,
        files: impl IntoIterator<Item = (&'static str, Vec<u8>)>,
    ) -> Result<Self, ModelFolderError> {
        let mut folder = Self {
            name: name.into(),
            artifacts: Vec::new(),
            context_length_tokens: None,
            vocab_size: None,
        };
        for (file, content) in files {
            let not_json = |source| ModelFolderError::NotJson {
                path: origin.join(file),
                source,
            };
            if file == "config.json" {
                let config: Value = serde_json::from_slice(&content).map_err(not_json)?;
                folder.context_length_tokens = number(&config, "max_position_embeddings");
                folder.vocab_size = number(&config, "vocab_size");
            } else if file.ends_with(".json") {
                serde_json::from_slice::<serde::de::IgnoredAny>(&content).map_err(not_json)?;
            }
            folder.artifacts.push(Artifact::new(file, content));
        }
        Ok(folder)
    }
}

fn read(path: &Path) -> Result<Option<Vec<u8>>, ModelFolderError> {
    let read_error = |source| ModelFolderError::Read {
        path: path.to_owned(),
        source,
    };
    match fs::metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(read_error(error)),
        Ok(meta) if meta.len() > MAX_ARTIFACT_BYTES => Err(ModelFolderError::TooLarge {
            path: path.to_owned(),
            size: meta.len(),
        }),
        Ok(meta) if !meta.is_file() => {
            // A link may lead to a pipe, or to a device without an end.
            Err(read_error(io::Error::other("it is no regular file")))
        }
        Ok(_) => fs::read(path).map(Some).map_err(read_error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folder(files: &[(&str, &str)]) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        for (name, content) in files {
            fs::write(dir.path().join(name), content).unwrap();
        }
        dir
    }

    #[test]
    fn a_missing_file_is_named_with_what_was_expected() {
        let dir = folder(&[("config.json", "{}")]);
        let error = ModelFolder::load(dir.path()).unwrap_err().to_string();
        assert!(
            error.contains("has no tokenizer.json") && error.contains("tokenizer_config.json"),
            "{error}"
        );
        let error = ModelFolder::load(&dir.path().join("nowhere"))
            .unwrap_err()
            .to_string();
        assert!(error.contains("nowhere is not a folder"), "{error}");
    }

    #[test]
    fn a_broken_file_is_named() {
        let dir = folder(&[
            ("config.json", "{}"),
            ("tokenizer.json", "{\"a\": "),
            ("tokenizer_config.json", "{}"),
        ]);
        let error = ModelFolder::load(dir.path()).unwrap_err().to_string();
        assert!(
            error.contains("tokenizer.json is not valid JSON"),
            "{error}"
        );
    }

    #[test]
    fn what_is_no_regular_file_is_not_read() {
        let dir = folder(&[("tokenizer.json", "{}"), ("tokenizer_config.json", "{}")]);
        std::os::unix::fs::symlink("/dev/null", dir.path().join("config.json")).unwrap();
        let error = ModelFolder::load(dir.path()).unwrap_err().to_string();
        assert!(
            error.contains("config.json: it is no regular file"),
            "{error}"
        );
    }

    #[test]
    fn every_chat_template_is_published() {
        let templates = [CHAT_TEMPLATE, CHAT_TEMPLATE_JSON, TOOL_USE_TEMPLATE];
        let dir = folder(&[
            ("config.json", "{}"),
            ("tokenizer.json", "{}"),
            ("tokenizer_config.json", "{}"),
        ]);
        fs::create_dir(dir.path().join("additional_chat_templates")).unwrap();
        for name in templates {
            fs::write(dir.path().join(name), "{}").unwrap();
        }
        let mut artifacts = ModelFolder::load(dir.path()).unwrap().artifacts;
        let has = |artifacts: &[Artifact], name: &str| {
            artifacts
                .iter()
                .any(|artifact| artifact.reference.name == name)
        };
        assert_eq!(templates.map(|name| has(&artifacts, name)), [true; 3]);
        replace_chat_template(&mut artifacts, b"x".to_vec());
        let left = templates.map(|name| has(&artifacts, name));
        assert_eq!(left, [true, false, false]);
    }

    /// The context length and vocabulary size of a folder with this config.
    fn facts(config: &str) -> (Option<u32>, Option<u32>) {
        let dir = folder(&[
            ("config.json", config),
            ("tokenizer.json", "{}"),
            ("tokenizer_config.json", "{}"),
        ]);
        let model = ModelFolder::load(dir.path()).unwrap();
        assert_eq!(model.artifacts.len(), 3);
        (model.context_length_tokens, model.vocab_size)
    }

    #[test]
    fn facts_come_from_the_config() {
        let config = r#"{"max_position_embeddings": 2048, "vocab_size": 7}"#;
        assert_eq!(facts(config), (Some(2048), Some(7)));
        for config in ["{}", "[]", r#"{"vocab_size": "many"}"#] {
            assert_eq!(facts(config), (None, None), "{config}");
        }
    }

    #[test]
    fn a_model_of_more_than_text_has_the_facts_of_its_language_model() {
        let language = r#"{"max_position_embeddings": 2048, "vocab_size": 7}"#;
        for part in ["text_config", "llm_config", "language_config"] {
            let config =
                format!(r#"{{"vision_config": {{"vocab_size": 1}}, "{part}": {language}}}"#);
            assert_eq!(facts(&config), (Some(2048), Some(7)), "{part}");
            // The top level takes precedence.
            let config = format!(r#"{{"vocab_size": 9, "{part}": {language}}}"#);
            assert_eq!(facts(&config), (Some(2048), Some(9)), "{part}");
            let nothing = format!(r#"{{"{part}": null}}"#);
            assert_eq!(facts(&nothing), (None, None), "{part}");
        }
        let deep = format!(r#"{{"thinker_config": {{"text_config": {language}}}}}"#);
        assert_eq!(facts(&deep), (Some(2048), Some(7)));
        let gemma = r#"{"model_type": "gemma3", "text_config": {"model_type": "gemma3_text"}}"#;
        assert_eq!(facts(gemma), (Some(131_072), Some(262_208)));
    }
}
