//! Servers of other projects as engines: vLLM, SGLang, TensorRT-LLM and llama.cpp. [`LauncherEngine`] starts one as a child
//! process, waits until it is healthy, and drives it over its HTTP API on the loopback interface.
//!
//! - [`ServerKind`]: which server.
//! - [`LauncherConfig`]: the model, how the server is started, and its time limits.
//! - [`RestartPolicy`]: whether and when a server that died is restarted.
//! - [`ExtraArgs`]: the server's own settings, from a JSON or YAML file.
//! - [`ServerFailure`]: how a server can fail; the source of its requests' errors.
//!
//! The format of requests and answers is one module per server API, under `api`; everything else is shared.

mod adapters;
mod apart;
mod api;
#[cfg(feature = "cli")]
mod args;
mod bounds;
mod command;
mod config;
mod controls;
mod cut;
mod dialect;
mod drive;
mod engine;
mod exposition;
mod extra;
mod failure;
#[cfg(feature = "fuzzing")]
pub mod fuzzing;
mod gate;
mod health;
mod http;
mod key;
mod kind;
mod kv;
mod launch;
mod lines;
mod load;
mod ports;
mod probe;
mod ranks;
mod repeated;
mod room;
mod server;
mod sse;

#[cfg(feature = "cli")]
pub use args::{LauncherArgs, MediaKinds};
pub use config::{LauncherConfig, Nodes, ServerInput};
pub use engine::LauncherEngine;
pub use extra::ExtraArgs;
pub use failure::ServerFailure;
pub use genset_process::RestartPolicy;
pub use kind::ServerKind;
