//! Unknown tools: names and descriptions are made-up words, which the model must read.

use rand::seq::IndexedRandom as _;
use rand::{Rng, RngExt as _};

use super::{Kind, Parameter};
use crate::values::{capital, made_up};

/// Draws an unknown tool.
pub(super) fn unknown(rng: &mut impl Rng) -> Kind {
    let (thing, of) = (made_up(rng), ["city", "person", "word", "code", "small"]);
    let of = of.choose(rng).copied().unwrap_or("word");
    let name = match of {
        "city" => ["city", "place", "location"],
        "person" => ["name", "person", "user"],
        "code" => ["id", "code", "item"],
        "small" => ["number", "n", "count"],
        _ => ["word", "text", "term"],
    };
    let name = name.choose(rng).copied().unwrap_or("text");
    let verb = ["get", "find", "check", "show", "lookup"];
    let verb = verb.choose(rng).copied().unwrap_or("get");
    let texts = |texts: &[String]| texts.to_vec();
    let (names, descriptions, questions, answer) = if rng.random_bool(0.6) {
        (
            texts(&[
                format!("{verb}_{thing}"),
                thing.clone(),
                format!("{thing}_{verb}"),
            ]),
            texts(&[
                format!("Get the {thing} of a {name}."),
                format!("Returns the {thing} for a {name}."),
                format!("{} of a {name}.", capital(&thing)),
            ]),
            texts(&[
                format!("What is the {thing} of {{0}}?"),
                format!("What is the {thing} in {{0}}?"),
                format!("Tell me the {thing} of {{0}}."),
                format!("{} of {{0}}?", capital(&thing)),
                format!("Which {thing} has {{0}}?"),
            ]),
            format!("The {thing} of {{0}} is {{result}}."),
        )
    } else {
        (
            texts(&[
                thing.clone(),
                format!("{thing}_{name}"),
                format!("do_{thing}"),
            ]),
            texts(&[
                format!("{} a {name}.", capital(&thing)),
                format!("Use this to {thing} a {name}."),
            ]),
            texts(&[
                format!("Please {thing} {{0}}."),
                format!("{} {{0}}.", capital(&thing)),
                format!("Can you {thing} {{0}}?"),
            ]),
            "Done: {result}.".to_owned(),
        )
    };
    Kind {
        names,
        descriptions,
        parameters: vec![Parameter {
            names: vec![name.to_owned()],
            values: of.to_owned(),
        }],
        questions,
        results: texts(&[
            "{word}".to_owned(),
            "{integer}".to_owned(),
            "{phrase}".to_owned(),
            "{word}, {small} {word}".to_owned(),
        ]),
        answer,
    }
}
