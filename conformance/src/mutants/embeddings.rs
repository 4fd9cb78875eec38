//! An engine with embeddings, and faults that the checks of EM catch.

use std::sync::Arc;
use std::time::Duration;

use genset_backend_common::{
    EngineConfig, EngineError, Finish, Input, OutputStream, TokenId, async_trait,
    config::{Deviation, InputKind},
    output,
};
use parking_lot::Mutex;

use super::Mutant;
use super::fault::{Call, Fault, Inner, digest, with_fault};
use super::scores::score_of;

pub(super) const CONTROLS: &[Mutant] = &[
    Mutant {
        name: "embeds",
        stands_for: "an engine that embeds, and generates too",
        killed_by: &[],
        build: |clean, scenario| with_fault(clean, scenario, Embeds::new(|_, _| {})),
    },
    Mutant {
        name: "embeds-batch-variant",
        stands_for: "an engine that embeds and declares that sums may be rounded otherwise in a batch",
        killed_by: &[],
        build: |clean, scenario| {
            let embeds = Embeds {
                wrong: ROUNDED_IN_COMPANY,
                deviations: &[Deviation::BatchVariant],
            };
            with_fault(clean, scenario, embeds)
        },
    },
];

pub(super) const MUTANTS: &[Mutant] = &[
    Mutant {
        name: "embedded-by-length",
        stands_for: "a batch sorted by length to save padding, and not put back",
        killed_by: &["EM01"],
        build: |clean, scenario| {
            let sort: Wrong = |embeddings, inputs| {
                let mut order: Vec<usize> = (0..inputs.len()).collect();
                order.sort_unstable_by_key(|place| (inputs[*place].len(), *place));
                *embeddings = order
                    .iter()
                    .map(|place| embeddings[*place].clone())
                    .collect();
            };
            with_fault(clean, scenario, Embeds::new(sort))
        },
    },
    Mutant {
        name: "embedded-once",
        stands_for: "inputs that are alike embedded once, and answered once",
        killed_by: &["EM01", "EM02", "EM03"],
        build: |clean, scenario| {
            let once: Wrong = |embeddings, _| {
                let first = embeddings[0].clone();
                let mut place = 0;
                embeddings.retain(|embedding| {
                    place += 1;
                    place == 1 || *embedding != first
                });
            };
            with_fault(clean, scenario, Embeds::new(once))
        },
    },
    Mutant {
        name: "embedded-with-padding",
        stands_for: "padding that takes part in the mean: what is short depends on its neighbours",
        killed_by: &["EM01"],
        build: |clean, scenario| {
            let padded: Wrong = |embeddings, inputs| {
                let longest = inputs.iter().map(Vec::len).max().unwrap_or(1);
                for (embedding, input) in embeddings.iter_mut().zip(inputs) {
                    let padding = u16::try_from(longest - input.len()).unwrap_or(u16::MAX);
                    embedding[0] += f32::from(padding);
                }
            };
            with_fault(clean, scenario, Embeds::new(padded))
        },
    },
    Mutant {
        name: "embedded-with-other-rounding",
        stands_for: "a kernel chosen by the size of the batch, in an engine that does not say so",
        killed_by: &["EM01"],
        build: |clean, scenario| with_fault(clean, scenario, Embeds::new(ROUNDED_IN_COMPANY)),
    },
    Mutant {
        name: "single-token-divides",
        stands_for: "a variance over one token: a division by zero",
        killed_by: &["EM02"],
        build: |clean, scenario| {
            let divided: Wrong = |embeddings, inputs| {
                for (embedding, input) in embeddings.iter_mut().zip(inputs) {
                    if input.len() == 1 {
                        embedding.fill(0.0);
                    }
                }
            };
            with_fault(clean, scenario, Embeds::new(divided))
        },
    },
    Mutant {
        name: "short-inputs-not-normalised",
        stands_for: "embeddings normalised behind a pooling that short inputs do not go through",
        killed_by: &["EM03"],
        build: |clean, scenario| {
            let normalised: Wrong = |embeddings, inputs| {
                for (embedding, input) in embeddings.iter_mut().zip(inputs) {
                    let squares = embedding.iter().map(|number| number * number);
                    let norm = squares.sum::<f32>().sqrt();
                    if input.len() > 2 {
                        embedding.iter_mut().for_each(|number| *number /= norm);
                    }
                }
            };
            with_fault(clean, scenario, Embeds::new(normalised))
        },
    },
    Mutant {
        name: "embedded-from-a-shared-buffer",
        stands_for: "a buffer for the inputs that the next request fills again: one client's vector under another's document",
        killed_by: &["EM01"],
        build: |clean, scenario| with_fault(clean, scenario, SharesABuffer::of(InputKind::Embed)),
    },
];

