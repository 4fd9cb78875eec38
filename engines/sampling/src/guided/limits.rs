//! [`GuideLimits`]: what one client's grammar may cost everybody else.

use llguidance::api::ParserLimits;

/// Limits on a grammar, checked before and while it is compiled, and at every token.
///
/// The defaults hold the schemas of practice. The worst grammars found within them took one to two seconds to compile
/// and a tenth of a second for one token, at which they were then refused.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GuideLimits {
    /// Bytes of the schema as compact JSON, or of the texts of a choice together.
    pub source_bytes: usize,
    /// Bytes of an expression, of the patterns of a schema together, or of a grammar. A letter of these can cost far more
    /// than one of a text: `\w` is a class of some hundred ranges.
    pub expression_bytes: usize,
    /// Levels of nesting: of a schema's objects and arrays, or of brackets in an expression or a grammar.
    pub depth: usize,
    /// Objects in a schema, wherever they stand: a reference makes a schema of any.
    pub objects: usize,
    /// References of a schema to different places. Each can lead as deep as the schema is nested.
    pub references: usize,
    /// What a schema becomes once its parts are merged: schemas, properties, names and values; a few hundred bytes each. Some
    /// comparisons of the options of a `oneOf` count as one.
    pub expansion: usize,
    /// Properties of one object of a schema, merged parts together, and those that are only required; also of an object that is
    /// a value of `const` or `enum`.
    pub properties: usize,
    /// Patterns among those (`patternProperties`): whether they exclude each other is asked of each pair.
    pub patterns: usize,
    /// Texts of a choice.
    pub choices: usize,
    /// Rules and terminals of a grammar.
    pub rules: usize,
    /// Symbols of the compiled grammar.
    pub grammar_symbols: usize,
    /// Work for building the lexer; about 50,000 a millisecond.
    pub lexer_fuel: u64,
    /// Work of the lexer for one token; about 14,000 a millisecond.
    pub token_lexer_fuel: u64,
    /// Parser items for one token; about 20,000 a millisecond.
    pub token_parser_items: usize,
    /// States of the lexer, kept for the sequence's life; 1 to 2 kB each.
    pub lexer_states: usize,
}

impl Default for GuideLimits {
    fn default() -> Self {
        Self {
            source_bytes: 256 << 10,
            expression_bytes: 32 << 10,
            depth: 64,
            objects: 8192,
            references: 1024,
            expansion: 250_000,
            properties: 2048,
            patterns: 32,
            choices: 4096,
            rules: 2000,
            grammar_symbols: 200_000,
            lexer_fuel: 1_000_000,
            token_lexer_fuel: 200_000,
            token_parser_items: 50_000,
            lexer_states: 25_000,
        }
    }
}

impl GuideLimits {
    pub(super) fn parser(&self) -> ParserLimits {
        ParserLimits {
            initial_lexer_fuel: self.lexer_fuel,
            step_lexer_fuel: self.token_lexer_fuel,
            step_max_items: self.token_parser_items,
            max_lexer_states: self.lexer_states,
            max_grammar_size: self.grammar_symbols,
            // Errors go to clients: they must hold neither the text so far nor the grammar.
            verbose_errors: false,
            ..ParserLimits::default()
        }
    }
}
