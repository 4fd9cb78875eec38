//! [`NetworkArgs`]: the flags of discovery and the request plane, and the runtime built from them.

#[cfg(any(feature = "etcd", feature = "nats"))]
mod flags;
mod kinds;
mod nats_login;
mod wire_tls;

use std::ffi::OsStr;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use clap::{ArgAction, Args};
use genset_backend_common::byte_size::ByteSize;
use genset_backend_common::{EngineError, MetricsRegistry, text_file::read_text};

pub use kinds::{DiscoveryBackend, Reach, RequestPlaneKind};
pub use nats_login::NatsLoginArgs;
pub use wire_tls::WireTlsArgs;

use crate::component::Runtime;
use crate::discovery::{
    DirectoryAccess, Discovery, FileDiscovery, FileDiscoveryConfig, MemoryDiscovery,
};
use crate::plane::wire::own_address;
use crate::plane::{MemoryPlane, RequestPlane, TcpConfig, WireConfig, WirePlane, WireSecret};
#[cfg(feature = "nats")]
use crate::plane::{MixedPlane, NatsConfig};
use crate::tls_identity::TlsIdentity;
use crate::vital::VitalRuntime;

/// Flags about the network between processes.
#[derive(Debug, Clone, Args)]
pub struct NetworkArgs {
    /// Where instances are listed: memory (this process alone), file or etcd
    /// [default: between processes etcd where --etcd-endpoints names servers and --discovery-path no directory, else file; memory
    /// in one]
    #[arg(long, env = "GENSET_DISCOVERY_BACKEND", value_name = "BACKEND")]
    pub discovery_backend: Option<DiscoveryBackend>,
    /// Directory of file discovery, shared by all processes [default: one for each user]
    #[arg(long, env = "GENSET_DISCOVERY_PATH", value_name = "DIR")]
    pub discovery_path: Option<PathBuf>,
    /// Whether other users may write to the directory of --discovery-path; they are trusted then to name workers
    #[arg(long, env = "GENSET_DISCOVERY_SHARED", value_name = "BOOL", default_value_t = false, action = ArgAction::Set,
        num_args = 0..=1, default_missing_value = "true", requires_if("true", "discovery_path"))]
    pub discovery_shared: bool,
    /// Servers of etcd discovery, as http://host:2379 [default: http://127.0.0.1:2379 with --discovery-backend etcd]
    #[arg(
        long,
        env = "ETCD_ENDPOINTS",
        value_delimiter = ',',
        value_name = "URLS"
    )]
    pub etcd_endpoints: Vec<String>,
    /// User at etcd
    #[arg(
        long,
        env = "ETCD_USERNAME",
        value_name = "NAME",
        requires = "etcd_password_file"
    )]
    pub etcd_username: Option<String>,
    /// File with the password at etcd
    #[arg(
        long,
        env = "ETCD_PASSWORD_FILE",
        value_name = "FILE",
        requires = "etcd_username"
    )]
    pub etcd_password_file: Option<PathBuf>,
    /// PEM file of the authorities that sign etcd's certificates; makes every endpoint https
    #[arg(long, env = "ETCD_CA", value_name = "FILE")]
    pub etcd_ca: Option<PathBuf>,
    /// PEM file of our certificate for etcd
    #[arg(
        long,
        env = "ETCD_CERT",
        value_name = "FILE",
        requires = "etcd_key",
        requires = "etcd_ca"
    )]
    pub etcd_cert: Option<PathBuf>,
    /// PEM file of our certificate's private key
    #[arg(long, env = "ETCD_KEY", value_name = "FILE", requires = "etcd_cert")]
    pub etcd_key: Option<PathBuf>,
    /// How long etcd lists a process that gives no sign of life, in seconds
    #[arg(
        long,
        env = "ETCD_LEASE_TTL",
        value_name = "SECONDS",
        default_value_t = 10
    )]
    pub etcd_lease_ttl: u64,
    /// How requests travel: memory (this process alone), tcp or nats
    /// [default: between processes nats where --nats-server names servers, else tcp; memory in one]
    #[arg(long, env = "GENSET_REQUEST_PLANE", value_name = "PLANE")]
    pub request_plane: Option<RequestPlaneKind>,
    /// Servers of the nats request plane, as nats://host:4222 [default: nats://127.0.0.1:4222 with --request-plane nats]
    #[arg(long, env = "NATS_SERVER", value_delimiter = ',', value_name = "URLS")]
    pub nats_server: Vec<String>,
    /// Who this process is at NATS, and which servers it trusts.
    #[command(flatten)]
    pub nats_login: NatsLoginArgs,
    /// Address the tcp request plane listens on
    #[arg(long, env = "GENSET_WIRE_HOST", default_value_t = IpAddr::V4(Ipv4Addr::LOCALHOST))]
    pub wire_host: IpAddr,
    /// Port the tcp request plane listens on; 0 for any free one
    #[arg(long, env = "GENSET_WIRE_PORT", default_value_t = 0)]
    pub wire_port: u16,
    /// Host at which other processes reach this one [default: the address listened on]
    #[arg(long, env = "GENSET_ADVERTISE_HOST", value_name = "HOST")]
    pub advertise_host: Option<String>,
    /// File with the secret of the fleet: processes without it cannot call workers. It proves who began a connection; what
    /// follows is neither encrypted nor authenticated, so keep to a trusted network or add --wire-tls-ca
    #[arg(long, env = "GENSET_WIRE_SECRET_FILE", value_name = "FILE")]
    pub wire_secret_file: Option<PathBuf>,
    /// File with the secret for controlling workers (sleep, weights, adapters). Without one, only workers that listen on loopback
    /// can be controlled
    #[arg(long, env = "GENSET_CONTROL_SECRET_FILE", value_name = "FILE")]
    pub control_secret_file: Option<PathBuf>,
    /// Bytes that requests and unread answers of other processes may take in memory
    #[arg(long, env = "GENSET_WIRE_MEMORY_BUDGET", value_name = "BYTES", value_parser = byte_count::<usize>,
        default_value = in_bytes(WireConfig::default().max_memory_bytes))]
    pub wire_memory_budget: usize,
    /// Bytes of that for one connection [default: half]
    #[arg(
        long,
        env = "GENSET_WIRE_CONNECTION_MEMORY_BUDGET",
        value_name = "BYTES",
        value_parser = byte_count::<usize>
    )]
    pub wire_connection_memory_budget: Option<usize>,
    /// TLS on the tcp request plane.
    #[command(flatten)]
    pub wire_tls: WireTlsArgs,
    /// Silence after which another process counts as dead, in seconds
    #[arg(
        long,
        env = "GENSET_PEER_TIMEOUT",
        value_name = "SECONDS",
        default_value = "1.5",
        value_parser = seconds
    )]
    pub peer_timeout: Duration,
}

