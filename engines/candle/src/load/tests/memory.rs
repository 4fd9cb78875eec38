//! Memory estimates, and the size of the KV cache.

use genset_kernels::quantized_kernels;

use super::*;
use crate::model::{Model, WeightType};

const GIB: u64 = 1 << 30;

fn kv_options() -> KvCacheOptions {
    KvCacheOptions {
        memory: None,
        block_size: 16,
        max_num_seqs: 4,
        context_length: 4096,
        bytes_per_value: 4,
        more_bytes_per_block: 0,
    }
}

fn estimate() -> MemoryEstimate {
    MemoryEstimate {
        weights: GIB,
        workspace: GIB,
    }
}

#[test]
fn weights_are_counted_in_the_form_they_are_kept_in() {
    let folder = tiny("q8_0");
    let open = OpenModel::open(folder.path()).unwrap();
    let of = |quantization| open.memory(&options(quantization), 512).weights;
    let elements: usize = plan(&open.config)
        .iter()
        .map(|tensor| tensor.shape.iter().product::<usize>())
        .sum();
    let elements = u64::try_from(elements).unwrap();
    assert_eq!(of(Quantization::None), elements * 4);
    let bounds = elements..elements * 3;
    assert!(
        bounds.contains(&of(Quantization::Q8_0)),
        "{}",
        of(Quantization::Q8_0)
    );
    assert!(of(Quantization::Q4K) < of(Quantization::Q6K));
    // Weights that are quantized in the file stay so, whatever is requested.
    let file = OpenModel::open(&folder.path().join("model.gguf")).unwrap();
    let weights = file.memory(&options(Quantization::None), 512).weights;
    assert_eq!(weights, of(Quantization::Q8_0));
}

#[test]
fn a_step_takes_memory_for_its_tokens() {
    let folder = tiny("q8_0");
    let open = OpenModel::open(folder.path()).unwrap();
    let of = |tokens| open.memory(&options(Quantization::Q8_0), tokens).workspace;
    assert_eq!((of(0), of(16)), (256 << 20, 256 << 20));
    // The gate and up products of the feed-forward block, in f32.
    let products = 2 * open.config.intermediate_size * 4 * (1 << 20);
    assert!(of(1 << 20) > u64::try_from(products).unwrap());
    assert_eq!(of(usize::MAX), u64::MAX);
}

#[test]
fn a_cache_holds_every_sequence_where_there_is_room() {
    let config = config_of(SyntheticSize::M100);
    // 2 * 12 layers * 4 heads * 64 * 16 tokens * 4 bytes
    assert_eq!(kv_bytes_per_block(&config, 16, 4), 393_216);
    let size = kv_cache_size(&config, &kv_options(), &estimate(), Some(64 * GIB)).unwrap();
    assert_eq!((size.blocks, size.bytes()), (1024, 1024 * 393_216));
    // Half of the rest is less than that.
    let little = 2 * GIB + 256 * 393_216 * 2;
    let size = kv_cache_size(&config, &kv_options(), &estimate(), Some(little)).unwrap();
    assert_eq!(size.blocks, 256);
    // One sequence gets more than half.
    let less = 2 * GIB + 256 * 393_216 * 3 / 2;
    let size = kv_cache_size(&config, &kv_options(), &estimate(), Some(less)).unwrap();
    assert_eq!(size.blocks, 256);
    assert!(
        kv_cache_size(&config, &kv_options(), &estimate(), None)
            .unwrap()
            .blocks
            >= 1024
    );
}

#[test]
fn memory_that_is_asked_for_is_kept_to() {
    let config = config_of(SyntheticSize::M100);
    let mut options = kv_options();
    options.memory = Some(1_000_000);
    let size = kv_cache_size(&config, &options, &estimate(), Some(64 * GIB)).unwrap();
    assert_eq!(size.blocks, 2);
    options.memory = Some(393_215);
    let error = kv_cache_size(&config, &options, &estimate(), None).unwrap_err();
    let error = EngineError::from(error);
    assert_eq!(error.at().map(|at| at.name()), Some("--kv-cache-memory"));
    assert!(
        error
            .message()
            .contains("one KV block of 16 tokens takes 384.0 KiB"),
        "{error}"
    );
    options.memory = Some(8 * GIB);
    let error = kv_cache_size(&config, &options, &estimate(), Some(4 * GIB)).unwrap_err();
    let error = EngineError::from(error);
    assert_eq!(error.at().map(|at| at.name()), Some("MODEL"));
    assert!(
        error
            .message()
            .contains("--kv-cache-memory of at most 2.0 GiB fits"),
        "{error}"
    );
}

#[test]
fn a_model_that_leaves_no_room_is_refused_before_it_is_read() {
    let config = config_of(SyntheticSize::M100);
    let error = kv_cache_size(&config, &kv_options(), &estimate(), Some(GIB)).unwrap_err();
    assert!(
        error
            .to_string()
            .starts_with("not enough memory: weights take 1.0 GiB"),
        "{error}"
    );
    assert!(available_memory(&Device::Cpu).is_none_or(|bytes| bytes > 1 << 20));
}

/// f32 matrices are slow; matrices quantized by the file or by default are not, if there are kernels.
#[test]
fn matrices_on_a_slow_path_are_named_with_their_share() {
    let slow = |open: &OpenModel, quantization| {
        let mut weights = open.weights(options(quantization), |_| Ok(()));
        let model = Model::try_new(&open.config, &mut weights).unwrap();
        model.slow_matrices().to_vec()
    };
    let folder = tiny("q8_0");
    let open = OpenModel::open(folder.path()).unwrap();
    let floats = slow(&open, Quantization::None);
    assert!(floats.iter().all(|matrix| matrix.dtype == WeightType::F32));
    let share: f64 = floats.iter().map(|matrix| matrix.share).sum();
    assert!((share - 1.0).abs() < 1e-9, "{share}");
    let name = "model.layers.0.self_attn.q_proj.weight";
    assert!(floats.iter().any(|matrix| matrix.name == name));
    let kept = slow(&open, Quantization::Q8_0);
    assert_eq!(kept.is_empty(), quantized_kernels().is_some(), "{kept:?}");
}
