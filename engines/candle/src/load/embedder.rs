//! [`OpenEmbedder`]: a checkout whose model computes one vector per text, or one score per pair of texts.
//!
//! `config` reads the encoder's configuration, `modules` the pooling and further modules of `sentence-transformers`, and
//! `classifier` their replacement in a cross-encoder.

mod classifier;
mod config;
mod modules;
mod plan;

use std::path::{Path, PathBuf};

use candle_core::Tensor;
use serde_json::Value;

use self::classifier::Classifier;
use super::checkout::Naming;
use super::map::MappedFile;
use super::plan::{PlannedTensor, plan as decoder_plan};
use super::safetensors::SafetensorsFolder;
use super::tensors::RawTensor;
use super::weights::{LoadProgress, ModelWeights, WeightOptions, dense, to_u64};
use super::{
    CONFIG, MemoryEstimate, TensorFiles, check_tokenizer, folder_name, read_config, read_file,
};
use crate::error::{Bytes, LoadError};
use crate::model::{BackboneConfig, HeadConfig, ModelConfig};

/// The file that lists a checkout's modules.
const MODULES: &str = "modules.json";

/// The purpose of a checkout's model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Purpose {
    /// It computes one vector per text.
    Embed,
    /// It is a cross-encoder: its vector is a single score of a pair of texts.
    Score,
}

/// An embedding model whose headers were read and checked, and whose weights are still on disk.
#[derive(Debug)]
pub struct OpenEmbedder {
    /// The default name for clients: the folder's.
    pub name: String,
    /// The model's purpose.
    pub purpose: Purpose,
    /// Computes the vectors of a sequence.
    pub backbone: BackboneConfig,
    /// Combines them into one.
    pub head: HeadConfig,
    /// The maximum length of a sequence, including the tokens that the tokenizer adds.
    pub max_tokens: usize,
    path: PathBuf,
    folder: SafetensorsFolder,
    /// The naming of a decoder's tensors in the files.
    naming: Naming,
    /// The prefix of an encoder's tensors in the files.
    prefix: &'static str,
}

impl OpenEmbedder {
    /// Whether the folder has such a model: an encoder, or a decoder whose `modules.json` has a pooling module.
    #[must_use]
    pub fn is_at(path: &Path) -> bool {
        let config = read_file(&path.join(CONFIG)).ok();
        let config = config.and_then(|text| serde_json::from_slice::<Value>(&text).ok());
        config.is_some_and(|config| config::is_encoder(&config) || path.join(MODULES).is_file())
    }

    /// Opens a checkout folder, and checks that all tensors exist with the right shapes.
    ///
    /// # Errors
    /// [`LoadError`]: any problem with the files.
    pub fn open(path: &Path) -> Result<Self, LoadError> {
        let (config_path, text) = read_config(path)?;
        let described = config::read(&config_path, &text)?;
        let head = head_of(path, &config_path, &text, &described)?;
        modules::check_case(path)?;
        let most = described.max_tokens;
        let folder = SafetensorsFolder::open(path)?;
        let prefix = match &described.backbone {
            BackboneConfig::Encoder(config) => plan::prefix(config, &folder)?,
            BackboneConfig::Decoder(_) => "",
        };
        let open = Self {
            name: folder_name(path),
            max_tokens: modules::max_tokens(path)?.map_or(most, |asked| asked.min(most)),
            naming: described.naming,
            purpose: described.purpose,
            backbone: described.backbone,
            head,
            path: path.to_owned(),
            folder,
            prefix,
        };
        open.check()?;
        Ok(open)
    }

    fn check(&self) -> Result<(), LoadError> {
        check_tokenizer(&self.path, self.backbone.vocab_size())?;
        for tensor in self.planned() {
            self.required(&tensor.name, &tensor.shape)?;
        }
        for (folder, tensor) in plan::of_head(&self.head) {
            let folder = SafetensorsFolder::open(&self.path.join(folder))?;
            folder.required(&tensor.name, &tensor.shape)?;
        }
        Ok(())
    }

    /// The width of a vector.
    #[must_use]
    pub fn width(&self) -> usize {
        self.head.width(self.backbone.hidden_size())
    }

