//! [`Sessions`]: one client per endpoint. Operations try one endpoint after another until a deadline.
//!
//! There is no load balancing: it would spread operations over dead servers as well as live ones. The current endpoint stays in
//! use until an operation on it fails.

use std::error::Error as _;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use genset_backend_common::prometheus::metrics::gauge::Gauge;
use genset_backend_common::{EngineError, ErrorKind, log_limit::OncePerMinute};
use parking_lot::Mutex;
use tokio::time::{Instant, sleep_until, timeout_at};
use tonic::{Code, Status};

use super::client::Client;
use super::config::{EtcdConfig, EtcdTls, invalid};
use crate::discovery::{Outage, lease_lost};

/// Why an operation failed.
#[derive(Debug)]
pub(super) enum Failure {
    /// etcd does not know the lease.
    NotFound,
    /// etcd refuses the operation, or no endpoint completed it in time.
    Other(EngineError),
}

impl From<Failure> for EngineError {
    fn from(failure: Failure) -> Self {
        match failure {
            Failure::NotFound => lease_lost(),
            Failure::Other(error) => error,
        }
    }
}

/// The endpoints, and which of them is in use.
pub(super) struct Sessions {
    config: EtcdConfig,
    sessions: Vec<Session>,
    current: AtomicUsize,
    next_id: AtomicU64,
    /// Limits the log: many watches share an outage, and each tries again every second.
    logged: OncePerMinute,
    /// Whether the last line about it in the log says that discovery cannot be watched.
    has_told_outage: AtomicBool,
    /// Watches and leases that cannot reach etcd.
    outages: Gauge,
}

/// An endpoint and its client: `None` before the first use and after a failure.
struct Session {
    endpoint: String,
    connected: Mutex<Option<Connected>>,
}

/// A client, authenticated if etcd requires it. The id distinguishes it from its successors.
#[derive(Clone)]
struct Connected {
    id: u64,
    client: Client,
}

impl Sessions {
    /// Checks the config. Connections are made when they are first needed.
    pub(super) fn try_new(config: EtcdConfig) -> Result<Self, EngineError> {
        config.validate()?;
        let mut sessions = Vec::new();
        for endpoint in config.checked_endpoints()? {
            // This does no I/O: it fails only for unusable certificates.
            Client::try_new(&endpoint, &config).map_err(|error| {
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
            logged: OncePerMinute::default(),
            has_told_outage: AtomicBool::new(false),
            outages: Gauge::default(),
        })
    }

    pub(super) fn config(&self) -> &EtcdConfig {
        &self.config
    }

    pub(super) fn logged(&self) -> &OncePerMinute {
        &self.logged
    }

    pub(super) fn outages(&self) -> Gauge {
        self.outages.clone()
    }

    /// A watch or a lease cannot reach etcd until the result is dropped.
    pub(super) fn outage(&self) -> Outage {
        Outage::of(&self.outages)
    }

    /// A watch could not be opened again. If a line should tell, returns the number of such failures since the last one.
    pub(super) fn watch_failed(&self) -> Option<u64> {
        let unlogged = self.logged.unlogged("not watched")?;
        self.has_told_outage.store(true, Ordering::Relaxed);
        Some(unlogged)
    }

    /// A watch was opened again. Returns whether a line should tell.
    pub(super) fn watch_opened(&self) -> bool {
        self.has_told_outage.swap(false, Ordering::Relaxed)
    }

    /// Performs `operation` on the endpoint in use, then on each other and once more, until one answers. Every attempt gets its
    /// share of the request timeout, so that one hanging server does not use it up. While the servers elect a leader, they refuse
    /// at once, and are asked again until the timeout.
    pub(super) async fn perform<T, Answer>(
        &self,
        what: &str,
        operation: impl Fn(Client) -> Answer,
    ) -> Result<T, Failure>
    where
        Answer: Future<Output = Result<T, Status>>,
    {
        let deadline = Instant::now() + self.config.request_timeout;
        let has_credentials = self.config.credentials.is_some();
        // The last one of each endpoint.
        let mut problems: Vec<(&str, String)> = Vec::new();
        let mut tries_left = self.sessions.len() + 1;
        while tries_left > 0 {
            let index = self.current.load(Ordering::Relaxed);
            let Some(session) = self.sessions.get(index) else {
                break;
            };
            let now = Instant::now();
            let share = deadline.saturating_duration_since(now) / u32_of(tries_left);
            let attempt = self.attempt(session, &operation);
            let problem = match timeout_at(now + share, attempt).await {
                Ok(Ok(answer)) => return Ok(answer),
                Ok(Err(error)) => match definitive(what, &error, has_credentials) {
                    Some(failure) => return Err(failure),
                    None => problem_of(&error),
                },
                Err(_) => format!("no answer in {:.1} s", share.as_secs_f64()),
            };
            let endpoint = session.endpoint.as_str();
            tracing::debug!(endpoint, what, problem, "etcd failed");
            problems.retain(|(failed, _)| *failed != endpoint);
            problems.push((endpoint, problem));
            self.leave(index);
            tries_left -= 1;
            let wait = Instant::now() + ELECTION_PAUSE;
            if tries_left == 0 && wait < deadline && problems.iter().any(lacks_leader) {
                sleep_until(wait).await;
                tries_left = 1;
            }
        }
        let problem = told(&problems);
        let mend = mend(&problem, self.config.tls.as_ref());
        let message = format!("discovery: {what} failed on etcd at {self}: {problem}; {mend}");
        let error = EngineError::new(ErrorKind::Unavailable, message);
        Err(Failure::Other(error))
    }

    /// One attempt. If it fails, its client is discarded: the connection may hang for longer than a new one takes, and its user
    /// may have to authenticate again.
    async fn attempt<T, Answer>(
        &self,
        session: &Session,
        operation: &impl Fn(Client) -> Answer,
    ) -> Result<T, Status>
    where
        Answer: Future<Output = Result<T, Status>>,
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
        // Boxed, as the futures of calls are large.
        let answer = Box::pin(operation(connected.client)).await;
        unproven.has_answered = answer.is_ok();
        answer
    }

