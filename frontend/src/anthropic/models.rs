//! Models in Anthropic's format: one, and the page of the list that a query asks for. Routes call both.
//!
//! # Source
//! <https://docs.anthropic.com/en/api/models-list>

use jiff::Timestamp;
use percent_encoding::percent_decode_str;
use serde_json::{Value, json};

use crate::error::ApiError;

/// How many models a page has unless the query says.
const USUAL_LIMIT: usize = 20;

const MAX_LIMIT: usize = 1000;

/// A model with this name, which was `created` so many seconds after 1970. Every served model is active.
pub(crate) fn model_json(name: &str, created: u64, context_length_tokens: u32) -> Value {
    let created = i64::try_from(created).ok();
    let created = created.and_then(|created| Timestamp::from_second(created).ok());
    json!({
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": created.unwrap_or_default().to_string(),
        "lifecycle": "active",
        "max_input_tokens": context_length_tokens,
    })
}

/// The part of the list that a query asks for.
#[derive(Debug)]
pub(crate) struct ModelPage {
    after: Option<String>,
    before: Option<String>,
    limit: usize,
    has_active: bool,
}

impl ModelPage {
    /// Reads a query.
    ///
    /// # Errors
    /// A 400 that names the parameter.
    pub(crate) fn parse(query: Option<&str>) -> Result<Self, ApiError> {
        let (mut after, mut before) = (None, None);
        let mut limit = USUAL_LIMIT;
        let mut has_active = None;
        let query = query.unwrap_or_default();
        for pair in query.split('&').filter(|pair| !pair.is_empty()) {
            let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
            let value = value.replace('+', " ");
            let value = percent_decode_str(&value).decode_utf8();
            let value = value.map_err(|_| ApiError::invalid(name, "expected UTF-8"))?;
            match name {
                "after_id" => after = Some(value.into_owned()),
                "before_id" => before = Some(value.into_owned()),
                "limit" => {
                    let given = value.parse().ok();
                    let given = given.filter(|limit| (1..=MAX_LIMIT).contains(limit));
                    let problem = format!("must be between 1 and {MAX_LIMIT}");
                    limit = given.ok_or_else(|| ApiError::invalid("limit", problem))?;
                }
                // A list, as clients write it.
                "lifecycle" | "lifecycle[]" | "lifecycle%5B%5D" | "lifecycle%5b%5d" => {
                    let is_active = match &*value {
                        "active" => true,
                        "deprecated" | "retired" => false,
                        _ => {
                            let problem = "expected \"active\", \"deprecated\" or \"retired\"";
                            return Err(ApiError::invalid("lifecycle", problem));
                        }
                    };
                    has_active = Some(is_active || has_active == Some(true));
                }
                // Clients mark their beta routes with it.
                "beta" => {}
                other => return Err(ApiError::invalid(other, "there is no such parameter")),
            }
        }
        if after.is_some() && before.is_some() {
            let problem = "a page is after one model or before another, not both";
            return Err(ApiError::invalid("before_id", problem));
        }
        Ok(Self {
            after,
            before,
            limit,
            has_active: has_active.unwrap_or(true),
        })
    }

    /// Returns this page of `all`, which is ordered by id.
    pub(crate) fn of<T>(
        &self,
        all: &[T],
        id: impl Fn(&T) -> &str,
        to_json: impl Fn(&T) -> Value,
    ) -> Value {
        let is_inside = |item: &&T| {
            let id = id(item);
            self.has_active
                && self.after.as_deref().is_none_or(|after| id > after)
                && self.before.as_deref().is_none_or(|before| id < before)
        };
        let mut page: Vec<&T> = all.iter().filter(is_inside).collect();
        let others = page.len().saturating_sub(self.limit);
        if self.before.is_some() {
            page.drain(..others);
        } else {
            page.truncate(self.limit);
        }
        json!({
            "data": page.iter().map(|item| to_json(item)).collect::<Vec<_>>(),
            "first_id": page.first().map(|item| id(item)),
            "last_id": page.last().map(|item| id(item)),
            "has_more": others > 0,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn page(query: &str) -> (Value, bool) {
        let page = ModelPage::parse(Some(query)).unwrap();
        let list = page.of(&["a/b", "c d", "e", "f"], |id| id, |id| json!(id));
        assert_eq!(list["first_id"], list["data"][0]);
        (list["data"].clone(), list["has_more"] == true)
    }

    #[test]
    fn pages_follow_each_other_in_both_directions() {
        assert_eq!(page(""), (json!(["a/b", "c d", "e", "f"]), false));
        assert_eq!(page("limit=2&beta=true"), (json!(["a/b", "c d"]), true));
        assert_eq!(page("limit=2&after_id=c+d"), (json!(["e", "f"]), false));
        assert_eq!(page("limit=2&before_id=f"), (json!(["c d", "e"]), true));
        assert_eq!(page("limit=2&before_id=c%20d"), (json!(["a/b"]), false));
        assert_eq!(
            page("limit=2&before_id=c%d"),
            (json!(["a/b", "c d"]), false)
        );
        // The model named by the cursor may be gone by now.
        assert_eq!(page("after_id=ee"), (json!(["f"]), false));
        assert_eq!(page("limit=1&after_id=a%2Fb"), (json!(["c d"]), true));
        assert_eq!(page("after_id=f"), (json!([]), false));
    }

    #[test]
    fn served_models_are_active() {
        let all = (json!(["a/b", "c d", "e", "f"]), false);
        assert_eq!(page("lifecycle=active"), all);
        assert_eq!(page("lifecycle[]=active&lifecycle[]=retired"), all);
        assert_eq!(page("lifecycle%5B%5D=deprecated"), (json!([]), false));
    }

    #[test]
    fn what_is_no_parameter_is_refused_by_name() {
        for (query, name) in [
            ("limit=0", "limit"),
            ("limit=1001", "limit"),
            ("lifecycle=old", "lifecycle"),
            ("after_id=%ff", "after_id"),
            ("after_id=a&before_id=b", "before_id"),
            ("after=a", "after"),
        ] {
            let error = ModelPage::parse(Some(query)).unwrap_err();
            assert_eq!(error.param, Some(name.into()), "{query}");
        }
    }

    #[test]
    fn times_are_in_utc() {
        for (created, expected) in [
            (0, "1970-01-01T00:00:00Z"),
            (1_735_689_599, "2024-12-31T23:59:59Z"),
            (u64::MAX, "1970-01-01T00:00:00Z"),
        ] {
            assert_eq!(model_json("m", created, 1)["created_at"], expected);
        }
    }
}
