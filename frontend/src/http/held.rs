//! [`Held`]: bytes of an answer that keep their room in the memory budget until its client has taken them.

use bytes::Bytes;

use crate::budget::MemoryShare;
use crate::error::ApiError;

/// Bytes on the account of their request.
struct Held<T> {
    content: T,
    _share: MemoryShare,
}

impl<T: AsRef<[u8]>> AsRef<[u8]> for Held<T> {
    fn as_ref(&self) -> &[u8] {
        self.content.as_ref()
    }
}

/// The bytes of `text`. A request may end long before the last of them is sent, so they take their room along.
///
/// # Errors
/// A 503 where there is no room, as [`MemoryShare::grow`].
pub(super) fn held(text: String, mut share: MemoryShare) -> Result<Bytes, ApiError> {
    share.grow(text.len())?;
    Ok(holding(text, share))
}

/// The bytes of `content`, which take along the share that holds them.
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
