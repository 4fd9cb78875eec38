//! The terminal inputs, and what is printed on standard output.

mod batch;
mod chat;
mod commands;
mod editor;
mod markdown;
mod question;
mod saved;
mod screen;
mod stdin;

use std::fmt::Display;
use std::io::{self, IsTerminal, Write};
use std::net::SocketAddr;
use std::sync::{Arc, OnceLock};

pub(crate) use genset_backend_common::terminal::escaped;
use genset_backend_common::{EngineError, card::EndpointType};
use genset_frontend::batch::SeenModels;
use genset_frontend::model::{Models, ServedModel};
use genset_frontend::{FrontendServer, LocalFrontend};
use genset_runtime::{Runtime, Signals};
use serde::Serialize;
use serde_json::{Value, json};

use self::chat::Chat;
use self::question::{Asker, CONTINUATION_TOKENS, goes_on};
use self::screen::Screen;
use crate::args::{EngineKind, InputKind, OutputKind, RunConfig, quoted};
use crate::node::check_address;

/// The mark with which editors on Windows begin a UTF-8 file. It is not part of the text.
const BYTE_ORDER_MARK: char = '\u{feff}';

/// The first error that lost printed text.
static LOST: OnceLock<io::Error> = OnceLock::new();

/// Writes to standard output and flushes it. Keeps the first error for [`is_unread`] and [`lost_output`].
pub(crate) fn print(text: &str) {
    if let Err(error) = write(text) {
        let _ = LOST.set(error);
    }
}

/// [`print()`]s the results of a command as JSON.
///
/// # Errors
/// `Internal`: a figure is no JSON.
pub(crate) fn print_json(results: &impl Serialize) -> Result<(), EngineError> {
    let text = serde_json::to_string_pretty(results)
        .map_err(|error| EngineError::internal("figures that are no JSON").with_source(error))?;
    print(&format!("{text}\n"));
    Ok(())
}

/// As [`print()`], for a server's messages, which may be lost.
pub(crate) fn announce(text: &str) {
    let _ = write(text);
}

fn write(text: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes())?;
    out.flush()
}

/// Whether printed text was lost: the reader of standard output has gone, or it cannot be written to.
fn is_unread() -> bool {
    LOST.get().is_some()
}

/// The error because of which standard output is incomplete, such as a full disk. A closed pipe is not an error.
pub(crate) fn lost_output() -> Option<&'static io::Error> {
    LOST.get()
        .filter(|error| error.kind() != io::ErrorKind::BrokenPipe)
}

/// Whether standard output is a terminal on which a cursor moves.
pub(crate) fn can_draw() -> bool {
    let is_dumb = std::env::var_os("TERM").is_some_and(|term| term == "dumb");
    io::stdout().is_terminal() && !is_dumb
}

/// Writes a line to standard error, [`escaped`]. Ignores errors: nobody can be notified, and the exit code says the rest.
pub(crate) fn note(line: impl Display) {
    let _ = writeln!(io::stderr().lock(), "{}", escaped(&line.to_string()));
}

/// Prints on standard error why the program ends.
pub(crate) fn complain(error: impl Display) {
    note(format_args!("error: {error}"));
}

/// The message once the server answers: the model, the address, and a command that works.
pub(crate) fn banner(config: &RunConfig, server: &FrontendServer, model: &ServedModel) -> String {
    let url = url_of(config, server);
    let (path, body) = request_shown(config, model);
    let key = match key_shown(config) {
        Some(header) => format!("    -H '{header}' \\\n"),
        None => String::new(),
    };
    format!(
        "model {} (out={})\nlistening on {url}\n{}\nTry:\n  curl -N {url}{path} \\\n{key}    \
         -H 'Content-Type: application/json' \\\n    -d {}\n",
        model.card.name,
        config.output.word(),
        pages(config, &url),
        quoted(&body.to_string()),
    )
}

/// The header that a server with keys requires.
fn key_shown(config: &RunConfig) -> Option<&'static str> {
    let has_keys = config.frontend.api_keys.is_some();
    has_keys.then_some("Authorization: Bearer KEY")
}

/// An example request that the model answers.
fn request_shown(config: &RunConfig, model: &ServedModel) -> (&'static str, Value) {
    let name = &model.card.name;
    let offers = |endpoint| model.card.endpoint_types.contains(&endpoint);
    if offers(EndpointType::Completions) && (goes_on(model) || !offers(EndpointType::Chat)) {
        let body = json!({
            "model": name,
            "stream": true,
            "prompt": "The capital of France is",
            "max_tokens": 16,
        });
        ("/v1/completions", body)
    } else if offers(EndpointType::Chat) {
        let mut body = json!({
            "model": name,
            "stream": true,
            "messages": [{"role": "user", "content": "What is the capital of France?"}],
        });
        if config.output.is(EngineKind::Sample) {
            body["max_tokens"] = json!(16);
        }
        ("/v1/chat/completions", body)
    } else if offers(EndpointType::Embeddings) {
        let body = json!({"model": name, "input": ["The cat sat on the mat."]});
        ("/v1/embeddings", body)
    } else {
        let body = json!({
            "model": name,
            "query": "What is the capital of France?",
            "documents": ["Paris is a city in France.", "The cat sat on the mat."],
        });
        ("/v1/rerank", body)
    }
}

