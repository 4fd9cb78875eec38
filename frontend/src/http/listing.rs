//! Lists that clients read page by page: [`Page`] is the part that the query asks for, of items ordered by id.

use serde_json::{Value, json};

use crate::error::ApiError;

/// The query parameters of a list.
#[derive(Debug, Clone, Copy)]
pub(super) struct Pages {
    pub(super) usual_limit: usize,
    pub(super) max_limit: usize,
    /// The parameters other than `after` and `limit`.
    pub(super) further: &'static [&'static str],
}

/// The part of a list that a query asks for.
#[derive(Debug)]
pub(super) struct Page {
    pub(super) after: Option<String>,
    pub(super) limit: usize,
    pub(super) is_ascending: bool,
    pub(super) purpose: Option<String>,
}

impl Pages {
    /// Reads a query.
    ///
    /// # Errors
    /// A 400 that names the parameter.
    pub(super) fn parse(self, query: Option<&str>) -> Result<Page, ApiError> {
        let mut page = Page {
            after: None,
            limit: self.usual_limit,
            is_ascending: false,
            purpose: None,
        };
        let query = query.unwrap_or_default();
        for pair in query.split('&').filter(|pair| !pair.is_empty()) {
            let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
            match name {
                "after" => page.after = Some(value.to_owned()),
                "limit" => {
                    let limit = value.parse().ok();
                    let limit = limit.filter(|limit| (1..=self.max_limit).contains(limit));
                    let problem = format!("must be between 1 and {}", self.max_limit);
                    page.limit = limit.ok_or_else(|| ApiError::invalid("limit", problem))?;
                }
                "order" if self.further.contains(&"order") => {
                    page.is_ascending = match value {
                        "asc" => true,
                        "desc" => false,
                        _ => {
                            let problem = "expected \"asc\" or \"desc\"";
                            return Err(ApiError::invalid("order", problem));
                        }
                    };
                }
                "purpose" if self.further.contains(&"purpose") => {
                    page.purpose = Some(value.to_owned());
                }
                name if is_include(name) && self.further.contains(&"include") => {}
                other => return Err(ApiError::invalid(other, "there is no such parameter")),
            }
        }
        Ok(page)
    }
}

/// Whether this is the name of the list of fields to include, as clients write it.
pub(super) fn is_include(name: &str) -> bool {
    matches!(
        name,
        "include" | "include[]" | "include%5B%5D" | "include%5b%5d"
    )
}

impl Page {
    /// Returns this page of `all`, which is ordered by id: the last item first, unless the query asks for ascending order.
    pub(super) fn of<T>(
        &self,
        all: &[T],
        id: impl Fn(&T) -> &str,
        to_json: impl Fn(&T) -> Value,
    ) -> Value {
        let is_behind = |item: &&T| match (&self.after, self.is_ascending) {
            (None, _) => true,
            (Some(after), true) => id(item) > after.as_str(),
            (Some(after), false) => id(item) < after.as_str(),
        };
        let mut page: Vec<&T> = all.iter().filter(is_behind).collect();
        if !self.is_ascending {
            page.reverse();
        }
        let has_more = page.len() > self.limit;
        page.truncate(self.limit);
        json!({
            "object": "list",
            "data": page.iter().map(|item| to_json(item)).collect::<Vec<_>>(),
            "first_id": page.first().map(|item| id(item)),
            "last_id": page.last().map(|item| id(item)),
            "has_more": has_more,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGES: Pages = Pages {
        usual_limit: 2,
        max_limit: 3,
        further: &["order"],
    };

    fn page(query: &str) -> (Value, bool) {
        let page = PAGES.parse(Some(query)).unwrap();
        let ids = ["a", "b", "c"];
        let list = page.of(&ids, |id| id, |id| json!(id));
        (list["data"].clone(), list["has_more"] == true)
    }

    #[test]
    fn pages_follow_each_other() {
        assert_eq!(page(""), (json!(["c", "b"]), true));
        assert_eq!(page("after=b"), (json!(["a"]), false));
        assert_eq!(page("order=asc&limit=3"), (json!(["a", "b", "c"]), false));
        // The item named by `after` may be gone by now.
        assert_eq!(page("after=bb&order=asc"), (json!(["c"]), false));
    }

    #[test]
    fn what_is_no_parameter_is_refused_by_name() {
        for (query, name) in [
            ("limit=0", "limit"),
            ("limit=4", "limit"),
            ("order=up", "order"),
            ("purpose=x", "purpose"),
        ] {
            let error = PAGES.parse(Some(query)).unwrap_err();
            assert_eq!(error.param, Some(name.into()), "{query}");
        }
    }
}
