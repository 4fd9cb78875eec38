//! [`Plan`]: the program and arguments that start a server, from our settings and its table of flags. A setting without a
//! server flag is refused by our flag's name; a setting given twice is named.

mod devices;

use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use genset_backend_common::{EngineError, Role, controls::Adapter};
use serde_json::{Value, json};

use crate::config::{LauncherConfig, split_address};
use crate::controls::{LORA_UPDATES, variable};
use crate::dialect::{Dialect, ExtraStyle, Flag, Flags};
use crate::extra::{ExtraArgs, joined, spelled};
use crate::ranks::{said, vllm_size};

/// The default context of `llama_cpp.server`, in tokens.
const LLAMA_CPP_PYTHON_CONTEXT: u32 = 2048;

/// vLLM's flag that configures its connector.
const KV_TRANSFER_CONFIG: &str = "kv-transfer-config";

const SET_BY_US: &str = "genset sets it; leave it out";

/// How a server is started, without its port.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Plan {
    pub(crate) dialect: Dialect,
    pub(crate) program: PathBuf,
    /// Environment variables to set besides the inherited ones.
    pub(crate) env: Vec<(&'static str, String)>,
    /// Where the connectors of other servers ask for KV blocks, if they do.
    pub(crate) side_channel: Option<SideChannel>,
    args: Vec<String>,
}

/// Where a server listens for the connectors of others.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SideChannel {
    pub(crate) host: IpAddr,
    /// The number of consecutive ports: one for each data-parallel rank.
    pub(crate) ports: u16,
}

/// A setting of ours that may correspond to a server flag.
struct Setting {
    ours: &'static str,
    flag: Flag,
    value: Option<String>,
}

impl Plan {
    /// # Errors
    /// `Unsupported` for a setting without a server flag, `InvalidArgument` for one given twice; both name our flag.
    pub(crate) fn new(config: &LauncherConfig, dialect: Dialect) -> Result<Self, EngineError> {
        let (program, mut args) = start_of(config, dialect);
        let flags = dialect.flags();
        let model = config.model.display().to_string();
        match flags.model {
            Some(name) => args.extend([flag(name), model]),
            None => args.push(model),
        }
        args.extend([flag("host"), "127.0.0.1".to_owned()]);
        let settings = settings(config, dialect)?;
        refuse_in_command(config, flags)?;
        if let Some(extra) = &config.extra {
            refuse_conflicts(extra, flags, &settings)?;
        }
        for setting in &settings {
            if let (Flag::Named(names), Some(value)) = (setting.flag, &setting.value) {
                args.extend([flag(names[0]), value.clone()]);
            }
        }
        args.extend(defaults(flags, config.extra.as_ref()));
        if let Some(extra) = &config.extra {
            args.extend(extra_args(extra, flags.extra)?);
        }
        let devices = match flags.base_gpu {
            Flag::VisibleDevices => visible_devices(config)?,
            Flag::Named(_) | Flag::Refused(_) => None,
        };
        let devices = devices.map(|gpus| (devices::VARIABLE, gpus));
        let logprobs = (dialect == Dialect::Sglang).then(|| (RAW_LOGPROBS, "1".into()));
        Ok(Self {
            dialect,
            program,
            env: devices.into_iter().chain(logprobs).collect(),
            side_channel: None,
            args,
        })
    }

    /// Adds arguments.
    pub(crate) fn with_args(mut self, args: impl IntoIterator<Item = String>) -> Self {
        self.args.extend(args);
        self
    }

