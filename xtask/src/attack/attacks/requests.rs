//! What any client may send, once or many times concurrently.
#![expect(clippy::disallowed_methods, reason = "attackers wait in real time")]

use std::net::SocketAddr;
use std::process::Command;
use std::thread;
use std::time::Duration;

use super::bodies::{tokenize_body, words};
use super::{SLOWLY, TEXT_BYTES};
use crate::attack::figures::Row;
use crate::attack::{Bench, Deed, Scene};
use crate::http::{Connection, Request, exchange};
use crate::process::output;
use crate::served::{Port, Served, cpu_seconds, resident_bytes};

pub(super) fn told(answered: std::io::Result<u16>) -> String {
    match answered {
        Ok(status) => status.to_string(),
        Err(error) => error.kind().to_string(),
    }
}

fn post(address: SocketAddr, path: &str, body: &str) -> String {
    let answer = exchange(address, Request::post(path, body.as_bytes()));
    told(answer.map(|answer| answer.status))
}

pub(super) fn one(bench: &Bench, engine: &str, body: &str) -> anyhow::Result<Row> {
    one_to(bench, engine, "/v1/completions", body)
}

/// Sends one request to its own server.
pub(super) fn one_to(bench: &Bench, engine: &str, path: &str, body: &str) -> anyhow::Result<Row> {
    let slowly: &[&str] = if engine == "sample" { &SLOWLY } else { &[] };
    let mut scene = bench.alone(engine, slowly)?;
    Ok(bench.measure(&mut scene, |scene| {
        let mut deed = Deed::new(body.len());
        deed.answers.push(post(scene.http(), path, body));
        deed
    }))
}

pub(super) fn at_once(address: SocketAddr, count: usize, path: &str, body: &str) -> Deed {
    let mut deed = Deed::new(body.len() * count);
    deed.further = count.saturating_sub(1) as u64;
    thread::scope(|scope| {
        let requests: Vec<_> = (0..count)
            .map(|_| scope.spawn(|| post(address, path, body)))
            .collect();
        for request in requests {
            deed.answers.push(request.join().unwrap_or_default());
        }
    });
    deed
}

/// Sends requests concurrently to a frontend with a worker behind it.
pub(super) fn fleet(bench: &Bench, count: usize, body: &str) -> anyhow::Result<Row> {
    let (frontend, worker) = bench.fleet(&SLOWLY)?;
    let mut scene = Scene::of(frontend);
    scene.helper = Some(worker);
    Ok(bench.measure(&mut scene, |scene| {
        at_once(scene.http(), count, "/v1/completions", body)
    }))
}

pub(super) fn tokenize(bench: &Bench, text: &str) -> anyhow::Result<Row> {
    one_to(bench, "sample", "/tokenize", &tokenize_body(text))
}

/// Clients disconnect at once. Measures what the server still computes for them.
pub(super) fn abandoned(bench: &Bench) -> anyhow::Result<Row> {
    let mut scene = bench.alone("sample", &SLOWLY)?;
    let body = tokenize_body(&words(TEXT_BYTES));
    Ok(bench.measure(&mut scene, |scene| {
        let mut deed = Deed::new(5 * body.len());
        thread::scope(|scope| {
            for _ in 0..5 {
                scope.spawn(|| {
                    let mut connection = Connection::open(scene.http())?;
                    connection.send(Request::post("/tokenize", body.as_bytes()))?;
                    // By now the body is read and its text is being tokenized.
                    thread::sleep(Duration::from_millis(800));
                    Ok::<_, std::io::Error>(())
                });
            }
        });
        let process = scene.target.id();
        let left = cpu_seconds(process);
        // Waits until it has computed next to nothing for half a second.
        for _ in 0..120 {
            let before = cpu_seconds(process);
            thread::sleep(Duration::from_millis(500));
            if cpu_seconds(process) - before < 0.1 {
                break;
            }
        }
        let after = cpu_seconds(process) - left;
        deed.answers = vec!["left".into(); 5];
        deed.note = format!("{after:.1} s of CPU after the last had left");
        if after > 5.0 {
            deed.problem = Some("work for nobody".into());
        }
        deed
    }))
}

pub(super) fn other_origin(bench: &Bench) -> anyhow::Result<Row> {
    let scene = bench.alone("sample", &[])?;
    let body = r#"{"model":"tiny-chat","prompt":"a","max_tokens":1}"#;
    let mut deed = Deed::new(2 * body.len());
    let page = "Content-Type: text/plain\r\nOrigin: https://evil.example\r\nSec-Fetch-Site: cross-site\r\n";
    let rebound = "Content-Type: application/json\r\nHost: evil.example:8080\r\n";
    let own = "Content-Type: application/x-www-form-urlencoded\r\n";
    for headers in [page, rebound, own] {
        let path = "/v1/completions";
        let body = body.as_bytes();
        let answer = exchange(
            scene.http(),
            Request {
                path,
                headers,
                body,
            },
        );
        deed.answers.push(told(answer.map(|answer| answer.status)));
    }
    if deed.answers[0] == "200" || deed.answers[1] == "200" {
        deed.problem = Some("other origins are answered".into());
    } else if deed.answers[2] != "200" {
        deed.problem = Some("plain `curl -d` is refused".into());
    }
    Ok(Row::of(deed))
}

