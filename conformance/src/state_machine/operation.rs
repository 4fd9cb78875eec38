//! [`Sequence`]: operations on an engine, with a text form: `start; generate#0 len=3 max=5; poll#0 2; cancel#0`.

use std::fmt;
use std::str::FromStr;

/// The maximum for items of a poll, tokens of a request and milliseconds in a text. Larger values are typing errors.
const LARGEST: u64 = 1_000_000;

/// One operation. Requests are numbered in the order of their `Generate`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Operation {
    Start,
    Generate(Asked),
    /// Reads up to this number of items of a request.
    Poll {
        request: usize,
        items: u64,
    },
    Cancel {
        request: usize,
    },
    Drop {
        request: usize,
    },
    /// The abort hint of a Worker; `None` for a request that was never sent.
    Abort {
        request: Option<usize>,
    },
    Drain,
    Cleanup,
    Advance {
        millis: u64,
    },
}

/// The parameters of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Asked {
    pub(super) request: usize,
    /// At least 1, as is `max_tokens`.
    pub(super) prompt_len: u32,
    pub(super) max_tokens: u32,
    /// Varies the prompt.
    pub(super) seed: u64,
}

impl Operation {
    /// The request that it refers to.
    fn request(mut self) -> Option<usize> {
        self.request_mut().copied()
    }

    pub(super) fn request_mut(&mut self) -> Option<&mut usize> {
        match self {
            Self::Generate(asked) => Some(&mut asked.request),
            Self::Poll { request, .. }
            | Self::Cancel { request }
            | Self::Drop { request }
            | Self::Abort {
                request: Some(request),
            } => Some(request),
            Self::Start
            | Self::Abort { request: None }
            | Self::Drain
            | Self::Cleanup
            | Self::Advance { .. } => None,
        }
    }
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Start => f.write_str("start"),
            Self::Generate(asked) => {
                let Asked {
                    request,
                    prompt_len,
                    max_tokens,
                    seed,
                } = asked;
                write!(f, "generate#{request} len={prompt_len} max={max_tokens}")?;
                match seed {
                    0 => Ok(()),
                    seed => write!(f, " seed={seed}"),
                }
            }
            Self::Poll { request, items } => write!(f, "poll#{request} {items}"),
            Self::Cancel { request } => write!(f, "cancel#{request}"),
            Self::Drop { request } => write!(f, "drop#{request}"),
            Self::Abort { request: None } => f.write_str("abort"),
            Self::Abort {
                request: Some(request),
            } => write!(f, "abort#{request}"),
            Self::Drain => f.write_str("drain"),
            Self::Cleanup => f.write_str("cleanup"),
            Self::Advance { millis } => write!(f, "advance {millis}ms"),
        }
    }
}

/// Operations in order. [`FromStr`] parses the text that `Display` writes.
///
/// # Examples
/// ```
/// use genset_conformance::Sequence;
///
/// let text = "start; generate#0 len=3 max=5; poll#0 2; cancel#0; abort; drain; advance 10ms; cleanup";
/// let sequence: Sequence = text.parse()?;
/// assert_eq!(sequence.to_string(), text);
/// let error = "start; pol#0 2".parse::<Sequence>().unwrap_err();
/// assert!(error.to_string().contains("`pol#0`"));
/// # Ok::<(), genset_conformance::ParseSequenceError>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sequence {
    operations: Vec<Operation>,
}

impl Sequence {
    /// The caller has numbered the requests in order, and no operation refers to a later one.
    pub(super) fn new(operations: Vec<Operation>) -> Self {
        Self { operations }
    }

    pub(super) fn operations(&self) -> &[Operation] {
        &self.operations
    }

    /// The operations up to and including the one at `place`.
    pub(super) fn up_to(&self, place: usize) -> Self {
        Self::new(self.operations.iter().take(place + 1).copied().collect())
    }

    /// Removes the operation at `place`; for a request, also all operations on it.
    pub(super) fn without(&self, place: usize) -> Self {
        let gone = match self.operations.get(place) {
            Some(Operation::Generate(asked)) => Some(asked.request),
            Some(_) | None => None,
        };
        let mut rest = Vec::new();
        for (at, operation) in self.operations.iter().enumerate() {
            if at == place || (gone.is_some() && operation.request() == gone) {
                continue;
            }
            let mut operation = *operation;
            if let (Some(gone), Some(request)) = (gone, operation.request_mut()) {
                *request -= usize::from(*request > gone);
            }
            rest.push(operation);
        }
        Self::new(rest)
    }

    /// The number of operations.
    #[must_use]
    pub fn len(&self) -> usize {
        self.operations.len()
    }

    /// Whether there is no operation. Even then the end is tested: two cleanups, and a request after them.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.operations.is_empty()
    }
}

impl fmt::Display for Sequence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (place, operation) in self.operations.iter().enumerate() {
            if place > 0 {
                f.write_str("; ")?;
            }
            write!(f, "{operation}")?;
        }
        Ok(())
    }
}

/// Why a text is not a [`Sequence`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("operation {place}: `{token}`: {problem}")]
pub struct ParseSequenceError {
    /// The number of the operation, from 1.
    pub place: usize,
    /// The part of the text that is wrong.
    pub token: String,
    /// The problem.
    pub problem: String,
}

