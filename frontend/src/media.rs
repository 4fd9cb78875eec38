//! Fetches images that a chat names by URL, once, before its engine sees it: only from hosts that the operator allows, at
//! public addresses, within limits of bytes, time and redirects.
//!
//! The pipeline calls it once it knows that the model takes images. The result is a `data:` URL like those that clients send.

mod address;
mod connect;
mod exchange;
mod hosts;

#[cfg(test)]
mod tests;

use std::sync::Arc;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use genset_backend_common::CancelReason;
use genset_backend_common::request::{MediaFormat, MediaKind};
use serde_json::Value;
use tokio::sync::Semaphore;
use tokio::time::{Instant, timeout_at};

use crate::budget::MemoryShare;
use crate::config::MediaConfig;
use crate::error::ApiError;
use crate::openai::{ChatMedium, within};
use crate::work::{Owner, WorkThreads};
use connect::Connect;
use exchange::{Answer, Target};
pub use hosts::HostPattern;

/// The images of all requests that are fetched at once; more wait. Includes abandoned name lookups that still run.
const FETCHES_AT_ONCE: usize = 64;

/// Fetches images. Clones share the limit on concurrent fetches.
#[derive(Debug, Clone)]
pub(crate) struct Fetcher(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    config: MediaConfig,
    connect: Connect,
    places: Arc<Semaphore>,
    /// Encodes fetched images as base64.
    work: WorkThreads,
}

impl Fetcher {
    pub(crate) fn new(config: &MediaConfig, work: WorkThreads) -> Self {
        Self::with(config, Connect::to_public(), work)
    }

    fn with(config: &MediaConfig, connect: Connect, work: WorkThreads) -> Self {
        Self(Arc::new(Shared {
            config: config.clone(),
            connect,
            places: Arc::new(Semaphore::new(FETCHES_AT_ONCE)),
            work,
        }))
    }

    /// Fetches the `media` that `messages` name by URL, and replaces the URLs with the content. `memory` holds it.
    ///
    /// # Errors
    /// A 400 that names the part if its host is not allowed, does not answer properly, or does not return an image; a 503 if
    /// there is no memory; a 504 if the deadline passes.
    ///
    /// # Cancel safety
    /// If the future is dropped, its connections are closed.
    pub(crate) async fn fetch_all(
        &self,
        messages: &mut [Value],
        media: &[ChatMedium],
        deadline: Option<Instant>,
        memory: &mut MemoryShare,
    ) -> Result<(), ApiError> {
        let max_bytes = self.0.config.max_bytes;
        let mut bytes: usize = media.iter().map(|medium| medium.bytes).sum();
        let soonest = Instant::now() + self.0.config.timeout;
        let by = deadline.map_or(soonest, |deadline| deadline.min(soonest));
        for medium in media.iter().filter(|medium| medium.is_remote) {
            let content = messages.get_mut(medium.place.message);
            let part = content.and_then(|message| message["content"].get_mut(medium.place.part));
            let Some(Value::String(url)) = part.map(|part| &mut part["image_url"]["url"]) else {
                continue;
            };
            let problem = |problem: Problem| ApiError::invalid(medium.at.clone(), problem);
            let room = max_bytes.saturating_sub(bytes);
            let mut held = memory.another();
            let fetched = timeout_at(by, self.fetch(url, room, &mut held)).await;
            let slow = || match deadline {
                Some(deadline) if deadline < soonest => CancelReason::Deadline.to_error().into(),
                Some(_) | None => problem(Problem::Slow(self.0.config.timeout.as_secs())),
            };
            let content = match fetched.map_err(|_elapsed| slow())? {
                Ok(content) => content,
                Err(Failed::Problem(Problem::TooLarge)) => {
                    within(&medium.at, max_bytes.saturating_add(1), max_bytes)?;
                    continue;
                }
                Err(Failed::Problem(Problem::NoHosts)) => {
                    return Err(ApiError::unsupported(medium.at.clone(), Problem::NoHosts));
                }
                Err(Failed::Problem(other)) => return Err(problem(other)),
                Err(Failed::Refused(error)) => return Err(error),
            };
            bytes = bytes.saturating_add(content.len());
            let format = image_format(&content).map_err(problem)?;
            let work = &self.0.work;
            let encoded = work.run(content.len(), deadline, data_url(format, content, held));
            let (data_url, held) = encoded.await?;
            *url = data_url;
            memory.absorb(held);
        }
        Ok(())
    }

