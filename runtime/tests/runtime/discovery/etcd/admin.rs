//! [`Admin`]: etcd's JSON interface, for operations that discovery does not have.

use std::io;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

/// A server's administrator.
pub(super) struct Admin {
    address: String,
    /// A line of the requests' head, or empty.
    authorization: String,
}

impl Admin {
    pub(super) fn new(address: String) -> Self {
        Self {
            address,
            authorization: String::new(),
        }
    }

    pub(super) async fn authenticated(mut self, user: &str, password: &str) -> io::Result<Self> {
        let who = json!({"name": user, "password": password});
        let answer = self.ask("auth/authenticate", who).await?;
        let token = answer["token"].as_str().unwrap_or_default();
        self.authorization = format!("Authorization: {token}\r\n");
        Ok(self)
    }

    /// The store's revision, if the server has a leader.
    pub(super) async fn revision(&self) -> io::Result<i64> {
        let answer = self.ask("kv/range", json!({"key": base64("any")})).await?;
        let revision = answer["header"]["revision"].as_str();
        revision
            .and_then(|revision| revision.parse().ok())
            .ok_or_else(|| io::Error::other(answer.to_string()))
    }

    pub(super) async fn compact(&self, revision: i64) {
        self.must("kv/compaction", json!({"revision": revision.to_string()}))
            .await;
    }

    /// Changes an entry's value. Its lease stays.
    pub(super) async fn overwrite(&self, key: &str, value: &str) {
        let put = json!({"key": base64(key), "value": base64(value), "ignore_lease": true});
        self.must("kv/put", put).await;
    }

    pub(super) async fn delete(&self, key: &str) {
        self.must("kv/deleterange", json!({"key": base64(key)}))
            .await;
    }

    pub(super) async fn revoke_all_leases(&self) {
        let leases = self.must("lease/leases", json!({})).await;
        for lease in leases["leases"].as_array().into_iter().flatten() {
            self.must("lease/revoke", json!({"ID": lease["ID"]})).await;
        }
    }

    /// Creates these users, each with a role of the same name, and enables authentication. `root` has all rights; the
    /// others have rights to keys that start with `prefix`.
    pub(super) async fn enable_users(&self, users: &[&str], password: &str, prefix: &str) {
        let mut end = prefix.as_bytes().to_vec();
        *end.last_mut().unwrap() += 1;
        let permission =
            json!({"permType": "READWRITE", "key": base64(prefix), "range_end": base64(end)});
        for user in users {
            self.must("auth/user/add", json!({"name": user, "password": password}))
                .await;
            self.must("auth/role/add", json!({"name": user})).await;
            if *user != "root" {
                self.must("auth/role/grant", json!({"name": user, "perm": permission}))
                    .await;
            }
            self.must("auth/user/grant", json!({"user": user, "role": user}))
                .await;
        }
        self.must("auth/enable", json!({})).await;
    }

    async fn must(&self, what: &str, request: Value) -> Value {
        self.ask(what, request).await.unwrap()
    }

    async fn ask(&self, what: &str, request: Value) -> io::Result<Value> {
        let body = request.to_string();
        // With HTTP 1.0 the answer is not chunked, and ends with the connection.
        let head = format!(
            "POST /v3/{what} HTTP/1.0\r\n{}Content-Length: {}\r\n\r\n",
            self.authorization,
            body.len()
        );
        let mut stream = TcpStream::connect(&self.address).await?;
        stream.write_all((head + &body).as_bytes()).await?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await?;
        match answer.split_once("\r\n\r\n") {
            Some((head, body)) if head.contains(" 200 ") => Ok(serde_json::from_str(body)?),
            _ => Err(io::Error::other(answer)),
        }
    }
}

fn base64(text: impl AsRef<[u8]>) -> String {
    STANDARD.encode(text)
}
