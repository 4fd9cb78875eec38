//! The prompts of a batch: the lines of a file, or of the files of a folder.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use genset_backend_common::EngineError;
use genset_frontend::batch::{BatchInput, BatchLine};
use serde::Deserialize;
use serde_json::{Map, Value};

use super::super::question::OWN_FIELDS;
use super::{OUTPUT, refused};

/// The prompts at a path.
#[derive(Debug)]
pub(super) struct Prompts {
    folder: PathBuf,
    input: BatchInput,
    name_no_model: bool,
}

/// A line of the input.
#[derive(Debug)]
pub(super) enum Prompt {
    /// The text to ask, and the request's other fields, such as `max_tokens`.
    Question(String, Map<String, Value>),
    /// A line with a `custom_id`: a request of OpenAI's batch format.
    Request(BatchLine),
    /// The error of an invalid line.
    Bad(EngineError),
}

/// The field of a line that must be unique.
#[derive(Deserialize)]
struct Named {
    custom_id: String,
}

impl Prompts {
    /// Finds the non-blank lines of a file, or of a folder's `*.jsonl` files in the order of their names.
    ///
    /// # Errors
    /// When the file does not exist, the folder has none, or one cannot be read; when two requests have the same `custom_id`.
    pub(super) fn open(path: &Path) -> Result<Self, EngineError> {
        let (folder, paths) = files_at(path)?;
        let mut names = HashMap::new();
        let mut name_no_model = false;
        let input = BatchInput::open(paths, |at, bytes| {
            let Ok(Named { custom_id }) = serde_json::from_slice(bytes) else {
                name_no_model |= is_question(bytes);
                return Ok(());
            };
            match names.insert(custom_id, at.to_string()) {
                Some(first) => Err(at.error(format!("has the custom_id of {first}"))),
                None => Ok(()),
            }
        });
        Ok(Self {
            folder,
            input: input.map_err(refused)?,
            name_no_model,
        })
    }

    /// Whether any of the lines is a prompt that names no model. Requests name theirs.
    pub(super) fn name_no_model(&self) -> bool {
        self.name_no_model
    }

    /// The folder of the input, and of the output.
    pub(super) fn folder(&self) -> &Path {
        &self.folder
    }

    /// The number of prompts.
    pub(super) fn count(&self) -> usize {
        self.input.count()
    }

    /// A fingerprint that distinguishes this input from others.
    pub(super) fn fingerprint(&self) -> &str {
        self.input.fingerprint()
    }

    /// Reads the prompt with this index, from 0.
    ///
    /// # Errors
    /// When the file can no longer be read.
    pub(super) fn read(&mut self, index: usize) -> Result<Prompt, EngineError> {
        let (at, bytes) = self.input.read(index).map_err(refused)?;
        let bad = |problem: String| refused(at.error(problem));
        let mut fields = match serde_json::from_slice::<Map<String, Value>>(bytes.trim_ascii_end())
        {
            Err(error) => {
                // `at` has the file and the line.
                let text = error.to_string();
                let problem = text.replace(" at line 1 column ", " at column ");
                return Ok(Prompt::Bad(bad(format!("is no JSON object: {problem}"))));
            }
            Ok(fields) => fields,
        };
        if fields.contains_key("custom_id") {
            let line = BatchLine::parse(&bytes);
            let line = line.map(Prompt::Request);
            return Ok(line.unwrap_or_else(|error| Prompt::Bad(bad(error.to_string()))));
        }
        Ok(match fields.remove("text") {
            Some(Value::String(text)) => {
                let own = OWN_FIELDS.iter().find(|name| fields.contains_key(**name));
                match own {
                    None => Prompt::Question(text, fields),
                    Some(name) => {
                        let problem = format!(
                            "{name:?} cannot stand beside \"text\"; set it in a request of OpenAI's batch format, with \"custom_id\""
                        );
                        Prompt::Bad(bad(problem))
                    }
                }
            }
            _ => {
                let problem = "needs \"text\", a string, as in {\"text\": \"Hello\"}; or it is a request \
                               of OpenAI's batch format, with \"custom_id\"";
                Prompt::Bad(bad(problem.into()))
            }
        })
    }
}

