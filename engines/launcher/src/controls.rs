//! [`Controls`]: the operations that an operator can request from a server: when they are possible, and what is missing if they
//! are not. [`api::controls`](crate::api::controls) makes the calls; the engine passes its own controls to this.
//!
//! A sleeping server accepts requests but does not answer them, or crashes at the first. So the [`Gate`](crate::gate::Gate) is
//! closed before the server sleeps, until it is awake. A server that writes a profile does not answer either, and receives no
//! requests meanwhile.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use genset_backend_common::{
    EngineError, ErrorKind, Role,
    controls::{Adapter, SleepLevel},
    error::At,
};
use serde_json::{Value, json};
use tokio::time::{Instant, sleep};

use crate::adapters::{AtStart, ServedAdapter, Takes};
use crate::api::controls::{Failed, sglang, stop_profile, vllm};
use crate::command::absolute;
use crate::config::LauncherConfig;
use crate::dialect::Dialect;
use crate::kv::Clears;
use crate::ranks::said;
use crate::server::Server;

/// How long active requests may continue before the server sleeps or its weights are replaced, and while it writes a profile.
const GRACE: Duration = Duration::from_secs(30);

/// The pause between two checks whether a server answers again.
const PAUSE: Duration = Duration::from_millis(500);

/// The error of requests meanwhile.
const ASLEEP: &str = "the engine sleeps; send the request elsewhere, or have an operator wake it";
const EXCHANGED: &str = "the engine's weights are being exchanged; send the request again";
const WRITES: &str = "the engine writes a profile; send the request again";

/// Required for vLLM's development routes. Genset does not set it: the routes are open to everybody on the machine, with or
/// without the server's key, and one of them, `/collective_rpc`, calls any method.
const DEV_MODE: &str = "VLLM_SERVER_DEV_MODE=1 in the worker's environment";

/// The variable that lets a vLLM load and unload adapters while it serves. Genset does not set it: the operator decides whether
/// memory is kept for adapters to come.
pub(crate) const LORA_UPDATES: &str = "VLLM_ALLOW_RUNTIME_LORA_UPDATING";

/// The variable for the profile folder in older versions of vLLM.
const VLLM_PROFILES: &str = "VLLM_TORCH_PROFILER_DIR";
/// The variable for SGLang's profile folder.
const SGLANG_PROFILES: &str = "SGLANG_TORCH_PROFILER_DIR";

/// The operations available on the servers of one engine.
#[derive(Debug)]
pub(crate) struct Controls {
    dialect: Dialect,
    role: Role,
    /// Whether a vLLM was started with sleep mode, which it needs to free memory.
    has_sleep_mode: bool,
    /// Where profiles are written; `None` if it has no profiles.
    profiles: Option<String>,
    /// The time limit of operations that move weights or write a profile.
    slow: Duration,
    /// Announces a cleared prefix cache; `None` if no events are published.
    pub(crate) clears: Option<Arc<Clears>>,
    /// Whether the server loads and unloads adapters while it serves.
    pub(crate) takes: Takes,
    pub(crate) at_start: AtStart,
}

/// The state of operations on one server. It ends with the server; a new server is awake.
#[derive(Debug, Default)]
pub(crate) struct Operated {
    /// The level at which it sleeps or may sleep. If that is unknown, it must be woken.
    sleeps: Option<SleepLevel>,
    is_profiling: bool,
}

impl Operated {
    fn check_awake(&self) -> Result<(), EngineError> {
        match self.sleeps {
            None => Ok(()),
            Some(SleepLevel::KvCache | SleepLevel::Weights) => {
                let message = "the engine sleeps; wake it first";
                Err(EngineError::new(ErrorKind::Unavailable, message))
            }
        }
    }
}

impl Controls {
    /// The operations on a server that is started with this config, without KV events and adapters.
    pub(crate) fn new(config: &LauncherConfig, dialect: Dialect, role: Role) -> Self {
        Self {
            dialect,
            role,
            has_sleep_mode: said(config, &["--enable-sleep-mode"]).is_some(),
            profiles: match dialect {
                Dialect::Vllm => vllm_profiles(config),
                Dialect::Sglang => {
                    Some(variable(config, SGLANG_PROFILES).unwrap_or_else(|| "/tmp".to_owned()))
                }
                Dialect::Trtllm | Dialect::LlamaServer | Dialect::LlamaCppPython => None,
            },
            slow: config.start_timeout,
            clears: None,
            takes: Takes::Nothing,
            at_start: AtStart::default(),
        }
    }

