//! The messages of etcd's protocol that discovery uses, with the fields that it uses; other fields are skipped on receipt.
//!
//! Written by hand, so the build needs no protoc. [`super::client`] sends them.
//!
//! # Source
//! `api/etcdserverpb/rpc.proto` and `api/mvccpb/kv.proto` of etcd 3.4 to 3.6, for names and numbers.

use bytes::Bytes;
use prost::{Message, Oneof};

/// A request that has one answer.
pub(super) trait Call: Message + 'static {
    type Answer: Message + Default + 'static;
    const METHOD: &'static str;
}

macro_rules! calls {
    ($($method:literal: $request:ty => $answer:ty,)*) => {$(
        impl Call for $request {
            type Answer = $answer;
            const METHOD: &'static str = concat!("/etcdserverpb.", $method);
        }
    )*};
}

calls! {
    "Auth/Authenticate": AuthenticateRequest => AuthenticateResponse,
    "KV/Put": PutRequest => (),
    "KV/Range": RangeRequest => RangeResponse,
    "KV/Txn": TxnRequest => TxnResponse,
    "Lease/LeaseGrant": LeaseGrantRequest => LeaseGrantResponse,
    "Lease/LeaseRevoke": LeaseRevokeRequest => (),
    "Lease/LeaseTimeToLive": LeaseTimeToLiveRequest => LeaseTimeToLiveResponse,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct ResponseHeader {
    /// The store's revision when it applied the request.
    #[prost(int64, tag = "3")]
    pub(super) revision: i64,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct KeyValue {
    #[prost(bytes = "vec", tag = "1")]
    pub(super) key: Vec<u8>,
    #[prost(bytes = "bytes", tag = "5")]
    pub(super) value: Bytes,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct RangeRequest {
    #[prost(bytes = "vec", tag = "1")]
    pub(super) key: Vec<u8>,
    #[prost(bytes = "vec", tag = "2")]
    pub(super) range_end: Vec<u8>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct RangeResponse {
    #[prost(message, optional, tag = "1")]
    pub(super) header: Option<ResponseHeader>,
    #[prost(message, repeated, tag = "2")]
    pub(super) kvs: Vec<KeyValue>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct PutRequest {
    #[prost(bytes = "vec", tag = "1")]
    pub(super) key: Vec<u8>,
    #[prost(bytes = "bytes", tag = "2")]
    pub(super) value: Bytes,
    #[prost(int64, tag = "3")]
    pub(super) lease: i64,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct DeleteRangeRequest {
    #[prost(bytes = "vec", tag = "1")]
    pub(super) key: Vec<u8>,
}

/// What a transaction does.
#[derive(Clone, PartialEq, Message)]
pub(super) struct RequestOp {
    #[prost(oneof = "Operation", tags = "2, 3")]
    pub(super) request: Option<Operation>,
}

#[derive(Clone, PartialEq, Oneof)]
pub(super) enum Operation {
    #[prost(message, tag = "2")]
    Put(PutRequest),
    #[prost(message, tag = "3")]
    Delete(DeleteRangeRequest),
}

/// The condition of a transaction: here always an equality, whose number is 0 and thus omitted.
#[derive(Clone, PartialEq, Message)]
pub(super) struct Compare {
    /// [`Self::CREATE_REVISION`] or [`Self::LEASE`].
    #[prost(int32, tag = "2")]
    pub(super) target: i32,
    #[prost(bytes = "vec", tag = "3")]
    pub(super) key: Vec<u8>,
    #[prost(oneof = "CompareWith", tags = "5, 8")]
    pub(super) with: Option<CompareWith>,
}

impl Compare {
    const CREATE_REVISION: i32 = 1;
    const LEASE: i32 = 4;

    /// The key does not exist.
    pub(super) fn is_absent(key: &str) -> Self {
        Self {
            target: Self::CREATE_REVISION,
            key: key.into(),
            with: Some(CompareWith::CreateRevision(0)),
        }
    }

    /// The key is attached to this lease.
    pub(super) fn has_lease(key: &str, lease: i64) -> Self {
        Self {
            target: Self::LEASE,
            key: key.into(),
            with: Some(CompareWith::Lease(lease)),
        }
    }
}

#[derive(Clone, PartialEq, Oneof)]
pub(super) enum CompareWith {
    #[prost(int64, tag = "5")]
    CreateRevision(i64),
    #[prost(int64, tag = "8")]
    Lease(i64),
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct TxnRequest {
    #[prost(message, repeated, tag = "1")]
    pub(super) compare: Vec<Compare>,
    #[prost(message, repeated, tag = "2")]
    pub(super) success: Vec<RequestOp>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct TxnResponse {
    #[prost(bool, tag = "2")]
    pub(super) succeeded: bool,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct LeaseGrantRequest {
    /// Seconds.
    #[prost(int64, tag = "1")]
    pub(super) ttl: i64,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct LeaseGrantResponse {
    #[prost(int64, tag = "2")]
    pub(super) id: i64,
    /// Seconds; a server may grant more than requested.
    #[prost(int64, tag = "3")]
    pub(super) ttl: i64,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct LeaseRevokeRequest {
    #[prost(int64, tag = "1")]
    pub(super) id: i64,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct LeaseKeepAliveRequest {
    #[prost(int64, tag = "1")]
    pub(super) id: i64,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct LeaseKeepAliveResponse {
    /// Seconds; 0 if the lease is gone.
    #[prost(int64, tag = "3")]
    pub(super) ttl: i64,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct LeaseTimeToLiveRequest {
    #[prost(int64, tag = "1")]
    pub(super) id: i64,
    /// Whether to return the attached keys.
    #[prost(bool, tag = "2")]
    pub(super) keys: bool,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct LeaseTimeToLiveResponse {
    /// Whole seconds: 0 for a lease with less than one left, -1 for one that is gone.
    #[prost(int64, tag = "3")]
    pub(super) ttl: i64,
    #[prost(bytes = "vec", repeated, tag = "5")]
    pub(super) keys: Vec<Vec<u8>>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct WatchRequest {
    #[prost(oneof = "WatchOrder", tags = "1, 3")]
    pub(super) order: Option<WatchOrder>,
}

#[derive(Clone, PartialEq, Oneof)]
pub(super) enum WatchOrder {
    #[prost(message, tag = "1")]
    Create(WatchCreateRequest),
    /// Requests a sign of life.
    #[prost(message, tag = "3")]
    Progress(()),
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct WatchCreateRequest {
    #[prost(bytes = "vec", tag = "1")]
    pub(super) key: Vec<u8>,
    #[prost(bytes = "vec", tag = "2")]
    pub(super) range_end: Vec<u8>,
    #[prost(int64, tag = "3")]
    pub(super) start_revision: i64,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct WatchResponse {
    #[prost(bool, tag = "3")]
    pub(super) created: bool,
    #[prost(bool, tag = "4")]
    pub(super) canceled: bool,
    #[prost(int64, tag = "5")]
    pub(super) compact_revision: i64,
    #[prost(string, tag = "6")]
    pub(super) cancel_reason: String,
    #[prost(message, repeated, tag = "11")]
    pub(super) events: Vec<Event>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct Event {
    /// 0 for a put, otherwise [`Self::DELETE`].
    #[prost(int32, tag = "1")]
    pub(super) kind: i32,
    #[prost(message, optional, tag = "2")]
    pub(super) kv: Option<KeyValue>,
}

impl Event {
    pub(super) const DELETE: i32 = 1;
}

/// `Debug` omits the password.
#[derive(Clone, PartialEq, Message)]
#[prost(skip_debug)]
pub(super) struct AuthenticateRequest {
    #[prost(string, tag = "1")]
    pub(super) name: String,
    #[prost(string, tag = "2")]
    pub(super) password: String,
}

genset_backend_common::debug_as!(|it| AuthenticateRequest { name: it.name, .. });

#[derive(Clone, PartialEq, Message)]
pub(super) struct AuthenticateResponse {
    #[prost(string, tag = "2")]
    pub(super) token: String,
}

/// The range of all keys that start with `prefix`: its first key, and the first key after it.
pub(super) fn prefix_range(prefix: &str) -> (Vec<u8>, Vec<u8>) {
    // For etcd, the range from 0 to 0 is everything. UTF-8 has no byte 255, so the last byte can be incremented.
    let mut end = prefix.as_bytes().to_vec();
    match end.last_mut() {
        Some(last) => {
            *last += 1;
            (prefix.into(), end)
        }
        None => (vec![0], vec![0]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prefix_is_a_range() {
        assert_eq!(prefix_range("a/"), (b"a/".to_vec(), b"a0".to_vec()));
        assert_eq!(prefix_range(""), (vec![0], vec![0]));
        let (_, end) = prefix_range("\u{10ffff}");
        assert!(end.as_slice() > "\u{10ffff}\u{10ffff}".as_bytes());
    }

    #[test]
    fn a_password_is_not_shown() {
        let request = AuthenticateRequest {
            name: "ada".into(),
            password: "secret".into(),
        };
        let shown = format!("{request:?}");
        assert!(
            shown.contains("ada") && !shown.contains("secret"),
            "{shown}"
        );
    }
}
