//! [`Running`]: a request whose stream is being read. The kit reads streams only here, so this checks what must hold for every
//! item.

use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt;
use genset_backend_common::{EngineError, Output, OutputStream, RequestContext};

use crate::answer::{Answer, Generated};
use crate::check::{Stop, fail};
use crate::rules::Reader;
use crate::transcript::Recorder;
use crate::trial::Trial;

/// A request whose stream is being read.
pub struct Running {
    /// Its context: cancel it here.
    pub ctx: RequestContext,
    trial: Trial,
    outputs: OutputStream,
    reader: Reader,
    left: Left,
}

/// Records a stream that is dropped before its end.
struct Left {
    recorder: Arc<Recorder>,
    request: String,
    is_over: bool,
}

impl Drop for Left {
    fn drop(&mut self) {
        if !self.is_over {
            let dropped = || "the stream was dropped".to_owned();
            self.recorder.note(Some(&self.request), dropped);
        }
    }
}

impl Running {
    pub(crate) fn new(
        trial: Trial,
        ctx: RequestContext,
        outputs: OutputStream,
        reader: Reader,
    ) -> Self {
        let left = Left {
            recorder: Arc::clone(trial.recorder()),
            request: ctx.id().to_owned(),
            is_over: false,
        };
        Self {
            ctx,
            trial,
            outputs,
            reader,
            left,
        }
    }

    /// Checks an item that was read.
    fn look_at(&mut self, item: Option<&Result<Output, EngineError>>) {
        self.trial.recorder().item(&self.ctx, item);
        self.left.is_over |= !matches!(item, Some(Ok(output)) if !output.is_terminal());
        if let Some(Ok(output)) = item {
            self.trial.note_served();
            self.reader.judge(output, self.trial.breaches());
            if output.is_terminal() {
                self.trial.read_kv_events();
            }
        }
    }

    /// The next item; `None` after the end.
    ///
    /// # Errors
    /// Fails if none comes in time.
    pub async fn next(&mut self) -> Result<Option<Result<Output, EngineError>>, Stop> {
        let limit = self.trial.limits().call;
        self.next_within(limit).await
    }

    /// As [`Self::next`], with its own limit.
    ///
    /// # Errors
    /// As [`Self::next`].
    pub(crate) async fn next_within(
        &mut self,
        limit: Duration,
    ) -> Result<Option<Result<Output, EngineError>>, Stop> {
        let what = "the next item of the stream";
        let item = self.trial.within(what, limit, self.outputs.next()).await?;
        self.look_at(item.as_ref());
        Ok(item)
    }

    /// Reads until at least `count` tokens have arrived; returns them.
    ///
    /// # Errors
    /// Fails if the stream ends first.
    pub async fn read_tokens(&mut self, count: usize) -> Result<Generated, Stop> {
        let mut read = Generated::default();
        while read.len() < count {
            match self.next().await? {
                Some(Ok(output @ (Output::Tokens(_) | Output::Text(_)))) => read.push(&output),
                other => fail!(
                    "the stream ended after {} of {count} tokens: {other:?}",
                    read.len()
                ),
            }
        }
        Ok(read)
    }

    /// Reads to the end, and polls once after it.
    ///
    /// # Errors
    /// Fails if an item does not arrive in time.
    pub async fn finish(self) -> Result<Answer, Stop> {
        let limit = self.trial.limits().call;
        self.finish_within(limit).await
    }

    /// As [`Self::finish`], with its own limit for each item.
    ///
    /// # Errors
    /// As [`Self::finish`].
    pub async fn finish_within(mut self, limit: Duration) -> Result<Answer, Stop> {
        let mut items = Vec::new();
        let trial = self.trial.clone();
        while let Some(item) = trial
            .within("the next item of the stream", limit, self.outputs.next())
            .await?
        {
            self.look_at(Some(&item));
            items.push(item);
        }
        let is_fused = trial
            .within("a poll past the end", limit, self.outputs.next())
            .await?
            .is_none();
        Ok(Answer {
            items,
            violation: self.outputs.violation(),
            is_fused,
        })
    }

    /// The stream itself, for checks that drop or move it.
    pub fn into_outputs(mut self) -> OutputStream {
        self.left.is_over = true;
        self.outputs
    }
}

genset_backend_common::debug_as!(|it| Running { ctx: it.ctx, .. });
