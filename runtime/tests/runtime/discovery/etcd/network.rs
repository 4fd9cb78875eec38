//! A TCP proxy in front of a server, which can simulate network failures.

use std::sync::Arc;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio_util::task::{AbortOnDropHandle, TaskTracker};

/// The network. Dropping it breaks its connections.
pub(super) struct Network {
    endpoint: String,
    is_cut: Arc<watch::Sender<bool>>,
    /// Counts how often all connections were broken.
    breaks: Arc<watch::Sender<u64>>,
    _accept: AbortOnDropHandle<()>,
}

impl Network {
    /// A network in front of `target`, a host and port.
    pub(super) async fn to(target: String) -> Self {
        Self::at(TcpListener::bind("127.0.0.1:0").await.unwrap(), target)
    }

    /// As [`Self::to`], behind this listener.
    pub(super) fn at(listener: TcpListener, target: String) -> Self {
        let endpoint = format!("http://{}", listener.local_addr().unwrap());
        let is_cut = Arc::new(watch::Sender::new(false));
        let breaks = Arc::new(watch::Sender::new(0));
        let accept = accept(listener, target, Arc::clone(&is_cut), Arc::clone(&breaks));
        Self {
            endpoint,
            is_cut,
            breaks,
            _accept: AbortOnDropHandle::new(TaskTracker::new().spawn(accept)),
        }
    }

    pub(super) fn endpoint(&self) -> &str {
        &self.endpoint
    }

    /// From now on nothing passes in either direction, and neither end is notified.
    pub(super) fn cut(&self) {
        self.is_cut.send_replace(true);
    }

    pub(super) fn heal(&self) {
        self.is_cut.send_replace(false);
    }

    /// Breaks every current connection. New ones can be made.
    pub(super) fn break_connections(&self) {
        self.breaks.send_modify(|breaks| *breaks += 1);
    }
}

async fn accept(
    listener: TcpListener,
    target: String,
    is_cut: Arc<watch::Sender<bool>>,
    breaks: Arc<watch::Sender<u64>>,
) {
    let mut connections = JoinSet::new();
    loop {
        let (near, _) = listener.accept().await.unwrap();
        let (target, is_cut, mut breaks) = (target.clone(), is_cut.subscribe(), breaks.subscribe());
        breaks.mark_unchanged();
        connections.spawn(async move {
            tokio::select! {
                // First, so that data held back by a cut does not pass when the network is broken and healed at once.
                biased;
                _ = breaks.changed() => {}
                () = connect(near, target, is_cut) => {}
            }
        });
    }
}

async fn connect(near: TcpStream, target: String, mut is_cut: watch::Receiver<bool>) {
    until_whole(&mut is_cut).await;
    let Ok(far) = TcpStream::connect(target).await else {
        return;
    };
    let (near_reader, near_writer) = near.into_split();
    let (far_reader, far_writer) = far.into_split();
    // The end of either side ends both.
    tokio::select! {
        () = pump(near_reader, far_writer, is_cut.clone()) => {}
        () = pump(far_reader, near_writer, is_cut) => {}
    }
}

async fn pump(
    mut from: impl AsyncReadExt + Unpin,
    mut to: impl AsyncWriteExt + Unpin,
    mut is_cut: watch::Receiver<bool>,
) {
    let mut buffer = vec![0; 64 << 10];
    loop {
        let Ok(count @ 1..) = from.read(&mut buffer).await else {
            return;
        };
        until_whole(&mut is_cut).await;
        if to.write_all(&buffer[..count]).await.is_err() {
            return;
        }
    }
}

async fn until_whole(is_cut: &mut watch::Receiver<bool>) {
    // The network itself may be gone.
    let _ = is_cut.wait_for(|is_cut| !is_cut).await;
}
