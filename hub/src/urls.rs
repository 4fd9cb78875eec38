//! [`without_password`]: hides names and passwords in URLs. Code that shows the URL of a server, to people or in reports, calls
//! this first; the command line does, too.

use reqwest::Url;

/// `text`, a URL or a host of HTTP, without name and password.
#[must_use]
pub fn without_password(text: &str) -> String {
    let parsed = match text.contains("://") {
        true => Url::parse(text),
        false => Url::parse(&format!("http://{text}")),
    };
    match parsed {
        Ok(url) if url.username().is_empty() && url.password().is_none() => text.to_owned(),
        Ok(mut url) => {
            // URLs of HTTP have a host, so these calls never fail.
            let _ = url.set_username("");
            let _ = url.set_password(None);
            url.as_str().trim_end_matches('/').to_owned()
        }
        // In text that is not a URL, a password cannot be told from the rest.
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
