//! `model.safetensors`: the weights in bf16, as Hugging Face's tools read them.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use anyhow::Context as _;
use candle_core::{DType, Device, Tensor};

use crate::model::Model;

/// The file's name in the model's folder.
pub(crate) const FILE: &str = "model.safetensors";

/// Weights by the names of a Hugging Face checkpoint.
pub(crate) type Weights = HashMap<String, Tensor>;

/// The model's weights, rounded to bf16.
///
/// # Errors
/// When candle cannot convert them.
pub(crate) fn rounded(model: &Model) -> anyhow::Result<Weights> {
    let round = |(name, var): &(String, candle_core::Var)| {
        Ok((
            name.clone(),
            var.as_detached_tensor().to_dtype(DType::BF16)?,
        ))
    };
    model.vars().iter().map(round).collect()
}

/// The content of the file: the same weights give the same bytes.
///
/// # Errors
/// When the weights cannot be written in this form.
pub(crate) fn to_bytes(weights: &Weights) -> anyhow::Result<Vec<u8>> {
    let sorted: BTreeMap<&String, &Tensor> = weights.iter().collect();
    let metadata = HashMap::from([("format".to_owned(), "pt".to_owned())]);
    safetensors::serialize(sorted, Some(metadata)).context("cannot write safetensors")
}

/// Reads the weights from the model's folder.
///
/// # Errors
/// When the file is missing or damaged.
pub(crate) fn read(model: &Path) -> anyhow::Result<Weights> {
    let path = model.join(FILE);
    candle_core::safetensors::load(&path, &Device::Cpu)
        .with_context(|| format!("cannot read {}", path.display()))
}
