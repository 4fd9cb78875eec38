//! Which names a request for a port on loopback may have in its `Host` header. A browser sends the name that it looked up, so a
//! web page whose own name was made to mean this machine (DNS rebinding) gives itself away. Used by the ports that answer
//! over HTTP.

use axum::http::header::{HOST, HeaderMap};
use axum::http::uri::Authority;
use axum::http::{HeaderValue, Uri};

/// The first name that a request is for and that `is_known` does not know, of its `Host` headers and its target; addresses and
/// this machine's own names are always known. `None` where all are known, or none is given: every browser gives one.
///
/// # Source
/// The names are those of [RFC 6761, section 6.3](https://www.rfc-editor.org/rfc/rfc6761#section-6.3).
#[must_use]
pub fn unknown_host(
    headers: &HeaderMap,
    target: &Uri,
    is_known: impl Fn(&str) -> bool,
) -> Option<String> {
    let given = headers.get_all(HOST).iter().map(HeaderValue::as_bytes);
    let given = given.chain(target.authority().map(|name| name.as_str().as_bytes()));
    for name in given {
        let Ok(authority) = Authority::try_from(name) else {
            return Some(String::from_utf8_lossy(name).into_owned());
        };
        let host = normal(authority.host());
        if !is_own(&host) && !is_known(&host) {
            return Some(host);
        }
    }
    None
}

/// A host as it is compared: lower case, without the dot of a full name at the end.
fn normal(host: &str) -> String {
    let host = host.strip_suffix('.').unwrap_or(host);
    host.to_ascii_lowercase()
}

/// An address, or a name that always means this machine.
fn is_own(host: &str) -> bool {
    let inside = host
        .strip_prefix('[')
        .and_then(|host| host.strip_suffix(']'));
    inside.unwrap_or(host).parse::<std::net::IpAddr>().is_ok()
        || host == "localhost"
        || host.ends_with(".localhost")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn unknown(hosts: &[&str], target: &str) -> Option<String> {
        let mut headers = HeaderMap::new();
        for host in hosts {
            headers.append(HOST, HeaderValue::from_bytes(host.as_bytes()).unwrap());
        }
        let target = target.parse().unwrap();
        unknown_host(&headers, &target, |host| host == "gpu.example")
    }

    #[test]
    fn addresses_and_own_names_are_known() {
        for host in [
            "localhost",
            "LOCALHOST:8080",
            "localhost.:8080",
            "a.localhost:1",
            "127.0.0.1",
            "127.0.0.1:8080",
            "192.0.2.7:80",
            "[::1]:8080",
            "[::1]",
            "gpu.example:8080",
            "GPU.example.",
        ] {
            assert_eq!(unknown(&[host], "/live"), None, "{host}");
        }
        assert_eq!(unknown(&[], "/live"), None);
        assert_eq!(unknown(&["localhost"], "http://127.0.0.1:8080/live"), None);
    }

    #[test]
    fn other_names_are_not_wherever_they_stand() {
        for host in [
            "evil.example",
            "evil.example:8080",
            "localhost.evil.example",
            "evillocalhost",
            "127.0.0.1.evil.example",
            "localhost@evil.example",
            "",
            "a b",
            "\u{e9}",
        ] {
            assert!(unknown(&[host], "/live").is_some(), "{host:?}");
        }
        let second = unknown(&["localhost", "evil.example"], "/live");
        assert_eq!(second.as_deref(), Some("evil.example"));
        assert!(unknown(&["localhost"], "http://evil.example/live").is_some());
    }
}
