//! `/v1/batches`: batches of requests that were uploaded as files.

use axum::Extension;
use axum::extract::{RawQuery, State};
use axum::response::Response;
use http::StatusCode;
use serde_json::{Map, Value};

use super::access::Caller;
use super::apis::{Call, Reply};
use super::files::{kept, lifetime};
use super::handlers::App;
use super::listing::Pages;
use super::replies::{json_response, large_json_response, list_response};
use super::responses::Id;
use crate::batch::BATCH_URLS;
use crate::batch::records::{BatchRecord, BatchStatus, BatchTimes, Counts, new_id};
use crate::error::{ApiError, shown};
use crate::json::JsonBody;
use crate::openai::{Fields, short_texts};

/// The completion window of a batch: as OpenAI writes it, and in seconds.
const WINDOW: (&str, u64) = ("24h", 24 * 3600);

const PAGES: Pages = Pages {
    usual_limit: 20,
    max_limit: 100,
    further: &[],
};

/// A request to create a batch.
pub(super) struct BatchRequest {
    endpoint: String,
    input_file_id: String,
    metadata: Option<Map<String, Value>>,
    output_seconds: Option<u64>,
}

impl BatchRequest {
    pub(super) fn parse(body: JsonBody<'_>) -> Result<Self, ApiError> {
        let mut fields = Fields::parse(body)?;
        let missing = |name| move || ApiError::invalid(name, "you must provide it");
        let input_file_id = fields.string("input_file_id")?;
        let input_file_id = input_file_id.ok_or_else(missing("input_file_id"))?;
        let endpoint = fields.string("endpoint")?.ok_or_else(missing("endpoint"))?;
        if !BATCH_URLS.contains(&&*endpoint) {
            let problem = format!("expected one of {}", BATCH_URLS.join(", "));
            return Err(ApiError::invalid("endpoint", problem));
        }
        let window = fields.string("completion_window")?;
        if window.ok_or_else(missing("completion_window"))? != WINDOW.0 {
            let problem = format!("expected {:?}", WINDOW.0);
            return Err(ApiError::invalid("completion_window", problem));
        }
        let metadata = fields.take("metadata")?;
        let metadata = metadata.map(|value| short_texts("metadata", &value).cloned());
        let metadata = metadata.transpose()?;
        let output_seconds = match fields.object("output_expires_after")? {
            Some(mut expires) => {
                if expires
                    .string("anchor")?
                    .is_none_or(|anchor| anchor != "created_at")
                {
                    let problem = "expected \"created_at\"";
                    return Err(ApiError::invalid("output_expires_after.anchor", problem));
                }
                let name = "output_expires_after.seconds";
                let seconds = expires.u32("seconds")?;
                let seconds = seconds.ok_or_else(missing(name))?;
                expires.finish(&[])?;
                Some(lifetime(name, seconds.into())?)
            }
            None => None,
        };
        fields.finish(&[])?;
        Ok(Self {
            endpoint,
            input_file_id,
            metadata,
            output_seconds,
        })
    }

    fn record(self, caller: &Caller) -> BatchRecord {
        BatchRecord {
            id: new_id("batch_"),
            owner: caller.name().map(str::to_owned),
            endpoint: self.endpoint,
            input_file_id: self.input_file_id,
            completion_window: WINDOW.0.into(),
            status: BatchStatus::Validating,
            errors: Vec::new(),
            output_file_id: None,
            error_file_id: None,
            times: BatchTimes::begin(WINDOW.1),
            request_counts: Counts::default(),
            metadata: self.metadata,
            output_seconds: self.output_seconds,
        }
    }
}

pub(super) async fn create(call: &mut Call) -> Result<Reply, ApiError> {
    let batches = kept(&call.app)?.clone();
    let request = call.parse(|body, _| BatchRequest::parse(body)).await?;
    let record = request.record(&call.caller);
    let json = record.to_json().to_string();
    batches.add(record).await?;
    Ok(Reply::Json(json))
}

fn batch_not_found(id: &str) -> ApiError {
    let message = format!("No such Batch object: {}", shown(id));
    ApiError {
        param: Some("batch_id".into()),
        ..ApiError::new(StatusCode::NOT_FOUND, message)
    }
}

