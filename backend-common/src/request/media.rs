//! [`Media`]: images and audio in a chat message, as in the OpenAI API: `image_url` with a `data:` URL, and `input_audio`.
//!
//! Frontends check media before they send a request. The Worker's adapter refuses media that its engine does not declare. Engines
//! that process media themselves decode the bytes. Nothing here fetches a URL: a request to an engine contains the bytes.

use std::fmt;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::ChatInput;
use crate::error::{At, EngineError};

/// The maximum number of media in a request.
pub const MAX_MEDIA: usize = 64;

/// The number of base64 letters to decode for content detection.
const MAGIC_LETTERS: usize = 32;

crate::named! {
    /// A kind of media that an engine may take.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
    #[serde(rename_all = "snake_case")]
    pub enum MediaKind {
        /// Pictures: `image_url`.
        Image = "image",
        /// Sound: `input_audio`.
        Audio = "audio",
    }
}

impl MediaKind {
    /// Returns the plural, for messages about what a model takes.
    #[must_use]
    pub const fn plural(self) -> &'static str {
        match self {
            Self::Image => "images",
            Self::Audio => "audio",
        }
    }
}

crate::named! {
    /// The encoding of a medium; the name is the `format` of `input_audio`.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
    pub enum MediaFormat {
        /// PNG.
        Png = "png",
        /// JPEG.
        Jpeg = "jpeg",
        /// GIF.
        Gif = "gif",
        /// WebP.
        Webp = "webp",
        /// RIFF WAVE.
        Wav = "wav",
        /// MPEG audio layer III.
        Mp3 = "mp3",
        /// FLAC.
        Flac = "flac",
        /// Ogg, with Vorbis or Opus inside.
        Ogg = "ogg",
    }
}

impl MediaFormat {
    /// Returns the kind of media.
    #[must_use]
    pub const fn kind(self) -> MediaKind {
        match self {
            Self::Png | Self::Jpeg | Self::Gif | Self::Webp => MediaKind::Image,
            Self::Wav | Self::Mp3 | Self::Flac | Self::Ogg => MediaKind::Audio,
        }
    }

    /// Returns the usual media type.
    #[must_use]
    pub const fn media_type(self) -> &'static str {
        match self {
            Self::Png => "image/png",
            Self::Jpeg => "image/jpeg",
            Self::Gif => "image/gif",
            Self::Webp => "image/webp",
            Self::Wav => "audio/wav",
            Self::Mp3 => "audio/mpeg",
            Self::Flac => "audio/flac",
            Self::Ogg => "audio/ogg",
        }
    }

    /// Returns the format of a media type, such as `image/png`.
    #[must_use]
    pub fn of_media_type(media_type: &str) -> Option<Self> {
        let is = |name: &str| media_type.eq_ignore_ascii_case(name);
        let usual = Self::ALL.into_iter().find(|format| is(format.media_type()));
        usual.or_else(|| match media_type.to_ascii_lowercase().as_str() {
            "image/jpg" => Some(Self::Jpeg),
            "audio/x-wav" | "audio/wave" => Some(Self::Wav),
            "audio/mp3" => Some(Self::Mp3),
            "audio/x-flac" => Some(Self::Flac),
            _ => None,
        })
    }

    /// Detects the format from the first bytes.
    #[must_use]
    pub fn of_bytes(bytes: &[u8]) -> Option<Self> {
        match bytes {
            [0x89, b'P', b'N', b'G', b'\r', b'\n', 0x1a, b'\n', ..] => Some(Self::Png),
            [0xff, 0xd8, 0xff, ..] => Some(Self::Jpeg),
            [b'G', b'I', b'F', b'8', b'7' | b'9', b'a', ..] => Some(Self::Gif),
            [b'R', b'I', b'F', b'F', _, _, _, _, form @ ..] if form.starts_with(b"WEBP") => {
                Some(Self::Webp)
            }
            [b'R', b'I', b'F', b'F', _, _, _, _, form @ ..] if form.starts_with(b"WAVE") => {
                Some(Self::Wav)
            }
            [b'f', b'L', b'a', b'C', ..] => Some(Self::Flac),
            [b'O', b'g', b'g', b'S', ..] => Some(Self::Ogg),
            [b'I', b'D', b'3', ..] => Some(Self::Mp3),
            // The sync word of a frame, and a layer other than the reserved one.
            [0xff, second, ..] if second & 0xe0 == 0xe0 && second & 0x06 != 0 => Some(Self::Mp3),
            _ => None,
        }
    }

    fn names(kind: MediaKind) -> String {
        let names = Self::ALL.into_iter().filter(|format| format.kind() == kind);
        names.map(Self::name).collect::<Vec<_>>().join(", ")
    }
}

