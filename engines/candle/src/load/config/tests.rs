use serde_json::json;

use super::*;
use crate::load::tests::reference;
use crate::model::config::{BlockNorms, Experts, QueryKeyNorm, SlidingWindow};

fn read_reference(name: &str) -> (ModelConfig, &'static str) {
    let path = reference(name).join("config.json");
    let checkout = read(&path, &std::fs::read(&path).unwrap()).unwrap();
    (checkout.config, checkout.gguf_name)
}

/// An object with `changes`.
fn with(mut object: Value, changes: &Value) -> Value {
    let fields = object.as_object_mut().unwrap();
    fields.extend(changes.as_object().unwrap().clone());
    object
}

/// A Llama configuration as `transformers` 4 wrote it, with `changes`.
fn llama(changes: &Value) -> Result<ModelConfig, LoadError> {
    let config = json!({
        "architectures": ["LlamaForCausalLM"], "vocab_size": 96, "hidden_size": 64,
        "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
        "max_position_embeddings": 256, "rms_norm_eps": 1e-5,
    });
    let config = with(config, changes).to_string();
    read(Path::new("config.json"), config.as_bytes()).map(|checkout| checkout.config)
}

fn refused(changes: &Value) -> String {
    llama(changes).unwrap_err().to_string()
}

#[test]
fn every_architecture_is_read() {
    for (name, expected) in [
        ("llama", "llama"),
        ("llama3", "llama"),
        ("llama-linear", "llama"),
        ("llama-biases", "llama"),
        ("mistral", "llama"),
        ("qwen2", "qwen2"),
        ("qwen3", "qwen3"),
        ("qwen3-moe", "qwen3moe"),
        ("mixtral", "llama"),
        ("gemma2", "gemma2"),
        ("gemma3", "gemma3"),
        ("phi3", "phi3"),
        ("phi4-mini", "phi3"),
        ("smollm3", "smollm3"),
        ("qwen3-yarn", "qwen3"),
        ("glm", "chatglm"),
        ("glm4", "glm4"),
        ("granite", "granite"),
        ("granite4", "granite"),
        ("seed-oss", "seed_oss"),
        ("ernie45", "ernie4_5"),
        ("exaone4", "exaone4"),
        ("cohere2", "cohere2"),
        ("hunyuan", "hunyuan-dense"),
        ("ministral3", "mistral3"),
        ("olmoe", "olmoe"),
        ("granite-moe", "granitemoe"),
        ("qwen2-moe", "qwen2moe"),
        ("starcoder2", "starcoder2"),
        ("olmo2", "olmo2"),
        ("olmo3", "olmo2"),
        ("gpt-oss-bf16", "gpt-oss"),
    ] {
        let (config, architecture) = read_reference(name);
        assert_eq!(architecture, expected, "{name}");
        assert_eq!(
            (config.vocab_size, config.head_dim, config.num_heads % 2),
            (96, 16, 0),
            "{name}"
        );
        assert_eq!(
            config.activation == Activation::GeluTanh,
            name.starts_with("gemma") || name == "starcoder2"
        );
    }
}

#[test]
fn what_families_differ_in_is_told_apart() {
    let (biases, _) = read_reference("llama-biases");
    assert!(biases.has_qkv_bias && biases.has_output_bias && biases.has_mlp_bias);
    let (qwen2, _) = read_reference("qwen2");
    assert!(qwen2.has_qkv_bias && !qwen2.has_output_bias && qwen2.is_tied);
    let (qwen3, _) = read_reference("qwen3");
    assert!(!qwen3.has_qkv_bias && qwen3.query_key_norm == QueryKeyNorm::Heads);
    let (mistral, _) = read_reference("mistral");
    let window = SlidingWindow {
        size_tokens: 8,
        full_every: None,
    };
    assert_eq!(mistral.window, Some(window));
}

