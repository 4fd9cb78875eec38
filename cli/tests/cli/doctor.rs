//! `genset doctor`: its findings about ports, secrets and servers, and its exit code.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

use serde_json::Value;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;
use tokio::process::Command;
use tokio::task::JoinSet;

use crate::support::{Ended, genset, run_with, tiny_chat};

/// Runs without other programs to ask, and with its own cache.
fn doctor_anywhere(words: &[&str], folder: &tempfile::TempDir) -> Command {
    let mut command = genset(&["doctor"]);
    command
        .args(words)
        .env("HF_HOME", folder.path())
        .env("PATH", "/nowhere");
    command
}

/// Like [`doctor_anywhere`], with discovery in its own directory.
fn doctor(words: &[&str], folder: &tempfile::TempDir) -> Command {
    let mut command = doctor_anywhere(words, folder);
    command
        .arg("--discovery-path")
        .arg(folder.path().join("discovery"));
    command
}

fn finding<'a>(report: &'a Value, says: &str) -> &'a Value {
    let findings = report["findings"].as_array().expect("as it prints JSON");
    let found = findings.iter().find(|finding| {
        finding["what"]
            .as_str()
            .expect("as it prints JSON")
            .contains(says)
    });
    found.unwrap_or_else(|| panic!("nothing says {says:?}: {report:#}"))
}

fn report(ended: &Ended) -> Value {
    serde_json::from_str(&ended.stdout).unwrap_or_else(|error| panic!("{error}: {ended:?}"))
}

#[tokio::test]
async fn what_is_well_and_what_is_not_is_told_with_what_mends_it() {
    let folder = tempfile::tempdir().unwrap();
    let taken = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    let secret = folder.path().join("secret");
    fs::write(&secret, "s3cret-of-32-bytes-0123456789abcd").unwrap();
    fs::set_permissions(&secret, Permissions::from_mode(0o644)).unwrap();
    let secret = secret.to_str().unwrap();
    let words = ["--json", "--http-port", &port, "--wire-secret-file", secret];
    let ended = run_with(doctor(&words, &folder), b"").await;
    assert_eq!(ended.code, Some(1), "a port is taken: {ended:?}");
    let report = report(&ended);
    let port = finding(&report, "for HTTP is taken by cli");
    assert_eq!(port["level"], "problem");
    assert!(port["mend"].as_str().unwrap().contains("--http-port"));
    let secret = finding(&report, "others can read");
    assert_eq!(secret["level"], "warning");
    assert!(secret["mend"].as_str().unwrap().starts_with("chmod 600 /"));
    for (says, level) in [
        (" cores", "ok"),
        ("discovery in ", "ok"),
        ("0 models from the hub", "ok"),
        ("out=vllm: not installed", "ok"),
        ("out=mistralrs: ", "ok"),
        ("out=libllama: ", "ok"),
    ] {
        assert_eq!(finding(&report, says)["level"], level, "{says}");
    }
    assert!(!ended.stdout.contains("s3cret"));
}

#[tokio::test]
async fn the_status_port_and_the_key_of_the_wire_are_looked_at() {
    let folder = tempfile::tempdir().unwrap();
    let taken = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    let key = folder.path().join("key.pem");
    fs::write(&key, "no key").unwrap();
    fs::set_permissions(&key, Permissions::from_mode(0o644)).unwrap();
    let key = key.to_str().unwrap();
    let words = [
        "--json",
        "--http-port=0",
        "--status-port",
        &port,
        "--wire-tls-ca",
        key,
        "--wire-tls-cert",
        key,
        "--wire-tls-key",
        key,
    ];
    let ended = run_with(doctor(&words, &folder), b"").await;
    let report = report(&ended);
    let port = finding(&report, "for the status server is taken by cli");
    assert_eq!(port["level"], "problem");
    let key = finding(&report, "--wire-tls-key: others can read");
    assert_eq!(key["level"], "warning");
}

