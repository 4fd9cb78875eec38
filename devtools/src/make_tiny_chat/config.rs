//! The three configuration files of tiny-chat, in the format of a Hugging Face checkpoint.
//!
//! # Source
//! The Llama architecture's field names are those of `LlamaConfig` in Hugging Face transformers.

use genset_devtools::tiny_chat::{END_OF_TEXT, MESSAGE_END, MESSAGE_START};
use serde_json::{Value, json};

use super::tokenizer::{SpecialIds, VOCABULARY_SIZE};

/// Tokens of prompt and answer together.
const CONTEXT_LENGTH_TOKENS: u32 = 2048;

/// ChatML: system messages anywhere, users and assistants in turn, tools in a system message after the last question, so that
/// the model reads them knowing the question; calls in Hermes format.
pub(super) const CHAT_TEMPLATE: &str = include_str!("chat_template.jinja");

pub(super) fn tokenizer_config(ids: &SpecialIds) -> Value {
    let special = |content: &str| {
        json!({
            "content": content,
            "lstrip": false,
            "normalized": false,
            "rstrip": false,
            "single_word": false,
            "special": true,
        })
    };
    json!({
        "add_bos_token": false,
        "add_prefix_space": false,
        "added_tokens_decoder": {
            ids.end_of_text.to_string(): special(END_OF_TEXT),
            ids.message_start.to_string(): special(MESSAGE_START),
            ids.message_end.to_string(): special(MESSAGE_END),
        },
        "bos_token": null,
        "chat_template": CHAT_TEMPLATE.trim_end(),
        "clean_up_tokenization_spaces": false,
        "eos_token": MESSAGE_END,
        "model_max_length": CONTEXT_LENGTH_TOKENS,
        "pad_token": END_OF_TEXT,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": null,
    })
}

/// A Llama with 2.9 million parameters, 0.5 million of them in the embedding that input and output share.
pub(super) fn model_config(ids: &SpecialIds) -> Value {
    json!({
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": false,
        "attention_dropout": 0.0,
        "bos_token_id": null,
        "eos_token_id": ids.message_end,
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": 256,
        "initializer_range": 0.02,
        "intermediate_size": 512,
        "max_position_embeddings": CONTEXT_LENGTH_TOKENS,
        "mlp_bias": false,
        "model_type": "llama",
        "num_attention_heads": 4,
        "num_hidden_layers": 4,
        "num_key_value_heads": 2,
        "pad_token_id": ids.end_of_text,
        "rms_norm_eps": 1e-5,
        "rope_scaling": null,
        "rope_theta": 10000.0,
        "tie_word_embeddings": true,
        "torch_dtype": "bfloat16",
        "use_cache": true,
        "vocab_size": VOCABULARY_SIZE,
    })
}

/// Either end token ends an answer: the message's or the document's.
pub(super) fn generation_config(ids: &SpecialIds) -> Value {
    json!({
        "bos_token_id": null,
        "eos_token_id": [ids.message_end, ids.end_of_text],
        "pad_token_id": ids.end_of_text,
    })
}
