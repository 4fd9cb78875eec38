//! `model.safetensors`: the weights in bf16, as Hugging Face's tools read them.

use std::collections::{BTreeMap, HashMap};

use anyhow::Context as _;
use candle_core::{DType, Tensor};
use genset_devtools::checkout::NamedTensors;

use crate::model::Model;

/// The model's weights, rounded to bf16.
///
/// # Errors
/// If candle cannot convert them.
pub(crate) fn rounded(model: &Model) -> anyhow::Result<NamedTensors> {
    let round = |(name, var): &(String, candle_core::Var)| {
        Ok((
            name.clone(),
            var.as_detached_tensor().to_dtype(DType::BF16)?,
        ))
    };
    model.vars().iter().map(round).collect()
}

/// The content of the file; the same weights yield the same bytes.
///
/// # Errors
/// If the weights cannot be serialized.
pub(crate) fn to_bytes(weights: &NamedTensors) -> anyhow::Result<Vec<u8>> {
    let sorted: BTreeMap<&String, &Tensor> = weights.iter().collect();
    let metadata = HashMap::from([("format".to_owned(), "pt".to_owned())]);
    safetensors::serialize(sorted, Some(metadata)).context("cannot write safetensors")
}
