//! [`SafetensorsFolder`]: the tensors of a checkout folder, in one `model.safetensors` or in shards with an index.

use std::collections::{BTreeSet, HashMap};
use std::fs;
use std::path::{Path, PathBuf};

use safetensors::{Dtype, SafeTensors};
use serde::Deserialize;

use super::map::MappedFile;
use super::tensors::{Data, RawTensor, RowOrder};
use super::{PlannedTensor, TensorFiles, read_file};
use crate::error::LoadError;
use crate::model::WeightType;

const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";

/// The mapped files of a folder.
#[derive(Debug)]
pub(crate) struct SafetensorsFolder {
    path: PathBuf,
    files: Vec<MappedFile>,
    tensors: HashMap<String, Entry>,
}

#[derive(Debug)]
struct Entry {
    file: usize,
    /// The offset of its bytes in the file.
    start: usize,
    end: usize,
    dtype: Dtype,
    shape: Vec<usize>,
}

#[derive(Deserialize)]
struct Index {
    weight_map: HashMap<String, String>,
}

impl SafetensorsFolder {
    /// Maps the files and reads their headers, but no tensor.
    pub(crate) fn open(path: &Path) -> Result<Self, LoadError> {
        let mut folder = Self {
            path: path.to_owned(),
            files: Vec::new(),
            tensors: HashMap::new(),
        };
        for name in shards(path)? {
            folder.add(MappedFile::open(&path.join(name))?)?;
        }
        Ok(folder)
    }

    /// Gives the tensors of a multimodal model's language model the names that they have in a model without images.
    pub(crate) fn name_as_language_model(&mut self) {
        let tensors = std::mem::take(&mut self.tensors).into_iter();
        let renamed = tensors.map(|(name, entry)| (name.replacen("language_model.", "", 1), entry));
        self.tensors = renamed.collect();
    }

    fn add(&mut self, file: MappedFile) -> Result<(), LoadError> {
        let broken = |error: safetensors::SafeTensorError| LoadError::broken(file.path(), error);
        let parsed = SafeTensors::deserialize(&file).map_err(broken)?;
        let base = file.as_ptr().addr();
        for (name, view) in parsed.iter() {
            let start = view.data().as_ptr().addr() - base;
            let entry = Entry {
                file: self.files.len(),
                start,
                end: start + view.data().len(),
                dtype: view.dtype(),
                shape: view.shape().to_vec(),
            };
            self.tensors.insert(name.to_owned(), entry);
        }
        drop(parsed);
        self.files.push(file);
        Ok(())
    }

    /// The tensor of that name, of any type, if the folder has it.
    pub(crate) fn stored(&self, name: &str) -> Option<Stored<'_>> {
        let (name, entry) = self.tensors.get_key_value(name)?;
        let file = self.files.get(entry.file)?;
        let data = file.get(entry.start..entry.end)?;
        Some(Stored {
            name,
            dtype: entry.dtype,
            shape: &entry.shape,
            data,
        })
    }

    /// The error for a tensor whose type is not one of those `supported`.
    pub(crate) fn wrong_dtype(&self, stored: &Stored<'_>, supported: &'static str) -> LoadError {
        LoadError::UnsupportedDtype {
            path: self.path.clone(),
            name: stored.name.to_owned(),
            found: stored.dtype.to_string(),
            supported,
        }
    }
}

/// The folder's tensors of floats; as such it requires none.
impl TensorFiles for SafetensorsFolder {
    fn path(&self) -> &Path {
        &self.path
    }

    fn planned(&self) -> Vec<PlannedTensor> {
        Vec::new()
    }

    fn tensor(&self, name: &str) -> Result<Option<RawTensor<'_>>, LoadError> {
        let Some(stored) = self.stored(name) else {
            return Ok(None);
        };
        let dtype = float_dtype(stored.dtype)
            .ok_or_else(|| self.wrong_dtype(&stored, "F32, F16 or BF16"))?;
        Ok(Some(RawTensor {
            name: stored.name,
            dtype,
            shape: stored.shape.to_vec(),
            data: Data::InFile(stored.data),
            rows: RowOrder::Halves,
        }))
    }

    fn mapped(&self) -> &[MappedFile] {
        &self.files
    }
}

