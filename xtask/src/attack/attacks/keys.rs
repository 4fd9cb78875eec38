//! What one API key can do to another.
#![expect(clippy::disallowed_methods, reason = "attackers wait in real time")]

use std::fs;
use std::net::SocketAddr;
use std::path::Path;
use std::process::Command;
use std::thread;
use std::time::{Duration, SystemTime};

use anyhow::Context as _;
use serde_json::Value;

use super::bodies::words;
use super::requests::told;
use crate::attack::figures::Row;
use crate::attack::{Bench, Deed};
use crate::http::{Connection, Request, exchange};
use crate::process::output;
use crate::served::Served;

/// Creates a key with the binary; returns it and the lines for its file.
fn new_key(bench: &Bench, name: &str) -> anyhow::Result<(String, String)> {
    let text = output(Command::new(&bench.binary).args(["key", name]))?;
    let key = text
        .split_whitespace()
        .find(|word| word.len() > 30 && !word.contains(':'));
    let key = key.with_context(|| format!("`genset key` printed no key: {text}"))?;
    let lines = text.find("[[key]]").map(|at| &text[at..]);
    let lines = lines.with_context(|| format!("`genset key` printed no lines: {text}"))?;
    Ok((key.trim_matches('"').to_owned(), lines.to_owned()))
}

fn keys_file(bench: &Bench, lines: &str) -> anyhow::Result<String> {
    let path = bench.folder.join("keys.toml");
    fs::write(&path, lines)?;
    Ok(path.to_string_lossy().into_owned())
}

fn bearer(key: &str) -> String {
    format!("Content-Type: application/json\r\nAuthorization: Bearer {key}\r\n")
}

fn with_key(
    address: SocketAddr,
    key: &str,
    path: &str,
    body: &str,
) -> std::io::Result<(u16, Value)> {
    let answer = exchange(
        address,
        Request {
            path,
            headers: &bearer(key),
            body: body.as_bytes(),
        },
    )?;
    let json = serde_json::from_slice(&answer.body).unwrap_or_default();
    Ok((answer.status, json))
}

pub(super) fn unpaid(bench: &Bench) -> anyhow::Result<Row> {
    let (key, lines) = new_key(bench, "poor")?;
    let keys = keys_file(bench, &format!("{lines}\ntokens_per_minute = 50\n"))?;
    let flags = ["--api-keys", &*keys, "--token-delay-ms", "5"];
    let scene = bench.alone("sample", &flags)?;
    let body =
        r#"{"model":"tiny-chat","prompt":"a","stream":true,"max_tokens":300,"ignore_eos":true}"#;
    let mut deed = Deed::new(body.len() * 8);
    let mut tokens = 0;
    for _ in 0..8 {
        let mut connection = Connection::open(scene.http())?;
        connection.send(Request {
            path: "/v1/completions",
            headers: &bearer(&key),
            body: body.as_bytes(),
        })?;
        let head = connection.head()?;
        if head.status == 200 {
            let mut events = 0;
            connection.body(&head, |piece| {
                events += String::from_utf8_lossy(piece).matches("data: ").count();
                events < 250
            })?;
            tokens += events;
        }
        deed.answers.push(head.status.to_string());
        drop(connection);
        // The server must notice that the client has disconnected.
        thread::sleep(Duration::from_millis(300));
    }
    deed.note = format!("about {tokens} tokens on a quota of 50 a minute");
    let answered = deed
        .answers
        .iter()
        .filter(|answer| *answer == "200")
        .count();
    if answered > 2 {
        deed.problem = Some("quota".into());
    }
    Ok(Row::of(deed))
}

pub(super) fn guessed_prompt(bench: &Bench) -> anyhow::Result<Row> {
    let (first, first_lines) = new_key(bench, "first")?;
    let (second, second_lines) = new_key(bench, "second")?;
    let keys = keys_file(bench, &format!("{first_lines}\n{second_lines}"))?;
    let scene = bench.alone("candle", &["--api-keys", &keys])?;
    let body = format!(
        r#"{{"model":"tiny-chat","prompt":"{}","max_tokens":1}}"#,
        words(200)
    );
    let mut deed = Deed::new(2 * body.len());
    let mut cached = 0;
    for key in [&first, &second] {
        let (status, answer) = with_key(scene.http(), key, "/v1/completions", &body)?;
        deed.answers.push(status.to_string());
        let tokens = &answer["usage"]["prompt_tokens_details"]["cached_tokens"];
        cached = tokens.as_u64().unwrap_or(0);
    }
    deed.note = format!("{cached} cached tokens told");
    if cached > 0 {
        deed.problem = Some("told of another's prompt".into());
    }
    Ok(Row::of(deed))
}

