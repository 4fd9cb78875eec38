//! [`NatsConfig`]: the address of NATS, our credentials, and limits.

use std::fmt;
use std::time::Duration;

use async_nats::ServerAddr;
use genset_backend_common::EngineError;

use super::message::HEADER_BYTES;
use crate::tls_identity::TlsIdentity;

/// The minimum size of a message: smaller ones would be mostly headers.
pub(super) const MIN_MESSAGE_BYTES: usize = 1024;

/// The maximum size of a message: the limit of NATS itself.
const MAX_MESSAGE_BYTES: usize = 64 << 20;

/// With fewer, the sender would wait for the peer at each message.
const MIN_WINDOW_MESSAGES: u32 = 4;

/// With more, one slow process could fill another's memory.
const MAX_WINDOW_MESSAGES: u32 = 1 << 16;

/// How to reach NATS. Checked as a whole by [`WirePlane::nats`](crate::plane::WirePlane::nats).
///
/// # Examples
/// ```
/// use genset_runtime::plane::{NatsConfig, NatsCredentials};
///
/// let config = NatsConfig {
///     servers: vec!["nats://nats-0:4222".into(), "nats://nats-1:4222".into()],
///     credentials: Some(NatsCredentials::UserPassword {
///         user: "genset".into(),
///         password: "from a file".into(),
///     }),
///     ..NatsConfig::default()
/// };
/// config.validate().unwrap();
/// ```
#[derive(Debug, Clone)]
pub struct NatsConfig {
    /// The servers, one or more, each as `scheme://host:port`. The scheme is `nats`, or `tls` if the server must speak TLS;
    /// default `nats`. The default port is 4222. The client learns the other servers of the cluster from these, except where the
    /// system's authorities verify TLS: then name all of them.
    pub servers: Vec<String>,
    /// Our credentials, if NATS requires them.
    pub credentials: Option<NatsCredentials>,
    /// Certificates; with them every server must speak TLS. Without them, the system's authorities verify a server
    /// that speaks TLS.
    pub tls: Option<NatsTls>,
    /// The connection's name, as `nats server report connections` shows it.
    pub name: String,
    /// Time limit for connecting to one server. They are tried one after another, in any order.
    pub connect_timeout: Duration,
    /// Silence after which the server is pinged. After three such intervals without an answer, the client connects to another
    /// server.
    pub ping_interval: Duration,
    /// The maximum size of a message in bytes, headers included; less if a server allows less.
    pub max_message_bytes: usize,
    /// Messages of one connection that may wait unread at a process; beyond it, the sender waits. A connection takes at
    /// most this many times [`max_message_bytes`](Self::max_message_bytes) of memory in the process and in the NATS server.
    pub window_messages: u32,
}

/// Our credentials for NATS. `Debug` shows no secret.
#[derive(Clone, PartialEq, Eq)]
pub enum NatsCredentials {
    /// A user of the server's configuration.
    UserPassword {
        /// The name.
        user: String,
        /// The password.
        password: String,
    },
    /// A token of the server's configuration.
    Token(String),
    /// The seed of an NKey of the server's configuration: the secret itself, which begins with `SU`.
    Nkey(String),
    /// A `.creds` file, for decentralized authentication: its content, not a path.
    Creds(String),
}

/// Certificates. `Debug` omits the private key.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct NatsTls {
    /// Certificates of the authorities that may sign the servers' certificates: PEM content, not a path. `None` for the
    /// system's own.
    pub ca_pem: Option<String>,
    /// Our own certificate, if the servers require one.
    pub identity: Option<TlsIdentity>,
}

impl Default for NatsConfig {
    fn default() -> Self {
        Self {
            servers: vec!["nats://127.0.0.1:4222".into()],
            credentials: None,
            tls: None,
            name: "genset".into(),
            connect_timeout: Duration::from_secs(2),
            ping_interval: Duration::from_secs(2),
            max_message_bytes: 32 << 10,
            window_messages: 128,
        }
    }
}

