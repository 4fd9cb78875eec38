use super::*;
use crate::checkout::read_tokenizer;
use crate::synthetic::{SyntheticSize, make_model, make_model_of};
use crate::tiny_chat::folder;

fn random_model() -> (Config, NamedTensors) {
    let folder = tempfile::tempdir().unwrap();
    make_model(folder.path(), SyntheticSize::Tiny, 1).unwrap();
    let weights = crate::checkout::read_weights(folder.path()).unwrap();
    (SyntheticSize::Tiny.config(), weights)
}

fn metadata(bytes: &[u8]) -> HashMap<String, Value> {
    Content::read(&mut Cursor::new(bytes)).unwrap().metadata
}

fn strings(value: &Value) -> Vec<&str> {
    let values = value.to_vec().unwrap().iter();
    values.map(|it| it.to_string().unwrap().as_str()).collect()
}

#[test]
fn weights_come_back_in_their_order_within_the_error_of_q8_0() {
    let (config, weights) = random_model();
    let bytes = to_bytes(&config, &weights, folder(), GgufType::Q8_0).unwrap();
    let back = read(&config, Cursor::new(bytes)).unwrap();
    assert_eq!(back.len(), weights.len());
    for (name, tensor) in &weights {
        let tensor = tensor.to_dtype(DType::F32).unwrap();
        let values = tensor.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        let greatest = values.iter().fold(0.0f32, |max, x| max.max(x.abs()));
        let far = (tensor - &back[name]).unwrap().abs().unwrap();
        let far = far.max_all().unwrap().to_scalar::<f32>().unwrap();
        assert!(far <= greatest / 127.0, "{name}: {far} of {greatest}");
    }
}

#[test]
fn the_same_weights_give_the_same_bytes() {
    let (config, weights) = random_model();
    let first = to_bytes(&config, &weights, folder(), GgufType::Q8_0).unwrap();
    assert!(first == to_bytes(&config, &weights.clone(), folder(), GgufType::Q8_0).unwrap());
}

#[test]
fn halves_of_a_query_head_alternate() {
    let mut config = Config::read(folder()).unwrap();
    (config.num_attention_heads, config.head_dim) = (2, 4);
    let rows = Tensor::arange(0f32, 8f32, &Device::Cpu)
        .unwrap()
        .reshape((8, 1))
        .unwrap();
    let interleaved = Kind::Query.interleave(&rows, &config).unwrap();
    let values = interleaved.flatten_all().unwrap().to_vec1::<f32>().unwrap();
    assert_eq!(values, [0.0, 2.0, 1.0, 3.0, 4.0, 6.0, 5.0, 7.0]);
    let back = Kind::Query.separate(&interleaved, &config).unwrap();
    assert_eq!(
        back.to_vec2::<f32>().unwrap(),
        rows.to_vec2::<f32>().unwrap()
    );
    config.model_type = Family::Qwen3;
    let apart = Kind::Query.interleave(&rows, &config).unwrap();
    assert_eq!(
        apart.to_vec2::<f32>().unwrap(),
        rows.to_vec2::<f32>().unwrap()
    );
}

#[test]
fn a_qwen3_has_its_norms_and_its_own_keys() {
    let made = tempfile::tempdir().unwrap();
    make_model_of(Family::Qwen3, made.path(), SyntheticSize::Tiny, 1).unwrap();
    let weights = crate::checkout::read_weights(made.path()).unwrap();
    let config = Config::read(made.path()).unwrap();
    let kind = "f32".parse().unwrap();
    let bytes = to_bytes(&config, &weights, folder(), kind).unwrap();
    let metadata = metadata(&bytes);
    assert_eq!(
        metadata["general.architecture"].to_string().unwrap(),
        "qwen3"
    );
    assert!(metadata.contains_key("qwen3.attention.key_length"));
    assert!(!metadata.keys().any(|key| key.starts_with("llama")));
    let back = read(&config, Cursor::new(bytes)).unwrap();
    for (name, tensor) in &weights {
        let tensor = tensor.to_dtype(DType::F32).unwrap();
        let far = (tensor - &back[name]).unwrap().abs().unwrap();
        let far = far.max_all().unwrap().to_scalar::<f32>().unwrap();
        assert!(far < 1e-6, "{name}: {far}");
    }
    assert_eq!(back.len(), weights.len());
}

#[test]
fn the_tokenizer_is_the_models() {
    let (config, weights) = random_model();
    let metadata = metadata(&to_bytes(&config, &weights, folder(), GgufType::Q8_0).unwrap());
    let tokenizer = read_tokenizer(folder()).unwrap();
    let tokens = strings(&metadata["tokenizer.ggml.tokens"]);
    assert_eq!(tokens.len(), tokenizer.get_vocab_size(true));
    for (id, token) in (0u32..).zip(&tokens) {
        assert_eq!(tokenizer.id_to_token(id).as_deref(), Some(*token));
    }
    let types = metadata["tokenizer.ggml.token_type"].to_vec().unwrap();
    let control = types
        .iter()
        .filter(|it| it.to_i32().unwrap() == CONTROL_TOKEN);
    assert_eq!((types.len(), control.count()), (tokens.len(), 3));
    // Every token except the 256 bytes and the three special ones is the result of one merge.
    let merges = strings(&metadata["tokenizer.ggml.merges"]);
    assert_eq!(merges.len(), tokens.len() - 256 - 3);
    let eos = metadata["tokenizer.ggml.eos_token_id"].to_u32().unwrap();
    assert_eq!(tokens[eos as usize], "<|im_end|>");
    let template = metadata["tokenizer.chat_template"].to_string().unwrap();
    assert!(template.contains("<|im_start|>"));
}

#[test]
fn the_shape_is_the_configurations() {
    let (config, weights) = random_model();
    let metadata = metadata(&to_bytes(&config, &weights, folder(), GgufType::Q8_0).unwrap());
    let number = |key: &str| metadata[key].to_u32().unwrap() as usize;
    assert_eq!(
        metadata["general.architecture"].to_string().unwrap(),
        "llama"
    );
    assert_eq!(number("llama.block_count"), config.num_hidden_layers);
    assert_eq!(
        number("llama.attention.head_count_kv"),
        config.num_key_value_heads
    );
    assert_eq!(number("llama.rope.dimension_count"), config.head_dim);
}
