//! The distribution of drawn tokens, compared with the engine's own log probabilities.

use genset_backend_common::output::{TokenLogprob, TopLogprob};
use genset_backend_common::{GenerateRequest, TokenId, config::SamplingOption};

use crate::check::{CheckResult, Stop, ensure, skip};
use crate::trial::{Live, Trial};

/// The rounding error that an engine's arithmetic may add to a log probability, including half precision.
const ROUNDING: f32 = 0.05;

/// The number of tokens in one answer.
const ANSWER_TOKENS: u32 = 64;

/// The number of answers per setting, if waiting is free and if it is not.
const ANSWERS: u64 = 8;
const REAL_TIME_ANSWERS: u64 = 2;

/// A drawn token and its candidates.
struct Place {
    token: TokenId,
    at: TokenLogprob,
}

impl Place {
    /// The candidates, best first, in whatever order they arrived.
    fn candidates(&self) -> Vec<&TopLogprob> {
        let mut candidates: Vec<&TopLogprob> = self.at.top.iter().collect();
        candidates.sort_by(|a, b| b.logprob.total_cmp(&a.logprob));
        candidates
    }
}

/// An option and a value that narrows the choice.
#[derive(Debug, Clone, Copy)]
enum Narrow {
    TopK(usize),
    TopP(f32),
    MinP(f32),
}

impl Narrow {
    fn option(self) -> SamplingOption {
        match self {
            Self::TopK(_) => SamplingOption::TopK,
            Self::TopP(_) => SamplingOption::TopP,
            Self::MinP(_) => SamplingOption::MinP,
        }
    }

    fn ask(self, request: &mut GenerateRequest) {
        match self {
            Self::TopK(k) => request.sampling.top_k = u32::try_from(k).ok(),
            Self::TopP(p) => request.sampling.top_p = Some(p),
            Self::MinP(p) => request.sampling.min_p = Some(p),
        }
    }

    /// Whether a token with `logprob` remains, given `candidates`, with the benefit of the doubt. Candidates not shown are
    /// worse.
    fn leaves(self, logprob: f32, candidates: &[&TopLogprob]) -> bool {
        let best = candidates.first().map_or(0.0, |best| best.logprob);
        match self {
            Self::TopK(k) => {
                let worst = k.checked_sub(1).and_then(|place| candidates.get(place));
                worst.is_none_or(|worst| logprob >= worst.logprob - ROUNDING)
            }
            Self::TopP(p) => {
                let better = candidates
                    .iter()
                    .filter(|it| it.logprob > logprob + ROUNDING);
                better.map(|it| it.logprob.exp()).sum::<f32>() < p + ROUNDING
            }
            Self::MinP(p) => logprob >= best + p.ln() - ROUNDING,
        }
    }

    /// The exact number of candidates that remain; `None` if it depends on rounding or on candidates not shown.
    fn kept(self, candidates: &[&TopLogprob]) -> Option<usize> {
        match self {
            Self::TopK(k) => {
                let [.., last] = candidates.get(..k)? else {
                    return None;
                };
                let next = candidates.get(k);
                next.is_none_or(|next| next.logprob < last.logprob)
                    .then_some(k)
            }
            Self::TopP(p) => {
                let mut mass = 0.0;
                for (place, candidate) in candidates.iter().enumerate() {
                    mass += candidate.logprob.exp();
                    if (mass - p).abs() < 0.002 {
                        return None;
                    }
                    if mass > p {
                        return Some(place + 1);
                    }
                }
                None
            }
            Self::MinP(p) => {
                let bar = candidates.first()?.logprob + p.ln();
                let is_near = |it: &&TopLogprob| (it.logprob - bar).abs() < 0.002;
                let kept = candidates.iter().filter(|it| it.logprob > bar).count();
                (kept < candidates.len() && !candidates.iter().any(is_near)).then_some(kept)
            }
        }
    }
}