/// Whether a line is a text to ask. A line that is neither a text nor a request is not sent to any model.
fn is_question(line: &[u8]) -> bool {
    let fields = serde_json::from_slice::<Map<String, Value>>(line);
    fields.is_ok_and(|fields| {
        let has_text = fields.get("text").is_some_and(Value::is_string);
        has_text && !fields.contains_key("custom_id")
    })
}

fn unreadable(path: &Path, error: &std::io::Error) -> EngineError {
    refused(format!("{} cannot be read: {error}", path.display()))
}

/// The folder of an input, and its files.
///
/// # Errors
/// When the file does not exist, the folder has none, or the folder cannot be read.
pub(super) fn files_at(path: &Path) -> Result<(PathBuf, Vec<PathBuf>), EngineError> {
    let is_output = |path: &Path| path.file_name().is_some_and(|name| name == OUTPUT);
    if path.is_file() {
        if is_output(path) {
            let problem = format!(
                "{} is the file for the answers; give the file of prompts another name",
                path.display()
            );
            return Err(EngineError::invalid_argument("in", problem));
        }
        let folder = path.parent().unwrap_or(Path::new(""));
        return Ok((folder.to_owned(), vec![path.to_owned()]));
    }
    if path.exists() && !path.is_dir() {
        let problem = format!(
            "{} is neither a file nor a folder; a batch is read more than once, so write what comes from it into a file",
            path.display()
        );
        return Err(refused(problem));
    }
    let entries = std::fs::read_dir(path).map_err(|error| unreadable(path, &error))?;
    let mut files = Vec::new();
    for entry in entries {
        let file = entry.map_err(|error| unreadable(path, &error))?.path();
        let is_jsonl = file
            .extension()
            .is_some_and(|extension| extension == "jsonl");
        if is_jsonl && !is_output(&file) && file.is_file() {
            files.push(file);
        }
    }
    files.sort();
    if files.is_empty() {
        let problem = format!(
            "{}: the folder has no file that ends in .jsonl",
            path.display()
        );
        return Err(EngineError::invalid_argument("in", problem));
    }
    Ok((path.to_owned(), files))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn open(lines: &str) -> Prompts {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("prompts.jsonl");
        std::fs::write(&path, lines).unwrap();
        Prompts::open(&path).unwrap()
    }

    #[test]
    fn a_field_of_which_the_line_could_not_show_the_answer_is_refused() {
        for name in OWN_FIELDS {
            let line = format!("{{\"text\": \"Hello\", \"{name}\": 3}}\n");
            let Prompt::Bad(error) = open(&line).read(0).unwrap() else {
                panic!("{name} is taken");
            };
            let error = error.to_string();
            assert!(
                error.contains(name) && error.contains("custom_id"),
                "{error}"
            );
        }
    }

    #[test]
    fn a_line_that_is_no_object_has_the_column_of_its_fault() {
        let Prompt::Bad(error) = open("\n{\n").read(0).unwrap() else {
            panic!("half an object is taken");
        };
        let error = error.to_string();
        let expected = "is no JSON object: EOF while parsing an object at column 1";
        assert!(error.contains(expected), "{error}");
    }

    #[test]
    fn requests_name_their_model_and_prompts_do_not() {
        let request = "{\"custom_id\": \"a\", \"url\": \"/v1/completions\", \"body\": {}}\n";
        let prompt = "{\"text\": \"Hello\"}\n";
        for (line, expected) in [
            ("\n", false),
            (prompt, true),
            ("{\"text\": \"Hel\n", false),
            ("{\"text\": 1}\n", false),
            ("{\"custom_id\": 1, \"text\": \"Hello\"}\n", false),
        ] {
            let lines = [request, line].concat();
            assert_eq!(open(&lines).name_no_model(), expected, "{line}");
        }
    }
}
