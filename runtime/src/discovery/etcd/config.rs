//! [`EtcdConfig`]: the address of etcd, our credentials, and time limits.

use std::fmt;
use std::time::Duration;

use axum::http::Uri;
use genset_backend_common::EngineError;

use crate::tls_identity::TlsIdentity;

/// The port of an endpoint without one.
const DEFAULT_PORT: u16 = 2379;

/// Shorter leases expire whenever a server stalls; etcd itself counts in whole seconds.
const MIN_LEASE_TTL: Duration = Duration::from_secs(1);

/// Longer leases would keep dead instances listed for too long.
const MAX_LEASE_TTL: Duration = Duration::from_secs(3600);

/// How to reach etcd. Checked as a whole by [`EtcdDiscovery::connect`](super::EtcdDiscovery::connect).
///
/// # Examples
/// ```
/// use std::time::Duration;
/// use genset_runtime::discovery::EtcdConfig;
///
/// let config = EtcdConfig {
///     endpoints: vec!["etcd-0:2379".into(), "etcd-1:2379".into()],
///     lease_ttl: Duration::from_secs(5),
///     ..EtcdConfig::default()
/// };
/// config.validate().unwrap();
/// ```
#[derive(Debug, Clone)]
pub struct EtcdConfig {
    /// The servers, one or more, each as `scheme://host:port`. The scheme is `http` or `https`, by default `http`; the default
    /// port is 2379. The first is used until it fails, then the next.
    pub endpoints: Vec<String>,
    /// The user, if etcd requires one. Used as soon as it does.
    pub credentials: Option<EtcdCredentials>,
    /// The certificates for `https` endpoints; if set, every endpoint is `https`.
    pub tls: Option<EtcdTls>,
    /// How long a lease lives without a keep-alive: a whole number of seconds from 1 to 3600. A dead process stays listed for
    /// this long. Keep-alives are sent every third of it. Servers may grant more; their usual minimum is 2 s.
    pub lease_ttl: Duration,
    /// Time limit for making a connection, TLS included.
    pub connect_timeout: Duration,
    /// Time limit for each operation, including every endpoint it tries and any connections it makes.
    pub request_timeout: Duration,
    /// The largest entry, key and value together, in bytes. Servers have their own limit, 1.5 MiB unless `--max-request-bytes`
    /// changes it.
    pub max_entry_bytes: usize,
}

/// A user of etcd. `Debug` omits the password.
#[derive(Clone, PartialEq, Eq)]
pub struct EtcdCredentials {
    /// The name.
    pub user: String,
    /// The password.
    pub password: String,
}

/// Certificates for `https`. `Debug` omits the private key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EtcdTls {
    /// Certificates of the authorities that may sign the servers' certificates: PEM content, not a path. The system's own
    /// certificates are not used.
    pub ca_pem: String,
    /// Our own certificate, if the servers require one.
    pub identity: Option<TlsIdentity>,
    /// The name that the servers' certificates must have; `None` for the endpoint's host.
    pub server_name: Option<String>,
}

impl Default for EtcdConfig {
    fn default() -> Self {
        Self {
            endpoints: vec![format!("http://127.0.0.1:{DEFAULT_PORT}")],
            credentials: None,
            tls: None,
            lease_ttl: Duration::from_secs(10),
            connect_timeout: Duration::from_secs(2),
            request_timeout: Duration::from_secs(5),
            max_entry_bytes: 1536 << 10,
        }
    }
}

impl EtcdConfig {
    /// Checks every field that can be checked without a server.
    ///
    /// # Errors
    /// `InvalidArgument`, naming the field and the values it allows.
    pub fn validate(&self) -> Result<(), EngineError> {
        self.checked_endpoints()?;
        self.check_durations()?;
        if let Some(tls) = &self.tls {
            tls.check()?;
        }
        match &self.credentials {
            Some(EtcdCredentials { user, .. }) if user.is_empty() => Err(invalid(
                "credentials.user",
                "must not be empty; leave credentials out where etcd asks for none",
            )),
            _ => Ok(()),
        }
    }

