use tokio::task::JoinSet;

use super::*;

fn headers(name: &'static str, value: &str) -> HeaderMap {
    let mut headers = HeaderMap::new();
    headers.insert(name, value.parse().expect("a header"));
    headers
}

fn write(path: &std::path::Path, entries: &[(&str, &str, &str)]) {
    let mut text = String::new();
    for (name, key, more) in entries {
        let hash = KeyHash::of(key);
        text += &format!("[[key]]\nname = \"{name}\"\nhash = \"{hash}\"\n{more}\n");
    }
    std::fs::write(path, text).expect("a file");
}

fn load(entries: &[(&str, &str, &str)]) -> (ApiKeys, tempfile::TempDir) {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("keys.toml");
    write(&path, entries);
    let keys = ApiKeys::load(path, &MetricsRegistry::default()).expect("they load");
    (keys, folder)
}

/// Applies changes of the file until `stop`, or until the task is dropped.
fn followed(keys: &ApiKeys, stop: &CancellationToken) -> JoinSet<()> {
    let mut task = JoinSet::new();
    task.spawn(keys.clone().follow(stop.clone()));
    task
}

/// Sets the file's time to a constant.
fn set_time(path: &std::path::Path) {
    let file = std::fs::File::options().write(true).open(path);
    let set = file.and_then(|file| file.set_modified(std::time::SystemTime::UNIX_EPOCH));
    set.expect("a time");
}

#[test]
fn a_key_is_found_by_either_header() {
    let (keys, _folder) = load(&[("a", "sk-a", ""), ("b", "sk-b", "")]);
    for (name, value, found) in [
        ("authorization", "Bearer sk-a", "a"),
        ("authorization", "bearer  sk-b ", "b"),
        ("x-api-key", "sk-a", "a"),
    ] {
        let key = keys.find(&headers(name, value)).expect("it is known");
        assert_eq!(key.name(), found);
    }
    for (name, value) in [
        ("authorization", "Bearer sk-c"),
        ("authorization", "Basic sk-a"),
        ("authorization", "sk-a"),
        ("x-api-key", ""),
        ("x-other", "sk-a"),
    ] {
        let error = keys.find(&headers(name, value)).expect_err("it is not");
        assert_eq!(error.status, StatusCode::UNAUTHORIZED, "{name}: {value}");
        assert_eq!(error.code, Some("invalid_api_key"));
    }
}

