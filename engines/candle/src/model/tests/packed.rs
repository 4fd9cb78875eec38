//! Models of packed weights compared with the numbers that these stand for, and recorded steps of such models.

use candle_core::quantized::{GgmlDType, QTensor};

use super::*;
use crate::error::LoadError;
use crate::load::ModelWeights;
use crate::load::tests::relative_error;

/// Models of packed weights, made by `tests/reference/packed.py`.
const PACKED: [&str; 12] = [
    "gptq",
    "gptq-zeros",
    "gptq-order",
    "gptq-v2",
    "gptq-small-groups",
    "awq",
    "compressed-int4",
    "compressed-int4-zeros",
    "fp8-blocks",
    "fp8-rows",
    "fp8-whole",
    "gpt-oss",
];

/// Weights whose matrices are a loader's in f32, so that products with blocks do not round activations.
struct Exact<'a>(ModelWeights<'a>);

impl Exact<'_> {
    fn exact(matrix: &Matrix) -> Matrix {
        let ids: Vec<u32> = (0..).take(matrix.out_features()).collect();
        Matrix::dense(matrix.rows(&ids, &Device::Cpu, DType::F32).unwrap()).unwrap()
    }
}

impl Weights for Exact<'_> {
    fn device(&self) -> &Device {
        self.0.device()
    }

    fn tensor(&mut self, name: &str, shape: &[usize]) -> Result<Tensor, LoadError> {
        self.0.tensor(name, shape)
    }

    fn matrix(&mut self, name: &str, rows: usize, columns: usize) -> Result<Matrix, LoadError> {
        Ok(Self::exact(&self.0.matrix(name, rows, columns)?))
    }
}

fn load_exact(name: &str) -> (Model, ModelConfig) {
    let open = OpenModel::open(&reference(name)).unwrap();
    let mut weights = Exact(open.weights(WeightOptions::exact(), |_| Ok(())));
    let model = Model::try_new(&open.config, &mut weights).unwrap();
    drop(weights);
    (model, open.config)
}

/// As [`Exact`], but matrices with `part` in their names are quantized.
struct QuantizedPart<'a> {
    exact: Exact<'a>,
    part: &'a str,
}

impl QuantizedPart<'_> {
    fn quantized(&self, name: &str, matrix: Matrix) -> Matrix {
        if !name.contains(self.part) {
            return matrix;
        }
        let ids: Vec<u32> = (0..).take(matrix.out_features()).collect();
        let numbers = matrix.rows(&ids, &Device::Cpu, DType::F32).unwrap();
        Matrix::quantized(QTensor::quantize(&numbers, GgmlDType::Q8_0).unwrap()).unwrap()
    }
}

impl Weights for QuantizedPart<'_> {
    fn device(&self) -> &Device {
        self.exact.device()
    }

    fn tensor(&mut self, name: &str, shape: &[usize]) -> Result<Tensor, LoadError> {
        self.exact.tensor(name, shape)
    }

    fn matrix(&mut self, name: &str, rows: usize, columns: usize) -> Result<Matrix, LoadError> {
        let matrix = self.exact.matrix(name, rows, columns)?;
        Ok(self.quantized(name, matrix))
    }
}

#[test]
fn a_step_with_any_quantized_matrix_is_not_recorded() {
    let can_be_recorded = |model: &str, part: &str| {
        let open = OpenModel::open(&reference(model)).unwrap();
        let exact = Exact(open.weights(WeightOptions::exact(), |_| Ok(())));
        let mut weights = QuantizedPart { exact, part };
        let model = Model::try_new(&open.config, &mut weights).unwrap();
        model.can_be_recorded()
    };
    // Its rows are whole blocks, and its output matrix is not tied.
    let model = "gptq";
    assert!(can_be_recorded(model, "none"));
    for part in [
        "embed_tokens",
        "layers.1.self_attn.q_proj",
        "layers.1.self_attn.v_proj",
        "layers.1.self_attn.o_proj",
        "layers.1.mlp.gate_proj",
        "layers.1.mlp.up_proj",
        "layers.1.mlp.down_proj",
        "lm_head",
    ] {
        assert!(!can_be_recorded(model, part), "{part}");
    }
    for model in ["gpt-oss-bf16", "olmo2", "cohere2", "ministral3"] {
        assert!(!can_be_recorded(model, "none"), "{model}");
    }
}

#[test]
fn packed_weights_are_the_numbers_that_they_stand_for() {
    for name in PACKED {
        let (model, config) = load_exact(name);
        for case in cases(name) {
            let last = last_rows(&model, &mut cache(&config), &case);
            let what = format!("{name}, {} tokens", case.tokens.len());
            assert_close(&last, &case.logits, TOLERANCE, &what);
        }
    }
}

/// As served: with activations in eight bits, and weights that fit no block type in the default one. Random experts are all
/// different, so a rounded row may choose other experts.
#[test]
fn packed_weights_as_they_are_served_are_near_the_reference() {
    for name in PACKED {
        let (model, config) = load(name, Quantization::default());
        for case in cases(name) {
            let last = last_rows(&model, &mut cache(&config), &case);
            let error = relative_error(&case.logits.concat(), &last.concat());
            assert!(error > 0.0 && error < 0.25, "{name}: {error}");
        }
    }
}
