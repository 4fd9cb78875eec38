//! [`OneLine`]: writes each event as one line of bounded length, whatever its fields contain, so that data from a client
//! or a peer can neither look like an event of its own nor fill a disk.

use std::fmt;

use tracing::{Event, Subscriber};
use tracing_subscriber::fmt::FmtContext;
use tracing_subscriber::fmt::format::{FormatEvent, FormatFields, Writer};
use tracing_subscriber::registry::LookupSpan;

/// The longest line, in bytes. A note at its end counts the bytes cut off.
pub(super) const MAX_LINE_BYTES: usize = 16 << 10;

/// Writes the output of `inner` on one line.
#[derive(Debug)]
pub(super) struct OneLine<F> {
    pub(super) inner: F,
    /// Whether `inner` writes colours; they are then kept.
    pub(super) has_colours: bool,
}

impl<S, N, F> FormatEvent<S, N> for OneLine<F>
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
    F: FormatEvent<S, N>,
{
    fn format_event(
        &self,
        ctx: &FmtContext<'_, S, N>,
        mut writer: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        let mut line = String::new();
        self.inner
            .format_event(ctx, Writer::new(&mut line), event)?;
        write_line(line.trim_end_matches('\n'), self.has_colours, &mut writer)
    }
}

fn write_line(line: &str, has_colours: bool, out: &mut impl fmt::Write) -> fmt::Result {
    let (shown, rest) = line.split_at(line.floor_char_boundary(MAX_LINE_BYTES));
    let is_plain = |char: char| !char.is_control() && !matches!(char, '\u{2028}' | '\u{2029}');
    for char in shown.chars() {
        if is_plain(char) || (has_colours && char == '\u{1b}') {
            out.write_char(char)?;
        } else {
            write!(out, "{}", char.escape_default())?;
        }
    }
    if !rest.is_empty() {
        write!(out, "... ({} bytes more)", rest.len())?;
    }
    // Reset a colour that was cut off.
    if has_colours && !rest.is_empty() {
        out.write_str("\u{1b}[0m")?;
    }
    out.write_char('\n')
}

#[cfg(test)]
mod tests {
    use std::io;
    use std::sync::Arc;

    use parking_lot::Mutex;
    use tracing_subscriber::fmt;
    use tracing_subscriber::layer::SubscriberExt;

    use super::*;

    #[derive(Clone, Default)]
    struct Kept(Arc<Mutex<Vec<u8>>>);

    impl io::Write for Kept {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    /// The log output of an event, with or without colours.
    fn logged(has_colours: bool, event: impl FnOnce()) -> String {
        let kept = Kept::default();
        let writer = kept.clone();
        let log = fmt::layer()
            .with_writer(move || writer.clone())
            .event_format(super::super::format(has_colours));
        tracing::subscriber::with_default(tracing_subscriber::registry().with(log), event);
        String::from_utf8(kept.0.lock().clone()).expect("a log is text")
    }

    const FORGED: &str = "x\n2026-01-01T00:00:00Z  INFO genset::access: forged\r\u{85}\u{2028}";

    #[test]
    fn an_event_is_one_line_whatever_it_says() {
        for has_colours in [false, true] {
            let line = logged(has_colours, || {
                tracing::info!(display = %FORGED, text = FORGED, "{FORGED}");
            });
            assert_eq!(line.lines().count(), 1, "{line}");
            assert!(line.ends_with('\n') && !line.contains('\r'), "{line:?}");
            assert!(line.contains("x\\n2026-01-01"), "{line}");
            assert!(!line.contains(['\u{85}', '\u{2028}']), "{line:?}");
        }
    }

    #[test]
    fn a_long_event_is_cut_between_characters() {
        for long in ["x".repeat(8 << 20), "é".repeat(4 << 20)] {
            let line = logged(false, || tracing::info!(name = %long, "long"));
            assert!(line.len() < MAX_LINE_BYTES + 50, "{}", line.len());
            assert!(
                line.ends_with(" bytes more)\n"),
                "{}",
                &line[line.len() - 50..]
            );
        }
        let line = logged(false, || tracing::info!(name = "short", "short"));
        assert!(line.ends_with("short name=\"short\"\n"), "{line}");
    }
}
