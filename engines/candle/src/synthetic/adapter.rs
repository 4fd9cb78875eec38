//! Adapters with random weights, for tests: they change answers, and the changed ones mean nothing.

use std::fs;
use std::path::Path;

use safetensors::Dtype;
use safetensors::tensor::TensorView;
use serde_json::json;

use super::{drawn, hash};
use crate::error::LoadError;
use crate::model::{AdapterTarget, ModelConfig};

/// The modules of a layer that adapters mostly add to.
pub const USUAL_MODULES: [&str; 7] = [
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
];

/// Makes a PEFT adapter of rank `rank` for a model like `config` in `folder`, which is created: `adapter_config.json`, and
/// `adapter_model.safetensors` in bf16. It adds to those of `modules` that the model has, such as [`USUAL_MODULES`]. `seed` decides
/// all weights. What it adds to a product is half as large as the product's input.
///
/// # Errors
/// A file cannot be written.
pub fn make_adapter(
    folder: &Path,
    config: &ModelConfig,
    modules: &[&str],
    rank: usize,
    seed: u64,
) -> Result<(), LoadError> {
    let write = |error| LoadError::read(folder, error);
    fs::create_dir_all(folder).map_err(write)?;
    let mut tensors = Vec::new();
    let mut names = Vec::new();
    for module in modules {
        let Some(target) = AdapterTarget::of(config, module) else {
            continue;
        };
        names.extend(module.rsplit('.').next());
        for layer in 0..config.num_layers {
            let matrices = [
                ("A", vec![rank, target.in_features]),
                ("B", vec![target.out_features, rank]),
            ];
            for (matrix, shape) in matrices {
                let name =
                    format!("base_model.model.model.layers.{layer}.{module}.lora_{matrix}.weight");
                let bytes = drawn(&shape, seed ^ hash(&name));
                tensors.push((name, shape, bytes));
            }
        }
    }
    let json = json!({
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": f64::from(u32::try_from(rank).unwrap_or(u32::MAX)) / 2.0,
        "use_rslora": false,
        "use_dora": false,
        "bias": "none",
        "modules_to_save": null,
        "target_modules": names,
    });
    fs::write(folder.join("adapter_config.json"), format!("{json:#}\n")).map_err(write)?;
    let path = folder.join("adapter_model.safetensors");
    let unwritable = |error| LoadError::read(&path, std::io::Error::other(error));
    let views = tensors.iter().map(|(name, shape, bytes)| {
        let view = TensorView::new(Dtype::BF16, shape.clone(), bytes);
        view.map(|view| (name.as_str(), view))
    });
    let views: Vec<_> = views.collect::<Result<_, _>>().map_err(unwritable)?;
    safetensors::serialize_to_file(views, None, &path).map_err(unwritable)
}