/// A tensor of any type, as stored in a file.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Stored<'a> {
    /// The name in the file.
    pub(crate) name: &'a str,
    pub(crate) dtype: Dtype,
    /// Rows first.
    pub(crate) shape: &'a [usize],
    /// The number of bytes matches `dtype` and `shape`.
    pub(crate) data: &'a [u8],
}

/// The weight type of plain numbers; `None` for any other type.
pub(crate) fn float_dtype(dtype: Dtype) -> Option<WeightType> {
    // Foreign and non-exhaustive: any other type is not one of these.
    if dtype == Dtype::F32 {
        Some(WeightType::F32)
    } else if dtype == Dtype::F16 {
        Some(WeightType::F16)
    } else if dtype == Dtype::BF16 {
        Some(WeightType::BF16)
    } else {
        None
    }
}

/// The names of the tensor files, all of which exist.
fn shards(path: &Path) -> Result<Vec<String>, LoadError> {
    let index = path.join(INDEX);
    if !index.exists() {
        return if path.join(SINGLE).exists() {
            Ok(vec![SINGLE.to_owned()])
        } else {
            Err(no_weights(path))
        };
    }
    let text = read_file(&index)?;
    let parsed: Index =
        serde_json::from_slice(&text).map_err(|error| LoadError::broken(&index, error))?;
    let names: BTreeSet<String> = parsed.weight_map.into_values().collect();
    // As in `transformers`: a model that was saved again to one file may have its old index beside it.
    if path.join(SINGLE).exists() && !names.contains(SINGLE) {
        tracing::warn!(
            folder = %path.display(),
            "{INDEX} is ignored: it does not name {SINGLE}, which is read"
        );
        return Ok(vec![SINGLE.to_owned()]);
    }
    if let Some(name) = names
        .iter()
        .find(|name| Path::new(name).components().count() != 1)
    {
        let problem = format!("it names {name:?}, which is no file of the folder");
        return Err(LoadError::broken(&index, problem));
    }
    let missing: Vec<&str> = names
        .iter()
        .filter(|name| !path.join(name).exists())
        .map(String::as_str)
        .collect();
    if missing.is_empty() && !names.is_empty() {
        return Ok(names.into_iter().collect());
    }
    let problem = format!(
        "{INDEX} names {} files, of which {} are not there: {}{}",
        names.len(),
        missing.len(),
        missing.join(", "),
        unfinished(path),
    );
    Err(LoadError::incomplete(path, problem))
}

fn no_weights(path: &Path) -> LoadError {
    let other = files_of(path).into_iter().find(|name| {
        [".bin", ".pth", ".pt"]
            .iter()
            .any(|ending| name.ends_with(ending))
    });
    let problem = match other {
        Some(name) => format!(
            "it has {name} but neither {SINGLE} nor {INDEX}; only safetensors are read, not pickled weights"
        ),
        None => format!("it has neither {SINGLE} nor {INDEX}{}", unfinished(path)),
    };
    LoadError::incomplete(path, problem)
}

/// Describes the traces of an unfinished or aborted download.
pub(crate) fn unfinished(path: &Path) -> String {
    let is_part = |name: &String| {
        [".incomplete", ".part", ".crdownload", ".aria2", ".tmp"]
            .iter()
            .any(|ending| name.ends_with(ending))
    };
    // The Hub's own client keeps unfinished files here.
    let cache = path.join(".cache/huggingface/download");
    let parts: Vec<String> = files_of(path)
        .into_iter()
        .chain(files_of(&cache))
        .filter(is_part)
        .collect();
    if parts.is_empty() {
        String::new()
    } else {
        format!(" (an unfinished download: {})", parts.join(", "))
    }
}

fn files_of(path: &Path) -> Vec<String> {
    let Ok(entries) = fs::read_dir(path) else {
        return Vec::new();
    };
    let mut names: Vec<String> = entries
        .filter_map(Result::ok)
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .collect();
    names.sort();
    names
}
