//! GGUF files: [`GgufFile`] maps one, says what model it is, and finds tensors by the names that `transformers` has for them.

pub(crate) mod config;
pub(crate) mod header;
mod names;
pub(crate) mod tokenizer;
pub(crate) mod write;

use std::path::Path;

use super::map::MappedFile;
use super::quantize::floats;
use super::tensors::{RawTensor, RowOrder};
use crate::error::LoadError;
use crate::model::config::ModelConfig;
use config::Metadata;
use header::{Header, Kind, SUPPORTED};

/// A mapped GGUF file.
#[derive(Debug)]
pub(crate) struct GgufFile {
    file: MappedFile,
    header: Header,
    architecture: String,
    /// Of its model; says how its norms are called.
    has_post_norms: bool,
    head_dim: usize,
}

impl GgufFile {
    /// Maps the file and reads its header; no tensor is read.
    pub(crate) fn open(path: &Path) -> Result<(Self, ModelConfig), LoadError> {
        let file = MappedFile::open(path)?;
        let header = Header::parse(&file).map_err(|problem| LoadError::broken(path, problem))?;
        let architecture = Metadata::new(path, &header)?.architecture.to_owned();
        let mut opened = Self {
            file,
            header,
            architecture,
            has_post_norms: false,
            head_dim: 2,
        };
        let frequencies = opened
            .by_own_name(config::frequencies_tensor())?
            .filter(|raw| raw.dtype.is_float())
            .map(|raw| floats(&raw));
        let config = config::read(opened.metadata(), frequencies)?;
        opened.has_post_norms = config.has_post_norms;
        opened.head_dim = config.head_dim;
        Ok((opened, config))
    }

    pub(crate) fn metadata(&self) -> Metadata<'_> {
        Metadata {
            path: self.file.path(),
            header: &self.header,
            architecture: &self.architecture,
        }
    }

    /// What the file calls a tensor.
    pub(crate) fn name(&self, name: &str) -> Option<String> {
        names::gguf_name(name, self.has_post_norms)
    }

    /// The tensor that `transformers` calls `name`, if the file has it.
    pub(crate) fn tensor(&self, name: &str) -> Result<Option<RawTensor<'_>>, LoadError> {
        let Some(own) = self.name(name) else {
            return Ok(None);
        };
        let Some(mut raw) = self.by_own_name(&own)? else {
            return Ok(None);
        };
        raw.rows = row_order(&self.architecture, name, self.head_dim);
        // A tensor whose rows are no whole heads has the wrong shape, which is told when it is compared.
        if let RowOrder::Pairs { head_dim } = raw.rows
            && !raw
                .shape
                .first()
                .is_some_and(|rows| rows.is_multiple_of(head_dim))
        {
            raw.rows = RowOrder::Halves;
        }
        Ok(Some(raw))
    }

    fn by_own_name(&self, name: &str) -> Result<Option<RawTensor<'_>>, LoadError> {
        let Some((name, info)) = self.header.tensors.get_key_value(name) else {
            return Ok(None);
        };
        let dtype = match info.kind {
            Kind::Known(dtype) => dtype,
            Kind::Unknown(_) => {
                return Err(LoadError::UnsupportedDtype {
                    path: self.file.path().to_owned(),
                    name: name.clone(),
                    found: info.kind.name(),
                    supported: SUPPORTED,
                });
            }
        };
        Ok(self.file.get(info.start..info.end).map(|data| RawTensor {
            name,
            dtype,
            shape: &info.shape,
            data,
            rows: RowOrder::Halves,
        }))
    }
}

/// How files of an architecture have the rows of a tensor: llama's have those of queries and keys in pairs.
pub(crate) fn row_order(architecture: &str, name: &str, head_dim: usize) -> RowOrder {
    let is_rotated = [".q_proj.", ".k_proj."]
        .iter()
        .any(|part| name.contains(part));
    if architecture == "llama" && is_rotated {
        RowOrder::Pairs { head_dim }
    } else {
        RowOrder::Halves
    }
}