/// A change to the embeddings of inputs.
type Wrong = fn(&mut Vec<Vec<f32>>, &[Vec<TokenId>]);

/// Adds embeddings to a clean engine, and declares these deviations.
struct Embeds {
    wrong: Wrong,
    deviations: &'static [Deviation],
}

impl Embeds {
    fn new(wrong: Wrong) -> Self {
        Self {
            wrong,
            deviations: &[],
        }
    }
}

/// Changes the last bits if there are several inputs.
const ROUNDED_IN_COMPANY: Wrong = |embeddings, inputs| {
    if inputs.len() > 1 {
        let numbers = embeddings.iter_mut().flatten();
        numbers.for_each(|number| *number *= 1.0 + 4.0 * f32::EPSILON);
    }
};

/// An embedding that distinguishes inputs.
fn embedding(input: &[TokenId]) -> Vec<f32> {
    let sum = digest(input);
    let length = u16::try_from(input.len()).unwrap_or(u16::MAX);
    [sum, sum / 7, length, 1].map(f32::from).to_vec()
}

#[async_trait]
impl Fault for Embeds {
    fn declare(&self, config: &mut EngineConfig) {
        config.capabilities.inputs.insert(InputKind::Embed);
        config.capabilities.deviations.extend(self.deviations);
    }

    async fn generate(&self, inner: &Inner, call: Call) -> Result<OutputStream, EngineError> {
        let Input::Embed(inputs) = &call.request.input else {
            return inner.generate(call.request, call.ctx).await;
        };
        let mut embeddings = inputs.iter().map(|input| embedding(input)).collect();
        (self.wrong)(&mut embeddings, inputs);
        Ok(output::stream(call.ctx, |out| async move {
            out.embeddings(embeddings).await?;
            Ok(Finish::stop())
        }))
    }
}

/// Embeds or scores what is in its buffer when the computation begins.
pub(super) struct SharesABuffer {
    kind: InputKind,
    buffer: Arc<Mutex<Input>>,
}

impl SharesABuffer {
    /// For inputs of this kind: `Embed` or `Score`.
    pub(super) fn of(kind: InputKind) -> Self {
        let buffer = Arc::new(Mutex::new(Input::Tokens(Vec::new().into())));
        Self { kind, buffer }
    }
}

#[async_trait]
impl Fault for SharesABuffer {
    fn declare(&self, config: &mut EngineConfig) {
        config.capabilities.inputs.insert(self.kind);
    }

    async fn generate(&self, inner: &Inner, call: Call) -> Result<OutputStream, EngineError> {
        if !matches!(call.request.input, Input::Embed(_) | Input::Score(_)) {
            return inner.generate(call.request, call.ctx).await;
        }
        *self.buffer.lock() = call.request.input;
        let buffer = Arc::clone(&self.buffer);
        Ok(output::stream(call.ctx, |out| async move {
            tokio::time::sleep(Duration::from_millis(1)).await;
            let input = buffer.lock().clone();
            match input {
                Input::Embed(inputs) => {
                    let embeddings = inputs.iter().map(|input| embedding(input)).collect();
                    out.embeddings(embeddings).await?;
                }
                Input::Score(pairs) => {
                    let scores = pairs.iter().map(|pair| score_of(&pair.token_ids));
                    out.scores(scores.collect()).await?;
                }
                Input::Tokens(_) | Input::Text(_) | Input::Chat(_) => {}
            }
            Ok(Finish::stop())
        }))
    }
}
