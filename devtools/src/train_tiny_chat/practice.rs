//! Short conversations drawn anew each time: sums, words to repeat, facts of a system message, JSON. Also drills, which
//! preserve the heads that copy.

use std::collections::BTreeMap;

use rand::seq::IndexedRandom as _;
use rand::{Rng, RngExt as _};

use crate::encode::{Role, Sequence};
use crate::text::Text;
use crate::values::{capital, is_integer, made_up, pick, value};
use crate::wording::wants_name;

type Messages = Vec<(Role, String)>;
type Lists = BTreeMap<String, Vec<String>>;

fn asked(question: String, answer: String) -> Messages {
    vec![(Role::User, question), (Role::Assistant, answer)]
}

/// One exercise.
pub(crate) fn exercise(text: &Text, lists: &Lists, rng: &mut impl Rng) -> Messages {
    match rng.random_range(0..100) {
        0..55 => sum(rng),
        55..65 => echo(lists, rng),
        65..70 => name(lists, rng),
        70..83 => fact(text, lists, rng),
        _ => json(lists, rng),
    }
}

/// Sums up to 20 + 20, differences in the same range, products up to 10 times 10.
fn sum(rng: &mut impl Rng) -> Messages {
    let (sign, words, a, b, result) = match rng.random_range(0..3) {
        0 => {
            let (a, b) = (rng.random_range(0..21), rng.random_range(0..21));
            ("+", "plus", a, b, a + b)
        }
        1 => {
            let (a, b): (u32, u32) = (rng.random_range(0..21), rng.random_range(0..21));
            ("-", "minus", a.max(b), a.min(b), a.abs_diff(b))
        }
        _ => {
            let (a, b): (u32, u32) = (rng.random_range(0..11), rng.random_range(0..11));
            ("*", "times", a, b, a * b)
        }
    };
    let shown = if rng.random_bool(0.2) { words } else { sign };
    let question = pick(
        &[
            "What is {}?",
            "What is {}?",
            "How much is {}?",
            "Calculate {}.",
            "{}",
            "{} =",
            "What's {}?",
            "What does {} make?",
        ],
        rng,
    );
    asked(
        question.replace("{}", &format!("{a} {shown} {b}")),
        format!("{a} {sign} {b} = {result}."),
    )
}

/// Something to repeat word for word.
fn echo(lists: &Lists, rng: &mut impl Rng) -> Messages {
    let said = match rng.random_range(0..5) {
        0 => value("phrase", lists, rng).unwrap_or_default(),
        1 => value("word", lists, rng).unwrap_or_default(),
        2 => capital(&value("phrase", lists, rng).unwrap_or_default()) + ".",
        3 => (0..rng.random_range(2..6))
            .map(|_| made_up(rng))
            .collect::<Vec<_>>()
            .join(" "),
        _ => value("code", lists, rng).unwrap_or_default(),
    };
    let question = pick(
        &[
            "Repeat after me: {}",
            "Repeat: {}",
            "Say: {}",
            "Repeat this: {}",
            "Please repeat: {}",
            "Say this: {}",
            "Write: {}",
        ],
        rng,
    );
    asked(question.replace("{}", &said), said)
}

/// A name that the user states and asks for.
fn name(lists: &Lists, rng: &mut impl Rng) -> Messages {
    let name = value("person", lists, rng).unwrap_or_else(|| capital(&made_up(rng)));
    let told = pick(
        &[
            "My name is {}.",
            "I am {}.",
            "I'm {}.",
            "Hello, my name is {}.",
            "Hi, I am {}.",
            "Call me {}.",
        ],
        rng,
    );
    let mut messages = asked(
        told.replace("{}", &name),
        format!("Nice to meet you, {name}!"),
    );
    let question = pick(
        &[
            "What is my name?",
            "What's my name?",
            "Do you remember my name?",
            "Who am I?",
        ],
        rng,
    );
    messages.extend(asked(question.to_owned(), format!("Your name is {name}.")));
    messages
}

