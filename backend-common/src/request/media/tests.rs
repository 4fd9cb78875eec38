use proptest::prelude::*;
use serde_json::json;

use super::*;
use crate::error::ErrorKind;

const GIF: &str = "R0lGODlhAQABAAAAACw=";

fn image(url: &str) -> Value {
    json!({"type": "image_url", "image_url": {"url": url, "detail": "low"}})
}

fn audio(data: &str, format: &str) -> Value {
    json!({"type": "input_audio", "input_audio": {"data": data, "format": format}})
}

#[test]
fn media_are_found_where_they_stand() {
    let (gif, wav) = (
        format!("data:image/gif;base64,{GIF}"),
        "UklGRgAAAABXQVZFZm10IA==",
    );
    let chat = ChatInput {
        messages: vec![
            json!({"role": "system", "content": "Be brief."}),
            json!({"role": "user", "content": [
                {"type": "text", "text": "What is it?"}, image(&gif), audio(wav, "wav"),
            ]}),
        ],
        tools: Vec::new(),
    };
    let media = chat.media().unwrap();
    let found: Vec<_> = media
        .iter()
        .map(|(at, media)| ((at.message, at.part), media.format(), media.len_bytes()))
        .collect();
    assert_eq!(
        found,
        [
            ((1, 1), MediaFormat::Gif, 14),
            ((1, 2), MediaFormat::Wav, 16)
        ]
    );
    assert_eq!(media[0].1.decode().unwrap().len(), 14);
    assert!(!format!("{media:?}").contains("R0lG"));
}

#[test]
fn what_is_not_carried_or_not_true_is_refused_by_name() {
    let cases = [
        (
            image("https://example.org/a.png"),
            "expected a URL of the form data:",
        ),
        (
            image("data:image/gif,GIF89a"),
            "expected a URL of the form data:",
        ),
        (image("é"), "expected a URL"),
        (image("data:text/html;base64,PGI+"), "no known format"),
        (
            image("data:audio/wav;base64,UklGRg=="),
            "png, jpeg, gif, webp",
        ),
        (
            image(&format!("data:image/png;base64,{GIF}")),
            "its content is gif, but it is declared as png",
        ),
        (image("data:image/png;base64,AAAA"), "in no known format"),
        (image("data:image/png;base64,é"), "not base64"),
        (audio("UklGRg==", "pcm16"), "wav, mp3, flac, ogg"),
        (json!({"type": "input_audio"}), "expected an object"),
        (json!("text"), "expected an object"),
        (json!({"type": "text"}), "expected an object"),
        (json!({"type": "video_url", "video_url": {}}), "video_url"),
    ];
    for (part, problem) in cases {
        let chat = ChatInput {
            messages: vec![json!({"role": "user", "content": [part]})],
            tools: Vec::new(),
        };
        let error = chat.media().unwrap_err();
        assert_eq!(error.at().map(At::name), Some("messages[0].content[0]"));
        assert!(error.message().contains(problem), "{error}");
    }
}

#[test]
fn a_request_has_so_many_media_and_no_more() {
    let part = image(&format!("data:image/gif;base64,{GIF}"));
    let chat = |count| ChatInput {
        messages: vec![json!({"role": "user", "content": vec![part.clone(); count]})],
        tools: Vec::new(),
    };
    assert_eq!(chat(MAX_MEDIA).media().unwrap().len(), MAX_MEDIA);
    let error = chat(MAX_MEDIA + 1).media().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument);
    assert_eq!(error.at().map(At::name), Some("messages[0].content[64]"));
}

#[test]
fn formats_are_told_by_their_first_bytes() {
    let of = MediaFormat::of_bytes;
    assert_eq!(of(b"\x89PNG\r\n\x1a\n..."), Some(MediaFormat::Png));
    assert_eq!(of(b"\xff\xd8\xff\xe0"), Some(MediaFormat::Jpeg));
    assert_eq!(of(b"RIFF\0\0\0\0WEBPVP8 "), Some(MediaFormat::Webp));
    assert_eq!(of(b"fLaC"), Some(MediaFormat::Flac));
    assert_eq!(of(b"OggS"), Some(MediaFormat::Ogg));
    assert_eq!(of(b"ID3\x04"), Some(MediaFormat::Mp3));
    assert_eq!(of(b"\xff\xfb\x90"), Some(MediaFormat::Mp3));
    assert_eq!(of(b"<svg>"), None);
    for format in MediaFormat::ALL {
        assert_eq!(
            MediaFormat::of_media_type(format.media_type()),
            Some(format)
        );
    }
}

proptest! {
    #[test]
    fn base64_is_decoded_as_it_was_encoded(bytes in prop::collection::vec(any::<u8>(), 0..64)) {
        const LETTERS: &[u8] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
        let mut text = String::new();
        for group in bytes.chunks(3) {
            let at = |place: usize| u32::from(group.get(place).copied().unwrap_or(0));
            let bits = at(0) << 16 | at(1) << 8 | at(2);
            for place in 0..4 {
                let letter = LETTERS[(bits >> (18 - 6 * place) & 63) as usize];
                text.push(if place <= group.len() { char::from(letter) } else { '=' });
            }
        }
        let media = Media { format: MediaFormat::Png, base64: &text };
        prop_assert_eq!(media.len_bytes(), bytes.len());
        prop_assert_eq!(media.decode().unwrap(), bytes);
    }

    #[test]
    fn no_text_is_read_past_its_end(url in "(data:)?(image/(gif|png))?(;base64)?,?.{0,40}") {
        if let Ok(media) = Media::of_url(&url, MediaKind::Image) {
            prop_assert_eq!(media.check_base64().is_ok(), media.decode().is_ok());
        }
    }
}
