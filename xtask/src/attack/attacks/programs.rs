//! Malicious folders, templates and child processes.
#![expect(
    clippy::disallowed_types,
    clippy::disallowed_methods,
    reason = "attackers wait in real time"
)]

use std::fs;
use std::io::Read as _;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use crate::attack::figures::Row;
use crate::attack::{Bench, Deed, kill};
use crate::served::{Port, Served, cpu_seconds, is_alive};

pub(super) fn open_directory(bench: &Bench) -> anyhow::Result<Row> {
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

/// A model's own template, which nothing checks before the worker serves.
pub(super) fn broken_template(bench: &Bench) -> anyhow::Result<Row> {
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

pub(super) fn loud_child(bench: &Bench) -> anyhow::Result<Row> {
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

/// Runs a program that is not an engine: it starts another process and waits. Reports what becomes of both.
pub(super) fn orphan(bench: &Bench) -> anyhow::Result<Row> {
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
        children().into_iter().for_each(kill);
    }
    Ok(Row::of(deed))
}
