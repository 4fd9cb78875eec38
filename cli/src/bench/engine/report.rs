//! Prints the figures for people.

use std::time::Duration;

use super::breakdown::{self, sequences};
use super::{Measured, readable};

/// A line for each figure.
pub(super) fn table(measured: &Measured) -> String {
    let mut text = format!("{}\n", measured.model);
    let one = measured.decode.iter().find(|decode| decode.sequences == 1);
    for decode in &measured.decode {
        let what = format!("decode, {}", sequences(decode.sequences));
        let times = one
            .filter(|one| one.sequences != decode.sequences)
            .map(|one| format!(", {:.1} times one", decode.tokens_per_s / one.tokens_per_s))
            .unwrap_or_default();
        let accepted = decode
            .accepted_drafts
            .map(|share| format!(", {:.0} % of guesses accepted", 100.0 * share))
            .unwrap_or_default();
        text.push_str(&line(
            &what,
            &format!(
                "{:.0} tokens/s, {:.1} % of a step outside the model{times}{accepted}",
                decode.tokens_per_s,
                100.0 * decode.outside_model
            ),
        ));
        if decode.rounds_apart > 0 {
            text.push_str(&line(
                "",
                &format!(
                    "prefill is in it: in {} round(s) some had ended before all had begun; more --new-tokens mend that",
                    decode.rounds_apart
                ),
            ));
        }
    }
    text.push_str(&line(
        &format!("prefill, {} tokens", measured.prefill_tokens),
        &format!("{:.0} tokens/s", measured.prefill_tokens_per_s),
    ));
    let seconds = |s: f64| readable(Duration::try_from_secs_f64(s).unwrap_or_default());
    text.push_str(&line(
        &format!("first token, prompt of {}", measured.prefix_tokens),
        &format!(
            "{} the first time, {} the second time: 1/{:.0}",
            seconds(measured.first_token_cold_s),
            seconds(measured.first_token_cached_s),
            measured.first_token_cold_s / measured.first_token_cached_s
        ),
    ));
    text.push_str(&breakdown::table(measured));
    if measured.is_cut {
        text.push_str("\n  stopped before the end: these are the figures of what was measured\n");
    }
    text
}

fn line(what: &str, figure: &str) -> String {
    format!("  {what:<28} {figure}\n")
}

#[cfg(test)]
mod tests {
    use super::super::Decode;
    use super::*;

    #[test]
    fn a_rate_that_has_prefill_in_it_is_told() {
        let table = |rounds_apart| {
            let decode = Decode {
                sequences: 16,
                tokens_per_s: 100.0,
                outside_model: 0.01,
                accepted_drafts: None,
                rounds_apart,
            };
            table(&Measured {
                decode: vec![decode],
                ..Measured::default()
            })
        };
        assert!(!table(0).contains("prefill is in it"));
        assert!(table(2).contains("prefill is in it: in 2 round(s)"));
    }
}
