//! The names that the `Host` header of a request to a loopback port may have. A browser sends the name that it looked up, which
//! exposes a web page whose own name was made to resolve to this machine (DNS rebinding). Used by the ports that serve
//! HTTP.

use axum::http::header::{HOST, HeaderMap};
use axum::http::uri::Authority;
use axum::http::{HeaderValue, Uri};

/// The first name in a request's `Host` headers and target that `is_known` does not accept. Addresses and this machine's own
/// names are always accepted. `None` if all names are accepted, or there is none: every browser sends one.
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

/// A host in the form for comparison: lower case, without the trailing dot of a full name.
fn normal(host: &str) -> String {
    let host = host.strip_suffix('.').unwrap_or(host);
    host.to_ascii_lowercase()
}

/// Whether it is an address, or a name that always means this machine.
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
