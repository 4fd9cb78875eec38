//! The settings of `genset run` for tools that look at what it would use, or at the fleet in which it would be. Only the parent
//! calls this.

use std::ffi::OsString;

use clap::FromArgMatches as _;
use clap::parser::ValueSource;
use genset_backend_common::EngineError;
use genset_runtime::layers::{UnknownKeys, flag, matches_of};

use super::engine::{check_model, check_takes_model};
use super::{
    Cli, CliCommand, InputKind, OutputKind, RunArgs, Tool, command, grammar_of_layer, read,
};
use crate::doctor::CheckedModel;
use crate::hub;

/// The tools that read the file of `--config`.
pub(super) const READERS: [&str; 4] = ["doctor", "models", "top", "control"];

/// Gives a tool the settings that `genset run` would have with the flags in `given`, the environment, and the file of `--config`.
///
/// # Errors
/// As for [`super::parse`].
pub(super) fn complete(tool: &mut Tool, given: &[OsString]) -> Result<(), EngineError> {
    if let Tool::Doctor(args) = tool {
        let run = settings("doctor", args.config.is_some(), given)?;
        args.model = checked_model(&run);
        args.is_worker = matches!(run.input.parse::<InputKind>(), Ok(InputKind::Dyn(_)));
        (args.http, args.status) = (run.http, run.worker.status);
        args.network = run.worker.network;
        args.max_connections = run.frontend.max_connections;
        return Ok(());
    }
    let (name, fleet) = if let Tool::Models(args) = tool {
        ("models", &mut args.fleet)
    } else if let Tool::Top(args) = tool {
        ("top", &mut args.fleet)
    } else if let Tool::Control(args) = tool {
        ("control", &mut args.fleet)
    } else {
        return Ok(());
    };
    match fleet.config {
        Some(_) => fleet.network = settings(name, true, given)?.worker.network,
        // Without a file, nothing else has what a flag requires.
        None => drop(matches_of(&command(), given)?),
    }
    Ok(())
}

/// The model that a run would serve, and why it could not.
fn checked_model(run: &RunArgs) -> Option<CheckedModel> {
    let path = run.worker.model_path.clone()?;
    let output = run.output.parse::<OutputKind>();
    let checked = output.and_then(|output| {
        check_takes_model(&output)?;
        // A model of the hub may be fetched only when the run starts.
        if hub::named(&path).is_some() {
            return Ok(());
        }
        check_model(&output, Some(&path))?;
        match path.is_dir() {
            true => {
                let folder = run.worker.model_folder().map(drop);
                folder.map_err(|error| error.with_at("MODEL"))
            }
            false => Ok(()),
        }
    });
    Some((path, checked))
}

/// The settings of a run with the flags that a tool was given.
fn settings(name: &str, has_file: bool, given: &[OsString]) -> Result<RunArgs, EngineError> {
    let unknown = || EngineError::internal("clap knows a command that we do not");
    // What a flag requires may stand in the file, if there is one.
    let grammar = match has_file {
        true => grammar_of_layer(command()),
        false => command(),
    };
    let by_hand = matches_of(&grammar, given)?;
    let by_hand = by_hand.subcommand_matches(name).ok_or_else(unknown)?;
    let tool = grammar.find_subcommand(name).ok_or_else(unknown)?;
    let run = grammar.find_subcommand("run").ok_or_else(unknown)?;
    let is_of_run = |name: &str| run.get_arguments().any(|arg| arg.get_long() == Some(name));
    let mut words: Vec<OsString> = vec!["genset".into(), "run".into()];
    for arg in tool.get_arguments() {
        let id = arg.get_id().as_str();
        let is_by_hand = by_hand.value_source(id) == Some(ValueSource::CommandLine);
        let name = arg.get_long().filter(|name| is_by_hand && is_of_run(name));
        if let Some(name) = name {
            let values = by_hand.get_raw(id).into_iter().flatten();
            words.extend(values.map(|value| flag(name, value)));
        }
    }
    // Who names a file means it. The variable may be for a worker's own binary, whose engine has other settings.
    let unknown_keys = match by_hand.value_source("config") == Some(ValueSource::EnvVariable) {
        true => UnknownKeys::Skip,
        false => UnknownKeys::Refuse,
    };
    let read = read(command(), words, unknown_keys)?;
    let cli = Cli::from_arg_matches(&read.matches).unwrap_or_else(|error| error.exit());
    match cli.command {
        CliCommand::Run(run) => Ok(*run),
        CliCommand::Tool(_)
        | CliCommand::Config { .. }
        | CliCommand::Completions { .. }
        | CliCommand::Man { .. } => Err(unknown()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_doctor_has_the_settings_of_a_run() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let settings = "in = \"dyn\"\nmax-connections = 7\nhttp-port = 1\nstatus-port = 2\nhttp-tls-cert = \"c\"\n";
        std::fs::write(file.path(), settings).unwrap();
        let words = [
            "genset",
            "doctor",
            "--json",
            "--status-port=3",
            "--http-tls-key=k",
            "--etcd-endpoints=http://a,http://b",
        ];
        let mut given: Vec<OsString> = words.map(OsString::from).into();
        given.push(flag("config", file.path()));
        let matches = matches_of(&grammar_of_layer(command()), &given).unwrap();
        let CliCommand::Tool(mut tool) = Cli::from_arg_matches(&matches).unwrap().command else {
            panic!("the words say doctor");
        };
        complete(&mut tool, &given).unwrap();
        let Tool::Doctor(args) = tool else {
            panic!("the words say doctor");
        };
        assert!(args.json);
        assert_eq!(args.max_connections, 7);
        assert_eq!(args.http.address().port(), 1);
        assert_eq!(args.status.status_port, Some(3));
        assert!(args.http.http_tls_key.is_some());
        assert_eq!(args.network.etcd_endpoints, ["http://a", "http://b"]);
    }
}