    /// Frees the server's memory. Active requests have some time to end; after it they end with an error that lets them
    /// migrate.
    pub(crate) async fn sleep(
        &self,
        server: &Server,
        level: SleepLevel,
    ) -> Result<(), EngineError> {
        let mut operated = server.operated.lock().await;
        let known = self.check_sleep(server, level).await?;
        let before = operated.sleeps;
        match (before, level) {
            (Some(SleepLevel::Weights), _) | (Some(SleepLevel::KvCache), SleepLevel::KvCache) => {
                return Ok(());
            }
            (Some(SleepLevel::KvCache), SleepLevel::Weights) => {}
            (None, SleepLevel::KvCache | SleepLevel::Weights) => {
                check_level(server, known, level).await?;
                self.stop(server, ASLEEP).await?;
            }
        }
        // Set first: whatever the result is, the server may now need to be woken.
        operated.sleeps = Some(level);
        let _busy = server.busy.lock().await;
        let slept = match known {
            Known::Vllm => vllm::sleep(server, level, self.slow).await,
            Known::Sglang => sglang::sleep(server, level, before, self.slow).await,
        };
        let refused = match slept {
            Ok(()) => {
                self.cleared();
                return Ok(());
            }
            Err(Failed::Lost(error)) => return Err(error),
            Err(refused @ Failed::Refused(_)) => refused,
        };
        if before.is_some() {
            operated.sleeps = before;
        } else if self.is_still_awake(server, known).await {
            operated.sleeps = None;
            server.gate.open();
        }
        Err(refused.into())
    }

    /// Whether a server that refused to sleep still serves. A vLLM may have slept partially, so it is woken.
    async fn is_still_awake(&self, server: &Server, known: Known) -> bool {
        match known {
            Known::Vllm => vllm::wake(server, self.slow).await.is_ok(),
            Known::Sglang => true,
        }
    }

    /// Restores what sleep freed, and admits requests again.
    pub(crate) async fn wake(&self, server: &Server) -> Result<(), EngineError> {
        let mut operated = server.operated.lock().await;
        let asleep = operated.sleeps;
        let known = self.check_sleep(server, asleep.unwrap_or_default()).await?;
        if let Some(level) = asleep {
            let _busy = server.busy.lock().await;
            match known {
                Known::Vllm => vllm::wake(server, self.slow).await?,
                Known::Sglang => sglang::wake(server, level, self.slow).await?,
            }
            operated.sleeps = None;
        }
        server.gate.open();
        Ok(())
    }

    /// Drops every reusable KV block.
    pub(crate) async fn clear_prefix_cache(&self, server: &Server) -> Result<(), EngineError> {
        let op = "clear_prefix_cache";
        let operated = server.operated.lock().await;
        let known = self.known(op)?;
        // A sleeping server has no cache left.
        if operated.sleeps.is_none() {
            match known {
                Known::Sglang => sglang::clear(server).await?,
                Known::Vllm => match vllm::clear(server).await {
                    Err(failed) if failed.is_missing() => {
                        return Err(unsupported(format!("{op} needs {DEV_MODE}")));
                    }
                    cleared => cleared?,
                },
            }
        }
        self.cleared();
        Ok(())
    }

    /// Replaces the weights by those that `source` names: a folder, or the fields of SGLang's request. If the result is
    /// unknown, requests are admitted again once the server answers.
    pub(crate) async fn update_weights(
        &self,
        server: &Server,
        source: Value,
    ) -> Result<(), EngineError> {
        let operated = server.operated.lock().await;
        match self.known("update_weights")? {
            Known::Vllm => {
                return Err(unsupported(
                    "vLLM's weights are those of its start; start a worker with the new ones and end this one",
                ));
            }
            Known::Sglang => {}
        }
        let source = match source {
            Value::String(folder) => json!({"model_path": folder}),
            Value::Object(fields) if fields.get("model_path").is_some_and(Value::is_string) => {
                Value::Object(fields)
            }
            Value::Null
            | Value::Bool(_)
            | Value::Number(_)
            | Value::Array(_)
            | Value::Object(_) => {
                let problem = "must be a folder, or an object with model_path";
                return Err(EngineError::invalid_argument(At::other("source"), problem));
            }
        };
        operated.check_awake()?;
        self.stop(server, EXCHANGED).await?;
        // The server clears its cache in any case.
        self.cleared();
        let _busy = server.busy.lock().await;
        let begun = Instant::now();
        let updated = sglang::update_weights(server, &source, self.slow).await;
        if matches!(updated, Err(Failed::Lost(_))) {
            // It may still be busy with it. If it does not answer in time, the health watch handles it.
            while sglang::idle(server).await.is_err()
                && !server.is_over()
                && begun.elapsed() < self.slow
            {
                sleep(PAUSE).await;
            }
        }
        server.gate.open();
        Ok(updated?)
    }