/// Parses a flag's value in seconds.
///
/// # Errors
/// The text is not such a number; the message says what is expected.
pub fn seconds(text: &str) -> Result<Duration, String> {
    duration(text, "must be between 0 and 1e9 seconds")
}

/// Parses a flag's value in seconds, greater than 0.
///
/// # Errors
/// The text is not such a number; the message says what is expected.
pub fn positive_seconds(text: &str) -> Result<Duration, String> {
    let problem = "must be more than 0 and at most 1e9 seconds";
    let value = duration(text, problem)?;
    (!value.is_zero()).then_some(value).ok_or(problem.into())
}

fn duration(text: &str, problem: &str) -> Result<Duration, String> {
    let value: f64 = text
        .parse()
        .map_err(|_| format!("{text:?} is not a number of seconds"))?;
    let value = (0.0..=1e9).contains(&value).then_some(value);
    value
        .map(Duration::from_secs_f64)
        .ok_or_else(|| problem.into())
}

/// Formats a time as a flag's value in seconds.
#[must_use]
pub fn in_seconds(time: Duration) -> String {
    time.as_secs_f64().to_string()
}

/// Parses a flag's value in bytes: a number, or one with a unit such as `512MiB`.
///
/// # Errors
/// The text is not such a number, or it exceeds `N`; the message says what is expected.
pub fn byte_count<N: TryFrom<u64>>(text: &str) -> Result<N, String> {
    let size: ByteSize = text.parse()?;
    N::try_from(size.0).map_err(|_| format!("{text:?} is too large"))
}

