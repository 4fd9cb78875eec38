//! Packed weights: what they are converted to, and every error in them.

use ::safetensors::Dtype;
use candle_core::quantized::GgmlDType;

use super::folder::{Written, changed};
use super::*;
use crate::model::WeightType;

const MODULE: &str = "model.layers.1.mlp.down_proj";

#[test]
fn packed_weights_become_the_smallest_type_that_is_exact() {
    let (q4_0, q5_0) = (GgmlDType::Q4_0.into(), GgmlDType::Q5_0.into());
    for (name, expected) in [
        ("gptq", q4_0),
        ("gptq-zeros", q5_0),
        ("gptq-order", WeightType::F32),
        ("gptq-v2", q5_0),
        ("gptq-small-groups", WeightType::F32),
        ("awq", q5_0),
        ("compressed-int4", q4_0),
        ("compressed-int4-zeros", q5_0),
        ("fp8-blocks", WeightType::F32),
        ("fp8-rows", WeightType::F32),
        ("fp8-whole", WeightType::F32),
    ] {
        let open = OpenModel::open(&reference(name)).unwrap();
        let raw = open.tensor(&format!("{MODULE}.weight")).unwrap().unwrap();
        assert_eq!(raw.dtype, expected, "{name}");
        assert!(raw.form().is_some(), "{name}");
        let plain = open.tensor("lm_head.weight").unwrap().unwrap();
        assert_eq!(plain.form(), None, "{name}");
    }
}

#[test]
fn the_estimate_counts_what_weights_become() {
    let of = |name: &str| {
        let open = OpenModel::open(&reference(name)).unwrap();
        open.memory(&options(Quantization::None), 512).weights
    };
    // Models of the same sizes and kind.
    assert!(of("gptq") < of("awq") && of("awq") < of("fp8-rows") / 2);
}

/// Changes a tensor of a model. The error must have its name, followed by this text.
#[track_caller]
fn assert_refused(name: &str, tensor: &str, said: &str, change: impl FnOnce(&mut Written)) {
    let copy = changed(name, |tensors| change(tensors.get_mut(tensor).unwrap()));
    assert_open_fails(copy.path(), &[&format!("{tensor}{said}")]);
}

#[test]
fn tensors_that_do_not_belong_together_are_named() {
    // One group less.
    for (name, part, bytes) in [
        ("gptq", "scales", 64 * 2),
        ("gptq", "qzeros", 64 / 8 * 4),
        ("awq", "scales", 64 * 2),
        ("awq", "qzeros", 64 / 8 * 4),
    ] {
        let tensor = format!("{MODULE}.{part}");
        assert_refused(name, &tensor, " is [2, ", |it| {
            it.shape[0] -= 1;
            it.data.truncate(it.data.len() - bytes);
        });
    }
    // The same count of numbers in another shape.
    for (name, part) in [
        ("gptq", "qweight"),
        ("awq", "qweight"),
        ("compressed-int4", "weight_packed"),
        ("compressed-int4", "weight_scale"),
        ("fp8-blocks", "weight_scale_inv"),
    ] {
        let tensor = format!("{MODULE}.{part}");
        let copy = changed(name, |tensors| {
            tensors.get_mut(&tensor).unwrap().shape.reverse();
        });
        assert_open_fails(copy.path(), &[MODULE]);
        let flat = |it: &mut Written| it.shape = vec![it.shape[0] * it.shape[1]];
        assert_refused(name, &tensor, "", flat);
    }
    let tensor = format!("{MODULE}.weight_shape");
    let said = " is not the shape of 64 rows";
    assert_refused("compressed-int4", &tensor, said, |it| it.data[8] = 255);
}

#[test]
fn a_column_of_no_group_is_named() {
    let tensor = format!("{MODULE}.g_idx");
    for (group, expected) in [
        (3i32, "of group 3; there are 3"),
        (-1, "of group -1; there are 3"),
    ] {
        let said = format!(" says that column 5 is {expected}");
        assert_refused("gptq-order", &tensor, &said, |it| {
            it.data[20..24].copy_from_slice(&group.to_le_bytes());
        });
    }
}

