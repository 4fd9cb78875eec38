//! The language models of models that also take images. Their configuration is a part of the `config.json`.

use serde_json::Value;

/// The supported models: the architecture, the `model_type` of its language model, and the architecture which that has alone.
const MULTIMODAL: [(&str, &str, &str); 3] = [
    (
        "Gemma3ForConditionalGeneration",
        "gemma3_text",
        "Gemma3ForCausalLM",
    ),
    (
        "Mistral3ForConditionalGeneration",
        "mistral",
        "MistralForCausalLM",
    ),
    (
        "Mistral3ForConditionalGeneration",
        "ministral3",
        "Ministral3ForCausalLM",
    ),
];

/// Sizes that the configurations of Gemma 3 omit.
///
/// # Source
/// The defaults of `transformers`: `Gemma3TextConfig`.
const OF_GEMMA3: [(&str, usize); 4] = [
    ("vocab_size", 262_208),
    ("num_attention_heads", 8),
    ("num_key_value_heads", 4),
    ("max_position_embeddings", 131_072),
];

/// The configuration of the language model, as the `config.json` of a model without images has it; `None` if `value` is no
/// configuration of a supported model with images.
pub(super) fn language_model(value: &Value) -> Option<Value> {
    const PACKED: &str = "quantization_config";
    let named = value.pointer("/architectures/0")?.as_str()?;
    let text = value.get("text_config")?;
    let kind = text.get("model_type")?.as_str()?;
    let mut known = MULTIMODAL.iter();
    let (.., alone) = known.find(|(name, of_text, _)| (*name, *of_text) == (named, kind))?;
    let mut config = text.as_object()?.clone();
    config.insert("architectures".into(), vec![*alone].into());
    if let Some(packed) = value.get(PACKED) {
        config.insert(PACKED.into(), packed.clone());
    }
    if kind == "gemma3_text" {
        for (key, size) in OF_GEMMA3 {
            config.entry(key).or_insert(size.into());
        }
    }
    Some(Value::Object(config))
}
