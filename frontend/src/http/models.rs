//! `/v1/models`: the served models, and their workers if only this machine can send requests. Anthropic's clients get them in
//! their own format.

use std::sync::Arc;

use axum::extract::rejection::PathRejection;
use axum::extract::{Path, State};
use axum::response::Response;
use genset_runtime::WorkerLoad;
use http::{HeaderMap, StatusCode, Uri};
use serde_json::{Value, json};

use super::handlers::App;
use super::messages::{reads_anthropics, refusal};
use super::replies::json_response;
use crate::anthropic::{self, ModelPage};
use crate::error::ApiError;
use crate::model::ServedModel;

/// Describes models and adapters as vLLM does: `parent` is the base model of an adapter. Only those who run the server see the
/// path of its files as `root`; others see its name.
fn model_json(app: &App, model: &ServedModel) -> Value {
    let name = &model.card.name;
    let adapter = model.adapter.as_ref();
    let source = adapter.filter(|_| app.config.is_for_this_machine());
    json!({
        "id": name,
        "object": "model",
        "created": model.created,
        "owned_by": "genset",
        "shutdown_date": null,
        "root": source.map_or(name, |adapter| &adapter.adapter.source),
        "parent": adapter.map(|adapter| &adapter.base),
        "max_model_len": model.card.context_length_tokens,
    })
}

/// The model as in the list, and its workers with their load if only this machine can send requests.
async fn model_detail(app: &App, model: &ServedModel) -> Value {
    let mut detail = model_json(app, model);
    // Workers are shown to those who run the server, not to every client.
    let live = app.models.workers(&model.card.name);
    let Some(live) = live.filter(|_| app.config.is_for_this_machine()) else {
        return detail;
    };
    let workers: Vec<String> = live.instances().iter().map(ToString::to_string).collect();
    let pools: serde_json::Map<String, Value> = live
        .pools
        .iter()
        .map(|(role, pool)| (role.to_string(), pool.instances.len().into()))
        .collect();
    let left_out: Vec<Value> = live
        .left_out
        .iter()
        .map(|worker| {
            json!({
                "instance": worker.instance.to_string(),
                "endpoint": worker.endpoint.to_string(),
                "differences": worker.differences,
            })
        })
        .collect();
    let told = app.loads.of_model(&live).await;
    detail["genset"] = json!({
        "endpoint": live.endpoint().to_string(),
        "workers": workers,
        "pools": pools,
        "loads": told.iter().map(load_json).collect::<Value>(),
        "left_out_workers": left_out,
    });
    detail
}

/// A worker's load, as in `genset top --json`.
fn load_json(told: &WorkerLoad) -> Value {
    let error = told.load.as_ref().err();
    json!({
        "worker": told.worker.to_string(),
        "role": told.role.to_string(),
        "load": told.load.as_ref().ok(),
        "error": error.map(|error| json!({"kind": error.kind().name(), "message": error.to_string()})),
    })
}

/// The model in Anthropic's format.
fn anthropics(model: &ServedModel) -> Value {
    let card = &model.card;
    anthropic::model_json(&card.name, model.created, card.context_length_tokens)
}

pub(super) async fn list(State(app): State<App>, uri: Uri, headers: HeaderMap) -> Response {
    let models = app.models.all();
    if reads_anthropics(uri.path(), &headers) {
        return match ModelPage::parse(uri.query()) {
            Ok(page) => {
                let list = page.of(&models, |model| &model.card.name, |model| anthropics(model));
                json_response(&list)
            }
            Err(error) => refusal(uri.path(), &headers, &error),
        };
    }
    let data: Vec<Value> = models.iter().map(|model| model_json(&app, model)).collect();
    json_response(&json!({"object": "list", "data": data}))
}

pub(super) async fn get(
    State(app): State<App>,
    uri: Uri,
    headers: HeaderMap,
    id: Result<Path<String>, PathRejection>,
) -> Response {
    match named(&app, id) {
        Ok(model) if reads_anthropics(uri.path(), &headers) => json_response(&anthropics(&model)),
        Ok(model) => json_response(&model_detail(&app, &model).await),
        Err(error) => refusal(uri.path(), &headers, &error),
    }
}

/// The model that a path names.
fn named(app: &App, id: Result<Path<String>, PathRejection>) -> Result<Arc<ServedModel>, ApiError> {
    let Path(id) = id.map_err(|_| {
        let message = "The model's name in the path is not valid UTF-8.";
        ApiError::new(StatusCode::BAD_REQUEST, message)
    })?;
    let model = app.models.get(&id);
    model.ok_or_else(|| ApiError::model_not_found(&id))
}

#[cfg(test)]
mod tests {
    use genset_backend_common::{EngineError, Role};
    use genset_runtime::InstanceId;

    use super::*;

    #[test]
    fn a_worker_that_says_no_load_is_told_with_the_reason() {
        let told = load_json(&WorkerLoad {
            worker: InstanceId(1),
            role: Role::Decode,
            load: Err(EngineError::not_found("it has gone")),
        });
        assert_eq!(told["worker"], "00000000000001");
        assert_eq!(told["role"], "decode");
        assert_eq!(told["load"], Value::Null);
        assert_eq!(told["error"]["kind"], "not_found");
    }
}
