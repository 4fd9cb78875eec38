//! Prepares a template's source for the engine: replaces what `transformers` knows and Jinja does not, and passes values that
//! could grow without end through a function that bounds them.
//!
//! Line numbers do not change, so errors name the right lines.

use std::ops::Range;

use minijinja::machinery::ast::{
    BinOp, BinOpKind, CallArg, CompareOpKind, Expr, ForLoop, Macro, Set, Spanned, Stmt,
};
use minijinja::machinery::{Span, Token, parse, tokenize};
use minijinja::syntax::SyntaxConfig;
use minijinja::{Error, ErrorKind};

/// The name suffix of the function that bounds a whole value: none.
const WHOLE: &str = "";

/// The name suffix of the function that charges for a read of a value and returns the value.
pub(super) const PART: &str = "_part";

/// The name suffix of the function that charges for access to one item and returns the value.
pub(super) const ITEM: &str = "_item";

/// The name suffix of the function that charges for a slice and returns a value that can be sliced.
pub(super) const BASE: &str = "_base";

/// The name suffix of the filter for values that are tested for equality.
pub(super) const COMPARED: &str = "_compared";

/// The name suffix of the filter for values that are ordered.
pub(super) const ORDERED: &str = "_ordered";

/// Access up to this index of a text is not charged.
const NEAR: usize = 1_000;

/// Tests that do not read a whole text.
const BRIEF_TESTS: [&str; 22] = [
    "boolean",
    "callable",
    "defined",
    "divisibleby",
    "escaped",
    "even",
    "false",
    "filter",
    "float",
    "int",
    "integer",
    "iterable",
    "mapping",
    "none",
    "number",
    "odd",
    "safe",
    "sameas",
    "sequence",
    "string",
    "true",
    "undefined",
];

/// More than any template in use needs.
const MAX_TAG_TOKENS: usize = 1_000;

/// Turns `generation` blocks, which mark what the assistant wrote, into plain scopes. `transformers` uses them to mask training
/// data; Jinja itself does not know them.
pub(super) fn without_generation_tags(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    let mut in_raw = false;
    while let Some(word) = next_tag_word(rest, in_raw) {
        let (name, after) = (&rest[word.clone()], word.end);
        out.push_str(&rest[..word.start]);
        out.push_str(match name {
            "generation" if !in_raw => "with",
            "endgeneration" if !in_raw => "endwith",
            other => other,
        });
        in_raw = name == "raw" || (in_raw && name != "endraw");
        rest = &rest[after..];
    }
    out.push_str(rest);
    out
}

/// Returns the range of the first word in the next `{% tag %}`. Skips comments, except in raw blocks.
fn next_tag_word(source: &str, in_raw: bool) -> Option<Range<usize>> {
    let mut at = 0;
    loop {
        at += source[at..].find('{')?;
        let here = &source[at..];
        if let Some(tag) = here.strip_prefix("{%") {
            let word = tag.strip_prefix(['-', '+']).unwrap_or(tag).trim_start();
            let start = source.len() - word.len();
            let len = word.find(|c: char| !c.is_alphanumeric() && c != '_');
            return Some(start..start + len.unwrap_or(word.len()));
        }
        at += match here.strip_prefix("{#") {
            Some(comment) if !in_raw => "{#".len() + comment.find("#}")?,
            Some(_) | None => 1,
        };
    }
}

/// A source in which every growing value passes through a function.
#[derive(Debug)]
pub(super) struct Bounded {
    pub(super) source: String,
    /// The function's name, which does not occur elsewhere in the source.
    pub(super) function: String,
    /// The longest literal text that a rendering can repeat, in bytes.
    pub(super) longest_repeated: usize,
}

impl Bounded {
    /// Wraps the results of joining and repeating operators, and lists and objects, in calls of a function.
    ///
    /// # Errors
    /// The syntax errors of the source.
    pub(super) fn try_new(source: &str, syntax: SyntaxConfig) -> Result<Self, Error> {
        check_tags(source, syntax.clone())?;
        let mut found = Found::new(source);
        found.statement(&parse(source, "", syntax)?, false);
        let mut function = "_bounded".to_owned();
        while source.contains(&function) {
            function.push('_');
        }
        Ok(Self {
            source: found.wrapped(&function),
            function,
            longest_repeated: found.longest_repeated,
        })
    }
}

