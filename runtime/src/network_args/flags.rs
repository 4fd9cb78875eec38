//! Fields of the configurations of etcd and NATS, as the flags that set them: an error names what the operator wrote.

use genset_backend_common::EngineError;

/// The flag or flags of each field that a check may name.
const FLAGS: [(&str, &str); 16] = [
    ("etcd.credentials.user", "--etcd-username"),
    ("etcd.endpoints", "--etcd-endpoints"),
    ("etcd.lease_ttl", "--etcd-lease-ttl"),
    ("etcd.tls", "--etcd-ca, --etcd-cert and --etcd-key"),
    ("etcd.tls.ca_pem", "--etcd-ca"),
    ("etcd.tls.identity.certificate_pem", "--etcd-cert"),
    ("etcd.tls.identity.key_pem", "--etcd-key"),
    ("nats.credentials.creds", "--nats-creds"),
    ("nats.credentials.nkey", "--nats-nkey-file"),
    ("nats.credentials.token", "--nats-token-file"),
    ("nats.credentials.user", "--nats-username"),
    ("nats.servers", "--nats-server"),
    ("nats.tls.ca_pem", "--nats-ca"),
    ("nats.tls.identity", "--nats-cert and --nats-key"),
    ("nats.tls.identity.certificate_pem", "--nats-cert"),
    ("nats.tls.identity.key_pem", "--nats-key"),
];

/// The same error, of the flag where it was of a field.
pub(super) fn named_by_flag(error: EngineError) -> EngineError {
    let field = error.at().map_or("", |at| at.name());
    let flag = FLAGS.iter().find(|(known, _)| *known == field);
    match flag.map(|(_, flag)| *flag) {
        Some(flag) => error.with_at(flag),
        None => error,
    }
}