    async fn connect(&self, session: &Session) -> Result<Connected, Status> {
        let client = Client::try_new(&session.endpoint, &self.config);
        let mut client = client.map_err(|error| Status::from_error(error.into()))?;
        if let Some(credentials) = &self.config.credentials {
            client.authenticate(credentials).await?;
        }
        let id = self.next_id.fetch_add(1, Ordering::Relaxed);
        let connected = Connected { id, client };
        *session.connected.lock() = Some(connected.clone());
        Ok(connected)
    }

    /// Moves on from an endpoint that failed, unless another task already has.
    fn leave(&self, index: usize) {
        let next = (index + 1) % self.sessions.len();
        // The loser of the race uses the winner's choice.
        let _ = self
            .current
            .compare_exchange(index, next, Ordering::Relaxed, Ordering::Relaxed);
    }
}

/// A client with a pending answer. If dropped without one, after a failure or a timeout, the client is discarded.
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

/// The endpoints, for messages.
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

/// How etcd refuses a token that is older than the last change of a user or a role, whosever. A new client, with a new token,
/// is not refused. etcd's own client tells it by the same text.
const OLD_TOKEN: &str = "etcdserver: revision of auth store is old";

/// How etcd refuses a request without a token, as of a client from before etcd required credentials.
const NO_TOKEN: &str = "etcdserver: user name is empty";

/// Pause between the attempts while the servers elect a leader, which takes them a second or two.
const ELECTION_PAUSE: Duration = Duration::from_millis(250);
/// How etcd refuses a wrong password, or a user that it does not know.
const WRONG_PASSWORD: &str = "etcdserver: authentication failed, invalid user ID or password";

/// How etcd refuses to store anything once its database has reached its quota.
const NO_SPACE: &str = "database space exceeded";

/// The problems of an operation: if it tried several endpoints, each with its own.
fn told(problems: &[(&str, String)]) -> String {
    if let [(_, problem)] = problems {
        return problem.clone();
    }
    let named = problems.iter();
    let named = named.map(|(endpoint, problem)| format!("{problem} ({endpoint})"));
    named.collect::<Vec<_>>().join("; ")
}

