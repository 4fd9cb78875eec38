//! The model that a request asks for. One whose last worker has gone a moment ago is waited for, and one that is being prepared.

use std::sync::Arc;

use genset_backend_common::card::EndpointType;
use http::StatusCode;
use tokio::time::Instant;

use super::handlers::App;
use crate::error::ApiError;
use crate::model::ServedModel;

/// The longest name of a model that is looked for, in bytes.
const MAX_MODEL_BYTES: usize = 1024;

/// The model of this name or alias, whatever it offers. It is waited for as long as it is expected, but for no longer than
/// `--migration-wait`, nor past `deadline`.
///
/// # Errors
/// A 404 where there is none, a 503 where it is not there in time, and what the model itself is refused with.
pub(super) async fn find_any_model(
    app: &App,
    name: &str,
    deadline: Option<Instant>,
) -> Result<Arc<ServedModel>, ApiError> {
    if name.len() > MAX_MODEL_BYTES {
        let problem = format!("expected at most {MAX_MODEL_BYTES} bytes");
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

/// The model of this name or alias, as [`find_any_model`] finds it, where it offers `endpoint`.
///
/// # Errors
/// As [`find_any_model`]; a 400 where it does not offer that.
pub(super) async fn find_model(
    app: &App,
    name: &str,
    endpoint: EndpointType,
    deadline: Option<Instant>,
) -> Result<Arc<ServedModel>, ApiError> {
    let model = find_any_model(app, name, deadline).await?;
    if model.card.endpoint_types.contains(&endpoint) {
        return Ok(model);
    }
    let message = format!("The model '{name}' does not offer {endpoint}.");
    Err(ApiError {
        param: Some("model".into()),
        ..ApiError::new(StatusCode::BAD_REQUEST, message)
    })
}
