mod guide;

use super::*;

fn parse_words(words: &[&str]) -> Result<RunConfig, EngineError> {
    let words = ["genset", "run"].iter().chain(words);
    let read = read(
        command(),
        words.map(OsString::from).collect(),
        UnknownKeys::Refuse,
    )?;
    match Cli::from_arg_matches(&read.matches).unwrap().command {
        CliCommand::Run(args) => check(*args, &read.settings, HubModels::Leave),
        CliCommand::Tool(_)
        | CliCommand::Config { .. }
        | CliCommand::Completions { .. }
        | CliCommand::Man { .. } => panic!("the words say run"),
    }
}

#[test]
fn the_command_line_is_well_formed() {
    command().debug_assert();
}

#[test]
fn genset_tune_measures_what_genset_run_serves() {
    let whole = command();
    for name in ["device", "quantize"] {
        let flag_of = |subcommand: &str| {
            let subcommand = whole.find_subcommand(subcommand).unwrap();
            let mut flags = subcommand.get_arguments();
            let flag = flags.find(|flag| flag.get_long() == Some(name)).unwrap();
            let default = flag.get_default_values().to_vec();
            (default, flag.get_env().map(OsStr::to_owned))
        };
        assert_eq!(flag_of("tune"), flag_of("run"), "{name}");
    }
}

#[test]
fn every_flag_in_bytes_takes_a_unit() {
    let run = command().find_subcommand("run").unwrap().clone();
    let names = run.get_arguments().filter_map(clap::Arg::get_long);
    let in_bytes = names.filter(|name| {
        let last = name.rsplit('-').next();
        matches!(last, Some("bytes" | "memory" | "budget"))
    });
    let in_bytes: Vec<String> = in_bytes.map(|name| format!("--{name}=64KiB")).collect();
    assert!(in_bytes.len() >= 16, "{in_bytes:?}");
    for flag in &in_bytes {
        let read = run.clone().try_get_matches_from(["run", flag.as_str()]);
        assert!(read.is_ok(), "{flag}: {read:?}");
    }
}

/// The defaults of the flags equal those of the configuration.
#[test]
fn no_flags_make_the_default_configuration() {
    let frontend = parse_words(&["in=http", "out=echo_core"]).unwrap().frontend;
    let workers = frontend.workers.clone();
    let expected = genset_frontend::FrontendConfig {
        workers,
        ..genset_frontend::FrontendConfig::default()
    };
    assert_eq!(frontend, expected);
}

/// It has no keys: everyone who can connect sees the tasks.
#[test]
fn tokio_console_is_for_this_machine_unless_told() {
    let words = ["genset", "run", "--tokio-console"].map(OsString::from);
    let read = read(command(), words.into(), UnknownKeys::Refuse).unwrap();
    let run = read.matches.subcommand_matches("run").unwrap();
    let address = run.get_one::<SocketAddr>("tokio_console").unwrap();
    assert!(address.ip().is_loopback());
}

#[test]
fn words_come_in_any_order_and_have_defaults() {
    let config = parse_words(&[]).unwrap();
    assert_eq!(
        (config.input, config.output),
        (InputKind::Text, OutputKind::Engine(EngineKind::Candle))
    );
    let config = parse_words(&["out=sample", ".", "in=http", "--http-port", "0"]).unwrap();
    assert_eq!(
        (config.input, config.output),
        (InputKind::Http, OutputKind::Engine(EngineKind::Sample))
    );
    assert_eq!(config.worker.model_path.as_deref(), Some(Path::new(".")));
}

#[test]
fn an_engines_process_has_the_workers_time_to_start() {
    for (words, expected) in [
        (&["out=cmd:x"][..], 3600),
        (&["out=cmd:x", "--start-timeout=7200"], 7200),
    ] {
        let config = parse_words(words).unwrap();
        let process = genset_engine_subprocess::SubprocessConfig::new("x");
        let process = crate::engine::with_flags(process, &config);
        assert_eq!(process.start_timeout, Duration::from_secs(expected));
    }
}

