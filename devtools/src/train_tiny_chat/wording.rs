//! Small variations of a question, as people make them: case, punctuation, a polite word, a typo.
//!
//! A question may look a little different each time it is trained on, so the model learns its meaning, not its form.

use std::collections::{HashMap, HashSet};

use rand::seq::IndexedRandom as _;
use rand::{Rng, RngExt as _};

use crate::text::{Conversation, Turn};
use crate::values::{capital, made_up};

/// What people say before a question.
const BEFORE: [&str; 9] = [
    "Please tell me: ",
    "Tell me, ",
    "Hey, ",
    "Hello, ",
    "Hi! ",
    "Question: ",
    "Please: ",
    "So, ",
    "Quick question: ",
];

/// What people say after a question.
const AFTER: [&str; 7] = [" Please.", " please", " Thanks!", "??", " ?", " :)", "..."];

/// The placeholder for a name; replaced by another name each time.
const NAME: &str = "{name}";

/// The names.
const NAMES: [&str; 60] = [
    "Anna", "Ben", "Clara", "David", "Emma", "Felix", "Grace", "Henry", "Ida", "Jonas", "Klara",
    "Leo", "Maria", "Noah", "Olga", "Paul", "Rosa", "Sam", "Tom", "Vera", "Adam", "Bella", "Carl",
    "Dora", "Eric", "Fiona", "Greg", "Hanna", "Ivan", "Julia", "Kevin", "Laura", "Mark", "Nina",
    "Oscar", "Petra", "Robin", "Sara", "Theo", "Ulla", "Victor", "Wanda", "Yara", "Zoe", "Alice",
    "Bob", "Cora", "Dan", "Eva", "Frank", "Gina", "Hugo", "Iris", "Jack", "Kim", "Lisa", "Max",
    "Nora", "Peter", "Ruth",
];

/// A random name from the list, or a made-up one.
pub(crate) fn any_name(rng: &mut impl Rng) -> String {
    if rng.random_bool(0.5) {
        return capital(&made_up(rng));
    }
    NAMES.choose(rng).copied().unwrap_or_default().to_owned()
}

/// The text with its placeholder, if any, replaced by this name.
pub(crate) fn with_name(text: &str, name: &str) -> String {
    text.replace(NAME, name)
}

/// Whether the text has a placeholder for a name.
pub(crate) fn wants_name(text: &str) -> bool {
    text.contains(NAME)
}

/// Questions that differ only in case and punctuation, but have different answers.
#[derive(Debug)]
pub(crate) struct Twins(HashSet<String>);

impl Twins {
    /// Finds them among the first turns of the conversations without a system message.
    pub(crate) fn find(conversations: &[Conversation]) -> Self {
        let mut answers: HashMap<String, HashSet<&str>> = HashMap::new();
        let plain = conversations.iter().filter(|it| it.system.is_none());
        for turn in plain.filter_map(|it| it.turns.first()) {
            for question in &turn.questions {
                answers
                    .entry(bare(question))
                    .or_default()
                    .insert(&turn.answer);
            }
        }
        answers.retain(|_, answers| answers.len() > 1);
        Self(answers.into_keys().collect())
    }

    fn contains(&self, question: &str) -> bool {
        self.0.contains(&bare(question))
    }
}

/// The question's letters and digits in lower case.
fn bare(question: &str) -> String {
    let kept = question.chars().filter(|c| c.is_alphanumeric());
    kept.flat_map(char::to_lowercase).collect()
}

/// A wording of the turn's question: the usual one almost half of the time, unchanged a third of the time.
pub(crate) fn ask(turn: &Turn, twins: &Twins, name: &str, rng: &mut impl Rng) -> String {
    let usual = turn.questions.first().map_or("", String::as_str);
    let wording = if rng.random_bool(0.4) {
        usual
    } else {
        turn.questions.choose(rng).map_or(usual, String::as_str)
    };
    let question = with_name(wording, name);
    if rng.random_bool(0.33) {
        return question;
    }
    if twins.contains(wording) {
        return with_case(question, rng);
    }
    vary(&question, rng)
}

/// The text in lower case four times in ten, in capitals once, otherwise unchanged.
fn with_case(text: String, rng: &mut impl Rng) -> String {
    match rng.random_range(0..10) {
        0..4 => text.to_lowercase(),
        4 => text.to_uppercase(),
        _ => text,
    }
}

fn vary(question: &str, rng: &mut impl Rng) -> String {
    let mut text = question.to_owned();
    if rng.random_bool(0.15) {
        text = text.replacen("What is", "What's", 1);
    }
    if rng.random_bool(0.04) {
        text = with_slip(&text, rng);
    }
    if rng.random_bool(0.5) {
        text.truncate(text.trim_end_matches(['?', '.', '!']).len());
    }
    if rng.random_bool(0.1) {
        text.push_str(AFTER.choose(rng).unwrap_or(&""));
    }
    if rng.random_bool(0.1) {
        text.insert_str(0, BEFORE.choose(rng).unwrap_or(&""));
    }
    let text = with_case(text, rng);
    match rng.random_range(0..20) {
        0 => format!(" {text}"),
        1 => format!("{text} "),
        2 => format!("{text}\n"),
        _ => text,
    }
}

/// The text without one of its letters; short words stay intact.
fn with_slip(text: &str, rng: &mut impl Rng) -> String {
    let mut words: Vec<String> = text.split(' ').map(str::to_owned).collect();
    let long = |word: &String| word.len() > 4 && word.chars().all(|c| c.is_ascii_lowercase());
    let candidates: Vec<usize> = (0..words.len()).filter(|&i| long(&words[i])).collect();
    if let Some(&index) = candidates.choose(rng) {
        let letter = rng.random_range(1..words[index].len());
        words[index].remove(letter);
    }
    words.join(" ")
}

#[cfg(test)]
mod tests {
    use rand::SeedableRng as _;
    use rand::rngs::StdRng;

    use super::*;
    use crate::text::Text;

    fn conversations(content: &str) -> Vec<Conversation> {
        let mut text = Text::default();
        text.add(content).unwrap();
        text.conversations
    }

    #[test]
    fn every_wording_keeps_most_of_its_letters() {
        let turns = conversations("Q: What is the capital of France?\nA: Paris.\n");
        let twins = Twins::find(&turns);
        let mut rng = StdRng::seed_from_u64(1);
        let asked: HashSet<String> = (0..300)
            .map(|_| ask(&turns[0].turns[0], &twins, "Ida", &mut rng))
            .collect();
        assert!(asked.contains("What is the capital of France?"));
        assert!(asked.contains("what is the capital of france"));
        assert!(asked.len() > 20, "{} wordings", asked.len());
        assert!(asked.iter().all(|it| bare(it).len() >= 22), "{asked:?}");
    }

    #[test]
    fn twins_keep_their_punctuation() {
        let turns = conversations("Q: Hello\nA: One.\n\nQ: Hello!\nA: Two.\n");
        let twins = Twins::find(&turns);
        let mut rng = StdRng::seed_from_u64(1);
        for _ in 0..100 {
            let one = ask(&turns[0].turns[0], &twins, "Ida", &mut rng);
            assert_eq!(one.to_lowercase(), "hello");
            let two = ask(&turns[1].turns[0], &twins, "Ida", &mut rng);
            assert_eq!(two.to_lowercase(), "hello!");
        }
    }

    #[test]
    fn a_name_is_put_into_its_place() {
        assert!(wants_name("I am {name}."));
        assert_eq!(with_name("I am {name}.", "Ida"), "I am Ida.");
        assert!(!wants_name("I am Ida."));
    }
}
