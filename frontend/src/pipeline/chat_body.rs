//! Writes a chat as a body, for an engine that reads bodies itself and answers in the API's own objects. Chats and completions that
//! arrive as bodies do not come here: `http::whole` passes them on unchanged.

use std::sync::Arc;

use genset_backend_common::Input;

use super::{Job, Room, bytes_to_work_on};
use crate::error::ApiError;
use crate::model::ServedModel;
use crate::openai::ChatRequest;
use crate::parsers::Splitting;
use crate::work::Owner;

impl Job {
    /// Writes a chat as a body. Its media stay as they are, also URLs.
    ///
    /// # Errors
    /// A 400 if the request asks for log probabilities: those in the objects are not read.
    pub(super) async fn chat_body(
        model: Arc<ServedModel>,
        request: ChatRequest,
        room: Room,
    ) -> Result<Self, ApiError> {
        if let Some(logprobs) = &request.params.logprobs {
            logprobs.check(None).map_err(ApiError::in_chat)?;
        }
        let splitting = Splitting::of_objects(&request.tools);
        let values = request.messages.iter().chain(&request.tools.tools);
        let bytes = bytes_to_work_on(values.chain(request.template_args.values()));
        let work = move |_: &Owner| {
            let _room = room.memory;
            Ok(request.into_body())
        };
        let (body, params) = model.work.run(bytes, room.deadline, work).await?;
        Ok(Self {
            model,
            params,
            inputs: vec![Input::Text(body.into())],
            splitting: Some(splitting),
            guided: None,
            schema_bytes: 0,
            may_call_instead: false,
            bound_by: None,
            continues_prompts: false,
            echoes: Vec::new(),
        })
    }
}
