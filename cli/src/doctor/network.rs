//! Whether discovery and the broker are reachable, and how fast, and whether a worker could be listed.

use std::sync::Arc;
use std::time::Duration;

use futures_util::stream;
use genset_backend_common::{EngineError, ErrorKind, RequestContext, async_trait};
use genset_runtime::discovery::all_instances;
use genset_runtime::plane::{Handler, ResponseStream};
use genset_runtime::{
    DiscoveryBackend, EndpointName, ModelDirectory, NetworkArgs, Reach, RequestPlaneKind, Runtime,
};
use tokio::io::{AsyncBufReadExt as _, BufReader};
use tokio::net::TcpStream;
use tokio::time::{Instant, timeout};

use super::finding::{Finding, Level};
use crate::fleet;

/// The time limit for a server's answer.
const PATIENCE: Duration = Duration::from_secs(5);

/// How long entries may take to arrive after discovery has answered.
const LIST_PATIENCE: Duration = Duration::from_millis(500);

/// With slower answers, workers may be considered dead.
const SLOW: Duration = Duration::from_millis(250);

pub(super) async fn look(args: &NetworkArgs) -> Vec<Finding> {
    let (backend, plane) = match args.kinds(Reach::OtherProcesses) {
        Ok(kinds) => kinds,
        Err(_) if args.discovery_backend == Some(DiscoveryBackend::Memory) => {
            let what = "discovery in one process alone, as --discovery-backend says";
            return vec![Finding::ok(what)];
        }
        Err(error) => return vec![unusable("discovery and request plane", &error, "")],
    };
    let mut findings = discovery(args, backend).await;
    if plane == RequestPlaneKind::Nats {
        let mut servers = Vec::new();
        for server in args.nats_servers() {
            servers.push(nats(&server).await);
        }
        let is_there = servers.iter().any(|server| server.level == Level::Ok);
        findings.extend(servers);
        if is_there {
            findings.extend(nats_login(args).await);
        }
    }
    findings
}

async fn discovery(args: &NetworkArgs, backend: DiscoveryBackend) -> Vec<Finding> {
    let (name, mend) = match backend {
        DiscoveryBackend::Etcd => {
            // A password in a URL is refused, and not shown.
            let servers = args.etcd_servers();
            let servers = { servers.iter() }.filter_map(|server| server.rsplit('@').next());
            let servers: Vec<&str> = servers.collect();
            (
                format!("etcd at {}", servers.join(", ")),
                "start etcd, or name its servers: --etcd-endpoints http://HOST:2379",
            )
        }
        DiscoveryBackend::File | DiscoveryBackend::Memory => {
            let path = args.discovery_path.as_ref();
            let shown = path.map_or("the user's own directory".into(), |path| {
                path.display().to_string()
            });
            (
                format!("discovery in {shown}"),
                "name a directory of yours: --discovery-path DIR",
            )
        }
    };
    let began = Instant::now();
    let runtime = match timeout(PATIENCE, args.runtime(Reach::OtherProcesses)).await {
        Ok(Ok(runtime)) => runtime,
        Ok(Err(error)) if is_of_the_plane(&error) => {
            return vec![unusable("the request plane", &error, mend)];
        }
        Ok(Err(error)) => return vec![unusable(&name, &error, mend)],
        Err(_) => return vec![silent(&name, mend)],
    };
    let opened = began.elapsed();
    let listed = timeout(PATIENCE, runtime.discovery().get(all_instances())).await;
    let took = match backend {
        // It connects on the first request.
        DiscoveryBackend::Etcd => began.elapsed(),
        // It answered when it was opened; a listing waits for the heartbeats of others.
        DiscoveryBackend::File | DiscoveryBackend::Memory => opened,
    };
    let names = match &listed {
        Ok(Ok(entries)) if !entries.is_empty() => models_of(&runtime).await,
        Ok(_) | Err(_) => Vec::new(),
    };
    let workers = match names.is_empty() {
        true => Vec::new(),
        false => workers(&runtime).await,
    };
    let unlistable = match &listed {
        Ok(Ok(_)) => unlistable(&name, &runtime).await,
        Ok(Err(_)) | Err(_) => None,
    };
    runtime.shutdown().await;
    match listed {
        Ok(Ok(_)) => {}
        Ok(Err(error)) => return vec![unusable(&name, &error, mend)],
        Err(_) => return vec![silent(&name, mend)],
    }
    let served = match names.len() {
        0 => "no model is served".into(),
        count => format!("{count} served: {}", names.join(", ")),
    };
    let what = format!("{name} answers in {} ms; {served}", took.as_millis());
    let faster = match backend {
        DiscoveryBackend::Etcd => "run etcd nearer, or raise --etcd-lease-ttl",
        DiscoveryBackend::File | DiscoveryBackend::Memory => {
            "name a directory on a faster disk: --discovery-path DIR"
        }
    };
    let discovery = match took > SLOW {
        true => Finding::warning(what, faster),
        false => Finding::ok(what),
    };
    let unlistable: Vec<Finding> = unlistable.into_iter().collect();
    [vec![discovery], unlistable, workers].concat()
}

/// The finding if a worker could not be listed, as on a full disk: takes a lease, and gives it back.
async fn unlistable(name: &str, runtime: &Runtime) -> Option<Finding> {
    let name = format!("no new worker can be listed: {name}");
    let mend = "make room there, or let this user write there; what is listed goes on";
    match timeout(PATIENCE, runtime.discovery().lease()).await {
        Ok(Ok(_lease)) => None,
        Ok(Err(error)) => Some(unusable(&name, &error, mend)),
        Err(_) => Some(silent(&name, mend)),
    }
}

