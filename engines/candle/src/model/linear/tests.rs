//! Packed products against candle's, and against themselves with other rows beside.

use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{Device, Tensor};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

use super::*;

const TYPES: [GgmlDType; 6] = [
    GgmlDType::F32,
    GgmlDType::Q4_0,
    GgmlDType::Q8_0,
    GgmlDType::Q4K,
    GgmlDType::Q5K,
    GgmlDType::Q6K,
];

fn random(rng: &mut StdRng, rows: usize, columns: usize) -> Tensor {
    let data: Vec<f32> = (0..rows * columns)
        .map(|_| rng.random_range(-1.0..1.0))
        .collect();
    Tensor::from_vec(data, (rows, columns), &Device::Cpu).unwrap()
}

/// Whole numbers with 127 in every block, which 8-bit rows hold without rounding.
fn whole_numbers(rng: &mut StdRng, rows: usize, columns: usize) -> Tensor {
    let number = |i: usize| {
        if i % 32 == 5 {
            127
        } else {
            rng.random_range(-127..=127i16)
        }
    };
    let data: Vec<f32> = (0..rows * columns).map(number).map(f32::from).collect();
    Tensor::from_vec(data, (rows, columns), &Device::Cpu).unwrap()
}

fn weights(
    rng: &mut StdRng,
    dtype: GgmlDType,
    out_features: usize,
    in_features: usize,
) -> (QTensor, Tensor) {
    let quantized = QTensor::quantize(&random(rng, out_features, in_features), dtype).unwrap();
    let exact = quantized.dequantize(&Device::Cpu).unwrap();
    (quantized, exact)
}

fn largest(x: &Tensor) -> f32 {
    x.abs().unwrap().max_all().unwrap().to_scalar().unwrap()
}

#[test]
fn products_are_exact_on_whole_numbers() {
    let mut rng = StdRng::seed_from_u64(1);
    for dtype in TYPES {
        let columns: &[usize] = if dtype.block_size() == 256 {
            &[256, 768]
        } else {
            &[32, 96, 256]
        };
        for &in_features in columns {
            for out_features in [1, 16, 37] {
                let (quantized, exact) = weights(&mut rng, dtype, out_features, in_features);
                let matrix = Matrix::quantized(quantized)
                    .unwrap()
                    .into_packed(&mut WeightMemory::default())
                    .unwrap();
                for rows in [1, 3, 8, 9, 21] {
                    let x = whole_numbers(&mut rng, rows, in_features);
                    let want = x.matmul(&exact.t().unwrap()).unwrap();
                    let got = matrix.forward(&x).unwrap();
                    let error = largest(&(&got - &want).unwrap()) / largest(&want);
                    assert!(
                        error < 1e-5,
                        "{dtype:?} {rows}x{in_features}x{out_features}: off by {error}"
                    );
                }
            }
        }
    }
}

#[test]
fn rounding_of_rows_costs_little() {
    let mut rng = StdRng::seed_from_u64(2);
    for dtype in TYPES {
        let (quantized, exact) = weights(&mut rng, dtype, 64, 512);
        let matrix = Matrix::quantized(quantized)
            .unwrap()
            .into_packed(&mut WeightMemory::default())
            .unwrap();
        let x = random(&mut rng, 5, 512);
        let want = x.matmul(&exact.t().unwrap()).unwrap();
        let error = largest(&(matrix.forward(&x).unwrap() - &want).unwrap()) / largest(&want);
        assert!(error < 1e-2, "{dtype:?}: off by {error}");
    }
}