/// The fact in a system message, a question for it, the answer, and the kind of value.
const FACTS: [(&str, &str, &str, &str); 16] = [
    (
        "The user's name is {}.",
        "What is my name?",
        "Your name is {}.",
        "person",
    ),
    (
        "The user is called {}.",
        "Who am I?",
        "Your name is {}.",
        "person",
    ),
    (
        "The secret word is {}.",
        "What is the secret word?",
        "The secret word is {}.",
        "word",
    ),
    (
        "The password is {}.",
        "What is the password?",
        "The password is {}.",
        "word",
    ),
    (
        "The code is {}.",
        "What is the code?",
        "The code is {}.",
        "code",
    ),
    (
        "The meeting is at {}.",
        "When is the meeting?",
        "The meeting is at {}.",
        "time",
    ),
    (
        "The meeting is at {}.",
        "At what time is the meeting?",
        "The meeting is at {}.",
        "time",
    ),
    (
        "Lunch is at {}.",
        "When is lunch?",
        "Lunch is at {}.",
        "time",
    ),
    ("Today is {}.", "What is the date?", "Today is {}.", "date"),
    (
        "Today is {}.",
        "What day is it today?",
        "Today is {}.",
        "date",
    ),
    (
        "The user lives in {}.",
        "Where do I live?",
        "You live in {}.",
        "city",
    ),
    (
        "The office is in {}.",
        "Where is the office?",
        "The office is in {}.",
        "city",
    ),
    (
        "The user is {} years old.",
        "How old am I?",
        "You are {} years old.",
        "small",
    ),
    (
        "The room number is {}.",
        "What is the room number?",
        "The room number is {}.",
        "integer",
    ),
    (
        "The user's email is {}.",
        "What is my email?",
        "Your email is {}.",
        "email",
    ),
    (
        "The dog is called {}.",
        "What is the dog called?",
        "The dog is called {}.",
        "person",
    ),
];

/// A system message with a fact, anywhere before the question.
fn fact(text: &Text, lists: &Lists, rng: &mut impl Rng) -> Messages {
    let (system, question, answer) = if rng.random_bool(0.4) {
        let thing = if rng.random_bool(0.5) {
            made_up(rng)
        } else {
            pick(
                &[
                    "color", "team", "project", "key", "answer", "topic", "place", "number",
                ],
                rng,
            )
            .to_owned()
        };
        let kind = pick(&["word", "small", "city", "phrase", "code"], rng);
        let value = value(kind, lists, rng).unwrap_or_default();
        (
            format!("The {thing} is {value}."),
            format!("What is the {thing}?"),
            format!("The {thing} is {value}."),
        )
    } else {
        let (system, question, answer, kind) = FACTS.choose(rng).copied().unwrap_or_default();
        let value = value(kind, lists, rng).unwrap_or_default();
        (
            system.replace("{}", &value),
            question.to_owned(),
            answer.replace("{}", &value),
        )
    };
    let before = pick(
        &["", "", "", "You are a helpful assistant. ", "Be brief. "],
        rng,
    );
    let system = (Role::System, format!("{before}{system}"));
    let mut messages = Vec::new();
    let mut other = || {
        let plain = text.conversations.choose(rng)?;
        let turn = plain.turns.first()?;
        let is_plain = plain.system.is_none() && !wants_name(&turn.answer);
        let question = turn.questions.first()?.clone();
        is_plain.then(|| asked(question, turn.answer.clone()))
    };
    let other = other();
    match (rng.random_range(0..4), other) {
        (0, Some(other)) => {
            messages.push(system);
            messages.extend(other);
        }
        (1, Some(other)) => {
            messages.extend(other);
            messages.push(system);
        }
        _ => messages.push(system),
    }
    messages.extend(asked(question, answer));
    messages
}

