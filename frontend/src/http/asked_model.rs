//! Finds the model that a request names. Waits if its last worker has just left, or if the model is being prepared.

use std::sync::Arc;

use genset_backend_common::card::{EndpointType, MAX_MODEL_NAME_BYTES};
use http::StatusCode;
use tokio::time::Instant;

use super::handlers::App;
use crate::error::ApiError;
use crate::model::ServedModel;

/// Returns the model of this name or alias, which must offer `endpoint`, if one is given. Waits for it while it is expected, but
/// no longer than `--migration-wait` and not past `deadline`.
///
/// # Errors
/// A 404 if there is no such model, a 503 if it does not appear in time, a 400 if it does not offer `endpoint`, and the model's own
/// refusal.
pub(super) async fn find_model(
    app: &App,
    name: &str,
    endpoint: Option<EndpointType>,
    deadline: Option<Instant>,
) -> Result<Arc<ServedModel>, ApiError> {
    let model = awaited(app, name, deadline).await?;
    match endpoint.filter(|endpoint| !model.card.endpoint_types.contains(endpoint)) {
        None => Ok(model),
        Some(endpoint) => {
            let message = format!("The model '{name}' does not offer {endpoint}.");
            Err(ApiError {
                param: Some("model".into()),
                ..ApiError::new(StatusCode::BAD_REQUEST, message)
            })
        }
    }
}

/// Returns the model of this name or alias once it is served.
async fn awaited(
    app: &App,
    name: &str,
    deadline: Option<Instant>,
) -> Result<Arc<ServedModel>, ApiError> {
    if name.len() > MAX_MODEL_NAME_BYTES {
        let problem = format!("expected at most {MAX_MODEL_NAME_BYTES} bytes");
        return Err(ApiError::invalid("model", problem));
    }
    let models = &app.models;
    if let Some(model) = models.get(name) {
        return Ok(model);
    }
    if let Some(refusal) = models.refusal(name) {
        return Err(ApiError {
            status: StatusCode::SERVICE_UNAVAILABLE,
            ..refusal.into()
        });
    }
    let expected = match (models.is_coming(name), models.expected_until(name)) {
        (true, _) => None,
        (false, Some(until)) => Some(until),
        (false, None) => return Err(ApiError::model_not_found(name)),
    };
    let patience = Instant::now().checked_add(app.config.router.migration.wait);
    let until = [expected, patience, deadline].into_iter().flatten().min();
    tokio::select! {
        biased;
        back = models.get_by(name, until) => back.ok_or_else(|| ApiError::model_gone(name)),
        () = app.draining.cancelled() => Err(ApiError::draining()),
    }
}