#[tokio::test]
async fn a_file_of_settings_says_what_is_looked_at_as_for_a_run() {
    let folder = tempfile::tempdir().unwrap();
    let taken = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = taken.local_addr().unwrap().port();
    let file = folder.path().join("genset.toml");
    let settings = format!(
        "in = \"http\"\nhttp-port = {port}\nstatus-port = {port}\nwire-secret-file = \"/no/such\"\n"
    );
    fs::write(&file, settings).unwrap();
    let words = ["--json", "--config", file.to_str().unwrap()];
    let words = [&words[..], &["--status-port=0"]].concat();
    let ended = run_with(doctor(&words, &folder), b"").await;
    assert_eq!(ended.code, Some(1), "{ended:?}");
    let report = report(&ended);
    finding(&report, "for HTTP is taken by cli");
    finding(&report, "--wire-secret-file: /no/such: ");
    assert!(!ended.stdout.contains("status server"), "the flag wins");
    fs::write(&file, format!("in = \"dyn\"\nhttp-port = {port}\n")).unwrap();
    let ended = run_with(doctor(&words, &folder), b"").await;
    assert!(!ended.stdout.contains("for HTTP"), "{ended:?}");

    let empty = folder.path().join("empty");
    fs::create_dir(&empty).unwrap();
    let tiny_chat = tiny_chat();
    let cases: [(&Path, &str); 4] = [
        (Path::new("/no/such"), "problem"),
        (&empty, "problem"),
        (&tiny_chat, "ok"),
        (Path::new("org/model"), "ok"),
    ];
    for (model, level) in cases {
        fs::write(&file, format!("model = \"{}\"\n", model.display())).unwrap();
        let ended = run_with(doctor(&words, &folder), b"").await;
        let report = self::report(&ended);
        let found = finding(&report, &format!("MODEL: {}", model.display()));
        assert_eq!(found["level"], level, "{found}");
    }
    fs::write(&file, "out = \"dyn\"\nmodel = \"org/model\"\n").unwrap();
    let ended = run_with(doctor(&words, &folder), b"").await;
    let found = self::report(&ended);
    let found = finding(&found, "MODEL: out=dyn serves");
    assert_eq!(found["level"], "problem", "{found}");

    fs::write(&file, "http-prot = 1\n").unwrap();
    let ended = run_with(doctor(&words, &folder), b"").await;
    ended.fails(2, "\"http-prot\" is no setting");
}

#[tokio::test]
async fn the_server_of_llama_cpp_in_python_counts_as_llama_cpp() {
    let folder = tempfile::tempdir().unwrap();
    let programs = folder.path().join("programs");
    fs::create_dir(&programs).unwrap();
    // It prints its arguments.
    std::os::unix::fs::symlink("/bin/echo", programs.join("python3")).unwrap();
    let mut command = doctor(&["--json", "--http-port=0"], &folder);
    command.env("PATH", &programs);
    let ended = run_with(command, b"").await;
    let report = report(&ended);
    finding(&report, "out=llamacpp: -c import importlib.metadata");
}

#[tokio::test]
async fn a_download_that_was_cut_is_told_with_both_ways_out() {
    let folder = tempfile::tempdir().unwrap();
    let blobs = folder.path().join("hub/models--org--m-GGUF/blobs");
    fs::create_dir_all(&blobs).unwrap();
    fs::write(blobs.join("x.incomplete"), "cut").unwrap();
    let ended = run_with(doctor(&["--json", "--http-port=0"], &folder), b"").await;
    let report = report(&ended);
    let cut = finding(&report, "not whole: org/m-GGUF");
    assert_eq!(cut["level"], "warning");
    let mend = cut["mend"].as_str().unwrap();
    for way in [
        "genset pull org/m-GGUF, with :QUANT",
        "genset rm org/m-GGUF",
    ] {
        assert!(mend.contains(way), "{mend}");
    }
}

#[tokio::test]
async fn a_server_that_is_not_there_is_a_problem() {
    let folder = tempfile::tempdir().unwrap();
    let keys = folder.path().join("keys.toml");
    fs::write(&keys, "no = 1").unwrap();
    let mut command = doctor_anywhere(
        &["--http-port=0", "--api-keys", keys.to_str().unwrap()],
        &folder,
    );
    // A port of this test on which nothing answers as those servers do.
    let silent = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = silent.local_addr().unwrap();
    drop(silent);
    command.env("NATS_SERVER", format!("nats://{address}"));
    command.env("ETCD_ENDPOINTS", format!("http://{address}"));
    let etcd = format!("problem  etcd at http://{address}: ");
    let ended = run_with(command, b"").await;
    assert_eq!(ended.code, Some(1), "{ended:?}");
    for expected in [
        &format!("problem  NATS at {address}"),
        etcd.as_str(),
        "-> start etcd, or name its servers",
        "-> start nats-server",
        "keys.toml",
        "3 problems, ",
    ] {
        assert!(
            ended.stdout.contains(expected),
            "{expected}: {}",
            ended.stdout
        );
    }
    assert!(!ended.stdout.contains('\x1b'), "no colours in a pipe");
}

