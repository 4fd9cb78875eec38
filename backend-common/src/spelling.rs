//! The nearest spelling of an unknown word, and the error text for such a word. Used for words that people give: names of values,
//! controls, settings, and the command line.

/// The minimum similarity, of 1, for a word to be a suggestion.
const NEAR: f64 = 0.8;

/// The known word that the user probably meant.
#[must_use]
pub fn nearest<'a>(given: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let rated = known
        .into_iter()
        .map(|word| (strsim::jaro_winkler(given, word), word));
    let near = rated.filter(|(rating, _)| *rating > NEAR);
    near.max_by(|(one, _), (other, _)| one.total_cmp(other))
        .map(|(_, word)| word)
}

/// `; did you mean ...?` if there is a similar known word.
#[must_use]
pub fn did_you_mean<'a>(given: &str, known: impl IntoIterator<Item = &'a str>) -> String {
    nearest(given, known).map_or(String::new(), |word| format!("; did you mean {word:?}?"))
}

/// The error text for an unknown word: lists the known words, and suggests the nearest.
#[must_use]
pub fn none_of<'a>(given: &str, known: impl IntoIterator<Item = &'a str>) -> String {
    let known: Vec<&str> = known.into_iter().collect();
    let near = did_you_mean(given, known.iter().copied());
    format!("{given:?} is none of {}{near}", known.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nearest_spelling_is_found_and_nothing_far() {
        let known = ["http-port", "http-host", "router-mode"];
        assert_eq!(nearest("http-prot", known), Some("http-port"));
        assert_eq!(nearest("router_mode", known), Some("router-mode"));
        assert_eq!(nearest("zebra", known), None);
        assert_eq!(
            did_you_mean("vlm", ["vllm", "sglang"]),
            "; did you mean \"vllm\"?"
        );
        assert_eq!(
            none_of("vlm", ["vllm", "sglang"]),
            "\"vlm\" is none of vllm, sglang; did you mean \"vllm\"?"
        );
        assert_eq!(none_of("x", ["a", "b"]), "\"x\" is none of a, b");
    }
}