impl NatsConfig {
    /// Checks every field that can be checked without a server.
    ///
    /// # Errors
    /// `InvalidArgument`, naming the field and the values it allows.
    pub fn validate(&self) -> Result<(), EngineError> {
        self.checked_servers()?;
        self.check_credentials()?;
        for (field, value) in [
            ("connect_timeout", self.connect_timeout),
            ("ping_interval", self.ping_interval),
        ] {
            if value.is_zero() {
                return Err(invalid(field, "must be more than 0"));
            }
        }
        check_range(
            "max_message_bytes",
            self.max_message_bytes,
            (MIN_MESSAGE_BYTES, MAX_MESSAGE_BYTES),
        )?;
        check_range(
            "window_messages",
            self.window_messages,
            (MIN_WINDOW_MESSAGES, MAX_WINDOW_MESSAGES),
        )
    }

    /// The servers, parsed.
    pub(super) fn checked_servers(&self) -> Result<Vec<ServerAddr>, EngineError> {
        if self.servers.is_empty() {
            return Err(invalid("servers", "name at least one, as nats://host:4222"));
        }
        self.servers.iter().map(|server| checked(server)).collect()
    }

    fn check_credentials(&self) -> Result<(), EngineError> {
        let (field, value) = match &self.credentials {
            None => return Ok(()),
            Some(NatsCredentials::UserPassword { user, .. }) => ("credentials.user", user),
            Some(NatsCredentials::Token(token)) => ("credentials.token", token),
            Some(NatsCredentials::Nkey(seed)) => ("credentials.nkey", seed),
            Some(NatsCredentials::Creds(creds)) => ("credentials.creds", creds),
        };
        if value.trim().is_empty() {
            let problem = "must not be empty; leave credentials out where NATS asks for none";
            return Err(invalid(field, problem));
        }
        match &self.credentials {
            Some(NatsCredentials::Nkey(seed)) if !is_seed_of_user(seed) => Err(invalid(
                "credentials.nkey",
                "must be the seed of a user, 58 characters that begin with SU",
            )),
            _ => Ok(()),
        }
    }
}

/// Whether the text has the form of a user's seed. The client would only tell that it cannot log in.
fn is_seed_of_user(text: &str) -> bool {
    let is_base32 = |byte: u8| matches!(byte, b'A'..=b'Z' | b'2'..=b'7');
    text.len() == 58 && text.starts_with("SU") && text.bytes().all(is_base32)
}

fn checked(server: &str) -> Result<ServerAddr, EngineError> {
    // The text may hold a password, so the error does not repeat it.
    if server.contains('@') {
        let problem = "must not hold a user, password or token; use credentials (--nats-username, --nats-token-file)";
        return Err(invalid("servers", problem));
    }
    let problem = |text: &str| invalid("servers", format!("{text}, got {server:?}"));
    let address: ServerAddr = server
        .parse()
        .map_err(|_| problem("must each be nats://host:port or tls://host:port"))?;
    let has_path = !matches!(address.clone().into_inner().path(), "" | "/");
    if address.host().is_empty() || has_path || address.is_websocket() {
        return Err(problem(
            "must each be nats://host:port or tls://host:port and no more",
        ));
    }
    Ok(address)
}

fn check_range<T: PartialOrd + fmt::Display>(
    field: &str,
    value: T,
    (least, most): (T, T),
) -> Result<(), EngineError> {
    if value < least || value > most {
        let problem = format!("must be between {least} and {most}, got {value}");
        return Err(invalid(field, problem));
    }
    Ok(())
}

/// An error that names a field of the config.
pub(super) fn invalid(field: &str, problem: impl fmt::Display) -> EngineError {
    EngineError::invalid_argument(format!("nats.{field}"), problem)
}

