//! A server of OpenAI's API as the kit's subject, in any implementation: chats go to its URL, and answers come back as text.
//!
//! The kit can only send requests. A URL does not show how the engine starts, drains and ends, or what it publishes.

use std::collections::BTreeSet;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use genset_backend_common::output::{self, Finish, FinishReason, OutputWriter};
use genset_backend_common::{
    Capabilities, EngineConfig, EngineError, EngineState, ErrorKind, GenerateRequest, Input,
    LLMEngine, OutputStream, RequestContext, RequestField, StartContext, async_trait,
    config::{InputKind, SamplingOption},
};
use genset_conformance::{Check, Subject, catalogue};
use genset_hub::without_password;
use reqwest::header::{CONTENT_TYPE, RETRY_AFTER};
use reqwest::{Response, StatusCode};
use serde::Deserialize;
use serde_json::{Value, json};

use super::SubjectArgs;
use super::run::BoxFactory;
use crate::openai::{Event, Lines, Usage, base_of, client};
use crate::threads;

/// The context length assumed for a server that does not report one. The kit's requests fit into it.
const DEFAULT_CONTEXT: u32 = 2048;

/// Checks that fill the context. They are skipped if a server does not report its context length.
const FILLING: [&str; 2] = ["FN04", "FN05"];

/// The groups of checks that send requests.
const GROUPS: [&str; 8] = ["ST", "FN", "US", "CN", "CC", "DT", "ER", "RD"];

/// Checks of those groups that do not work over a URL, and why.
const UNSEEN: [(&str, &str); 2] = [
    (
        "US06",
        "the usage of a cancelled request, whose connection is closed",
    ),
    ("CN16", "hints before a start and after a cleanup"),
];

/// Whether a check works over a URL.
pub(super) fn can_be_asked(check: &Check) -> bool {
    let is_unseen = UNSEEN.iter().any(|(id, _)| *id == check.id);
    let group = check.id.get(..2).unwrap_or_default();
    GROUPS.contains(&group) && !is_unseen
}

/// The ids of the checks that work over a URL, among those that begin with one of `only`.
///
/// # Errors
/// `InvalidArgument` if none of them does.
pub(super) fn askable(only: &[String]) -> Result<Vec<String>, EngineError> {
    let is_wanted =
        |check: &&Check| only.is_empty() || only.iter().any(|prefix| check.id.starts_with(prefix));
    let asked = catalogue().filter(|check| can_be_asked(check));
    let asked: Vec<String> = asked
        .filter(is_wanted)
        .map(|check| check.id.to_owned())
        .collect();
    if asked.is_empty() {
        let groups = GROUPS.join(", ");
        return Err(EngineError::invalid_argument(
            "--only",
            format!("these checks cannot run over a URL; the checks of {groups} can"),
        ));
    }
    Ok(asked)
}

/// A factory for the server, which must answer.
///
/// # Errors
/// `InvalidArgument`: nothing answers, the model is not served, or lengths cannot be requested; says what to do.
pub(super) fn factory(subject: &SubjectArgs, url: &str) -> Result<BoxFactory, EngineError> {
    let server = Arc::new(Server {
        base: base_of(url),
        key: subject.api_key.as_ref().map(|key| key.0.clone()),
        model: subject.url_model.clone(),
    });
    let runtime = threads::this_one()?;
    let (model, context) = runtime.block_on(server.meet())?;
    let max_num_seqs = subject.max_num_seqs.map(NonZeroU32::get);
    Ok(Box::new(move |scenario| {
        let is_filled = FILLING.contains(&scenario.check);
        let untold = if is_filled { u32::MAX } else { DEFAULT_CONTEXT };
        let engine = UrlEngine {
            server: Arc::clone(&server),
            model: model.clone(),
            context: context.unwrap_or(untold),
            max_num_seqs,
            http: EngineState::new(),
        };
        Subject::new(engine).checking_itself()
    }))
}

/// A server's address, and how to send requests to it.
struct Server {
    base: String,
    key: Option<String>,
    model: Option<String>,
}

#[derive(Debug, Deserialize)]
struct Models {
    data: Vec<Model>,
}

#[derive(Debug, Deserialize)]
struct Model {
    id: String,
    max_model_len: Option<u32>,
}

impl Server {
    fn client(&self) -> Result<reqwest::Client, EngineError> {
        client().build().map_err(|error| self.failed(error))
    }

    fn failed(&self, error: reqwest::Error) -> EngineError {
        self.unusable(&error.without_url())
    }

    fn unusable(&self, problem: &dyn std::fmt::Display) -> EngineError {
        let shown = without_password(&self.base);
        EngineError::invalid_argument("--url", format!("{shown}: {problem}"))
    }

    fn with_key(&self, request: reqwest::RequestBuilder) -> reqwest::RequestBuilder {
        match &self.key {
            Some(key) => request.bearer_auth(key),
            None => request,
        }
    }

