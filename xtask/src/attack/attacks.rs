//! The attacks: what is sent, and what must not come of it beside what every attack is judged by.
//!
//! Bodies are made here as text, as an attacker would: nothing that makes valid requests is in the way.
#![expect(
    clippy::disallowed_types,
    clippy::disallowed_methods,
    reason = "attackers wait in real time"
)]

use std::fs;
use std::io::Read as _;
use std::net::SocketAddr;
use std::path::Path;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use anyhow::Context as _;
use serde_json::Value;

use super::figures::Row;
use super::{Attack, Bench, Deed, Scene, wire};
use crate::http::{Connection, Request, exchange};
use crate::process::output;
use crate::served::{Port, Served, cpu_seconds, is_alive};

/// The most that a server takes by default: a body that is larger is not read.
const BODY_BYTES: usize = 16 << 20;
const TEXT_BYTES: usize = 10_000_000;
/// So that streams of others last as long as an attack.
const SLOWLY: [&str; 2] = ["--token-delay-ms", "20"];

pub(super) const ATTACKS: &[Attack] = &[
    Attack {
        name: "1a",
        what: "256 prompts, `n` 16",
        run: |bench| one(bench, "sample", &choices("")),
    },
    Attack {
        name: "1b",
        what: "the same with annotations",
        run: |bench| {
            let zeros = list("0", 5_000);
            let field = format!(r#","genset":{{"annotations":{{"a":[{zeros}]}}}}"#);
            one(bench, "candle", &choices(&field))
        },
    },
    Attack {
        name: "1c",
        what: "the same with stop ids",
        run: |bench| {
            let ids = list("5", 100_000);
            one(
                bench,
                "sample",
                &choices(&format!(r#","stop_token_ids":[{ids}]"#)),
            )
        },
    },
    Attack {
        name: "1d",
        what: "a chat, `n` 16, with stop ids",
        run: |bench| {
            let ids = list("5", 5_000_000);
            let body = format!(
                r#"{{"model":"tiny-chat","messages":[{{"role":"user","content":"a"}}],"n":16,"max_tokens":1,"stop_token_ids":[{ids}]}}"#
            );
            one_to(bench, "sample", "/v1/chat/completions", &body)
        },
    },
    Attack {
        name: "2a",
        what: "16 requests of 256 long prompts",
        run: |bench| fleet(bench, 16, &prompts(16_000)),
    },
    Attack {
        name: "2b",
        what: "3 requests of 4096 choices with stop ids",
        run: |bench| {
            let ids = list("5", 20_000);
            fleet(bench, 3, &choices(&format!(r#","stop_token_ids":[{ids}]"#)))
        },
    },
    Attack {
        name: "2c",
        what: "4 requests that echo 2 million token ids",
        run: |bench| {
            let ids = list("5", 2_000_000);
            let body =
                format!(r#"{{"model":"tiny-chat","prompt":[{ids}],"echo":true,"max_tokens":1}}"#);
            fleet(bench, 4, &body)
        },
    },
    Attack {
        name: "3a",
        what: "a list of numbers in an unknown field",
        run: |bench| one(bench, "sample", &filled(r#"{"a":["#, "0,", "0]}")),
    },
    Attack {
        name: "3b",
        what: "nested lists in a tool's schema",
        run: |bench| one_to(bench, "sample", "/v1/chat/completions", &nested_schema()),
    },
    Attack {
        name: "3c",
        what: "a list without an end",
        run: |bench| one(bench, "sample", &filled(r#"{"a":["#, "0,", "")),
    },
    Attack {
        name: "3d",
        what: "8 such schemas at once",
        run: |bench| {
            let mut scene = bench.alone("sample", &SLOWLY)?;
            let body = nested_schema();
            Ok(bench.measure(&mut scene, |scene| {
                at_once(scene.http(), 8, "/v1/chat/completions", &body)
            }))
        },
    },
    Attack {
        name: "4a",
        what: "`/tokenize`: one letter",
        run: |bench| tokenize(bench, &"a".repeat(TEXT_BYTES)),
    },
    Attack {
        name: "4b",
        what: "`/tokenize`: random words",
        run: |bench| tokenize(bench, &words(TEXT_BYTES)),
    },
    Attack {
        name: "4c",
        what: "`/tokenize`: a letter with accents",
        run: |bench| tokenize(bench, &format!("e{}", "\u{301}".repeat(TEXT_BYTES / 2))),
    },
    Attack {
        name: "4d",
        what: "`/tokenize`: letters, digits and signs",
        run: |bench| tokenize(bench, &"aA1! ".repeat(TEXT_BYTES / 5)),
    },
    Attack {
        name: "4e",
        what: "5 `/tokenize` whose clients leave",
        run: abandoned,
    },
    Attack {
        name: "5",
        what: "a key with 50 tokens a minute leaves before its streams end",
        run: unpaid,
    },
    Attack {
        name: "6",
        what: "a worker's card names a file of 4 EB, and the worker sends zeros",
        run: wire::endless_file,
    },
    Attack {
        name: "7",
        what: "a page of another origin, and a name that was rebound",
        run: other_origin,
    },
    Attack {
        name: "8",
        what: "a key asks for another key's prompt",
        run: guessed_prompt,
    },
    Attack {
        name: "9",
        what: "one client sends large bodies slowly",
        run: slow_bodies,
    },
    Attack {
        name: "10",
        what: "a key is replaced, with the file's time and length kept",
        run: replaced_key,
    },
    Attack {
        name: "11",
        what: "a model's name of 8 MiB, and one with a line break, in the log",
        run: long_name,
    },
    Attack {
        name: "12",
        what: "40 streams with headers of 8 MiB on a worker's wire",
        run: wire::large_headers,
    },
    Attack {
        name: "13",
        what: "a discovery directory of mode 0777",
        run: open_directory,
    },
    Attack {
        name: "16",
        what: "1100 stored responses of one key",
        run: stored_responses,
    },
    Attack {
        name: "17",
        what: "`/metrics` without a key",
        run: told_names,
    },
    Attack {
        name: "18",
        what: "`in=stdin` with a template that does not compile",
        run: broken_template,
    },
    Attack {
        name: "20a",
        what: "a child that prints without pause",
        run: loud_child,
    },
    Attack {
        name: "20b",
        what: "a child of a server that is killed",
        run: orphan,
    },
];

fn list(item: &str, count: usize) -> String {
    let mut list = format!("{item},").repeat(count);
    list.pop();
    list
}

/// A request for 4096 answers.
fn choices(field: &str) -> String {
    let prompts = list(r#""a""#, 256);
    format!(r#"{{"model":"tiny-chat","prompt":[{prompts}],"n":16,"max_tokens":1{field}}}"#)
}

/// A request with 256 prompts of so many bytes.
fn prompts(bytes: usize) -> String {
    let prompt = format!("\"{}\"", &words(bytes));
    let prompts = list(&prompt, 256);
    format!(r#"{{"model":"tiny-chat","prompt":[{prompts}],"max_tokens":1}}"#)
}

/// A body of as many items as fit.
fn filled(begin: &str, item: &str, end: &str) -> String {
    let count = (BODY_BYTES - begin.len() - end.len()) / item.len();
    format!("{begin}{}{end}", item.repeat(count))
}

/// A chat whose only tool has a schema of as many lists as fit: a field that is kept, whatever is in it.
fn nested_schema() -> String {
    filled(
        r#"{"model":"tiny-chat","messages":[{"role":"user","content":"a"}],"max_tokens":1,"tools":[{"type":"function","function":{"name":"f","parameters":{"enum":["#,
        "[[0]],",
        "0]}}}]}",
    )
}

/// Words of random letters, the same in every run.
fn words(bytes: usize) -> String {
    let mut state = 88_172_645_463_325_252_u64;
    let letter = |_| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        let letter = b' '.max(b'`' + u8::try_from(state % 27).unwrap_or(0));
        char::from(if letter == b'`' { b' ' } else { letter })
    };
    (0..bytes).map(letter).collect()
}

fn told(answered: std::io::Result<u16>) -> String {
    match answered {
        Ok(status) => status.to_string(),
        Err(error) => error.kind().to_string(),
    }
}

fn post(address: SocketAddr, path: &str, body: &str) -> String {
    let answer = exchange(address, Request::post(path, body.as_bytes()));
    told(answer.map(|answer| answer.status))
}

fn one(bench: &Bench, engine: &str, body: &str) -> anyhow::Result<Row> {
    one_to(bench, engine, "/v1/completions", body)
}

/// One request to a server of its own.
fn one_to(bench: &Bench, engine: &str, path: &str, body: &str) -> anyhow::Result<Row> {
    let slowly: &[&str] = if engine == "sample" { &SLOWLY } else { &[] };
    let mut scene = bench.alone(engine, slowly)?;
    Ok(bench.measure(&mut scene, |scene| {
        let mut deed = Deed::new(body.len());
        deed.answers.push(post(scene.http(), path, body));
        deed
    }))
}

fn at_once(address: SocketAddr, count: usize, path: &str, body: &str) -> Deed {
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

/// Requests at once to a frontend, with a worker behind it.
fn fleet(bench: &Bench, count: usize, body: &str) -> anyhow::Result<Row> {
    let (frontend, worker) = bench.fleet(&SLOWLY)?;
    let mut scene = Scene::of(frontend);
    scene.helper = Some(worker);
    Ok(bench.measure(&mut scene, |scene| {
        at_once(scene.http(), count, "/v1/completions", body)
    }))
}

fn tokenize(bench: &Bench, text: &str) -> anyhow::Result<Row> {
    one_to(bench, "sample", "/tokenize", &tokenize_body(text))
}

fn tokenize_body(text: &str) -> String {
    format!(r#"{{"model":"tiny-chat","prompt":"{text}"}}"#)
}

/// Clients that leave at once, and what is computed for nobody then.
fn abandoned(bench: &Bench) -> anyhow::Result<Row> {
    let mut scene = bench.alone("sample", &SLOWLY)?;
    let body = tokenize_body(&words(TEXT_BYTES));
    Ok(bench.measure(&mut scene, |scene| {
        let mut deed = Deed::new(5 * body.len());
        thread::scope(|scope| {
            for _ in 0..5 {
                scope.spawn(|| {
                    let mut connection = Connection::open(scene.http())?;
                    connection.send(Request::post("/tokenize", body.as_bytes()))?;
                    // The body is read by now, and its text is tokenized.
                    thread::sleep(Duration::from_millis(800));
                    Ok::<_, std::io::Error>(())
                });
            }
        });
        let process = scene.target.id();
        let left = cpu_seconds(process);
        // Until it has computed next to nothing for half a second.
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

/// A key made by the binary, and the lines for its file.
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

fn unpaid(bench: &Bench) -> anyhow::Result<Row> {
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
        // The server must see that the client has gone.
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

fn other_origin(bench: &Bench) -> anyhow::Result<Row> {
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

fn guessed_prompt(bench: &Bench) -> anyhow::Result<Row> {
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

/// As many stalled bodies as one client may have, and small requests of others meanwhile.
fn slow_bodies(bench: &Bench) -> anyhow::Result<Row> {
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
                    // One that is refused is as good as any: it holds nothing.
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

fn replaced_key(bench: &Bench) -> anyhow::Result<Row> {
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

fn long_name(bench: &Bench) -> anyhow::Result<Row> {
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

fn open_directory(bench: &Bench) -> anyhow::Result<Row> {
    use std::os::unix::fs::PermissionsExt as _;
    let folder = bench.folder.join("open");
    fs::create_dir(&folder)?;
    fs::set_permissions(&folder, fs::Permissions::from_mode(0o777))?;
    let folder = folder.to_string_lossy().into_owned();
    let arguments = ["in=dyn", "out=sample", "--discovery-path", &folder];
    let mut served = Served::begin(&bench.binary, Port::Status, &arguments)?;
    let status = served.wait_for_end(Duration::from_secs(10));
    let mut deed = Deed::new(0);
    match status.and_then(|status| status.code()) {
        Some(code) if code != 0 => deed.note = format!("refused with exit code {code}"),
        _ => deed.problem = Some("it was used".into()),
    }
    Ok(Row::of(deed))
}

fn stored_responses(bench: &Bench) -> anyhow::Result<Row> {
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

fn told_names(bench: &Bench) -> anyhow::Result<Row> {
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

/// A model's own template, which nobody looks at before the worker serves.
fn broken_template(bench: &Bench) -> anyhow::Result<Row> {
    let model = bench.folder.join("model");
    fs::create_dir(&model)?;
    let tiny_chat = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/tiny-chat");
    for name in ["config.json", "tokenizer.json"] {
        fs::copy(tiny_chat.join(name), model.join(name))?;
    }
    let config = r#"{"chat_template": "{% for m in messages %}"}"#;
    fs::write(model.join("tokenizer_config.json"), config)?;
    let model = model.to_string_lossy().into_owned();
    let arguments = ["in=stdin", "out=sample", &model];
    let question = bench.folder.join("question");
    fs::write(&question, "What is this?")?;
    let stdin = fs::File::open(&question)?.into();
    let mut served = Served::begin_with(&bench.binary, Port::Status, &arguments, stdin)?;
    let status = served.wait_for_end(Duration::from_secs(20));
    let mut deed = Deed::new(0);
    match status.and_then(|status| status.code()) {
        Some(code @ (1 | 2)) => deed.note = format!("exit code {code}"),
        Some(code) => deed.problem = Some(format!("exit code {code}")),
        None => deed.problem = Some("it never ends".into()),
    }
    Ok(Row::of(deed))
}

fn loud_child(bench: &Bench) -> anyhow::Result<Row> {
    let arguments = [
        "in=http",
        "out=cmd:yes a line of a child that prints without pause",
    ];
    let served = Served::begin(&bench.binary, Port::Http, &arguments)?;
    let begun = Instant::now();
    thread::sleep(Duration::from_secs(3));
    let (bytes, seconds) = (served.log_bytes(), begun.elapsed().as_secs_f64());
    let mut deed = Deed::new(0);
    deed.note = format!(
        "{bytes} bytes of log in {seconds:.0} s, {:.1} s of CPU",
        cpu_seconds(served.id())
    );
    if bytes > 3_000_000 {
        deed.problem = Some("a flood".into());
    }
    Ok(Row::of(deed))
}

/// A program that is no engine, which starts another and waits, and what becomes of both.
fn orphan(bench: &Bench) -> anyhow::Result<Row> {
    let script = bench.folder.join("child.sh");
    let list = bench.folder.join("children");
    let (script_path, list_path) = (script.to_string_lossy(), list.to_string_lossy());
    fs::write(
        &script,
        format!("echo $$ > {list_path}\nsleep 600 &\necho $! >> {list_path}\nwait\n"),
    )?;
    let engine = format!("out=cmd:sh {script_path}");
    let mut served = Served::begin(&bench.binary, Port::Http, &["in=http", &engine])?;
    let children = || -> Vec<u32> {
        let mut text = String::new();
        if let Ok(mut file) = fs::File::open(&list) {
            drop(file.read_to_string(&mut text));
        }
        text.lines().filter_map(|line| line.parse().ok()).collect()
    };
    let has_begun = served.wait_until(Duration::from_secs(30), |_| children().len() == 2);
    anyhow::ensure!(has_begun, "the child did not begin: {}", served.log_text());
    served.kill();
    let ended = (0..60).any(|_| {
        thread::sleep(Duration::from_millis(50));
        !children().into_iter().any(is_alive)
    });
    let mut deed = Deed::new(0);
    if !ended {
        deed.problem = Some("it outlives the server".into());
        children().into_iter().for_each(super::kill);
    }
    Ok(Row::of(deed))
}