    /// Makes room for LoRA adapters, which [`lora_modules`] names. `Unsupported` for a server that does not support this.
    pub(crate) fn with_adapters(
        mut self,
        adapters: &[Adapter],
        config: &LauncherConfig,
    ) -> Result<Self, EngineError> {
        let extra = config.extra.as_ref();
        let loads_more = self.dialect == Dialect::Vllm && updates_adapters(config);
        let is_on = said(config, &["--enable-lora"]).is_some();
        if adapters.is_empty() && !(loads_more && is_on) {
            return Ok(self);
        }
        if self.dialect != Dialect::Vllm {
            let title = self.dialect.kind().title();
            let problem = format!("is for out=candle, vllm and cmd, not for {title}");
            return Err(EngineError::unsupported("--adapter", problem));
        }
        let modules = extra.filter(|_| !adapters.is_empty()).and_then(|extra| {
            let named = |key: &&String| joined(key) == "lora-modules";
            Some((extra.entries().keys().find(named)?, extra))
        });
        if let Some((key, extra)) = modules {
            return Err(extra.invalid(key, "--adapter says it too; keep one of them"));
        }
        let is_said = |name: &str| extra.is_some_and(|extra| extra.says(name));
        if !is_on && !is_said("enable-lora") {
            self.args.push(flag("enable-lora"));
        }
        if !is_said("max-loras") && said(config, &["--max-loras"]).is_none() {
            // Otherwise a batch has requests of only one adapter. The last place stays empty: in a batch with adapters, vLLM
            // 0.32 on a CPU computes requests without one with what is loaded there.
            let count = match loads_more {
                true => MAX_VLLM_ADAPTERS,
                false => adapters.len().min(MAX_VLLM_ADAPTERS),
            };
            self.args
                .extend([flag("max-loras"), (count + 1).to_string()]);
        }
        Ok(self)
    }

    /// Configures the role: the server's connector sends KV blocks to others or fetches them.
    pub(crate) fn in_role(mut self, config: &LauncherConfig, role: Role) -> Self {
        let kv_role = match role {
            Role::Aggregated => return self,
            Role::Prefill => "kv_producer",
            Role::Decode => "kv_consumer",
        };
        let ranks = vllm_size(config).and_then(|ranks| u16::try_from(ranks).ok());
        self.side_channel = Some(SideChannel {
            host: config.kv_transfer_host,
            ports: ranks.unwrap_or(1),
        });
        if config.setting(KV_TRANSFER_CONFIG).is_none() {
            let transfer = json!({
                "kv_connector": "NixlConnector",
                "kv_role": kv_role,
                "kv_connector_extra_config": {"kv_lease_duration": server_lease_s(config.kv_lease)},
            });
            self.args
                .extend([flag(KV_TRANSFER_CONFIG), transfer.to_string()]);
        }
        self
    }

    /// The arguments of a server that listens on `port`.
    pub(crate) fn args(&self, port: u16) -> Vec<String> {
        let mut args = self.args.clone();
        args.extend([flag("port"), port.to_string()]);
        args
    }

    /// The command as one line, for logs and errors.
    pub(crate) fn line(&self) -> String {
        format!("{} {}", self.program.display(), self.args.join(" "))
    }
}

/// Without it SGLang divides the logits by the temperature before it computes log probabilities.
const RAW_LOGPROBS: &str = "SGLANG_RETURN_ORIGINAL_LOGPROB";

/// The maximum number of adapters per batch that we configure in vLLM: it reserves memory for each.
const MAX_VLLM_ADAPTERS: usize = 8;

/// Whether the environment lets a vLLM load and unload adapters while it serves, read as vLLM reads it.
fn updates_adapters(config: &LauncherConfig) -> bool {
    let value = variable(config, LORA_UPDATES).unwrap_or_default();
    ["1", "true"].contains(&value.trim().to_lowercase().as_str())
}

/// vLLM's arguments that name the adapters of its start.
pub(crate) fn lora_modules(adapters: &[Adapter]) -> Vec<String> {
    let name = (!adapters.is_empty()).then(|| flag("lora-modules"));
    let modules = adapters.iter().map(lora_module);
    name.into_iter().chain(modules).collect()
}

/// A path for the server. It starts in our folder, but its own launchers may change it.
pub(crate) fn absolute(path: impl AsRef<Path>) -> String {
    let path = path.as_ref();
    let absolute = std::path::absolute(path);
    absolute.as_deref().unwrap_or(path).display().to_string()
}

