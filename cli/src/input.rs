//! The terminal inputs, and what is printed on standard output.

mod chat;
mod editor;
mod stdin;

use std::io::Write;
use std::sync::Arc;

use genset_backend_common::EngineError;
use genset_frontend::FrontendServer;
use genset_frontend::model::ServedModel;
use genset_runtime::Signals;
use serde_json::json;

use crate::args::{EngineKind, InputKind, RunConfig};

/// Writes to standard output at once. A reader that has gone is no error of ours.
pub(crate) fn print(text: &str) {
    let mut out = std::io::stdout().lock();
    let _ = out.write_all(text.as_bytes()).and_then(|()| out.flush());
}

/// What is shown once the server answers: the model, the address, and a command that works.
pub(crate) fn banner(config: &RunConfig, server: &FrontendServer, model: &ServedModel) -> String {
    let url = format!("http://{}", server.address());
    let mut body = json!({
        "model": model.card.name,
        "stream": true,
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
    });
    if config.output.is(EngineKind::Sample) {
        body["max_tokens"] = json!(16);
    }
    format!(
        "model {} (out={})\nlistening on {url}\n\nTry:\n  curl -N {url}/v1/chat/completions \\\n    \
         -H 'Content-Type: application/json' \\\n    -d '{body}'\n",
        model.card.name,
        config.output.word(),
    )
}

/// What is shown once the server listens, before it knows a model.
pub(crate) fn banner_without_model(config: &RunConfig, server: &FrontendServer) -> String {
    let url = format!("http://{}", server.address());
    format!(
        "listening on {url}\n\n{}\n\nTry:\n  curl {url}/v1/models\n",
        waiting_for_workers(config)
    )
}

/// Says that workers are waited for, and how to start one.
pub(crate) fn waiting_for_workers(config: &RunConfig) -> String {
    let name = config.frontend.endpoint.as_ref();
    let word = name.map_or("dyn".into(), |name| format!("dyn://{name}"));
    format!(
        "waiting for workers; start one in another terminal with:\n  genset run in={word} out=sample"
    )
}

/// How a terminal input ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ending {
    /// Its last line was answered.
    Done,
    /// By a signal.
    Signalled,
}

/// Runs a terminal input to its end.
///
/// # Errors
/// What the only question failed with, or what the terminal did.
pub(crate) async fn run_terminal(
    config: &RunConfig,
    model: Arc<ServedModel>,
    signals: &mut Signals,
) -> Result<Ending, EngineError> {
    let echoes_prompt = config.output.is(EngineKind::EchoCore);
    let chat = chat::Chat::new(model, echoes_prompt);
    match config.input {
        InputKind::Stdin => stdin::run(chat, signals).await,
        InputKind::Text | InputKind::Http | InputKind::Dyn(_) => editor::run(chat, signals).await,
    }
}