#[test]
fn dyn_names_workers_and_takes_the_flags_for_what_it_leaves_out() {
    let config = parse_words(&["in=dyn://llama", "out=sample"]).unwrap();
    assert_eq!(config.name.to_string(), "llama.backend.generate");
    for (name, expected) in [
        ("in=dyn://llama", "llama.prefill.generate"),
        ("in=dyn://a/b", "a.b.generate"),
        ("in=dyn://a/b/c", "a.b.c"),
    ] {
        let config = parse_words(&[name, "out=sample", "--role=prefill"]).unwrap();
        assert_eq!(config.name.to_string(), expected);
    }
    for (name, expected) in [
        ("in=dyn", "n.c.e"),
        ("in=dyn://llama", "llama.c.e"),
        ("in=dyn://a/b", "a.b.e"),
        ("in=dyn://a.b.c", "a.b.c"),
    ] {
        let flags = ["--namespace=n", "--component=c", "--endpoint=e"];
        let config = parse_words(&[&[name, "out=sample"][..], &flags[..]].concat()).unwrap();
        assert_eq!(config.name.to_string(), expected);
    }
    let config = parse_words(&["in=http", "out=dyn"]).unwrap();
    assert_eq!(config.output, OutputKind::Dyn(None));
    assert_eq!(config.frontend.workers, None);
    for (output, expected) in [
        ("out=dyn://a", "a"),
        ("out=dyn://a.b", "a.b.generate"),
        ("out=dyn://a/b/c", "a.b.c"),
    ] {
        let config = parse_words(&["in=text", output]).unwrap();
        let workers = config.frontend.workers.map(|scope| scope.to_string());
        assert_eq!(workers.as_deref(), Some(expected));
        assert_eq!(config.output.word(), format!("dyn://{expected}"));
    }
    for words in [["in=dyn", "out=dyn"], ["out=dyn", "."]] {
        parse_words(&words).unwrap_err();
    }
}

#[test]
fn a_flag_about_a_worker_is_refused_where_there_is_none() {
    for (flag, expected) in [
        ("--namespace=n", "out=dyn://NAMESPACE.COMPONENT.ENDPOINT"),
        ("--migration-limit=0", "give it to the workers"),
        ("--request-timeout=5", "give it to the workers"),
        ("--aliases=a", "give it to the workers"),
    ] {
        for input in ["in=http", "in=stdin"] {
            let error = parse_words(&[input, "out=dyn", flag]).unwrap_err();
            let error = error.to_string();
            assert!(error.contains(expected), "{error}");
            let (name, _) = flag.split_once('=').unwrap();
            assert!(error.starts_with(name), "{error}");
            parse_words(&[input, "out=sample", flag]).unwrap();
        }
    }
    for flag in ["--grace=5", "--model-name=m", "--tool-parser=none"] {
        parse_words(&["in=http", "out=dyn", flag]).unwrap();
    }
    // Each is a flag that there is.
    let worker = WorkerArgs::augment_args(clap::Command::new("worker"));
    let flags = worker.get_arguments().filter_map(clap::Arg::get_long);
    let (http, others) = (InputKind::Http, OutputKind::Dyn(None));
    let of_a_worker: Vec<&str> = flags
        .filter(|name| unread(&http, &others, name).is_some())
        .collect();
    assert_eq!(of_a_worker.len(), 19, "{of_a_worker:?}");
}

#[test]
fn a_component_that_is_called_like_a_role_gives_none() {
    let remark = |words: &[&str]| parse_words(words).unwrap().remark;
    for component in ["prefill", "decode"] {
        let name = format!("in=dyn://a.{component}.generate");
        let told = remark(&[&name, "out=sample"]).unwrap();
        let role = format!("--role {component}");
        assert!(told.contains(&role), "{told}");
        let flag = format!("--component={component}");
        assert_eq!(remark(&["in=dyn", "out=sample", &flag]), Some(told));
        assert_eq!(remark(&["in=http", "out=sample", &flag]), None);
        let role = format!("--role={component}");
        assert_eq!(remark(&[&name, "out=sample", &role]), None);
    }
    assert_eq!(remark(&["in=dyn://prefill", "out=sample"]), None);
}

#[test]
fn a_flag_about_a_server_is_refused_for_a_worker() {
    for flag in ["--http-port=8080", "--router-mode=kv", "--worker-wait=5"] {
        let error = parse_words(&["in=dyn", "out=sample", flag]).unwrap_err();
        let (name, _) = flag.split_once('=').unwrap();
        assert!(error.to_string().starts_with(name), "{error}");
        parse_words(&["in=http", "out=sample", flag]).unwrap();
    }
    parse_words(&["in=dyn", "out=sample", "--grace=5"]).unwrap();
}

