//! Which web pages may send requests, and for which host names: [`Origin`] and [`AllowedHost`], compared with what browsers
//! send.

use std::str::FromStr;

use http::HeaderValue;

/// Matches everything.
const ANY: &str = "*";

/// An origin of web pages: a scheme, a host and perhaps a port, as in `https://app.example.com`; `*` for any.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Origin(HeaderValue);

impl FromStr for Origin {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        // A path or a trailing slash would never match what browsers send.
        let is_origin = text.split_once("://").is_some_and(|(scheme, host)| {
            // Browser extensions have schemes of their own.
            let is_scheme = |byte: u8| byte.is_ascii_lowercase() || byte == b'-';
            !scheme.is_empty()
                && scheme.bytes().all(is_scheme)
                && !host.is_empty()
                && !host.contains('/')
        });
        let value = HeaderValue::from_str(text).ok();
        let value = value.filter(|_| is_origin || text == ANY);
        value.map(Self).ok_or_else(|| {
            format!(
                "{text:?} is no origin; expected a scheme, a host and perhaps a port, as in https://app.example.com, or *"
            )
        })
    }
}

impl Origin {
    pub(crate) fn is_any(&self) -> bool {
        self.0 == ANY
    }

    /// As a browser sends it.
    pub(crate) fn header(&self) -> &HeaderValue {
        &self.0
    }
}

/// A host name that the server answers to, without a port, in lower case; `*` for any.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AllowedHost(String);

impl FromStr for AllowedHost {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let is_part = |byte: u8| byte.is_ascii_alphanumeric() || b"-._".contains(&byte);
        let host = text.strip_suffix('.').unwrap_or(text);
        if host == ANY || (!host.is_empty() && host.bytes().all(is_part)) {
            return Ok(Self(host.to_ascii_lowercase()));
        }
        Err(format!(
            "{host:?} is no name of a host; expected one without scheme and port, as in gpu.example.com, or *"
        ))
    }
}

impl AllowedHost {
    pub(crate) fn is_any(&self) -> bool {
        self.0 == ANY
    }

    /// Whether it matches `host`, which is in lower case.
    pub(crate) fn allows(&self, host: &str) -> bool {
        self.is_any() || self.0 == host
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_origins_are_taken() {
        for good in [
            "*",
            "https://a.example",
            "http://localhost:3000",
            "chrome-extension://abcdef",
        ] {
            good.parse::<Origin>().unwrap();
        }
        for bad in [
            "",
            "a.example",
            "https://",
            "://a.example",
            "https://a.example/",
            "https://a/b",
            "https://a\n",
        ] {
            assert!(bad.parse::<Origin>().is_err(), "{bad}");
        }
    }

    #[test]
    fn names_of_hosts_are_taken_as_they_are_compared() {
        for (good, expected) in [
            ("*", "*"),
            ("gpu-1", "gpu-1"),
            ("GPU.Example.com.", "gpu.example.com"),
        ] {
            assert_eq!(good.parse(), Ok(AllowedHost(expected.to_owned())), "{good}");
        }
        for bad in ["", ".", "a.example:80", "https://a.example", "a/b", "a b"] {
            assert!(bad.parse::<AllowedHost>().is_err(), "{bad}");
        }
    }
}
