//! [`Sessions`]: one client for each endpoint, and operations that are tried on one after another until a deadline.
//!
//! Not the client library's own balancing: that spreads operations over dead servers as well as live ones. Here the endpoint in
//! use is kept until an operation on it fails.

use std::fmt;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use etcd_client::{Certificate, Client, ConnectOptions, Error, Identity, TlsOptions};
use genset_backend_common::{EngineError, ErrorKind};
use parking_lot::Mutex;
use tokio::time::{Instant, timeout_at};

use super::config::{EtcdConfig, EtcdCredentials, EtcdTls, invalid};

/// Silence after which a connection is probed. Servers close connections that probe more often than each 5 s.
const PING_INTERVAL: Duration = Duration::from_secs(6);

/// gRPC status codes, as the specification numbers them.
mod code {
    pub(super) const INVALID_ARGUMENT: i32 = 3;
    pub(super) const NOT_FOUND: i32 = 5;
    pub(super) const PERMISSION_DENIED: i32 = 7;
}

/// Why an operation failed.
#[derive(Debug)]
pub(super) enum Failure {
    /// etcd does not know what was named: the lease.
    NotFound,
    /// etcd will not do it, however often it is asked.
    Refused(EngineError),
    /// No endpoint did it in time.
    Unreachable(EngineError),
}

impl From<Failure> for EngineError {
    fn from(failure: Failure) -> Self {
        match failure {
            Failure::NotFound => lease_lost(),
            Failure::Refused(error) | Failure::Unreachable(error) => error,
        }
    }
}

/// The error of using a lease that is gone.
pub(super) fn lease_lost() -> EngineError {
    EngineError::new(
        ErrorKind::Unavailable,
        "the lease on discovery is lost; take a new one",
    )
}

/// The endpoints, and which of them is in use.
pub(super) struct Sessions {
    config: EtcdConfig,
    sessions: Vec<Session>,
    current: AtomicUsize,
    next_id: AtomicU64,
}

/// An endpoint, and the client on it: none before the first use and after a failure.
struct Session {
    endpoint: String,
    connected: Mutex<Option<Connected>>,
}

/// A client that has authenticated, where that is asked for. The id tells it from its successors.
#[derive(Clone)]
struct Connected {
    id: u64,
    client: Client,
}

impl Sessions {
    /// Checks the config. Connections are made when they are first needed.
    pub(super) async fn try_new(config: EtcdConfig) -> Result<Self, EngineError> {
        config.validate()?;
        let mut sessions = Vec::new();
        for endpoint in config.checked_endpoints()? {
            // This does no I/O: it fails for unusable certificates only.
            client_of(&endpoint, &config).await.map_err(|error| {
                let problem = "must be PEM, and the key must be the certificate's";
                invalid("tls", problem).with_source(error)
            })?;
            sessions.push(Session {
                endpoint,
                connected: Mutex::new(None),
            });
        }
        Ok(Self {
            config,
            sessions,
            current: AtomicUsize::new(0),
            next_id: AtomicU64::new(0),
        })
    }

    pub(super) fn config(&self) -> &EtcdConfig {
        &self.config
    }

    /// Performs `operation` on the endpoint in use, then on each other and once more, until one answers. Every try gets its
    /// share of the request timeout, so that one hanging server does not use it up.
    pub(super) async fn perform<T, Answer>(
        &self,
        what: &str,
        operation: impl Fn(Client) -> Answer,
    ) -> Result<T, Failure>
    where
        Answer: Future<Output = Result<T, Error>>,
    {
        let deadline = Instant::now() + self.config.request_timeout;
        let mut problem = String::new();
        for tries_left in (1..=self.sessions.len() + 1).rev() {
            let index = self.current.load(Ordering::Relaxed);
            let Some(session) = self.sessions.get(index) else {
                break;
            };
            let now = Instant::now();
            let share = deadline.saturating_duration_since(now) / u32_of(tries_left);
            let attempt = self.attempt(session, &operation);
            problem = match timeout_at(now + share, attempt).await {
                Ok(Ok(answer)) => return Ok(answer),
                Ok(Err(error)) => match definitive(what, &error) {
                    Some(failure) => return Err(failure),
                    None => error.to_string(),
                },
                Err(_) => format!("no answer in {share:?}"),
            };
            tracing::debug!(endpoint = session.endpoint, what, problem, "etcd failed");
            self.leave(index);
        }
        let message = format!(
            "discovery: {what} failed on etcd at {self}: {problem}; check that it runs and can be reached, then try again"
        );
        let error = EngineError::new(ErrorKind::Unavailable, message);
        Err(Failure::Unreachable(error))
    }

