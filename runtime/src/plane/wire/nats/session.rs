//! [`Session`]: this process's only connection to NATS, made on first use.

use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use async_nats::connection::State;
use async_nats::{
    Client, ConnectError, ConnectErrorKind, ConnectOptions, Event, ServerAddr, Subject,
};
use genset_backend_common::{EngineError, ErrorKind, log_limit::OncePerMinute};
use parking_lot::Mutex;
use tokio::sync::OnceCell;

use super::config::{MIN_MESSAGE_BYTES, NatsConfig, NatsCredentials, NatsTls, invalid};
use super::tls;

/// The prefix of all our subjects. A NATS user needs the right to publish and to subscribe to `genset.v1.wire.>`.
const ROOT: &str = "genset.v1.wire";

/// Messages that may wait for the client's task; beyond it, senders wait.
const QUEUE_MESSAGES: usize = 1024;

/// Room in a subscription in addition to its window: acknowledgements, at most one per quarter of the peer's window, the last
/// message, and the notice that the peer is gone.
const SPARE_MESSAGES: usize = 32;

/// Pauses between attempts to reconnect to a server, doubling from the first to the last.
const RECONNECT_PAUSES: (Duration, Duration) = (Duration::from_millis(20), Duration::from_secs(1));

/// The connection, and the subjects of this process.
///
/// The client reconnects by itself, for as long as needed. If the session is dropped while no server can be reached, the
/// client's task lives on, mostly asleep, until it reaches one or the runtime ends.
pub(super) struct Session {
    config: NatsConfig,
    servers: Vec<ServerAddr>,
    options: ConnectOptions,
    client: OnceCell<Client>,
    reports: Arc<Reports>,
    process: String,
    connections: AtomicU64,
}

impl Session {
    /// Checks `config`; does not connect yet.
    ///
    /// # Errors
    /// `InvalidArgument`, naming the field.
    pub(super) fn try_new(config: NatsConfig) -> Result<Self, EngineError> {
        config.validate()?;
        let servers = config.checked_servers()?;
        let reports = Arc::default();
        Ok(Self {
            options: options(&config, &servers, &reports)?,
            config,
            servers,
            client: OnceCell::new(),
            reports,
            process: format!("{:032x}", rand::random::<u128>()),
            connections: AtomicU64::new(0),
        })
    }

    pub(super) fn config(&self) -> &NatsConfig {
        &self.config
    }

    /// The unique name of this process.
    pub(super) fn process(&self) -> &str {
        &self.process
    }

    /// The listening subject of the process with this name; `None` if it is not a process name.
    pub(super) fn listening_subject(process: &str) -> Option<Subject> {
        let is_name = process.len() == 32 && process.bytes().all(|byte| byte.is_ascii_hexdigit());
        is_name.then(|| format!("{ROOT}.{process}").into())
    }

    /// Whether it may be a connection's subject: a stranger cannot make us publish elsewhere.
    pub(super) fn is_connection_subject(subject: &str) -> bool {
        let parts = subject
            .strip_prefix(ROOT)
            .and_then(|rest| rest.strip_prefix('.')?.split_once('.'));
        parts.is_some_and(|(process, connection)| {
            Self::listening_subject(process).is_some() && connection.parse::<u64>().is_ok()
        })
    }

    /// A subject for a new connection of this process.
    pub(super) fn new_connection_subject(&self) -> Subject {
        let number = self.connections.fetch_add(1, Ordering::Relaxed);
        format!("{ROOT}.{}.{number}", self.process).into()
    }

    /// Whether strangers could reach this process: NATS runs on another machine and requires no authentication.
    pub(super) fn is_open_to_others(&self) -> bool {
        let is_loopback = |server: &ServerAddr| {
            let address: Result<IpAddr, _> = server.host().parse();
            server.host() == "localhost" || address.is_ok_and(|address| address.is_loopback())
        };
        let tls = self.config.tls.as_ref();
        let is_asked =
            self.config.credentials.is_some() || tls.is_some_and(|tls| tls.identity.is_some());
        !is_asked && !self.servers.iter().all(is_loopback)
    }

    /// The client; connects at the first call, and again at the next if that failed.
    ///
    /// # Errors
    /// `Unavailable`, naming the servers; `InvalidArgument` if they refuse the credentials, or if a server's message size limit
    /// is too small.
    pub(super) async fn client(&self) -> Result<&Client, EngineError> {
        self.client.get_or_try_init(|| self.connect()).await
    }

    /// The client, if it is connected now.
    ///
    /// # Errors
    /// Same as [`Self::client`].
    pub(super) async fn connected_client(&self) -> Result<&Client, EngineError> {
        let client = self.client().await?;
        if is_connected(client) {
            Ok(client)
        } else {
            Err(self.unavailable("the connection is lost"))
        }
    }

