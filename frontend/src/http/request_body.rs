//! The body of a request: read whole, within its limits of size and time, and never decoded.
//!
//! A body that comes compressed is refused: nobody compresses a prompt by accident, and what a few bytes may swell to is
//! not for a client to choose. All bodies together have a budget, so that many large ones at once are refused before they
//! take the memory of everybody else. What was announced and not sent takes none of it.

use std::ops::Deref;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use bytes::{Bytes, BytesMut};
use http::{HeaderMap, StatusCode, header};
use http_body::Body as _;
use http_body_util::{BodyExt, LengthLimitError, Limited};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::config::FrontendConfig;
use crate::error::ApiError;

/// The budget is counted in these: a permit for every byte would not fit a semaphore's 32 bits.
const UNIT_BYTES: usize = 1 << 10;

/// The memory that all bodies may take together.
#[derive(Debug, Clone)]
pub(super) struct BodyBudget {
    units: Arc<Semaphore>,
    bytes: usize,
}

impl BodyBudget {
    pub(super) fn new(bytes: usize) -> Self {
        let units = bytes.div_ceil(UNIT_BYTES).min(Semaphore::MAX_PERMITS);
        Self {
            units: Arc::new(Semaphore::new(units)),
            bytes,
        }
    }

    /// A place for so many bytes, if there is one now: who waits here holds what others wait for.
    fn take(&self, bytes: usize) -> Result<OwnedSemaphorePermit, ApiError> {
        let units = u32::try_from(bytes.div_ceil(UNIT_BYTES)).unwrap_or(u32::MAX);
        let place = Arc::clone(&self.units).try_acquire_many_owned(units);
        place.map_err(|_| {
            let message = format!(
                "The bodies of all requests are over this server's limit of {} bytes. Send the request again.",
                self.bytes
            );
            ApiError {
                retry_after: Some(Duration::from_secs(1)),
                ..ApiError::new(StatusCode::SERVICE_UNAVAILABLE, message)
            }
        })
    }
}

/// A body, and its place in the budget for as long as it is there.
#[derive(Debug, Default)]
pub(super) struct HeldBody {
    bytes: Bytes,
    _place: Option<OwnedSemaphorePermit>,
}

impl Deref for HeldBody {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.bytes
    }
}

/// Reads a body to its end.
///
/// # Errors
/// 413 over the limit of size, 408 over that of time, 415 for an encoding, 400 for a body that breaks off, 503 where all
/// bodies together take too much.
pub(super) async fn read_body(
    config: &FrontendConfig,
    budget: &BodyBudget,
    headers: &HeaderMap,
    body: Body,
) -> Result<HeldBody, ApiError> {
    refuse_encoding(headers)?;
    // What is announced too large is not waited for.
    let announced = usize::try_from(body.size_hint().lower());
    if announced.map_or(true, |size| size > config.max_body_bytes) {
        return Err(too_large(config));
    }
    let read = collect(config, budget, body);
    match tokio::time::timeout(config.body_timeout, read).await {
        Ok(read) => read,
        Err(_elapsed) => Err(ApiError::new(
            StatusCode::REQUEST_TIMEOUT,
            format!(
                "The request body did not arrive within {} s.",
                config.body_timeout.as_secs_f64()
            ),
        )),
    }
}

async fn collect(
    config: &FrontendConfig,
    budget: &BodyBudget,
    body: Body,
) -> Result<HeldBody, ApiError> {
    let mut body = Limited::new(body, config.max_body_bytes);
    let (mut first, mut all) = (Bytes::new(), BytesMut::new());
    let mut place: Option<OwnedSemaphorePermit> = None;
    let mut room = 0;
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|error| {
            if error.downcast_ref::<LengthLimitError>().is_some() {
                too_large(config)
            } else {
                ApiError::new(StatusCode::BAD_REQUEST, "The request body broke off.")
            }
        })?;
        let Ok(data) = frame.into_data() else {
            continue;
        };
        if data.len() > room {
            let further = budget.take(data.len() - room)?;
            room += further.num_permits() * UNIT_BYTES;
            match &mut place {
                Some(place) => place.merge(further),
                None => place = Some(further),
            }
        }
        room -= data.len();
        // Most bodies come in one piece, which is used as it is.
        if all.is_empty() && first.is_empty() {
            first = data;
            continue;
        }
        if all.is_empty() {
            all.extend_from_slice(&std::mem::take(&mut first));
        }
        all.extend_from_slice(&data);
    }
    let bytes = if all.is_empty() { first } else { all.freeze() };
    Ok(HeldBody {
        bytes,
        _place: place,
    })
}

fn too_large(config: &FrontendConfig) -> ApiError {
    let limit = config.max_body_bytes;
    let message = format!("The request body is over this server's limit of {limit} bytes.");
    ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, message)
}

fn refuse_encoding(headers: &HeaderMap) -> Result<(), ApiError> {
    for value in headers.get_all(header::CONTENT_ENCODING) {
        let encodings = String::from_utf8_lossy(value.as_bytes());
        for encoding in encodings.split(',').map(str::trim) {
            if !encoding.is_empty() && !encoding.eq_ignore_ascii_case("identity") {
                let message = format!(
                    "The content-encoding {encoding:?} is not taken here; send the body as it is."
                );
                return Err(ApiError {
                    param: Some("content-encoding".into()),
                    ..ApiError::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, message)
                });
            }
        }
    }
    Ok(())
}