    /// The endpoints with scheme and port.
    pub(super) fn checked_endpoints(&self) -> Result<Vec<String>, EngineError> {
        if self.endpoints.is_empty() {
            return Err(invalid(
                "endpoints",
                "name at least one, as http://host:2379",
            ));
        }
        self.endpoints
            .iter()
            .map(|endpoint| self.checked_endpoint(endpoint))
            .collect()
    }

    fn checked_endpoint(&self, endpoint: &str) -> Result<String, EngineError> {
        // The text may hold a password, so the error does not repeat it.
        if endpoint.contains('@') {
            return Err(invalid(
                "endpoints",
                "must not hold a user or password; use credentials",
            ));
        }
        let with_scheme = if endpoint.contains("://") {
            endpoint.to_owned()
        } else {
            format!("http://{endpoint}")
        };
        let problem = |text: &str| invalid("endpoints", format!("{text}, got {endpoint:?}"));
        let uri: Uri = with_scheme
            .parse()
            .map_err(|_| problem("must each be scheme://host:port"))?;
        let scheme = uri.scheme_str().unwrap_or_default();
        let host = uri.host().unwrap_or_default();
        if host.is_empty() || !matches!(uri.path(), "" | "/") || uri.query().is_some() {
            return Err(problem("must each be scheme://host:port and no more"));
        }
        match (scheme, self.tls.is_some()) {
            ("http", false) | ("https", true) => {}
            ("https", false) => {
                return Err(invalid(
                    "tls.ca_pem",
                    format!("must be given for an https endpoint, got {endpoint:?}"),
                ));
            }
            ("http", true) => {
                return Err(problem("must each be https when tls is given"));
            }
            _ => return Err(problem("must each begin with http:// or https://")),
        }
        let authority = uri.authority().map_or("", |authority| authority.as_str());
        let port = match authority.strip_prefix(host).unwrap_or_default() {
            "" => DEFAULT_PORT,
            text => text
                .trim_start_matches(':')
                .parse()
                .map_err(|_| problem("must each have a port from 0 to 65535"))?,
        };
        Ok(format!("{scheme}://{host}:{port}"))
    }

    fn check_durations(&self) -> Result<(), EngineError> {
        let is_whole = self.lease_ttl.subsec_nanos() == 0;
        if !is_whole || !(MIN_LEASE_TTL..=MAX_LEASE_TTL).contains(&self.lease_ttl) {
            return Err(invalid(
                "lease_ttl",
                format!(
                    "must be a whole number of seconds from {} to {}, got {:?}",
                    MIN_LEASE_TTL.as_secs(),
                    MAX_LEASE_TTL.as_secs(),
                    self.lease_ttl
                ),
            ));
        }
        for (field, value) in [
            ("connect_timeout", self.connect_timeout),
            ("request_timeout", self.request_timeout),
        ] {
            if value.is_zero() {
                return Err(invalid(field, "must be more than 0"));
            }
        }
        Ok(())
    }
}

impl EtcdTls {
    /// Tells PEM from a path or an empty text. Loading it shows whether the PEM is valid.
    fn check(&self) -> Result<(), EngineError> {
        const CERTIFICATE: &str = "-----BEGIN CERTIFICATE-----";
        let has = |field: &str, text: &str, what: &str| {
            if text.contains(what) {
                Ok(())
            } else {
                let problem = format!(
                    "must be PEM (the content of the file, not its path) with a line {what:?}"
                );
                Err(invalid(field, problem))
            }
        };
        has("tls.ca_pem", &self.ca_pem, CERTIFICATE)?;
        if let Some(identity) = &self.identity {
            has(
                "tls.identity.certificate_pem",
                &identity.certificate_pem,
                CERTIFICATE,
            )?;
            has(
                "tls.identity.key_pem",
                &identity.key_pem,
                "PRIVATE KEY-----",
            )?;
        }
        Ok(())
    }
}

