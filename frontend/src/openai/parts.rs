//! The parts of a chat message: text, images and other media.

use genset_backend_common::request::{MAX_MEDIA, Media, MediaError, MediaKind, Part, PartPlace};
use serde_json::{Value, json};

use super::common::ParamLimits;
use crate::error::ApiError;
use crate::json::describe;

/// An image or other medium in a chat.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChatMedium {
    /// Its kind.
    pub kind: MediaKind,
    /// Its position in the chat.
    pub place: PartPlace,
    /// Its position in the request, as its API names it.
    pub at: String,
    /// Its length; 0 until it is fetched.
    pub(crate) bytes: usize,
    /// Whether it is given as an http or https URL.
    pub(crate) is_remote: bool,
}

/// Reads the contents of a chat's messages, and enforces limits on their sum.
#[derive(Debug)]
pub(super) struct Contents {
    max_bytes: usize,
    bytes: usize,
    pub(super) media: Vec<ChatMedium>,
}

impl Contents {
    pub(super) fn new(limits: &ParamLimits) -> Self {
        Self {
            max_bytes: limits.max_media_bytes,
            bytes: 0,
            media: Vec::new(),
        }
    }

    /// Reads a content list: one string if all parts are text, as templates expect it, else the parts, reduced to known
    /// fields.
    pub(super) fn read(
        &mut self,
        name: &str,
        message: usize,
        parts: Vec<Value>,
    ) -> Result<Value, ApiError> {
        let before = self.media.len();
        let parts = parts.into_iter().enumerate().map(|(index, part)| {
            let place = PartPlace {
                message,
                part: index,
            };
            self.part(format!("{name}[{index}]"), place, part)
        });
        let parts = parts.collect::<Result<Vec<_>, _>>()?;
        if self.media.len() > before {
            return Ok(parts.into());
        }
        let texts = parts.iter().filter_map(|part| part["text"].as_str());
        Ok(texts.collect::<String>().into())
    }

    fn part(&mut self, at: String, place: PartPlace, mut part: Value) -> Result<Value, ApiError> {
        let (bytes, is_remote) = match Part::of(&part) {
            Ok(Part::Text) => return Ok(json!({"type": "text", "text": part["text"].take()})),
            Ok(medium) => self.count(&at, &medium)?,
            Err(error) => return Err(no_part(at, &part, &error)),
        };
        let (kind, made) = match part["type"].as_str() {
            Some("image_url") => (MediaKind::Image, image(&at, &mut part["image_url"])?),
            _ => (MediaKind::Audio, audio(&mut part["input_audio"])),
        };
        self.media.push(ChatMedium {
            kind,
            place,
            at,
            bytes,
            is_remote,
        });
        Ok(made)
    }

    /// Checks a medium and the number of media. Returns its length, and whether it is remote.
    fn count(&mut self, at: &str, part: &Part<'_>) -> Result<(usize, bool), ApiError> {
        if self.media.len() >= MAX_MEDIA {
            let problem = format!("a request may have at most {MAX_MEDIA} images and sounds");
            return Err(ApiError::invalid(at, problem));
        }
        if let Part::ImageUrl(url) = part
            && is_remote(url)
        {
            return Ok((0, true));
        }
        let bytes = check_medium(at, part)?.len_bytes();
        self.bytes = self.bytes.saturating_add(bytes);
        within(at, self.bytes, self.max_bytes)?;
        Ok((bytes, false))
    }
}

/// Checks a medium from another API's request, under its name there.
pub(crate) fn check_shown(at: &str, part: &Value) -> Result<(), ApiError> {
    match Part::of(part) {
        Ok(Part::ImageUrl(url)) if is_remote(url) => Ok(()),
        Ok(medium) => check_medium(at, &medium).map(drop),
        Err(error) => Err(ApiError::invalid(at, error)),
    }
}