/// Refuses tags so long that the engine could overflow the stack: it compiles expressions by recursion.
fn check_tags(source: &str, syntax: SyntaxConfig) -> Result<(), Error> {
    let mut tokens = 0;
    // The parser reports invalid tokens with a better message.
    for (token, span) in tokenize(source, false, syntax).map_while(Result::ok) {
        tokens += 1;
        if matches!(token, Token::VariableStart | Token::BlockStart) {
            tokens = 0;
        }
        if tokens > MAX_TAG_TOKENS {
            let line = span.start_line;
            let detail = format!("more than {MAX_TAG_TOKENS} tokens in a tag, up to line {line}");
            return Err(Error::new(ErrorKind::SyntaxError, detail));
        }
    }
    Ok(())
}

/// The growing values found in a template's syntax tree.
struct Found<'t> {
    source: &'t str,
    growing: Vec<Growing>,
    /// Where expressions that pass through a filter end, and which filter.
    filtered: Vec<(usize, &'static str)>,
    longest_repeated: usize,
}

/// An expression that becomes a call.
struct Growing {
    /// Byte range in the source.
    range: Range<usize>,
    /// Follows the function's name.
    opening: String,
    closing: String,
}

/// Whether the enclosing expression bounds an expression's result.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Within {
    /// Part of a larger sum, or printed.
    Bounded,
    Other,
}

impl<'t> Found<'t> {
    fn new(source: &'t str) -> Self {
        Self {
            source,
            growing: Vec::new(),
            filtered: Vec::new(),
            longest_repeated: 0,
        }
    }

    fn wrapped(&self, function: &str) -> String {
        let mut marks = Vec::new();
        for (index, growing) in self.growing.iter().enumerate() {
            let Range { start, end } = growing.range;
            // At the same offset, closings precede openings, and outer calls enclose inner ones.
            let opening = (start, true, usize::MAX - end, index);
            let closing = (end, false, usize::MAX - start, usize::MAX - index);
            marks.push((opening, function.to_owned() + &growing.opening));
            marks.push((closing, growing.closing.clone()));
        }
        for &(end, filter) in &self.filtered {
            let mark = (end, false, usize::MAX - end, 0);
            marks.push((mark, format!(" | {function}{filter}")));
        }
        marks.sort();
        let mut out = String::with_capacity(self.source.len() + 2 * marks.len() * function.len());
        let mut done = 0;
        for ((at, ..), mark) in marks {
            out.push_str(&self.source[done..at]);
            out.push_str(&mark);
            done = at;
        }
        out.push_str(&self.source[done..]);
        out
    }

    fn grows(&mut self, span: Span) {
        let range = span.start_offset as usize..span.end_offset as usize;
        self.calls(range, WHOLE);
    }

    fn calls(&mut self, range: Range<usize>, suffix: &'static str) {
        self.growing.push(Growing {
            range,
            opening: format!("{suffix}("),
            closing: ")".to_owned(),
        });
    }

    /// Charges for a value that is read, unless the expression that makes it charges for it.
    fn reads(&mut self, expression: &Expr<'_>, suffix: &'static str) {
        let read = outcomes(expression).into_iter();
        for expression in read.filter(|outcome| is_uncounted(outcome)) {
            self.calls(range_of(expression), suffix);
        }
    }

    /// Comparing two values reads up to the end of the shorter one. A constant is not a list.
    fn compares(&mut self, left: &Expr<'_>, right: &Expr<'_>) {
        if outcomes(right).into_iter().any(is_uncounted) {
            self.reads(left, WHOLE);
        }
        if !matches!(left, Expr::Const(_)) && !matches!(right, Expr::Const(_)) {
            self.passes(left, COMPARED);
            self.passes(right, COMPARED);
        }
    }

    fn orders(&mut self, left: &Expr<'_>, right: &Expr<'_>) {
        self.passes(left, ORDERED);
        self.passes(right, ORDERED);
    }

