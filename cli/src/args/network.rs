//! The given network settings, as flags with which another process meets this one. Only the parent calls this.

use clap::Args as _;
use genset_hub::without_password;
use genset_runtime::NetworkArgs;
use genset_runtime::layers::Settings;

use super::quoted;

/// Network flags that each process has for itself.
const OF_ONE_PROCESS: &[&str] = &["wire-host", "wire-port", "advertise-host"];

/// The flags, to append to a command.
pub(super) fn network_flags(settings: &Settings) -> String {
    let network = NetworkArgs::augment_args(clap::Command::new("network"));
    let is_shared = |name: &str| {
        let mut flags = network.get_arguments();
        flags.any(|flag| flag.get_long() == Some(name)) && !OF_ONE_PROCESS.contains(&name)
    };
    let given = settings.given().filter(|(name, _)| is_shared(name));
    given
        .map(|(name, value)| shown_flag(name, &value))
        .collect()
}

/// A flag with a leading space. Leaves out passwords of URLs, because it is shown on a terminal.
fn shown_flag(name: &str, value: &str) -> String {
    let shown = |part: &str| match part.contains("://") {
        true => without_password(part),
        false => part.to_owned(),
    };
    let text = value.split(',').map(shown).collect::<Vec<_>>().join(",");
    format!(" {}", quoted(&format!("--{name}={text}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flag_that_is_shown_has_no_password() {
        let shown = shown_flag("nats-server", "nats://me:secret@one:4222,nats://two:4222");
        assert_eq!(shown, " --nats-server=nats://one:4222,nats://two:4222");
        let shown = shown_flag("nats-server", "/srv/a fleet");
        assert_eq!(shown, " '--nats-server=/srv/a fleet'");
    }
}
