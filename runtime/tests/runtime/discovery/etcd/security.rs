//! Users and certificates.

use std::path::Path;
use std::time::Duration;

use genset_backend_common::ErrorKind;
use genset_runtime::TlsIdentity;
use genset_runtime::discovery::{
    Change, Discovery, EtcdConfig, EtcdCredentials, EtcdDiscovery, EtcdTls,
};

use super::TTL;
use super::server::EtcdServer;
use crate::certificates::Authority;
use crate::discovery::suite::{Follower, entry, everything, leased};
use crate::support::soon;

const PASSWORD: &str = "not-in-any-log";

/// A server with the users `root`, and `worker`, who may use only keys that start with `genset/`.
async fn server_with_users() -> EtcdServer {
    let server = EtcdServer::start().await;
    let users = ["root", "worker"];
    server
        .admin()
        .enable_users(&users, PASSWORD, "genset/")
        .await;
    server
}

async fn connect_as(server: &EtcdServer, user: &str, password: &str) -> EtcdDiscovery {
    let config = EtcdConfig {
        endpoints: vec![server.endpoint()],
        credentials: Some(EtcdCredentials {
            user: user.into(),
            password: password.into(),
        }),
        lease_ttl: TTL,
        ..EtcdConfig::default()
    };
    EtcdDiscovery::connect(config).await.unwrap()
}

#[tokio::test]
async fn a_user_with_the_right_password_gets_in_and_again_after_a_restart() {
    let mut server = server_with_users().await;
    let discovery = connect_as(&server, "worker", PASSWORD).await;
    let lease = leased(&discovery, "genset/a", "x").await;
    let mut follower = Follower::of(&discovery, "genset/").await;
    follower.until_exactly(&[entry("genset/a", "x")]).await;
    // The server forgets every session.
    server.kill();
    server.respawn();
    server.admin_as("root", PASSWORD).await;
    soon(async { while lease.put(entry("genset/b", "y")).await.is_err() {} }).await;
    follower
        .until_exactly(&[entry("genset/a", "x"), entry("genset/b", "y")])
        .await;
    assert_eq!(discovery.get("genset/").await.unwrap().len(), 2);
}

/// So that authentication can be enabled while a fleet runs.
#[tokio::test]
async fn credentials_are_used_as_soon_as_etcd_requires_them() {
    let server = EtcdServer::start().await;
    let discovery = connect_as(&server, "worker", PASSWORD).await;
    let lease = leased(&discovery, "genset/a", "x").await;
    let users = ["root", "worker"];
    let admin = server.admin();
    admin.enable_users(&users, PASSWORD, "genset/").await;
    lease.put(entry("genset/b", "y")).await.unwrap();
    assert_eq!(discovery.get("genset/").await.unwrap().len(), 2);
}

#[tokio::test]
async fn what_a_user_may_not_do_is_an_error_that_says_so_without_the_password() {
    let server = server_with_users().await;
    let wrong = connect_as(&server, "worker", "not-in-any-log-either").await;
    let refused = soon(wrong.get("genset/")).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::InvalidArgument);
    let right = connect_as(&server, "worker", PASSWORD).await;
    let lease = right.lease().await.unwrap();
    let forbidden = lease.put(entry("other/a", "x")).await.unwrap_err();
    assert_eq!(forbidden.kind(), ErrorKind::InvalidArgument);
    lease.put(entry("genset/a", "x")).await.unwrap();
    let texts = format!("{refused} {refused:?} {forbidden:?} {right:?} {wrong:?}");
    for mend in ["--etcd-password-file", "grant the user a role"] {
        assert!(texts.contains(mend), "{texts}");
    }
    assert!(!texts.contains("not-in-any-log"), "{texts}");
}

impl Authority {
    /// The options of a server with certificates in `folder`.
    fn server_options(&self, folder: &Path) -> Vec<String> {
        let [certificate, key, authority] = self.files(folder);
        vec![
            format!("--cert-file={certificate}"),
            format!("--key-file={key}"),
            format!("--trusted-ca-file={authority}"),
            "--client-cert-auth".into(),
        ]
    }

    fn client_tls(&self) -> EtcdTls {
        EtcdTls {
            ca_pem: self.pem.clone(),
            identity: Some(self.identity()),
            server_name: None,
        }
    }
}

async fn connect_with(server: &EtcdServer, tls: EtcdTls) -> EtcdDiscovery {
    let config = EtcdConfig {
        endpoints: vec![server.endpoint()],
        tls: Some(tls),
        lease_ttl: TTL,
        ..EtcdConfig::default()
    };
    EtcdDiscovery::connect(config).await.unwrap()
}

#[tokio::test]
async fn tls_with_certificates_on_both_sides_works_and_with_wrong_ones_does_not() {
    let authority = Authority::new();
    let folder = tempfile::tempdir().unwrap();
    let server = EtcdServer::start_with_tls(authority.server_options(folder.path()));
    let discovery = connect_with(&server, authority.client_tls()).await;
    let lease = soon(async {
        loop {
            match discovery.lease().await {
                Ok(lease) => return lease,
                Err(_) => tokio::time::sleep(Duration::from_millis(20)).await,
            }
        }
    })
    .await;
    let mut follower = Follower::of(&discovery, "").await;
    lease.put(entry("a", "x")).await.unwrap();
    assert_eq!(follower.next().await, Change::Put(entry("a", "x")));
    assert_eq!(everything(&discovery).await.len(), 1);

    let right = authority.client_tls();
    let wrong = [
        EtcdTls {
            ca_pem: Authority::new().pem,
            ..right.clone()
        },
        EtcdTls {
            identity: Some(Authority::new().identity()),
            ..right.clone()
        },
        EtcdTls {
            identity: None,
            ..right.clone()
        },
        EtcdTls {
            server_name: Some("elsewhere".into()),
            ..right
        },
    ];
    for tls in wrong {
        let refused = soon(connect_with(&server, tls).await.get(""))
            .await
            .unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::Unavailable, "{refused}");
    }
}

#[tokio::test]
async fn what_is_no_certificate_is_refused_before_any_connection() {
    let right = Authority::new().client_tls();
    let identity = right.identity.clone().unwrap();
    let no_key = TlsIdentity {
        key_pem: "/etc/key.pem".into(),
        ..identity.clone()
    };
    let key_of_another = TlsIdentity {
        key_pem: Authority::new().identity().key_pem,
        ..identity
    };
    let with = |identity: TlsIdentity| EtcdTls {
        identity: Some(identity),
        ..right.clone()
    };
    let path = EtcdTls {
        ca_pem: "/etc/ca.pem".into(),
        ..right.clone()
    };
    let cases = [
        (path, "etcd.tls.ca_pem"),
        (with(no_key), "etcd.tls.identity.key_pem"),
        (with(key_of_another), "etcd.tls"),
    ];
    for (tls, field) in cases {
        let config = EtcdConfig {
            endpoints: vec!["https://127.0.0.1:1".into()],
            tls: Some(tls),
            ..EtcdConfig::default()
        };
        let refused = EtcdDiscovery::connect(config).await.unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::InvalidArgument);
        assert_eq!(refused.at().map(|at| at.name()), Some(field));
    }
}
