//! Limits that are reached while a text is under way.

use genset_backend_common::GuidedDecoding;

use super::{GuideError, GuideLimits, pieces, token_of};

/// Masks do not look into all tokens that they allow, so it may be the accepted token that reaches a limit: no fault of ours.
#[test]
fn a_limit_that_is_reached_within_a_token_is_the_grammars() {
    let guided = GuidedDecoding::Regex(r#"[^"\\\x00-\x1F\x7F]{0,50000}"#.into());
    let mut reached = 0;
    for lexer_states in 3..60 {
        let factory = pieces().with_limits(GuideLimits {
            lexer_states,
            ..GuideLimits::default()
        });
        let Ok(mut guide) = factory.compile(&guided) else {
            continue;
        };
        let token = token_of(&factory, "yes");
        while let Ok(mask) = guide.mask() {
            assert!(mask.allows(token), "{lexer_states} states");
            let Err(error) = guide.accept(token) else {
                continue;
            };
            assert!(matches!(error, GuideError::TooComplex { .. }), "{error:?}");
            assert_eq!(guide.mask(), Err(error));
            reached += 1;
        }
    }
    assert!(reached > 0, "every limit was reached by a mask");
}
