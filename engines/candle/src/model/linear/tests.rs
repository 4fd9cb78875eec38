//! Packed products compared with candle's, and with themselves beside other rows.

use candle_core::quantized::{GgmlDType, QStorage, QTensor};
use candle_core::{Device, Tensor};
use genset_kernels::{ActivationBits, product_of};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

use super::*;

const TYPES: [GgmlDType; 11] = [
    GgmlDType::F32,
    GgmlDType::Q4_0,
    GgmlDType::Q4_1,
    GgmlDType::Q5_0,
    GgmlDType::Q5_1,
    GgmlDType::Q8_0,
    GgmlDType::Q2K,
    GgmlDType::Q3K,
    GgmlDType::Q4K,
    GgmlDType::Q5K,
    GgmlDType::Q6K,
];

/// The kernels that this processor can run, each forced, the widest first.
fn every_kernels() -> Vec<Option<QuantizedKernels>> {
    let every: Vec<_> = QuantizedKernels::every().into_iter().map(Some).collect();
    if every.is_empty() { vec![None] } else { every }
}

fn packed(matrix: Matrix, kernels: Option<QuantizedKernels>) -> Matrix {
    matrix
        .packed_for(kernels, &mut WeightMemory::default())
        .unwrap()
}

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
                let matrix = Matrix::quantized(quantized).unwrap();
                for kernels in every_kernels() {
                    let matrix = packed(matrix.clone(), kernels);
                    for rows in [1, 3, 8, 9, 21, 43] {
                        let x = whole_numbers(&mut rng, rows, in_features);
                        let want = x.matmul(&exact.t().unwrap()).unwrap();
                        let got = matrix.forward(&x).unwrap();
                        // Products may cancel out, but not their absolute values.
                        let sizes = x.abs().unwrap().matmul(&exact.abs().unwrap().t().unwrap());
                        let error = largest(&(&got - &want).unwrap()) / largest(&sizes.unwrap());
                        assert!(
                            error < 1e-6,
                            "{dtype:?} {kernels:?} {rows}x{in_features}x{out_features}: off by {error}"
                        );
                    }
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
        let matrix = Matrix::quantized(quantized).unwrap();
        // A whole group of rows, and one with an odd number of rows.
        let x = random(&mut rng, 13, 512);
        let want = x.matmul(&exact.t().unwrap()).unwrap();
        let products = every_kernels().into_iter().map(|kernels| {
            let matrix = packed(matrix.clone(), kernels);
            matrix.forward(&x).unwrap()
        });
        let products: Vec<Tensor> = products.collect();
        for product in &products {
            let error = largest(&(product - &want).unwrap()) / largest(&want);
            assert!(error < 1e-2, "{dtype:?}: off by {error}");
            // All kernels multiply the same integers, and scale their sums in the same order.
            let apart = largest(&(product - &products[0]).unwrap());
            assert!(apart == 0.0, "{dtype:?}: {apart} between processors");
        }
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
        let bias = random(&mut rng, 1, 96).squeeze(0).unwrap();
        let x = random(&mut rng, 40, 512);
        let parts = [0, 1].map(|_| weights(&mut rng, dtype, 48, 512).0);
        let parts = parts.map(|part| Matrix::quantized(part).unwrap());
        for kernels in every_kernels() {
            let linear = Linear {
                parts: parts.clone().map(|part| packed(part, kernels)).into(),
                bias: Some(bias.clone()),
            };
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
}

#[test]
fn many_rows_are_each_as_alone_with_many_tiles() {
    let mut rng = StdRng::seed_from_u64(12);
    // A thread's range has several tiles, and more than are unpacked together.
    let (rows, in_features, out_features) = (43, 256, 1700);
    for dtype in TYPES {
        let (quantized, _) = weights(&mut rng, dtype, out_features, in_features);
        let matrix = Matrix::quantized(quantized).unwrap();
        let mut x: Vec<f32> = (0..rows * in_features)
            .map(|_| rng.random_range(-1.0..1.0))
            .collect();
        // Some blocks have residuals.
        x.iter_mut().step_by(97).for_each(|x| *x *= 50.0);
        let x = Tensor::from_vec(x, (rows, in_features), &Device::Cpu).unwrap();
        for kernels in every_kernels() {
            let matrix = packed(matrix.clone(), kernels);
            let together: Vec<Vec<f32>> = matrix.forward(&x).unwrap().to_vec2().unwrap();
            for row in [0, 7, 18, 39, 42] {
                let alone = matrix.forward(&x.narrow(0, row, 1).unwrap()).unwrap();
                let alone: Vec<f32> = alone.flatten_all().unwrap().to_vec1().unwrap();
                assert!(alone == together[row], "{dtype:?} {kernels:?}: row {row}");
            }
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
    let types = [GgmlDType::F32, GgmlDType::Q8_0, GgmlDType::Q4K];
    let each = types.into_iter().flat_map(|dtype| {
        let kernels = every_kernels().into_iter();
        kernels.map(move |kernels| (dtype, kernels))
    });
    for (dtype, kernels) in each {
        let (quantized, _) = weights(&mut rng, dtype, 16, 256);
        let matrix = packed(Matrix::quantized(quantized).unwrap(), kernels);
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

/// The offsets of f16 numbers in blocks of a type.
fn halves_of(dtype: GgmlDType) -> &'static [usize] {
    const HALVES: [(GgmlDType, &[usize]); 10] = [
        (GgmlDType::Q4_0, &[0]),
        (GgmlDType::Q4_1, &[0, 2]),
        (GgmlDType::Q5_0, &[0]),
        (GgmlDType::Q5_1, &[0, 2]),
        (GgmlDType::Q8_0, &[0]),
        (GgmlDType::Q2K, &[80, 82]),
        (GgmlDType::Q3K, &[108]),
        (GgmlDType::Q4K, &[0, 2]),
        (GgmlDType::Q5K, &[0, 2]),
        (GgmlDType::Q6K, &[208]),
    ];
    HALVES.iter().find(|(of, _)| *of == dtype).unwrap().1
}

proptest::proptest! {
    #![proptest_config(proptest::test_runner::Config::with_cases(64))]

    /// Blocks of arbitrary bytes, as a file may have them, multiply like the numbers that candle unpacks from them.
    #[test]
    fn any_blocks_are_multiplied_as_the_numbers_that_they_stand_for(
        dtype in proptest::sample::select(&TYPES[1..]),
        out_features in 1usize..40,
        blocks in 1usize..6,
        rows in 1usize..10,
        seed: u64,
    ) {
        let mut rng = StdRng::seed_from_u64(seed);
        let in_features = blocks * dtype.block_size();
        let mut bytes = vec![0; out_features * blocks * dtype.type_size()];
        rng.fill(bytes.as_mut_slice());
        for block in bytes.chunks_exact_mut(dtype.type_size()) {
            for &at in halves_of(dtype) {
                // Any sign, and sizes that do not vanish in sums.
                block[at + 1] = (block[at + 1] & 0x83) | 0x2C;
            }
        }
        let storage = QStorage::from_data(bytes.into(), &Device::Cpu, dtype).unwrap();
        let quantized = QTensor::new(storage, (out_features, in_features)).unwrap();
        let exact = quantized.dequantize(&Device::Cpu).unwrap();
        let x = whole_numbers(&mut rng, rows, in_features);
        let want = x.matmul(&exact.t().unwrap()).unwrap();
        let ids: Vec<u32> = (0..u32::try_from(out_features).unwrap()).collect();
        let matrix = Matrix::quantized(quantized).unwrap();
        for kernels in every_kernels() {
            let matrix = packed(matrix.clone(), kernels);
            let got = matrix.rows(&ids, &Device::Cpu, DType::F32).unwrap();
            proptest::prop_assert!(largest(&(got - &exact).unwrap()) <= 1e-6 * largest(&exact));
            let error = largest(&(matrix.forward(&x).unwrap() - &want).unwrap());
            let most = largest(&exact) * 127.0 * f32::from(u16::try_from(in_features).unwrap());
            proptest::prop_assert!(error <= 1e-6 * most, "{kernels:?}: off by {error} of {most}");
        }
    }
}

/// Pseudo-random bytes, and the start of blocks.
fn lcg_block(bytes: usize, start: &[u8]) -> Vec<u8> {
    let mut state = 7u32;
    let mut block: Vec<u8> = (0..bytes)
        .map(|_| {
            state = state.wrapping_mul(1_103_515_245).wrapping_add(12_345);
            (state >> 16).to_le_bytes()[0]
        })
        .collect();
    block[..start.len()].copy_from_slice(start);
    block
}

/// Sixteen equidistant numbers of a block from the second on, and the sum of all absolute values, from the package `gguf` 0.19.
#[test]
fn blocks_that_candle_does_not_know_are_read_as_their_reference_does() {
    let tiny = 2f32.powi(-127);
    let mxfp4 = [
        4., 3., 2., 1., -6., -8., -6., -1., 12., 1., 2., 3., -4., -3., -8., 8.,
    ];
    let cases: [(WeightType, &[u8], [f32; 16], f32); 5] = [
        (
            WeightType::Iq4Nl,
            &[0, 0x2C],
            [
                -5.1875, -2.1875, 5.5625, -6.5, -4.0625, -5.1875, -5.1875, -1.375, 0.8125, -5.1875,
                -5.1875, 1.5625, -6.5, -6.5, -3.0625, -1.375,
            ],
            128.25,
        ),
        (
            WeightType::Iq4Xs,
            &[0, 0x2C],
            [
                188.5, -45.3125, 119.0625, 77.8125, 116.8125, -136.5, 56.875, 30.625, -6.125,
                -8.125, -24.375, -211.875, -1.625, -1.625, 6.625, 6.625,
            ],
            12871.5625,
        ),
        (WeightType::Mxfp4, &[124], mxfp4.map(|x| x / 16.0), 7.5625),
        (
            WeightType::Mxfp4,
            &[1],
            mxfp4.map(|x| x * tiny),
            121.0 * tiny,
        ),
        (
            WeightType::Mxfp4,
            &[0],
            mxfp4.map(|x| x * tiny / 2.0),
            60.5 * tiny,
        ),
    ];
    let mut rng = StdRng::seed_from_u64(7);
    for (dtype, start, numbers, size) in cases {
        let columns = dtype.block_size();
        let block = lcg_block(dtype.type_size(), start);
        // Twenty rows of the same two blocks: a whole tile and a part of one.
        let matrix = Matrix::blocks(dtype, &block.repeat(40), (20, 2 * columns)).unwrap();
        let x = whole_numbers(&mut rng, 3, 2 * columns);
        for kernels in [None].into_iter().chain(every_kernels()) {
            let matrix = match kernels {
                None => matrix.clone(),
                Some(_) => packed(matrix.clone(), kernels),
            };
            let rows = matrix.rows(&[19, 0], &Device::Cpu, DType::F32).unwrap();
            let rows: Vec<Vec<f32>> = rows.to_vec2().unwrap();
            assert_eq!(rows[0], rows[1]);
            let (first, second) = rows[0].split_at(columns);
            assert_eq!(first, second);
            let some: Vec<f32> = first[1..].iter().copied().step_by(columns / 16).collect();
            assert_eq!(some, numbers, "{dtype:?} {kernels:?}");
            let sum: f32 = first.iter().map(|x| x.abs()).sum();
            assert_eq!(sum, size, "{dtype:?} {kernels:?}");
            let exact = Tensor::from_vec(rows[0].clone(), (1, 2 * columns), &Device::Cpu).unwrap();
            let want = x.matmul(&exact.t().unwrap()).unwrap();
            let got = matrix.forward(&x).unwrap().narrow(1, 19, 1).unwrap();
            let error = largest(&(&got - &want).unwrap()) / largest(&want);
            assert!(error < 1e-5, "{dtype:?} {kernels:?}: off by {error}");
        }
        assert!(matrix.rows(&[20], &Device::Cpu, DType::F32).is_err());
        assert!(Matrix::blocks(dtype, &block, (2, columns)).is_err());
    }
}

#[test]
fn sixteen_bits_are_as_exact_as_floats_and_as_alone() {
    let mut rng = StdRng::seed_from_u64(9);
    let (rows, in_features, out_features) = (21, 768, 37);
    for dtype in TYPES.into_iter().skip(1) {
        let (quantized, exact) = weights(&mut rng, dtype, out_features, in_features);
        let matrix = Matrix::quantized(quantized).unwrap();
        let x = random(&mut rng, rows, in_features);
        let want = x.matmul(&exact.t().unwrap()).unwrap();
        let want: Vec<f32> = want.flatten_all().unwrap().to_vec1().unwrap();
        let x: Vec<f32> = x.flatten_all().unwrap().to_vec1().unwrap();
        for kernels in every_kernels() {
            let Weight::Packed(packed) = packed(matrix.clone(), kernels).weight else {
                continue;
            };
            let of =
                |bits, x: &[f32]| product_of(bits, &[&*packed], None, x, x.len() / in_features);
            let error = |bits| {
                let far = of(bits, &x);
                let far = far.iter().zip(&want).map(|(got, want)| (got - want).abs());
                far.fold(0.0f32, f32::max)
            };
            let (eight, sixteen) = (error(ActivationBits::Eight), error(ActivationBits::Sixteen));
            assert!(
                sixteen < eight / 50.0,
                "{dtype:?}: {sixteen}, {eight} with 8 bits"
            );
            for bits in [ActivationBits::Eight, ActivationBits::Sixteen] {
                let together = of(bits, &x);
                let alone = x.chunks_exact(in_features);
                let alone: Vec<f32> = alone.flat_map(|x| of(bits, x)).collect();
                assert_eq!(together, alone, "{dtype:?}");
            }
        }
    }
}

#[test]
fn a_few_large_numbers_do_not_blur_the_others() {
    let mut rng = StdRng::seed_from_u64(10);
    let (rows, in_features, out_features) = (9, 768, 37);
    for dtype in TYPES.into_iter().skip(1) {
        let (quantized, exact) = weights(&mut rng, dtype, out_features, in_features);
        let matrix = Matrix::quantized(quantized).unwrap();
        let plain = random(&mut rng, rows, in_features);
        // One number of each row is a thousand times as large as the others.
        let mut x: Vec<f32> = plain.flatten_all().unwrap().to_vec1().unwrap();
        for (row, x) in x.chunks_exact_mut(in_features).enumerate() {
            x[row * 70 + 5] = 1000.0;
        }
        let large = Tensor::from_slice(&x, (rows, in_features), &Device::Cpu).unwrap();
        for kernels in every_kernels() {
            let matrix = packed(matrix.clone(), kernels);
            let error = |x: &Tensor| {
                let want = x.matmul(&exact.t().unwrap()).unwrap();
                largest(&(matrix.forward(x).unwrap() - want).unwrap())
            };
            let (with, without) = (error(&large), error(&plain));
            assert!(
                with < 3.0 * without,
                "{dtype:?} {kernels:?}: {with}, {without} without"
            );
            let together = matrix.forward(&large).unwrap();
            for row in 0..rows {
                let alone = matrix.forward(&large.narrow(0, row, 1).unwrap()).unwrap();
                let beside = together.narrow(0, row, 1).unwrap();
                assert_eq!(
                    largest(&(alone - beside).unwrap()),
                    0.0,
                    "{dtype:?} {kernels:?}"
                );
            }
        }
    }
}
