//! GGUF files: [`GgufFile`] maps one, reads its configuration, and finds tensors by their names in `transformers`.

pub(crate) mod config;
pub(crate) mod header;
mod names;
pub(crate) mod parts;
pub(crate) mod tokenizer;

use std::path::{Path, PathBuf};

use super::map::MappedFile;
use super::place::{ExpertName, PartOf, Place, of_layer, row_order};
use super::quantize::floats;
use super::tensors::{Data, RawTensor, RowOrder};
use crate::error::LoadError;
use crate::model::config::{Experts, ModelConfig};
use config::{Metadata, SEED_OSS};
use header::{Header, SUPPORTED, type_name};

/// A mapped GGUF file, or all its parts.
#[derive(Debug)]
pub(crate) struct GgufFile {
    path: PathBuf,
    /// One file, or the parts in order.
    files: Vec<MappedFile>,
    header: Header,
    architecture: String,
}

impl GgufFile {
    /// Maps the file and its further parts, and reads their headers, but no tensor. The architecture may be unknown.
    pub(crate) fn open(path: &Path) -> Result<Self, LoadError> {
        let (files, header) = parts::open(path)?;
        let architecture = Metadata::new(path, &header)?.architecture.to_owned();
        Ok(Self {
            path: path.to_owned(),
            files,
            header,
            architecture,
        })
    }

    /// The decoder's configuration.
    ///
    /// # Errors
    /// The architecture or something in the metadata is not supported.
    pub(crate) fn config(&self) -> Result<ModelConfig, LoadError> {
        let metadata = self.metadata();
        metadata.check_architecture()?;
        let frequencies = self
            .tensor(config::frequencies_tensor(metadata)?)?
            .filter(|raw| raw.dtype.is_float())
            .map(|raw| floats(&raw));
        config::read(metadata, frequencies)
    }

    /// The file, or its parts.
    pub(crate) fn mapped(&self) -> &[MappedFile] {
        &self.files
    }

    pub(crate) fn metadata(&self) -> Metadata<'_> {
        Metadata {
            path: &self.path,
            header: &self.header,
            architecture: &self.architecture,
        }
    }

    /// The tensor that the file calls `name`, if it exists.
    pub(crate) fn tensor(&self, name: &str) -> Result<Option<RawTensor<'_>>, LoadError> {
        let Some((name, info)) = self.header.tensors.get_key_value(name) else {
            return Ok(None);
        };
        let dtype = info.dtype.map_err(|number| LoadError::UnsupportedDtype {
            path: self.path.clone(),
            name: name.clone(),
            found: type_name(number),
            supported: SUPPORTED,
        })?;
        let file = self.files.get(info.file);
        let data = file.and_then(|file| file.get(info.start..info.end));
        Ok(data.map(|data| RawTensor {
            name,
            dtype,
            shape: info.shape.clone(),
            data: Data::InFile(data),
            rows: RowOrder::Halves,
        }))
    }
}

/// The place of the tensor that `transformers` calls `name`, by architecture; `None` if files have no equivalent.
pub(crate) fn place(architecture: &str, name: &str, config: &ModelConfig) -> Option<Place> {
    if let (Some(expert), Some(experts)) = (ExpertName::parse(name), config.experts) {
        return expert_place(expert, experts, config);
    }
    let is_paired = matches!(
        architecture,
        "llama" | "smollm3" | "mistral3" | "granite" | "granitemoe"
    );
    let rows = row_order(name, config, is_paired);
    if let Some((layer, module, kind)) = of_layer(name)
        && (architecture == "phi3" || architecture == "glm4" && module.starts_with("mlp."))
        && let Some((own, part)) = names::FUSED.part(module, config)
    {
        return Some(Place {
            rows,
            part: Some(part),
            ..Place::whole(format!("blk.{layer}.{own}.{kind}"))
        });
    }
    let has_post_norms = config.block_norms.has_outputs() || architecture == SEED_OSS;
    let hidden = config.hidden_size;
    let is_shared_gate = of_layer(name).is_some_and(|(_, module, _)| module == names::SHARED_GATE);
    let gate = PartOf {
        whole: vec![hidden],
        first: 0,
        shape: vec![1, hidden],
        step: 1,
    };
    Some(Place {
        rows,
        part: is_shared_gate.then_some(gate),
        ..Place::whole(names::gguf_name(name, has_post_norms)?)
    })
}

/// An expert's matrix inside the matrix of all experts of the layer.
fn expert_place(name: ExpertName<'_>, experts: Experts, config: &ModelConfig) -> Option<Place> {
    let (hidden, wide) = (config.hidden_size, config.intermediate_size);
    let (rows, columns) = match name.projection {
        "down_proj" => (hidden, wide),
        _ => (wide, hidden),
    };
    let own = names::experts_name(name)?;
    Some(Place {
        part: Some(PartOf {
            whole: vec![experts.count, rows, columns],
            first: name.expert.checked_mul(rows)?,
            shape: vec![rows, columns],
            step: 1,
        }),
        ..Place::whole(own)
    })
}
