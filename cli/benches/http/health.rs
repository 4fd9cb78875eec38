//! How long `/health` takes on a server under full load.

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use serde_json::{Value, json};
use tokio::time::Instant;

use crate::server::Server;
use crate::support::load::{LOAD_TIME, Load, WARM_UP, drive};
use crate::support::process::get;
use crate::support::{per, round};

const SATURATING: Load = Load {
    name: "256 streams, no delay",
    streams: 256,
    tokens: 128,
    token_delay_ms: 0,
};

/// The pause between two requests.
const PAUSE: Duration = Duration::from_millis(4);

pub(crate) async fn measure() -> io::Result<Value> {
    let server = Server::start(&[]).await?;
    let mut idle = probe(server.address).await?;
    let (cpu, began) = (server.genset.cpu_seconds()?, Instant::now());
    let probing = async {
        tokio::time::sleep(WARM_UP).await;
        probe(server.address).await
    };
    let load_time = WARM_UP + LOAD_TIME + WARM_UP;
    let (done, busy) = tokio::join!(drive(server.address, &SATURATING, load_time), probing);
    let wall = began.elapsed().as_secs_f64();
    let cpu = server.genset.cpu_seconds()? - cpu;
    server.end().await?;
    let mut busy = busy?;
    Ok(json!({
        "load": SATURATING.name,
        "tokens_per_second": per(done?.tokens, wall),
        "server_cores": round(cpu / wall, 100.0),
        "idle": summary(&mut idle),
        "saturated": summary(&mut busy),
    }))
}

/// Sends requests repeatedly, each on a new connection, from its own thread: the load's clients must not delay it.
async fn probe(address: SocketAddr) -> io::Result<Vec<Duration>> {
    let asking = move || {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()?;
        runtime.block_on(async {
            let (until, mut times) = (Instant::now() + LOAD_TIME, Vec::new());
            while Instant::now() < until {
                let asked = Instant::now();
                let answer = get(address, "/health").await?;
                times.push(asked.elapsed());
                if !answer.starts_with("HTTP/1.1 200") {
                    return Err(io::Error::other(format!("/health: {answer}")));
                }
                tokio::time::sleep(PAUSE).await;
            }
            Ok(times)
        })
    };
    let asked = tokio::task::spawn_blocking(asking).await;
    asked.map_err(io::Error::other)?
}

fn summary(times: &mut [Duration]) -> Value {
    times.sort_unstable();
    let last = times.len().saturating_sub(1);
    let at = |hundredths: usize| {
        let time = times.get(last * hundredths / 100);
        time.map(|time| round(time.as_secs_f64() * 1e3, 1000.0))
    };
    json!({"questions": times.len(), "p50_ms": at(50), "p99_ms": at(99), "max_ms": at(100)})
}