    async fn fetch(
        &self,
        url: &str,
        max_bytes: usize,
        memory: &mut MemoryShare,
    ) -> Result<Vec<u8>, Failed> {
        let Shared {
            config,
            connect,
            places,
            ..
        } = &*self.0;
        if config.hosts.is_empty() {
            return Err(Problem::NoHosts.into());
        }
        // Nobody closes the semaphore.
        let place = Arc::clone(places).acquire_owned().await;
        let place = Arc::new(place.map_err(|_closed| Problem::Unreachable)?);
        let mut target = Target::parse(url)?;
        for _ in 0..=config.max_redirects {
            if !config
                .hosts
                .iter()
                .any(|host| host.allows(target.host(), target.port(), target.is_tls()))
            {
                return Err(Problem::OtherHost(target.host().to_owned()).into());
            }
            let stream = connect.connect(&target, &place).await?;
            match exchange::ask(stream, &target, max_bytes, memory).await? {
                Answer::Content(content) => return Ok(content),
                Answer::Elsewhere(location) => target = target.follow(&location)?,
            }
        }
        Err(Problem::Redirects(config.max_redirects).into())
    }
}

/// Returns the work that makes a `data:` URL of fetched content. `held` holds the content at first, and the URL at the end.
fn data_url(
    format: MediaFormat,
    content: Vec<u8>,
    mut held: MemoryShare,
) -> impl FnOnce(&Owner) -> Result<(String, MemoryShare), ApiError> {
    move |_| {
        let mut url = format!("data:{};base64,", format.media_type());
        let base64_bytes = content.len().div_ceil(3) * 4;
        held.grow(url.len() + base64_bytes)?;
        url.reserve_exact(base64_bytes);
        STANDARD.encode_string(&content, &mut url);
        held.shrink(content.capacity());
        Ok((url, held))
    }
}

/// Detects the format of fetched bytes.
fn image_format(content: &[u8]) -> Result<MediaFormat, Problem> {
    let format = MediaFormat::of_bytes(content);
    let format = format.filter(|format| format.kind() == MediaKind::Image);
    format.ok_or(Problem::NoImage)
}

/// Why a fetch failed.
#[derive(Debug)]
enum Failed {
    Problem(Problem),
    /// There is no memory for it.
    Refused(ApiError),
}

impl From<Problem> for Failed {
    fn from(problem: Problem) -> Self {
        Self::Problem(problem)
    }
}

/// What is wrong with a URL, for the client. It contains no addresses, which must not leak.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
enum Problem {
    #[error(
        "URLs are not fetched here; send its content as a data: URL, or have the operator allow its host with --media-hosts"
    )]
    NoHosts,
    #[error("images are not fetched from the host {0:?} (--media-hosts)")]
    OtherHost(String),
    #[error("expected a URL of the form https://HOST/PATH or data:image/png;base64,...")]
    NoUrl,
    #[error("its host has no public address")]
    NotPublic,
    #[error("its host cannot be reached")]
    Unreachable,
    #[error("this server has no TLS; name it by http:// or send its content")]
    NoTls,
    #[error("its host answered with status {0}")]
    Status(u16),
    #[error("its host redirects more than {0} times")]
    Redirects(u32),
    #[error("its host broke its answer off")]
    Broken,
    #[error("it is too large")]
    TooLarge,
    #[error("it could not be fetched within {0} s")]
    Slow(u64),
    #[error("it is no PNG, JPEG, GIF or WebP")]
    NoImage,
}
