//! The requests of clients in a chaos run, and their answers.

use std::collections::BTreeMap;
use std::net::SocketAddr;

use rand::{Rng, RngExt as _};
use serde_json::{Value, json};

use crate::support::{Exchange, events_of};

/// Kinds of requests, each twice.
pub(super) const KINDS: usize = 12;

const CHAT: &str = "/v1/chat/completions";
const COMPLETIONS: &str = "/v1/completions";

/// A request, as a client sends it.
#[derive(Debug)]
pub(super) struct Request {
    path: &'static str,
    body: Value,
}

/// A complete answer: the texts of each choice with its finish reason, and the total number of tokens.
pub(super) type Answer = (BTreeMap<u64, String>, u64);

impl Request {
    /// A random request of this `kind`. Its answer is always the same.
    pub(super) fn random(kind: usize, random: &mut impl Rng) -> Self {
        let number = random.random_range(0..1000);
        let schema = json!({
            "type": "object",
            "properties": {"city": {"enum": ["Paris", "Madrid"]}, "people": {"type": "integer", "maximum": 9_999_999}},
            "required": ["city", "people"],
            "additionalProperties": false,
        });
        let weather =
            json!({"type": "function", "function": {"name": "weather", "parameters": schema}});
        let (path, mut body) = match kind % 6 {
            0 => (COMPLETIONS, json!({"temperature": 0, "ignore_eos": true})),
            1 => (
                CHAT,
                json!({"temperature": 0, "frequency_penalty": 0.4, "ignore_eos": true}),
            ),
            2 => (
                CHAT,
                json!({"top_p": 0.95, "presence_penalty": 0.5, "ignore_eos": true}),
            ),
            3 => (
                COMPLETIONS,
                json!({"guided_regex": "[a-z]{4,9} [0-9]{20,60}!"}),
            ),
            4 => (
                CHAT,
                json!({"tools": [weather], "tool_choice": {"type": "function", "function": {"name": "weather"}}}),
            ),
            _ => (COMPLETIONS, json!({"n": 2, "ignore_eos": true})),
        };
        let question = format!("Tell me of the number {number}.");
        if path == CHAT {
            body["messages"] = json!([{"role": "user", "content": question}]);
        } else {
            body["prompt"] = question.into();
        }
        if body.get("temperature").is_none() {
            body["temperature"] = 0.9.into();
            body["seed"] = number.into();
        }
        body["model"] = "tiny-chat".into();
        // A guided answer ends by itself.
        let lengths = if matches!(kind % 6, 3 | 4) {
            [200; 3]
        } else {
            [4, 40, 200]
        };
        body["max_tokens"] = lengths[random.random_range(0..3)].into();
        if random.random_bool(0.5) {
            body["stream"] = true.into();
            body["stream_options"] = json!({"include_usage": true});
        }
        Self { path, body }
    }

    /// Sends the request.
    ///
    /// # Errors
    /// Anything but a complete answer.
    pub(super) async fn ask(&self, address: SocketAddr) -> Result<Answer, String> {
        let body = self.body.to_string();
        let exchange = Exchange::try_begin(address, "POST", self.path, &body)
            .await
            .map_err(|error| error.to_string())?;
        let response = exchange.response().await;
        let failure = || format!("{} {}", response.status, response.body);
        if response.status != 200 {
            return Err(failure());
        }
        let parts: Vec<Value> = if self.body["stream"] == true {
            let events = response.body.strip_suffix("data: [DONE]\n\n");
            events_of(events.ok_or_else(failure)?)
        } else {
            vec![serde_json::from_str(&response.body).map_err(|_| failure())?]
        };
        Ok(answer(&parts))
    }
}

fn answer(parts: &[Value]) -> Answer {
    /// The places of a choice's text, whole or streamed.
    const TEXTS: [&str; 6] = [
        "/text",
        "/message/content",
        "/delta/content",
        "/message/tool_calls/0/function/arguments",
        "/delta/tool_calls/0/function/arguments",
        "/finish_reason",
    ];
    let (mut texts, mut tokens) = (BTreeMap::<u64, String>::new(), 0);
    for part in parts {
        for choice in part["choices"].as_array().into_iter().flatten() {
            let text = texts
                .entry(choice["index"].as_u64().unwrap_or(0))
                .or_default();
            let found = TEXTS.iter().filter_map(|at| choice.pointer(at)?.as_str());
            text.extend(found);
        }
        tokens += part["usage"]["completion_tokens"].as_u64().unwrap_or(0);
    }
    (texts, tokens)
}
