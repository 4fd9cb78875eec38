//! `cargo xtask attack`: runs known attacks on a built binary, each on its own server. Measures what each attack costs the server
//! and what other clients see.
//!
//! All traffic stays on loopback and is bounded in number, bytes and time. A server that uses more memory than `--max-memory-mb`
//! is killed, so that the machine stays usable. [`Promises`] holds the limits that figures are judged by;
//! `docs/guide/operations.md` has the table of a release build.
#![expect(
    clippy::disallowed_types,
    clippy::disallowed_methods,
    reason = "real processes are measured, in real time"
)]

mod attacks;
mod bystanders;
mod figures;
mod wire;

use std::fs;
use std::io::Write as _;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use clap::Args;

use self::attacks::ATTACKS;
use self::bystanders::{Bystanders, Prober};
use self::figures::{Promises, Row, table};
use crate::repo::Repo;
use crate::served::{Port, Served, cpu_seconds, forget_peak, peak_bytes, resident_bytes};

// No doc comment: it would replace the help of the task.
#[derive(Debug, Args)]
pub(crate) struct AttackOptions {
    /// The binary [default: target/release/genset]
    #[arg(long)]
    pub(crate) binary: Option<PathBuf>,
    /// Print JSON instead of a table
    #[arg(long)]
    pub(crate) json: bool,
    /// Kill a server that takes more memory than this
    #[arg(long, default_value_t = 4096, value_name = "MIB")]
    pub(crate) max_memory_mb: u64,
    /// The longest that `/live` may take
    #[arg(long, default_value_t = 500, value_name = "MS")]
    pub(crate) max_stall_ms: u64,
    /// Attacks whose names begin so; all without one
    pub(crate) attacks: Vec<String>,
}

/// What attacks need.
#[derive(Debug)]
struct Bench {
    binary: PathBuf,
    /// A folder of this run, for the files of servers.
    folder: PathBuf,
    max_memory_bytes: u64,
}

/// One of the attacks.
struct Attack {
    /// Starts with the number of the finding that it shows, as in the review; variants have letters.
    name: &'static str,
    what: &'static str,
    run: fn(&Bench) -> anyhow::Result<Row>,
}

/// Runs the attacks and prints a table.
///
/// # Errors
/// There is no binary, no attack matches a name, or a promise is broken.
pub(crate) fn run(repo: &Repo, options: &AttackOptions) -> anyhow::Result<()> {
    let release = || repo.target().join("release/genset");
    let binary = options.binary.clone().unwrap_or_else(release);
    let binary = fs::canonicalize(&binary)
        .with_context(|| format!("there is no {}: cargo build --release", binary.display()))?;
    let chosen = chosen(&options.attacks)?;
    let bench = Bench {
        binary,
        folder: repo.target().join(format!("attack-{}", std::process::id())),
        max_memory_bytes: options.max_memory_mb << 20,
    };
    let promises = Promises {
        max_stall: Duration::from_millis(options.max_stall_ms),
    };
    let mut rows = Vec::new();
    for attack in chosen {
        eprintln!("{}: {}", attack.name, attack.what);
        private_folder(&bench.folder)?;
        let ran = (attack.run)(&bench);
        drop(fs::remove_dir_all(&bench.folder));
        let mut row = ran.unwrap_or_else(|error| {
            let problem = Some(format!("cannot be run: {error:#}"));
            Row::of(Deed {
                problem,
                ..Deed::default()
            })
        });
        row.name = attack.name;
        row.what = attack.what;
        row.judge(&promises);
        eprintln!("{}", row.line());
        rows.push(row);
    }
    let shown = if options.json {
        let rows: Vec<_> = rows.iter().map(Row::to_json).collect();
        format!("{:#}\n", serde_json::Value::from(rows))
    } else {
        table(&rows)
    };
    std::io::stdout().write_all(shown.as_bytes())?;
    let broken = rows.iter().filter(|row| !row.broken.is_empty()).count();
    if broken > 0 {
        bail!("{broken} of {} attacks broke a promise", rows.len());
    }
    Ok(())
}

fn chosen(only: &[String]) -> anyhow::Result<Vec<&'static Attack>> {
    let unknown = |prefix: &&String| {
        !ATTACKS
            .iter()
            .any(|it| it.name.starts_with(prefix.as_str()))
    };
    if let Some(prefix) = only.iter().find(unknown) {
        let names: Vec<&str> = ATTACKS.iter().map(|it| it.name).collect();
        bail!(
            "no attack begins with {prefix:?}; there are {}",
            names.join(", ")
        );
    }
    let is_chosen = |it: &&Attack| {
        only.is_empty()
            || only
                .iter()
                .any(|prefix| it.name.starts_with(prefix.as_str()))
    };
    Ok(ATTACKS.iter().filter(is_chosen).collect())
}

fn private_folder(path: &Path) -> anyhow::Result<()> {
    let mut builder = fs::DirBuilder::new();
    let made = builder.recursive(true).mode(0o700).create(path);
    made.with_context(|| format!("cannot make {}", path.display()))
}

