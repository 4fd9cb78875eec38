//! [`Target`]: a server that answered, and what it accepts.

use bytes::Bytes;
use genset_backend_common::EngineError;
use serde_json::{Value, json};

use super::ApiName;
use super::client::{Client, Failure, FailureKind};
use super::prompts::{Prompts, Said};

/// How often every word occurs in the second of the two measuring prompts. In the first it occurs once.
const ROUNDS: u32 = 2;

/// Fields that keep an answer from ending early. Not every server accepts them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum LengthFields {
    Both,
    IgnoreEos,
    None,
}

/// A server that answers requests.
pub(super) struct Target {
    pub(super) client: Client,
    pub(super) model: String,
    api: ApiName,
    length_fields: LengthFields,
    pub(super) prompts: Prompts,
    /// Remarks for the user.
    pub(super) remarks: Vec<String>,
}

impl Target {
    /// Asks the server for its models and a few answers. Conversations contain the text of answers, so their prompts are text.
    ///
    /// # Errors
    /// `InvalidArgument`: nothing answers, a key is required, or the model is not served; says what to do.
    pub(super) async fn find(
        client: Client,
        model: Option<&str>,
        api: ApiName,
        is_conversation: bool,
    ) -> Result<Self, EngineError> {
        let model = find_model(&client, model).await?;
        let mut target = Self {
            client,
            model,
            api,
            length_fields: LengthFields::Both,
            prompts: Prompts::UNMEASURED,
            remarks: Vec::new(),
        };
        let takes_ids = api == ApiName::Completions && !is_conversation;
        if takes_ids && let Some(ids) = target.ids().await {
            target.prompts = Prompts::Ids(ids);
        }
        let once = target.first_answer().await?;
        if matches!(target.prompts, Prompts::Words { .. }) {
            let several = target.prompt_tokens(ROUNDS).await;
            let several = several.map_err(|failure| target.refused(&failure))?;
            match once.zip(several) {
                Some((once, several)) => {
                    target.prompts = Prompts::measured(once, ROUNDS, several);
                }
                None => target.remarks.push(
                    "the server reports no token counts: each word of a prompt and each piece of an answer counts as one token".into(),
                ),
            }
        }
        Ok(target)
    }

    /// The path for requests.
    pub(super) fn path(&self) -> &'static str {
        self.api.path()
    }

    /// The body of a streamed request.
    pub(super) fn body(&self, said: &Said, max_tokens: u32) -> Bytes {
        let mut body = json!({
            "model": self.model,
            "stream": true,
            "stream_options": {"include_usage": true},
            "max_tokens": max_tokens,
            "temperature": 0,
        });
        if let Some(fields) = body.as_object_mut() {
            if self.length_fields != LengthFields::None {
                fields.insert("ignore_eos".into(), json!(true));
            }
            if self.length_fields == LengthFields::Both {
                fields.insert("min_tokens".into(), json!(max_tokens));
            }
        }
        said.write(self.api, &mut body);
        Bytes::from(body.to_string())
    }

    /// The token ids of words, from servers with vLLM's tokenize endpoint.
    async fn ids(&self) -> Option<Vec<u32>> {
        let request = json!({
            "model": self.model,
            "prompt": Prompts::sample(),
            "add_special_tokens": false,
        });
        let answer = self.client.post("/tokenize", &request).await.ok()?;
        let ids: Vec<u32> = serde_json::from_value(answer.get("tokens")?.clone()).ok()?;
        (ids.len() >= 16).then_some(ids)
    }

    /// Sends a request with the fields that keep an answer from ending, and with fewer if they are refused. Returns the token
    /// count of the first prompt.
    async fn first_answer(&mut self) -> Result<Option<u64>, EngineError> {
        loop {
            let failure = match self.prompt_tokens(1).await {
                Ok(tokens) => return Ok(tokens),
                Err(failure) => failure,
            };
            let next = match self.length_fields {
                LengthFields::Both => LengthFields::IgnoreEos,
                LengthFields::IgnoreEos => LengthFields::None,
                LengthFields::None => return Err(self.refused(&failure)),
            };
            if !matches!(failure.kind, FailureKind::Status(400 | 422)) {
                return Err(self.refused(&failure));
            }
            if next == LengthFields::None {
                let why = &failure.problem;
                self.remarks.push(format!(
                    "the server takes no ignore_eos, so answers may end before their length ({why})"
                ));
            }
            self.length_fields = next;
        }
    }

    /// The server's token count for a prompt with every word `rounds` times, or with some ids.
    async fn prompt_tokens(&self, rounds: u32) -> Result<Option<u64>, Failure> {
        let body = self.body(&self.prompts.probe(rounds), 1);
        let answer = self.client.stream(self.api.path(), body).await?;
        let counted = answer.usage.map(|usage| usage.prompt_tokens);
        Ok(counted.filter(|tokens| *tokens > 0))
    }

    fn refused(&self, failure: &Failure) -> EngineError {
        match failure.kind {
            FailureKind::Status(404) => EngineError::invalid_argument(
                "--model",
                format!(
                    "{} has no {} for {:?}: {}",
                    self.client.shown(),
                    self.api.path(),
                    self.model,
                    failure.problem
                ),
            ),
            FailureKind::Status(_)
            | FailureKind::Connect
            | FailureKind::Broken
            | FailureKind::Event => unusable(&self.client, failure),
        }
    }
}

/// The model to request: the named one, or the only one.
async fn find_model(client: &Client, model: Option<&str>) -> Result<String, EngineError> {
    let listed = match client.get("/v1/models").await {
        Ok(models) => models,
        // A server need not list its models.
        Err(failure) if failure.kind == FailureKind::Status(404) => Value::Null,
        Err(failure) => return Err(unusable(client, &failure)),
    };
    let all = listed.get("data").and_then(Value::as_array);
    let names: Vec<&str> = (all.into_iter().flatten())
        .filter_map(|model| model.get("id")?.as_str())
        .collect();
    let served = names.join(", ");
    let problem = match (model, names.as_slice()) {
        (Some(model), []) => return Ok(model.into()),
        (Some(model), names) if names.contains(&model) => return Ok(model.into()),
        (None, [only]) => return Ok((*only).into()),
        (Some(model), _) => format!("{} does not serve {model:?}, but: {served}", client.shown()),
        (None, []) => format!("{} lists no model; say which to ask for", client.shown()),
        (None, _) => format!("{} serves several, say which: {served}", client.shown()),
    };
    Err(EngineError::invalid_argument("--model", problem))
}

/// The error for a server that cannot be measured; says what to do.
fn unusable(client: &Client, failure: &Failure) -> EngineError {
    let (shown, problem) = (client.shown(), &failure.problem);
    match failure.kind {
        FailureKind::Connect => EngineError::invalid_argument(
            "URL",
            format!(
                "nobody answers at {shown} ({problem}); start a server, such as `genset run in=http`, or mend the address"
            ),
        ),
        FailureKind::Status(401 | 403) => EngineError::invalid_argument(
            "--api-key",
            format!("{shown} requires a valid key ({problem}); give it here or as OPENAI_API_KEY"),
        ),
        FailureKind::Broken | FailureKind::Event => EngineError::invalid_argument(
            "URL",
            format!("{shown} does not answer as OpenAI's API does: {problem}"),
        ),
        status => {
            EngineError::invalid_argument("URL", format!("{shown} answered {status}: {problem}"))
        }
    }
}