/// An adapter in vLLM's notation: `NAME=DIR`, or JSON if that would be split at another place.
fn lora_module(adapter: &Adapter) -> String {
    let (name, source) = (&adapter.name, absolute(&adapter.source));
    if [name, &source]
        .into_iter()
        .any(|text| text.contains(['=', ',']))
    {
        return json!({"name": name, "path": source}).to_string();
    }
    format!("{name}={source}")
}

/// How long the server itself holds blocks, in seconds. Claims are granted until `lease` expires, and the server must then
/// still hold the blocks until the claim's owner has reached it.
fn server_lease_s(lease: Duration) -> u64 {
    (lease + lease / 2).as_secs().max(1)
}

/// The context length to request from the server, in tokens.
pub(crate) fn asked_context(config: &LauncherConfig, dialect: Dialect) -> Option<u32> {
    let default = (dialect == Dialect::LlamaCppPython).then_some(LLAMA_CPP_PYTHON_CONTEXT);
    config.context_length_tokens.or(default)
}

fn start_of(config: &LauncherConfig, dialect: Dialect) -> (PathBuf, Vec<String>) {
    if let Some([program, rest @ ..]) = config.command.as_deref() {
        return (program.into(), rest.to_vec());
    }
    let words = dialect.flags().words.iter().map(|word| (*word).to_owned());
    let program = dialect.program().map(PathBuf::from);
    let program = program.unwrap_or_else(|| config.python.clone());
    (program, words.collect())
}

fn flag(name: &str) -> String {
    format!("--{name}")
}

fn settings(config: &LauncherConfig, dialect: Dialect) -> Result<Vec<Setting>, EngineError> {
    let flags = dialect.flags();
    let nodes = &config.nodes;
    let text = |number: Option<u32>| number.map(|number| number.to_string());
    let address = nodes.leader_addr.as_deref();
    let parts = address.and_then(split_address);
    let leader = match flags.leader_port {
        Some(_) => parts.map(|(host, _)| host),
        None => address,
    };
    let leader_port = flags.leader_port.map(|names| {
        let port = parts.map(|(_, port)| port.to_string());
        ("--leader-addr", Flag::Named(names), port)
    });
    let settings = [
        (
            "--context-length",
            Flag::Named(flags.context),
            text(config.context_length_tokens),
        ),
        (
            "--tensor-parallel-size",
            flags.tensor_parallel,
            text(config.tensor_parallel_size),
        ),
        ("--base-gpu-id", flags.base_gpu, text(config.base_gpu_id)),
        ("--num-nodes", flags.num_nodes, text(nodes.num_nodes)),
        ("--node-rank", flags.node_rank, text(nodes.node_rank)),
        (
            "--kv-cache-block-size",
            flags.kv_block_size,
            text(config.kv_block_size.map(Into::into)),
        ),
        ("--leader-addr", flags.leader, leader.map(str::to_owned)),
    ];
    let settings = settings.into_iter().chain(leader_port);
    let settings = settings.map(|(ours, flag, value)| Setting { ours, flag, value });
    let settings: Vec<Setting> = settings.collect();
    for setting in &settings {
        if let (Flag::Refused(instead), Some(_)) = (setting.flag, &setting.value) {
            let problem = format!("{} has no such setting: {instead}", dialect.kind().title());
            return Err(EngineError::unsupported(setting.ours, problem));
        }
    }
    Ok(settings)
}

/// The `CUDA_VISIBLE_DEVICES` for `--base-gpu-id`.
fn visible_devices(config: &LauncherConfig) -> Result<Option<String>, EngineError> {
    let Some(first) = config.base_gpu_id else {
        return Ok(None);
    };
    let seen = match config
        .env
        .iter()
        .find(|(name, _)| *name == devices::VARIABLE)
    {
        Some((_, value)) => Some(value.clone()),
        None => std::env::var(devices::VARIABLE).ok(),
    };
    let nodes = config.nodes.num_nodes.unwrap_or(1).max(1);
    let count = config.tensor_parallel_size.unwrap_or(1).div_ceil(nodes);
    devices::from(first, count, seen.as_deref())
        .map(Some)
        .map_err(|problem| EngineError::invalid_argument("--base-gpu-id", problem))
}

