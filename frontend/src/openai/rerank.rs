//! `/v1/rerank`: parses requests and writes responses.

use serde::Serialize;
use serde_json::{Value, json};

use super::fields::Fields;
use super::hints::Hints;
use super::response::{json_text, prompt_usage};
use super::text_pairs::{TextList, TextPairs};
use crate::error::ApiError;
use crate::json::JsonBody;

/// A request to sort documents by their relevance to a query.
///
/// # Source
/// Jina's Reranker API, <https://api.jina.ai/redoc#tag/rerank>, and Cohere's, <https://docs.cohere.com/reference/rerank>
///
/// # Examples
/// ```
/// use genset_frontend::openai::RerankRequest;
///
/// let body = br#"{"model": "m", "query": "what is a cat?", "documents": ["a car", {"text": "an animal"}], "top_n": 1}"#;
/// let request = RerankRequest::parse(body, 1024)?;
/// assert_eq!(request.pairs.second().texts(), ["a car", "an animal"]);
/// assert_eq!(request.top_n, Some(1));
/// let error = RerankRequest::parse(body, 1).unwrap_err();
/// assert_eq!(error.param, Some("documents".into()));
/// # Ok::<(), genset_frontend::ApiError>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RerankRequest {
    /// The model's name or alias.
    pub model: String,
    /// The query with each document.
    pub pairs: TextPairs,
    /// The number of documents in the response, at least 1; `None` for all.
    pub top_n: Option<u32>,
    /// Whether the response includes the documents' texts.
    pub return_documents: bool,
    /// Its fields that have no effect here.
    pub hints: Hints,
}

impl RerankRequest {
    /// Parses a request body with at most `max_documents` documents.
    ///
    /// # Errors
    /// A 400 that names the field.
    pub fn parse<'a>(
        body: impl Into<JsonBody<'a>>,
        max_documents: usize,
    ) -> Result<Self, ApiError> {
        let mut fields = Fields::parse(body)?;
        let model = fields.model()?;
        let query = fields.string("query")?;
        let query = query.ok_or_else(|| ApiError::invalid("query", "you must provide a query"))?;
        let query = TextList::of_one("query", query)?;
        let documents = TextList::read(&mut fields, "documents", max_documents)?;
        let top_n = fields.u32("top_n")?;
        if top_n == Some(0) {
            return Err(ApiError::invalid("top_n", "must be at least 1"));
        }
        let return_documents = fields.bool("return_documents")?.unwrap_or(true);
        for cuts in ["max_tokens_per_doc", "max_chunks_per_doc"] {
            let why = "documents are scored whole; leave the field out and shorten those that are too long";
            fields.refuse(cuts, &[], why)?;
        }
        let why = "documents have only a text; leave the field out";
        fields.refuse("rank_fields", &[], why)?;
        let hints = fields.finish_request(&["user"])?;
        Ok(Self {
            model,
            pairs: TextPairs::try_new(query, documents)?,
            top_n,
            return_documents,
            hints,
        })
    }
}

/// Documents sorted by score.
#[derive(Debug, Clone, PartialEq)]
pub struct RerankedDocuments {
    /// The index in the request, and the score; best first.
    ranked: Vec<(usize, f32)>,
    /// The texts, if the response includes them.
    texts: Option<TextList>,
    prompt_tokens: u32,
}

impl RerankedDocuments {
    /// Sorts documents by `scores`, one per document. The sort is stable.
    #[must_use]
    pub fn of(request: &RerankRequest, scores: &[f32], prompt_tokens: u32) -> Self {
        let mut ranked: Vec<(usize, f32)> = scores.iter().copied().enumerate().collect();
        ranked.sort_by(|(_, one), (_, other)| other.total_cmp(one));
        if let Some(most) = request.top_n {
            ranked.truncate(usize::try_from(most).unwrap_or(usize::MAX));
        }
        let texts = request
            .return_documents
            .then(|| request.pairs.second().clone());
        Self {
            ranked,
            texts,
            prompt_tokens,
        }
    }

    /// An upper bound on the bytes of [`Self::json`].
    #[must_use]
    pub fn json_bytes(&self) -> usize {
        /// For a result without its text.
        const A_RESULT: usize = 96;
        /// For the rest without the model's name.
        const AROUND: usize = 512;
        let text = |&(index, _): &(usize, f32)| self.text(index).map_or(0, escaped_bytes);
        AROUND
            + (self.ranked.iter())
                .map(|result| A_RESULT + text(result))
                .sum::<usize>()
    }

    fn text(&self, index: usize) -> Option<&str> {
        self.texts.as_ref()?.texts().get(index).map(String::as_str)
    }

    /// The response's body.
    #[must_use]
    pub fn json(&self, id: &str, model: &str) -> String {
        let result = |&(index, relevance_score): &(usize, f32)| RankedResult {
            index,
            relevance_score,
            document: self.text(index).map(|text| RankedText { text }),
        };
        let body = RerankBody {
            id,
            object: "list",
            model,
            results: self.ranked.iter().map(result).collect(),
            usage: prompt_usage(self.prompt_tokens),
            meta: json!({"tokens": {"input_tokens": self.prompt_tokens}}),
        };
        json_text(&body)
    }
}

/// The length of a text as JSON.
fn escaped_bytes(text: &str) -> usize {
    let byte = |byte: u8| match byte {
        b'"' | b'\\' => 2,
        0..=0x1f => 6,
        _ => 1,
    };
    text.bytes().map(byte).sum()
}

/// Jina's format, with Cohere's `id` and `meta`.
#[derive(Serialize)]
struct RerankBody<'a> {
    id: &'a str,
    object: &'static str,
    model: &'a str,
    results: Vec<RankedResult<'a>>,
    usage: Value,
    meta: Value,
}

#[derive(Serialize)]
struct RankedResult<'a> {
    index: usize,
    relevance_score: f32,
    #[serde(skip_serializing_if = "Option::is_none")]
    document: Option<RankedText<'a>>,
}

#[derive(Serialize)]
struct RankedText<'a> {
    text: &'a str,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(further: &str) -> RerankRequest {
        let body = format!(
            r#"{{"model": "m", "query": "q", "documents": ["a\u0001\"", "b", "c", "d"]{further}}}"#
        );
        RerankRequest::parse(body.as_bytes(), 8).unwrap()
    }

    fn order(further: &str, scores: &[f32]) -> Vec<usize> {
        let ranked = RerankedDocuments::of(&request(further), scores, 1).ranked;
        ranked.into_iter().map(|(index, _)| index).collect()
    }

    #[test]
    fn the_best_come_first_and_of_equal_ones_the_earlier() {
        let scores = [0.25, 0.5, 0.25, -3.0];
        assert_eq!(order("", &scores), [1, 0, 2, 3]);
        assert_eq!(order(r#", "top_n": 2"#, &scores), [1, 0]);
        assert_eq!(order(r#", "top_n": 9"#, &scores), [1, 0, 2, 3]);
    }

    #[test]
    fn texts_are_there_unless_they_are_not_wanted_and_their_bytes_foretold() {
        let scores = [f32::MIN, f32::MAX, f32::MIN_POSITIVE, -1.234_567_9e-30];
        for (further, has_texts) in [("", true), (r#", "return_documents": false"#, false)] {
            let ranked = RerankedDocuments::of(&request(further), &scores, u32::MAX);
            let json = ranked.json("rerank-0123456789abcdef0123456789abcdef", "m");
            assert!(json.len() <= ranked.json_bytes(), "{json}");
            assert_eq!(
                json.contains(r#""document":{"text":"b"}"#),
                has_texts,
                "{json}"
            );
        }
    }
}
