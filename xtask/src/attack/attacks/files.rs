//! Attacks with uploads and the batches that read them.
#![expect(clippy::disallowed_methods, reason = "attackers wait in real time")]

use std::fmt::Write as _;
use std::net::SocketAddr;
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, bail};
use serde_json::Value;

use super::SLOWLY;
use crate::attack::figures::Row;
use crate::attack::{Bench, Deed, Scene};
use crate::http::{Answer, Request, exchange};

/// One line more than a batch may have.
const LINES: usize = 50_001;

/// A server that keeps files.
fn keeping(bench: &Bench) -> anyhow::Result<Scene> {
    let folder = bench.folder.join("batches");
    let folder = folder.to_string_lossy().into_owned();
    bench.alone(
        "sample",
        &[&SLOWLY[..], &["--batch-folder", &folder]].concat(),
    )
}

fn upload(address: SocketAddr, body: &str) -> std::io::Result<Answer> {
    exchange(
        address,
        Request {
            path: "/v1/files",
            headers: "Content-Type: multipart/form-data; boundary=x\r\n",
            body: body.as_bytes(),
        },
    )
}

/// A batch of more requests than allowed: the server checks each line up to the limit.
pub(super) fn too_many_lines(bench: &Bench) -> anyhow::Result<Row> {
    let mut scene = keeping(bench)?;
    let mut body = String::from(
        "--x\r\nContent-Disposition: form-data; name=\"purpose\"\r\n\r\nbatch\r\n\
         --x\r\nContent-Disposition: form-data; name=\"file\"; filename=\"a.jsonl\"\r\n\r\n",
    );
    for line in 0..LINES {
        writeln!(
            body,
            r#"{{"custom_id":"{line}","method":"POST","url":"/v1/completions","body":{{"model":"tiny-chat","prompt":"a"}}}}"#
        )?;
    }
    body.push_str("\r\n--x--\r\n");
    Ok(bench.measure(&mut scene, |scene| {
        let mut deed = Deed::new(body.len());
        match looked_at(scene.http(), &body) {
            Ok(status) if status == "failed" => deed.answers.push(status),
            Ok(status) => deed.problem = Some(format!("the batch is {status}")),
            Err(error) => deed.problem = Some(format!("{error:#}")),
        }
        deed
    }))
}

/// Uploads `body`, creates a batch of it and returns the batch's status after validation.
fn looked_at(address: SocketAddr, body: &str) -> anyhow::Result<String> {
    let text = |answer: Answer, name: &str| {
        let json: Value = serde_json::from_slice(&answer.body)?;
        let text = json[name].as_str().map(str::to_owned);
        text.with_context(|| format!("no {name} in {json}"))
    };
    let file = text(upload(address, body)?, "id")?;
    let batch = format!(
        r#"{{"input_file_id":"{file}","endpoint":"/v1/completions","completion_window":"24h"}}"#
    );
    let batch = exchange(address, Request::post("/v1/batches", batch.as_bytes()))?;
    let path = format!("/v1/batches/{}", text(batch, "id")?);
    for _ in 0..600 {
        let status = text(exchange(address, Request::get(&path))?, "status")?;
        if status != "validating" {
            return Ok(status);
        }
        thread::sleep(Duration::from_millis(50));
    }
    bail!("the validation of the batch does not end")
}
