//! Responses of launched servers.

use genset_engine_launcher::fuzzing::{events, repeated_metrics};

use crate::input::{cuts, pieces};

/// Lengths of pieces, and a stream of server-sent events: any pieces yield the same events.
pub fn sse(input: &[u8]) {
    let (lengths, body) = cuts(input);
    let whole = events(&[body]);
    assert_eq!(events(&pieces(body, lengths)), whole);
    let bytes: Vec<&[u8]> = body.chunks(1).collect();
    assert_eq!(events(&bytes), whole);
}

/// A server's metrics: every shown line is complete, and showing the output again yields the same.
pub fn metrics(input: &[u8]) {
    let shown = repeated_metrics(&String::from_utf8_lossy(input)).unwrap();
    let (lines, end) = shown.split_at(shown.len() - "# EOF\n".len());
    assert_eq!(end, "# EOF\n");
    for line in lines.split_terminator('\n') {
        let is_about = line.starts_with("# HELP ") || line.starts_with("# TYPE ");
        let has_value = || {
            line.rsplit_once(' ')
                .is_some_and(|(_, value)| value.parse::<f64>().is_ok())
        };
        assert!(is_about || has_value(), "{line:?}");
    }
    assert_eq!(repeated_metrics(&shown).unwrap(), shown);
}