/// Whether an endpoint refused because it has no leader now, or had another when it was asked.
fn lacks_leader((_, problem): &(&str, String)) -> bool {
    problem.starts_with("etcdserver: ") && problem.contains("leader")
}
/// How a connection fails that the server ends. A server that refuses our certificate may do so before we read why.
const ENDED: [&str; 4] = [
    "broken pipe",
    "connection closed",
    "connection reset",
    "received fatal alert",
];

/// What helps against the problems of an operation.
fn mend(problem: &str, tls: Option<&EtcdTls>) -> &'static str {
    let is_ended = ENDED.iter().any(|text| problem.contains(text));
    match tls {
        _ if problem.contains(NO_SPACE) => {
            "make room there with `etcdctl compact` and `defrag`, then `etcdctl alarm disarm`"
        }
        Some(_) if problem.contains("invalid peer certificate") => {
            "check --etcd-ca, and that the server's certificate is valid now and for the host in --etcd-endpoints"
        }
        Some(tls) if is_ended && tls.identity.is_none() => {
            "check that it runs, and whether it asks for a certificate of ours (--etcd-cert)"
        }
        Some(_) if is_ended => {
            "check that it runs, and that it trusts --etcd-cert: valid now, for client authentication, signed by an authority of its"
        }
        None if is_ended => "check that it runs, and whether it speaks TLS (https://, --etcd-ca)",
        Some(_) | None => "check that it runs and can be reached, then try again",
    }
}

/// An answer from etcd that retrying, there or on another endpoint, would not change.
fn definitive(what: &str, status: &Status, has_credentials: bool) -> Option<Failure> {
    let (needs_token, mend) = match status.message() {
        OLD_TOKEN => (true, ""),
        NO_TOKEN => (
            has_credentials,
            "it requires a user: give --etcd-username and --etcd-password-file",
        ),
        WRONG_PASSWORD => (
            false,
            "check --etcd-username and the password in --etcd-password-file",
        ),
        _ => (false, "check the size of the entry"),
    };
    let refused = |problem: &str| {
        let message = format!(
            "discovery: etcd refuses {what}: {}; {problem}",
            status.message()
        );
        let error = EngineError::new(ErrorKind::InvalidArgument, message);
        Some(Failure::Other(error))
    };
    #[expect(
        clippy::wildcard_enum_match_arm,
        reason = "every other code may change when it is asked again"
    )]
    match status.code() {
        Code::NotFound => Some(Failure::NotFound),
        Code::InvalidArgument if needs_token => None,
        Code::PermissionDenied => {
            refused("grant the user a role that may read and write the prefix genset/v1/")
        }
        Code::InvalidArgument => refused(mend),
        _ => None,
    }
}

/// The message of a failed call, with its causes.
pub(super) fn problem_of(status: &Status) -> String {
    let mut problem = status.message().to_owned();
    let mut source = status.source();
    while let Some(error) = source {
        let said = error.to_string();
        if !problem.contains(&said) {
            problem = format!("{problem}: {said}");
        }
        source = error.source();
    }
    problem
}

/// Growing pauses between the attempts of an operation that must eventually succeed.
#[derive(Debug)]
pub(super) struct Pauses {
    next: Duration,
}

impl Pauses {
    const FIRST: Duration = Duration::from_millis(50);
    /// A small part of the shortest useful time to live: owners put their entries again within it after an outage.
    const LONGEST: Duration = Duration::from_secs(1);

    pub(super) fn new() -> Self {
        Self { next: Self::FIRST }
    }

