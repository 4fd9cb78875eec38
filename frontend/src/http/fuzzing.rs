//! Entry points for fuzz targets alone: the body that creates a batch, and uploads.

use std::path::Path;
use std::sync::Arc;
use std::{fs, io};

use axum::Extension;
use axum::body::{Body, Bytes};
use axum::extract::State;
use futures_util::{StreamExt, stream};
use genset_runtime::Runtime;
use http::{HeaderMap, HeaderValue, header};
use tokio_util::sync::CancellationToken;

use super::access::Caller;
use super::batches::BatchRequest;
use super::files;
use super::handlers::App;
use crate::batch::run::Stops;
use crate::batch::store::BatchStore;
use crate::config::{BatchConfig, FrontendConfig};
use crate::error::ApiError;
use crate::model::Models;

/// Parses the body of `POST /v1/batches`.
///
/// # Errors
/// If the body is not a request for a batch.
pub fn batch_request(body: &[u8]) -> Result<(), ApiError> {
    BatchRequest::parse(body.into()).map(drop)
}

/// Uploads a file to a server with an empty `folder`. The body arrives in these pieces. Returns the status, and the content of the
/// file if it was kept.
///
/// # Errors
/// If the folder cannot be used.
pub fn upload(
    folder: &Path,
    content_type: &[u8],
    pieces: Vec<Bytes>,
) -> io::Result<(u16, Option<Vec<u8>>)> {
    let mut headers = HeaderMap::new();
    if let Ok(kind) = HeaderValue::from_bytes(content_type) {
        headers.insert(header::CONTENT_TYPE, kind);
    }
    // As over a connection: the server waits for each piece.
    let body = stream::iter(pieces).then(|piece| async move {
        tokio::task::yield_now().await;
        Ok::<_, io::Error>(piece)
    });
    let body = Body::from_stream(body);
    let threads = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    threads.block_on(async {
        let (_runtime, app, store) = server(folder)?;
        let caller = Extension(Caller::default());
        let response = files::upload(State(app), caller, headers, body).await;
        let kept = store.files(None).pop();
        let content = kept.map(|file| fs::read(store.content(&file.id)));
        Ok((response.status().as_u16(), content.transpose()?))
    })
}

/// A server without a port that keeps files.
fn server(folder: &Path) -> io::Result<(Runtime, App, BatchStore)> {
    let store = BatchStore::open(folder.to_owned(), BatchConfig::default())?;
    let runtime = Runtime::in_process();
    let config = Arc::new(FrontendConfig {
        access_log: false,
        ..FrontendConfig::default()
    });
    let models = Models::follow(&runtime, &config);
    let never = CancellationToken::new();
    let app = App::new(&runtime, models, config, None, never);
    let app = app.with_batches(store.clone(), Stops::default());
    Ok((runtime, app, store))
}