/// Whether a URL is remote.
fn is_remote(url: &str) -> bool {
    let begins = |scheme: &str| {
        let beginning = url.get(..scheme.len());
        beginning.is_some_and(|beginning| beginning.eq_ignore_ascii_case(scheme))
    };
    begins("http://") || begins("https://")
}

/// Refuses media whose total size exceeds a request's limit.
pub(crate) fn within(at: &str, bytes: usize, max_bytes: usize) -> Result<(), ApiError> {
    if bytes <= max_bytes {
        return Ok(());
    }
    let problem = format!(
        "the images and sounds of a request may have {max_bytes} bytes together (--media-max-bytes), and these have {bytes}; send \
         smaller ones"
    );
    Err(ApiError::invalid(at, problem))
}

/// The medium of a part, after validation.
fn check_medium<'a>(at: &str, part: &Part<'a>) -> Result<Media<'a>, ApiError> {
    let bad = |error: MediaError| ApiError::invalid(at, error);
    let medium = part.media().map_err(bad)?;
    let medium = medium.ok_or_else(|| bad(MediaError::NoPart))?;
    medium.check_base64().map_err(bad)?;
    Ok(medium)
}

/// Keeps only the known fields of an image. Engines may interpret more fields, such as the name of a medium sent earlier, or
/// a medium inside a text part, so those are not passed on.
fn image(at: &str, image: &mut Value) -> Result<Value, ApiError> {
    let mut made = json!({"url": image["url"].take()});
    let detail = image["detail"].take();
    match detail.as_str() {
        _ if detail.is_null() => {}
        Some("auto" | "low" | "high") => made["detail"] = detail,
        // Engines know no finer one.
        Some("original") => made["detail"] = "high".into(),
        _ => {
            let detail = describe(&detail);
            let problem =
                format!("expected \"auto\", \"low\", \"high\" or \"original\", got {detail}");
            return Err(ApiError::invalid(format!("{at}.image_url.detail"), problem));
        }
    }
    Ok(json!({"type": "image_url", "image_url": made}))
}

fn audio(audio: &mut Value) -> Value {
    let made = json!({"data": audio["data"].take(), "format": audio["format"].take()});
    json!({"type": "input_audio", "input_audio": made})
}

fn no_part(at: String, part: &Value, error: &MediaError) -> ApiError {
    match (error, part["type"].as_str()) {
        (MediaError::UnknownPart { .. }, _) => ApiError::unsupported(format!("{at}.type"), error),
        (_, Some("image_url")) => ApiError::invalid(
            at,
            "expected {\"type\": \"image_url\", \"image_url\": {\"url\": ...}}",
        ),
        (_, Some("input_audio")) => ApiError::invalid(
            at,
            "expected {\"type\": \"input_audio\", \"input_audio\": {\"data\": ..., \"format\": ...}}",
        ),
        _ => ApiError::invalid(at, "expected {\"type\": \"text\", \"text\": ...}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::FrontendConfig;

    #[test]
    fn parts_have_nothing_that_was_not_looked_at() {
        let limits = ParamLimits::from(&FrontendConfig::default());
        let read = |parts: Vec<Value>| Contents::new(&limits).read("content", 0, parts).unwrap();
        let url = "https://example.org/a.png";
        let text =
            json!({"type": "text", "text": "x", "uuid": "u", "image_url": {"url": "file:///a"}});
        let image = json!({"type": "image_url", "image_url": {"url": url, "x": 1}, "uuid": "u"});
        assert_eq!(
            read(vec![text.clone(), image]),
            json!([{"type": "text", "text": "x"}, {"type": "image_url", "image_url": {"url": url}}])
        );
        assert_eq!(read(vec![text]), json!("x"));
    }

    #[test]
    fn an_original_image_is_shown_in_high_detail() {
        let limits = ParamLimits::from(&FrontendConfig::default());
        let image = |detail: &str| json!({"type": "image_url", "image_url": {"url": "https://example.org/a.png", "detail": detail}});
        let read = Contents::new(&limits).read("content", 0, vec![image("original")]);
        assert_eq!(read.unwrap(), json!([image("high")]));
    }
}