pub(super) fn replaced_key(bench: &Bench) -> anyhow::Result<Row> {
    let (old, old_lines) = new_key(bench, "team")?;
    let (new, new_lines) = new_key(bench, "team")?;
    let keys = keys_file(bench, &old_lines)?;
    let epoch = SystemTime::UNIX_EPOCH + Duration::from_secs(1);
    let set_time = |path: &Path| {
        fs::File::options()
            .write(true)
            .open(path)?
            .set_modified(epoch)
    };
    set_time(Path::new(&keys))?;
    let scene = bench.alone("sample", &["--api-keys", &keys])?;
    let other = bench.folder.join("new.toml");
    fs::write(&other, new_lines)?;
    set_time(&other)?;
    fs::rename(&other, &keys)?;
    let body = r#"{"model":"tiny-chat","prompt":"a","max_tokens":1}"#;
    let ask = |key: &str| with_key(scene.http(), key, "/v1/completions", body).map(|it| it.0);
    let is_replaced = |_: &Served| ask(&new).is_ok_and(|status| status == 200);
    scene.target.wait_until(Duration::from_secs(8), is_replaced);
    let mut deed = Deed::new(0);
    deed.answers = vec![told(ask(&old)), told(ask(&new))];
    if deed.answers != ["401", "200"] {
        deed.problem = Some("the old key is valid".into());
    }
    Ok(Row::of(deed))
}

pub(super) fn stored_responses(bench: &Bench) -> anyhow::Result<Row> {
    let (loud, loud_lines) = new_key(bench, "loud")?;
    let (quiet, quiet_lines) = new_key(bench, "quiet")?;
    let keys = keys_file(bench, &format!("{loud_lines}\n{quiet_lines}"))?;
    let mut scene = bench.alone("sample", &["--api-keys", &keys])?;
    scene.headers = format!("Authorization: Bearer {quiet}\r\n");
    let body = r#"{"model":"tiny-chat","input":"a","max_output_tokens":1}"#;
    let (_, kept) = with_key(scene.http(), &quiet, "/v1/responses", body)?;
    let id = kept["id"]
        .as_str()
        .context("a response has no id")?
        .to_owned();
    Ok(bench.measure(&mut scene, |scene| {
        let mut deed = Deed::new(1100 * body.len());
        let headers = bearer(&loud);
        let mut connection = Connection::open(scene.http()).ok();
        for _ in 0..1100 {
            let request = Request {
                path: "/v1/responses",
                headers: &headers,
                body: body.as_bytes(),
            };
            let answer = connection.as_mut().map(|connection| connection.exchange(request));
            deed.answers.push(match answer {
                Some(answer) => told(answer.map(|answer| answer.status)),
                None => "no connection".into(),
            });
        }
        let next = format!(
            r#"{{"model":"tiny-chat","input":"a","max_output_tokens":1,"previous_response_id":"{id}"}}"#
        );
        let went_on = with_key(scene.http(), &quiet, "/v1/responses", &next);
        if !went_on.is_ok_and(|(status, _)| status == 200) {
            deed.problem = Some("another key's response is gone".into());
        }
        deed
    }))
}

pub(super) fn told_names(bench: &Bench) -> anyhow::Result<Row> {
    let (key, lines) = new_key(bench, "secret-customer")?;
    let keys = keys_file(bench, &lines)?;
    let scene = bench.alone("sample", &["--api-keys", &keys])?;
    let body = r#"{"model":"tiny-chat","prompt":"a","max_tokens":1}"#;
    with_key(scene.http(), &key, "/v1/completions", body)?;
    let answer = exchange(scene.http(), Request::get("/metrics"))?;
    let mut deed = Deed::new(0);
    deed.answers.push(answer.status.to_string());
    if String::from_utf8_lossy(&answer.body).contains("secret-customer") {
        deed.problem = Some("a key's name is told".into());
    }
    Ok(Row::of(deed))
}