    /// Whether the client is connected now. Before the first connection nothing shows otherwise.
    pub(super) fn is_connected(&self) -> bool {
        self.client.get().is_none_or(is_connected)
    }

    async fn connect(&self) -> Result<Client, EngineError> {
        let connecting = self.options.clone().connect(self.servers.as_slice());
        // The client tries one server after another, each for the connect timeout: one that hangs leaves time for the others. One
        // more is for a name with several addresses.
        let tries = u32::try_from(self.servers.len() + 1).unwrap_or(u32::MAX);
        let limit = self.config.connect_timeout.saturating_mul(tries);
        let client = tokio::time::timeout(limit, connecting)
            .await
            .map_err(|_| self.unavailable("no server answered in time"))?
            .map_err(|error| self.refused(&error))?;
        let max_payload = client.max_payload();
        if max_payload < MIN_MESSAGE_BYTES {
            let problem = format!(
                "the server's max_payload is {max_payload} bytes and must be at least {MIN_MESSAGE_BYTES}"
            );
            return Err(invalid("servers", problem));
        }
        Ok(client)
    }

    fn refused(&self, error: &ConnectError) -> EngineError {
        match error.kind() {
            ConnectErrorKind::Authentication | ConnectErrorKind::AuthorizationViolation => {
                let (servers, mend) = (self.server_names(), login_mend(&self.config));
                let problem = format!("{servers} refused them: {error}; {mend}");
                invalid("credentials", problem)
            }
            ConnectErrorKind::ServerParse
            | ConnectErrorKind::Dns
            | ConnectErrorKind::TimedOut
            | ConnectErrorKind::Tls
            | ConnectErrorKind::Io
            | ConnectErrorKind::MaxReconnects => {
                let problem = error.to_string();
                self.unavailable(&format!("{problem}{}", tls_mend(&problem)))
            }
        }
    }

    /// An error that names the servers and what the client last reported of them, if anything.
    pub(super) fn unavailable(&self, problem: &str) -> EngineError {
        let servers = self.server_names();
        let reported = match &*self.reports.problem.lock() {
            Some(reported) => format!("; the last report was: {reported}"),
            None => String::new(),
        };
        let message = format!("NATS at {servers} cannot be used: {problem}{reported}");
        EngineError::new(ErrorKind::Unavailable, message)
    }

    fn server_names(&self) -> String {
        self.config.servers.join(", ")
    }
}

/// What helps where the servers do not let us in.
fn login_mend(config: &NatsConfig) -> &'static str {
    match &config.credentials {
        None => "give --nats-creds, --nats-username, --nats-token-file or --nats-nkey-file",
        Some(NatsCredentials::UserPassword { .. }) => {
            "check --nats-username and the password in --nats-password-file"
        }
        Some(NatsCredentials::Token(_)) => "check --nats-token-file",
        Some(NatsCredentials::Nkey(_)) => "check that the servers list the key of --nats-nkey-file",
        Some(NatsCredentials::Creds(_)) => {
            "check that --nats-creds is of an account that the servers know, and has not expired"
        }
    }
}

/// What helps where certificates do not fit, to append to the problem.
fn tls_mend(problem: &str) -> &'static str {
    if problem.contains("invalid peer certificate") {
        "; check --nats-ca, and that the server's certificate is valid now and for the host in --nats-server"
    } else if problem.contains("received fatal alert") {
        "; check --nats-cert: the server may ask for a certificate, which must be valid now and signed by an authority of its"
    } else {
        ""
    }
}

fn is_connected(client: &Client) -> bool {
    match client.connection_state() {
        State::Connected => true,
        State::Pending | State::Disconnected => false,
    }
}

fn options(
    config: &NatsConfig,
    servers: &[ServerAddr],
    reports: &Arc<Reports>,
) -> Result<ConnectOptions, EngineError> {
    let reports = Arc::clone(reports);
    let window = usize::try_from(config.window_messages).unwrap_or(usize::MAX);
    let options = ConnectOptions::new()
        .name(&config.name)
        .connection_timeout(config.connect_timeout)
        .ping_interval(config.ping_interval)
        .client_capacity(QUEUE_MESSAGES)
        .subscription_capacity(window.saturating_add(SPARE_MESSAGES))
        .reconnect_delay_callback(reconnect_pause)
        .event_callback(move |event| {
            reports.note(&event);
            std::future::ready(())
        });
    let options = with_credentials(options, config.credentials.as_ref())?;
    let must_speak_tls = servers.iter().any(ServerAddr::tls_required);
    let options = match (&config.tls, must_speak_tls) {
        (Some(tls), _) => options
            .tls_client_config(tls::client_config(tls)?)
            .require_tls(true),
        (None, true) => options.tls_client_config(tls::client_config(&NatsTls::default())?),
        (None, false) => options,
    };
    Ok(match uses_named_alone(config.tls.as_ref(), servers) {
        true => options.ignore_discovered_servers(),
        false => options,
    })
}

