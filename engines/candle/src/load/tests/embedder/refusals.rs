//! Unsupported embedders: each error names the key and the alternative.

use super::*;

/// The error for a broken copy.
fn refused(name: &str, file: &str, pointer: &str, to: Value) -> String {
    let folder = copy_of_encoder(name);
    set(&folder, file, pointer, to);
    OpenEmbedder::open(folder.path()).unwrap_err().to_string()
}

#[test]
fn what_cannot_be_computed_is_named_with_what_would_do() {
    let config = "config.json";
    for (name, file, pointer, value, expected) in [
        (
            "bert",
            config,
            "/hidden_act",
            json!("laplace"),
            ["hidden_act", "gelu"],
        ),
        (
            "bert",
            config,
            "/position_embedding_type",
            json!("relative_key"),
            ["position_embedding_type", "absolute"],
        ),
        (
            "bert",
            config,
            "/is_decoder",
            json!(true),
            ["is_decoder", "must be false"],
        ),
        (
            "bert",
            config,
            "/quantization_config",
            json!({"a": 1}),
            ["quantization_config", "unquantized"],
        ),
        (
            "bert",
            config,
            "/architectures/0",
            json!("T5Model"),
            ["T5Model", "BertModel"],
        ),
        (
            "bert",
            config,
            "/architectures/0",
            json!("BertForTokenClassification"),
            ["BertForTokenClassification", "BertModel"],
        ),
        (
            "bert",
            config,
            "/hidden_size",
            json!("wide"),
            ["hidden_size", "no size"],
        ),
        (
            "bert",
            config,
            "/hidden_size",
            Value::Null,
            ["hidden_size", "missing"],
        ),
        (
            "bert",
            config,
            "/layer_norm_eps",
            json!("x"),
            ["config.json", "line"],
        ),
        (
            "bert",
            config,
            "/hidden_size",
            json!(0),
            ["hidden_size", "1 to"],
        ),
        (
            "bert",
            config,
            "/num_hidden_layers",
            json!(1_u64 << 40),
            ["num_hidden_layers", "1 to"],
        ),
        (
            "bert",
            config,
            "/vocab_size",
            json!(u64::MAX),
            ["vocab_size", "1 to"],
        ),
        (
            "bert",
            config,
            "/num_attention_heads",
            json!(5),
            ["num_attention_heads", "even parts"],
        ),
        (
            "bert",
            config,
            "/type_vocab_size",
            json!(1 << 30),
            ["type_vocab_size", "1073741824"],
        ),
        (
            "bert",
            config,
            "/layer_norm_eps",
            json!(-1.0),
            ["layer_norm_eps", "-1"],
        ),
        (
            "bert",
            config,
            "/intermediate_size",
            json!(81),
            ["intermediate", "81"],
        ),
        (
            "xlm-roberta",
            config,
            "/pad_token_id",
            json!(1_u64 << 50),
            ["max_position_embeddings", "too few"],
        ),
        (
            "modernbert",
            config,
            "/layer_types",
            json!(["full_attention", "spiral", "full_attention"]),
            ["layer_types", "sliding_attention"],
        ),
        (
            "modernbert",
            config,
            "/layer_types",
            json!(["full_attention"]),
            ["layer_types", "num_hidden_layers is 3"],
        ),
        (
            "qwen3",
            config,
            "/is_causal",
            json!(false),
            ["is_causal", "must be true"],
        ),
        (
            "bert",
            "1_Pooling/config.json",
            "/include_prompt",
            json!(false),
            ["include_prompt", "must be true"],
        ),
        (
            "bert",
            "1_Pooling/config.json",
            "/pooling_mode",
            json!("median"),
            ["pooling_mode", "lasttoken"],
        ),
        (
            "bert",
            "modules.json",
            "/1/type",
            json!("sentence_transformers.models.CNN"),
            ["module 1", "Pooling"],
        ),
        (
            "bert",
            "modules.json",
            "/1/path",
            json!("../bert/1_Pooling"),
            ["modules.json", "no folder of the checkout"],
        ),
        (
            "bert",
            "modules.json",
            "/1/path",
            json!("/etc"),
            ["modules.json", "no folder of the checkout"],
        ),
        (
            "bert",
            "modules.json",
            "/1/path",
            json!("9_Nowhere"),
            ["9_Nowhere", "not there"],
        ),
        (
            "bert-dense",
            "2_Dense/config.json",
            "/in_features",
            json!(47),
            ["in_features", "48"],
        ),
        (
            "bert-dense",
            "2_Dense/config.json",
            "/out_features",
            json!(1u64 << 40),
            ["out_features", "1099511627776"],
        ),
        (
            "bert-dense",
            "2_Dense/config.json",
            "/activation_function",
            json!("torch.nn.Mish"),
            ["activation_function", "Tanh"],
        ),
        (
            "bert",
            "sentence_bert_config.json",
            "/max_seq_length",
            json!(0),
            ["max_seq_length", "at least 1"],
        ),
    ] {
        let message = refused(name, file, pointer, value);
        for part in expected {
            assert!(message.contains(part), "{name} {pointer}: {message}");
        }
    }
}
