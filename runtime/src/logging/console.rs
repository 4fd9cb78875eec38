//! The tasks of the process, shown to [tokio-console](https://github.com/tokio-rs/console), in builds that have the feature.

use std::net::SocketAddr;
#[cfg(feature = "tokio-console")]
use std::net::{IpAddr, Ipv4Addr, TcpListener};

/// How to build with this feature.
const HOW: &str =
    "RUSTFLAGS=\"--cfg tokio_unstable\" cargo build -p genset --features tokio-console";

/// Checks whether this build can show its tasks.
///
/// # Errors
/// How to build one that can.
#[expect(unexpected_cfgs, reason = "it is tokio's, set for the whole build")]
pub fn tokio_console_support() -> Result<(), String> {
    let is_traced = cfg!(tokio_unstable);
    match (cfg!(feature = "tokio-console"), is_traced) {
        (true, true) => Ok(()),
        (true, false) => Err(format!(
            "this build has the feature tokio-console, but tokio shows nothing without its flag; build with {HOW}"
        )),
        (false, _) => Err(format!(
            "this build has no tokio-console; build one with {HOW}"
        )),
    }
}

/// Warns that nothing is shown, if the user asked for it.
#[cfg(not(feature = "tokio-console"))]
pub(super) fn warn(address: Option<SocketAddr>) {
    if let (Some(_), Err(problem)) = (address, tokio_console_support()) {
        tracing::warn!("{problem}");
    }
}

/// The console's default address: its usual port, on loopback since it has no authentication.
#[cfg(feature = "tokio-console")]
const ADDRESS: SocketAddr = SocketAddr::new(
    IpAddr::V4(Ipv4Addr::LOCALHOST),
    console_subscriber::Server::DEFAULT_PORT,
);

/// The layer that shows the tasks, and its address; or why nothing is shown.
#[cfg(feature = "tokio-console")]
pub(super) fn layer<S>(
    address: Option<SocketAddr>,
) -> Result<(impl tracing_subscriber::Layer<S>, SocketAddr), String>
where
    S: tracing::Subscriber + for<'a> tracing_subscriber::registry::LookupSpan<'a>,
{
    tokio_console_support()?;
    let address = address.unwrap_or(ADDRESS);
    // Bound here, since a failure would panic in its own thread.
    TcpListener::bind(address)
        .map_err(|error| format!("tokio-console cannot be listened for at {address}: {error}"))?;
    let console = console_subscriber::ConsoleLayer::builder().server_addr(address);
    Ok((console.spawn(), address))
}
