//! Adapters with random weights, for tests: they change answers, which are meaningless.

use std::fs;
use std::path::Path;

use anyhow::Context as _;
use safetensors::Dtype;
use safetensors::tensor::TensorView;
use serde_json::json;

use super::{drawn, hash, unwritable};

/// Creates `folder` with a PEFT adapter of rank `rank` for a model of `layers` layers: `adapter_config.json`, and
/// `adapter_model.safetensors` in bf16. It adapts each of `modules`, such as `self_attn.q_proj`, given with its input and
/// output width. `seed` determines all weights. What it adds to a product is half as large as the product's input.
///
/// # Errors
/// If a file cannot be written.
pub fn make_adapter(
    folder: &Path,
    modules: &[(&str, [usize; 2])],
    layers: usize,
    rank: usize,
    seed: u64,
) -> anyhow::Result<()> {
    fs::create_dir_all(folder).with_context(|| unwritable(folder))?;
    let mut tensors = Vec::new();
    for (module, [takes, makes]) in modules {
        for layer in 0..layers {
            for (matrix, shape) in [("A", vec![rank, *takes]), ("B", vec![*makes, rank])] {
                let name =
                    format!("base_model.model.model.layers.{layer}.{module}.lora_{matrix}.weight");
                let bytes = drawn(&shape, seed ^ hash(&name));
                tensors.push((name, shape, bytes));
            }
        }
    }
    let names = modules
        .iter()
        .filter_map(|(module, _)| module.rsplit('.').next());
    let json = json!({
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": f64::from(u32::try_from(rank)?) / 2.0,
        "use_rslora": false,
        "use_dora": false,
        "bias": "none",
        "modules_to_save": null,
        "target_modules": names.collect::<Vec<_>>(),
    });
    let path = folder.join("adapter_config.json");
    fs::write(&path, format!("{json:#}\n")).with_context(|| unwritable(&path))?;
    let views = tensors.iter().map(|(name, shape, bytes)| {
        let view = TensorView::new(Dtype::BF16, shape.clone(), bytes);
        view.map(|view| (name.as_str(), view))
    });
    let views: Vec<_> = views.collect::<Result<_, _>>()?;
    let path = folder.join("adapter_model.safetensors");
    safetensors::serialize_to_file(views, None, &path).with_context(|| unwritable(&path))
}
