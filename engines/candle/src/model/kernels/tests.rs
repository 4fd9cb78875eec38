//! The kernels, on a GPU or emulated on the host, compared with candle's operations.

#[cfg(kernels_are_emulated)]
use half::{bf16, f16};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

use super::*;

fn random(shape: &[usize], dtype: DType, seed: u64) -> Tensor {
    let mut random = StdRng::seed_from_u64(seed);
    let len = shape.iter().product();
    let numbers: Vec<f32> = (0..len)
        .map(|_| random.random_range(-3.0f32..3.0))
        .collect();
    let tensor = Tensor::from_vec(numbers, shape, &test_device()).unwrap();
    tensor.to_dtype(dtype).unwrap()
}

fn numbers(tensor: &Tensor) -> Vec<f32> {
    let tensor = tensor.to_dtype(DType::F32).unwrap();
    tensor.flatten_all().unwrap().to_vec1().unwrap()
}

/// Within about a unit in the last place of numbers of order 4.
fn assert_close(got: &Tensor, want: &Tensor, what: &str) {
    assert_eq!(got.shape(), want.shape(), "{what}");
    let tolerance = if got.dtype() == DType::F32 {
        4e-6
    } else if got.dtype() == DType::F16 {
        4e-3
    } else {
        3.2e-2
    };
    for (got, want) in numbers(got).iter().zip(numbers(want)) {
        assert!((got - want).abs() <= tolerance, "{what}: {got}, not {want}");
    }
}

const NUMBERS: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

#[test]
fn norms_are_those_of_tensors() {
    use crate::model::norm::Norm;
    for (dtype, width) in NUMBERS.into_iter().zip([48, 256, 1000]) {
        let x = random(&[5, width], dtype, 1);
        let delta = random(&[5, width], dtype, 2);
        let norm = Norm::try_new(&random(&[width], dtype, 3), 0.0, 1e-5).unwrap();
        let got = super::norm(&x, norm.weight(), norm.eps()).unwrap();
        assert_close(&got, &norm.forward_by_tensors(&x).unwrap(), "norm");
        let (sum, normed) = add_norm(&x, &delta, norm.weight(), norm.eps()).unwrap();
        let want = (x + delta).unwrap();
        assert_close(&sum, &want, "sum");
        assert_close(
            &normed,
            &norm.forward_by_tensors(&want).unwrap(),
            "normed sum",
        );
    }
}

#[test]
fn gates_are_candles() {
    for dtype in NUMBERS {
        let x = random(&[3, 2 * 300], dtype, 4);
        let (first, second) = (x.narrow(1, 0, 300).unwrap(), x.narrow(1, 300, 300).unwrap());
        let [first, second] = [first, second].map(|x| x.to_dtype(DType::F32).unwrap());
        let limit = 1.5;
        let clamped = first.clamp(-100.0, limit).unwrap();
        let sigmoid = candle_nn::ops::sigmoid(&(&clamped * 1.702).unwrap()).unwrap();
        let more = (second.clamp(-limit, limit).unwrap() + 1.0).unwrap();
        for (activation, activated, up) in [
            (Activation::Silu, first.silu(), &second),
            (Activation::GeluTanh, first.gelu(), &second),
            (Activation::ClampedSwish { limit }, clamped * sigmoid, &more),
        ] {
            let want = (activated.unwrap() * up).unwrap();
            assert_close(
                &gate(&x, activation).unwrap(),
                &want.to_dtype(dtype).unwrap(),
                "gate",
            );
        }
    }
}

#[test]
fn a_grid_that_no_gpu_takes_is_refused() {
    for (grid, is_refused) in [
        ([1, 65_536, 1], true),
        ([1, 1, 65_536], true),
        ([1, 65_535, 65_535], false),
        ([65_536, 1, 1], false),
    ] {
        let launch = Launch {
            kernel: "none",
            module: Module::F32,
            grid,
            threads: ROW_THREADS,
            arguments: 0u64,
        };
        #[expect(unsafe_code, reason = "kernels write through addresses")]
        // SAFETY: no kernel has this name.
        let error = unsafe { launch.on(&test_device()) }
            .unwrap_err()
            .to_string();
        let says_so = error.contains("65535 are the most");
        assert_eq!(says_so, is_refused, "{error}");
    }
}

