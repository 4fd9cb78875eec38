//! Functions for the fuzz targets only: the decoder of server-sent events, and the parser of a server's metrics.

use genset_backend_common::MetricsRegistry;

use crate::dialect::Dialect;
use crate::load::figures::Figures;
use crate::repeated::Repeated;
use crate::sse::{Decoder, Event};

/// An event's data, and whether it is an error.
pub type FoundEvent = (bool, Vec<u8>);

/// Decodes the pieces of a body. Returns the events and whether the body ended inside one; `None` if it is refused.
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

/// The metrics that a worker shows for those of a vLLM; parses the load too. `None` for a server without metrics.
#[must_use]
pub fn repeated_metrics(metrics: &str) -> Option<String> {
    let _ = Figures::of_vllm(metrics);
    let registry = MetricsRegistry::default();
    Repeated::registered(Dialect::Vllm, &registry)?.tell(metrics);
    Some(registry.encode())
}