/// Formats a number of bytes as a flag's value, with the largest unit that divides it.
#[must_use]
pub fn in_bytes<N: TryInto<u64>>(bytes: N) -> String {
    ByteSize(bytes.try_into().unwrap_or(u64::MAX)).to_string()
}

impl NetworkArgs {
    /// The address of this machine that others receive; by default the address listened on.
    ///
    /// # Errors
    /// `InvalidArgument` if the process listens on every address and none is found that others can reach.
    pub fn own_address(&self) -> Result<IpAddr, EngineError> {
        let told = self.advertise_host.as_deref();
        match told.and_then(|host| host.trim_matches(['[', ']']).parse().ok()) {
            Some(address) => Ok(address),
            None if self.wire_host.is_unspecified() => own_address(self.wire_host),
            None => Ok(self.wire_host),
        }
    }

    /// Builds the runtime that the flags select.
    ///
    /// # Errors
    /// `InvalidArgument` or `Unsupported`, naming the flag; `Unavailable` if a directory or server cannot be reached.
    pub async fn runtime(&self, reach: Reach) -> Result<Runtime, EngineError> {
        let kinds = self.kinds(reach)?;
        let metrics = MetricsRegistry::default();
        let vital = VitalRuntime::start()?;
        let discovery = self.discovery(kinds.0, &vital).await?;
        let plane = self.plane(kinds, &vital, &metrics)?;
        if kinds.0 != DiscoveryBackend::Memory {
            tracing::info!("{}", self.meeting_place(kinds));
        }
        Ok(Runtime::on(Some(vital), discovery, plane, metrics))
    }

    async fn discovery(
        &self,
        backend: DiscoveryBackend,
        vital: &VitalRuntime,
    ) -> Result<Arc<dyn Discovery>, EngineError> {
        match backend {
            DiscoveryBackend::Memory => Ok(Arc::new(MemoryDiscovery::new())),
            DiscoveryBackend::File => {
                let args = self.clone();
                let opened = tokio::task::spawn_blocking(move || args.file_discovery()).await;
                let discovery = opened.map_err(|error| {
                    EngineError::internal("opening the discovery directory failed")
                        .with_source(error)
                })??;
                Ok(Arc::new(discovery))
            }
            DiscoveryBackend::Etcd => self.etcd_discovery(vital).await,
        }
    }

    /// The directory of file discovery.
    fn directory(&self) -> PathBuf {
        self.discovery_path.clone().unwrap_or_else(|| {
            let runtime_dir = std::env::var_os("XDG_RUNTIME_DIR");
            default_directory(runtime_dir.as_deref(), &std::env::temp_dir())
        })
    }

    fn file_discovery(&self) -> Result<FileDiscovery, EngineError> {
        let access = if self.discovery_shared {
            DirectoryAccess::Shared
        } else {
            DirectoryAccess::Private
        };
        let config = FileDiscoveryConfig {
            access,
            ..FileDiscoveryConfig::default()
        };
        FileDiscovery::open(self.directory(), config).map_err(|error| match error.at().is_some() {
            true => error.with_at("--discovery-path"),
            false => error,
        })
    }