/// An error that names a field of the config.
pub(super) fn invalid(field: &str, problem: impl fmt::Display) -> EngineError {
    EngineError::invalid_argument(format!("etcd.{field}"), problem)
}

genset_backend_common::debug_as!(|it| EtcdCredentials { user: it.user, .. });

#[cfg(test)]
mod tests {
    use super::*;

    fn endpoints(endpoints: &[&str]) -> EtcdConfig {
        EtcdConfig {
            endpoints: endpoints.iter().map(|&text| text.to_owned()).collect(),
            ..EtcdConfig::default()
        }
    }

    fn with_tls(config: EtcdConfig) -> EtcdConfig {
        let tls = EtcdTls {
            ca_pem: "-----BEGIN CERTIFICATE-----".into(),
            identity: None,
            server_name: None,
        };
        EtcdConfig {
            tls: Some(tls),
            ..config
        }
    }

    #[test]
    fn a_missing_scheme_or_port_gets_its_default() {
        let config = endpoints(&["a", "b:1", "http://c/", "http://[::1]:5"]);
        assert_eq!(
            config.checked_endpoints().unwrap(),
            [
                "http://a:2379",
                "http://b:1",
                "http://c:2379",
                "http://[::1]:5"
            ]
        );
        let config = with_tls(endpoints(&["https://d"]));
        assert_eq!(config.checked_endpoints().unwrap(), ["https://d:2379"]);
    }

    #[test]
    fn what_is_wrong_is_named_with_its_field() {
        const NONE: Duration = Duration::ZERO;
        let with = |change: fn(&mut EtcdConfig)| {
            let mut config = EtcdConfig::default();
            change(&mut config);
            config
        };
        let nameless = |config: &mut EtcdConfig| {
            let (user, password) = (String::new(), "p".into());
            config.credentials = Some(EtcdCredentials { user, password });
        };
        let cases = [
            (endpoints(&[]), "endpoints"),
            (endpoints(&[""]), "endpoints"),
            (endpoints(&["ftp://a"]), "endpoints"),
            (endpoints(&["http://a/path"]), "endpoints"),
            (endpoints(&["http://a:70000"]), "endpoints"),
            (endpoints(&["http://a:"]), "endpoints"),
            (endpoints(&["https://a"]), "tls.ca_pem"),
            (with_tls(endpoints(&["http://a"])), "endpoints"),
            (with(|it| it.lease_ttl = NONE), "lease_ttl"),
            (with(|it| it.lease_ttl /= 4), "lease_ttl"),
            (with(|it| it.lease_ttl *= 361), "lease_ttl"),
            (with(|it| it.connect_timeout = NONE), "connect_timeout"),
            (with(|it| it.request_timeout = NONE), "request_timeout"),
            (with(nameless), "credentials.user"),
        ];
        for (config, field) in cases {
            let error = config.validate().unwrap_err();
            let at = error.at().map(|at| at.name().to_owned());
            assert_eq!(at, Some(format!("etcd.{field}")), "{config:?}");
        }
    }

    #[test]
    fn secrets_are_in_no_debug_and_no_error() {
        let config = EtcdConfig {
            credentials: Some(EtcdCredentials {
                user: "ann".into(),
                password: "hunter2".into(),
            }),
            tls: Some(EtcdTls {
                ca_pem: String::new(),
                identity: Some(TlsIdentity {
                    certificate_pem: String::new(),
                    key_pem: "hunter2".into(),
                }),
                server_name: None,
            }),
            ..endpoints(&["http://ann:hunter2@a:2379"])
        };
        let error = config.validate().unwrap_err();
        let shown = EtcdConfig {
            endpoints: vec![],
            ..config
        };
        let texts = format!("{shown:?} {error} {error:?}");
        assert!(!texts.contains("hunter2"), "{texts}");
    }
}
