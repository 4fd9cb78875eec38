//! A fleet: starts workers and frontends that meet in the same way.

use tokio::process::Command;

use crate::meeting::Meeting;
use crate::support::{Server, genset, soon, until};
use crate::worker::Worker;

/// The silence after which the processes of a test are considered dead. Longer than the default, because a busy machine is not a
/// fault.
const PEER_TIMEOUT: &str = "--peer-timeout=5";

pub(crate) struct Fleet<M> {
    pub(crate) meeting: M,
}

impl<M: Meeting> Fleet<M> {
    pub(crate) fn new(meeting: M) -> Self {
        Self { meeting }
    }

    fn command(&self, parts: &[&str; 4], words: &[&str]) -> Command {
        let mut command = genset(parts);
        command.args(self.meeting.flags()).arg(PEER_TIMEOUT);
        command.args(words);
        command
    }

    /// The command of a worker of the engine that `output` names.
    pub(crate) fn worker_command(&self, output: &str, words: &[&str]) -> Command {
        self.command(&["run", "in=dyn", output, "--status-port=0"], words)
    }

    pub(crate) fn frontend_command(&self, words: &[&str]) -> Command {
        self.command(&["run", "in=http", "out=dyn", "--http-port=0"], words)
    }

    /// Starts a worker of the sample engine and waits until it is ready.
    pub(crate) async fn worker(&self, words: &[&str]) -> Worker {
        Worker::ready(self.worker_command("out=sample", words)).await
    }

    /// Starts a worker of the candle engine with the built-in model and waits until it is ready.
    pub(crate) async fn candle(&self, words: &[&str]) -> Worker {
        Worker::ready(self.worker_command("out=candle", words)).await
    }

    /// Starts two workers at once.
    pub(crate) async fn two_workers(&self, words: &[&str]) -> [Worker; 2] {
        let (one, two) = tokio::join!(self.worker(words), self.worker(words));
        [one, two]
    }

    /// Starts a frontend, which may not know any model yet.
    pub(crate) async fn frontend(&self, words: &[&str]) -> Server {
        Server::spawn(self.frontend_command(words)).await
    }

    /// Starts a frontend and waits until every worker has answered one of its requests.
    pub(crate) async fn frontend_of(&self, workers: &[&Worker]) -> Server {
        let frontend = self.frontend(&[]).await;
        until_listed(&frontend).await;
        until_all_answer(&frontend, workers).await;
        frontend
    }
}

/// The value of a frontend's metric, summed over its labels.
pub(crate) async fn metric(frontend: &Server, name: &str) -> f64 {
    let text = frontend.get("/metrics").await.body;
    let samples = text.lines().filter(|line| line.starts_with(name));
    let values = samples.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok());
    values.sum::<f64>() + 0.0 // The sum of nothing is -0.
}

/// Whether the frontend lists the model.
pub(crate) async fn is_listed(frontend: &Server) -> bool {
    frontend
        .get("/v1/models")
        .await
        .body
        .contains("\"tiny-chat\"")
}

pub(crate) async fn until_listed(frontend: &Server) {
    until(async || is_listed(frontend).await).await;
}

pub(crate) async fn until_unlisted(frontend: &Server) {
    until(async || !is_listed(frontend).await).await;
}

/// Sends requests until every worker has answered one.
pub(crate) async fn until_all_answer(frontend: &Server, workers: &[&Worker]) {
    soon(async {
        for worker in workers {
            let before = worker.finished().await;
            while worker.finished().await == before {
                crate::load::ask(frontend.address).await.expect("an answer");
            }
        }
    })
    .await;
}