    #[cfg(not(feature = "etcd"))]
    #[expect(clippy::unused_async, reason = "with the feature it waits")]
    async fn etcd_discovery(
        &self,
        _vital: &VitalRuntime,
    ) -> Result<Arc<dyn Discovery>, EngineError> {
        Err(absent("--discovery-backend", "etcd", "file"))
    }

    #[cfg(feature = "etcd")]
    async fn etcd_discovery(
        &self,
        vital: &VitalRuntime,
    ) -> Result<Arc<dyn Discovery>, EngineError> {
        use crate::discovery::VitalDiscovery;
        use crate::discovery::{EtcdConfig, EtcdCredentials, EtcdDiscovery, EtcdTls};
        let credentials = match (&self.etcd_username, &self.etcd_password_file) {
            (Some(user), Some(file)) => Some(EtcdCredentials {
                user: user.clone(),
                password: text_of_file("--etcd-password-file", file)?
                    .trim()
                    .to_owned(),
            }),
            (_, _) => None,
        };
        let identity = identity_of(
            ("--etcd-cert", &self.etcd_cert),
            ("--etcd-key", &self.etcd_key),
        )?;
        let tls = match &self.etcd_ca {
            Some(authorities) => Some(EtcdTls {
                ca_pem: text_of_file("--etcd-ca", authorities)?,
                identity,
                server_name: None,
            }),
            None => None,
        };
        let config = EtcdConfig {
            endpoints: self.etcd_servers(),
            credentials,
            tls,
            lease_ttl: Duration::from_secs(self.etcd_lease_ttl),
            ..EtcdConfig::default()
        };
        // The client's tasks run on the runtime that creates it.
        let etcd = vital.run(EtcdDiscovery::connect(config)).await;
        let etcd = etcd.map_err(flags::named_by_flag)?;
        Ok(Arc::new(VitalDiscovery::new(Arc::new(etcd), vital.clone())))
    }

    fn plane(
        &self,
        kinds: (DiscoveryBackend, RequestPlaneKind),
        vital: &VitalRuntime,
        metrics: &MetricsRegistry,
    ) -> Result<Arc<dyn RequestPlane>, EngineError> {
        match kinds.1 {
            RequestPlaneKind::Memory => Ok(Arc::new(MemoryPlane::new())),
            RequestPlaneKind::Tcp => {
                let plane = self.tcp_plane(kinds.0, vital, metrics)?;
                Ok(Arc::new(plane))
            }
            RequestPlaneKind::Nats => {
                self.wire_tls.refuse_on_nats()?;
                self.nats_plane(kinds.0, vital, metrics)
            }
        }
    }

    fn tcp_plane(
        &self,
        backend: DiscoveryBackend,
        vital: &VitalRuntime,
        metrics: &MetricsRegistry,
    ) -> Result<WirePlane, EngineError> {
        let tcp = TcpConfig {
            listen: SocketAddr::new(self.wire_host, self.wire_port),
            advertised_host: self.advertise_host.clone(),
            tls: self.wire_tls.tls()?,
            has_distant_callers: self.spans_machines(backend),
        };
        WirePlane::tcp_on(vital.clone(), tcp, self.wire_config()?, metrics)
    }

    /// The secret for changing workers, if the flags name one.
    ///
    /// # Errors
    /// `InvalidArgument`, naming the flag.
    pub fn control_secret(&self) -> Result<Option<WireSecret>, EngineError> {
        let file = self.control_secret_file.as_deref();
        secret_of("--control-secret-file", file)
    }

    fn wire_config(&self) -> Result<WireConfig, EngineError> {
        let secret = secret_of("--wire-secret-file", self.wire_secret_file.as_deref())?;
        let control_secret = self.control_secret()?;
        let memory = self.wire_memory_budget;
        let peer_timeout = self.peer_timeout;
        if !(Duration::from_millis(10)..=Duration::from_secs(3600)).contains(&peer_timeout) {
            return Err(EngineError::invalid_argument(
                "--peer-timeout",
                "must be between 0.01 and 3600 seconds",
            ));
        }
        let config = WireConfig {
            peer_timeout,
            ping_interval: peer_timeout / 3,
            secret,
            control_secret,
            max_memory_bytes: memory,
            max_connection_memory_bytes: self.wire_connection_memory_budget.unwrap_or(memory / 2),
            ..WireConfig::default()
        };
        config.validate()?;
        Ok(config)
    }