    /// Prepares to read the weights of the backbone.
    ///
    /// `progress` is called after each tensor. Its error ends loading.
    #[must_use]
    pub fn weights<'a>(
        &'a self,
        options: WeightOptions,
        progress: impl FnMut(LoadProgress) -> Result<(), LoadError> + 'a,
    ) -> ModelWeights<'a> {
        ModelWeights::new(self, options, Box::new(progress))
    }

    /// The memory that the model will take on the device with steps of `step_tokens`, before anything is allocated.
    #[must_use]
    pub fn memory(&self, options: &WeightOptions, step_tokens: usize) -> MemoryEstimate {
        let mut estimate = MemoryEstimate::new(self, options);
        let numbers = self
            .backbone
            .step_numbers_per_token()
            .saturating_mul(step_tokens);
        let step = to_u64(numbers).saturating_mul(4);
        estimate.workspace = estimate.workspace.saturating_add(step);
        estimate
    }

    /// Rejects a model that does not fit in memory with steps of `step_tokens`.
    ///
    /// # Errors
    /// `NotEnoughMemory`, with the figures and the flags that help.
    pub fn check_memory(
        &self,
        options: &WeightOptions,
        step_tokens: usize,
        available: u64,
    ) -> Result<(), LoadError> {
        let estimate = self.memory(options, step_tokens);
        let needed = estimate.total();
        if needed <= available {
            return Ok(());
        }
        Err(LoadError::NotEnoughMemory {
            estimate: format!(
                "weights take {} and a step of {step_tokens} tokens {}: {} in all",
                Bytes(estimate.weights),
                Bytes(estimate.workspace),
                Bytes(needed),
            ),
            available,
            fix: "lower --max-num-batched-tokens, which bounds inputs too, or take a smaller model"
                .into(),
        })
    }

    /// Reads a tensor of the head's steps from the checkout's `folder`, in f32 on the CPU.
    pub(crate) fn head_tensor(
        &self,
        folder: &str,
        name: &str,
        shape: &[usize],
    ) -> Result<Tensor, LoadError> {
        let folder = SafetensorsFolder::open(&self.path.join(folder))?;
        dense(&folder.required(name, shape)?)
    }
}

/// The head of the model that is `described` by the `config.json` with this text.
fn head_of(
    folder: &Path,
    path: &Path,
    text: &[u8],
    described: &config::Described,
) -> Result<HeadConfig, LoadError> {
    match (&described.backbone, described.kind, described.purpose) {
        (BackboneConfig::Encoder(encoder), Some(kind), Purpose::Score) => {
            let config = serde_json::from_slice(text);
            let config: Value = config.map_err(|error| LoadError::broken(path, error))?;
            let classifier = Classifier {
                folder,
                path,
                config: &config,
                kind,
                encoder,
            };
            classifier.head()
        }
        (backbone, _, _) => modules::head(folder, backbone.hidden_size()),
    }
}

impl TensorFiles for OpenEmbedder {
    fn path(&self) -> &Path {
        &self.path
    }

    fn planned(&self) -> Vec<PlannedTensor> {
        match &self.backbone {
            BackboneConfig::Encoder(config) => plan::of_encoder(config),
            BackboneConfig::Decoder(config) => decoder_plan(config),
        }
    }

    fn tensor(&self, name: &str) -> Result<Option<RawTensor<'_>>, LoadError> {
        match &self.backbone {
            BackboneConfig::Encoder(_) => self.encoder_tensor(name),
            BackboneConfig::Decoder(config) => self.decoder_tensor(name, config),
        }
    }

    fn mapped(&self) -> &[MappedFile] {
        self.folder.mapped()
    }
}

impl OpenEmbedder {
    fn encoder_tensor(&self, name: &str) -> Result<Option<RawTensor<'_>>, LoadError> {
        let prefixed = format!("{}{name}", self.prefix);
        if let Some(tensor) = self.folder.tensor(&prefixed)? {
            return Ok(Some(tensor));
        }
        // The old names of norm tensors, which came from TensorFlow.
        let old = [(".weight", ".gamma"), (".bias", ".beta")];
        let old = old.into_iter().find_map(|(new, old)| {
            let stem = prefixed.strip_suffix(new)?;
            stem.ends_with("LayerNorm").then(|| format!("{stem}{old}"))
        });
        match old {
            Some(old) => self.folder.tensor(&old),
            None => Ok(None),
        }
    }

    /// Names begin with `model.`, or lack that prefix if the checkout is of a model without an output matrix.
    fn decoder_tensor(
        &self,
        name: &str,
        config: &ModelConfig,
    ) -> Result<Option<RawTensor<'_>>, LoadError> {
        let place = self.naming.place(name, config);
        let bare = place.name.strip_prefix("model.").unwrap_or(&place.name);
        for name in [place.name.as_str(), bare] {
            if let Some(raw) = self.folder.tensor(name)? {
                let found = raw.shape.clone();
                let cut = place.cut(raw);
                return cut
                    .map(Some)
                    .map_err(|expected| self.wrong_shape(name, found, expected));
            }
        }
        Ok(None)
    }
}