pub(super) async fn list(
    State(app): State<App>,
    Extension(caller): Extension<Caller>,
    RawQuery(query): RawQuery,
) -> Result<Response, ApiError> {
    let store = kept(&app)?.store().clone();
    let page = PAGES.parse(query.as_deref())?;
    let make = move || {
        // One more than the page holds, to see whether more follow.
        let (after, most) = (page.after.as_deref(), page.limit + 1);
        let last = store.batches(caller.name(), after, most);
        page.of(&last, |batch| &batch.id, |batch| batch.to_json())
    };
    list_response(&app, make).await
}

pub(super) async fn retrieve(
    State(app): State<App>,
    Extension(caller): Extension<Caller>,
    Id(id): Id,
) -> Result<Response, ApiError> {
    let batch = kept(&app)?.store().batch(&id, caller.name());
    let batch = batch.ok_or_else(|| batch_not_found(&id))?;
    large_json_response(&app, &batch.to_json())
}

pub(super) async fn cancel(
    State(app): State<App>,
    Extension(caller): Extension<Caller>,
    Id(id): Id,
) -> Result<Response, ApiError> {
    let (of_id, owner) = (id.clone(), caller.name().map(str::to_owned));
    let batches = kept(&app)?;
    let cancelled = batches.with_store(move |store| store.cancel(&of_id, owner.as_deref()));
    let batch = cancelled.await?.ok_or_else(|| batch_not_found(&id))?;
    Ok(json_response(&batch.to_json()))
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroUsize;
    use std::sync::Arc;
    use std::time::Duration;

    use futures_util::FutureExt;
    use genset_runtime::Runtime;
    use tokio_util::sync::CancellationToken;

    use super::*;
    use crate::batch::records::{FileRecord, Purpose};
    use crate::batch::run::Stops;
    use crate::batch::store::BatchStore;
    use crate::config::{BatchConfig, FrontendConfig};
    use crate::http::files;
    use crate::model::Models;
    use crate::work::tests::keep_busy;

    /// A server with batches in `folder`, an empty input file, and one thread for long work.
    fn app_in(folder: &std::path::Path) -> App {
        let store = BatchStore::open(folder.to_owned(), BatchConfig::default()).unwrap();
        let input = FileRecord {
            id: "file-0".into(),
            owner: None,
            bytes: 0,
            created_at: 0,
            expires_at: u64::MAX,
            filename: "in.jsonl".into(),
            purpose: Purpose::Batch,
        };
        let content = store.new_content().unwrap();
        store.add_output(input, content).unwrap();
        let runtime = Runtime::in_process();
        let config = FrontendConfig {
            work_threads: NonZeroUsize::MIN,
            ..FrontendConfig::default()
        };
        let models = Models::follow(&runtime, &config);
        let (config, never) = (Arc::new(config), CancellationToken::new());
        let app = App::new(&runtime, models, config, None, never);
        app.with_batches(store, Stops::default())
    }

    #[tokio::test]
    async fn lists_are_made_on_a_thread_for_long_work() {
        let folder = tempfile::tempdir().unwrap();
        let app = app_in(folder.path());
        let asked = || (State(app.clone()), Extension(Caller::default()));
        let ((of_batches, nobody), (of_files, nobody_else)) = (asked(), asked());
        for mut listing in [
            list(of_batches, nobody, RawQuery(None)).boxed(),
            files::list(of_files, nobody_else, RawQuery(None)).boxed(),
        ] {
            let (working, end) = keep_busy(app.models.work()).await;
            assert!((&mut listing).now_or_never().is_none());
            drop(end);
            working.await.unwrap();
            assert_eq!(listing.await.unwrap().status(), StatusCode::OK);
        }
    }

    #[tokio::test]
    async fn a_batch_whose_client_leaves_while_it_is_kept_is_answered() {
        let folder = tempfile::tempdir().unwrap();
        let app = app_in(folder.path());
        let batches = kept(&app).unwrap();
        let request = BatchRequest {
            endpoint: BATCH_URLS[0].into(),
            input_file_id: "file-0".into(),
            metadata: None,
            output_seconds: None,
        };
        let record = request.record(&Caller::default());
        let id = record.id.clone();
        // Polled once and dropped, as if the client had left.
        drop(batches.add(record).now_or_never());
        let status = || Some(batches.store().batch(&id, None)?.status);
        let ended = async {
            while !status().is_some_and(BatchStatus::is_end) {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        let patience = Duration::from_secs(60);
        tokio::time::timeout(patience, ended).await.unwrap();
    }
}
