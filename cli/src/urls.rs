//! What may be shown of a URL: no name and no password. Whoever tells of a server that was named by its URL calls it, for people
//! and for reports.

use reqwest::Url;

/// `text`, which is a URL or a host of HTTP, without a name and a password.
pub(crate) fn without_password(text: &str) -> String {
    let parsed = match text.contains("://") {
        true => Url::parse(text),
        false => Url::parse(&format!("http://{text}")),
    };
    match parsed {
        Ok(url) if url.username().is_empty() && url.password().is_none() => text.to_owned(),
        Ok(mut url) => {
            // URLs of HTTP have a host, and those are never refused.
            let _ = url.set_username("");
            let _ = url.set_password(None);
            url.as_str().trim_end_matches('/').to_owned()
        }
        // What is no URL has no password that could be told from the rest.
        Err(_) => text.rsplit('@').next().unwrap_or_default().to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_and_a_password_are_left_out_and_nothing_else() {
        for (text, expected) in [
            ("http://host:8000/v1", "http://host:8000/v1"),
            ("HOST:8000", "HOST:8000"),
            ("http://user:secret@host:8000/v1/", "http://host:8000/v1"),
            ("https://secret@host", "https://host"),
            ("user:secret@host:8000", "http://host:8000"),
            ("http://user:se/cret@host:8000", "host:8000"),
            ("user:secret@host:port", "host:port"),
        ] {
            assert_eq!(without_password(text), expected, "{text}");
        }
    }
}
