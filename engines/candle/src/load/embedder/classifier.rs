//! The head of a cross-encoder: the classifier of `transformers`, and the activation that `sentence-transformers` applies to
//! its single output.
//!
//! # Source
//! `BertForSequenceClassification`, `RobertaClassificationHead` and `ModernBertForSequenceClassification` of `transformers`;
//! `CrossEncoder` of `sentence-transformers`.

use std::path::Path;

use serde_json::Value;

use super::MODULES;
use super::config::Kind;
use super::modules::{hidden_activation, listed_modules, read_json, torch_activation};
use crate::error::LoadError;
use crate::model::{EncoderConfig, HeadConfig, HeadStep, Nonlinearity, Pooling};

/// The configuration that `sentence-transformers` writes beside a model.
const SENTENCE_TRANSFORMERS: &str = "config_sentence_transformers.json";

/// The classifier of a checkout.
pub(super) struct Classifier<'a> {
    /// The checkout's folder.
    pub(super) folder: &'a Path,
    /// The path and the content of its `config.json`.
    pub(super) path: &'a Path,
    pub(super) config: &'a Value,
    pub(super) kind: Kind,
    pub(super) encoder: &'a EncoderConfig,
}

impl Classifier<'_> {
    /// The head that computes one score from the encoder's vectors.
    ///
    /// # Errors
    /// There is more than one label, something is not supported, or a file is broken.
    pub(super) fn head(&self) -> Result<HeadConfig, LoadError> {
        self.refuse_modules()?;
        self.refuse_labels()?;
        let score = self.activation()?;
        let (pooling, steps) = match self.kind {
            Kind::Bert => (
                Pooling::Cls,
                vec![
                    self.square("bert.pooler.dense", Nonlinearity::Tanh, true),
                    self.last("classifier", score),
                ],
            ),
            Kind::Roberta => (
                Pooling::Cls,
                vec![
                    self.square("classifier.dense", Nonlinearity::Tanh, true),
                    self.last("classifier.out_proj", score),
                ],
            ),
            Kind::ModernBert => (self.modern_pooling()?, self.modern_steps(score)?),
        };
        Ok(HeadConfig {
            pooling: vec![pooling],
            steps,
        })
    }

    fn modern_pooling(&self) -> Result<Pooling, LoadError> {
        let key = "classifier_pooling";
        match self.text(key)?.unwrap_or("cls") {
            "cls" => Ok(Pooling::Cls),
            "mean" => Ok(Pooling::Mean),
            other => Err(self.unsupported(key, other, "cls and mean are")),
        }
    }

    fn modern_steps(&self, score: Nonlinearity) -> Result<Vec<HeadStep>, LoadError> {
        let key = "classifier_activation";
        let activation = hidden_activation(self.path, key, self.text(key)?.unwrap_or("gelu"))?;
        let has_bias = self.flag("classifier_bias")?;
        let norm = HeadStep::LayerNorm {
            name: "head.norm".to_owned(),
            folder: String::new(),
            width: self.encoder.hidden_size,
            has_bias: self.encoder.has_norm_bias,
            eps: self.encoder.norm_eps,
        };
        Ok(vec![
            self.square("head.dense", activation, has_bias),
            norm,
            self.last("classifier", score),
        ])
    }

    fn square(&self, name: &str, activation: Nonlinearity, has_bias: bool) -> HeadStep {
        self.dense(name, self.encoder.hidden_size, activation, has_bias)
    }

    /// The last layer, with one output.
    fn last(&self, name: &str, activation: Nonlinearity) -> HeadStep {
        self.dense(name, 1, activation, true)
    }

    fn dense(
        &self,
        name: &str,
        out_features: usize,
        activation: Nonlinearity,
        has_bias: bool,
    ) -> HeadStep {
        HeadStep::Dense {
            name: name.to_owned(),
            folder: String::new(),
            in_features: self.encoder.hidden_size,
            out_features,
            has_bias,
            activation,
        }
    }

    /// Accepts a list of modules only if it names the model itself and nothing else.
    fn refuse_modules(&self) -> Result<(), LoadError> {
        let path = self.folder.join(MODULES);
        for (index, module) in listed_modules(&path)?
            .unwrap_or_default()
            .iter()
            .enumerate()
        {
            let is_model = index == 0 && module.path.is_empty() && module.name() == "Transformer";
            if !is_model {
                let fix = "one Transformer in the checkout's own folder is, for a model with a classifier";
                let field = format!("module {index}");
                return Err(LoadError::unsupported(&path, &field, module.name(), fix));
            }
        }
        Ok(())
    }

    fn refuse_labels(&self) -> Result<(), LoadError> {
        /// The default of `transformers`.
        const BY_DEFAULT: u64 = 2;
        let listed = self.config.get("id2label").and_then(Value::as_object);
        let (key, labels) = match (listed, self.config.get("num_labels")) {
            (Some(listed), _) => ("id2label", u64::try_from(listed.len()).unwrap_or(u64::MAX)),
            (None, Some(number)) if !number.is_null() => (
                "num_labels",
                number.as_u64().ok_or_else(|| {
                    LoadError::bad_config(self.path, "num_labels", "is no number of labels")
                })?,
            ),
            (None, _) => ("id2label", BY_DEFAULT),
        };
        if labels == 1 {
            return Ok(());
        }
        let value = format!("({labels} labels)");
        let fix = "a model with one label is: a cross-encoder that scores pairs, and no classifier of texts";
        Err(self.unsupported(key, value, fix))
    }

    /// The activation of the classifier's output: the checkout's, else the sigmoid, as for every model with one label.
    fn activation(&self) -> Result<Nonlinearity, LoadError> {
        let beside = self.folder.join(SENTENCE_TRANSFORMERS);
        let written = read_json::<Value>(&beside)?.unwrap_or_default();
        let new = self.config.pointer("/sentence_transformers/activation_fn");
        let old = self.config.get("sbert_ce_default_activation_function");
        let places = [
            (self.path, "sentence_transformers.activation_fn", new),
            (self.path, "sbert_ce_default_activation_function", old),
            (
                beside.as_path(),
                "activation_fn",
                written.get("activation_fn"),
            ),
        ];
        for (path, field, value) in places {
            match value {
                None | Some(Value::Null) => {}
                Some(Value::String(named)) => return torch_activation(path, field, named),
                Some(_) => return Err(LoadError::bad_config(path, field, "is no name")),
            }
        }
        Ok(Nonlinearity::Sigmoid)
    }

    fn text(&self, key: &str) -> Result<Option<&str>, LoadError> {
        match self.config.get(key) {
            None | Some(Value::Null) => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(_) => Err(LoadError::bad_config(self.path, key, "is no text")),
        }
    }

    fn flag(&self, key: &str) -> Result<bool, LoadError> {
        match self.config.get(key) {
            None | Some(Value::Null) => Ok(false),
            Some(Value::Bool(flag)) => Ok(*flag),
            Some(_) => Err(LoadError::bad_config(self.path, key, "is no true or false")),
        }
    }

    fn unsupported(
        &self,
        field: &str,
        value: impl std::fmt::Display,
        fix: &'static str,
    ) -> LoadError {
        LoadError::unsupported(self.path, field, value, fix)
    }
}
