use proptest::prelude::*;

use super::*;

#[test]
fn keys_order_by_logit_then_by_lowest_id() {
    let ordered = [
        (0, 3.5),
        (9, 3.5),
        (1, 0.0),
        (2, -0.0),
        (u32::MAX, -0.0),
        (7, -1e30),
        (3, f32::MIN),
    ];
    let keys: Vec<Key> = ordered
        .iter()
        .map(|(token, logit)| Key::new(*token, *logit))
        .collect();
    assert!(keys.is_sorted_by(|a, b| a > b));
    for (key, (token, logit)) in keys.iter().zip(ordered) {
        assert_eq!((key.token(), key.logit()), (token, logit));
    }
}

fn sorted(row: &[f32]) -> Vec<Key> {
    let mut keys: Vec<Key> = (0..)
        .zip(row)
        .map(|(token, logit)| Key::new(token, *logit))
        .collect();
    keys.sort_by(|a, b| b.cmp(a));
    keys
}

proptest! {
    #[test]
    fn top_k_is_the_head_of_the_sorted_row(
        row in prop::collection::vec(-20_i8..20, 1..2000), k in 1..600_usize, least in -30_i8..10,
    ) {
        let row: Vec<f32> = row.into_iter().map(f32::from).collect();
        let mut keys = Vec::new();
        top_k(&row, k, least.into(), &mut keys);
        keys.sort_by(|a, b| b.cmp(a));
        let mut expected = sorted(&row);
        expected.retain(|key| key.logit() >= f32::from(least));
        expected.truncate(k);
        prop_assert_eq!(keys, expected);
    }

    #[test]
    fn crossing_is_where_the_sorted_sum_passes(
        row in prop::collection::vec(-4_i8..1, 1..300), at in 0.0..1.0_f64,
    ) {
        let row: Vec<f32> = row.into_iter().map(f32::from).collect();
        let weigh = Weigh { best: 0.0, temperature: 0.7 };
        let expected = sorted(&row);
        let target = at * weigh.sum(&expected);
        let mut sum = 0.0;
        let sums: Vec<f64> = expected.iter().map(|key| { sum += weigh.sum(&[*key]); sum }).collect();
        let last = expected.len() - 1;
        let mut keys = expected.clone();
        keys.reverse();
        let place = weigh.passing(&mut keys, target);
        prop_assert_eq!(place, sums.iter().position(|sum| *sum > target).unwrap_or(last));
        prop_assert_eq!(keys[place], expected[place]);
        keys.reverse();
        let count = weigh.reaching(&mut keys, target);
        prop_assert_eq!(count, sums.iter().position(|sum| *sum >= target).unwrap_or(last) + 1);
        keys[..count].sort_by(|a, b| b.cmp(a));
        prop_assert_eq!(&keys[..count], &expected[..count]);
    }
}