/// Whether only the named servers are used, and not those that they name. Servers name others before TLS begins, so whoever is
/// on the path can add one. The authorities in `ca_pem` do not vouch for such a server; the system's do, for a name of its own.
fn uses_named_alone(tls: Option<&NatsTls>, servers: &[ServerAddr]) -> bool {
    match tls {
        Some(tls) => tls.ca_pem.is_none(),
        None => servers.iter().any(ServerAddr::tls_required),
    }
}

fn with_credentials(
    options: ConnectOptions,
    credentials: Option<&NatsCredentials>,
) -> Result<ConnectOptions, EngineError> {
    match credentials {
        None => Ok(options),
        Some(NatsCredentials::UserPassword { user, password }) => {
            Ok(options.user_and_password(user.clone(), password.clone()))
        }
        Some(NatsCredentials::Token(token)) => Ok(options.token(token.clone())),
        Some(NatsCredentials::Nkey(seed)) => Ok(options.nkey(seed.clone())),
        // Omit the error: it could contain a part of the seed.
        Some(NatsCredentials::Creds(creds)) => options.credentials(creds).map_err(|_| {
            invalid(
                "credentials.creds",
                "must be the content of a .creds file, with a JWT and a seed",
            )
        }),
    }
}

/// The pause before an attempt; none before the first. A random part spreads out processes that lost the
/// same server.
fn reconnect_pause(attempt: usize) -> Duration {
    let doublings = match attempt {
        0 | 1 => return Duration::ZERO,
        later => u32::try_from(later - 2).unwrap_or(u32::MAX),
    };
    let factor = 2u32.saturating_pow(doublings);
    let pause = RECONNECT_PAUSES
        .0
        .saturating_mul(factor)
        .min(RECONNECT_PAUSES.1);
    pause.mul_f64(rand::random_range(0.5..=1.0))
}

/// What the client reports.
#[derive(Debug, Default)]
struct Reports {
    /// The last problem since the client was last connected.
    problem: Mutex<Option<String>>,
    /// Limits the log: the client reports each failed attempt to connect, and the server each message that it refuses.
    logged: OncePerMinute,
}

