//! The usage of answers that migrated.

use genset_backend_common::output::{Finish, PredictionTokens};

use crate::migrating::resume::without_seam;

#[test]
fn what_became_of_guesses_is_told_of_whole_answers_alone() {
    let predictions = PredictionTokens {
        accepted: 4,
        rejected: 2,
    };
    for (resumed, told) in [(0, Some(predictions)), (3, None)] {
        let finish = Finish::length().with_predictions(predictions);
        let mut finished = finish.into_finished(10, 5);
        without_seam(&mut finished, resumed);
        assert_eq!(finished.usage.predictions, told, "{resumed}");
    }
}