/// The number of answers needed to judge draws.
fn answers(live: &Live) -> u64 {
    match live.trial.keeps_virtual_time() {
        true => ANSWERS,
        false => REAL_TIME_ANSWERS,
    }
}

/// The positions of answers drawn at `temperature`.
async fn drawn(live: &Live, temperature: f32, narrow: &[Narrow]) -> Result<Vec<Place>, Stop> {
    let mut places = Vec::new();
    for seed in 0..answers(live) {
        places.extend(answered(live, temperature, narrow, seed).await?);
    }
    Ok(places)
}

/// The positions of one answer. Those without log probabilities are left out: RD03 checks them.
async fn answered(
    live: &Live,
    temperature: f32,
    narrow: &[Narrow],
    seed: u64,
) -> Result<impl Iterator<Item = Place>, Stop> {
    let mut request = live.greedy(
        live.prompt(8, seed),
        live.affordable_answer(8, ANSWER_TOKENS),
    );
    request.sampling.temperature = Some(temperature);
    request.sampling.seed = live.can(SamplingOption::Seed).then_some(seed);
    request.output.logprobs = live.config.capabilities.max_logprobs;
    live.draw_from_all(&mut request);
    for narrow in narrow {
        narrow.ask(&mut request);
    }
    let answer = live.answer(request).await?;
    let both = answer.tokens().into_iter().zip(answer.logprobs());
    Ok(both.map(|(token, at)| Place { token, at }))
}

/// The options that the engine declares, with values that keep some of the shown candidates.
async fn narrowings(live: &Live, shown: usize) -> Result<Vec<Narrow>, Stop> {
    let (top_p, min_p) = fitting(live).await?;
    let all = [
        Narrow::TopK(2),
        Narrow::TopK(shown.saturating_sub(1).max(2)),
        Narrow::TopP(0.5),
        Narrow::TopP(top_p),
        Narrow::MinP(0.5),
        Narrow::MinP(min_p),
    ];
    let declared = all.into_iter().filter(|it| live.can(it.option()));
    Ok(declared.collect())
}

/// A `top_p` that keeps two candidates and a `min_p` that keeps about half of those shown, whether the engine is nearly certain
/// or finds many tokens alike: medians over an answer.
async fn fitting(live: &Live) -> Result<(f32, f32), Stop> {
    let (mut masses, mut ratios) = (Vec::new(), Vec::new());
    for place in answered(live, 1.0, &[], 0).await? {
        let candidates = place.candidates();
        let half = candidates.get(candidates.len() / 2);
        if let ([best, second, ..], Some(half)) = (&candidates[..], half) {
            masses.push(best.logprob.exp() + second.logprob.exp() / 2.0);
            ratios.push((half.logprob - best.logprob).exp());
        }
    }
    Ok((
        median(masses).clamp(0.01, 0.99),
        median(ratios).clamp(0.001, 0.99),
    ))
}