#[test]
fn a_model_that_cannot_be_looked_at_is_not_called_absent() {
    let folder = tempfile::tempdir().unwrap();
    // Unlike a folder without permission, such a link also stops the superuser.
    let link = folder.path().join("link");
    std::os::unix::fs::symlink(&link, &link).unwrap();
    for output in ["out=candle", "out=vllm"] {
        let error = parse_words(&[output, link.to_str().unwrap()]);
        let error = error.unwrap_err().to_string();
        assert!(error.starts_with("MODEL: cannot read "), "{error}");
        assert!(!error.contains(" folder"), "{error}");
    }
}

#[test]
fn a_flag_of_another_engine_is_refused_with_what_to_use() {
    for (words, expected) in [
        (
            ["out=vllm", "--max-num-batched-tokens=4096"],
            "--extra-engine-args",
        ),
        (["out=vllm", "--block-size=32"], "--kv-cache-block-size"),
        (["out=candle", "--kv-cache-block-size=32"], "--block-size"),
        (["out=candle", "--base-gpu-id=1"], "--device cuda:1"),
        (["out=mocker", "--max-num-seqs=8"], "--extra-engine-args"),
        (
            ["out=mocker", "--kv-cache-block-size=8"],
            "--extra-engine-args",
        ),
        (["out=cmd:x", "--extra-engine-args=x.json"], "its command"),
        (["out=dyn", "--tensor-parallel-size=2"], "to a worker"),
    ] {
        let error = parse_words(&words).unwrap_err().to_string();
        let (_, instead) = error.split_once("has no use for it; ").unwrap();
        assert!(instead.contains(expected), "{error}");
    }
}

#[test]
fn what_is_absent_is_refused_by_name() {
    for (words, expected) in [
        (
            ["out=vllm"],
            "out=vllm serves a model of yours; name the folder",
        ),
        (["out=llamacpp"], "name a GGUF file"),
        (["in=dyn://a.b.c.d"], "more than three parts"),
        (["out=dyn://é"], "no part of a name"),
        (["out=foo"], "none of candle, echo_core"),
        (["in=foo"], "none of http"),
        (["in=batch:"], "needs a file or a folder"),
    ] {
        let error = parse_words(&words).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
    for (words, expected) in [
        (["out=candle", "model.gguf"], "neither a folder nor a file"),
        (
            ["out=sample", "Cargo.toml"],
            "neither a GGUF file nor a folder",
        ),
        (["out=sample", "./nothing"], "neither a folder nor a file"),
        (["out=sample", "--model-config=."], "--model-config"),
    ] {
        let error = parse_words(&words).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
    for words in [
        ["out=sample", "--tensor-parallel-size=2"],
        ["out=dyn", "--server-cmd=x"],
        ["out=sample", "--extra-engine-args=x.json"],
        ["out=mocker", "--server-cmd=x"],
        ["out=echo_core", "--speculate=ngram"],
        ["out=dyn", "--draft-model=x"],
        ["out=vllm", "--max-num-seqs=8"],
        // The engine's own default.
        ["out=vllm", "--block-size=16"],
        ["out=vllm", "--enforce-eager"],
        ["out=sglang", "--kv-lease=5"],
        ["out=libllama", "--dtype=f16"],
        ["out=cmd:x", "--device=cpu"],
        ["out=candle", "--script=x"],
        ["out=sample", "--engine-cmd=x"],
    ] {
        let error = parse_words(&words).unwrap_err().to_string();
        assert!(error.contains("has no use for it"), "{error}");
        let (flag, _) = words[1].split_once('=').unwrap_or((words[1], ""));
        assert!(error.contains(flag), "{error}");
    }
    let folder = env!("CARGO_MANIFEST_DIR");
    parse_words(&["out=vllm", "--kv-lease=5", folder]).unwrap();
    for words in [
        ["out=candle", "--max-num-seqs=8"],
        ["out=libllama", "--threads=2"],
    ] {
        parse_words(&words).unwrap();
    }
    let error = parse_words(&["out=sglang", "x.gguf"]).unwrap_err();
    let expected =
        "is not the folder of a local model checkout, which out=sglang needs; out=candle, ";
    assert!(error.to_string().contains(expected), "{error}");
    let error = parse_words(&["out=llamacpp", folder]).unwrap_err();
    let expected = "is not a GGUF file, which out=llamacpp needs; out=candle, vllm";
    assert!(error.to_string().contains(expected), "{error}");
    for words in [
        ["in=http", "in=text"],
        [".", ".."],
        ["--model-path=.", ".."],
    ] {
        let error = parse_words(&words).unwrap_err().to_string();
        assert!(error.contains("given twice"), "{error}");
    }
}
