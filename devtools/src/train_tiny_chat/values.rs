//! Values drawn anew each time: numbers, times, and made-up words.

use std::collections::BTreeMap;

use rand::seq::IndexedRandom as _;
use rand::{Rng, RngExt as _};

/// How often a text argument is a made-up word, so that the model reads it instead of memorizing it.
const MADE_UP: f64 = 0.4;

/// The name of the list of words that are one token after a space, if there is one.
pub(crate) const WORDS: &str = "one token";

const BEGINNINGS: [&str; 40] = [
    "b", "br", "c", "ch", "d", "dr", "f", "fl", "g", "gr", "h", "j", "k", "kl", "l", "m", "n", "p",
    "pl", "pr", "qu", "r", "s", "sh", "sk", "st", "t", "th", "tr", "v", "w", "z", "", "bl", "cr",
    "gl", "sp", "sw", "tw", "wh",
];
const MIDDLES: [&str; 14] = [
    "a", "e", "i", "o", "u", "ai", "ea", "ee", "ia", "io", "oa", "oo", "ou", "y",
];
const ENDS: [&str; 24] = [
    "", "", "", "l", "n", "r", "s", "t", "m", "nd", "rn", "st", "ck", "d", "g", "p", "x", "sk",
    "ng", "lt", "mp", "k", "v", "sh",
];
/// Common words, for phrases.
const COMMON: [&str; 60] = [
    "red", "blue", "green", "old", "new", "small", "big", "quiet", "fast", "slow", "river",
    "house", "stone", "paper", "winter", "summer", "garden", "window", "bread", "milk", "train",
    "report", "meeting", "lunch", "dinner", "project", "plan", "budget", "invoice", "letter",
    "music", "story", "market", "school", "doctor", "bridge", "mountain", "forest", "island",
    "coffee", "tea", "cake", "shoes", "lamp", "table", "chair", "phone", "battery", "engine",
    "token", "buy", "call", "clean", "read", "write", "fix", "the", "my", "your", "for",
];

/// One of the list.
pub(crate) fn pick<'a>(list: &[&'a str], rng: &mut impl Rng) -> &'a str {
    list.choose(rng).copied().unwrap_or_default()
}

/// A made-up word of two or three syllables, in lower case.
pub(crate) fn made_up(rng: &mut impl Rng) -> String {
    let syllables = rng.random_range(2..4);
    let mut word = String::new();
    for _ in 0..syllables {
        word += pick(&BEGINNINGS, rng);
        word += pick(&MIDDLES, rng);
        word += pick(&ENDS, rng);
    }
    word
}

/// The word with a capital first letter.
pub(crate) fn capital(word: &str) -> String {
    let mut letters = word.chars();
    let first = letters.next().map(|it| it.to_uppercase().to_string());
    first.unwrap_or_default() + letters.as_str()
}

/// A word that is one token after a space, or two of them joined; without the list, a made-up word.
fn of_tokens(lists: &BTreeMap<String, Vec<String>>, rng: &mut impl Rng) -> String {
    let Some(words) = lists.get(WORDS) else {
        return made_up(rng);
    };
    let mut word = words.choose(rng).cloned().unwrap_or_default();
    if rng.random_bool(0.3) {
        word += &words
            .choose(rng)
            .map_or_else(String::new, |it| it.to_lowercase());
    }
    word
}

/// A word that the model has not seen, made up or composed of tokens.
fn word(lists: &BTreeMap<String, Vec<String>>, rng: &mut impl Rng) -> String {
    if rng.random_bool(0.5) {
        made_up(rng)
    } else {
        of_tokens(lists, rng)
    }
}

/// Two to four words.
fn phrase(lists: &BTreeMap<String, Vec<String>>, rng: &mut impl Rng) -> String {
    let count = rng.random_range(2..5);
    let words = (0..count).map(|_| {
        if rng.random_bool(0.5) {
            pick(&COMMON, rng).to_owned()
        } else {
            of_tokens(lists, rng)
        }
    });
    words.collect::<Vec<_>>().join(" ")
}