/// Fields of an object, and the kinds of their values.
const FIELDS: [(&str, &str); 18] = [
    ("name", "person"),
    ("age", "small"),
    ("city", "city"),
    ("country", "city"),
    ("color", "word"),
    ("title", "word"),
    ("id", "integer"),
    ("code", "code"),
    ("count", "small"),
    ("price", "integer"),
    ("email", "email"),
    ("year", "integer"),
    ("date", "date"),
    ("time", "time"),
    ("size", "small"),
    ("topic", "word"),
    ("first_name", "person"),
    ("note", "word"),
];

/// Fields and their values, requested as an object.
fn json(lists: &Lists, rng: &mut impl Rng) -> Messages {
    let count = rng.random_range(1..4);
    let mut named = Vec::new();
    let mut written = Vec::new();
    for (field, kind) in FIELDS.sample(rng, count).collect::<Vec<_>>() {
        let value = value(kind, lists, rng).unwrap_or_default();
        if is_integer(kind) {
            written.push(format!("\"{field}\": {value}"));
        } else {
            written.push(format!("\"{field}\": \"{value}\""));
        }
        named.push(format!("{field} {value}"));
    }
    let answer = format!("{{{}}}", written.join(", "));
    let named = match named.split_last() {
        Some((last, [])) => last.clone(),
        Some((last, rest)) => format!("{} and {last}", rest.join(", ")),
        None => String::new(),
    };
    let question = pick(
        &[
            "Write JSON with {}.",
            "Give me JSON with {}.",
            "Give me a JSON object with {}.",
            "JSON with {}",
            "Answer in JSON: {}",
            "Make a JSON object with {}.",
            "As JSON: {}",
        ],
        rng,
    );
    asked(question.replace("{}", &named), answer)
}

/// Tokens, other tokens, and the first ones again, learned from the second on.
pub(crate) fn drill(vocabulary: usize, rng: &mut impl Rng) -> Sequence {
    let vocabulary = u32::try_from(vocabulary).unwrap_or(u32::MAX);
    let mut tokens = |count: usize| -> Vec<u32> {
        let one = |_| rng.random_range(3..vocabulary);
        (0..count).map(one).collect()
    };
    let (first, between) = (tokens(24), tokens(40));
    let begin = first[0] as usize % 12;
    let again = &first[begin..];
    let mut sequence = Sequence {
        learned: vec![false; first.len() + between.len() + 1],
        tokens: [&first[..], &between, again].concat(),
    };
    sequence.learned.resize(sequence.tokens.len(), true);
    sequence
}

#[cfg(test)]
mod tests {
    use rand::SeedableRng as _;
    use rand::rngs::StdRng;

    use super::*;

    #[test]
    fn sums_are_right() {
        let mut rng = StdRng::seed_from_u64(1);
        for _ in 0..500 {
            let messages = sum(&mut rng);
            let words: Vec<&str> = messages[1].1.trim_end_matches('.').split(' ').collect();
            let number = |at: usize| words[at].parse::<i64>().unwrap();
            let result = match words[1] {
                "+" => number(0) + number(2),
                "-" => number(0) - number(2),
                _ => number(0) * number(2),
            };
            assert_eq!(number(4), result);
            assert!(result >= 0);
        }
    }

    #[test]
    fn what_is_written_as_json_is_json() {
        let mut rng = StdRng::seed_from_u64(1);
        let lists = BTreeMap::from([
            ("person".to_owned(), vec!["Anna".to_owned()]),
            ("city".to_owned(), vec!["Oslo".to_owned()]),
        ]);
        for _ in 0..200 {
            let messages = json(&lists, &mut rng);
            serde_json::from_str::<serde_json::Value>(&messages[1].1).unwrap();
        }
    }

    #[test]
    fn a_drill_learns_what_stood_before() {
        let drill = drill(2048, &mut StdRng::seed_from_u64(1));
        assert_eq!(drill.tokens.len(), drill.learned.len());
        let learned = drill.learned.iter().filter(|&&it| it).count();
        let again = &drill.tokens[drill.tokens.len() - learned..];
        assert!(drill.tokens[..24].windows(learned).any(|it| it == again));
    }
}
