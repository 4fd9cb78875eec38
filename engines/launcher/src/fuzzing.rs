//! What the fuzz targets reach that is nobody else's: the decoder of server-sent events, and a server's metrics.

use genset_backend_common::MetricsRegistry;

use crate::dialect::Dialect;
use crate::load::figures::Figures;
use crate::repeated::{Repeated, Source};
use crate::sse::{Decoder, Event};

/// An event's data, and whether it is an error.
pub type FoundEvent = (bool, Vec<u8>);

/// The events of a body in pieces, and whether it ended in the middle of one; `None` where it is refused.
#[must_use]
pub fn events(pieces: &[&[u8]]) -> Option<(Vec<FoundEvent>, bool)> {
    let mut decoder = Decoder::default();
    let mut events = Vec::new();
    for piece in pieces {
        decoder.push(piece).ok()?;
        while let Some(event) = decoder.next() {
            events.push(match event {
                Event::Data(data) => (false, data),
                Event::Error(data) => (true, data),
            });
        }
    }
    Some((events, decoder.is_half()))
}

/// What a worker shows of metrics that a vLLM told; its load is read as well. `None` of a server that has none.
#[must_use]
pub fn repeated_metrics(metrics: &str) -> Option<String> {
    let _ = Figures::of_vllm(metrics);
    let registry = MetricsRegistry::default();
    let source = Source::of(Dialect::Vllm)?;
    Repeated::registered(source, &registry).tell(metrics);
    Some(registry.encode())
}