fn median(mut values: Vec<f32>) -> f32 {
    values.sort_unstable_by(f32::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(0.5)
}

/// The number of candidates that the engine shows.
fn shown(live: &Live) -> Result<usize, Stop> {
    live.needs(SamplingOption::Temperature)?;
    let shown = live.config.capabilities.max_logprobs.unwrap_or(0);
    if shown < 2 {
        skip!(
            NotDeclared,
            "the engine shows fewer than two candidates of a token"
        );
    }
    Ok(usize::try_from(shown).unwrap_or(usize::MAX))
}

pub(super) async fn within_what_is_left(trial: Trial) -> CheckResult {
    let live = trial.start().await?;
    let shown = shown(&live)?;
    let narrowings = narrowings(&live, shown).await?;
    if narrowings.is_empty() {
        skip!(
            NotDeclared,
            "the engine declares neither top_k nor top_p nor min_p"
        );
    }
    for narrow in &narrowings {
        leave_no_others(&live, &[*narrow], answers(&live)).await?;
    }
    // Two options at once, in whatever order the engine applies them: each must keep every drawn token.
    let few = answers(&live).div_ceil(4);
    for (place, one) in narrowings.iter().enumerate() {
        let others = narrowings[..place].iter();
        for other in others.filter(|other| other.option() != one.option()) {
            leave_no_others(&live, &[*other, *one], few).await?;
        }
    }
    Ok(())
}

async fn leave_no_others(live: &Live, narrowings: &[Narrow], answers: u64) -> CheckResult {
    for seed in 0..answers {
        for place in answered(live, 1.0, narrowings, seed).await? {
            let candidates = place.candidates();
            for narrow in narrowings {
                ensure!(
                    narrow.leaves(place.at.logprob, &candidates),
                    "of {narrowings:?}, {narrow:?} does not leave token {} with the log probability {}, which was drawn beside {candidates:?}",
                    place.token,
                    place.at.logprob
                );
            }
        }
    }
    Ok(())
}

/// The tolerance of a count in standard deviations: one correct engine in millions exceeds it.
const DEVIATIONS: f64 = 6.0;

/// How often something came, and how often it was expected.
#[derive(Debug, Default)]
struct Tally {
    places: u32,
    came: f64,
    expected: f64,
    variance: f64,
}

impl Tally {
    fn add(&mut self, came: bool, expected: f64) {
        let expected = expected.clamp(0.0, 1.0);
        self.places += 1;
        self.came += f64::from(u8::from(came));
        self.expected += expected;
        self.variance += expected * (1.0 - expected);
    }

    /// The tolerance of the count. Plus one, for engines that are almost certain of each token.
    fn margin(&self) -> f64 {
        DEVIATIONS * self.variance.sqrt() + 1.0
    }

    fn ensure_equal(&self, what: &str) -> CheckResult {
        let is_near = (self.came - self.expected).abs() <= self.margin();
        ensure!(
            is_near,
            "{what} came {} times at {} places, where {:.1} times were expected, give or take {:.1}",
            self.came,
            self.places,
            self.expected,
            self.margin()
        );
        Ok(())
    }
}

pub(super) async fn as_often_as_probable(trial: Trial) -> CheckResult {
    let live = trial.start().await?;
    let shown = shown(&live)?;
    freely(&live).await?;
    if live.can(SamplingOption::TopK) {
        for temperature in [0.5, 2.0] {
            narrowed(&live, temperature, Narrow::TopK(2)).await?;
        }
    }
    for narrow in narrowings(&live, shown).await? {
        narrowed(&live, 1.0, narrow).await?;
    }
    colder_and_hotter(&live).await
}

/// Without narrowing: counts the best token, and all shown candidates.
async fn freely(live: &Live) -> CheckResult {
    let (mut best, mut shown) = (Tally::default(), Tally::default());
    for place in drawn(live, 1.0, &[]).await? {
        let candidates = place.candidates();
        let Some(first) = candidates.first() else {
            continue;
        };
        best.add(
            place.token == first.token_id,
            f64::from(first.logprob.exp()),
        );
        let mass: f64 = candidates
            .iter()
            .map(|it| f64::from(it.logprob.exp()))
            .sum();
        let is_shown = candidates.iter().any(|it| it.token_id == place.token);
        shown.add(is_shown, mass);
    }
    best.ensure_equal("at a temperature of 1, the best token")?;
    shown.ensure_equal("at a temperature of 1, one of the best tokens")
}

/// With a narrowing option: counts the best of the remaining candidates.
async fn narrowed(live: &Live, temperature: f32, narrow: Narrow) -> CheckResult {
    let mut best = Tally::default();
    for place in drawn(live, temperature, &[narrow]).await? {
        let candidates = place.candidates();
        let Some(kept) = narrow
            .kept(&candidates)
            .and_then(|kept| candidates.get(..kept))
        else {
            continue;
        };
        let Some(first) = kept.first() else { continue };
        let weight = |it: &&TopLogprob| f64::from((it.logprob - first.logprob) / temperature).exp();
        let total: f64 = kept.iter().map(weight).sum();
        best.add(place.token == first.token_id, 1.0 / total);
    }
    best.ensure_equal(&format!(
        "at a temperature of {temperature}, with {narrow:?}, the best token"
    ))
}

/// The shown candidates must come more often at a lower temperature, and less often at a higher one.
async fn colder_and_hotter(live: &Live) -> CheckResult {
    for temperature in [0.1, 2.0] {
        let mut shown = Tally::default();
        for place in drawn(live, temperature, &[]).await? {
            let candidates = place.candidates();
            let Some(share) = share_of(&candidates, temperature, live.vocab_size()) else {
                continue;
            };
            let is_shown = candidates.iter().any(|it| it.token_id == place.token);
            shown.add(is_shown, share);
        }
        let (came, bound, margin) = (shown.came, shown.expected, shown.margin());
        let is_colder = temperature < 1.0;
        ensure!(
            if is_colder {
                came >= bound - margin
            } else {
                came <= bound + margin
            },
            "at a temperature of {temperature}, one of the best tokens came {came} times at {} places, where it should come {} {bound:.1} times, give or take {margin:.1}",
            shown.places,
            if is_colder { "at least" } else { "at most" }
        );
    }
    Ok(())
}

/// The share of the shown candidates at a temperature: the least at a low one, the most at a high one. It follows from the tokens
/// not shown: together they have the rest of the probability, and none has more than the worst shown one. `None` if that one's
/// probability is too small to compute with.
fn share_of(candidates: &[&TopLogprob], temperature: f32, vocab_size: u32) -> Option<f64> {
    let probability = |it: &TopLogprob| f64::from(it.logprob).exp();
    // In units of the worst, so that nothing underflows to 0.
    let unit = candidates.last().map(|worst| probability(worst))?;
    if !unit.is_normal() {
        return None;
    }
    let power = 1.0 / f64::from(temperature);
    let mass: f64 = candidates.iter().map(|it| probability(it)).sum();
    let of_shown: f64 = candidates
        .iter()
        .map(|it| (probability(it) / unit).powf(power))
        .sum();
    // There are no more than the vocabulary has, however the rounding of the others compares with the worst one.
    let of_rest = ((1.0 - mass).max(0.0) / unit).min(f64::from(vocab_size));
    // Right for a sum that overflows, too.
    Some(1.0 / (1.0 + of_rest / of_shown))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn share(logprobs: &[f32], temperature: f32) -> Option<f64> {
        let candidate = |(token_id, logprob): (TokenId, &f32)| TopLogprob {
            token_id,
            logprob: *logprob,
        };
        let candidates: Vec<TopLogprob> = (0..).zip(logprobs).map(candidate).collect();
        let candidates: Vec<&TopLogprob> = candidates.iter().collect();
        share_of(&candidates, temperature, 1000)
    }

    #[test]
    fn the_share_of_the_shown_follows_the_temperature() {
        let half = 0.5_f32.ln();
        let quarter = 0.25_f32.ln();
        let near = |share: Option<f64>, expected: f64| {
            assert!((share.unwrap() - expected).abs() < 1e-3, "{share:?}");
        };
        // One further token has the last quarter.
        near(share(&[half, quarter], 1.0), 0.75);
        near(share(&[half, quarter], 0.5), 5.0 / 6.0);
        assert_eq!(share(&[half, f32::NEG_INFINITY], 1.0), None);
    }

    #[test]
    fn a_candidate_that_hardly_ever_comes_proves_nothing() {
        let half = 0.5_f32.ln();
        // Its power overflows at a low temperature.
        assert_eq!(share(&[0.0, -75.0], 0.1), Some(1.0));
        // The rounding of the others is many times its probability.
        assert!(share(&[half, half - 1e-6, -40.0], 2.0).unwrap() > 0.99);
    }
}
