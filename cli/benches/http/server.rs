//! The program under measurement: frontend and sample engine in one process.

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use rustix::process::Signal;
use tokio::time::Instant;

use crate::support::process::{Genset, free_address, get, wait_for};

/// `genset run in=http out=sample`.
pub(crate) struct Server {
    pub(crate) genset: Genset,
    pub(crate) address: SocketAddr,
    pub(crate) ready_after: Duration,
}

impl Server {
    /// Starts it with additional flags and waits until `/ready` returns 200.
    pub(crate) async fn start(flags: &[&str]) -> io::Result<Self> {
        let address = free_address()?;
        let port = address.port().to_string();
        let words = ["in=http", "out=sample", "--http-port", &port];
        let began = Instant::now();
        let genset = Genset::run(&[&words, flags].concat())?;
        wait_for(address, "/ready", "").await?;
        Ok(Self {
            genset,
            address,
            ready_after: began.elapsed(),
        })
    }

    /// The values of these metrics, which have no labels.
    pub(crate) async fn metrics<const N: usize>(&self, names: [&str; N]) -> io::Result<[f64; N]> {
        let text = get(self.address, "/metrics").await?;
        let value = |name: &str| {
            let mut lines = text.lines();
            let value = lines.find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
            value.and_then(|value| value.parse().ok()).unwrap_or(0.0)
        };
        Ok(names.map(value))
    }

    pub(crate) async fn end(mut self) -> io::Result<()> {
        self.genset.end(Signal::TERM).await
    }
}