fn url_of(config: &RunConfig, server: &FrontendServer) -> String {
    let scheme = config.frontend.tls.as_ref().map_or("http", |_| "https");
    format!("{scheme}://{}", server.address())
}

/// The address of the web pages for a browser, if there are any.
fn pages(config: &RunConfig, url: &str) -> String {
    match config.frontend.ui {
        true => format!("chat in a browser: {url}/   charts: {url}/dashboard\n"),
        false => String::new(),
    }
}

/// The message when the server listens but knows no model yet.
pub(crate) fn banner_without_model(config: &RunConfig, server: &FrontendServer) -> String {
    let url = url_of(config, server);
    let key = match key_shown(config) {
        Some(header) => format!("-H '{header}' "),
        None => String::new(),
    };
    format!(
        "listening on {url}\n{}\n{}\n\nTry:\n  curl {key}{url}/v1/models\n",
        pages(config, &url),
        waiting_for_workers(config)
    )
}

/// The message that the process waits for workers, and how to start one.
pub(crate) fn waiting_for_workers(config: &RunConfig) -> String {
    let scope = config.frontend.workers.as_ref();
    let word = scope.map_or("dyn".into(), |scope| format!("dyn://{scope}"));
    format!(
        "waiting for workers; start one in another terminal with:\n  genset run in={word} out=sample{}",
        config.network_flags
    )
}

/// The message that the process waits for workers of this model, and which ones there are.
pub(crate) fn waiting_for_model(name: &str, models: &Models) -> String {
    let served = models.announced().join(", ");
    match served.is_empty() {
        true => format!("waiting for a worker that serves {name}"),
        false => format!("waiting for a worker that serves {name}; there are those of {served}"),
    }
}

/// How a terminal input ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ending {
    /// Its last line was answered.
    Done,
    /// Like [`Self::Done`], but an answer failed, which was reported.
    Failed,
    /// By a signal.
    Signalled,
}

/// Refuses a model that embeds or scores. Requests of a batch may use any API.
fn refuse_without_answers(config: &RunConfig, model: &ServedModel) -> Result<(), EngineError> {
    let offered = &model.card.endpoint_types;
    let answers = [EndpointType::Chat, EndpointType::Completions];
    if matches!(config.input, InputKind::Batch(_))
        || answers.iter().any(|endpoint| offered.contains(endpoint))
    {
        return Ok(());
    }
    let offered: Vec<_> = offered.iter().map(|endpoint| endpoint.name()).collect();
    let problem = format!(
        "{} gives {} and no answers, so it cannot chat; serve it with in=http",
        model.card.name,
        offered.join(" and ")
    );
    Err(EngineError::invalid_argument("in", problem))
}

/// Refuses to choose among several models: nobody would see which one it was.
fn refuse_to_choose(config: &RunConfig, models: &Models) -> Result<(), EngineError> {
    let is_named = config.worker.model_name.is_some();
    let served = match &config.output {
        OutputKind::Dyn(_) if !is_named => models.announced(),
        OutputKind::Dyn(_) | OutputKind::Engine(_) => return Ok(()),
    };
    if served.len() < 2 {
        return Ok(());
    }
    let problem = format!(
        "several models are served; name the one to ask: {}",
        served.join(", ")
    );
    Err(EngineError::invalid_argument("--model-name", problem))
}

/// Checks the input before there is a model. With `address`, where a server would listen, the model is fetched first.
///
/// # Errors
/// When a batch has no prompts, or already has its answers; when a server cannot listen on `address`.
pub(crate) fn check(input: &InputKind, address: Option<SocketAddr>) -> Result<(), EngineError> {
    match input {
        InputKind::Batch(path) => batch::check(path),
        InputKind::Http => address.map_or(Ok(()), check_address),
        InputKind::Text | InputKind::Stdin | InputKind::Dyn(_) => Ok(()),
    }
}

/// Runs a terminal input to its end.
///
/// # Errors
/// The error of the only question, or of the terminal.
pub(crate) async fn run_terminal(
    runtime: &Runtime,
    config: &RunConfig,
    models: &Models,
    model: Arc<ServedModel>,
    signals: &mut Signals,
) -> Result<Ending, EngineError> {
    refuse_without_answers(config, &model)?;
    let asker = Asker::new(model, config.output.is(EngineKind::EchoCore));
    if asker.goes_on() {
        let why = match asker.reads_bodies() {
            true => "takes completions and no chats",
            false => "has no chat template, as base models have none",
        };
        note(format_args!(
            "{} {why}: it continues your text, with {CONTINUATION_TOKENS} tokens at most unless max_tokens is set",
            asker.model_name()
        ));
    }
    match &config.input {
        InputKind::Stdin => {
            refuse_to_choose(config, models)?;
            stdin::run(Chat::new(asker, Screen::of_answer()), signals).await
        }
        InputKind::Batch(path) => {
            let routes = LocalFrontend::new(runtime, models.clone(), config.frontend.clone());
            let asked = batch::Asked {
                asker,
                is_chosen: refuse_to_choose(config, models),
                routes,
                models: models.clone(),
                seen: SeenModels::new(models.clone()),
            };
            batch::run(path, config.batch_concurrency.get(), &asked, signals).await
        }
        InputKind::Text | InputKind::Http | InputKind::Dyn(_) => {
            let chat = Chat::new(asker, Screen::of_output());
            editor::run(chat, models, signals).await
        }
    }
}
