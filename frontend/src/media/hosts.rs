//! [`HostPattern`]: the hosts that images may be fetched from.

use std::str::FromStr;

/// A host that images may be fetched from: `example.org`, its subdomains as `*.example.org`, or a non-default port as
/// `example.org:8443`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostPattern {
    /// In lower case, without `*.`.
    name: String,
    is_below: bool,
    port: Option<u16>,
}

impl FromStr for HostPattern {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let bad = || {
            format!("{text:?} is no host: expected example.org, *.example.org or example.org:8443")
        };
        let (host, port) = match text.rsplit_once(':') {
            Some((host, port)) => (host, Some(port.parse().map_err(|_| bad())?)),
            None => (text, None),
        };
        let (is_below, name) = match host.strip_prefix("*.") {
            Some(name) => (true, name),
            None => (false, host),
        };
        let is_name = |name: &str| {
            let mut letters = name.bytes();
            letters.all(|letter| letter.is_ascii_alphanumeric() || matches!(letter, b'-' | b'.'))
        };
        if name.is_empty() || name.starts_with('.') || !is_name(name) {
            return Err(bad());
        }
        Ok(Self {
            name: name.to_ascii_lowercase(),
            is_below,
            port,
        })
    }
}

impl HostPattern {
    /// Whether it matches this host and port.
    pub(super) fn allows(&self, host: &str, port: u16, is_tls: bool) -> bool {
        let usual = if is_tls { 443 } else { 80 };
        let host = host.to_ascii_lowercase();
        let is_host = match self.is_below {
            false => host == self.name,
            true => host
                .strip_suffix(&self.name)
                .is_some_and(|below| below.len() > 1 && below.ends_with('.')),
        };
        is_host && port == self.port.unwrap_or(usual)
    }
}
