//! [`Model::time_products`]: how long the products of a decode step take, by kind of matrix. Only measurements ask for it, and no
//! step pays for it: it computes the products alone, with the model's own weights.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::hint::black_box;
use std::time::Duration;

use candle_core::{DType, Device, Result, Tensor};
use tokio::time::Instant;

use super::{Block, Model};
use crate::model::linear::{Linear, Matrix};

/// The products of one kind of matrix in a step: those of all layers.
#[derive(Debug, Clone, PartialEq)]
pub struct ProductTime {
    /// What the matrices are for, and the types of their weights: `gate, up (Q4_K)`.
    pub kind: String,
    /// Bytes of weights that a step reads.
    pub bytes: u64,
    /// The median of the measurements.
    pub time: Duration,
}

/// One product of a step.
struct Product<'a> {
    what: &'static str,
    of: Factor<'a>,
    rows: usize,
}

/// What rows are multiplied with.
enum Factor<'a> {
    Linear(&'a Linear),
    /// Not multiplied: only the rows of the step's tokens are read.
    Table(&'a Matrix),
}

/// The measurements of one kind.
struct Kind {
    name: String,
    bytes: usize,
    times: Vec<Duration>,
}

impl Model {
    /// Times the products of a step in which `sequences` sequences decode, `repeats` times. They run in the order of a step, so
    /// weights are read from where a step finds them. `None` on a GPU.
    ///
    /// Of a mixture of experts, the rows are spread evenly over them, and each time others are read.
    ///
    /// # Errors
    /// A tensor operation failed.
    pub fn time_products(
        &self,
        sequences: usize,
        repeats: usize,
    ) -> Result<Option<Vec<ProductTime>>> {
        if !self.device.is_cpu() {
            return Ok(None);
        }
        let mut kinds: Vec<Kind> = Vec::new();
        let mut inputs = HashMap::new();
        // The first time warms up.
        for repeat in 0..=repeats {
            let products = self.products(sequences, repeat);
            for product in &products {
                if let Entry::Vacant(missing) = inputs.entry(product.shape()) {
                    missing.insert(input(product.shape())?);
                }
            }
            let places: Vec<usize> = products
                .iter()
                .map(|product| place(&mut kinds, product.name()))
                .collect();
            let mut times = vec![Duration::ZERO; kinds.len()];
            for (product, place) in products.iter().zip(&places) {
                let input = &inputs[&product.shape()];
                let began = Instant::now();
                drop(black_box(product.compute(input)?));
                times[*place] += began.elapsed();
            }
            for (kind, time) in kinds.iter_mut().zip(times) {
                kind.bytes = 0;
                kind.times.extend((repeat > 0).then_some(time));
            }
            for (product, place) in products.iter().zip(places) {
                kinds[place].bytes += product.bytes();
            }
        }
        Ok(Some(kinds.into_iter().map(Kind::median).collect()))
    }

    /// The products of a step, in its order.
    fn products(&self, sequences: usize, repeat: usize) -> Vec<Product<'_>> {
        let of = |what, linear| Product {
            what,
            of: Factor::Linear(linear),
            rows: sequences,
        };
        let mut products = vec![Product {
            what: "embedding",
            of: Factor::Table(&self.embedding),
            rows: sequences,
        }];
        for layer in &self.layers {
            products.push(of("q, k, v", &layer.qkv));
            products.push(of("attention's output", &layer.output));
            match &layer.feed_forward {
                Block::Dense(block) => {
                    products.push(of("gate, up", &block.gate_up));
                    products.push(of("down", &block.down));
                }
                Block::Experts(mixture) => {
                    products.push(of("router", &mixture.router));
                    let count = mixture.experts.len();
                    let visits = sequences * mixture.config.per_token;
                    for (index, expert) in mixture.experts.iter().enumerate() {
                        let place = (index + repeat * visits) % count;
                        let rows = visits / count + usize::from(place < visits % count);
                        if rows > 0 {
                            let of = |what, linear| Product {
                                rows,
                                ..of(what, linear)
                            };
                            products.push(of("experts' gate, up", &expert.gate_up));
                            products.push(of("experts' down", &expert.down));
                        }
                    }
                    if let Some(shared) = &mixture.shared {
                        products.push(of("shared expert's weight", &shared.gate));
                        products.push(of("shared expert's gate, up", &shared.expert.gate_up));
                        products.push(of("shared expert's down", &shared.expert.down));
                    }
                }
            }
        }
        products.push(of("output head", &self.output));
        products
    }
}

/// Numbers of the size of activations, of both signs.
fn input((rows, columns): (usize, usize)) -> Result<Tensor> {
    let numbers = (0..=96u8).cycle().step_by(37).take(rows * columns);
    let numbers: Vec<f32> = numbers
        .map(|number| f32::from(number) / 48.0 - 1.0)
        .collect();
    Tensor::from_vec(numbers, (rows, columns), &Device::Cpu)
}

/// The index of the kind of this name, which is added if it is new.
fn place(kinds: &mut Vec<Kind>, name: String) -> usize {
    let known = kinds.iter().position(|kind| kind.name == name);
    known.unwrap_or_else(|| {
        kinds.push(Kind {
            name,
            bytes: 0,
            times: Vec::new(),
        });
        kinds.len() - 1
    })
}

impl Kind {
    fn median(mut self) -> ProductTime {
        self.times.sort_unstable();
        let middle = self.times.get(self.times.len() / 2);
        ProductTime {
            time: middle.copied().unwrap_or_default(),
            bytes: u64::try_from(self.bytes).unwrap_or(u64::MAX),
            kind: self.name,
        }
    }
}

impl<'a> Product<'a> {
    fn matrices(&self) -> &'a [Matrix] {
        match self.of {
            Factor::Linear(linear) => linear.parts(),
            Factor::Table(matrix) => std::slice::from_ref(matrix),
        }
    }

    /// Its kind, with each type of weight once.
    fn name(&self) -> String {
        let mut types: Vec<String> = Vec::new();
        for matrix in self.matrices() {
            let dtype = matrix.dtype().to_string();
            if !types.contains(&dtype) {
                types.push(dtype);
            }
        }
        format!("{} ({})", self.what, types.join(", "))
    }

    fn bytes(&self) -> usize {
        let all: usize = self.matrices().iter().map(Matrix::bytes).sum();
        match self.of {
            Factor::Linear(_) => all,
            Factor::Table(matrix) => all / matrix.out_features().max(1) * self.rows,
        }
    }

    /// The shape of its input.
    fn shape(&self) -> (usize, usize) {
        let columns = self.matrices().first().map_or(0, Matrix::in_features);
        (self.rows, columns)
    }

    fn compute(&self, input: &Tensor) -> Result<Tensor> {
        match self.of {
            Factor::Linear(linear) => linear.forward(input),
            Factor::Table(table) => {
                let ids = (0..).take(table.out_features()).cycle();
                let ids: Vec<u32> = ids.take(self.rows).collect();
                table.rows(&ids, &Device::Cpu, DType::F32)
            }
        }
    }
}