/// What is wrong with a part of a message: a phrase that continues the part's location.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum MediaError {
    /// The part does not have the API's form.
    #[error("expected an object with a type and what belongs to it")]
    NoPart,
    /// The part has an unsupported type.
    #[error(
        "parts of type {kind:?} are not available, only \"text\", \"image_url\" and \"input_audio\""
    )]
    UnknownPart {
        /// The type.
        kind: String,
    },
    /// The URL does not contain its content.
    #[error("expected a URL of the form data:image/png;base64,...")]
    NotData,
    /// The format is unknown.
    #[error("{format:?} is no known format; use one of {known}")]
    UnknownFormat {
        /// The named format.
        format: String,
        /// The known formats.
        known: String,
    },
    /// The content has another format than stated.
    #[error("its content is {found}, but it is declared as {}", .said.name())]
    OtherContent {
        /// The stated format.
        said: MediaFormat,
        /// The detected format.
        found: &'static str,
    },
    /// The content is not base64.
    #[error("its data is not base64")]
    NotBase64,
}

/// A medium of a message; borrows the base64 text.
///
/// # Examples
/// ```
/// use genset_backend_common::request::{Media, MediaKind};
/// use serde_json::json;
///
/// let part = json!({"type": "image_url", "image_url": {"url": "data:image/gif;base64,R0lGODlhAQABAAAAACw="}});
/// let media = Media::of_part(&part)?.unwrap();
/// assert_eq!(media.kind(), MediaKind::Image);
/// assert!(media.decode()?.starts_with(b"GIF89a"));
/// assert_eq!(Media::of_part(&json!({"type": "text", "text": "What is it?"}))?, None);
/// # Ok::<(), genset_backend_common::request::MediaError>(())
/// ```
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Media<'a> {
    format: MediaFormat,
    base64: &'a str,
}

impl fmt::Debug for Media<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Media")
            .field("format", &self.format)
            .field("len_bytes", &self.len_bytes())
            .finish_non_exhaustive()
    }
}

/// A part of a message, before its content is checked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Part<'a> {
    /// Text.
    Text,
    /// An image, at this URL.
    ImageUrl(&'a str),
    /// Sound.
    Audio {
        /// The bytes in base64.
        data: &'a str,
        /// The name of the format.
        format: &'a str,
    },
}

impl<'a> Part<'a> {
    /// Classifies a part.
    ///
    /// # Errors
    /// [`MediaError::NoPart`] or [`MediaError::UnknownPart`].
    pub fn of(part: &'a Value) -> Result<Self, MediaError> {
        let text = |value: &'a Value| value.as_str().ok_or(MediaError::NoPart);
        match text(&part["type"])? {
            "text" => text(&part["text"]).map(|_| Self::Text),
            "image_url" => text(&part["image_url"]["url"]).map(Self::ImageUrl),
            "input_audio" => Ok(Self::Audio {
                data: text(&part["input_audio"]["data"])?,
                format: text(&part["input_audio"]["format"])?,
            }),
            other => Err(MediaError::UnknownPart {
                kind: other.chars().take(40).collect(),
            }),
        }
    }

