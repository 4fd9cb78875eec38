//! Users and certificates.

use std::path::Path;
use std::sync::Arc;

use genset_backend_common::{EngineError, ErrorKind};
use genset_runtime::InstanceId;
use genset_runtime::plane::{
    NatsConfig, NatsCredentials, NatsTls, RequestPlane, Served, WirePlane,
};

use super::server::{NatsServer, plane};
use crate::certificates::Authority;
use crate::plane::deaf;
use crate::plane::suite::{Pair, count, erased, name};
use crate::support::soon;

const USERS: &str = r#"
authorization {
  users = [
    { user: "worker", password: "not-in-any-log", permissions: {
        publish: "genset.v1.wire.>", subscribe: "genset.v1.wire.>" } }
    { user: "guest", password: "not-in-any-log", permissions: {
        publish: "orders", subscribe: "orders" } }
  ]
}
"#;

fn user(server: &NatsServer, user: &str, password: &str) -> NatsConfig {
    NatsConfig {
        credentials: Some(NatsCredentials::UserPassword {
            user: user.into(),
            password: password.into(),
        }),
        ..server.config()
    }
}

async fn try_serve(plane: &WirePlane) -> Result<Served, EngineError> {
    let endpoint = name("generate");
    soon(plane.serve(&endpoint, InstanceId(1), erased(count))).await
}

async fn serves_and_is_called(config: &NatsConfig) {
    let new = || Arc::new(plane(config.clone(), deaf()));
    Pair::new(new(), new()).works().await;
}

#[tokio::test]
async fn a_user_with_rights_to_our_subjects_alone_serves_and_calls() {
    let server = NatsServer::start_with(USERS).await;
    serves_and_is_called(&user(&server, "worker", "not-in-any-log")).await;
}

#[tokio::test]
async fn a_wrong_password_is_an_error_of_the_credentials_that_does_not_show_them() {
    let server = NatsServer::start_with(USERS).await;
    let wrong = plane(user(&server, "worker", "not-in-any-log-either"), deaf());
    let none = plane(server.config(), deaf());
    let right = plane(user(&server, "worker", "not-in-any-log"), deaf());
    let served = try_serve(&right).await.unwrap();
    for stranger in [wrong, none] {
        let error = try_serve(&stranger).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
        assert_eq!(
            error.at().map(|at| at.name()),
            Some("nats.credentials"),
            "{error}"
        );
        let pair = Pair::new(Arc::new(stranger), Arc::new(right.clone()));
        let refused = pair.ask::<u32, u32>(&served, 1).await.unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::CannotConnect, "{refused}");
        let texts = format!("{error} {error:?} {refused} {refused:?}");
        assert!(!texts.contains("not-in-any-log"), "{texts}");
    }
}

#[tokio::test]
async fn a_user_without_rights_to_our_subjects_is_told_which() {
    let server = NatsServer::start_with(USERS).await;
    let guest = plane(user(&server, "guest", "not-in-any-log"), deaf());
    let error = try_serve(&guest).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    assert!(error.message().contains("genset.v1.wire.>"), "{error}");
    assert!(
        error.message().to_lowercase().contains("permissions"),
        "{error}"
    );
}

#[tokio::test]
async fn a_token_gets_in() {
    let server = NatsServer::start_with("authorization { token: \"a-token\" }\n").await;
    let config = |token: &str| NatsConfig {
        credentials: Some(NatsCredentials::Token(token.into())),
        ..server.config()
    };
    serves_and_is_called(&config("a-token")).await;
    let wrong = plane(config("another"), deaf());
    let error = try_serve(&wrong).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
}

/// The key was created for this test only: it gives access to nothing else.
#[tokio::test]
async fn an_nkey_gets_in() {
    let server = NatsServer::start_with(
        "authorization { users = [ { nkey: UBDJA24MD3XJXJ5AMQZX37L45INOZKUXAMLFKHPGFMRWTGWIPFSJPDDY } ] }\n",
    )
    .await;
    let seed = "SUAM4YNMZZU7GICAXGOWCFB24DXIXRYLPLZ7J7GHYMUS3SPJECGBAI735E";
    let config = NatsConfig {
        credentials: Some(NatsCredentials::Nkey(seed.into())),
        ..server.config()
    };
    serves_and_is_called(&config).await;
}

/// An operator, an account and its user, created for this test only: the file gives access to nothing else.
#[tokio::test]
async fn a_creds_file_gets_in() {
    let server = NatsServer::start_with(include_str!("decentralized/server.conf")).await;
    let config = NatsConfig {
        credentials: Some(NatsCredentials::Creds(
            include_str!("decentralized/worker.creds").into(),
        )),
        ..server.config()
    };
    serves_and_is_called(&config).await;
    let error = try_serve(&plane(server.config(), deaf()))
        .await
        .unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
}

impl Authority {
    /// Lines of the configuration of a server with certificates in `folder`.
    fn settings(&self, folder: &Path) -> String {
        let [certificate, key, authority] = self.files(folder);
        format!(
            "tls {{\n cert_file: {certificate:?}\n key_file: {key:?}\n ca_file: {authority:?}\n verify: true\n}}\n"
        )
    }

    fn nats_tls(&self) -> NatsTls {
        NatsTls {
            ca_pem: Some(self.pem.clone()),
            identity: Some(self.identity()),
        }
    }
}

#[tokio::test]
async fn tls_with_certificates_on_both_sides_works_and_with_wrong_ones_does_not() {
    let authority = Authority::new();
    let folder = tempfile::tempdir().unwrap();
    let server = NatsServer::start_with(&authority.settings(folder.path())).await;
    let with = |tls: Option<NatsTls>| NatsConfig {
        servers: vec![format!("tls://{}", server.address())],
        tls,
        ..server.config()
    };
    let right = authority.nats_tls();
    serves_and_is_called(&with(Some(right.clone()))).await;
    let wrong = [
        // The system's authorities have not signed it.
        None,
        Some(NatsTls {
            ca_pem: Some(Authority::new().pem),
            ..right.clone()
        }),
        Some(NatsTls {
            identity: Some(Authority::new().identity()),
            ..right.clone()
        }),
        Some(NatsTls {
            identity: None,
            ..right
        }),
    ];
    for tls in wrong {
        let error = try_serve(&plane(with(tls), deaf())).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
        assert!(error.message().contains(&server.address()), "{error}");
    }
}

#[tokio::test]
async fn a_server_without_tls_is_not_spoken_to_when_tls_is_wanted() {
    let server = NatsServer::start().await;
    let config = NatsConfig {
        tls: Some(Authority::new().nats_tls()),
        ..user(&server, "worker", "not-in-any-log")
    };
    let error = try_serve(&plane(config, deaf())).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
}