#[test]
fn rows_are_those_of_the_file() {
    let mut rng = StdRng::seed_from_u64(3);
    for dtype in TYPES {
        let (quantized, exact) = weights(&mut rng, dtype, 37, 256);
        let ids = [36, 0, 17, 17];
        let want = exact
            .index_select(&Tensor::new(&ids, &Device::Cpu).unwrap(), 0)
            .unwrap();
        let matrix = Matrix::quantized(quantized).unwrap();
        for matrix in [
            matrix.clone(),
            matrix.into_packed(&mut WeightMemory::default()).unwrap(),
        ] {
            let got = matrix.rows(&ids, &Device::Cpu, DType::F32).unwrap();
            assert!(largest(&(got - &want).unwrap()) < 1e-6, "{dtype:?}");
        }
        let matrix = Matrix::dense(exact)
            .unwrap()
            .into_packed(&mut WeightMemory::default())
            .unwrap();
        assert!(matrix.rows(&[37], &Device::Cpu, DType::F32).is_err());
    }
}

#[test]
fn a_row_has_the_same_bits_beside_any_number_of_others() {
    let mut rng = StdRng::seed_from_u64(4);
    for dtype in TYPES {
        let linear = |rng: &mut StdRng| Matrix::quantized(weights(rng, dtype, 48, 512).0).unwrap();
        let bias = random(&mut rng, 1, 96).squeeze(0).unwrap();
        let linear = Linear::try_new(
            vec![linear(&mut rng), linear(&mut rng)],
            Some(bias),
            &mut WeightMemory::default(),
        )
        .unwrap();
        let x = random(&mut rng, 40, 512);
        let all: Vec<Vec<f32>> = linear.forward(&x).unwrap().to_vec2().unwrap();
        for (start, len) in [(0, 1), (39, 1), (3, 2), (5, 7), (8, 8), (11, 29), (0, 33)] {
            let some = linear
                .forward(&x.narrow(0, start, len).unwrap())
                .unwrap()
                .to_vec2::<f32>()
                .unwrap();
            assert!(
                all[start..start + len] == some,
                "{dtype:?}: rows {start}..{} differ",
                start + len
            );
        }
    }
}

#[test]
fn parts_are_side_by_side() {
    let mut rng = StdRng::seed_from_u64(5);
    let (first, _) = weights(&mut rng, GgmlDType::Q4K, 20, 256);
    let (second, _) = weights(&mut rng, GgmlDType::Q6K, 33, 256);
    let third = random(&mut rng, 7, 256);
    let parts = vec![
        Matrix::quantized(first).unwrap(),
        Matrix::quantized(second).unwrap(),
        Matrix::dense(third).unwrap(),
    ];
    let x = random(&mut rng, 4, 256);
    let apart: Vec<Tensor> = parts
        .iter()
        .map(|part| {
            part.clone()
                .into_packed(&mut WeightMemory::default())
                .unwrap()
                .forward(&x)
                .unwrap()
        })
        .collect();
    let want: Vec<Vec<f32>> = Tensor::cat(&apart, 1).unwrap().to_vec2().unwrap();
    let got: Vec<Vec<f32>> = Linear::try_new(parts, None, &mut WeightMemory::default())
        .unwrap()
        .forward(&x)
        .unwrap()
        .to_vec2()
        .unwrap();
    assert!(got == want);
}

#[test]
fn not_a_number_stays_in_its_row() {
    let mut rng = StdRng::seed_from_u64(6);
    for dtype in [GgmlDType::F32, GgmlDType::Q8_0, GgmlDType::Q4K] {
        let (quantized, _) = weights(&mut rng, dtype, 16, 256);
        let matrix = Matrix::quantized(quantized)
            .unwrap()
            .into_packed(&mut WeightMemory::default())
            .unwrap();
        let mut x: Vec<f32> = random(&mut rng, 3, 256)
            .flatten_all()
            .unwrap()
            .to_vec1()
            .unwrap();
        x[256 + 77] = f32::NAN;
        let out = matrix
            .forward(&Tensor::from_vec(x, (3, 256), &Device::Cpu).unwrap())
            .unwrap();
        let out: Vec<Vec<f32>> = out.to_vec2().unwrap();
        assert!(out[1].iter().all(|v| v.is_nan()), "{dtype:?}");
        assert!(
            out[0].iter().chain(&out[2]).all(|v| v.is_finite()),
            "{dtype:?}"
        );
    }
}
