//! Helpers for the tests of all parsers.

use std::collections::BTreeSet;
use std::sync::Arc;

use proptest::prelude::Just;
use proptest::strategy::{Strategy, Union};

use super::{Delta, IdStyle, MarkupParser, Message, Splitter};
use crate::tools::ToolDialect;

/// A call in the dialect `qwen3_coder` whose value contains the marker that ends values.
const CALL_WITH_MARKER: &str = "<function=write_file>\n<parameter=text>\nsee </parameter> here\n</parameter>\n\
    <parameter=path>\na\n</parameter>\n</function>";

/// A splitter that looks for calls alone, of tools without schemas.
pub(crate) fn calls_of(dialect: &str) -> Splitter {
    let dialect = ToolDialect::find(dialect).expect("a dialect");
    let parser = dialect.parser(Arc::default());
    Splitter::new(None, Some(parser), dialect.id_style())
}

/// Runs a parser over a text in pieces; calls have ids only if the model gave them.
pub(crate) fn parse<'a>(
    parser: Box<dyn MarkupParser>,
    pieces: impl IntoIterator<Item = &'a str>,
) -> Message {
    split(Splitter::new(None, Some(parser), IdStyle::Call), pieces)
}

/// Runs a splitter over a text in pieces.
pub(crate) fn split<'a>(
    mut splitter: Splitter,
    pieces: impl IntoIterator<Item = &'a str>,
) -> Message {
    let mut message = Message::default();
    for piece in pieces {
        splitter.push(piece, |delta| message.add(delta));
    }
    splitter.finish(|delta| message.add(delta));
    for call in &mut message.tool_calls {
        if call.id.starts_with("call_") {
            call.id.clear();
        }
    }
    message
}

/// Reads [`CALL_WITH_MARKER`], whole or by the character.
pub(crate) fn read_call(is_whole: bool, mut each: impl FnMut(Delta<'_>)) {
    let mut splitter = calls_of("qwen3_coder");
    let pieces = if is_whole {
        vec![CALL_WITH_MARKER]
    } else {
        characters(CALL_WITH_MARKER)
    };
    for piece in pieces {
        splitter.push(piece, &mut each);
    }
    splitter.finish(each);
}

/// Cuts a text at these offsets, if they lie between characters.
pub(crate) fn cut<'a>(text: &'a str, at: &[usize]) -> Vec<&'a str> {
    let mut places: Vec<usize> = at.iter().map(|place| place % (text.len() + 1)).collect();
    places.retain(|place| text.is_char_boundary(*place));
    places.sort_unstable();
    let ends = places.iter().copied().chain([text.len()]);
    let begins = [0].into_iter().chain(places.iter().copied());
    begins
        .zip(ends)
        .map(|(begin, end)| &text[begin..end])
        .collect()
}

/// Cuts a text between all characters.
pub(crate) fn characters(text: &str) -> Vec<&str> {
    text.split_inclusive(|_: char| true).collect()
}

/// Random mixtures of these parts, of markers and of their beginnings.
pub(crate) fn soup(
    mut parts: Vec<&'static str>,
    markers: Vec<&'static str>,
) -> impl Strategy<Value = String> {
    for marker in markers {
        parts.extend([
            marker,
            &marker[..marker.ceil_char_boundary(marker.len() / 2)],
        ]);
    }
    let part = Union::new(parts.into_iter().map(Just));
    proptest::collection::vec(part, 0..24).prop_map(|parts| parts.concat())
}

/// Compares a table of parsers with Python's copy in `genset._parsers`: the tuples whose names begin with `kind`.
pub(crate) fn assert_python_knows<'a>(
    kind: &str,
    names: impl Iterator<Item = &'a str>,
    aliases: impl Iterator<Item = &'a str>,
) {
    let names = names.chain(["none"]).map(str::to_owned);
    let names: BTreeSet<String> = names.collect();
    assert_eq!(python_names(&format!("{kind}_PARSERS")), names);
    let aliases: BTreeSet<String> = aliases.map(str::to_owned).collect();
    assert_eq!(python_names(&format!("{kind}_ALIASES")), aliases);
}

/// Checks that a section of the guide to OpenAI's API has every name of a table of parsers.
pub(crate) fn assert_guide_knows<'a>(heading: &str, names: impl Iterator<Item = &'a str>) {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/guide/openai-api.md");
    let guide = std::fs::read_to_string(path).expect("the guide is readable");
    let (_, rest) = guide
        .split_once(&format!("\n## {heading}\n"))
        .expect("the guide has the section");
    let section = rest.split("\n## ").next().unwrap_or(rest);
    for name in names {
        assert!(section.contains(&format!("`{name}`")), "{heading}: {name}");
    }
}

/// The names in a tuple of the module.
fn python_names(tuple: &str) -> BTreeSet<String> {
    let path = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../python/src/genset/_parsers.py"
    );
    let module = std::fs::read_to_string(path).expect("the module is readable");
    let (_, rest) = module
        .split_once(&format!("\n{tuple} = ("))
        .expect("the module has the tuple");
    let (names, _) = rest.split_once(')').expect("the tuple ends");
    let names = names.split('"').skip(1).step_by(2);
    names.map(str::to_owned).collect()
}