    #[cfg(feature = "nats")]
    fn nats_plane(
        &self,
        backend: DiscoveryBackend,
        vital: &VitalRuntime,
        metrics: &MetricsRegistry,
    ) -> Result<Arc<dyn RequestPlane>, EngineError> {
        let config = NatsConfig {
            servers: self.nats_servers(),
            credentials: self.nats_login.credentials()?,
            tls: self.nats_login.tls()?,
            ..NatsConfig::default()
        };
        let plane = WirePlane::nats_on(vital.clone(), config, self.wire_config()?, metrics)
            .map_err(flags::named_by_flag)?;
        if self.request_plane.is_some() {
            return Ok(Arc::new(plane));
        }
        let tcp_metrics = metrics.labelled("request_plane", "tcp");
        let tcp = self.tcp_plane(backend, vital, &tcp_metrics)?;
        Ok(Arc::new(MixedPlane {
            own: Arc::new(plane),
            other: Arc::new(tcp),
            other_name: "tcp",
            _other_metrics: tcp_metrics,
        }))
    }

    #[cfg(not(feature = "nats"))]
    fn nats_plane(
        &self,
        _backend: DiscoveryBackend,
        _vital: &VitalRuntime,
        _metrics: &MetricsRegistry,
    ) -> Result<Arc<dyn RequestPlane>, EngineError> {
        Err(absent("--request-plane", "nats", "tcp"))
    }
}

/// A backend that was not compiled in.
#[cfg_attr(
    all(feature = "etcd", feature = "nats"),
    expect(dead_code, reason = "nothing is absent from this build")
)]
fn absent(flag: &str, value: &str, other: &str) -> EngineError {
    let problem =
        format!("this build has no {value}; build it with --features {value}, or use {other}");
    EngineError::unsupported(flag, problem)
}

/// The default directory of a user's processes: under the user's runtime directory, otherwise under `temp`. A runtime directory
/// that is not absolute is ignored, as its specification says.
fn default_directory(runtime_dir: Option<&OsStr>, temp: &Path) -> PathBuf {
    match runtime_dir.map(Path::new) {
        Some(runtime_dir) if runtime_dir.is_absolute() => runtime_dir.join("genset/discovery"),
        _ => temp.join(format!("genset-{}", rustix::process::geteuid().as_raw())),
    }
}

fn secret_of(flag: &str, path: Option<&Path>) -> Result<Option<WireSecret>, EngineError> {
    let Some(path) = path else { return Ok(None) };
    let text = text_of_file(flag, path)?;
    let secret = WireSecret::try_new(text.as_bytes()).map_err(|error| {
        let problem = format!("{}: {}", path.display(), error.message());
        EngineError::invalid_argument(flag, problem)
    })?;
    Ok(Some(secret))
}

/// The certificate and the key in the files that two flags name.
fn identity_of(
    certificate: (&str, &Option<PathBuf>),
    key: (&str, &Option<PathBuf>),
) -> Result<Option<TlsIdentity>, EngineError> {
    let ((certificate_flag, Some(certificate)), (key_flag, Some(key))) = (certificate, key) else {
        return Ok(None);
    };
    Ok(Some(TlsIdentity {
        certificate_pem: text_of_file(certificate_flag, certificate)?,
        key_pem: text_of_file(key_flag, key)?,
    }))
}

/// The largest file of a secret, a password, credentials, certificates or a key, in bytes.
const MAX_FILE_BYTES: u64 = 4 << 20;