    /// Loads an adapter.
    pub(crate) async fn load_adapter(
        &self,
        server: &Server,
        adapter: Adapter,
    ) -> Result<(), EngineError> {
        self.check_adapters("load_adapter")?;
        adapter.check()?;
        let operated = server.operated.lock().await;
        operated.check_awake()?;
        if server.adapters.find(&adapter.name).is_ok() {
            let problem = format!("{:?} is loaded already; unload it first", adapter.name);
            let at = At::other("adapter.name");
            return Err(EngineError::invalid_argument(at, problem));
        }
        let model = server.adapters.new_name(&adapter.name);
        let folder = absolute(&adapter.source);
        match vllm::load_adapter(server, &model, &folder, self.slow).await {
            Ok(()) => {
                server.adapters.add(ServedAdapter { adapter, model });
                Ok(())
            }
            Err(Failed::Refused(error)) => Err(not_loaded(server.judged(error).await)),
            Err(Failed::Lost(error)) => Err(error),
        }
    }

    /// Unloads an adapter, also for later starts of the server.
    pub(crate) async fn unload_adapter(
        &self,
        server: &Server,
        name: &str,
    ) -> Result<(), EngineError> {
        self.check_adapters("unload_adapter")?;
        let operated = server.operated.lock().await;
        operated.check_awake()?;
        let served = server.adapters.take(name)?;
        match vllm::unload_adapter(server, &served.model).await {
            Err(failed) if !failed.is_missing() => {
                server.adapters.add(served);
                Err(failed.into())
            }
            // The server may have lost it before.
            Ok(()) | Err(_) => {
                self.at_start.forget(name);
                Ok(())
            }
        }
    }

    /// Starts to record a profile.
    pub(crate) async fn start_profile(&self, server: &Server) -> Result<(), EngineError> {
        let mut operated = server.operated.lock().await;
        let (known, folder) = self.check_profile("start_profile")?;
        if operated.is_profiling {
            let problem = "a profile is being recorded; ask for stop_profile first";
            return Err(EngineError::invalid_argument(At::other("op"), problem));
        }
        operated.is_profiling = true;
        let started = match known {
            Known::Vllm => vllm::start_profile(server).await,
            Known::Sglang => sglang::start_profile(server, folder).await,
        };
        match started {
            Err(failed @ Failed::Refused(_)) => {
                operated.is_profiling = false;
                Err(failed.into())
            }
            started => Ok(started?),
        }
    }

    /// Ends the profile and returns its folder. New requests are refused meanwhile. Active requests continue after it, or end
    /// with an error that lets them migrate if it takes too long.
    pub(crate) async fn stop_profile(&self, server: &Server) -> Result<String, EngineError> {
        let mut operated = server.operated.lock().await;
        let (_, folder) = self.check_profile("stop_profile")?;
        if !operated.is_profiling {
            let problem = "no profile is being recorded; ask for start_profile first";
            return Err(EngineError::invalid_argument(At::other("op"), problem));
        }
        let _busy = server.busy.lock().await;
        // The gate of a sleeping server stays closed.
        let is_awake = operated.sleeps.is_none();
        let mut stopping = pin!(stop_profile(server, self.slow));
        let stopped = if is_awake {
            let stopped = tokio::select! {
                stopped = &mut stopping => stopped,
                () = server.gate.close(WRITES, GRACE) => stopping.await,
            };
            server.gate.open();
            stopped
        } else {
            stopping.await
        };
        operated.is_profiling = matches!(stopped, Err(Failed::Lost(_)));
        stopped?;
        Ok(folder.to_owned())
    }

    /// Closes the gate and waits until the server is idle. On `Ok` the gate is closed, else it is open.
    async fn stop(&self, server: &Server, why: &'static str) -> Result<(), EngineError> {
        server.gate.close(why, GRACE).await;
        // vLLM ends the remaining requests itself.
        if self.dialect == Dialect::Sglang
            && let Err(error) = sglang::idle(server).await
        {
            server.gate.open();
            return Err(error);
        }
        Ok(())
    }

    fn cleared(&self) {
        if let Some(clears) = &self.clears {
            clears.clear();
        }
    }

    fn known(&self, op: &str) -> Result<Known, EngineError> {
        match self.dialect {
            Dialect::Vllm => Ok(Known::Vllm),
            Dialect::Sglang => Ok(Known::Sglang),
            Dialect::Trtllm | Dialect::LlamaServer | Dialect::LlamaCppPython => {
                let title = self.dialect.kind().title();
                Err(unsupported(format!("{op} is not asked of {title}")))
            }
        }
    }

