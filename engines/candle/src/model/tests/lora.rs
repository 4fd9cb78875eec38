//! Adapters compared with checkouts that they were merged into, and rows of several adapters in one step.

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;

use super::*;
use crate::load::AdapterReader;
use crate::load::tests::{USUAL_MODULES, make_adapter};

const RANK: usize = 3;

/// The scale of random adapters.
const SCALE: f64 = 0.5;

/// Modules of checkouts with fused projections.
const FUSED_MODULES: [&str; 4] = [
    "self_attn.qkv_proj",
    "self_attn.o_proj",
    "mlp.gate_up_proj",
    "mlp.down_proj",
];

/// Modules of GLM's checkouts.
const GLM_MODULES: [&str; 6] = [
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_up_proj",
    "mlp.down_proj",
];

/// Granite 4 and StarCoder2 give their feed-forward blocks names that adapters must not have.
const OF_ATTENTION: &[&str] = USUAL_MODULES.split_at(4).0;

fn modules(name: &str) -> &'static [&'static str] {
    match name {
        "phi3" | "phi4-mini" => &FUSED_MODULES,
        "glm" | "glm4" => &GLM_MODULES,
        "granite4" | "starcoder2" => OF_ATTENTION,
        _ => &USUAL_MODULES,
    }
}

fn read(folder: &Path, config: &ModelConfig) -> Arc<AdapterWeights> {
    let reader = AdapterReader {
        config: config.clone(),
        device: Device::Cpu,
        dtype: DType::F32,
    };
    Arc::new(reader.read(folder, u64::MAX).unwrap())
}

fn adapter(name: &str, config: &ModelConfig, seed: u64) -> Arc<AdapterWeights> {
    let folder = tempfile::tempdir().unwrap();
    make_adapter(folder.path(), config, modules(name), RANK, seed);
    read(folder.path(), config)
}

/// All tensors of a file, in f32.
fn tensors(file: &Path) -> HashMap<String, Tensor> {
    let stored = candle_core::safetensors::load(file, &Device::Cpu).unwrap();
    let in_f32 = |(name, tensor): (String, Tensor)| (name, tensor.to_dtype(DType::F32).unwrap());
    stored.into_iter().map(in_f32).collect()
}

/// Writes a copy of the reference model `name`, with the adapter in `adapter` merged into its weights.
fn merge(name: &str, adapter: &Path, to: &Path) {
    let folder = reference(name);
    let mut weights = tensors(&folder.join("model.safetensors"));
    let adapter = tensors(&adapter.join("adapter_model.safetensors"));
    let mut merged = 0;
    for (name, a) in &adapter {
        let Some(stem) = name.strip_suffix(".lora_A.weight") else {
            continue;
        };
        let b = &adapter[&format!("{stem}.lora_B.weight")];
        let weight = format!("{}.weight", stem.strip_prefix("base_model.model.").unwrap());
        let weight = weights.get_mut(&weight).unwrap();
        let product = b.matmul(a).unwrap();
        *weight = (&*weight + (product * SCALE).unwrap()).unwrap();
        merged += 1;
    }
    assert!(merged > 0);
    candle_core::safetensors::save(&weights, to.join("model.safetensors")).unwrap();
    std::fs::copy(folder.join("config.json"), to.join("config.json")).unwrap();
}

/// The step with all of its rows using the adapter.
fn under(mut batch: StepBatch, weights: &Arc<AdapterWeights>) -> StepBatch {
    batch.adapters = vec![AdapterRows {
        weights: Arc::clone(weights),
        rows: (0..u32::try_from(batch.tokens.len()).unwrap()).collect(),
    }];
    batch
}

fn prefill_under(
    model: &Model,
    kv: &mut KvCache,
    tokens: &[u32],
    weights: Option<&Arc<AdapterWeights>>,
) -> Vec<Vec<f32>> {
    let batch = match weights {
        Some(weights) => under(prompt(tokens), weights),
        None => prompt(tokens),
    };
    rows(&model.forward(kv, &batch).unwrap())
}

fn farthest(a: &[Vec<f32>], b: &[Vec<f32>]) -> f32 {
    let pairs = a.iter().flatten().zip(b.iter().flatten());
    pairs.map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

#[test]
fn logits_under_an_adapter_are_those_of_weights_that_it_was_added_to() {
    for name in MODELS {
        let (model, config) = load(name, Quantization::None);
        let folder = tempfile::tempdir().unwrap();
        make_adapter(folder.path(), &config, modules(name), RANK, 7);
        let weights = read(folder.path(), &config);
        let merged = tempfile::tempdir().unwrap();
        merge(name, folder.path(), merged.path());
        let open = OpenModel::open(merged.path()).unwrap();
        let mut exact = open.weights(WeightOptions::exact(), |_| Ok(()));
        let merged = Model::try_new(&open.config, &mut exact).unwrap();
        for case in cases(name) {
            let tokens = &case.tokens;
            let got = prefill_under(&model, &mut cache(&config), tokens, Some(&weights));
            let want = prefill(&merged, &mut cache(&config), tokens);
            assert_close(&got, &want, TOLERANCE, &format!("{name}, merged"));
            let base = prefill(&model, &mut cache(&config), tokens);
            let change = farthest(&got, &base);
            assert!(change > 0.05, "{name}: it changes logits by {change} only");
        }
    }
}

#[test]
fn rows_of_two_adapters_and_of_none_have_the_bits_that_they_have_alone() {
    for subject in subjects() {
        let Subject {
            name,
            model,
            cases,
            config,
            ..
        } = &subject;
        let reference = name.split(' ').next().unwrap();
        let adapters = [7, 8].map(|seed| adapter(reference, config, seed));
        let whose = [
            Some(&adapters[0]),
            None,
            Some(&adapters[1]),
            Some(&adapters[0]),
        ];
        let alone: Vec<_> = cases
            .iter()
            .zip(whose)
            .map(|(case, whose)| prefill_under(model, &mut subject.cache(), &case.tokens, whose))
            .collect();
        let blocks: Vec<_> = (0..4).map(|i| scattered_blocks(i * 16)).collect();
        let chunks: Vec<Chunk<'_>> = cases
            .iter()
            .zip(&blocks)
            .map(|(case, blocks)| Chunk {
                tokens: &case.tokens,
                done: 0,
                blocks,
            })
            .collect();
        let mut batch = step(&chunks);
        for weights in &adapters {
            let of = batch.sequences.iter().zip(whose);
            let of = of.filter(|(_, whose)| whose.is_some_and(|whose| Arc::ptr_eq(whose, weights)));
            let rows = of.flat_map(|(sequence, _)| sequence.rows.clone());
            let rows = rows.map(|row| u32::try_from(row).unwrap()).collect();
            let weights = Arc::clone(weights);
            batch.adapters.push(AdapterRows { weights, rows });
        }
        let together = rows(&model.forward(&mut subject.cache(), &batch).unwrap());
        let alone: Vec<Vec<f32>> = alone.into_iter().flatten().collect();
        assert!(
            together == alone,
            "{name}: rows differ beside other adapters"
        );
    }
}

#[test]
fn a_row_of_an_adapter_that_is_none_of_the_steps_is_refused() {
    let (model, config) = load("llama", Quantization::None);
    let weights = adapter("llama", &config, 7);
    let mut batch = prompt(&[1, 2]);
    batch.adapters.push(AdapterRows {
        weights,
        rows: vec![2],
    });
    let error = model.forward(&mut cache(&config), &batch).unwrap_err();
    assert!(error.to_string().contains("row of an adapter"), "{error}");
}
