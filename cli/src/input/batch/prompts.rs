//! The prompts of a batch: the lines of a file, or of the files of a folder. Where each begins is kept, and no more of them.

use std::collections::HashMap;
use std::fs::File;
use std::io::{BufRead, BufReader, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use genset_backend_common::EngineError;
use serde::Deserialize;
use serde_json::{Map, Value};

use super::OUTPUT;

/// The longest line, in bytes.
const MAX_LINE_BYTES: u64 = 16 << 20;

/// The prompts at a path.
#[derive(Debug)]
pub(super) struct Prompts {
    folder: PathBuf,
    files: Vec<InputFile>,
    places: Vec<Place>,
    fingerprint: String,
}

#[derive(Debug)]
struct InputFile {
    path: PathBuf,
    reader: BufReader<File>,
}

/// Where a line begins.
#[derive(Debug, Clone, Copy)]
struct Place {
    file: usize,
    line: usize,
    offset: u64,
}

/// A line of the input.
#[derive(Debug)]
pub(super) enum Prompt {
    /// What is asked, and the request's other fields, such as `max_tokens`.
    Question(String, Map<String, Value>),
    /// A line with a `custom_id`: a request of OpenAI's batch format.
    Request(Map<String, Value>),
    /// What is wrong with the line.
    Bad(EngineError),
}

/// The part of a line that other lines must not have.
#[derive(Deserialize)]
struct Named {
    custom_id: String,
}

impl Prompts {
    /// Finds the lines that are not blank in a file, or in a folder's `*.jsonl` files in the order of their names.
    ///
    /// # Errors
    /// When there is no such file, none in the folder, or one that cannot be read.
    pub(super) fn open(path: &Path) -> Result<Self, EngineError> {
        let (folder, paths) = files_at(path)?;
        let mut prompts = Self {
            folder,
            files: Vec::new(),
            places: Vec::new(),
            fingerprint: String::new(),
        };
        let mut hash = blake3::Hasher::new();
        let mut names = HashMap::new();
        for path in paths {
            let file = File::open(&path).map_err(|error| unreadable(&path, &error))?;
            let mut file = InputFile {
                path,
                reader: BufReader::new(file),
            };
            prompts.find_lines(&mut file, &mut hash, &mut names)?;
            prompts.files.push(file);
        }
        prompts.fingerprint = hash.finalize().to_hex().to_string();
        Ok(prompts)
    }

    fn find_lines(
        &mut self,
        file: &mut InputFile,
        hash: &mut blake3::Hasher,
        names: &mut HashMap<String, String>,
    ) -> Result<(), EngineError> {
        let (mut offset, mut line) = (0, 1);
        loop {
            let bytes = file.read_line(line)?;
            if bytes.is_empty() {
                return Ok(());
            }
            hash.update(&bytes);
            if let Ok(Named { custom_id }) = serde_json::from_slice(&bytes) {
                let place = format!("{} line {line}", file.path.display());
                if let Some(first) = names.insert(custom_id, place.clone()) {
                    let problem = format!("{place}: has the custom_id of {first}");
                    return Err(EngineError::invalid_argument("in", problem));
                }
            }
            if !bytes.trim_ascii().is_empty() {
                self.places.push(Place {
                    file: self.files.len(),
                    line,
                    offset,
                });
            }
            offset += bytes.len() as u64;
            line += 1;
        }
    }

    /// The folder of the input, and of the output.
    pub(super) fn folder(&self) -> &Path {
        &self.folder
    }

    /// How many prompts there are.
    pub(super) fn count(&self) -> usize {
        self.places.len()
    }

    /// What tells this input from others: a hash of all of its bytes.
    pub(super) fn fingerprint(&self) -> &str {
        &self.fingerprint
    }

    /// The prompt of this number, from 0.
    ///
    /// # Errors
    /// When the file cannot be read any more.
    pub(super) fn read(&mut self, index: usize) -> Result<Prompt, EngineError> {
        let place = self.places.get(index).copied();
        let found = place.and_then(|place| Some((place, self.files.get_mut(place.file)?)));
        let Some((place, file)) = found else {
            return Err(EngineError::internal(format!("there is no prompt {index}")));
        };
        let sought = file.reader.seek(SeekFrom::Start(place.offset));
        sought.map_err(|error| unreadable(&file.path, &error))?;
        let bytes = file.read_line(place.line)?;
        let bad = |problem: String| {
            let problem = format!("{} line {}: {problem}", file.path.display(), place.line);
            EngineError::invalid_argument("in", problem)
        };
        let mut fields = match serde_json::from_slice::<Map<String, Value>>(&bytes) {
            Err(error) => return Ok(Prompt::Bad(bad(format!("is no JSON object: {error}")))),
            Ok(fields) => fields,
        };
        if fields.contains_key("custom_id") {
            return Ok(Prompt::Request(fields));
        }
        Ok(match fields.remove("text") {
            Some(Value::String(text)) => Prompt::Question(text, fields),
            _ => {
                let problem = "needs \"text\", a string, as in {\"text\": \"Hello\"}; or it is a request \
                               of OpenAI's batch format, with \"custom_id\"";
                Prompt::Bad(bad(problem.into()))
            }
        })
    }
}

impl InputFile {
    /// The next line with its end; nothing at the end of the file.
    fn read_line(&mut self, line: usize) -> Result<Vec<u8>, EngineError> {
        let mut bytes = Vec::new();
        let mut limited = self.reader.by_ref().take(MAX_LINE_BYTES + 1);
        let read = limited.read_until(b'\n', &mut bytes);
        read.map_err(|error| unreadable(&self.path, &error))?;
        if bytes.len() as u64 > MAX_LINE_BYTES {
            let path = self.path.display();
            let problem =
                format!("{path} line {line}: is over the limit of {MAX_LINE_BYTES} bytes");
            return Err(EngineError::invalid_argument("in", problem));
        }
        Ok(bytes)
    }
}

fn unreadable(path: &Path, error: &std::io::Error) -> EngineError {
    let problem = format!("{} cannot be read: {error}", path.display());
    EngineError::invalid_argument("in", problem)
}

/// The folder of an input, and its files.
fn files_at(path: &Path) -> Result<(PathBuf, Vec<PathBuf>), EngineError> {
    let is_output = |path: &Path| path.file_name().is_some_and(|name| name == OUTPUT);
    if path.is_file() {
        if is_output(path) {
            let problem = format!(
                "{}: the answers go into this file; give the prompts another",
                path.display()
            );
            return Err(EngineError::invalid_argument("in", problem));
        }
        let folder = path.parent().unwrap_or(Path::new(""));
        return Ok((folder.to_owned(), vec![path.to_owned()]));
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