#[tokio::test(start_paused = true)]
async fn quotas_fill_with_time() {
    let (keys, _folder) = load(&[(
        "a",
        "sk-a",
        "requests_per_minute = 2\ntokens_per_minute = 60",
    )]);
    let key = keys.find(&headers("x-api-key", "sk-a")).expect("known");
    key.admit().expect("the first");
    key.admit().expect("the second");
    let error = key.admit().expect_err("a third");
    assert_eq!(error.status, StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(error.retry_after, Some(Duration::from_secs(31)));
    tokio::time::advance(Duration::from_secs(31)).await;
    key.admit().expect("there is room again");
    // An answer may cost more than is left; the next request waits until the debt is paid.
    key.spend(90);
    tokio::time::advance(Duration::from_secs(30)).await;
    let error = key.admit().expect_err("tokens are owed");
    assert!(error.to_string().contains("tokens"), "{error}");
    tokio::time::advance(Duration::from_secs(2)).await;
    key.admit().expect("paid");
    // An hour without requests yields no more than a minute's worth.
    tokio::time::advance(Duration::from_secs(3600)).await;
    key.admit().expect("the first");
    key.admit().expect("the second");
    key.admit().expect_err("a third");
}

#[tokio::test(start_paused = true)]
async fn a_file_that_changes_is_read_again() {
    let (keys, folder) = load(&[("a", "sk-a", "requests_per_minute = 1"), ("b", "sk-b", "")]);
    let path = folder.path().join("keys.toml");
    let stop = CancellationToken::new();
    let following = followed(&keys, &stop);
    let a = || keys.find(&headers("x-api-key", "sk-a"));
    a().expect("known").admit().expect("the only one");

    std::fs::write(&path, "[[key]]\nname = 3").expect("a file");
    tokio::time::sleep(LOOK_EVERY * 2).await;
    a().expect("a broken file changes nothing");

    write(
        &path,
        &[("a", "sk-a", "requests_per_minute = 1"), ("c", "sk-c", "")],
    );
    tokio::time::sleep(LOOK_EVERY * 2).await;
    a().expect("still there")
        .admit()
        .expect_err("with what was left");
    keys.find(&headers("x-api-key", "sk-b")).expect_err("gone");
    keys.find(&headers("x-api-key", "sk-c")).expect("new");
    stop.cancel();
    following.join_all().await;
}

/// A file may be replaced by one with the same time and length, as archives and images do.
#[tokio::test(start_paused = true)]
async fn a_key_is_gone_whatever_the_files_time_and_length() {
    let (keys, folder) = load(&[("a", "sk-a", "")]);
    let path = folder.path().join("keys.toml");
    set_time(&path);
    // Between the first read and the start of `follow`.
    write(&path, &[("a", "sk-b", "")]);
    set_time(&path);
    let _following = followed(&keys, &CancellationToken::new());
    for (known, gone) in [("sk-b", "sk-a"), ("sk-c", "sk-b")] {
        write(&path, &[("a", known, "")]);
        set_time(&path);
        tokio::time::sleep(LOOK_EVERY * 2).await;
        keys.find(&headers("x-api-key", known)).expect("new");
        keys.find(&headers("x-api-key", gone)).expect_err("gone");
    }
}

#[test]
fn a_wrong_file_says_what_is_wrong() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("keys.toml");
    let load = || ApiKeys::load(path.clone(), &MetricsRegistry::default());
    assert!(matches!(load(), Err(KeyFileError::Unreadable { .. })));
    let hash = KeyHash::of("x");
    for (text, says) in [
        (String::new(), "lists no [[key]]"),
        (
            "[[key]]\nname = \"a\"\nhash = \"x\"".into(),
            "64 hex digits",
        ),
        (
            format!("[[key]]\nname = \"\"\nhash = \"{hash}\""),
            "empty name",
        ),
        (
            format!("[[key]]\nname = \"a\"\nhash = \"{hash}\"\nrequests_per_minute = 0"),
            "requests_per_minute",
        ),
        (
            format!("[[key]]\nname = \"a\"\nhash = \"{hash}\"\ntpyo = 1"),
            "tpyo",
        ),
        (
            format!(
                "[[key]]\nname = \"a\"\nhash = \"{hash}\"\n[[key]]\nname = \"b\"\nhash = \"{hash}\""
            ),
            "twice",
        ),
    ] {
        std::fs::write(&path, text).expect("a file");
        let error = load().expect_err("it is wrong").to_string();
        assert!(error.contains(says), "{error}");
    }
}

#[test]
fn a_new_key_is_in_the_lines_for_the_file_as_its_hash() {
    let (key, lines) = new_key("team \"a\"");
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("keys.toml");
    std::fs::write(&path, &lines).expect("a file");
    assert!(!lines.contains(&key));
    let keys = ApiKeys::load(path, &MetricsRegistry::default()).expect("it loads");
    let found = keys.find(&headers("authorization", &format!("Bearer {key}")));
    assert_eq!(found.expect("it is known").name(), "team \"a\"");
}

/// Opening a pipe waits for somebody who writes: nothing would be read again, and the shutdown would wait.
#[test]
fn a_pipe_is_not_read_again() {
    let (keys, folder) = load(&[("a", "sk-a", "")]);
    let path = folder.path().join("keys.toml");
    std::fs::remove_file(&path).expect("it is there");
    let made = std::process::Command::new("mkfifo").arg(&path).status();
    assert!(made.expect("mkfifo runs").success());
    let of_writer = path.clone();
    let writer = std::thread::spawn(move || write(&of_writer, &[("b", "sk-b", "")]));
    let error = keys.look().expect_err("a pipe");
    assert!(error.to_string().contains("not a regular file"), "{error}");
    keys.find(&headers("x-api-key", "sk-a")).expect("it stays");
    std::fs::read(&path).expect("what the writer waits to write");
    writer.join().expect("it has written");
}
