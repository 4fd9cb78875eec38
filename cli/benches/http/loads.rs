//! Streams at full speed and at a model's pace: the cost of a token and of a request.

use std::io;

use serde_json::{Value, json};
use tokio::time::Instant;

use crate::server::Server;
use crate::support::load::{LOAD_TIME, Load, WARM_UP, drive};
use crate::support::{per, round};

const LOADS: [Load; 4] = [
    Load {
        name: "64 streams, no delay",
        streams: 64,
        tokens: 128,
        token_delay_ms: 0,
    },
    Load::FULL_SPEED,
    Load::PACED,
    Load::SHORT_ANSWERS,
];

pub(crate) async fn measure() -> io::Result<Value> {
    let mut measured = Vec::new();
    for load in &LOADS {
        measured.push(measure_load(load).await?);
    }
    Ok(measured.into())
}

async fn measure_load(load: &Load) -> io::Result<Value> {
    let delay = load.token_delay_ms.to_string();
    let server = Server::start(&["--token-delay-ms", &delay]).await?;
    let idle = server.genset.memory_mib("VmRSS")?;
    drive(server.address, load, WARM_UP).await?;
    let (cpu, began) = (server.genset.cpu_seconds()?, Instant::now());
    let done = drive(server.address, load, LOAD_TIME).await?;
    let wall = began.elapsed().as_secs_f64();
    let cpu = server.genset.cpu_seconds()? - cpu;
    let result = json!({
        "load": load.name,
        "requests": done.requests,
        "tokens": done.tokens,
        "events_per_token": round(done.events as f64 / done.tokens as f64, 100.0),
        "tokens_per_second": per(done.tokens, wall),
        "tokens_per_cpu_second": per(done.tokens, cpu),
        "cpu_us_per_request": round(cpu * 1e6 / done.requests as f64, 10.0),
        "cpu_us_per_token": round(cpu * 1e6 / done.tokens as f64, 100.0),
        "cpu_seconds": round(cpu, 100.0),
        "wall_seconds": round(wall, 100.0),
        "idle_rss_mib": idle,
        "rss_mib": server.genset.memory_mib("VmRSS")?,
        "peak_rss_mib": server.genset.memory_mib("VmHWM")?,
    });
    server.end().await?;
    Ok(result)
}