impl fmt::Debug for NatsCredentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::UserPassword { user, .. } => f
                .debug_struct("UserPassword")
                .field("user", user)
                .finish_non_exhaustive(),
            Self::Token(_) => f.write_str("Token(hidden)"),
            Self::Nkey(_) => f.write_str("Nkey(hidden)"),
            Self::Creds(_) => f.write_str("Creds(hidden)"),
        }
    }
}

// A message always has room for data after its header.
const _: () = assert!(MIN_MESSAGE_BYTES > 2 * HEADER_BYTES);

#[cfg(test)]
mod tests {
    use super::*;

    fn servers(servers: &[&str]) -> NatsConfig {
        NatsConfig {
            servers: servers.iter().map(|&text| text.to_owned()).collect(),
            ..NatsConfig::default()
        }
    }

    fn with_credentials(credentials: NatsCredentials) -> NatsConfig {
        NatsConfig {
            credentials: Some(credentials),
            ..NatsConfig::default()
        }
    }

    #[test]
    fn servers_are_taken_with_and_without_scheme_and_port() {
        let config = servers(&["a", "nats://b:1", "tls://c", "nats://[::1]:5"]);
        let hosts: Vec<_> = config
            .checked_servers()
            .unwrap()
            .iter()
            .map(|server| {
                (
                    server.host().to_owned(),
                    server.port(),
                    server.tls_required(),
                )
            })
            .collect();
        let expected = [
            ("a", 4222, false),
            ("b", 1, false),
            ("c", 4222, true),
            ("::1", 5, false),
        ];
        assert_eq!(
            hosts,
            expected.map(|(host, port, tls)| (host.to_owned(), port, tls))
        );
    }

    #[test]
    fn what_is_wrong_is_named_with_its_field() {
        const NONE: Duration = Duration::ZERO;
        let with = |change: fn(&mut NatsConfig)| {
            let mut config = NatsConfig::default();
            change(&mut config);
            config
        };
        let nameless = NatsCredentials::UserPassword {
            user: String::new(),
            password: "p".into(),
        };
        let token = NatsCredentials::Token(" ".into());
        let creds = NatsCredentials::Creds(String::new());
        let nkey = NatsCredentials::Nkey("UABC".into());
        let cases = [
            (servers(&[]), "servers"),
            (servers(&[""]), "servers"),
            (servers(&["http://a"]), "servers"),
            (servers(&["ws://a"]), "servers"),
            (servers(&["nats://a/path"]), "servers"),
            (servers(&["nats://a:70000"]), "servers"),
            (with_credentials(nameless), "credentials.user"),
            (with_credentials(token), "credentials.token"),
            (with_credentials(creds), "credentials.creds"),
            (with_credentials(nkey), "credentials.nkey"),
            (with(|it| it.connect_timeout = NONE), "connect_timeout"),
            (with(|it| it.ping_interval = NONE), "ping_interval"),
            (with(|it| it.max_message_bytes = 100), "max_message_bytes"),
            (with(|it| it.window_messages = 0), "window_messages"),
        ];
        for (config, field) in cases {
            let error = config.validate().unwrap_err();
            let at = error.at().map(|at| at.name().to_owned());
            assert_eq!(at, Some(format!("nats.{field}")), "{config:?}");
        }
    }

    #[test]
    fn secrets_are_in_no_debug_and_no_error() {
        let secret = || "hunter2".to_owned();
        let shown = [
            NatsCredentials::UserPassword {
                user: "ann".into(),
                password: secret(),
            },
            NatsCredentials::Token(secret()),
            NatsCredentials::Nkey(secret()),
            NatsCredentials::Creds(secret()),
        ]
        .map(with_credentials);
        let tls = NatsTls {
            ca_pem: None,
            identity: Some(TlsIdentity {
                certificate_pem: String::new(),
                key_pem: secret(),
            }),
        };
        let error = servers(&["nats://ann:hunter2@a:4222"])
            .validate()
            .unwrap_err();
        let texts = format!("{shown:?} {tls:?} {error} {error:?}");
        assert!(!texts.contains("hunter2"), "{texts}");
    }
}