impl Reports {
    fn note(&self, event: &Event) {
        match event {
            Event::Connected => {
                *self.problem.lock() = None;
                tracing::info!("connected to NATS");
            }
            Event::Disconnected => {
                tracing::warn!(
                    "disconnected from NATS; requests fail until a server is reached again"
                );
            }
            Event::ServerError(error) => {
                if let Some(unlogged) = self.logged.unlogged("refused") {
                    tracing::warn!(%error, unlogged, "NATS refuses something; further refusals are only counted for a minute");
                }
                *self.problem.lock() = Some(error.to_string());
            }
            Event::SlowConsumer(subscription) => {
                if let Some(unlogged) = self.logged.unlogged("overflowed") {
                    tracing::warn!(
                        subscription,
                        unlogged,
                        "a subscription overflowed; what was lost ends its connection; further losses are only counted for a minute"
                    );
                }
            }
            Event::ClientError(error) => {
                if let Some(unlogged) = self.logged.unlogged("not connected") {
                    tracing::warn!(%error, unlogged, "NATS cannot be reached; further failures are only counted for a minute");
                }
                *self.problem.lock() = Some(error.to_string());
            }
            Event::LameDuckMode | Event::Draining | Event::Closed => {
                tracing::debug!(%event, "NATS");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use async_nats::ClientError;

    use super::*;

    #[test]
    fn only_subjects_of_connections_are_answered_to() {
        let session = Session::try_new(NatsConfig::default()).unwrap();
        let good = session.new_connection_subject();
        assert!(Session::is_connection_subject(&good));
        let listening = Session::listening_subject(session.process()).unwrap();
        for bad in [
            listening.as_str(),
            "",
            "orders.new",
            "genset.v1.wire",
            "genset.v1.wire.>",
            "genset.v1.wire.0123.1",
            &format!("{listening}.*"),
            &format!("{good}.1"),
        ] {
            assert!(!Session::is_connection_subject(bad), "{bad}");
        }
    }

    #[test]
    fn only_names_of_processes_have_a_subject() {
        assert!(Session::listening_subject("127.0.0.1:80").is_none());
        assert!(Session::listening_subject(&"*".repeat(32)).is_none());
        assert!(Session::listening_subject(&"0f".repeat(16)).is_some());
    }

    #[test]
    fn only_a_local_nats_or_one_that_asks_is_closed_to_strangers() {
        let open = |server: &str, credentials| {
            let config = NatsConfig {
                servers: vec![server.into()],
                credentials,
                ..NatsConfig::default()
            };
            Session::try_new(config).unwrap().is_open_to_others()
        };
        for local in ["localhost", "127.0.0.1:1", "nats://[::1]:4222"] {
            assert!(!open(local, None), "{local}");
        }
        assert!(open("nats://nats-0:4222", None));
        let token = NatsCredentials::Token("t".into());
        assert!(!open("nats://nats-0:4222", Some(token)));
    }

    /// A server's list of others comes in the clear: whoever is on the path can add one, which gets credentials and prompts.
    #[test]
    fn a_server_that_only_others_named_is_used_where_it_cannot_pretend() {
        let is_named_alone = |servers: &[&str], ca_pem: Option<Option<&str>>| {
            let servers: Vec<ServerAddr> =
                servers.iter().map(|text| text.parse().unwrap()).collect();
            let tls = ca_pem.map(|ca_pem| NatsTls {
                ca_pem: ca_pem.map(str::to_owned),
                ..NatsTls::default()
            });
            uses_named_alone(tls.as_ref(), &servers)
        };
        assert!(!is_named_alone(&["nats://a:4222"], None));
        assert!(!is_named_alone(&["tls://a:4222"], Some(Some("own"))));
        assert!(is_named_alone(&["tls://a:4222"], None));
        assert!(is_named_alone(&["nats://a:4222", "tls://b:4222"], None));
        assert!(is_named_alone(&["nats://a:4222"], Some(None)));
    }

    #[test]
    fn reconnecting_begins_at_once_and_never_pauses_long() {
        assert_eq!(reconnect_pause(1), Duration::ZERO);
        for attempt in [2, 3, 10, 1000, usize::MAX] {
            let pause = reconnect_pause(attempt);
            assert!(pause > Duration::ZERO && pause <= RECONNECT_PAUSES.1);
        }
    }

    #[test]
    fn an_error_says_why_the_client_does_not_connect_again() {
        let session = Session::try_new(NatsConfig::default()).unwrap();
        let error = || session.unavailable("the connection is lost").to_string();
        let refused = ClientError::Other("authorization violation".into());
        session.reports.note(&Event::ClientError(refused));
        assert!(error().contains("authorization violation"), "{}", error());
        session.reports.note(&Event::Connected);
        assert!(!error().contains("authorization violation"), "{}", error());
    }

    #[test]
    fn an_error_names_the_flag_that_mends_it() {
        let session = |credentials| {
            let config = NatsConfig {
                credentials,
                ..NatsConfig::default()
            };
            Session::try_new(config).unwrap()
        };
        let token = Some(NatsCredentials::Token("t".into()));
        for (credentials, flag) in [(None, "give --nats-creds"), (token, "--nats-token-file")] {
            let error = ConnectError::new(ConnectErrorKind::AuthorizationViolation);
            let error = session(credentials).refused(&error).to_string();
            assert!(error.contains(flag), "{error}");
        }
        for (text, flag) in [
            ("invalid peer certificate: UnknownIssuer", "--nats-ca"),
            ("received fatal alert: BadCertificate", "--nats-cert"),
        ] {
            let error = ConnectError::with_source(ConnectErrorKind::Io, text);
            let error = session(None).refused(&error).to_string();
            assert!(error.contains(flag), "{error}");
        }
    }

    /// As where the user may not publish: the server reports each message.
    #[tokio::test(start_paused = true)]
    async fn what_the_server_refuses_is_logged_once_a_minute() {
        let reports = Reports::default();
        let refused = async_nats::ServerError::Other("permissions violation".into());
        for _ in 0..100 {
            reports.note(&Event::ServerError(refused.clone()));
            reports.note(&Event::SlowConsumer(1));
        }
        tokio::time::advance(Duration::from_secs(60)).await;
        for reason in ["refused", "overflowed"] {
            assert_eq!(reports.logged.unlogged(reason), Some(99), "{reason}");
        }
    }

    #[test]
    fn what_is_no_creds_file_is_named_and_not_shown() {
        let config = NatsConfig {
            credentials: Some(NatsCredentials::Creds("hunter2".into())),
            ..NatsConfig::default()
        };
        let error = Session::try_new(config).err().unwrap();
        assert_eq!(
            error.at().map(|at| at.name()),
            Some("nats.credentials.creds")
        );
        assert!(!format!("{error:?}").contains("hunter2"));
    }
}