    /// Passes a value through a filter, unless it is certainly neither an iterator nor a slice of a list.
    fn passes(&mut self, expression: &Expr<'_>, filter: &'static str) {
        for outcome in outcomes(expression) {
            if is_uncounted(outcome) || matches!(outcome, Expr::Filter(_)) {
                let end = outcome.span().end_offset as usize;
                self.filtered.push((end, filter));
            }
        }
    }

    fn statements(&mut self, statements: &[Stmt<'_>], is_repeated: bool) {
        for statement in statements {
            self.statement(statement, is_repeated);
        }
    }

    fn statement(&mut self, statement: &Stmt<'_>, is_repeated: bool) {
        match statement {
            Stmt::Template(it) => self.statements(&it.children, is_repeated),
            Stmt::EmitExpr(it) => self.expression(&it.expr, Within::Bounded),
            Stmt::EmitRaw(it) if is_repeated => {
                self.longest_repeated = self.longest_repeated.max(it.raw.len());
            }
            Stmt::ForLoop(it) => self.for_loop(it, is_repeated),
            Stmt::IfCond(it) => {
                self.own(&it.expr);
                self.statements(&it.true_body, is_repeated);
                self.statements(&it.false_body, is_repeated);
            }
            Stmt::WithBlock(it) => {
                self.all(it.assignments.iter().map(|(_, value)| value));
                self.statements(&it.body, is_repeated);
            }
            Stmt::Set(it) => self.set(it),
            Stmt::SetBlock(it) => {
                self.all(&it.filter);
                self.statements(&it.body, is_repeated);
            }
            Stmt::AutoEscape(it) => self.statements(&it.body, is_repeated),
            Stmt::FilterBlock(it) => {
                self.own(&it.filter);
                self.statements(&it.body, is_repeated);
            }
            Stmt::Block(it) => self.statements(&it.body, true),
            Stmt::Macro(it) => self.template_macro(it),
            Stmt::CallBlock(it) => {
                self.arguments(&it.call.args);
                self.template_macro(&it.macro_decl);
            }
            Stmt::Do(it) => self.arguments(&it.call.args),
            // There are no other templates to import.
            Stmt::Import(_) | Stmt::FromImport(_) | Stmt::Extends(_) | Stmt::Include(_) => {}
            Stmt::EmitRaw(_) | Stmt::Continue(_) | Stmt::Break(_) => {}
        }
    }

    /// A value assigned to a namespace's attribute must not contain the namespace: it could never be printed.
    fn set(&mut self, it: &Spanned<Set<'_>>) {
        let namespaces = namespaces(&it.target);
        let bare_items = bare_items(&it.expr);
        if namespaces.is_empty() && bare_items.is_none() {
            return self.own(&it.expr);
        }
        let start = it.span().start_offset as usize;
        let end = it.span().end_offset as usize;
        let source = self.source;
        if let Some((_, value)) = source[start..end].split_once('=') {
            let named: String = namespaces.iter().map(|name| format!(", {name}")).collect();
            let (opening, closing) = match bare_items {
                Some(_) => ("((", ")"),
                None => ("(", ""),
            };
            self.growing.push(Growing {
                range: end - value.trim_start().len()..end,
                opening: opening.to_owned(),
                closing: format!("{closing}{named})"),
            });
        }
        match bare_items {
            Some(items) => self.all(items),
            None => self.expression(&it.expr, Within::Bounded),
        }
    }

    fn for_loop(&mut self, it: &ForLoop<'_>, is_repeated: bool) {
        self.reads(&it.iter, PART);
        self.own(&it.iter);
        self.all(&it.filter_expr);
        self.statements(&it.body, true);
        self.statements(&it.else_body, is_repeated);
    }

    fn template_macro(&mut self, it: &Macro<'_>) {
        self.all(&it.defaults);
        self.statements(&it.body, true);
    }

    fn own(&mut self, expression: &Expr<'_>) {
        self.expression(expression, Within::Other);
    }

    fn all<'a, 's: 'a>(&mut self, expressions: impl IntoIterator<Item = &'a Expr<'s>>) {
        for expression in expressions {
            self.own(expression);
        }
    }

