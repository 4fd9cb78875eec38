//! Operator requests to workers other than generation: the list of operations, those that the process performs without the
//! engine, and [`ControlClient`], which sends them. The status port, the endpoint `control`, a
//! [`RemoteEngine`](crate::RemoteEngine) and `genset control` use it.

use std::time::Duration;

use futures_util::StreamExt;
use genset_backend_common::ports::Control;
use genset_backend_common::{
    EngineError, ErrorKind, RequestContext,
    controls::{ControlReply, ControlRequest},
    error::At,
    spelling::nearest,
};
use serde_json::Value;

use crate::client::Client;
use crate::component::Runtime;
use crate::names::{EndpointName, InstanceId};
use crate::registrar::endpoints;

/// An operation, as listed.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Operation {
    pub(crate) op: &'static str,
    /// An example of its fields, in JSON.
    pub(crate) takes: &'static str,
    pub(crate) does: &'static str,
}

const fn operation(op: &'static str, takes: &'static str, does: &'static str) -> Operation {
    Operation { op, takes, does }
}

/// All operations.
pub(crate) const OPERATIONS: [Operation; 10] = [
    operation(
        "sleep",
        r#"{"level":"kv_cache"}"#,
        "frees device memory until woken: kv_cache (the default), or weights too",
    ),
    operation("wake", "{}", "takes back what sleep freed"),
    operation("clear_prefix_cache", "{}", "drops every reusable KV block"),
    operation("list_adapters", "{}", "lists the adapters"),
    operation(
        "load_adapter",
        r#"{"adapter":{"name":"french","source":"./adapters/french"}}"#,
        "makes an adapter available",
    ),
    operation(
        "unload_adapter",
        r#"{"name":"french"}"#,
        "makes an adapter unavailable",
    ),
    operation(
        "update_weights",
        r#"{"source":"./checkpoint-2"}"#,
        "replaces the weights, from what the engine documents",
    ),
    operation("start_profile", "{}", "begins to record a profile"),
    operation(
        "stop_profile",
        "{}",
        "ends the profile, and says where it was written",
    ),
    operation(
        "log_level",
        r#"{"filter":"info,genset_runtime=debug"}"#,
        "changes what the process logs, in the syntax of RUST_LOG",
    ),
];

/// Builds the request for an operation from its name, in which `-` may stand for `_`, and its fields.
///
/// # Errors
/// `NotFound` for an unknown name, with the nearest known one; `InvalidArgument` for fields that the operation does not have.
pub(crate) fn request_of(op: &str, fields: Value) -> Result<ControlRequest, EngineError> {
    let Value::Object(mut fields) = fields else {
        let problem = "is no JSON object with the operation's fields";
        return Err(EngineError::invalid_argument(At::other("body"), problem));
    };
    let name = op.replace('-', "_");
    let Some(operation) = OPERATIONS.iter().find(|known| known.op == name) else {
        let names = OPERATIONS.map(|known| known.op);
        let near =
            nearest(&name, names).map_or_else(String::new, |near| format!("did you mean {near}? "));
        return Err(EngineError::not_found(format!(
            "there is no operation {op:?}; {near}All are {}",
            names.join(", ")
        )));
    };
    fields.insert("op".into(), name.into());
    serde_json::from_value(Value::Object(fields)).map_err(|error| {
        let (op, takes) = (operation.op, operation.takes);
        let problem = format!("does not fit {op}, which takes such as {takes}: {error}");
        EngineError::invalid_argument(At::other("body"), problem)
    })
}

/// Performs what the process does itself, and passes the rest to the engine.
///
/// # Errors
/// The engine's errors, and `InvalidArgument` for an invalid log filter.
pub(crate) async fn perform(
    control: &dyn Control,
    request: ControlRequest,
) -> Result<ControlReply, EngineError> {
    #[cfg(feature = "cli")]
    if let ControlRequest::LogLevel { filter } = &request {
        check_level(filter)?;
        crate::logging::set_log_filter(filter)?;
        return Ok(ControlReply::Done);
    }
    control.control(request).await
}

/// Refuses a misspelt level: as a filter it would name a target and silence everything else.
#[cfg(feature = "cli")]
fn check_level(filter: &str) -> Result<(), EngineError> {
    const LEVELS: [&str; 5] = ["error", "warn", "info", "debug", "trace"];
    /// At most this many letters are wrong; two swapped letters count as one.
    const MISSPELT: usize = 1;
    let word = filter.trim().to_ascii_lowercase();
    let is_one = |level: &&str| strsim::osa_distance(&word, level) <= MISSPELT;
    match LEVELS.into_iter().find(is_one) {
        Some(near) if near != word => Err(EngineError::invalid_argument(
            At::other("filter"),
            format!("{filter:?} is no level; did you mean {near}?"),
        )),
        _ => Ok(()),
    }
}

/// Sends control requests to the workers of an endpoint, each by its id.
#[derive(Debug)]
pub struct ControlClient {
    client: Client<ControlRequest, ControlReply>,
}

impl ControlClient {
    /// Creates a client of the workers that serve `generate`. It follows discovery until it is dropped.
    ///
    /// # Errors
    /// `InvalidArgument` if the name has no sibling.
    pub fn try_new(runtime: &Runtime, generate: &EndpointName) -> Result<Self, EngineError> {
        let name = generate.sibling(endpoints::CONTROL)?;
        let client = runtime.endpoint(name).client();
        Ok(Self { client })
    }

    /// Waits until there is a worker; returns all known workers.
    ///
    /// # Errors
    /// `Unavailable` if no worker appeared in time.
    pub async fn workers(&self, limit: Duration) -> Result<Vec<InstanceId>, EngineError> {
        self.client.wait_for_instances(limit).await?;
        let records = self.client.instances();
        Ok(records.iter().map(|record| record.instance).collect())
    }

    /// Sends a request to one worker.
    ///
    /// # Errors
    /// The worker's refusal or failure, or a failure of the call.
    pub async fn ask(
        &self,
        worker: InstanceId,
        request: ControlRequest,
    ) -> Result<ControlReply, EngineError> {
        let ctx = RequestContext::new("control");
        let mut replies = self.client.direct(worker, request, ctx).await?;
        replies.next().await.unwrap_or_else(|| {
            let message = "the worker gave no reply";
            Err(EngineError::new(ErrorKind::StreamIncomplete, message))
        })
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn every_operation_takes_what_its_example_says() {
        for operation in OPERATIONS {
            let fields = serde_json::from_str(operation.takes).unwrap();
            let request = request_of(&operation.op.replace('_', "-"), fields).unwrap();
            assert_eq!(request.op(), operation.op);
        }
        request_of("sleep", json!({})).unwrap();
    }

    #[test]
    fn what_is_none_is_refused_with_the_nearest() {
        let error = request_of("clear-cache", json!({})).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NotFound);
        let message = error.message();
        assert!(
            message.contains("did you mean clear_prefix_cache?"),
            "{message}"
        );
        for (op, fields) in [
            ("unload_adapter", json!({"nmae": "french"})),
            ("sleep", json!({"level": "deep"})),
            ("wake", json!(["now"])),
        ] {
            let error = request_of(op, fields).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
        }
    }

    #[cfg(feature = "cli")]
    #[test]
    fn a_misspelt_level_is_not_taken_for_a_target() {
        let error = check_level("debgu").unwrap_err();
        assert!(error.message().contains("did you mean debug?"), "{error}");
        for filter in [
            "DEBUG",
            "off",
            "h2",
            "hyper",
            "genset_runtime",
            "info,hyper=warn",
        ] {
            check_level(filter).unwrap();
        }
    }
}