/// Refuses settings in the file that we set too, that would break our parsing, or that would have no effect.
fn refuse_conflicts(
    extra: &ExtraArgs,
    flags: &Flags,
    settings: &[Setting],
) -> Result<(), EngineError> {
    for key in extra.entries().keys() {
        let name = joined(key);
        if ["host", "port", "model", "model-path"].contains(&name.as_str()) {
            return Err(extra.invalid(key, SET_BY_US));
        }
        if let Some(instead) = refusal(flags, &name) {
            return Err(extra.invalid(key, instead));
        }
        let said = settings.iter().find(|setting| match setting.flag {
            Flag::Named(names) => {
                setting.value.is_some() && names.iter().any(|n| joined(n) == name)
            }
            Flag::VisibleDevices | Flag::Refused(_) => false,
        });
        if let Some(setting) = said {
            let problem = format!("{} says it too; keep one of them", setting.ours);
            return Err(extra.invalid(key, problem));
        }
    }
    Ok(())
}

/// Why neither the file nor the user's own command may have a setting, and what to do instead.
fn refusal(flags: &Flags, name: &str) -> Option<&'static str> {
    if flags.reserved.contains(&name) {
        return Some(SET_BY_US);
    }
    let refused = flags.refused.iter().find(|(refused, _)| *refused == name);
    refused.map(|(_, instead)| *instead)
}

/// Refuses settings in the user's own command that would keep us from the server, break our parsing or have no effect, as in the
/// file.
fn refuse_in_command(config: &LauncherConfig, flags: &Flags) -> Result<(), EngineError> {
    let words = config.command.iter().flatten();
    for word in words.filter(|word| word.starts_with("--")) {
        let name = word.split_once('=').map_or(word.as_str(), |(name, _)| name);
        if let Some(instead) = refusal(flags, &joined(name)) {
            let problem = format!("{name}: {instead}");
            return Err(EngineError::invalid_argument("--server-cmd", problem));
        }
    }
    Ok(())
}

fn defaults(flags: &Flags, extra: Option<&ExtraArgs>) -> Vec<String> {
    let mut args = Vec::new();
    for (name, value) in flags.defaults {
        if extra.is_none_or(|extra| !extra.says(name)) {
            args.push(flag(name));
            args.extend(value.map(str::to_owned));
        }
    }
    args
}

/// The entries of the file as the program's arguments.
pub(crate) fn extra_args(extra: &ExtraArgs, style: ExtraStyle) -> Result<Vec<String>, EngineError> {
    if let ExtraStyle::File(name) = style {
        return Ok(vec![flag(name), absolute(extra.path())]);
    }
    let mut args = Vec::new();
    for (key, value) in extra.entries() {
        let name = match style {
            ExtraStyle::Underscores => flag(&joined(key).replace('-', "_")),
            ExtraStyle::Dashes | ExtraStyle::DashesNoFalse | ExtraStyle::File(_) => spelled(key),
        };
        if joined(key).is_empty() {
            return Err(extra.invalid(key, "is no name of a setting"));
        }
        match (value, style) {
            (Value::Null, _) | (Value::Bool(false), ExtraStyle::DashesNoFalse) => {}
            (Value::Bool(true), ExtraStyle::Dashes | ExtraStyle::DashesNoFalse) => args.push(name),
            (Value::Bool(false), ExtraStyle::Dashes) => args.push(format!("--no-{}", joined(key))),
            (Value::Array(items), _) => {
                args.push(name);
                args.extend(items.iter().map(word));
            }
            (Value::Bool(_) | Value::Number(_) | Value::String(_) | Value::Object(_), _) => {
                args.extend([name, word(value)]);
            }
        }
    }
    Ok(args)
}

/// A value as one argument: text unchanged, everything else as JSON.
pub(crate) fn word(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::Array(_) | Value::Object(_) => {
            value.to_string()
        }
    }
}

#[cfg(test)]
mod tests;