impl FromStr for Sequence {
    type Err = ParseSequenceError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let mut sequence = Self::new(Vec::new());
        let mut requests = 0;
        if text.trim().is_empty() {
            return Ok(sequence);
        }
        // A semicolon may also follow the last operation.
        let text = text.trim().strip_suffix(';').unwrap_or(text);
        for (place, part) in text.split(';').enumerate() {
            let parser = Parser { requests };
            let operation =
                parser
                    .operation(part)
                    .map_err(|Wrong { token, problem }| ParseSequenceError {
                        place: place + 1,
                        token,
                        problem,
                    })?;
            requests += usize::from(matches!(operation, Operation::Generate(_)));
            sequence.operations.push(operation);
        }
        Ok(sequence)
    }
}

struct Wrong {
    token: String,
    problem: String,
}

fn wrong<T>(token: &str, problem: impl Into<String>) -> Result<T, Wrong> {
    Err(Wrong {
        token: token.to_owned(),
        problem: problem.into(),
    })
}

/// Parses operations, and counts the requests so far.
struct Parser {
    requests: usize,
}

impl Parser {
    fn operation(&self, text: &str) -> Result<Operation, Wrong> {
        let mut words = text.split_whitespace();
        let head = words.next().unwrap_or_default();
        let (name, number) = match head.split_once('#') {
            Some((name, number)) => (name, Some(number)),
            None => (head, None),
        };
        let operation = match (name, number) {
            ("start", None) => Operation::Start,
            ("drain", None) => Operation::Drain,
            ("cleanup", None) => Operation::Cleanup,
            ("abort", None) => Operation::Abort { request: None },
            ("advance", None) => Operation::Advance {
                millis: millis(words.next(), head)?,
            },
            ("generate", Some(number)) => {
                let request = self.next_request(head, number)?;
                Operation::Generate(asked(request, head, &mut words)?)
            }
            ("poll", Some(number)) => Operation::Poll {
                request: self.request(head, number)?,
                items: items(words.next(), head)?,
            },
            ("cancel", Some(number)) => Operation::Cancel {
                request: self.request(head, number)?,
            },
            ("drop", Some(number)) => Operation::Drop {
                request: self.request(head, number)?,
            },
            ("abort", Some(number)) => Operation::Abort {
                request: Some(self.request(head, number)?),
            },
            ("generate" | "poll" | "cancel" | "drop", None) => {
                return wrong(head, format!("which request? as in `{name}#0`"));
            }
            ("start" | "drain" | "cleanup" | "advance", Some(_)) => {
                return wrong(head, format!("`{name}` is about the engine, not a request"));
            }
            ("", _) => return wrong(head, "there is no operation here"),
            _ => {
                let known =
                    "start, generate, poll, cancel, drop, abort, drain, cleanup and advance";
                return wrong(head, format!("the operations are {known}"));
            }
        };
        match words.next() {
            None => Ok(operation),
            Some(more) => wrong(
                more,
                format!("nothing more is expected after `{operation}`"),
            ),
        }
    }

    /// The number of a request that was sent before.
    fn request(&self, head: &str, number: &str) -> Result<usize, Wrong> {
        match number.parse() {
            Ok(request) if request < self.requests => Ok(request),
            Ok(request) => wrong(head, format!("there is no generate#{request} before it")),
            Err(_) => wrong(head, format!("`{number}` is not the number of a request")),
        }
    }

    /// The number of a new request.
    fn next_request(&self, head: &str, number: &str) -> Result<usize, Wrong> {
        let next = self.requests;
        match number.parse() {
            Ok(request) if request == next => Ok(request),
            _ => wrong(
                head,
                format!("requests are numbered in order: expected generate#{next}"),
            ),
        }
    }
}

fn asked<'a>(
    request: usize,
    head: &str,
    words: &mut impl Iterator<Item = &'a str>,
) -> Result<Asked, Wrong> {
    let (mut prompt_len, mut max_tokens, mut seed) = (None, None, 0);
    for word in words {
        match word.split_once('=') {
            Some(("len", value)) => prompt_len = Some(count(word, value)?),
            Some(("max", value)) => max_tokens = Some(count(word, value)?),
            Some(("seed", value)) => match value.parse() {
                Ok(value) => seed = value,
                Err(_) => return wrong(word, "a seed is a number of 64 bits"),
            },
            _ => return wrong(word, "generate takes len=N, max=N and seed=N"),
        }
    }
    match (prompt_len, max_tokens) {
        (Some(prompt_len), Some(max_tokens)) => Ok(Asked {
            request,
            prompt_len,
            max_tokens,
            seed,
        }),
        (None, _) => wrong(head, "len=N is missing, the prompt's length"),
        (_, None) => wrong(head, "max=N is missing, the most tokens to generate"),
    }
}

fn count(word: &str, value: &str) -> Result<u32, Wrong> {
    match value.parse::<u32>() {
        Ok(count) if count > 0 && u64::from(count) <= LARGEST => Ok(count),
        _ => wrong(word, format!("expected a number from 1 to {LARGEST}")),
    }
}

fn items(word: Option<&str>, head: &str) -> Result<u64, Wrong> {
    let Some(word) = word else {
        return wrong(head, "how many items? as in `poll#0 1`");
    };
    match word.parse() {
        Ok(items) if (1..=LARGEST).contains(&items) => Ok(items),
        _ => wrong(
            word,
            format!("expected a number of items from 1 to {LARGEST}"),
        ),
    }
}

fn millis(word: Option<&str>, head: &str) -> Result<u64, Wrong> {
    let Some(word) = word else {
        return wrong(head, "how long? as in `advance 10ms`");
    };
    match word.strip_suffix("ms").map(str::parse) {
        Some(Ok(millis)) if millis <= LARGEST => Ok(millis),
        _ => wrong(
            word,
            format!("expected milliseconds up to {LARGEST}, as in `10ms`"),
        ),
    }
}