    fn arguments(&mut self, arguments: &[CallArg<'_>]) {
        for argument in arguments {
            match argument {
                CallArg::Pos(it)
                | CallArg::Kwarg(_, it)
                | CallArg::PosSplat(it)
                | CallArg::KwargSplat(it) => self.own(it),
            }
        }
    }

    fn expression(&mut self, expression: &Expr<'_>, within: Within) {
        match expression {
            Expr::Var(_) | Expr::Const(_) => {}
            Expr::BinOp(it) => self.operation(it, within),
            Expr::List(it) => self.made(&it.items, it.span()),
            Expr::Tuple(it) => self.made(&it.items, it.span()),
            Expr::Map(it) => self.made(it.keys.iter().chain(&it.values), it.span()),
            Expr::UnaryOp(it) => self.own(&it.expr),
            Expr::Slice(it) => {
                self.reads(&it.expr, BASE);
                self.own(&it.expr);
                self.all([&it.start, &it.stop, &it.step].into_iter().flatten());
            }
            Expr::Compare(it) => {
                let mut left = &it.expr;
                for op in &it.ops {
                    match op.op {
                        CompareOpKind::In | CompareOpKind::NotIn => self.reads(&op.expr, WHOLE),
                        CompareOpKind::Eq | CompareOpKind::Ne => self.compares(left, &op.expr),
                        CompareOpKind::Lt
                        | CompareOpKind::Lte
                        | CompareOpKind::Gt
                        | CompareOpKind::Gte => self.orders(left, &op.expr),
                    }
                    left = &op.expr;
                }
                self.own(&it.expr);
                self.all(it.ops.iter().map(|op| &op.expr));
            }
            Expr::IfExpr(it) => {
                self.expression(&it.true_expr, within);
                self.own(&it.test_expr);
                if let Some(other) = &it.false_expr {
                    self.expression(other, within);
                }
            }
            Expr::Filter(it) => {
                self.all(&it.expr);
                self.arguments(&it.args);
            }
            Expr::Test(it) => {
                if !BRIEF_TESTS.contains(&it.name) {
                    self.reads(&it.expr, WHOLE);
                    for argument in &it.args {
                        if let CallArg::Pos(argument) = argument {
                            self.reads(argument, WHOLE);
                        }
                    }
                }
                self.own(&it.expr);
                self.arguments(&it.args);
            }
            Expr::GetAttr(it) => self.own(&it.expr),
            Expr::GetItem(it) => {
                if !is_near(&it.subscript_expr) {
                    self.reads(&it.expr, ITEM);
                    self.reads(&it.subscript_expr, PART);
                }
                self.all([&it.expr, &it.subscript_expr]);
            }
            Expr::Call(it) => {
                self.own(&it.expr);
                self.arguments(&it.args);
            }
        }
    }

    /// A list or an object.
    fn made<'a, 's: 'a>(&mut self, items: impl IntoIterator<Item = &'a Expr<'s>>, span: Span) {
        let mut is_constant = true;
        for item in items {
            is_constant &= matches!(item, Expr::Const(_));
            self.own(item);
        }
        if !is_constant {
            self.grows(span);
        }
    }

    /// Handles an operation and the chain of operations on its left side, which may be long.
    fn operation(&mut self, operation: &Spanned<BinOp<'_>>, within: Within) {
        let (mut operation, mut within) = (operation, within);
        loop {
            // A sum is no longer than its parts, which are in the source one by one.
            let is_sum = matches!(operation.op, BinOpKind::Add | BinOpKind::Concat);
            let inner = if is_sum {
                Within::Bounded
            } else {
                Within::Other
            };
            if is_sum && within == Within::Other {
                self.grows(operation.span());
            }
            if matches!(operation.op, BinOpKind::Mul) {
                self.grows(operation.span());
                // Otherwise the engine multiplies constants when it compiles.
                self.constant(&operation.left);
                self.constant(&operation.right);
            }
            match operation.op {
                BinOpKind::In => self.reads(&operation.right, WHOLE),
                BinOpKind::Eq | BinOpKind::Ne => {
                    self.compares(&operation.left, &operation.right);
                }
                BinOpKind::Lt | BinOpKind::Lte | BinOpKind::Gt | BinOpKind::Gte => {
                    self.orders(&operation.left, &operation.right);
                }
                BinOpKind::ScAnd | BinOpKind::ScOr | BinOpKind::Add | BinOpKind::Concat => {}
                BinOpKind::Sub | BinOpKind::Mul | BinOpKind::Div | BinOpKind::FloorDiv => {}
                BinOpKind::Rem | BinOpKind::Pow => {}
            }
            self.expression(&operation.right, inner);
            let Expr::BinOp(left) = &operation.left else {
                return self.expression(&operation.left, inner);
            };
            (operation, within) = (left, inner);
        }
    }

