//! `in=batch:PATH`: a file of prompts, or a folder of such files, answered into `output.jsonl` beside them.
//!
//! Each answer is noted in [`Notes`] as it comes, in whatever order. When all have come they are written in the input's order,
//! and the notes are removed. A run that was interrupted finds its notes and goes on where it stood.

mod notes;
mod prompts;
mod tally;

use std::path::Path;
use std::time::Duration;

use futures_util::{StreamExt, stream};
use genset_backend_common::{CancelReason, EngineError, ErrorKind, RequestContext};
use genset_runtime::Signals;
use serde_json::{Map, Value};
use tokio::time::Instant;

use self::notes::Notes;
use self::prompts::{Prompt, Prompts};
use self::tally::Tally;
use super::question::{Answered, Asker};
use super::{Ending, note, print};

/// What the answers are written to, in the input's folder.
const OUTPUT: &str = "output.jsonl";

/// How often a prompt is sent while every worker is full, with pauses between that double.
const MAX_ATTEMPTS: u32 = 12;

/// The first of those pauses.
const FIRST_PAUSE: Duration = Duration::from_millis(50);

/// The longest of them.
const LONGEST_PAUSE: Duration = Duration::from_secs(10);

/// Answers every prompt at `path`, `concurrency` at a time. What a prompt failed with stands in its line.
///
/// # Errors
/// When the input cannot be read, the output cannot be written, or prompts have no answer. What was answered stays noted.
pub(super) async fn run(
    path: &Path,
    concurrency: usize,
    asker: &Asker,
    signals: &mut Signals,
) -> Result<Ending, EngineError> {
    let mut prompts = Prompts::open(path)?;
    let output = prompts.folder().join(OUTPUT);
    let total = prompts.count();
    let mut notes = Notes::open(&output, prompts.fingerprint(), total)?;
    if notes.count() > 0 {
        note(format_args!(
            "{} of {total} prompts were answered before; going on with the others",
            notes.count()
        ));
    }
    let mut tally = Tally::new(total - notes.count());
    let ctx = RequestContext::new("batch");
    let unanswered: Vec<usize> = (0..total).filter(|index| !notes.has(*index)).collect();
    let asked = stream::iter(unanswered).map(|index| {
        let (prompt, ctx) = (prompts.read(index), ctx.clone());
        async move { Ok::<_, EngineError>((index, line_of(asker, &ctx, prompt?).await)) }
    });
    let mut asked = std::pin::pin!(asked.buffer_unordered(concurrency));
    let mut ticks = tokio::time::interval(tally::INTERVAL);
    loop {
        tokio::select! {
            biased;
            _ = signals.next() => {
                ctx.cancel(CancelReason::Client);
                note(format_args!(
                    "stopped: {} of {total} prompts are answered; the same command goes on from there",
                    notes.count()
                ));
                return Ok(Ending::Signalled);
            }
            _ = ticks.tick() => tally.show(),
            next = asked.next() => match next {
                None => break,
                Some(next) => {
                    let (index, line) = next?;
                    tally.count(&line);
                    notes.add(index, &line)?;
                }
            },
        }
    }
    let failed = notes.finish(&output)?;
    print(&tally.summary(&output));
    if failed == 0 {
        return Ok(Ending::Done);
    }
    let shown = output.display();
    let problem =
        format!("{failed} of {total} prompts have no answer; their lines in {shown} say why");
    Err(EngineError::internal(problem))
}

/// The line of the output for a prompt.
async fn line_of(asker: &Asker, ctx: &RequestContext, prompt: Prompt) -> Map<String, Value> {
    let begun = Instant::now();
    let answered = match prompt.fields {
        Ok(fields) => ask_until_there_is_room(asker, ctx, &prompt.text, &fields).await,
        Err(error) => Err(error),
    };
    let mut line = Map::new();
    line.insert("text".into(), prompt.text.into());
    match answered {
        Ok(answered) => {
            line.insert("response".into(), answered.text.into());
            line.insert("tokens_in".into(), answered.usage.prompt_tokens.into());
            line.insert("tokens_out".into(), answered.usage.completion_tokens.into());
        }
        Err(error) => {
            line.insert("error".into(), error.to_string().into());
        }
    }
    let elapsed_ms = u64::try_from(begun.elapsed().as_millis()).unwrap_or(u64::MAX);
    line.insert("elapsed_ms".into(), elapsed_ms.into());
    line
}

/// Asks, and asks again while every worker is full: a batch has time.
async fn ask_until_there_is_room(
    asker: &Asker,
    ctx: &RequestContext,
    text: &str,
    fields: &Map<String, Value>,
) -> Result<Answered, EngineError> {
    let mut pause = FIRST_PAUSE;
    for _ in 1..MAX_ATTEMPTS {
        match asker.ask(ctx, text, fields).await {
            Err(error) if error.kind() == ErrorKind::Overloaded => {
                let wanted = error.details().retry_after.unwrap_or_default();
                tokio::time::sleep(wanted.clamp(pause, LONGEST_PAUSE)).await;
                pause = (pause * 2).min(LONGEST_PAUSE);
            }
            answered => return answered,
        }
    }
    asker.ask(ctx, text, fields).await
}