    /// The model and, if reported, its context length. The server must respect a requested length.
    async fn meet(&self) -> Result<(String, Option<u32>), EngineError> {
        let http = self.client()?;
        let asked = self.with_key(http.get(format!("{}/v1/models", self.base)));
        let answer = asked.send().await.map_err(|error| self.failed(error))?;
        let answer = answered(answer)
            .await
            .map_err(|error| self.unusable(&error))?;
        let body = answer.bytes().await.map_err(|error| self.failed(error))?;
        let models: Models =
            serde_json::from_slice(&body).map_err(|error| self.unusable(&error))?;
        let model = self.choose(models.data)?;
        let probe = json!({
            "model": model.id,
            "messages": [{"role": "user", "content": "7 42 3"}],
            "max_tokens": 2,
            "ignore_eos": true,
        });
        let asked = self.chat(&http, &probe).await?;
        answered(asked).await.map_err(|error| {
            let problem = format!(
                "the kit asks for answers of a known length, with \"ignore_eos\", which this server refuses: {error}"
            );
            self.unusable(&problem)
        })?;
        Ok((model.id, model.max_model_len))
    }

    fn choose(&self, models: Vec<Model>) -> Result<Model, EngineError> {
        let names: Vec<String> = models.iter().map(|model| model.id.clone()).collect();
        let mut models = models.into_iter();
        let chosen = match &self.model {
            Some(name) => models.find(|model| model.id == *name),
            None if names.len() == 1 => models.next(),
            None => None,
        };
        chosen.ok_or_else(|| {
            let problem = format!("name one of the server's models: {}", names.join(", "));
            EngineError::invalid_argument("--url-model", problem)
        })
    }

    async fn chat(&self, http: &reqwest::Client, body: &Value) -> Result<Response, EngineError> {
        let url = format!("{}/v1/chat/completions", self.base);
        let request = http.post(url).header(CONTENT_TYPE, "application/json");
        let sent = self.with_key(request).body(body.to_string()).send().await;
        sent.map_err(|error| {
            let kind = match error.is_connect() {
                true => ErrorKind::CannotConnect,
                false => ErrorKind::Disconnected,
            };
            EngineError::new(kind, "the server cannot be asked").with_source(error)
        })
    }
}

/// Returns the response, or its refusal as an error.
async fn answered(response: Response) -> Result<Response, EngineError> {
    let status = response.status();
    if status.is_success() {
        return Ok(response);
    }
    let after = response.headers().get(RETRY_AFTER);
    let after = after.and_then(|value| value.to_str().ok()?.parse().ok());
    let body = response.bytes().await.unwrap_or_default();
    let body = serde_json::from_slice(&body).unwrap_or_default();
    let error = refusal(Some(status), &body);
    Err(match after {
        Some(seconds) => error.with_retry_after(Duration::from_secs(seconds)),
        None => error,
    })
}

/// Parses OpenAI's error object, with its status unless it is an event.
fn refusal(status: Option<StatusCode>, body: &Value) -> EngineError {
    let error = body.get("error").unwrap_or(body);
    let message = error.get("message").and_then(Value::as_str);
    let message = message.unwrap_or("the server gives no reason").to_owned();
    let code = error.get("code").and_then(Value::as_str);
    let kind = match (status.map(|status| status.as_u16()), code) {
        (_, Some("context_length_exceeded")) => ErrorKind::ContextLengthExceeded,
        (_, Some("unsupported_parameter")) => ErrorKind::Unsupported,
        (Some(400 | 401 | 403 | 413 | 415 | 422), _) => ErrorKind::InvalidArgument,
        (Some(404), _) => ErrorKind::NotFound,
        (Some(429), _) => ErrorKind::Overloaded,
        (Some(501), _) => ErrorKind::Unsupported,
        (Some(502), _) => ErrorKind::Disconnected,
        (Some(503), _) => ErrorKind::Unavailable,
        (Some(504), _) => ErrorKind::DeadlineExceeded,
        (Some(_) | None, _) => ErrorKind::Internal,
    };
    EngineError::new(kind, message)
}

struct UrlEngine {
    server: Arc<Server>,
    model: String,
    context: u32,
    max_num_seqs: Option<u32>,
    http: EngineState<reqwest::Client>,
}

fn capabilities() -> Capabilities {
    Capabilities {
        inputs: BTreeSet::from([InputKind::Chat]),
        ..Capabilities::default()
    }
    .with_sampling([SamplingOption::Temperature, SamplingOption::TopP])
}

#[async_trait]
impl LLMEngine for UrlEngine {
    async fn start(&self, _ctx: StartContext) -> Result<EngineConfig, EngineError> {
        let mut config =
            EngineConfig::new(&self.model, self.context).with_capabilities(capabilities());
        config.max_num_seqs = self.max_num_seqs;
        let client = self.server.client();
        self.http.start(async { Ok((client?, config)) }).await
    }