#[test]
fn a_missing_part_is_named() {
    for (name, part) in [
        ("gptq", "scales"),
        ("gptq", "qzeros"),
        ("gptq-order", "g_idx"),
        ("awq", "qzeros"),
        ("compressed-int4", "weight_shape"),
        ("compressed-int4-zeros", "weight_zero_point"),
        ("fp8-rows", "weight_scale"),
    ] {
        let tensor = format!("{MODULE}.{part}");
        let copy = changed(name, |tensors| drop(tensors.remove(&tensor).unwrap()));
        assert_open_fails(copy.path(), &[&format!("has no tensor {tensor}")]);
    }
    // Without it, columns are consecutive.
    let copy = changed("gptq", |tensors| {
        tensors.retain(|name, _| !name.ends_with("g_idx"));
    });
    OpenModel::open(copy.path()).unwrap();
}

#[test]
fn a_part_of_another_type_is_named() {
    for (name, part, dtype, supported) in [
        (
            "gptq",
            "qweight",
            Dtype::F32,
            "I32 where numbers are packed",
        ),
        ("gptq", "scales", Dtype::I16, "F32, F16, BF16 or F8_E8M0"),
        ("fp8-rows", "weight", Dtype::U8, "F32, F16 or BF16"),
        ("fp8-rows", "weight", Dtype::F8_E5M2, "F32, F16 or BF16"),
    ] {
        let tensor = format!("{MODULE}.{part}");
        let said = format!(" is {dtype}; tensors may be {supported}");
        assert_refused(name, &tensor, &said, |it| it.dtype = dtype);
    }
}

/// Changes the value at `key` of a `quantization_config`. The error must have this text.
#[track_caller]
fn assert_config_fails(name: &str, key: &str, value: Value, expected: &str) {
    let copy = copy_of(name);
    let pointer = format!("/quantization_config.{key}").replace('.', "/");
    set(&copy, CONFIG, &pointer, value);
    assert_open_fails(copy.path(), &[expected]);
}

/// Checks what errors say of other values of the keys that begin with `prefix`.
fn assert_keys_are_named(name: &str, prefix: &str, cases: &[(&str, Value, &str)]) {
    for (key, value, said) in cases {
        let key = format!("{prefix}{key}");
        let expected = format!("quantization_config.{key}{said}");
        assert_config_fails(name, &key, value.clone(), &expected);
    }
}

#[test]
fn what_is_not_read_is_refused_by_name() {
    let of_gptq = [
        ("bits", json!(3), " = 3"),
        ("bits", json!(8), " = 8"),
        ("checkpoint_format", json!("marlin"), " = marlin"),
        ("is_marlin_format", json!(true), " = true"),
        ("dynamic", json!({"-:mlp": {}}), " = (an object)"),
        ("pack_dtype", json!("int16"), " = int16"),
        ("group_size", json!(0), ": is 0; it must be -1 or 1 to"),
        ("group_size", json!(-2), ": is -2"),
        ("group_size", json!(1u64 << 40), ": is 1099511627776"),
        ("group_size", json!("32"), ": is \"32\""),
        ("group_size", json!(null), ": missing"),
        ("quant_method", json!("aqlm"), " = aqlm"),
    ];
    assert_keys_are_named("gptq", "", &of_gptq);
    let of_awq = [
        ("version", json!("gemv"), " = gemv"),
        ("zero_point", json!(false), " = false"),
    ];
    assert_keys_are_named("awq", "", &of_awq);
    assert_config_fails("awq", "bits", json!(null), "config.w_bit: missing");
    // What is null is missing too.
    let of_nulls = json!({"quant_method": "gptq", "bits": 4, "group_size": null});
    let copy = copy_of("gptq");
    set(&copy, CONFIG, "/quantization_config", of_nulls);
    assert_open_fails(copy.path(), &["config.group_size: missing"]);
    let of_fp8 = [
        ("activation_scheme", json!("static"), " = static"),
        ("fmt", json!("e5m2"), " = e5m2"),
        ("weight_block_size", json!([0, 128]), ": is [0,128]"),
        ("weight_block_size", json!([128]), ": is [128]"),
    ];
    assert_keys_are_named("fp8-blocks", "", &of_fp8);
    let sparse = json!({"format": "2:4"});
    let of_rows = [("sparsity_config", sparse, ".format = 2:4")];
    assert_keys_are_named("fp8-rows", "", &of_rows);
    let of_int4 = [
        ("format", json!("marlin-24"), " = marlin-24"),
        ("config_groups", json!({}), ": is empty"),
    ];
    assert_keys_are_named("compressed-int4", "", &of_int4);
    let other = json!({"weights": {"num_bits": 4, "type": "int", "strategy": "channel"}});
    let (key, expected) = ("config_groups.group_1", "config_groups = (several kinds)");
    assert_config_fails("compressed-int4", key, other, expected);
}