/// A server that lets nobody in. Each connection but the first logs in.
async fn refuse_logins(listener: TcpListener) {
    loop {
        let (mut stream, _) = listener.accept().await.unwrap();
        let greeting = b"INFO {\"max_payload\":1048576,\"headers\":true}\r\n";
        stream.write_all(greeting).await.unwrap();
        let mut said = [0; 4096];
        if stream.read(&mut said).await.unwrap_or(0) > 0 {
            let refusal = b"-ERR 'Authorization Violation'\r\n";
            stream.write_all(refusal).await.unwrap();
            while stream.read(&mut said).await.unwrap_or(0) > 0 {}
        }
    }
}

#[tokio::test]
async fn a_nats_that_refuses_the_login_is_a_problem() {
    let folder = tempfile::tempdir().unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let mut server = JoinSet::new();
    server.spawn(refuse_logins(listener));
    let mut command = doctor(&["--http-port=0"], &folder);
    command.env("NATS_SERVER", format!("nats://{address}"));
    let ended = run_with(command, b"").await;
    assert_eq!(ended.code, Some(1), "{ended:?}");
    for expected in [
        &*format!("ok       NATS at {address} answers"),
        "problem  no worker can be called over NATS: ",
        "--nats-creds",
    ] {
        assert!(ended.stdout.contains(expected), "{expected}: {ended:?}");
    }
}

#[tokio::test]
async fn a_wrong_setting_of_nats_is_not_told_of_etcd() {
    let folder = tempfile::tempdir().unwrap();
    let mut command = doctor(&["--http-port=0"], &folder);
    command.env("NATS_SERVER", "nats://ann:hunter2@127.0.0.1:1");
    let ended = run_with(command, b"").await;
    let expected = "problem  the request plane: --nats-server: ";
    assert!(ended.stdout.contains(expected), "{ended:?}");
    assert!(!ended.stdout.contains("hunter2"), "{ended:?}");
}

#[tokio::test]
async fn a_password_in_the_address_of_etcd_is_not_shown() {
    let folder = tempfile::tempdir().unwrap();
    let mut command = doctor_anywhere(&["--http-port=0"], &folder);
    command.env("ETCD_ENDPOINTS", "http://ann:hunter2@127.0.0.1:1");
    let ended = run_with(command, b"").await;
    let expected = "problem  etcd at 127.0.0.1:1: ";
    assert!(ended.stdout.contains(expected), "{ended:?}");
    assert!(!ended.stdout.contains("hunter2"), "{ended:?}");
}

#[tokio::test]
async fn a_directory_that_can_be_read_and_not_written_is_a_problem() {
    let folder = tempfile::tempdir().unwrap();
    let discovery = folder.path().join("discovery");
    // Makes the directory.
    run_with(doctor(&["--http-port=0"], &folder), b"").await;
    // Exceeding the limit must be an error and not kill the doctor.
    let mut command = Command::new("/bin/sh");
    command
        .args(["-c", "trap '' XFSZ; ulimit -f 0; exec \"$@\"", "sh"])
        .args([env!("CARGO_BIN_EXE_genset"), "doctor", "--http-port=0"])
        .arg("--discovery-path")
        .arg(discovery)
        .env_clear()
        .env("HF_HOME", folder.path())
        .env("PATH", "/nowhere")
        .kill_on_drop(true);
    let ended = run_with(command, b"").await;
    let expected = "problem  no new worker can be listed: discovery in ";
    assert!(ended.stdout.contains(expected), "{ended:?}");
    assert_eq!(ended.code, Some(1), "{ended:?}");
}

#[tokio::test]
async fn a_machine_that_is_well_ends_with_0() {
    let folder = tempfile::tempdir().unwrap();
    let ended = run_with(doctor(&["--http-port=0"], &folder), b"").await;
    assert!(
        ended.stdout.starts_with("Machine\n  ok       "),
        "{ended:?}"
    );
    assert!(ended.stdout.contains("\n0 problems, "), "{ended:?}");
    assert_eq!(ended.code, Some(0), "{ended:?}");
}
