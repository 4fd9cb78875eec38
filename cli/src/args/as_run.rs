//! What `genset doctor` checks: what `genset run` would use. Only the parent calls this.

use std::ffi::OsString;

use clap::FromArgMatches as _;
use clap::parser::ValueSource;
use genset_backend_common::EngineError;
use genset_runtime::layers::{flag, matches_of};

use super::{Cli, CliCommand, DoctorArgs, command, grammar_of_layer, read};

/// The doctor's arguments with the settings that `genset run` would have with the flags in `given`, the environment, and the file
/// of `--config`.
///
/// # Errors
/// As for [`super::parse`].
pub(super) fn with_settings(
    args: DoctorArgs,
    given: &[OsString],
) -> Result<DoctorArgs, EngineError> {
    let unknown = || EngineError::internal("clap knows a command that we do not");
    // What a flag requires may stand in the file, if there is one.
    let grammar = match args.config {
        Some(_) => grammar_of_layer(command()),
        None => command(),
    };
    let by_hand = matches_of(&grammar, given)?;
    let by_hand = by_hand.subcommand_matches("doctor").ok_or_else(unknown)?;
    let doctor = grammar.find_subcommand("doctor").ok_or_else(unknown)?;
    let mut words: Vec<OsString> = vec!["genset".into(), "run".into()];
    for arg in doctor.get_arguments() {
        let id = arg.get_id().as_str();
        let is_by_hand = by_hand.value_source(id) == Some(ValueSource::CommandLine);
        // The one flag that `genset run` does not have.
        let name = arg.get_long().filter(|name| *name != "json");
        if let (true, Some(name)) = (is_by_hand, name) {
            let values = by_hand.get_raw(id).into_iter().flatten();
            words.extend(values.map(|value| flag(name, value)));
        }
    }
    let read = read(command(), words)?;
    let cli = Cli::from_arg_matches(&read.matches).unwrap_or_else(|error| error.exit());
    let CliCommand::Run(run) = cli.command else {
        return Err(unknown());
    };
    let run = *run;
    Ok(DoctorArgs {
        http: run.http,
        status: run.worker.status,
        network: run.worker.network,
        max_connections: run.frontend.max_connections,
        ..args
    })
}

#[cfg(test)]
mod tests {
    use super::super::Tool;
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
        let CliCommand::Tool(Tool::Doctor(args)) = Cli::from_arg_matches(&matches).unwrap().command
        else {
            panic!("the words say doctor");
        };
        let args = with_settings(*args, &given).unwrap();
        assert!(args.json);
        assert_eq!(args.max_connections, 7);
        assert_eq!(args.http.address().port(), 1);
        assert_eq!(args.status.status_port, Some(3));
        assert!(args.http.http_tls_key.is_some());
        assert_eq!(args.network.etcd_endpoints, ["http://a", "http://b"]);
    }
}
