//! Wire connections over NATS: no process needs an inbound port. The cargo feature `nats` enables it.
//!
//! Each process has one connection to NATS. A wire connection is a *virtual* connection over it: each end subscribes to its own
//! subject and publishes to the other's. The caller sends `Open` to its peer's listening subject with its own subject. The
//! peer answers `Accept` from a new subject; then both send data, and the last message is `Close`.
//!
//! - [`config`]: the user's settings and their checks; [`tls`]: certificates.
//! - [`session`]: the connection to NATS, and this process's subjects.
//! - [`message`]: the encoding of messages; [`flow`]: message numbers, windows, and detection of losses.
//! - [`stream`]: a virtual connection as a byte stream.
//!
//! # Message loss
//! NATS delivers a message at most once: a restarted server or a full buffer loses messages. Messages are numbered, so a loss
//! ends the virtual connection, as a reset ends a TCP connection, and its requests with `Disconnected`. A connection that lost
//! nothing in a server restart continues. A dead peer is detected as soon as anything is sent to it, since NATS reports that
//! nobody listens. The pings of the wire protocol detect a hung peer.

mod config;
mod flow;
mod message;
mod session;
mod stream;
mod tls;

use std::sync::Arc;

use async_nats::{Client, StatusCode, Subject, Subscriber};
use async_trait::async_trait;
use futures_util::StreamExt;
use genset_backend_common::{EngineError, ErrorKind};

pub use config::{NatsConfig, NatsCredentials, NatsTls};

use self::message::Message;
use self::session::Session;
use self::stream::Connection;
use super::config::WireConfig;
use super::transport::{Io, Listener, Transport};

/// The transport.
pub(super) struct Nats {
    session: Arc<Session>,
    has_secret: bool,
}

impl Nats {
    pub(super) fn try_new(config: NatsConfig, wire: &WireConfig) -> Result<Self, EngineError> {
        Ok(Self {
            session: Arc::new(Session::try_new(config)?),
            has_secret: wire.secret.is_some(),
        })
    }
}

#[async_trait]
impl Transport for Nats {
    fn name(&self) -> &'static str {
        "nats"
    }

    fn is_local(&self) -> bool {
        false
    }

    fn is_connected(&self) -> bool {
        self.session.is_connected()
    }

    async fn ready(&self) -> Result<(), EngineError> {
        let client = self.session.client().await;
        client.map_err(|error| cannot(&error))?;
        Ok(())
    }

    async fn dial(&self, location: &str) -> Result<Io, EngineError> {
        let listening = Session::listening_subject(location)
            .ok_or_else(|| cannot(&"that is no name of a process"))?;
        let session = &self.session;
        let client = session
            .connected_client()
            .await
            .map_err(|error| cannot(&error))?;
        let own = session.new_connection_subject();
        let subscribed = subscribe(session, client, &own).await;
        let mut subscriber = subscribed.map_err(|error| cannot(&error))?;
        let open = Message::Open {
            window: session.config().window_messages,
        };
        let published = publish(session, client, listening, &own, &open).await;
        published.map_err(|error| cannot(&error))?;
        let answer = subscriber
            .next()
            .await
            .ok_or_else(|| cannot(&"the client has ended"))?;
        if answer.status == Some(StatusCode::NO_RESPONDERS) {
            return Err(cannot(&"the process is not there"));
        }
        let accepted = Message::decode(&answer.payload).map_err(|error| cannot(&error.to_string()));
        match (accepted?, answer.reply) {
            (Message::Accept { window }, Some(peer)) if Session::is_connection_subject(&peer) => {
                let ours = (own, subscriber);
                Ok(connection(session, client, ours, (peer, window)))
            }
            (other, _) => Err(cannot(&format!("it answered with {other:?}"))),
        }
    }

    async fn listen(&self) -> Result<Box<dyn Listener>, EngineError> {
        let session = Arc::clone(&self.session);
        let client = session.client().await?.clone();
        let process = session.process();
        let subject = Session::listening_subject(process).ok_or_else(|| {
            EngineError::internal(format!("{process} should be the name of a process"))
        })?;
        let mut opens = subscribe(&session, &client, &subject).await?;
        let heard = hear_ourselves(&session, &client, &subject, &mut opens);
        tokio::time::timeout(session.config().connect_timeout, heard)
            .await
            .map_err(|_| {
                let problem = format!(
                    "what is published to {subject} does not come back; the user needs the right to publish and subscribe to genset.v1.wire.>"
                );
                session.unavailable(&problem)
            })??;
        if session.is_open_to_others() {
            tracing::warn!("{}", warning(self.has_secret));
        }
        Ok(Box::new(Accepting {
            session,
            client,
            opens,
            opening: None,
        }))
    }
}

