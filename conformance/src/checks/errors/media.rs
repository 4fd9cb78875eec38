//! Media in chats, for ER08: declared kinds are served, others are refused.

use genset_backend_common::{
    Input,
    config::InputKind,
    request::{ChatInput, MediaKind},
};
use serde_json::{Value, json};

use super::served_if_declared;
use crate::check::CheckResult;
use crate::trial::Live;

/// An image of 64 by 64 pixels, dark on the left.
const PNG: &str = "iVBORw0KGgoAAAANSUhEUgAAAEAAAABACAIAAAAlC+aJAAABH0lEQVR42u3PkaKDAAAF0GAQBIMgCIJBMAiCQRAMgiAIgsEgCIJBMAgGQTAYBEEQBMEgCILB\
                   IAiCIAiCIBgEQRAE7xPeD9zzB4cgCGK325EkSVHUfr+naZphGJZlOY47HA48zx+PR0EQRFE8nU6SJMmyfD6fFUVRVVXTNF3XDcO4XC7X69U0TcuybNu+3W6O\
                   49zvd9d1H4+H53m+7z+fz9frFQRBGIZRFMVxnCRJmqbv9zvLsjzPi6L4fD7f77csy6qq6rpumqZt267r+r4fhmEcx9/vN03TPM/Lsqzrum0bgQACCCCAAAII\
                   IIAAAggggAACCCCAAAIIIIAAAggggAACCCCAAAIIIIAAAggggAACCCCAAAIIIIAAAgj8F/gDmnuhWh7jdrsAAAAASUVORK5CYII=";

/// Half a second of silence: the head of a WAV file with one sample, then further samples, three at a time.
const WAV_HEAD: &str = "UklGRmQfAABXQVZFZm10IBAAAAABAAEAgD4AAIA+AAABAAgAZGF0YUAfAACA";
const WAV_SAMPLES: &str = "gICA";
const WAV_LENGTH: usize = 2666;

fn part(kind: MediaKind) -> Value {
    match kind {
        MediaKind::Image => {
            json!({"type": "image_url", "image_url": {"url": format!("data:image/png;base64,{PNG}")}})
        }
        MediaKind::Audio => {
            let data = [WAV_HEAD, &WAV_SAMPLES.repeat(WAV_LENGTH)].concat();
            json!({"type": "input_audio", "input_audio": {"data": data, "format": "wav"}})
        }
    }
}

/// A chat with a medium of this kind.
fn chat(kind: MediaKind) -> Input {
    let text = json!({"type": "text", "text": "ping"});
    let message = json!({"role": "user", "content": [text, part(kind)]});
    let chat = ChatInput {
        messages: vec![message],
        tools: Vec::new(),
    };
    Input::Chat(chat.into())
}

pub(super) async fn kinds_of_media(live: &Live) -> CheckResult {
    let can = &live.config.capabilities;
    for kind in MediaKind::ALL {
        let is_declared = can.inputs.contains(&InputKind::Chat) && can.media.contains(&kind);
        let what = format!("{kind} in a chat");
        served_if_declared(live, &what, chat(kind), is_declared).await?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use genset_backend_common::request::Media;

    use super::*;

    #[test]
    fn the_media_are_what_they_are_said_to_be() {
        for (kind, bytes) in [(MediaKind::Image, 344), (MediaKind::Audio, 44 + 7999)] {
            let part = part(kind);
            let media = Media::of_part(&part).unwrap().unwrap();
            assert_eq!((media.kind(), media.decode().unwrap().len()), (kind, bytes));
        }
    }
}
