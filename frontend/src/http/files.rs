//! `/v1/files`: the files that batches read and write. The server keeps them in a folder. It writes an upload to disk as it
//! arrives, so a large file needs no more memory than a small one. The memory budget counts received bytes until they are written.

use std::future::ready;
use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use axum::body::Body;
use axum::extract::{RawQuery, State};
use axum::response::{IntoResponse, Response};
use axum::{BoxError, Extension};
use bytes::Bytes;
use futures_util::{StreamExt, stream};
use http::{HeaderMap, StatusCode, header};
use multer::{Field, Multipart};
use percent_encoding::percent_decode_str;
use serde_json::json;
use tempfile::NamedTempFile;
use tokio::task::yield_now;
use tokio::time::{Duration, Instant, timeout_at};
use tokio_util::io::ReaderStream;

use super::access::Caller;
use super::handlers::App;
use super::listing::Pages;
use super::replies::{json_response, list_response};
use super::request_id::request_id;
use super::responses::Id;
use crate::batch::records::{FileRecord, Purpose, new_id};
use crate::batch::run::Batches;
use crate::batch::store::{UploadRoom, file_not_found, not_written};
use crate::budget::MemoryShare;
use crate::clock::now;
use crate::error::{ApiError, Param};

/// The longest field of an upload other than its file, in bytes.
const MAX_FIELD_BYTES: usize = 256;

/// The longest name of a file, in bytes.
const MAX_NAME_BYTES: usize = 256;

/// How many received bytes may be unused: more is a part's head that never ends.
const MAX_AHEAD_BYTES: usize = 2 << 20;

/// How many received bytes may be unused while memory is short, as for other bodies.
const SMALL_AHEAD_BYTES: usize = 64 << 10;

/// The minimum pace of an upload after `body_timeout`, in bytes per second.
const LEAST_PACE: u64 = 64 << 10;

/// How long a file may be kept, in seconds.
const LIFETIMES_S: std::ops::RangeInclusive<u64> = 3600..=2_592_000;

const PAGES: Pages = Pages {
    usual_limit: 1000,
    max_limit: 10_000,
    further: &["order", "purpose"],
};

/// Returns the batches of a server that keeps batches.
///
/// # Errors
/// A 404 that says how to start such a server.
pub(super) fn kept(app: &App) -> Result<&Batches, ApiError> {
    app.batches.as_ref().ok_or_else(|| {
        let message = "This server keeps no files and no batches. Start it with --batch-folder and a folder for them.";
        ApiError {
            code: Some("no_batch_folder"),
            ..ApiError::new(StatusCode::NOT_FOUND, message)
        }
    })
}

/// Checks how long a file is to be kept, in seconds.
///
/// # Errors
/// A 400 that names `param`.
pub(super) fn lifetime(param: &'static str, seconds: u64) -> Result<u64, ApiError> {
    match LIFETIMES_S.contains(&seconds) {
        true => Ok(seconds),
        false => {
            let (least, most) = (LIFETIMES_S.start(), LIFETIMES_S.end());
            let problem = format!("must be between {least} and {most} seconds");
            Err(ApiError::invalid(param, problem))
        }
    }
}

pub(super) async fn upload(
    State(app): State<App>,
    Extension(caller): Extension<Caller>,
    headers: HeaderMap,
    body: Body,
) -> Response {
    let mut guard = app.metrics.request("files", &request_id(&headers));
    let uploaded = async {
        guard.admit(caller.clone())?;
        let batches = kept(&app)?;
        if app.draining.is_cancelled() {
            return Err(ApiError::draining());
        }
        let upload = Upload::read(&app, batches, &caller, &headers, body).await?;
        let file = upload.record(&caller, batches)?;
        let (record, content, room) = (file.clone(), upload.content, upload.room);
        let added = batches.with_store(move |store| store.add_file(record, content, room));
        added.await?;
        Ok(json_response(&file.to_json()))
    };
    match uploaded.await {
        Ok(response) => {
            guard.set_status(StatusCode::OK);
            response
        }
        Err(error) => {
            guard.fail(&error);
            error.response(Param::plain)
        }
    }
}

/// The parts of an upload.
struct Upload {
    content: NamedTempFile,
    /// The room that `bytes` take of the owner's limit.
    room: UploadRoom,
    bytes: u64,
    filename: String,
    purpose: Option<String>,
    anchor: Option<String>,
    seconds: Option<String>,
}

/// How fast an upload arrives, and by when its next bytes must arrive.
struct Pace {
    begun: Instant,
    patience: Duration,
    /// The bytes that were used so far.
    used: Arc<AtomicUsize>,
}

