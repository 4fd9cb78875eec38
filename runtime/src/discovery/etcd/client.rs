//! [`Client`]: one etcd server over gRPC. [`super::session`] chooses the server and decides what a failure means.

use std::time::Duration;

use axum::http::uri::PathAndQuery;
use futures_util::stream;
use prost::Message;
use tokio::sync::mpsc;
use tonic::client::Grpc;
use tonic::metadata::{Ascii, MetadataValue};
use tonic::transport::{Certificate, Channel, ClientTlsConfig, Endpoint, Identity};
use tonic::{Request, Status, Streaming};
use tonic_prost::ProstCodec;

use super::config::{EtcdConfig, EtcdCredentials, EtcdTls};
use super::protocol::{
    AuthenticateRequest, Call, LeaseKeepAliveRequest, LeaseKeepAliveResponse, WatchRequest,
    WatchResponse,
};

/// Idle time after which a connection is probed. Servers close connections that probe more often than every 5 s.
const PING_INTERVAL: Duration = Duration::from_secs(6);

/// The largest message we accept: all entries under a prefix arrive in one.
const MAX_MESSAGE_BYTES: usize = 256 << 20;

/// How etcd refuses credentials while it requires none.
const NO_CREDENTIALS_NEEDED: &str = "etcdserver: authentication is not enabled";

/// The most requests that wait to be sent in a [`Conversation`]. At this number, the server counts as hung.
const BACKLOG_REQUESTS: usize = 16;

/// A connection to one server, made on first use. Clones share it.
#[derive(Clone)]
pub(super) struct Client {
    channel: Channel,
    /// Our credentials, if the server asks for them.
    token: Option<MetadataValue<Ascii>>,
}

impl Client {
    /// Creates a client of one endpoint. Must be called within a runtime; does no I/O.
    ///
    /// # Errors
    /// If the certificates are unusable.
    pub(super) fn try_new(
        endpoint: &str,
        config: &EtcdConfig,
    ) -> Result<Self, tonic::transport::Error> {
        let mut endpoint = Endpoint::from_shared(endpoint.to_owned())?
            .connect_timeout(config.connect_timeout)
            .http2_keep_alive_interval(PING_INTERVAL)
            .keep_alive_timeout(config.request_timeout)
            .keep_alive_while_idle(true);
        if let Some(tls) = &config.tls {
            endpoint = endpoint.tls_config(tls_config(tls))?;
        }
        Ok(Self {
            channel: endpoint.connect_lazy(),
            token: None,
        })
    }

    /// Authenticates as a user; later requests are that user's. Does nothing while etcd requires no credentials.
    pub(super) async fn authenticate(
        &mut self,
        credentials: &EtcdCredentials,
    ) -> Result<(), Status> {
        let request = AuthenticateRequest {
            name: credentials.user.clone(),
            password: credentials.password.clone(),
        };
        let token = match self.call(request).await {
            Ok(answer) => answer.token.parse(),
            Err(status) if matches!(status.message(), NO_CREDENTIALS_NEEDED) => return Ok(()),
            Err(status) => return Err(status),
        };
        self.token = Some(token.map_err(|_| Status::internal("a token that is no header"))?);
        Ok(())
    }

    /// Sends a request that has one answer.
    pub(super) async fn call<Q: Call>(&self, request: Q) -> Result<Q::Answer, Status> {
        let mut grpc = self.ready().await?;
        let path = PathAndQuery::from_static(Q::METHOD);
        let codec = ProstCodec::<Q, Q::Answer>::default();
        let answer = grpc.unary(self.request(request), path, codec).await?;
        Ok(answer.into_inner())
    }

    /// Opens a stream of keep-alives with `request` as the first.
    pub(super) async fn lease_keep_alive(
        &self,
        request: LeaseKeepAliveRequest,
    ) -> Result<Conversation<LeaseKeepAliveRequest, LeaseKeepAliveResponse>, Status> {
        self.converse("/etcdserverpb.Lease/LeaseKeepAlive", request)
            .await
    }

    /// Opens a stream of changes with `request` as the first.
    pub(super) async fn watch(
        &self,
        request: WatchRequest,
    ) -> Result<Conversation<WatchRequest, WatchResponse>, Status> {
        self.converse("/etcdserverpb.Watch/Watch", request).await
    }

    async fn converse<Q, A>(
        &self,
        method: &'static str,
        first: Q,
    ) -> Result<Conversation<Q, A>, Status>
    where
        Q: Message + 'static,
        A: Message + Default + 'static,
    {
        let (requests, mut outgoing) = mpsc::channel(BACKLOG_REQUESTS);
        let mut grpc = self.ready().await?;
        let path = PathAndQuery::from_static(method);
        let codec = ProstCodec::<Q, A>::default();
        // The server sends nothing, not even headers, before the first request.
        requests.try_send(first).map_err(not_taken)?;
        let outgoing = stream::poll_fn(move |cx| outgoing.poll_recv(cx));
        let answers = grpc
            .streaming(self.request(outgoing), path, codec)
            .await?
            .into_inner();
        Ok(Conversation { requests, answers })
    }

    async fn ready(&self) -> Result<Grpc<Channel>, Status> {
        let mut grpc = Grpc::new(self.channel.clone()).max_decoding_message_size(MAX_MESSAGE_BYTES);
        let ready = grpc.ready().await;
        ready.map_err(|error| Status::from_error(error.into()))?;
        Ok(grpc)
    }

    fn request<T>(&self, message: T) -> Request<T> {
        let mut request = Request::new(message);
        let headers = request.metadata_mut();
        // A server that has lost its leader then reports it instead of sending stale data.
        headers.insert("hasleader", MetadataValue::from_static("true"));
        if let Some(token) = &self.token {
            headers.insert("token", token.clone());
        }
        request
    }
}

/// A stream of requests and a stream of answers. Dropping it ends both.
pub(super) struct Conversation<Q, A> {
    requests: mpsc::Sender<Q>,
    answers: Streaming<A>,
}

impl<Q, A> Conversation<Q, A> {
    /// Sends a request, without waiting.
    ///
    /// # Errors
    /// If the conversation has ended, or the server has read nothing for a long time.
    pub(super) fn send(&self, request: Q) -> Result<(), Status> {
        self.requests.try_send(request).map_err(not_taken)
    }

    /// The next answer; `None` after the server has ended the conversation.
    ///
    /// # Cancel safety
    /// Dropping the future loses no answer.
    pub(super) async fn next(&mut self) -> Result<Option<A>, Status> {
        self.answers.message().await
    }
}

fn not_taken<Q>(error: mpsc::error::TrySendError<Q>) -> Status {
    match error {
        mpsc::error::TrySendError::Full(_) => Status::unavailable("the server takes no requests"),
        mpsc::error::TrySendError::Closed(_) => Status::unavailable("the connection ended"),
    }
}

fn tls_config(tls: &EtcdTls) -> ClientTlsConfig {
    let mut config = ClientTlsConfig::new().ca_certificate(Certificate::from_pem(&tls.ca_pem));
    if let Some(identity) = &tls.identity {
        config = config.identity(Identity::from_pem(
            &identity.certificate_pem,
            &identity.key_pem,
        ));
    }
    if let Some(name) = &tls.server_name {
        config = config.domain_name(name);
    }
    config
}