#[test]
fn experts_are_read() {
    let (qwen3, _) = read_reference("qwen3-moe");
    let experts = |count, per_token, is_normalized| Experts {
        count,
        per_token,
        is_normalized,
        has_router_bias: false,
        shared_size: None,
    };
    assert_eq!(qwen3.experts, Some(experts(8, 3, true)));
    assert_eq!(qwen3.intermediate_size, 64);
    let (mixtral, _) = read_reference("mixtral");
    assert_eq!(mixtral.experts, Some(experts(4, 2, true)));
    let older = llama(&json!({
        "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 16, "num_experts_per_tok": 4,
        "moe_intermediate_size": 32,
    }));
    assert_eq!(older.unwrap().experts, Some(experts(16, 4, false)));
    for (key, value, expected) in [
        ("num_experts", json!(0), "number of experts: is 0"),
        ("num_experts", json!(4000), "it must be 1 to 1024"),
        ("num_experts_per_tok", json!(200), "it must be 1 to 128"),
        ("num_hidden_layers", json!(2000), "in each of 2000 layers"),
        ("decoder_sparse_step", json!(2), "decoder_sparse_step = 2"),
        ("mlp_only_layers", json!([3]), "mlp_only_layers = [3, ...]"),
        ("moe_intermediate_size", json!(0), "feed-forward size"),
    ] {
        let error = refused(&json!({"architectures": ["Qwen3MoeForCausalLM"], key: value}));
        assert!(error.contains(expected), "{key}: {error}");
    }
}

#[test]
fn gpt_oss_has_sinks_biases_and_windows() {
    let (config, _) = read_reference("gpt-oss");
    assert!(config.has_sinks && config.has_qkv_bias && config.has_output_bias);
    assert!(config.has_mlp_bias && !config.is_tied);
    let experts = Experts {
        count: 3,
        per_token: 2,
        is_normalized: true,
        has_router_bias: true,
        shared_size: None,
    };
    assert_eq!(config.experts, Some(experts));
    assert_eq!(config.activation, Activation::ClampedSwish { limit: 1.0 });
    let window = SlidingWindow {
        size_tokens: 8,
        full_every: Some(2),
    };
    assert_eq!(config.window, Some(window));
    for (key, value, expected) in [
        ("swiglu_limit", json!(0.0), "swiglu_limit: is 0"),
        ("swiglu_alpha", json!(2.0), "swiglu_alpha = 2"),
        (
            "quantization_config",
            json!({"quant_method": "fp8"}),
            "quant_method = fp8",
        ),
    ] {
        let error = refused(&json!({"architectures": ["GptOssForCausalLM"], key: value}));
        assert!(error.contains(expected), "{key}: {error}");
    }
    let error = refused(&json!({"quantization_config": {"quant_method": "mxfp4"}}));
    assert!(error.contains("quant_method = mxfp4"), "{error}");
}

#[test]
fn gemma_has_scales_caps_and_windows() {
    let (gemma2, _) = read_reference("gemma2");
    assert_eq!(
        (gemma2.attention_softcap, gemma2.logit_softcap),
        (Some(5.0), Some(3.0))
    );
    assert!((gemma2.attention_scale - 24f32.powf(-0.5)).abs() < 1e-7);
    assert!((gemma2.norm_weight_offset - 1.0).abs() < f32::EPSILON);
    assert!((gemma2.embedding_scale - 48f32.sqrt()).abs() < 1e-6);
    assert_eq!(gemma2.window.unwrap().full_every, Some(2));
    let (gemma3, _) = read_reference("gemma3");
    assert_eq!(gemma3.window.unwrap().full_every, Some(3));
    assert_eq!(gemma3.rope.window_theta, Some(10_000.0));
    assert!((gemma3.rope.theta - 1e6).abs() < 1.0);
    assert!(gemma3.is_tied && gemma3.block_norms == BlockNorms::Both);
}

