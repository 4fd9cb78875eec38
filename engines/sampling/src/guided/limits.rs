//! [`GuideLimits`]: limits on the cost of one client's grammar.

use llguidance::api::ParserLimits;

/// Limits on a grammar, checked before and during compilation, and at every token.
///
/// The defaults fit the schemas of practice. The worst known grammars within them took one to two seconds to compile and a
/// tenth of a second for one token, which was then refused.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GuideLimits {
    /// Bytes of the schema as compact JSON, or of all texts of a choice.
    pub source_bytes: usize,
    /// Bytes of an expression, of all patterns of a schema, or of a grammar. Their characters can cost far more than those of a
    /// text: `\w` is a class of some hundred ranges.
    pub expression_bytes: usize,
    /// Nesting depth of a schema's objects and arrays, or of brackets in an expression or a grammar.
    pub depth: usize,
    /// Objects anywhere in a schema: a reference can make a schema of any of them.
    pub objects: usize,
    /// Distinct targets of a schema's references. Each can lead as deep as the schema is nested.
    pub references: usize,
    /// Size of a schema once its parts are merged: schemas, properties, names and values, a few hundred bytes each. Several
    /// comparisons between the options of a `oneOf` count as one.
    pub expansion: usize,
    /// Properties of one object of a schema, over all merged parts and including those that are only required; also of an object
    /// inside `const` or `enum`.
    pub properties: usize,
    /// Patterns among those (`patternProperties`): each pair is checked for overlap.
    pub patterns: usize,
    /// Texts of a choice.
    pub choices: usize,
    /// Rules and terminals of a grammar.
    pub rules: usize,
    /// Symbols of the compiled grammar.
    pub grammar_symbols: usize,
    /// Work to build the lexer; about 50,000 per millisecond.
    pub lexer_fuel: u64,
    /// Lexer work for one token; about 14,000 per millisecond.
    pub token_lexer_fuel: u64,
    /// Parser items for one token; about 20,000 per millisecond.
    pub token_parser_items: usize,
    /// Lexer states, kept as long as the sequence; 1 to 2 kB each.
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
            // Errors go to clients: they must not contain the text so far or the grammar.
            verbose_errors: false,
            ..ParserLimits::default()
        }
    }
}
