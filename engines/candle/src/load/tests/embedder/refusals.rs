//! Unsupported embedders: each error names the key and the alternative.

use super::*;

#[test]
fn what_cannot_be_computed_is_named_with_what_would_do() {
    let of_bert = [
        ("hidden_act", json!("laplace"), "gelu"),
        ("position_embedding_type", json!("relative_key"), "absolute"),
        ("is_decoder", json!(true), "must be false"),
        ("quantization_config", json!({"a": 1}), "unquantized"),
        ("hidden_size", json!("wide"), "no size"),
        ("hidden_size", Value::Null, "missing"),
        ("hidden_size", json!(0), "1 to"),
        ("num_hidden_layers", json!(1_u64 << 40), "1 to"),
        ("vocab_size", json!(u64::MAX), "1 to"),
        ("num_attention_heads", json!(5), "even parts"),
        ("type_vocab_size", json!(1 << 30), "1073741824"),
        ("layer_norm_eps", json!(-1.0), "-1"),
    ];
    assert_keys_are_named("bert", CONFIG, &of_bert);
    let spiral = json!(["full_attention", "spiral", "full_attention"]);
    let of_modern = [
        ("layer_types", spiral, "sliding_attention"),
        (
            "layer_types",
            json!(["full_attention"]),
            "num_hidden_layers is 3",
        ),
    ];
    assert_keys_are_named("modernbert", CONFIG, &of_modern);
    let of_qwen3 = [("is_causal", json!(false), "must be true")];
    assert_keys_are_named("qwen3", CONFIG, &of_qwen3);
    let of_pooling = [
        ("include_prompt", json!(false), "must be true"),
        ("pooling_mode", json!("median"), "lasttoken"),
    ];
    assert_keys_are_named("bert", "1_Pooling/config.json", &of_pooling);
    let of_dense = [
        ("in_features", json!(47), "48"),
        ("out_features", json!(1u64 << 40), "1099511627776"),
        ("activation_function", json!("torch.nn.Mish"), "Tanh"),
    ];
    assert_keys_are_named("bert-dense", "2_Dense/config.json", &of_dense);
    let of_inputs = [("max_seq_length", json!(0), "at least 1")];
    assert_keys_are_named("bert", "sentence_bert_config.json", &of_inputs);
}

#[test]
fn what_is_no_fault_of_one_key_is_named_as_what_it_is() {
    let no_model = "BertForTokenClassification";
    for (pointer, value, expected) in [
        (
            "/architectures/0",
            json!("T5Model"),
            ["T5Model", "BertModel"],
        ),
        ("/architectures/0", json!(no_model), [no_model, "BertModel"]),
        ("/layer_norm_eps", json!("x"), [CONFIG, "line"]),
        ("/intermediate_size", json!(81), ["intermediate", "81"]),
    ] {
        assert_refused("bert", CONFIG, pointer, value, expected);
    }
    let (padding, expected) = (json!(1_u64 << 50), ["max_position_embeddings", "too few"]);
    assert_refused("xlm-roberta", CONFIG, "/pad_token_id", padding, expected);
    for (pointer, value, expected) in [
        ("/1/type", json!("models.CNN"), ["module 1", "Pooling"]),
        ("/1/path", json!("../bert"), ["modules.json", "no folder"]),
        ("/1/path", json!("/etc"), ["modules.json", "no folder"]),
        ("/1/path", json!("9_Nowhere"), ["9_Nowhere", "not there"]),
    ] {
        assert_refused("bert", "modules.json", pointer, value, expected);
    }
}
