//! Finds markers in partial text.

/// What [`scan`] found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Scan {
    /// A marker: its index in the list, and its length in bytes.
    Marker {
        which: usize,
        start: usize,
        end: usize,
    },
    /// No marker. The text from `sure` on may begin one.
    Text { sure: usize },
}

/// Finds the first of `markers` in `text`. No marker of a list may be a prefix or a substring of another: then the first to
/// end is the first to begin, whatever text follows.
pub(crate) fn scan<'m>(text: &str, markers: impl IntoIterator<Item = &'m str> + Clone) -> Scan {
    let found = markers
        .clone()
        .into_iter()
        .enumerate()
        .filter_map(|(which, marker)| {
            let start = text.find(marker)?;
            Some((start, which, start + marker.len()))
        })
        .min();
    if let Some((start, which, end)) = found {
        return Scan::Marker { which, start, end };
    }
    let held = markers
        .into_iter()
        .map(|marker| begun(text, marker))
        .max()
        .unwrap_or(0);
    Scan::Text {
        sure: text.len() - held,
    }
}

/// The length in bytes of the longest suffix of `text` that is a prefix of `marker`.
fn begun(text: &str, marker: &str) -> usize {
    let longest = text.len().min(marker.len().saturating_sub(1));
    (1..=longest)
        .rev()
        .filter(|len| marker.is_char_boundary(*len))
        .find(|len| {
            marker
                .get(..*len)
                .is_some_and(|begin| text.ends_with(begin))
        })
        .unwrap_or(0)
}

/// The length in bytes of the leading white space of `text`.
pub(crate) fn trim_start_len(text: &str) -> usize {
    text.len() - text.trim_start().len()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_marker_is_found_and_a_begun_one_is_held() {
        let markers = ["<a>", "</a>", "◁b"];
        let of = |text| scan(text, markers);
        let found = |which, start, end| Scan::Marker { which, start, end };
        assert_eq!(of("x</a><a>"), found(1, 1, 5));
        assert_eq!(of("x ◁b"), found(2, 2, 6));
        assert_eq!(of("x </"), Scan::Text { sure: 2 });
        assert_eq!(of("x <<"), Scan::Text { sure: 3 });
        assert_eq!(of("x ◁"), Scan::Text { sure: 2 });
        assert_eq!(of("x <b"), Scan::Text { sure: 4 });
        assert_eq!(of(""), Scan::Text { sure: 0 });
    }
}
