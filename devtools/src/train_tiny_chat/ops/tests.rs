use std::sync::Arc;

use candle_core::{Device, Tensor, Var};

use super::{Attention, CrossEntropy, Heads, RmsNorm, SwiGlu};

/// Pseudorandom values, the same in every run.
fn var(rows: usize, width: usize, salt: u32) -> Var {
    let value = |i: usize| ((i as f32 + 1.0) * 12.9898 + salt as f32 * 78.233).sin();
    let values: Vec<f32> = (0..rows * width).map(value).collect();
    Var::from_tensor(&Tensor::from_vec(values, (rows, width), &Device::Cpu).unwrap()).unwrap()
}

/// Perturbs every value of every argument a little: the loss must change as the gradient says.
fn assert_gradients(args: &[&Var], loss: impl Fn() -> Tensor) {
    let grads = loss().backward().unwrap();
    let step = 1e-2f32;
    for (index, arg) in args.iter().enumerate() {
        let shape = arg.shape().clone();
        let original: Vec<f32> = arg.flatten_all().unwrap().to_vec1().unwrap();
        let grad: Vec<f32> = grads
            .get(arg)
            .unwrap()
            .flatten_all()
            .unwrap()
            .to_vec1()
            .unwrap();
        for position in 0..original.len() {
            let at = |delta: f32| {
                let mut moved = original.clone();
                moved[position] += delta;
                arg.set(&Tensor::from_vec(moved, shape.clone(), &Device::Cpu).unwrap())
                    .unwrap();
                loss().to_scalar::<f32>().unwrap()
            };
            let slope = (at(step) - at(-step)) / (2.0 * step);
            at(0.0);
            let found = grad[position];
            assert!(
                (slope - found).abs() < 2e-3 + 0.02 * slope.abs(),
                "argument {index}, value {position}: slope {slope}, gradient {found}"
            );
        }
    }
}

/// A loss in which every value has another weight.
fn weighted_sum(tensor: &Tensor) -> Tensor {
    let (rows, width) = tensor.dims2().unwrap();
    (tensor * var(rows, width, 9).as_tensor())
        .unwrap()
        .sum_all()
        .unwrap()
}

#[test]
fn rms_norm_has_the_gradient_of_what_it_computes() {
    let (x, weight) = (
        var(3, 10, 1),
        Var::from_tensor(&var(1, 10, 2).squeeze(0).unwrap()).unwrap(),
    );
    assert_gradients(&[&x, &weight], || {
        weighted_sum(&x.apply_op2(&weight, RmsNorm { epsilon: 1e-5 }).unwrap())
    });
}

#[test]
fn swiglu_has_the_gradient_of_what_it_computes() {
    let (gate, up) = (var(2, 5, 3), var(2, 5, 4));
    assert_gradients(&[&gate, &up], || {
        weighted_sum(&gate.apply_op2(&up, SwiGlu).unwrap())
    });
}

#[test]
fn cross_entropy_has_the_gradient_of_what_it_computes() {
    let logits = var(3, 7, 5);
    assert_gradients(&[&logits], || {
        logits
            .apply_op1(CrossEntropy {
                targets: vec![6, 0, 3],
            })
            .unwrap()
    });
}

#[test]
fn cross_entropy_of_equal_logits_is_the_logarithm_of_the_vocabulary() {
    let logits = Tensor::zeros((2, 8), candle_core::DType::F32, &Device::Cpu).unwrap();
    let loss = logits
        .apply_op1(CrossEntropy {
            targets: vec![1, 7],
        })
        .unwrap();
    assert!((loss.to_scalar::<f32>().unwrap() - 8f32.ln()).abs() < 1e-6);
}

fn attention(lengths: &[usize]) -> Attention {
    Attention {
        heads: Arc::new(Heads::new(4, 2, 6, 10_000.0, 16)),
        lengths: Arc::new(lengths.to_vec()),
    }
}

#[test]
fn attention_has_the_gradient_of_what_it_computes() {
    let (q, k, v) = (var(5, 24, 6), var(5, 12, 7), var(5, 12, 8));
    assert_gradients(&[&q, &k, &v], || {
        weighted_sum(&q.apply_op3(&k, &v, attention(&[3, 2])).unwrap())
    });
}

#[test]
fn packed_sequences_do_not_see_each_other() {
    let (q, k, v) = (var(5, 24, 6), var(5, 12, 7), var(5, 12, 8));
    let packed = q.apply_op3(&k, &v, attention(&[3, 2])).unwrap();
    let rows = |tensor: &Var| tensor.narrow(0, 3, 2).unwrap().contiguous().unwrap();
    let alone = rows(&q)
        .apply_op3(&rows(&k), &rows(&v), attention(&[2]))
        .unwrap();
    let packed: Vec<Vec<f32>> = packed.narrow(0, 3, 2).unwrap().to_vec2().unwrap();
    assert_eq!(packed, alone.to_vec2::<f32>().unwrap());
}

#[test]
fn the_first_token_sees_itself_only() {
    let (q, k, v) = (var(3, 24, 6), var(3, 12, 7), var(3, 12, 8));
    let out = q.apply_op3(&k, &v, attention(&[3])).unwrap();
    let out: Vec<f32> = out.get(0).unwrap().to_vec1().unwrap();
    let v: Vec<f32> = v.get(0).unwrap().to_vec1().unwrap();
    let expected = [&v[..6], &v[..6], &v[6..], &v[6..]].concat();
    assert_eq!(out, expected);
}
