//! The system's limits for a process.

use std::fs;

use rustix::process::{Resource, getrlimit};

use super::finding::Finding;
use crate::node::SPARE_FILES;

/// Fewer ports than this are too few for a process that calls many others.
const FEW_PORTS: u64 = 10_000;

/// A shorter queue of connections waiting to be accepted is too short for a burst.
const SHORT_QUEUE: u64 = 1024;

pub(super) fn look(max_connections: usize) -> Vec<Finding> {
    let mut findings = vec![files(max_connections)];
    findings.extend(ports());
    findings.extend(queue());
    findings
}

/// Checks the hard limit of open files. A server raises the soft limit by itself, up to the hard one.
fn files(max_connections: usize) -> Finding {
    let wanted = max_connections.saturating_add(SPARE_FILES);
    let limit = getrlimit(Resource::Nofile).maximum;
    match limit.map(|files| usize::try_from(files).unwrap_or(usize::MAX)) {
        None => Finding::ok("no limit on open files"),
        Some(files) if files >= wanted => Finding::ok(format!("{files} open files")),
        Some(files) => Finding::warning(
            format!("{files} open files, and a server takes up to {wanted} for its connections"),
            format!(
                "ulimit -Hn {wanted} (LimitNOFILE={wanted} in a unit), or --max-connections {}",
                files.saturating_sub(SPARE_FILES)
            ),
        ),
    }
}

fn ports() -> Option<Finding> {
    let range = fs::read_to_string("/proc/sys/net/ipv4/ip_local_port_range").ok()?;
    let mut ends = range.split_whitespace().map(|end| end.parse::<u64>());
    let (Some(Ok(first)), Some(Ok(last))) = (ends.next(), ends.next()) else {
        return None;
    };
    let count = last.saturating_sub(first) + 1;
    Some(match count < FEW_PORTS {
        true => Finding::warning(
            format!("{count} ports for outgoing connections"),
            "sudo sysctl -w net.ipv4.ip_local_port_range='15000 60999'",
        ),
        false => Finding::ok(format!("{count} ports for outgoing connections")),
    })
}

fn queue() -> Option<Finding> {
    let length: u64 = fs::read_to_string("/proc/sys/net/core/somaxconn")
        .ok()?
        .trim()
        .parse()
        .ok()?;
    let what = format!("{length} connections may wait to be accepted");
    Some(match length < SHORT_QUEUE {
        true => Finding::warning(what, "sudo sysctl -w net.core.somaxconn=4096"),
        false => Finding::ok(what),
    })
}
