use proptest::prelude::*;

use super::*;

#[test]
fn exp_agrees_with_the_precise_one() {
    let mut worst = 0.0_f64;
    for step in 0..=870_000_u32 {
        let x = -f32::from(u16::try_from(step / 10_000).unwrap())
            - f32::from(u16::try_from(step % 10_000).unwrap()) / 10_000.0;
        let expected = f64::from(x).exp();
        worst = worst.max(((f64::from(exp(x)) - expected) / expected).abs());
    }
    assert!(worst < 2.5e-7, "{worst}");
    assert_eq!(exp(0.0), 1.0);
    assert_eq!(exp(-88.0), 0.0);
    assert_eq!(exp(f32::NEG_INFINITY), 0.0);
}

#[test]
fn best_finds_what_must_not_be_there() {
    let mut row = vec![0.0; 5000];
    row[4321] = f32::NAN;
    assert_eq!(best(&row), Err(SampleError::NotANumber { token: 4321 }));
    row[4321] = f32::INFINITY;
    assert_eq!(best(&row), Err(SampleError::Infinite { token: 4321 }));
    row.fill(f32::NEG_INFINITY);
    assert_eq!(best(&row), Err(SampleError::NothingPossible));
    assert_eq!(best(&[]), Err(SampleError::NothingPossible));
    row[4999] = f32::MIN;
    assert_eq!(best(&row).unwrap().token, 4999);
}

proptest! {
    #[test]
    fn best_is_the_first_of_the_largest(row in prop::collection::vec(-3_i8..3, 1..3000)) {
        let row: Vec<f32> = row.into_iter().map(f32::from).collect();
        let max = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let first = row.iter().position(|logit| *logit == max).unwrap();
        let found = best(&row).unwrap();
        prop_assert_eq!((usize::try_from(found.token).unwrap(), found.logit), (first, max));
    }

    #[test]
    fn crossing_agrees_with_a_running_sum(
        weights in prop::collection::vec(0_u8..4, 1..3000), at in 0.0..1.0_f64,
    ) {
        let weights: Vec<f32> = weights.into_iter().map(f32::from).collect();
        let total: f64 = weights.iter().map(|weight| f64::from(*weight)).sum();
        let mut sum = 0.0;
        let expected = weights.iter().position(|weight| {
            sum += f64::from(*weight);
            sum > at * total
        });
        let found = crossing(&weights, at * total).map(|token| usize::try_from(token).unwrap());
        prop_assert_eq!(found, expected);
    }
}