    /// Returns the kind of media; `None` for text.
    #[must_use]
    pub const fn kind(&self) -> Option<MediaKind> {
        match self {
            Self::Text => None,
            Self::ImageUrl(_) => Some(MediaKind::Image),
            Self::Audio { .. } => Some(MediaKind::Audio),
        }
    }

    /// Returns the medium of the part; `None` for text.
    ///
    /// # Errors
    /// As [`Media::of_url`] and [`Media::of_audio`].
    pub fn media(&self) -> Result<Option<Media<'a>>, MediaError> {
        match *self {
            Self::Text => Ok(None),
            Self::ImageUrl(url) => Media::of_url(url, MediaKind::Image).map(Some),
            Self::Audio { data, format } => Media::of_audio(data, format).map(Some),
        }
    }
}

impl<'a> Media<'a> {
    /// Returns the medium of a part; `None` for text. Its format is known, and its first bytes match.
    ///
    /// # Errors
    /// What is wrong with the part.
    pub fn of_part(part: &'a Value) -> Result<Option<Self>, MediaError> {
        Part::of(part)?.media()
    }

    /// Returns the medium of a `data:` URL, which must be of this kind.
    ///
    /// # Errors
    /// What is wrong with the URL.
    ///
    /// # Source
    /// RFC 2397; parameters of the media type are ignored.
    pub fn of_url(url: &'a str, kind: MediaKind) -> Result<Self, MediaError> {
        let scheme = url.get(..5).ok_or(MediaError::NotData)?;
        let (head, base64) = url[scheme.len()..]
            .split_once(',')
            .filter(|_| scheme.eq_ignore_ascii_case("data:"))
            .ok_or(MediaError::NotData)?;
        let mut head = head.split(';');
        let media_type = head.next().unwrap_or_default();
        if head
            .next_back()
            .is_none_or(|last| !last.eq_ignore_ascii_case("base64"))
        {
            return Err(MediaError::NotData);
        }
        let format = MediaFormat::of_media_type(media_type).filter(|format| format.kind() == kind);
        let format = format.ok_or_else(|| unknown_format(media_type, kind))?;
        Self { format, base64 }.checked()
    }

    /// Returns the medium of `input_audio`.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn of_audio(data: &'a str, format: &str) -> Result<Self, MediaError> {
        let kind = MediaKind::Audio;
        let mut formats = MediaFormat::ALL.into_iter();
        let known = formats.find(|known| known.kind() == kind && known.name() == format);
        let format = known.ok_or_else(|| unknown_format(format, kind))?;
        Self {
            format,
            base64: data,
        }
        .checked()
    }

    /// Checks the first bytes against the format.
    fn checked(self) -> Result<Self, MediaError> {
        let letters = self.base64.len().min(MAGIC_LETTERS);
        let beginning = self.base64.get(..letters).ok_or(MediaError::NotBase64)?;
        let found = MediaFormat::of_bytes(&decode(beginning)?);
        if found == Some(self.format) {
            return Ok(self);
        }
        Err(MediaError::OtherContent {
            said: self.format,
            found: found.map_or("in no known format", MediaFormat::name),
        })
    }

    /// Returns the format.
    #[must_use]
    pub const fn format(&self) -> MediaFormat {
        self.format
    }

    /// Returns the kind.
    #[must_use]
    pub const fn kind(&self) -> MediaKind {
        self.format.kind()
    }

    /// Returns the length in bytes.
    #[must_use]
    pub fn len_bytes(&self) -> usize {
        let padding = self.base64.bytes().rev().take_while(|byte| *byte == b'=');
        (self.base64.len() / 4 * 3).saturating_sub(padding.count())
    }

    /// Checks that the whole text is base64, without a copy.
    ///
    /// # Errors
    /// [`MediaError::NotBase64`].
    pub fn check_base64(&self) -> Result<(), MediaError> {
        let letters = self.base64.trim_end_matches('=');
        let padding = self.base64.len() - letters.len();
        let is_good = self.base64.len().is_multiple_of(4)
            && padding <= 2
            && letters.bytes().all(|letter| value_of(letter).is_some());
        is_good.then_some(()).ok_or(MediaError::NotBase64)
    }

    /// Decodes the bytes.
    ///
    /// # Errors
    /// [`MediaError::NotBase64`].
    pub fn decode(&self) -> Result<Vec<u8>, MediaError> {
        self.check_base64()?;
        decode(self.base64)
    }
}