/// Sends as many stalled bodies as one client may have, and small requests of other clients meanwhile.
pub(super) fn slow_bodies(bench: &Bench) -> anyhow::Result<Row> {
    let help = output(Command::new(&bench.binary).args(["run", "--help"]))?;
    let small: &[&str] = if help.contains("--max-bodies-bytes") {
        &["--max-bodies-bytes", "8388608"]
    } else {
        &["--memory-budget", "67108864"]
    };
    let mut scene = bench.alone("sample", &[&SLOWLY, small].concat())?;
    Ok(bench.measure(&mut scene, |scene| {
        let part = vec![b' '; 1 << 20];
        let mut deed = Deed::new(0);
        let stalled: Vec<_> = (0..8)
            .filter_map(|_| {
                let mut connection = Connection::open(scene.http()).ok()?;
                let head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 9000000\r\n\r\n";
                connection.send_raw(head.as_bytes()).ok()?;
                for _ in 0..8 {
                    // A refused connection is fine: it holds nothing.
                    if connection.send_raw(&part).is_ok() {
                        deed.bytes += 1 << 20;
                    }
                }
                Some(connection)
            })
            .collect();
        for _ in 0..20 {
            let body = r#"{"model":"tiny-chat","prompt":"a","max_tokens":1}"#;
            deed.answers.push(post(scene.http(), "/v1/completions", body));
        }
        drop(stalled);
        if deed.answers.iter().any(|answer| answer != "200") {
            deed.problem = Some("small requests are refused".into());
        }
        deed
    }))
}

/// Sends uploads whose first part has a head that does not end, and small requests of other clients meanwhile.
pub(super) fn endless_heads(bench: &Bench) -> anyhow::Result<Row> {
    const BUDGET_BYTES: u64 = 64 << 20;
    let folder = bench.folder.join("batches");
    let folder = folder.to_string_lossy();
    let budget = BUDGET_BYTES.to_string();
    let flags = ["--batch-folder", &folder, "--memory-budget", &budget];
    let mut scene = bench.alone("sample", &[&SLOWLY, &flags[..]].concat())?;
    Ok(bench.measure(&mut scene, |scene| {
        let process = scene.target.id();
        let before = resident_bytes(process);
        let part = vec![b'a'; 1_900_000];
        let mut deed = Deed::new(0);
        let stalled: Vec<_> = (0..100)
            .filter_map(|_| {
                let mut connection = Connection::open(scene.http()).ok()?;
                let head = "POST /v1/files HTTP/1.1\r\nHost: localhost\r\nContent-Type: multipart/form-data; boundary=b\r\nContent-Length: 9000000\r\n\r\n--b\r\nContent-Disposition: form-data; name=\"";
                connection.send_raw(head.as_bytes()).ok()?;
                // A refused connection is fine: it holds nothing.
                if connection.send_raw(&part).is_ok() {
                    deed.bytes += part.len() as u64;
                }
                Some(connection)
            })
            .collect();
        for _ in 0..20 {
            let body = r#"{"model":"tiny-chat","prompt":"a","max_tokens":1}"#;
            deed.answers.push(post(scene.http(), "/v1/completions", body));
        }
        let taken = resident_bytes(process).saturating_sub(before);
        drop(stalled);
        if deed.answers.iter().any(|answer| answer != "200") {
            deed.problem = Some("small requests are refused".into());
        } else if taken > 2 * BUDGET_BYTES {
            deed.problem = Some(format!("{taken} bytes beside a budget of {BUDGET_BYTES}"));
        }
        deed
    }))
}

pub(super) fn long_name(bench: &Bench) -> anyhow::Result<Row> {
    let scene = Scene::of(Served::start(
        &bench.binary,
        Port::Http,
        &["in=http", "out=sample", "-v"],
    )?);
    let before = scene.target.log_bytes();
    let long = "x".repeat(8 << 20);
    let forged = "x\\n2026-01-01T00:00:00Z  INFO genset::access: forged";
    let mut deed = Deed::new(long.len());
    for name in [&*long, forged] {
        let body = format!(r#"{{"model":"{name}","prompt":"a"}}"#);
        deed.answers
            .push(post(scene.http(), "/v1/completions", &body));
    }
    thread::sleep(Duration::from_millis(500));
    let logged = scene.target.log_bytes() - before;
    deed.note = format!("{logged} bytes of log");
    let is_forged = |line: &str| line.starts_with("2026-01-01") && line.ends_with("forged");
    if scene.target.log_text().lines().any(is_forged) {
        deed.problem = Some("a forged line".into());
    } else if logged > 100_000 {
        deed.problem = Some("a flood".into());
    }
    Ok(Row::of(deed))
}