    /// # Errors
    /// `Unsupported`, with the options that the server must be started with.
    async fn check_sleep(&self, server: &Server, level: SleepLevel) -> Result<Known, EngineError> {
        let known = self.known("sleep")?;
        if self.role != Role::Aggregated {
            return Err(unsupported(
                "sleep is for instances of role aggregated: of the others, servers elsewhere fetch KV blocks",
            ));
        }
        match known {
            Known::Vllm if !self.has_sleep_mode => Err(unsupported(format!(
                "sleep needs enable-sleep-mode among the extra arguments, and {DEV_MODE}"
            ))),
            Known::Vllm => match vllm::has_sleep(server).await? {
                true => Ok(known),
                false => Err(unsupported(format!("sleep needs {DEV_MODE}"))),
            },
            Known::Sglang => {
                let started = sglang::started(server).await?;
                if !started.enable_memory_saver {
                    return Err(unsupported(
                        "sleep needs enable-memory-saver among the extra arguments",
                    ));
                }
                match level {
                    SleepLevel::Weights if !started.enable_weights_cpu_backup => Err(unsupported(
                        "sleep of level weights needs enable-weights-cpu-backup among the extra arguments, or SGLang wakes without \
                             them",
                    )),
                    SleepLevel::Weights | SleepLevel::KvCache => Ok(known),
                }
            }
        }
    }

    /// # Errors
    /// As [`check_sleep`](Self::check_sleep).
    fn check_adapters(&self, op: &str) -> Result<(), EngineError> {
        let variable = format!("{LORA_UPDATES}=1 in the worker's environment");
        let problem = match (self.dialect, self.takes) {
            (_, Takes::WhileServing) => return Ok(()),
            (Dialect::Vllm, Takes::AtStart) => format!("{op} needs {variable}"),
            (Dialect::Vllm, Takes::Nothing) => {
                format!("{op} needs enable-lora among the extra arguments, and {variable}")
            }
            (
                Dialect::Sglang | Dialect::Trtllm | Dialect::LlamaServer | Dialect::LlamaCppPython,
                Takes::AtStart | Takes::Nothing,
            ) => format!("{op} is not asked of {}", self.dialect.kind().title()),
        };
        Err(unsupported(problem))
    }

    /// Where profiles are written.
    ///
    /// # Errors
    /// As [`check_sleep`](Self::check_sleep).
    fn check_profile(&self, op: &str) -> Result<(Known, &str), EngineError> {
        let known = self.known(op)?;
        let folder = self.profiles.as_deref().ok_or_else(|| {
            let example = json!({"profiler": "torch", "torch_profiler_dir": "/tmp/profiles"});
            unsupported(format!(
                "{op} needs profiler-config among the extra arguments, such as {example}"
            ))
        })?;
        Ok((known, folder))
    }
}

/// A server that has these operations.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Known {
    Vllm,
    Sglang,
}

/// Checks that an awake server with sleep mode supports exactly this level.
async fn check_level(server: &Server, known: Known, level: SleepLevel) -> Result<(), EngineError> {
    if known == Known::Vllm && level == SleepLevel::KvCache && !vllm::frees_kv_cache(server).await?
    {
        return Err(unsupported(
            "sleep of level kv_cache needs a newer vLLM, such as 0.32; ask for level weights",
        ));
    }
    Ok(())
}

/// The error of an adapter that the server did not load. A fault of a server that stays healthy is the adapter's.
fn not_loaded(error: EngineError) -> EngineError {
    if error.kind() != ErrorKind::Internal {
        return error;
    }
    let message = error.message().to_owned();
    EngineError::invalid_argument(At::other("adapter"), message).with_source(error)
}

fn unsupported(problem: impl std::fmt::Display) -> EngineError {
    EngineError::unsupported(At::other("op"), problem)
}

/// A variable in the server's environment.
pub(crate) fn variable(config: &LauncherConfig, name: &str) -> Option<String> {
    let own = config.env.get(name).cloned();
    own.or_else(|| {
        let is_inherited = config.inherited_env.has(name);
        is_inherited.then(|| std::env::var(name).ok()).flatten()
    })
    .filter(|value| !value.is_empty())
}

/// Where a vLLM writes profiles, if it has the routes for them. The setting is an object, or has dots in its names.
fn vllm_profiles(config: &LauncherConfig) -> Option<String> {
    let whole = said(config, &["--profiler-config"]);
    let whole = whole.and_then(|(_, text)| serde_json::from_str::<Value>(&text).ok());
    let field = |name: &str| {
        let inside = whole.as_ref().and_then(|whole| whole.get(name)?.as_str());
        let dotted = format!("--profiler-config.{}", name.replace('_', "-"));
        let dotted = || Some(said(config, &[dotted.as_str()])?.1);
        inside.map(str::to_owned).or_else(dotted)
    };
    let Some(profiler) = field("profiler") else {
        return variable(config, VLLM_PROFILES);
    };
    let folder = field("torch_profiler_dir").or_else(|| field("proton_profiler_dir"));
    match folder {
        Some(folder) if folder.contains("://") => Some(folder),
        Some(folder) => Some(absolute(folder)),
        None => Some(format!("where vLLM's {profiler} profiler writes")),
    }
}

#[cfg(test)]
mod tests;