fn silent(name: &str, mend: &str) -> Finding {
    Finding::problem(format!("{name} does not answer"), mend)
}

/// Whether the workers of models answer the request that `genset top` sends.
async fn workers(runtime: &Runtime) -> Vec<Finding> {
    let Ok((count, reasons)) = fleet::unanswered(runtime).await else {
        return Vec::new();
    };
    if reasons.is_empty() {
        let what = format!("workers that answer: {count} of {count}");
        return vec![Finding::ok(what)];
    }
    let finding = |(reason, silent): (String, Vec<String>)| {
        let what = format!(
            "workers that give no answer: {} of {count}; {reason}",
            silent.len()
        );
        let mend = "a worker whose connection is refused has died, and is listed until its lease ends; for others give the flags or \
                    variables of the workers, as --wire-secret-file; `genset top --once` names those workers";
        Finding::problem(what, mend)
    };
    reasons.into_iter().map(finding).collect()
}

/// Whether the error is of a setting of the request plane: a runtime has both.
fn is_of_the_plane(error: &EngineError) -> bool {
    let discoverys = ["--discovery", "--etcd", "etcd."];
    let is_discoverys = |name: &str| discoverys.iter().any(|prefix| name.starts_with(prefix));
    error.at().is_some_and(|at| !is_discoverys(at.name()))
}

/// The finding for an error of discovery or of the request plane.
fn unusable(name: &str, error: &EngineError, mend: &str) -> Finding {
    let mend = match error.kind() == ErrorKind::InvalidArgument {
        true => "mend the setting that the line names",
        false => mend,
    };
    Finding::problem(format!("{name}: {error}"), mend)
}

/// The served models, if anything is listed: otherwise nothing would ever change.
async fn models_of(runtime: &Runtime) -> Vec<String> {
    let directory = ModelDirectory::follow(runtime);
    let mut models = directory.subscribe();
    let _changed = timeout(LIST_PATIENCE, models.changed()).await;
    models.borrow().keys().cloned().collect()
}

/// Checks a NATS server, which identifies itself as soon as a client connects.
async fn nats(server: &str) -> Finding {
    let mend = "start nats-server, or name it: --nats-server nats://HOST:4222";
    let address = address_of(server);
    let began = Instant::now();
    let greeted = async {
        let connection = TcpStream::connect(&address).await?;
        let mut line = String::new();
        let mut limited = tokio::io::AsyncReadExt::take(BufReader::new(connection), 64 << 10);
        limited.read_line(&mut line).await?;
        Ok::<_, std::io::Error>(line)
    };
    match timeout(PATIENCE, greeted).await {
        Ok(Ok(line)) if line.starts_with("INFO ") => Finding::ok(format!(
            "NATS at {address} answers in {} ms",
            began.elapsed().as_millis()
        )),
        Ok(Ok(_)) => Finding::problem(format!("what listens at {address} is no NATS server"), mend),
        Ok(Err(error)) => Finding::problem(format!("NATS at {address}: {error}"), mend),
        Err(_) => Finding::problem(format!("NATS at {address} does not answer"), mend),
    }
}

/// Whether a worker could be called over NATS: whether the servers let this process in, and let it publish and subscribe.
/// `None` where a setting is wrong, which the finding about discovery says.
async fn nats_login(args: &NetworkArgs) -> Option<Finding> {
    let opened = timeout(PATIENCE, args.runtime(Reach::OtherProcesses));
    let runtime = opened.await.ok()?.ok()?;
    let served = timeout(PATIENCE, served_unlisted(&runtime)).await;
    runtime.shutdown().await;
    let name = "no worker can be called over NATS";
    let mend = "the user needs the right to publish and to subscribe to genset.v1.wire.>";
    Some(match served {
        Ok(Ok(())) => Finding::ok("NATS lets this process in, and lets it publish and subscribe"),
        Ok(Err(error)) => unusable(name, &error, mend),
        Err(_) => silent(name, mend),
    })
}

/// Serves what nobody is told of, for a moment.
async fn served_unlisted(runtime: &Runtime) -> Result<(), EngineError> {
    let name = EndpointName::try_new("genset", "doctor", "login")?;
    let handler: Arc<dyn Handler<(), ()>> = Arc::new(Nothing);
    runtime.endpoint(name).serve(handler).await.map(drop)
}

/// Answers with nothing.
struct Nothing;

#[async_trait]
impl Handler<(), ()> for Nothing {
    async fn handle(
        &self,
        (): (),
        _ctx: RequestContext,
    ) -> Result<ResponseStream<()>, EngineError> {
        Ok(Box::pin(stream::empty()))
    }
}

/// The host and port of a NATS server's URL.
fn address_of(server: &str) -> String {
    let host = server.split_once("://").map_or(server, |(_, host)| host);
    let host = host.rsplit_once('@').map_or(host, |(_, host)| host);
    let host = host.trim_end_matches('/');
    // An address of IPv6 stands in brackets, and has colons itself.
    let has_port = (host.rsplit_once(':')).is_some_and(|(_, port)| !port.ends_with(']'));
    match has_port {
        true => host.to_owned(),
        false => format!("{host}:4222"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_without_a_port_has_the_usual_one() {
        for (server, expected) in [
            ("nats://a", "a:4222"),
            ("a:1/", "a:1"),
            ("tls://me:secret@a:1", "a:1"),
            ("nats://[::1]", "[::1]:4222"),
            ("nats://[::1]:1", "[::1]:1"),
        ] {
            assert_eq!(address_of(server), expected);
        }
    }
}