/// The error of a process that cannot be called.
fn cannot(problem: &dyn std::fmt::Display) -> EngineError {
    let message = format!("cannot connect to the worker over NATS: {problem}");
    EngineError::new(ErrorKind::CannotConnect, message)
}

/// The warning about a NATS server without authentication: what anyone who reaches it can do to this worker.
fn warning(has_secret: bool) -> &'static str {
    if has_secret {
        "anybody who reaches NATS can read and change this worker's requests and answers: the secret proves only who began a \
         connection; make NATS require credentials"
    } else {
        "anybody who reaches NATS can call this worker, and read its requests and answers; make NATS require credentials, and \
         give every process the same --wire-secret-file"
    }
}

/// Waits until the server delivers messages published to `subject`: only then may others learn of it.
async fn hear_ourselves(
    session: &Session,
    client: &Client,
    subject: &Subject,
    subscriber: &mut Subscriber,
) -> Result<(), EngineError> {
    publish(session, client, subject.clone(), subject, &Message::Probe).await?;
    while let Some(message) = subscriber.next().await {
        if Message::decode(&message.payload) == Ok(Message::Probe) {
            return Ok(());
        }
    }
    Err(session.unavailable("the client has ended"))
}

async fn subscribe(
    session: &Session,
    client: &Client,
    subject: &Subject,
) -> Result<Subscriber, EngineError> {
    let subscribed = client.subscribe(subject.clone()).await;
    subscribed.map_err(|error| session.unavailable(&error.to_string()))
}

async fn publish(
    session: &Session,
    client: &Client,
    to: Subject,
    reply: &Subject,
    message: &Message,
) -> Result<(), EngineError> {
    let published = client
        .publish_with_reply(to, reply.clone(), message.encode())
        .await;
    published.map_err(|error| session.unavailable(&error.to_string()))
}

fn connection(
    session: &Session,
    client: &Client,
    (own, subscriber): (Subject, Subscriber),
    (peer, peer_window): (Subject, u32),
) -> Io {
    let connection = Connection {
        client: client.clone(),
        subscriber,
        own,
        peer,
        window: session.config().window_messages,
        peer_window,
        max_message_bytes: session.config().max_message_bytes,
    };
    connection.into_io()
}

struct Accepting {
    session: Arc<Session>,
    client: Client,
    opens: Subscriber,
    /// The caller to answer next: stored here, so that an interrupted `accept` loses nothing.
    opening: Option<Opening>,
}

/// The subject of a caller and its window.
type Opening = (Subject, u32);

impl Accepting {
    async fn answer(&self, opening: Opening) -> Result<Io, EngineError> {
        let own = self.session.new_connection_subject();
        let subscriber = subscribe(&self.session, &self.client, &own).await?;
        let accept = Message::Accept {
            window: self.session.config().window_messages,
        };
        let peer = opening.0.clone();
        publish(&self.session, &self.client, peer, &own, &accept).await?;
        let ours = (own, subscriber);
        Ok(connection(&self.session, &self.client, ours, opening))
    }
}

/// The caller that sent the message, if it opens a connection.
fn opening_of(message: async_nats::Message) -> Option<Opening> {
    match (Message::decode(&message.payload), message.reply) {
        (Ok(Message::Open { window }), Some(peer)) if Session::is_connection_subject(&peer) => {
            Some((peer, window))
        }
        (message, peer) => {
            tracing::debug!(?message, ?peer, "a message that opens no connection");
            None
        }
    }
}

#[async_trait]
impl Listener for Accepting {
    fn location(&self) -> String {
        self.session.process().to_owned()
    }

    async fn accept(&mut self) -> Option<Io> {
        loop {
            if self.opening.is_none() {
                self.opening = opening_of(self.opens.next().await?);
            }
            if let Some(opening) = self.opening.clone() {
                let answered = self.answer(opening).await;
                self.opening = None;
                match answered {
                    Ok(io) => return Some(io),
                    Err(error) => tracing::warn!(%error, "a caller cannot be answered"),
                }
            }
        }
    }
}