#[test]
fn what_is_not_read_in_a_group_is_refused_by_name() {
    let rounded = json!({"num_bits": 8, "dynamic": false});
    let of_int4 = [
        ("weights.num_bits", json!(8), " = 8"),
        ("weights.strategy", json!("block"), " = block"),
        ("input_activations", rounded.clone(), " = (static)"),
    ];
    assert_keys_are_named("compressed-int4", "config_groups.group_0.", &of_int4);
    let of_rows = [
        ("weights.type", json!("int"), " = int"),
        ("input_activations", rounded, " = (static)"),
    ];
    assert_keys_are_named("fp8-rows", "config_groups.group_0.", &of_rows);
}

#[test]
fn activations_with_scales_of_their_own_are_read_with_any_packing() {
    let pointer = "/quantization_config/config_groups/group_0/input_activations";
    for name in ["compressed-int4", "fp8-rows"] {
        let copy = copy_of(name);
        let rounded = json!({"num_bits": 8, "dynamic": true});
        set(&copy, CONFIG, pointer, rounded);
        OpenModel::open(copy.path()).unwrap();
    }
}

#[test]
fn transforms_are_refused_unless_the_weights_include_them() {
    let transforms = |locations: &[&str]| {
        let apply = locations.iter().map(|location| {
            json!({"targets": ["Linear"], "location": location, "inverse": false, "ignore": []})
        });
        let apply: Vec<Value> = apply.collect();
        json!({"config_groups": {"u": {"type": "hadamard", "apply": apply}}})
    };
    let key = "transform_config";
    let merged = [json!({}), transforms(&["weight_input", "weight_output"])];
    for value in merged {
        let copy = copy_of("compressed-int4");
        set(&copy, CONFIG, &format!("/quantization_config/{key}"), value);
        OpenModel::open(copy.path()).unwrap();
    }
    for location in ["input", "output", "k_cache", "q_attn"] {
        let value = transforms(&["weight_output", location]);
        let expected = format!("{key}.config_groups.u.location = {location} is not supported");
        assert_config_fails("compressed-int4", key, value.clone(), &expected);
        assert_config_fails("fp8-rows", key, value, &expected);
    }
}

const EXPERTS: &str = "model.layers.1.mlp.experts";

#[test]
fn experts_of_gpt_oss_stay_in_their_four_bits() {
    let of = |name: &str, projection: &str| {
        let open = OpenModel::open(&reference(name)).unwrap();
        let name = format!("{EXPERTS}.2.{projection}.weight");
        let raw = open.tensor(&name).unwrap().unwrap();
        (raw.dtype, raw.shape)
    };
    for projection in ["gate_proj", "up_proj"] {
        let shape = vec![96, 64];
        let packed = (WeightType::Mxfp4, shape.clone());
        assert_eq!(of("gpt-oss", projection), packed);
        assert_eq!(of("gpt-oss-bf16", projection), (WeightType::BF16, shape));
    }
}

#[test]
fn experts_that_do_not_belong_together_are_named() {
    let scales = format!("{EXPERTS}.down_proj_scales");
    let copy = changed("gpt-oss", |tensors| drop(tensors.remove(&scales).unwrap()));
    assert_open_fails(copy.path(), &[&format!("has no tensor {scales}")]);
    let blocks = format!("{EXPERTS}.gate_up_proj_blocks");
    let said = " is [3, 192, 16, 2], no blocks";
    assert_refused("gpt-oss", &blocks, said, |it| it.shape.swap(2, 3));
    let swap = |it: &mut Written| it.shape.swap(0, 1);
    assert_refused("gpt-oss", &scales, " is [64, 3, 3]", swap);
    let said = " is I8; tensors may be U8 where they are MXFP4";
    assert_refused("gpt-oss", &scales, said, |it| it.dtype = Dtype::I8);
    let bias = format!("{EXPERTS}.gate_up_proj_bias");
    assert_refused("gpt-oss", &bias, " is [192, 3]", swap);
    let plain = format!("{EXPERTS}.gate_up_proj");
    assert_refused("gpt-oss-bf16", &plain, " is ", |it| it.shape.swap(1, 2));
    let sinks = "model.layers.0.self_attn.sinks";
    assert_refused(
        "gpt-oss-bf16",
        sinks,
        " is [2, 2] and should be [4]",
        |it| {
            it.shape = vec![2, 2];
        },
    );
}