#[test]
fn products_are_candles_and_a_row_has_the_same_bits_beside_others() {
    for (dtype, width) in NUMBERS.into_iter().zip([16, 2600, 9000]) {
        let x = (random(&[2, width], dtype, 5) / 3.0).unwrap();
        let weight = (random(&[19, width], dtype, 6) / width as f64).unwrap();
        let all = product(&x, &weight).unwrap();
        let [wide_x, wide_weight] = [&x, &weight].map(|it| it.to_dtype(DType::F32).unwrap());
        let want = wide_x.matmul(&wide_weight.t().unwrap()).unwrap();
        assert_close(&all, &want.to_dtype(dtype).unwrap(), "product");
        for row in 0..2 {
            let alone = product(&x.narrow(0, row, 1).unwrap(), &weight).unwrap();
            let beside = all.narrow(0, row, 1).unwrap();
            assert_eq!(numbers(&alone), numbers(&beside), "row {row}");
        }
    }
}

#[test]
fn gated_products_are_gates_of_products() {
    for dtype in NUMBERS {
        let weight = (random(&[2 * 21, 264], dtype, 7) / 40.0).unwrap();
        for activation in [
            Activation::Silu,
            Activation::GeluTanh,
            Activation::ClampedSwish { limit: 1.5 },
        ] {
            for rows in 1..=2 {
                let x = random(&[rows, 264], dtype, 8);
                let want = gate(&product(&x, &weight).unwrap(), activation).unwrap();
                let got = gated_product(&x, &weight, activation).unwrap();
                assert_eq!(numbers(&got), numbers(&want), "{activation:?}, {rows} rows");
            }
        }
    }
}

#[test]
fn products_are_not_taken_of_more_rows_or_odd_widths() {
    let [three, two, odd] =
        [(3, 16), (2, 16), (2, 12)].map(|(rows, width)| random(&[rows, width], DType::BF16, 9));
    let weight = |width| random(&[8, width], DType::BF16, 10);
    assert!(can_multiply(&two, &weight(16)));
    assert!(!can_multiply(&three, &weight(16)), "three rows");
    assert!(!can_multiply(&odd, &weight(12)), "width 12");
    assert!(!can_multiply(&two, &weight(32)), "another width");
    let halves = two.to_dtype(DType::F16).unwrap();
    assert!(!can_multiply(&halves, &weight(16)), "another type");
}

#[test]
fn the_best_logit_is_the_first_of_the_largest_and_what_is_no_logit_is_seen() {
    for width in [3, 1000, 9001, 9008] {
        let mut rows = vec![vec![-5.0f32; width]; 6];
        // Equal ones, of which the kernel visits the lower index later.
        rows[0][width - 1] = 2.0;
        rows[0][1] = 2.0;
        rows[1][2] = f32::NAN;
        rows[2][0] = f32::INFINITY;
        rows[3][0] = f32::NEG_INFINITY;
        rows[4].fill(f32::NEG_INFINITY);
        let logits = Tensor::new(rows, &test_device()).unwrap();
        let places = best(&logits).unwrap();
        assert_eq!(places, [Some(1), None, None, Some(1), None, Some(0)]);
    }
}

/// The emulation's replacement of the GPU's conversions.
#[cfg(kernels_are_emulated)]
#[test]
fn the_emulation_rounds_as_the_crate_half() {
    // A gate multiplies many numbers of each type by one factor.
    let by_gate = |factors: &[f32], dtype: DType| {
        let up = Tensor::from_slice(factors, (factors.len(), 1), &Device::Cpu).unwrap();
        let gate_up = Tensor::cat(&[up.ones_like().unwrap(), up], 1).unwrap();
        numbers(&gate(&gate_up.to_dtype(dtype).unwrap(), Activation::Silu).unwrap())
    };
    let one = 1.0 / (1.0 + (-1.0f32).exp());
    let finite = |convert: fn(u16) -> f32| -> Vec<f32> {
        let all = (0..=u16::MAX).step_by(37).map(convert);
        all.filter(|number| number.is_finite()).collect()
    };
    let factors = finite(|bits| f16::from_bits(bits).to_f32());
    for (got, factor) in by_gate(&factors, DType::F16).iter().zip(&factors) {
        assert_eq!(*got, f16::from_f32(one * factor).to_f32(), "{factor}");
    }
    let factors = finite(|bits| bf16::from_bits(bits).to_f32());
    for (got, factor) in by_gate(&factors, DType::BF16).iter().zip(&factors) {
        assert_eq!(*got, bf16::from_f32(one * factor).to_f32(), "{factor}");
    }
}
