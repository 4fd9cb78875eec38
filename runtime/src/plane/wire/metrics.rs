//! Metrics of wire connections for operators.

use genset_backend_common::MetricsRegistry;
use genset_backend_common::log_limit::OncePerMinute;
use genset_backend_common::prometheus::metrics::counter::Counter;
use genset_backend_common::prometheus::metrics::family::Family;
use genset_backend_common::prometheus::metrics::gauge::Gauge;

use super::handshake::Role;
use super::link::Ended;

/// One label: its name and value.
type Label = [(&'static str, &'static str); 1];

/// A request for `control` without the right secret.
pub(super) const CONTROL_SECRET: &str = "control_secret";

/// Reasons for refusing strangers: connections in the handshake, and requests without the control secret.
pub(super) const OF_STRANGERS: [&str; 13] = [
    "certificate",
    "closed",
    CONTROL_SECRET,
    "frame_limit",
    "not_our_protocol",
    "plaintext",
    "refused_by_peer",
    "timeout",
    "tls",
    "too_many_connections",
    "too_many_strangers",
    "unauthorized",
    "version",
];

/// The metrics of a wire plane. Clones share state.
#[derive(Debug, Clone, Default)]
pub(super) struct WireMetrics {
    connections: Family<Label, Gauge>,
    streams: Family<Label, Gauge>,
    refused: Family<Label, Counter>,
    ended: Family<Label, Counter>,
    memory: Gauge,
    unreachable: Gauge,
    logged: OncePerMinute,
}

fn role_label(role: Role) -> Label {
    let role = match role {
        Role::Caller => "caller",
        Role::Callee => "callee",
    };
    [("role", role)]
}

impl WireMetrics {
    pub(super) fn new(registry: &MetricsRegistry) -> Self {
        let refused: Family<Label, Counter> = registry.create(
            "genset_wire_refused",
            "Connections and requests that were refused",
        );
        // Prometheus sees no increase in a counter that starts at 1: the first stranger would raise no alert.
        for reason in OF_STRANGERS {
            refused.get_or_create_owned(&[("reason", reason)]);
        }
        Self {
            connections: registry.create(
                "genset_wire_connections",
                "Connections to other processes that are open",
            ),
            streams: registry.create(
                "genset_wire_streams",
                "Requests under way on connections to other processes",
            ),
            memory: registry.create(
                "genset_wire_memory_bytes",
                "Bytes that requests and unread items of other processes hold",
            ),
            unreachable: registry.create(
                "genset_wire_unreachable_processes",
                "Processes that cannot be reached and did not say that they leave",
            ),
            refused,
            ended: registry.create("genset_wire_ended_connections", "Connections that ended"),
            logged: OncePerMinute::default(),
        }
    }

    /// The gauge of memory held.
    pub(super) fn memory(&self) -> Gauge {
        self.memory.clone()
    }

    /// Counts a process that cannot be reached until the guard is dropped.
    pub(super) fn unreachable(&self) -> GaugeGuard {
        GaugeGuard::new(self.unreachable.clone())
    }

    /// Counts an open connection until the guard is dropped.
    pub(super) fn connection(&self, role: Role) -> GaugeGuard {
        GaugeGuard::new(self.connections.get_or_create_owned(&role_label(role)))
    }

    /// The gauge of open streams.
    pub(super) fn streams(&self, role: Role) -> Gauge {
        self.streams.get_or_create_owned(&role_label(role))
    }

    pub(super) fn ended(&self, ended: &Ended) {
        self.ended.get_or_create(&[("reason", ended.label())]).inc();
    }

    /// Counts a refusal; returns whether it may be logged.
    pub(super) fn refused(&self, reason: &'static str) -> bool {
        self.refused.get_or_create(&[("reason", reason)]).inc();
        self.may_log(reason)
    }

    /// Whether an event that others can trigger at will may be logged now.
    pub(super) fn may_log(&self, reason: &'static str) -> bool {
        self.logged.may_log(reason)
    }
}

/// One unit of a gauge.
#[derive(Debug)]
pub(super) struct GaugeGuard(Gauge);

impl GaugeGuard {
    pub(super) fn new(gauge: Gauge) -> Self {
        gauge.inc();
        Self(gauge)
    }
}

impl Drop for GaugeGuard {
    fn drop(&mut self) {
        self.0.dec();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_alert_of_strangers_asks_for_is_counted_from_nothing() {
        let registry = MetricsRegistry::default();
        let _metrics = WireMetrics::new(&registry);
        let text = registry.encode();
        for reason in OF_STRANGERS {
            let line = format!("genset_wire_refused_total{{reason=\"{reason}\"}} 0\n");
            assert!(text.contains(&line), "{text}");
        }
        let alerts = include_str!("../../../../deploy/prometheus/alerts.yml");
        let asked = format!(
            "genset_wire_refused_total{{reason=~\"{}\"}}",
            OF_STRANGERS.join("|")
        );
        assert!(alerts.contains(&asked), "{asked}");
    }
}