/// The text of the file that a flag names: a secret, a password, credentials, certificates or a key.
///
/// # Errors
/// `InvalidArgument` at the flag, naming the file, if it cannot be read or has more than 4 MiB.
pub fn text_of_file(flag: &str, path: &Path) -> Result<String, EngineError> {
    read_text(path, MAX_FILE_BYTES).map_err(|error| {
        EngineError::invalid_argument(flag, format!("{}: {error}", path.display()))
    })
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Alone {
        #[command(flatten)]
        network: NetworkArgs,
    }

    pub(super) fn args(words: &[&str]) -> NetworkArgs {
        Alone::parse_from(["test"].iter().chain(words)).network
    }

    #[test]
    fn the_default_directory_is_the_users_own() {
        let of = |runtime_dir: Option<&str>| {
            let runtime_dir = runtime_dir.map(OsStr::new);
            default_directory(runtime_dir, Path::new("/tmp"))
        };
        let own = of(Some("/run/user/7"));
        assert_eq!(own, Path::new("/run/user/7/genset/discovery"));
        let uid = rustix::process::geteuid().as_raw();
        for none in [None, Some(""), Some("run/user")] {
            assert_eq!(of(none), PathBuf::from(format!("/tmp/genset-{uid}")));
        }
    }

    #[test]
    fn a_file_is_read_up_to_its_limit() {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(MAX_FILE_BYTES).unwrap();
        assert!(text_of_file("--wire-secret-file", file.path()).is_ok());
        file.as_file().set_len(MAX_FILE_BYTES + 1).unwrap();
        let error = text_of_file("--wire-secret-file", file.path()).unwrap_err();
        assert!(error.to_string().contains("larger than"), "{error}");
    }

    #[test]
    fn seconds_are_read_as_they_are_shown() {
        for text in ["60", "0.5", "1000000000"] {
            let read = positive_seconds(text);
            assert_eq!(seconds(text), read);
            assert_eq!(read.map(in_seconds).as_deref(), Ok(text));
        }
        assert_eq!(seconds("0"), Ok(Duration::ZERO));
        for bad in ["0", "-1", "1e-12", "1.1e9", "inf", "nan", "1s", ""] {
            assert!(positive_seconds(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn bytes_are_read_as_they_are_shown() {
        for (text, bytes) in [("0", 0_u32), ("1001", 1001), ("64KiB", 64 << 10)] {
            assert_eq!(byte_count(text), Ok(bytes));
            assert_eq!(in_bytes(bytes), text);
        }
        assert_eq!(byte_count("65536"), Ok(64_u32 << 10));
        for bad in ["4GiB", "-1", "1.5", "64kb", ""] {
            assert!(byte_count::<u32>(bad).is_err(), "{bad}");
        }
    }

    #[tokio::test]
    async fn a_bad_secret_file_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("secret");
        std::fs::write(&path, "short").unwrap();
        let flag = format!("--wire-secret-file={}", path.display());
        let error = args(&[&flag, "--discovery-backend=memory", "--request-plane=tcp"])
            .runtime(Reach::ThisProcess)
            .await
            .unwrap_err();
        assert!(error.to_string().contains("--wire-secret-file"), "{error}");
    }

    #[cfg(all(feature = "etcd", feature = "nats"))]
    #[tokio::test]
    async fn a_wrong_setting_of_a_server_is_named_by_its_flag() {
        let folder = tempfile::tempdir().unwrap();
        let directory = format!("--discovery-path={}", folder.path().display());
        let cases: [(&[&str], &str); 2] = [
            (&["--etcd-endpoints=https://a"], "--etcd-ca"),
            (
                &[directory.as_str(), "--nats-server=nats://ann:hunter2@a"],
                "--nats-server",
            ),
        ];
        for (words, flag) in cases {
            let runtime = args(words).runtime(Reach::OtherProcesses).await;
            let error = runtime.unwrap_err();
            assert_eq!(error.at().map(|at| at.name()), Some(flag), "{error}");
        }
    }
}