    pub(super) async fn wait(&mut self) {
        tokio::time::sleep(self.next).await;
        self.next = (self.next * 2).min(Self::LONGEST);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tls_identity::TlsIdentity;

    #[test]
    fn a_request_is_sent_again_if_a_new_token_helps() {
        let is_definitive = |message: &str, has_credentials| {
            let status = Status::invalid_argument(message);
            definitive("putting a", &status, has_credentials).is_some()
        };
        for has_credentials in [true, false] {
            assert!(!is_definitive(OLD_TOKEN, has_credentials));
            assert!(is_definitive(
                "etcdserver: request is too large",
                has_credentials
            ));
            assert_eq!(is_definitive(NO_TOKEN, has_credentials), !has_credentials);
        }
    }

    #[tokio::test]
    async fn an_error_says_what_each_server_said() {
        let config = EtcdConfig {
            endpoints: vec!["http://127.0.0.1:1".into(), "http://127.0.0.1:2".into()],
            ..EtcdConfig::default()
        };
        let sessions = Sessions::try_new(config).unwrap();
        let tries = AtomicUsize::new(0);
        let failed = sessions.perform("asking", |_client| {
            let attempt = tries.fetch_add(1, Ordering::Relaxed);
            async move { Err::<(), _>(Status::unavailable(format!("problem {attempt}"))) }
        });
        let error = EngineError::from(failed.await.unwrap_err()).to_string();
        let expected = ": problem 1 (http://127.0.0.1:2); problem 2 (http://127.0.0.1:1); check ";
        assert!(error.contains(expected), "{error}");
    }

    #[tokio::test(start_paused = true)]
    async fn servers_that_elect_a_leader_are_asked_again_until_the_timeout() {
        let sessions = Sessions::try_new(EtcdConfig::default()).unwrap();
        let timeout = sessions.config().request_timeout;
        for (elected_after, is_in_time) in [(timeout / 2, true), (2 * timeout, false)] {
            let began = Instant::now();
            let answer = sessions.perform("asking", |_client| {
                let answer = match began.elapsed() >= elected_after {
                    true => Ok(()),
                    false => Err(Status::unavailable("etcdserver: no leader")),
                };
                async move { answer }
            });
            assert_eq!(answer.await.is_ok(), is_in_time);
            assert!(began.elapsed() <= timeout);
        }
    }

    #[test]
    fn a_full_etcd_is_not_told_as_one_that_cannot_be_reached() {
        let full = mend("etcdserver: mvcc: database space exceeded", None);
        assert!(full.contains("alarm disarm"), "{full}");
        assert!(mend("no answer in 2.5 s", None).contains("can be reached"));
    }

    /// The texts are those that etcd 3.4 caused.
    #[test]
    fn an_error_of_tls_names_the_flag_that_mends_it() {
        let tls = |identity| EtcdTls {
            ca_pem: String::new(),
            identity,
            server_name: None,
        };
        let identity = TlsIdentity {
            certificate_pem: String::new(),
            key_pem: String::new(),
        };
        let (without, with) = (tls(None), tls(Some(identity)));
        let ended = "transport error: connection error: stream closed because of a broken pipe";
        let stranger = "invalid peer certificate: UnknownIssuer: transport error";
        let refused = "transport error: connection error: received fatal alert: BadCertificate";
        for (problem, tls, flag) in [
            (ended, None, "--etcd-ca"),
            (ended, Some(&without), "(--etcd-cert)"),
            (ended, Some(&with), "trusts --etcd-cert"),
            (refused, Some(&with), "trusts --etcd-cert"),
            (stranger, Some(&without), "--etcd-ca"),
        ] {
            let mend = mend(problem, tls);
            assert!(mend.contains(flag), "{problem}: {mend}");
        }
    }

    #[test]
    fn a_refused_login_is_told_apart_from_a_large_entry() {
        let refused = |message: &str| {
            let status = Status::invalid_argument(message);
            let failure = definitive("putting a", &status, false).unwrap();
            EngineError::from(failure).to_string()
        };
        assert!(refused(WRONG_PASSWORD).contains("--etcd-password-file"));
        assert!(refused(NO_TOKEN).contains("requires a user"));
        assert!(refused("etcdserver: request is too large").contains("size"));
    }

    /// So the last line never says that discovery cannot be watched when it can.
    #[tokio::test(start_paused = true)]
    async fn the_end_of_an_outage_is_told_if_the_outage_was() {
        let sessions = Sessions::try_new(EtcdConfig::default()).unwrap();
        assert!(!sessions.watch_opened());
        assert_eq!(sessions.watch_failed(), Some(0));
        tokio::time::advance(Duration::from_secs(50)).await;
        assert_eq!(sessions.watch_failed(), None);
        assert!(sessions.watch_opened());
        // Another outage, whose first failures are only counted.
        assert_eq!(sessions.watch_failed(), None);
        assert!(!sessions.watch_opened());
        tokio::time::advance(Duration::from_secs(10)).await;
        assert_eq!(sessions.watch_failed(), Some(2));
        assert!(sessions.watch_opened());
        assert!(!sessions.watch_opened());
    }
}
