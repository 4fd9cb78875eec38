//! Checkouts of cross-encoders: how they are read, and what is rejected.

use super::*;
use crate::load::Purpose;
use crate::model::Nonlinearity;

const BERT: &str = "bert-scores";
const MODERN: &str = "modernbert-scores";

fn score_of(folder: &Path) -> Nonlinearity {
    let open = OpenEmbedder::open(folder).unwrap();
    assert_eq!(open.purpose, Purpose::Score);
    let Some(HeadStep::Dense {
        out_features: 1,
        activation,
        ..
    }) = open.head.steps.last()
    else {
        panic!("{:?}", open.head.steps);
    };
    *activation
}

#[test]
fn checkouts_with_a_classifier_score_and_others_embed() {
    for (name, purpose) in [
        ("bert", Purpose::Embed),
        ("qwen3", Purpose::Embed),
        (BERT, Purpose::Score),
        (MODERN, Purpose::Score),
        ("xlm-roberta-scores", Purpose::Score),
    ] {
        assert!(OpenEmbedder::is_at(&encoder(name)), "{name}");
        let open = OpenEmbedder::open(&encoder(name)).unwrap();
        assert_eq!(open.purpose, purpose, "{name}");
    }
    let open = OpenEmbedder::open(&encoder(BERT)).unwrap();
    assert_eq!(open.max_tokens, 150, "of tokenizer_config.json");
}

/// CamemBERT is RoBERTa with another vocabulary.
#[test]
fn camemberts_are_robertas() {
    let expected = OpenEmbedder::open(&encoder("xlm-roberta-scores")).unwrap();
    let folder = copy_of_encoder("xlm-roberta-scores");
    let named = json!("CamembertForSequenceClassification");
    set(&folder, CONFIG, "/architectures/0", named);
    let open = OpenEmbedder::open(folder.path()).unwrap();
    let described = |open: OpenEmbedder| (open.purpose, open.backbone, open.head, open.max_tokens);
    assert_eq!(described(open), described(expected));
}

#[test]
fn the_checkout_says_what_becomes_of_the_number_and_else_it_is_the_sigmoid() {
    for (name, activation) in [
        (BERT, Nonlinearity::Identity),
        (MODERN, Nonlinearity::Sigmoid),
        ("xlm-roberta-scores", Nonlinearity::Sigmoid),
    ] {
        assert_eq!(score_of(&encoder(name)), activation, "{name}");
    }
    let folder = copy_of_encoder(BERT);
    let old = "/sbert_ce_default_activation_function";
    set(&folder, CONFIG, old, Value::Null);
    assert_eq!(score_of(folder.path()), Nonlinearity::Sigmoid);
    let beside = "config_sentence_transformers.json";
    let named = json!("torch.nn.modules.linear.Identity");
    set(&folder, beside, "/activation_fn", named);
    assert_eq!(score_of(folder.path()), Nonlinearity::Identity);
    let named = json!({"activation_fn": "torch.nn.modules.activation.Sigmoid"});
    set(&folder, CONFIG, "/sentence_transformers", named);
    assert_eq!(score_of(folder.path()), Nonlinearity::Sigmoid);
}

#[test]
fn a_list_of_modules_with_the_model_alone_changes_nothing() {
    let folder = copy_of_encoder(BERT);
    let path = folder.path().join("modules.json");
    let model = json!({"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"});
    fs::write(&path, json!([model]).to_string()).unwrap();
    assert_eq!(score_of(folder.path()), Nonlinearity::Identity);
    let pooling = json!({"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"});
    fs::write(&path, json!([model, pooling]).to_string()).unwrap();
    let error = OpenEmbedder::open(folder.path()).unwrap_err().to_string();
    assert!(
        error.contains("module 1") && error.contains("Pooling"),
        "{error}"
    );
}

#[test]
fn what_cannot_be_scored_is_named_with_what_would_do() {
    let activation = "sbert_ce_default_activation_function";
    let softmax = json!("torch.nn.modules.activation.Softmax");
    let labels = json!({"0": "no", "1": "maybe", "2": "yes"});
    let one = "is not supported; a model with one label is";
    let (three, two) = (format!("(3 labels) {one}"), format!("(2 labels) {one}"));
    let of_bert = [
        ("id2label", labels, three.as_str()),
        ("id2label", Value::Null, &two),
        (activation, softmax, "Softmax is not supported; Identity"),
        (activation, json!(1), "no name"),
    ];
    assert_keys_are_named(BERT, CONFIG, &of_bert);
    let of_modern = [
        ("classifier_pooling", json!("max"), "cls and mean"),
        ("classifier_activation", json!("laplace"), "gelu"),
        ("classifier_bias", json!("yes"), "no true or false"),
    ];
    assert_keys_are_named(MODERN, CONFIG, &of_modern);
    // Their tensors are missing.
    let roberta = json!("RobertaForSequenceClassification");
    for (name, pointer, value, tensor) in [
        (MODERN, "/classifier_bias", json!(true), "head.dense.bias"),
        (BERT, "/architectures/0", roberta, "classifier.dense.weight"),
    ] {
        assert_refused(name, CONFIG, pointer, value, ["has no tensor", tensor]);
    }
    let folder = copy_of_encoder(BERT);
    set(&folder, CONFIG, "/id2label", Value::Null);
    set(&folder, CONFIG, "/num_labels", json!(1));
    assert_eq!(score_of(folder.path()), Nonlinearity::Identity);
}