    /// One try. A client that fails it is left behind: its connection may hang for longer than a new one takes, and its user
    /// may have to authenticate again.
    async fn attempt<T, Answer>(
        &self,
        session: &Session,
        operation: &impl Fn(Client) -> Answer,
    ) -> Result<T, Error>
    where
        Answer: Future<Output = Result<T, Error>>,
    {
        let known = session.connected.lock().clone();
        let connected = match known {
            Some(connected) => connected,
            None => Box::pin(self.connect(session)).await?,
        };
        let mut unproven = Unproven {
            session,
            id: connected.id,
            has_answered: false,
        };
        // Boxed, as the client library's futures are large.
        let answer = Box::pin(operation(connected.client)).await;
        unproven.has_answered = answer.is_ok();
        answer
    }

    async fn connect(&self, session: &Session) -> Result<Connected, Error> {
        let mut client = client_of(&session.endpoint, &self.config).await?;
        if let Some(EtcdCredentials { user, password }) = &self.config.credentials {
            let user = (user.clone(), password.clone());
            client.update_user(Some(user)).await?;
        }
        let id = self.next_id.fetch_add(1, Ordering::Relaxed);
        let connected = Connected { id, client };
        *session.connected.lock() = Some(connected.clone());
        Ok(connected)
    }

    /// Moves on from an endpoint that failed, unless somebody did already.
    fn leave(&self, index: usize) {
        let next = (index + 1) % self.sessions.len();
        // Whoever loses the race reads the winner's choice.
        let _ = self
            .current
            .compare_exchange(index, next, Ordering::Relaxed, Ordering::Relaxed);
    }
}

/// A client whose answer is awaited. Dropped without one, after a failure or because a try ran out of time, it is forgotten.
struct Unproven<'a> {
    session: &'a Session,
    id: u64,
    has_answered: bool,
}

impl Drop for Unproven<'_> {
    fn drop(&mut self) {
        let mut connected = self.session.connected.lock();
        let is_current = connected.as_ref().is_some_and(|known| known.id == self.id);
        if is_current && !self.has_answered {
            *connected = None;
        }
    }
}

/// A client of one endpoint, which connects when it is first used.
async fn client_of(endpoint: &str, config: &EtcdConfig) -> Result<Client, Error> {
    let options = ConnectOptions::new()
        .with_connect_timeout(config.connect_timeout)
        .with_keep_alive(PING_INTERVAL, config.request_timeout)
        .with_require_leader(true)
        .with_auto_token_refresh(true);
    let options = match &config.tls {
        Some(tls) => options.with_tls(tls_options(tls)),
        None => options,
    };
    Client::connect([endpoint], Some(options)).await
}

/// The endpoints, as messages name them.
impl fmt::Display for Sessions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, session) in self.sessions.iter().enumerate() {
            let separator = if index == 0 { "" } else { ", " };
            write!(f, "{separator}{}", session.endpoint)?;
        }
        Ok(())
    }
}

fn u32_of(tries: usize) -> u32 {
    u32::try_from(tries).unwrap_or(u32::MAX)
}

/// An answer of etcd's that asking again, there or elsewhere, would not change.
fn definitive(what: &str, error: &Error) -> Option<Failure> {
    let Error::GRpcStatus(status) = error else {
        return None;
    };
    let refused = |problem: &str| {
        let message = format!(
            "discovery: etcd refuses {what}: {}; {problem}",
            status.message()
        );
        let error = EngineError::new(ErrorKind::InvalidArgument, message);
        Some(Failure::Refused(error))
    };
    match i32::from(status.code()) {
        code::NOT_FOUND => Some(Failure::NotFound),
        code::PERMISSION_DENIED => refused("grant the user a role that may read and write it"),
        code::INVALID_ARGUMENT => refused("check etcd.credentials and the size of the entry"),
        _ => None,
    }
}

fn tls_options(tls: &EtcdTls) -> TlsOptions {
    let mut options = TlsOptions::new().ca_certificate(Certificate::from_pem(&tls.ca_pem));
    if let Some(identity) = &tls.identity {
        options = options.identity(Identity::from_pem(
            &identity.certificate_pem,
            &identity.key_pem,
        ));
    }
    if let Some(name) = &tls.server_name {
        options = options.domain_name(name);
    }
    options
}

/// Growing pauses between tries of what must go on until it succeeds.
#[derive(Debug)]
pub(super) struct Pauses {
    next: Duration,
}

impl Pauses {
    const FIRST: Duration = Duration::from_millis(50);
    /// A small part of the shortest useful time to live: whoever comes back after an outage puts its entries again within it.
    const LONGEST: Duration = Duration::from_secs(1);

    pub(super) fn new() -> Self {
        Self { next: Self::FIRST }
    }

    pub(super) async fn wait(&mut self) {
        tokio::time::sleep(self.next).await;
        self.next = (self.next * 2).min(Self::LONGEST);
    }
}