fn unknown_format(format: &str, kind: MediaKind) -> MediaError {
    MediaError::UnknownFormat {
        format: format.chars().take(40).collect(),
        known: MediaFormat::names(kind),
    }
}

/// Returns the six bits of a base64 letter.
const fn value_of(letter: u8) -> Option<u8> {
    match letter {
        b'A'..=b'Z' => Some(letter - b'A'),
        b'a'..=b'z' => Some(letter - b'a' + 26),
        b'0'..=b'9' => Some(letter - b'0' + 52),
        b'+' => Some(62),
        b'/' => Some(63),
        _ => None,
    }
}

/// Decodes whole groups of four letters; padding ends them.
fn decode(base64: &str) -> Result<Vec<u8>, MediaError> {
    let mut bytes = Vec::with_capacity(base64.len() / 4 * 3);
    for group in base64.trim_end_matches('=').as_bytes().chunks(4) {
        let mut bits = 0_u32;
        for place in 0..4 {
            let letter = group.get(place).copied().unwrap_or(b'A');
            let value = value_of(letter).ok_or(MediaError::NotBase64)?;
            bits = bits << 6 | u32::from(value);
        }
        let [_, all @ ..] = bits.to_be_bytes();
        bytes.extend_from_slice(&all[..group.len().saturating_sub(1)]);
    }
    Ok(bytes)
}

/// The location of a part in a chat. Displayed as `messages[1].content[0]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PartPlace {
    /// The message.
    pub message: usize,
    /// The part of its content.
    pub part: usize,
}

impl fmt::Display for PartPlace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "messages[{}].content[{}]", self.message, self.part)
    }
}

impl From<PartPlace> for At {
    fn from(place: PartPlace) -> Self {
        Self::Other(place.to_string())
    }
}

impl ChatInput {
    /// Returns the parts of the messages with their locations. A plain text `content` has none.
    pub fn parts(&self) -> impl Iterator<Item = (PartPlace, &Value)> {
        let messages = self.messages.iter().enumerate();
        messages.flat_map(|(message, value)| {
            let parts = value["content"].as_array().into_iter().flatten();
            parts
                .enumerate()
                .map(move |(part, value)| (PartPlace { message, part }, value))
        })
    }

    /// Returns the media, in order.
    ///
    /// # Errors
    /// `InvalidArgument` or `Unsupported`, naming the part: it is malformed, has an unknown type, refers to external content, or
    /// does not match its stated format; or there are more than [`MAX_MEDIA`].
    pub fn media(&self) -> Result<Vec<(PartPlace, Media<'_>)>, EngineError> {
        let mut media = Vec::new();
        for (at, value) in self.parts() {
            match Media::of_part(value) {
                Ok(None) => {}
                Ok(Some(_)) if media.len() >= MAX_MEDIA => {
                    let problem =
                        format!("a request may have at most {MAX_MEDIA} images and sounds");
                    return Err(EngineError::invalid_argument(at, problem));
                }
                Ok(Some(medium)) => media.push((at, medium)),
                Err(error @ MediaError::UnknownPart { .. }) => {
                    return Err(EngineError::unsupported(at, error));
                }
                Err(error) => return Err(EngineError::invalid_argument(at, error)),
            }
        }
        Ok(media)
    }
}

#[cfg(test)]
mod tests;