impl Pace {
    fn bytes(&self) -> u64 {
        self.used.load(Ordering::Relaxed) as u64
    }

    fn deadline(&self) -> Instant {
        self.begun + self.patience + Duration::from_secs(self.bytes() / LEAST_PACE)
    }

    fn too_slow(&self) -> ApiError {
        let message = format!(
            "The upload came too slowly: {} bytes in {} s.",
            self.bytes(),
            self.begun.elapsed().as_secs()
        );
        ApiError::new(StatusCode::REQUEST_TIMEOUT, message)
    }
}

impl Upload {
    async fn read(
        app: &App,
        batches: &Batches,
        caller: &Caller,
        headers: &HeaderMap,
        body: Body,
    ) -> Result<Self, ApiError> {
        let kind = headers
            .get(header::CONTENT_TYPE)
            .and_then(|kind| kind.to_str().ok());
        let boundary = multer::parse_boundary(kind.unwrap_or_default()).map_err(|_| {
            let message =
                "Send the file as multipart/form-data, with the fields 'purpose' and 'file'.";
            ApiError {
                param: Some("content-type".into()),
                ..ApiError::new(StatusCode::BAD_REQUEST, message)
            }
        })?;
        let room = batches.store().room(caller.name())?;
        let content =
            batches.with_store(|store| store.new_content().map_err(|error| not_written(&error)));
        let mut upload = Self {
            content: content.await?,
            room,
            bytes: 0,
            filename: String::new(),
            purpose: None,
            anchor: None,
            seconds: None,
        };
        let pace = Pace {
            begun: Instant::now(),
            patience: app.config.body_timeout,
            used: Arc::default(),
        };
        let body = no_further_ahead(body, Arc::clone(&pace.used), app.metrics.share());
        let mut parts = Multipart::new(body, boundary);
        let mut has_file = false;
        loop {
            let next = timeout_at(pace.deadline(), parts.next_field()).await;
            let Some(mut part) = next
                .map_err(|_| pace.too_slow())?
                .map_err(|error| broken(&error))?
            else {
                break;
            };
            let name = part.name().unwrap_or_default().to_owned();
            let field = match &*name {
                "file" if !has_file => {
                    has_file = true;
                    upload.filename = name_of(&part)?;
                    let max = batches.store().config().max_file_bytes;
                    upload.write(batches, &mut part, &pace, max).await?;
                    continue;
                }
                "purpose" => &mut upload.purpose,
                "expires_after[anchor]" => &mut upload.anchor,
                "expires_after[seconds]" => &mut upload.seconds,
                "file" => return Err(ApiError::invalid("file", "it is given more than once")),
                _ => return Err(ApiError::unknown(name)),
            };
            *field = Some(text(&name, &mut part, &pace).await?);
        }
        match has_file {
            true => Ok(upload),
            false => Err(ApiError::invalid("file", "you must provide a file")),
        }
    }

    /// Writes a part to disk as it arrives.
    async fn write(
        &mut self,
        batches: &Batches,
        part: &mut Field<'_>,
        pace: &Pace,
        max: u64,
    ) -> Result<(), ApiError> {
        while let Some(bytes) = chunk(part, pace).await? {
            let length = bytes.len() as u64;
            self.bytes += length;
            if self.bytes > max {
                let message = format!("The file is over this server's limit of {max} bytes.");
                return Err(ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, message));
            }
            self.room.take(length)?;
            let file = self.content.as_file().try_clone();
            let written = batches.with_store(move |_| {
                let written = file.and_then(|mut file| file.write_all(&bytes));
                written.map_err(|error| not_written(&error))
            });
            written.await?;
        }
        Ok(())
    }

    fn record(&self, caller: &Caller, batches: &Batches) -> Result<FileRecord, ApiError> {
        match self.purpose.as_deref() {
            Some("batch") => {}
            Some(_) => return Err(ApiError::invalid("purpose", "only \"batch\" is available")),
            None => return Err(ApiError::invalid("purpose", "you must provide \"batch\"")),
        }
        if self
            .anchor
            .as_deref()
            .is_some_and(|anchor| anchor != "created_at")
        {
            let problem = "expected \"created_at\"";
            return Err(ApiError::invalid("expires_after[anchor]", problem));
        }
        let seconds = match &self.seconds {
            Some(seconds) => {
                let seconds = seconds.parse().unwrap_or(0);
                lifetime("expires_after[seconds]", seconds)?
            }
            None => batches.store().config().lifetime.as_secs(),
        };
        let created_at = now();
        Ok(FileRecord {
            id: new_id("file-"),
            owner: caller.name().map(str::to_owned),
            bytes: self.bytes,
            created_at,
            expires_at: created_at.saturating_add(seconds),
            filename: self.filename.clone(),
            purpose: Purpose::Batch,
        })
    }
}