    fn constant(&mut self, expression: &Expr<'_>) {
        if let Expr::Const(constant) = expression {
            self.grows(constant.span());
        }
    }
}

/// Returns the expressions one of which has the value of this one.
fn outcomes<'e, 'a>(expression: &'e Expr<'a>) -> Vec<&'e Expr<'a>> {
    let (mut open, mut outcomes) = (vec![expression], Vec::new());
    while let Some(next) = open.pop() {
        if let Expr::IfExpr(it) = next {
            open.push(&it.true_expr);
            open.extend(&it.false_expr);
        } else if let Expr::BinOp(it) = next
            && matches!(it.op, BinOpKind::ScAnd | BinOpKind::ScOr)
        {
            open.extend([&it.left, &it.right]);
        } else {
            outcomes.push(next);
        }
    }
    outcomes
}

/// Whether a value may be large and its expression does not count it.
fn is_uncounted(outcome: &Expr<'_>) -> bool {
    match outcome {
        Expr::Var(_) | Expr::GetAttr(_) | Expr::GetItem(_) | Expr::Call(_) | Expr::Slice(_) => true,
        Expr::List(_) | Expr::Tuple(_) | Expr::Map(_) | Expr::Const(_) => false,
        Expr::Filter(_) | Expr::Test(_) | Expr::Compare(_) | Expr::UnaryOp(_) => false,
        Expr::IfExpr(_) | Expr::BinOp(_) => false,
    }
}

/// Whether a subscript is a name in the template, or an index small enough to be reached soon in a text.
fn is_near(subscript: &Expr<'_>) -> bool {
    let Expr::Const(constant) = subscript else {
        return false;
    };
    let value = &constant.value;
    value.as_str().is_some() || value.as_usize().is_some_and(|index| index < NEAR)
}

/// Returns the source range of an expression, including the object of its attributes. The parser's spans for attributes begin at
/// the dot or bracket.
fn range_of(expression: &Expr<'_>) -> Range<usize> {
    let span = expression.span();
    let (mut start, mut inner) = (span.start_offset, expression);
    loop {
        inner = match inner {
            Expr::GetAttr(it) => &it.expr,
            Expr::GetItem(it) => &it.expr,
            Expr::Slice(it) => &it.expr,
            Expr::Call(it) => &it.expr,
            Expr::Var(_) | Expr::Const(_) | Expr::List(_) | Expr::Tuple(_) | Expr::Map(_) => break,
            Expr::UnaryOp(_) | Expr::BinOp(_) | Expr::Compare(_) | Expr::IfExpr(_) => break,
            Expr::Filter(_) | Expr::Test(_) => break,
        };
        start = start.min(inner.span().start_offset);
    }
    start as usize..span.end_offset as usize
}

/// Returns the names of the namespaces whose attributes are set.
fn namespaces<'a>(target: &Expr<'a>) -> Vec<&'a str> {
    if let Expr::List(it) = target {
        return it.items.iter().flat_map(namespaces).collect();
    }
    let Expr::GetAttr(it) = target else {
        return Vec::new();
    };
    if let Expr::Var(namespace) = &it.expr {
        return vec![namespace.id];
    }
    namespaces(&it.expr)
}

/// Returns the items of a tuple without brackets, whose span does not contain its first item.
fn bare_items<'e, 'a>(expression: &'e Expr<'a>) -> Option<&'e [Expr<'a>]> {
    let Expr::Tuple(tuple) = expression else {
        return None;
    };
    let first = tuple.items.first()?;
    let is_bare = first.span().start_offset < tuple.span().start_offset;
    is_bare.then_some(&*tuple.items)
}
