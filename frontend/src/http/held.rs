//! [`Held`]: bytes of an answer that keep their room in the memory budget until the client has taken them.

use bytes::Bytes;

use crate::budget::MemoryShare;
use crate::error::ApiError;

/// Bytes, and the memory share that holds them.
struct Held<T> {
    content: T,
    _share: MemoryShare,
}

impl<T: AsRef<[u8]>> AsRef<[u8]> for Held<T> {
    fn as_ref(&self) -> &[u8] {
        self.content.as_ref()
    }
}

/// Returns the bytes of `text`. They keep their room, because a request may end long before its last bytes are sent.
///
/// # Errors
/// A 503 if there is no room, as in [`MemoryShare::grow`].
pub(super) fn held(text: String, mut share: MemoryShare) -> Result<Bytes, ApiError> {
    share.grow(text.len())?;
    Ok(holding(text, share))
}

/// Returns the bytes of `content`, which own the share that holds them.
pub(super) fn holding(content: impl AsRef<[u8]> + Send + 'static, share: MemoryShare) -> Bytes {
    Bytes::from_owner(Held {
        content,
        _share: share,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::budget::MemoryBudget;

    #[test]
    fn a_text_holds_its_room_until_the_last_of_it_has_gone() {
        let budget = MemoryBudget::new(10);
        let text = || "12345678".to_owned();
        let mut bytes = held(text(), budget.share()).unwrap();
        assert_eq!(held(text(), budget.share()).unwrap_err().status, 503);
        drop(bytes.split_to(7));
        assert_eq!(budget.used(), 8);
        drop(bytes);
        assert_eq!(budget.used(), 0);
    }
}