#[test]
fn olmo3_scales_the_frequencies_of_layers_without_a_window() {
    let olmo3 = |changes: &Value| {
        let config = json!({"architectures": ["Olmo3ForCausalLM"], "sliding_window": 64});
        llama(&with(config, changes)).unwrap()
    };
    let scaling =
        json!({"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32});
    let config = olmo3(&json!({"rope_theta": 5e5, "rope_scaling": scaling}));
    assert_eq!(config.rope.window_theta, Some(config.rope.theta));
    assert_eq!(config.window.unwrap().full_every, Some(4));
    assert_eq!(config.rope, olmo3(&json!({"rope_scaling": scaling})).rope);
}

#[test]
fn a_model_of_images_has_the_sizes_of_its_language_model() {
    let of = |changes: &Value| {
        let config = json!({
            "architectures": ["Gemma3ForConditionalGeneration"], "vision_config": {"hidden_size": 9},
            "quantization_config": {"quant_method": "fp8"},
            "text_config": {
                "model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240,
                "num_hidden_layers": 34, "sliding_window": 1024,
                "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            },
        });
        let config = with(config, changes).to_string();
        read(Path::new("config.json"), config.as_bytes())
    };
    let checkout = of(&json!({})).unwrap();
    assert!(checkout.is_multimodal && checkout.packed.is_some());
    let config = checkout.config;
    let sizes = [config.vocab_size, config.context_length, config.hidden_size];
    assert_eq!(sizes, [262_208, 131_072, 2560]);
    let heads = [config.num_heads, config.num_kv_heads, config.head_dim];
    assert_eq!(heads, [8, 4, 256]);
    // Another language model than the architecture usually has.
    let other = json!({"architectures": ["Mistral3ForConditionalGeneration"]});
    let error = of(&other).unwrap_err().to_string();
    assert!(
        error.contains("Mistral3ForConditionalGeneration is not supported"),
        "{error}"
    );
}

#[test]
fn rotary_scaling_is_read_in_the_ways_of_both_versions() {
    let (llama3, _) = read_reference("llama3");
    let expected = RopeScaling::Llama3 {
        factor: 8.0,
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        original_context_length: 32,
    };
    assert_eq!(llama3.rope.scaling, expected);
    assert!((llama3.rope.theta - 500_000.0).abs() < 1.0);
    let old = llama(&json!({"rope_theta": 500_000.0, "rope_scaling": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }}));
    assert_eq!(old.unwrap().rope, llama3.rope);
    let (linear, _) = read_reference("llama-linear");
    assert_eq!(linear.rope.scaling, RopeScaling::Linear { factor: 4.0 });
    let oldest = llama(&json!({"rope_scaling": {"type": "linear", "factor": 4.0}})).unwrap();
    assert_eq!(oldest.rope.scaling, linear.rope.scaling);
}

#[test]
fn scaling_that_was_added_to_a_file_of_version_5_is_used() {
    let parameters = json!({"rope_theta": 1e6, "rope_type": "default"});
    let of = |scaling: Value| {
        llama(&json!({"rope_parameters": parameters, "rope_scaling": scaling})).unwrap()
    };
    let added = of(json!({
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256,
    }));
    assert!(matches!(added.rope.scaling, RopeScaling::Yarn { factor, .. } if factor == 4.0));
    assert!((added.rope.theta - 1e6).abs() < 1.0);
    assert_eq!(added.context_length, 1024);
    for nothing in [Value::Null, json!({})] {
        assert_eq!(of(nothing).rope.scaling, RopeScaling::None);
    }
    let gemma3 = llama(&json!({
        "architectures": ["Gemma3ForCausalLM"],
        "rope_parameters": {"full_attention": parameters, "sliding_attention": {"rope_theta": 1e4}},
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    }));
    let rope = gemma3.unwrap().rope;
    assert_eq!(rope.scaling, RopeScaling::Linear { factor: 8.0 });
    assert_eq!(rope.window_theta, Some(10_000.0));
}

#[test]
fn longrope_is_chosen_by_the_context() {
    let phi = |changes: &Value| {
        let config = json!({
            "architectures": ["Phi3ForCausalLM"], "partial_rotary_factor": 0.25,
            "original_max_position_embeddings": 64,
            "rope_scaling": {"type": "su", "short_factor": [1.0, 1.5], "long_factor": [2.0, 3.0]},
        });
        llama(&with(config, changes))
    };
    let long = phi(&json!({})).unwrap().rope;
    assert_eq!(long.rotary_dim, 4);
    assert_eq!(long.scaling, RopeScaling::Factors(vec![2.0, 3.0]));
    // The square root of 1 + ln 4 / ln 64.
    assert!((long.amplitude - (4.0f32 / 3.0).sqrt()).abs() < 1e-6);
    let short = phi(&json!({"max_position_embeddings": 64})).unwrap().rope;
    assert_eq!(short.scaling, RopeScaling::Factors(vec![1.0, 1.5]));
    assert!((short.amplitude - 1.0).abs() < 1e-6);
    for (changes, expected) in [
        (
            json!({"partial_rotary_factor": 0.2}),
            "partial_rotary_factor: is 0.2; of a head's 16",
        ),
        (
            json!({"partial_rotary_factor": -1.0}),
            "partial_rotary_factor: is -1",
        ),
        (
            json!({"partial_rotary_factor": 0.5}),
            "rope_scaling.long_factor: has 2 positive numbers; it needs 4",
        ),
        (
            json!({"original_max_position_embeddings": 1}),
            "original_max_position_embeddings: is no size above 1",
        ),
        (
            json!({"rope_scaling": {"type": "longrope", "long_factor": [1.0, 0.0]}}),
            "long_factor: has 1 positive numbers",
        ),
    ] {
        let error = phi(&changes).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
}

#[test]
fn yarn_is_read() {
    let rope = |changes: &Value| {
        let scaling = with(json!({"type": "yarn", "factor": 4.0}), changes);
        llama(&json!({"rope_scaling": scaling})).map(|config| config.rope)
    };
    let yarn = |fast_turns, original_context_length, is_rounded| RopeScaling::Yarn {
        factor: 4.0,
        fast_turns,
        slow_turns: 1.0,
        original_context_length,
        is_rounded,
    };
    let usual = rope(&json!({})).unwrap();
    assert_eq!(usual.scaling, yarn(32.0, 256, true));
    assert!((usual.amplitude - (1.0 + 0.1 * 4f32.ln())).abs() < 1e-6);
    let all = rope(&json!({
        "beta_fast": 16.0, "original_max_position_embeddings": 64, "truncate": false,
        "attention_factor": 1.5,
    }));
    let all = all.unwrap();
    assert_eq!((all.scaling, all.amplitude), (yarn(16.0, 64, false), 1.5));
    let equal = rope(&json!({"mscale": 1.0, "mscale_all_dim": 1.0})).unwrap();
    assert!((equal.amplitude - 1.0).abs() < 1e-6);
    for (changes, expected) in [
        (
            json!({"factor": -1.0}),
            "rope_scaling.factor: is no positive",
        ),
        (json!({"beta_slow": "x"}), "rope_scaling.beta_slow"),
        (
            json!({"original_max_position_embeddings": 0}),
            "original_max_position_embeddings: is no size above 1",
        ),
    ] {
        let error = rope(&changes).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
    let error = refused(&json!({"rope_theta": 1.0, "rope_scaling": {"type": "yarn"}}));
    assert!(error.contains("with YaRN it must be above 1"), "{error}");
}

#[test]
fn yarn_makes_the_context_longer_than_the_file_says() {
    let yarn = |original: Value, factor: f64| {
        json!({"rope_scaling": {
            "type": "yarn", "factor": factor, "original_max_position_embeddings": original,
        }})
    };
    for (original, expected) in [
        (json!(256), 1024),
        (json!(64), 256),
        (json!(16), 256),
        // The file's own context is the original one then.
        (Value::Null, 256),
    ] {
        let config = llama(&yarn(original, 4.0)).unwrap();
        assert_eq!(config.context_length, expected);
    }
    let error = refused(&yarn(json!(256), 1e9));
    assert!(
        error.contains("context length: is 256000000000;"),
        "{error}"
    );
}

#[test]
fn layers_that_do_not_turn_are_read() {
    let smollm3 = |changes: &Value| {
        let config = json!({"architectures": ["SmolLM3ForCausalLM"]});
        llama(&with(config, changes))
    };
    let still = |changes| smollm3(&changes).unwrap().rope.still_every;
    assert_eq!(still(json!({})), Some(4));
    assert_eq!(still(json!({"no_rope_layer_interval": 3})), Some(3));
    assert_eq!(still(json!({"no_rope_layers": [1, 0, 1, 0, 7]})), Some(2));
    assert_eq!(still(json!({"no_rope_layers": [1, 1, 1, 1]})), None);
    assert_eq!(llama(&json!({})).unwrap().rope.still_every, None);
    for (changes, expected) in [
        (
            json!({"no_rope_layers": [1, 0, 1, 1]}),
            "no_rope_layers = [1, 0, 1, 1] is not supported; every nth",
        ),
        (
            json!({"no_rope_layers": [1]}),
            "no_rope_layers: has 1 numbers, fewer than layers",
        ),
        (
            json!({"use_sliding_window": true, "sliding_window": 4}),
            "use_sliding_window = true",
        ),
    ] {
        let error = smollm3(&changes).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
}

#[test]
fn layers_of_exaone4_turn_if_they_have_a_window_or_none_has() {
    let of = |changes: Value| {
        let config = json!({"architectures": ["Exaone4ForCausalLM"]});
        let config = llama(&with(config, &changes)).unwrap();
        (
            config.window.map(|window| window.full_every),
            config.rope.still_every,
        )
    };
    assert_eq!(of(json!({})), (Some(Some(4)), Some(4)));
    assert_eq!(of(json!({"sliding_window": null})), (None, None));
    let types = [
        "sliding_attention",
        "full_attention",
        "sliding_attention",
        "full_attention",
    ];
    let both = of(json!({"layer_types": types, "sliding_window_pattern": "LG"}));
    assert_eq!(both, (Some(Some(2)), Some(2)));
}

#[test]
fn defaults_are_those_of_transformers() {
    let config = llama(&json!({})).unwrap();
    assert_eq!((config.num_kv_heads, config.head_dim), (4, 16));
    assert_eq!(config.rope.scaling, RopeScaling::None);
    assert!(!config.is_tied && config.window.is_none());
    // Llama has no windows, whatever its file says.
    assert!(
        llama(&json!({"sliding_window": 64}))
            .unwrap()
            .window
            .is_none()
    );
    let ernie = llama(&json!({"architectures": ["Ernie4_5ForCausalLM"]})).unwrap();
    assert_eq!((ernie.head_dim, ernie.rope.theta), (128, 500_000.0));
}

#[test]
fn what_is_null_is_not_what_is_left_out() {
    let of = |name: &str, changes: Value| {
        let config = json!({"architectures": [name]});
        llama(&with(config, &changes)).unwrap()
    };
    let gemma2 = of("Gemma2ForCausalLM", json!({}));
    assert_eq!(
        (gemma2.attention_softcap, gemma2.logit_softcap),
        (Some(50.0), Some(30.0))
    );
    assert!((gemma2.attention_scale - 1.0 / 16.0).abs() < 1e-7);
    assert_eq!(gemma2.window.unwrap().size_tokens, 4096);
    let without = json!({"attn_logit_softcapping": null, "final_logit_softcapping": null});
    let gemma2 = of("Gemma2ForCausalLM", without);
    assert_eq!(
        (gemma2.attention_softcap, gemma2.logit_softcap),
        (None, None)
    );
    let gemma3 = of("Gemma3ForCausalLM", json!({}));
    assert_eq!(
        (gemma3.attention_softcap, gemma3.logit_softcap),
        (None, None)
    );
    let mistral = of("MistralForCausalLM", json!({}));
    assert_eq!(mistral.window.unwrap().size_tokens, 4096);
    let mistral = of("MistralForCausalLM", json!({"sliding_window": null}));
    assert!(mistral.window.is_none());
}

#[test]
fn windows_of_qwen_are_used_when_it_says_so() {
    let qwen = |use_it: bool, from: usize| {
        llama(&json!({
            "architectures": ["Qwen2ForCausalLM"], "sliding_window": 64,
            "use_sliding_window": use_it, "max_window_layers": from,
        }))
    };
    assert!(qwen(false, 0).unwrap().window.is_none());
    assert!(qwen(true, 4).unwrap().window.is_none());
    assert_eq!(qwen(true, 0).unwrap().window.unwrap().size_tokens, 64);
    let error = qwen(true, 2).unwrap_err().to_string();
    assert!(
        error.contains("max_window_layers = 2 is not supported"),
        "{error}"
    );
    let error = refused(&json!({
        "architectures": ["MistralForCausalLM"], "sliding_window": 64,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
    }));
    assert!(error.contains("layer_types"), "{error}");
}

#[test]
fn what_cannot_be_computed_is_refused_by_name() {
    for (changes, expected) in [
        (
            json!({"architectures": ["DeepseekV3ForCausalLM"]}),
            "DeepseekV3ForCausalLM is not supported; supported are LlamaForCausalLM",
        ),
        (
            json!({"architectures": null, "model_type": "bert"}),
            "of model_type bert",
        ),
        (
            json!({"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}),
            "rope_scaling.rope_type = dynamic",
        ),
        (
            json!({"quantization_config": {"quant_method": "bitsandbytes"}}),
            "quantization_config.quant_method = bitsandbytes",
        ),
        (
            json!({"partial_rotary_factor": 0.5}),
            "partial_rotary_factor = 0.5",
        ),
        (json!({"hidden_act": "relu"}), "hidden_act = relu"),
        (
            json!({
                "architectures": ["GraniteMoeHybridForCausalLM"],
                "layer_types": ["attention", "mamba", "attention", "attention"],
            }),
            "layer_types = mamba is not supported; all must be attention",
        ),
    ] {
        let error = refused(&changes);
        assert!(error.contains(expected), "{error}");
    }
}

#[test]
fn sizes_that_cannot_be_are_refused() {
    for (changes, expected) in [
        (json!({"hidden_size": 0}), "hidden size"),
        (json!({"num_attention_heads": 0}), "number of heads"),
        (json!({"num_key_value_heads": 3}), "do not divide"),
        (
            json!({"num_hidden_layers": 1_000_000_000}),
            "number of layers",
        ),
        (json!({"head_dim": 7}), "must be even"),
        (
            json!({
                "architectures": ["Phi3ForCausalLM"], "head_dim": 1_000_000_000_000_000_000u64,
                "partial_rotary_factor": 0.75,
            }),
            "head size: is 1000000000000000000;",
        ),
        (json!({"rms_norm_eps": 0.0}), "rms_norm_eps"),
        (
            json!({"architectures": ["Cohere2ForCausalLM"], "layer_norm_eps": 0.0}),
            "layer_norm_eps",
        ),
        (
            json!({"architectures": ["Starcoder2ForCausalLM"], "norm_epsilon": 0.0}),
            "norm_epsilon",
        ),
        (json!({"vocab_size": -1}), "vocab_size"),
        (json!({"vocab_size": null}), "vocab_size"),
        (json!({"rope_theta": 0.0}), "rope_theta"),
        (
            json!({"architectures": ["GraniteForCausalLM"], "logits_scaling": 0.0}),
            "factor of logits: is inf; it must be above 0",
        ),
        (
            json!({"rope_scaling": {"rope_type": "linear"}}),
            "rope_scaling.factor",
        ),
    ] {
        let error = refused(&changes);
        assert!(error.contains(expected), "{error}");
    }
    let error = read(Path::new("m/config.json"), b"{\"a\": ")
        .unwrap_err()
        .to_string();
    assert!(error.contains("m/config.json is broken"), "{error}");
}