/// A value of a built-in kind; `None` for other kinds.
fn built_in(
    kind: &str,
    lists: &BTreeMap<String, Vec<String>>,
    rng: &mut impl Rng,
) -> Option<String> {
    Some(match kind {
        "integer" => {
            let top = *[20, 100, 1000].choose(rng)?;
            rng.random_range(0..top).to_string()
        }
        "small" => rng.random_range(1..21).to_string(),
        "word" => word(lists, rng),
        "phrase" => phrase(lists, rng),
        "time" => format!(
            "{:02}:{:02}",
            rng.random_range(0..24),
            rng.random_range(0..60)
        ),
        "date" => format!(
            "20{}-{:02}-{:02}",
            rng.random_range(20..40),
            rng.random_range(1..13),
            rng.random_range(1..29)
        ),
        "price" => format!(
            "{}.{:02}",
            rng.random_range(1..300),
            rng.random_range(0..100)
        ),
        "code" => format!(
            "{}{}",
            capital(pick(
                &["a", "b", "c", "d", "k", "m", "r", "t", "x", "z"],
                rng
            )),
            rng.random_range(1..1000)
        ),
        "email" => format!("{}@{}.com", made_up(rng), made_up(rng)),
        _ => return None,
    })
}

/// Whether a value of this kind is an integer.
pub(crate) fn is_integer(kind: &str) -> bool {
    matches!(kind, "integer" | "small")
}

/// A value of a built-in kind or from a list; sometimes a made-up word instead of one from a list.
pub(crate) fn value(
    kind: &str,
    lists: &BTreeMap<String, Vec<String>>,
    rng: &mut impl Rng,
) -> Option<String> {
    if let Some(value) = built_in(kind, lists, rng) {
        return Some(value);
    }
    let listed = lists.get(kind)?.choose(rng)?;
    if !rng.random_bool(MADE_UP) {
        return Some(listed.clone());
    }
    let word = word(lists, rng);
    let is_capital = listed.starts_with(char::is_uppercase);
    Some(if is_capital { capital(&word) } else { word })
}

/// Replaces each `{kind}` in the text with a value of that kind, and `{0}`, `{1}`, ... with the arguments.
pub(crate) fn fill(
    text: &str,
    arguments: &[String],
    lists: &BTreeMap<String, Vec<String>>,
    rng: &mut impl Rng,
) -> String {
    let mut filled = String::new();
    let mut rest = text;
    while let Some((before, after)) = rest.split_once('{') {
        filled += before;
        let Some((slot, after)) = after.split_once('}') else {
            filled.push('{');
            rest = after;
            continue;
        };
        let argument = slot.parse().ok().and_then(|it: usize| arguments.get(it));
        match argument.cloned().or_else(|| value(slot, lists, rng)) {
            Some(value) => filled += &value,
            None => {
                filled.push('{');
                filled += slot;
                filled.push('}');
            }
        }
        rest = after;
    }
    filled + rest
}

#[cfg(test)]
mod tests {
    use rand::SeedableRng as _;
    use rand::rngs::StdRng;

    use super::*;

    #[test]
    fn slots_are_filled_and_what_is_none_stays() {
        let lists = BTreeMap::from([("city".to_owned(), vec!["Oslo".to_owned()])]);
        let mut rng = StdRng::seed_from_u64(1);
        let text = fill("{0}: {small} of {what} {", &["A".into()], &lists, &mut rng);
        let (number, rest) = text
            .strip_prefix("A: ")
            .and_then(|it| it.split_once(' '))
            .unwrap();
        assert!((1..21).contains(&number.parse::<u32>().unwrap()));
        assert_eq!(rest, "of {what} {");
    }

    #[test]
    fn a_listed_value_is_at_times_made_up_and_keeps_its_capital() {
        let lists = BTreeMap::from([("city".to_owned(), vec!["Oslo".to_owned()])]);
        let mut rng = StdRng::seed_from_u64(1);
        let drawn: Vec<String> = (0..100)
            .map(|_| value("city", &lists, &mut rng).unwrap())
            .collect();
        let listed = drawn.iter().filter(|it| *it == "Oslo").count();
        assert!((40..80).contains(&listed), "{listed}");
        assert!(drawn.iter().all(|it| it.starts_with(char::is_uppercase)));
    }
}