    async fn generate(
        &self,
        request: GenerateRequest,
        ctx: RequestContext,
    ) -> Result<OutputStream, EngineError> {
        let http = self.http.get()?;
        // Undeclared features cannot be sent; the server may refuse anything else.
        capabilities().check(&request)?;
        let sampling = [request.sampling.temperature, request.sampling.top_p];
        if sampling
            .into_iter()
            .flatten()
            .any(|number| !number.is_finite())
        {
            let problem = "must be a finite number: JSON has no other";
            return Err(EngineError::invalid_argument(
                RequestField::Temperature,
                problem,
            ));
        }
        if request.sampling.top_p == Some(0.0) {
            let problem =
                "must be above 0: OpenAI's range includes it, and the contract's does not";
            return Err(EngineError::invalid_argument(RequestField::TopP, problem));
        }
        let body = body_of(&request, &self.model);
        let server = Arc::clone(&self.server);
        Ok(output::stream(ctx, move |out| async move {
            let response = server.chat(&http, &body).await?;
            Reading::new(answered(response).await?).read(&out).await
        }))
    }

    async fn cleanup(&self) -> Result<(), EngineError> {
        drop(self.http.take());
        Ok(())
    }
}

fn body_of(request: &GenerateRequest, model: &str) -> Value {
    let messages = match &request.input {
        Input::Chat(chat) => chat.messages.clone(),
        Input::Tokens(_) | Input::Text(_) | Input::Embed(_) | Input::Score(_) => Vec::new(),
    };
    let mut body = json!({
        "model": model,
        "messages": messages,
        "stream": true,
        "stream_options": {"include_usage": true},
    });
    let stop = &request.stop;
    let mut set = |name: &str, value: Option<Value>| {
        if let Some(value) = value {
            body[name] = value;
        }
    };
    set("max_tokens", stop.max_tokens.map(Value::from));
    set("ignore_eos", stop.ignore_eos.then_some(true.into()));
    set(
        "min_tokens",
        (stop.min_tokens > 0).then_some(stop.min_tokens.into()),
    );
    set("temperature", request.sampling.temperature.map(Value::from));
    set("top_p", request.sampling.top_p.map(Value::from));
    body
}

/// An answer as it arrives.
struct Reading {
    response: Response,
    lines: Lines,
    usage: Option<Usage>,
    reason: Option<String>,
    /// The number of tokens reported so far.
    told: u64,
}

impl Reading {
    fn new(response: Response) -> Self {
        Self {
            response,
            lines: Lines::default(),
            usage: None,
            reason: None,
            told: 0,
        }
    }

    async fn read(mut self, out: &OutputWriter) -> Result<Finish, EngineError> {
        loop {
            while let Some(data) = self.lines.next_data() {
                if data == b"[DONE]" {
                    return self.end(out).await;
                }
                let event = serde_json::from_slice(data).map_err(|error| {
                    EngineError::new(
                        ErrorKind::Disconnected,
                        format!("an event that cannot be read: {error}"),
                    )
                })?;
                self.take(event, out).await?;
            }
            let piece = self.response.chunk().await.map_err(|error| {
                EngineError::new(ErrorKind::Disconnected, "the stream broke off").with_source(error)
            })?;
            let Some(piece) = piece else {
                let problem = "the stream ended without [DONE]";
                return Err(EngineError::new(ErrorKind::StreamIncomplete, problem));
            };
            self.lines
                .push(&piece)
                .map_err(|problem| EngineError::new(ErrorKind::Disconnected, problem))?;
        }
    }

    async fn take(&mut self, event: Event, out: &OutputWriter) -> Result<(), EngineError> {
        if let Some(error) = event.error {
            return Err(refusal(None, &error));
        }
        self.usage = event.usage.or(self.usage);
        let mut text = String::new();
        for mut choice in event.choices {
            self.reason = choice.finish_reason.take().or(self.reason.take());
            text.extend(choice.texts());
        }
        if text.is_empty() {
            return Ok(());
        }
        // Most servers send one token per event; tokens not counted here are counted at the end.
        let counted = event
            .usage
            .map_or(1, |usage| usage.completion_tokens.saturating_sub(self.told));
        self.told = self.told.saturating_add(counted);
        out.text(text, tokens(counted)).await
    }

    /// The tokens not counted so far, and the finish.
    async fn end(self, out: &OutputWriter) -> Result<Finish, EngineError> {
        let Some(reason) = self.reason.as_deref() else {
            let problem = "the stream ended without a finish_reason";
            return Err(EngineError::new(ErrorKind::StreamIncomplete, problem));
        };
        let Some(usage) = self.usage else {
            let problem = "the stream has no usage, which \"include_usage\" asks for";
            return Err(EngineError::new(ErrorKind::StreamIncomplete, problem));
        };
        let rest = usage.completion_tokens.saturating_sub(self.told);
        if rest > 0 {
            out.text("", tokens(rest)).await?;
        }
        let finish = match reason {
            "length" => Finish::length(),
            "content_filter" => Finish {
                reason: FinishReason::ContentFilter,
                ..Finish::stop()
            },
            _ => Finish::stop(),
        };
        let finish = finish.with_prompt_tokens(tokens(usage.prompt_tokens));
        Ok(match usage.cached_tokens() {
            Some(cached) => finish.with_cached_tokens(tokens(cached)),
            None => finish,
        })
    }
}

fn tokens(count: u64) -> u32 {
    u32::try_from(count).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests;