/// The processes of an attack.
#[derive(Debug)]
struct Scene {
    /// The server under attack.
    target: Served,
    /// The server that clients ask: the target, or the frontend in front of it.
    frontend: Option<Served>,
    /// Runs beside the target.
    helper: Option<Served>,
    model: &'static str,
    /// Headers of the bystanders.
    headers: String,
}

impl Scene {
    fn of(target: Served) -> Self {
        Self {
            target,
            frontend: None,
            helper: None,
            model: "tiny-chat",
            headers: String::new(),
        }
    }

    fn http(&self) -> std::net::SocketAddr {
        self.frontend.as_ref().unwrap_or(&self.target).address
    }
}

/// What an attack did.
#[derive(Debug, Default)]
struct Deed {
    /// What was sent, in bytes.
    bytes: u64,
    /// Concurrent requests beyond the first.
    further: u64,
    /// The answers received, one word per request.
    answers: Vec<String>,
    /// A broken promise that is specific to this attack.
    problem: Option<String>,
    note: String,
}

impl Deed {
    fn new(bytes: usize) -> Self {
        Self {
            bytes: bytes as u64,
            ..Self::default()
        }
    }
}

impl Bench {
    /// A server with its engine in the same process.
    fn alone(&self, engine: &str, flags: &[&str]) -> anyhow::Result<Scene> {
        let out = format!("out={engine}");
        let arguments = [&["in=http", &out, "--access-log=false"], flags].concat();
        Ok(Scene::of(Served::start(
            &self.binary,
            Port::Http,
            &arguments,
        )?))
    }

    /// A frontend and a worker with the sample engine, which meet in a folder.
    fn fleet(&self, worker_flags: &[&str]) -> anyhow::Result<(Served, Served)> {
        let folder = self.folder.join("discovery");
        private_folder(&folder)?;
        let folder = folder.to_string_lossy().into_owned();
        let place = ["--discovery-path", &folder];
        let worker = [&["in=dyn", "out=sample"], &place[..], worker_flags].concat();
        let worker = Served::start(&self.binary, Port::Status, &worker)?;
        let frontend = [&["in=http", "out=dyn", "--access-log=false"], &place[..]].concat();
        let frontend = Served::start(&self.binary, Port::Http, &frontend)?;
        Ok((frontend, worker))
    }

    /// Performs the attack while bystanders read streams and a prober asks `/live`.
    fn measure(&self, scene: &mut Scene, deed: impl FnOnce(&Scene) -> Deed) -> Row {
        let process = scene.target.id();
        forget_peak(process);
        let before = resident_bytes(process);
        let cpu_before = cpu_seconds(process);
        let (stop, watch_ends) = (AtomicBool::new(false), AtomicBool::new(false));
        let highest = AtomicU64::new(before);
        let prober = Prober::new(scene.http());
        let bystanders = Bystanders::new(scene.http(), scene.model, &scene.headers);
        let begun = Instant::now();
        let (done, stall, streams) = thread::scope(|scope| {
            scope.spawn(|| self.watch(process, &highest, &watch_ends));
            let prober = scope.spawn(|| prober.run(&watch_ends));
            let bystanders = scope.spawn(|| bystanders.run(&stop));
            // By now every bystander has begun a stream.
            thread::sleep(Duration::from_millis(500));
            let done = deed(scene);
            thread::sleep(Duration::from_millis(300));
            stop.store(true, Ordering::Relaxed);
            let streams = bystanders.join().unwrap_or_default();
            watch_ends.store(true, Ordering::Relaxed);
            (done, prober.join().unwrap_or_default(), streams)
        });
        let highest = highest.into_inner().max(peak_bytes(process));
        Row {
            deed: done,
            rss_before: before,
            rss_peak: highest,
            cpu_seconds: (cpu_seconds(process) - cpu_before).max(0.0),
            seconds: begun.elapsed().as_secs_f64(),
            stall: Some(stall),
            streams: Some(streams),
            is_dead: !scene.target.is_alive(),
            was_stopped: highest > self.max_memory_bytes,
            ..Row::default()
        }
    }

    /// Watches the process's memory, and kills the process when it exceeds what this machine can spare.
    fn watch(&self, process: u32, highest: &AtomicU64, ends: &AtomicBool) {
        while !ends.load(Ordering::Relaxed) {
            let bytes = resident_bytes(process);
            highest.fetch_max(bytes, Ordering::Relaxed);
            if bytes > self.max_memory_bytes {
                kill(process);
                return;
            }
            thread::sleep(Duration::from_millis(20));
        }
    }
}

/// Sends SIGKILL to one of our processes.
fn kill(process: u32) {
    let process = i32::try_from(process)
        .ok()
        .and_then(rustix::process::Pid::from_raw);
    if let Some(process) = process {
        // A process that has already ended needs no kill.
        let _ = rustix::process::kill_process(process, rustix::process::Signal::KILL);
    }
}