/// The memory budget's refusal, which stops the reading of a body.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Refused(ApiError);

/// Returns the stream of a body, which fails if too many received bytes are unused: a part's head is buffered whole. `memory`
/// holds the unused bytes until the stream is dropped.
fn no_further_ahead(
    body: Body,
    used: Arc<AtomicUsize>,
    mut memory: MemoryShare,
) -> impl futures_util::Stream<Item = Result<Bytes, BoxError>> + Send {
    let mut came = 0_usize;
    body.into_data_stream()
        .map(move |piece| -> Result<Bytes, BoxError> {
            let piece = piece?;
            came += piece.len();
            let ahead = came - used.load(Ordering::Relaxed);
            if ahead > MAX_AHEAD_BYTES {
                return Err("a part's head is too long".into());
            }
            // The unused bytes are in a buffer that doubles and never shrinks.
            let more = (2 * ahead).saturating_sub(memory.bytes());
            let grown = match (more, ahead > SMALL_AHEAD_BYTES) {
                (0, _) => Ok(()),
                (_, true) => memory.grow_below_half(more),
                (_, false) => memory.grow(more),
            };
            grown.map_err(Refused)?;
            Ok(piece)
        })
        // `multer` polls twice while it looks for the first boundary, and looks only after the first time: a whole body that arrives
        // with its end in between would be one without a boundary. So the end comes later than the data.
        .chain(stream::once(Box::pin(yield_now())).filter_map(|()| ready(None)))
}

/// The next bytes of a part.
async fn chunk(part: &mut Field<'_>, pace: &Pace) -> Result<Option<Bytes>, ApiError> {
    let next = timeout_at(pace.deadline(), part.chunk()).await;
    let bytes = next
        .map_err(|_| pace.too_slow())?
        .map_err(|error| broken(&error))?;
    if let Some(bytes) = &bytes {
        pace.used.fetch_add(bytes.len(), Ordering::Relaxed);
    }
    Ok(bytes)
}

/// Reads a short part whole.
async fn text(name: &str, part: &mut Field<'_>, pace: &Pace) -> Result<String, ApiError> {
    let mut text = Vec::new();
    while let Some(bytes) = chunk(part, pace).await? {
        text.extend_from_slice(&bytes);
        if text.len() > MAX_FIELD_BYTES {
            let problem = format!("has more than {MAX_FIELD_BYTES} bytes");
            return Err(ApiError::invalid(name.to_owned(), problem));
        }
    }
    String::from_utf8(text).map_err(|_| ApiError::invalid(name.to_owned(), "is not valid UTF-8"))
}

/// The client's name for the file. It is only shown; it names no file on this machine.
fn name_of(part: &Field<'_>) -> Result<String, ApiError> {
    let head = part.headers().get(header::CONTENT_DISPOSITION);
    let encoded = head.and_then(|head| encoded_name(head.to_str().ok()?));
    let name = encoded.as_deref().or_else(|| part.file_name());
    let name = name.unwrap_or("file.jsonl");
    match name.len() {
        1..=MAX_NAME_BYTES => Ok(name.to_owned()),
        _ => {
            let problem = format!("its name must have 1 to {MAX_NAME_BYTES} bytes");
            Err(ApiError::invalid("file", problem))
        }
    }
}

/// The name in `filename*=UTF-8''...`, as some clients send one that is not ASCII.
fn encoded_name(head: &str) -> Option<String> {
    // A quoted parameter may have anything in it.
    let (mut is_quoted, mut is_escaped) = (false, false);
    let mut parameters = head.split(|letter: char| {
        is_quoted ^= letter == '"' && !is_escaped;
        is_escaped = letter == '\\' && is_quoted && !is_escaped;
        letter == ';' && !is_quoted
    });
    let value = parameters.find_map(|it| it.trim_start().strip_prefix("filename*="))?;
    let (charset, value) = value.trim().split_once('\'')?;
    let (_language, name) = value.split_once('\'')?;
    let name = percent_decode_str(name).decode_utf8().ok()?;
    let is_utf8 = charset.eq_ignore_ascii_case("utf-8");
    is_utf8.then(|| name.into_owned())
}

fn broken(error: &multer::Error) -> ApiError {
    if let multer::Error::StreamReadFailed(source) = error
        && let Some(Refused(refused)) = source.downcast_ref::<Refused>()
    {
        return refused.clone();
    }
    let message = format!("The body is no multipart/form-data: {error}.");
    ApiError::new(StatusCode::BAD_REQUEST, message)
}

pub(super) async fn list(
    State(app): State<App>,
    Extension(caller): Extension<Caller>,
    RawQuery(query): RawQuery,
) -> Result<Response, ApiError> {
    let store = kept(&app)?.store().clone();
    let page = PAGES.parse(query.as_deref())?;
    let make = move || {
        let mut files = store.files(caller.name());
        if let Some(purpose) = &page.purpose {
            files.retain(|file| file.purpose.name() == purpose);
        }
        page.of(&files, |file| &file.id, FileRecord::to_json)
    };
    list_response(&app, make).await
}

/// Returns the caller's file of this id.
fn file_of(app: &App, caller: &Caller, id: &str) -> Result<FileRecord, ApiError> {
    let file = kept(app)?.store().file(id, caller.name());
    file.ok_or_else(|| file_not_found(id, "file_id"))
}

pub(super) async fn retrieve(
    State(app): State<App>,
    Extension(caller): Extension<Caller>,
    Id(id): Id,
) -> Result<Response, ApiError> {
    let file = file_of(&app, &caller, &id)?;
    Ok(json_response(&file.to_json()))
}

pub(super) async fn content(
    State(app): State<App>,
    Extension(caller): Extension<Caller>,
    Id(id): Id,
) -> Result<Response, ApiError> {
    let file = file_of(&app, &caller, &id)?;
    let path = kept(&app)?.store().content(&file.id);
    let opened = tokio::fs::File::open(&path).await.map_err(|error| {
        tracing::error!(%error, path = %path.display(), "a kept file cannot be read");
        ApiError::new(
            StatusCode::INTERNAL_SERVER_ERROR,
            "The file cannot be read.",
        )
    })?;
    let headers = [
        (header::CONTENT_TYPE, "application/octet-stream".to_owned()),
        (header::CONTENT_LENGTH, file.bytes.to_string()),
    ];
    let content = Body::from_stream(ReaderStream::with_capacity(opened, 64 << 10));
    Ok((headers, content).into_response())
}

pub(super) async fn delete(
    State(app): State<App>,
    Extension(caller): Extension<Caller>,
    Id(id): Id,
) -> Result<Response, ApiError> {
    let (of_id, owner) = (id.clone(), caller.name().map(str::to_owned));
    let batches = kept(&app)?;
    let deleted = batches.with_store(move |store| store.delete_file(&of_id, owner.as_deref()));
    match deleted.await? {
        true => Ok(json_response(
            &json!({"id": id, "object": "file", "deleted": true}),
        )),
        false => Err(file_not_found(&id, "file_id")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::budget::MemoryBudget;

    /// A part's head of `bytes` bytes that does not end.
    fn head(bytes: usize) -> Body {
        let begun = "--b\r\ncontent-disposition: form-data; name=\"";
        Body::from(format!("{begun}{}", "a".repeat(bytes - begun.len())))
    }

    #[tokio::test]
    async fn what_is_ahead_is_held_while_the_body_is_there() {
        let budget = MemoryBudget::new(16 << 20);
        let mut ahead = no_further_ahead(head(100_000), Arc::default(), budget.share());
        assert!(ahead.next().await.unwrap().is_ok());
        assert_eq!(budget.used(), 200_000);
        drop(ahead);
        assert_eq!(budget.used(), 0);
    }

    #[tokio::test]
    async fn the_end_of_a_body_is_seen_later_than_its_data() {
        let budget = MemoryBudget::new(16 << 20);
        let mut body = no_further_ahead(head(100), Arc::default(), budget.share());
        assert!(body.next().await.unwrap().is_ok());
        let mut end = Box::pin(body.next());
        assert!(futures_util::poll!(&mut end).is_pending());
        assert!(end.await.is_none());
    }

    #[tokio::test]
    async fn uploads_that_are_ahead_leave_half_of_the_memory_to_others() {
        let budget = MemoryBudget::new(16 << 20);
        let mut others = budget.share();
        others.grow(8 << 20).unwrap();
        for (bytes, status) in [
            (10_000, StatusCode::BAD_REQUEST),
            (100_000, StatusCode::SERVICE_UNAVAILABLE),
        ] {
            let body = no_further_ahead(head(bytes), Arc::default(), budget.share());
            let error = Multipart::new(body, "b").next_field().await.err().unwrap();
            let refused = broken(&error);
            assert_eq!(refused.status, status, "{refused}");
        }
    }
}
