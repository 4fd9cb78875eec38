//! `in=batch:PATH`: a file of prompts or of requests in OpenAI's batch format, or a folder of such files, answered into
//! `output.jsonl` beside them.
//!
//! Notes each answer in [`BatchNotes`] as it arrives, in any order. When all have arrived, writes them in the input's order and
//! removes the notes. An output without notes belongs to a finished run and is not overwritten. A run that was interrupted finds
//! its notes and resumes. So does one in which no worker had room for some prompts, or that lost its engine: its notes stay.

mod line;
mod prompts;
mod tally;

use std::fmt::Display;
use std::io::Write;
use std::path::{Path, PathBuf};

use futures_util::{StreamExt, stream};
use genset_backend_common::{CancelReason, EngineError, ErrorKind, RequestContext};
use genset_frontend::LocalFrontend;
use genset_frontend::batch::{BatchNotes, Pauses, SeenModels, answer_line, write_whole};
use genset_frontend::model::Models;
use genset_runtime::Signals;
use serde_json::{Map, Value};
use tokio::time::Instant;

use self::line::{Line, LineSummary};
use self::prompts::{Prompt, Prompts};
use self::tally::Tally;
use super::question::{Answered, Asker};
use super::{Ending, note, print};

/// The file for the answers, in the input's folder.
const OUTPUT: &str = "output.jsonl";

/// The models that answer a batch.
#[derive(Debug)]
pub(super) struct Asked {
    /// Answers prompts.
    pub(super) asker: Asker,
    /// An error if the asker may be another model than intended.
    pub(super) is_chosen: Result<(), EngineError>,
    /// Answers requests, which name their model.
    pub(super) routes: LocalFrontend,
    /// The models that are served now.
    pub(super) models: Models,
    /// The models seen so far.
    pub(super) seen: SeenModels,
}

/// Checks whether [`run`] can begin, before there is an engine.
///
/// # Errors
/// When there is no input at `path`, or the output already exists.
pub(super) fn check(path: &Path) -> Result<(), EngineError> {
    let (folder, _) = prompts::files_at(path)?;
    let output = folder.join(OUTPUT);
    refuse_written(&output, &notes_of(&output))
}

/// Answers every prompt at `path`, `concurrency` at a time. The error of a failed prompt is in its line.
///
/// # Errors
/// When the input cannot be read, the output exists or cannot be written, or prompts have no answer. Notes of answered prompts
/// stay.
pub(super) async fn run(
    path: &Path,
    concurrency: usize,
    asked: &Asked,
    signals: &mut Signals,
) -> Result<Ending, EngineError> {
    let mut prompts = Prompts::open(path)?;
    let mut model = None;
    if prompts.name_no_model() {
        asked.is_chosen.clone()?;
        model = Some(asked.asker.model_name());
    }
    let output = prompts.folder().join(OUTPUT);
    let total = prompts.count();
    let path = notes_of(&output);
    refuse_written(&output, &path)?;
    let notes = BatchNotes::open(path, prompts.fingerprint(), total, model);
    let mut notes = notes.map_err(refused)?;
    if notes.count() > 0 {
        note(format_args!(
            "{} of {total} prompts were answered before; going on with the others",
            notes.count()
        ));
    }
    let mut tally = Tally::new(total - notes.count());
    // Others may send a batch to the same engine.
    let ctx = RequestContext::new(format!("batch.{:08x}", rand::random::<u32>()));
    let unanswered: Vec<usize> = (0..total).filter(|index| !notes.has(*index)).collect();
    let lines = stream::iter(unanswered).map(|index| {
        let (prompt, ctx) = (prompts.read(index), ctx.sibling(index + 1));
        async move {
            let begun = Instant::now();
            let line = line_of(asked, &ctx, index, prompt?).await;
            let line = line.map_err(unwritable)?;
            Ok::<_, EngineError>((index, line, begun.elapsed()))
        }
    });
    let mut lines = std::pin::pin!(lines.buffer_unordered(concurrency));
    let mut for_later = 0;
    let mut ticks = tokio::time::interval(tally::INTERVAL);
    loop {
        tokio::select! {
            biased;
            _ = signals.next() => {
                ctx.cancel(CancelReason::Client);
                note(format_args!(
                    "stopped: {} of {total} prompts are answered; the same command continues from there",
                    notes.count() - for_later
                ));
                return Ok(Ending::Signalled);
            }
            _ = ticks.tick() => tally.show(),
            next = lines.next() => match next {
                None => break,
                Some(next) => {
                    let (index, line, elapsed) = next?;
                    let summary = LineSummary::read(line.json.get()).map_err(unwritable)?;
                    tally.count(&summary, elapsed);
                    for_later += usize::from(line.is_for_later);
                    let noted = match line.is_for_later {
                        true => notes.add_for_later(index, &line.json),
                        false => notes.add(index, &line.json),
                    };
                    noted.map_err(refused)?;
                }
            },
        }
    }
    let failed = write_output(&mut notes, &output)?;
    if for_later == 0 {
        notes.remove().map_err(refused)?;
    }
    print(&tally.summary(&output));
    if failed == 0 {
        return Ok(Ending::Done);
    }
    let shown = output.display();
    let mut problem =
        format!("{failed} of {total} prompts have no answer; their lines in {shown} say why");
    if for_later > 0 {
        problem += &format!(
            "; no worker had room for {for_later} of them: the same command sends these again"
        );
    }
    Err(EngineError::internal(problem))
}

/// The path of the notes for an output.
fn notes_of(output: &Path) -> PathBuf {
    output.with_extension("jsonl.part")
}

/// Refuses an output without notes, which belongs to a finished run.
fn refuse_written(output: &Path, notes: &Path) -> Result<(), EngineError> {
    if !output.exists() || notes.exists() {
        return Ok(());
    }
    let problem = format!(
        "{} has the answers of an earlier run; move or remove it to begin anew",
        output.display()
    );
    Err(refused(problem))
}

/// Writes all answers in the order of their prompts, atomically. Returns the number of errors.
fn write_output(notes: &mut BatchNotes, output: &Path) -> Result<usize, EngineError> {
    let mut failed = 0;
    // Like any file of the user: the process's umask applies.
    let written = write_whole(output, 0o666, |out| {
        notes.each(|_, line| {
            failed += usize::from(LineSummary::read(line)?.is_failure());
            writeln!(out, "{line}")
        })
    });
    written.map_err(|error| refused(format!("{} cannot be written: {error}", output.display())))?;
    Ok(failed)
}

/// An error about the word `in`.
fn refused(problem: impl Display) -> EngineError {
    EngineError::invalid_argument("in", problem.to_string())
}

/// An error about a line that cannot be written as JSON.
fn unwritable(error: serde_json::Error) -> EngineError {
    EngineError::internal(format!("a line of the output: {error}"))
}

/// The line of the output for a prompt.
///
/// # Errors
/// When it cannot be written as JSON.
async fn line_of(
    asked: &Asked,
    ctx: &RequestContext,
    index: usize,
    prompt: Prompt,
) -> serde_json::Result<Line> {
    let begun = Instant::now();
    let (text, answered) = match prompt {
        Prompt::Request(line) => {
            let id = format!("batch_req_{}", index + 1);
            let (routes, seen) = (&asked.routes, &asked.seen);
            let line = answer_line(routes, seen, id, &line, Pauses::new()).await;
            return Line::try_new(&line, line.is_for_later());
        }
        Prompt::Bad(error) => (String::new(), Err(error)),
        Prompt::Question(text, fields) => {
            let answered = ask_patiently(asked, ctx, &text, &fields).await;
            (text, answered)
        }
    };
    let mut line = Map::new();
    line.insert("text".into(), text.into());
    let failure = answered.as_ref().err();
    let is_for_later = failure.is_some_and(|error| error.policy().is_migratable);
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
    Line::try_new(&line, is_for_later)
}

/// Asks, and retries while every worker is full or unreachable, because a batch has time. Also retries a prompt that was lost
/// with its worker, once.
async fn ask_patiently(
    asked: &Asked,
    ctx: &RequestContext,
    text: &str,
    fields: &Map<String, Value>,
) -> Result<Answered, EngineError> {
    let mut asker = asked.asker.clone();
    let mut pauses = Pauses::new();
    loop {
        asker.keep_up(&asked.models);
        let answered = asker.ask(ctx, text, fields).await;
        // As for requests in OpenAI's format.
        let goes_on = match &answered {
            Err(error) if error.kind() == ErrorKind::Disconnected => pauses.wait_after_loss().await,
            Err(error) if error.policy().is_migratable => {
                pauses.wait(error.details().retry_after).await
            }
            Ok(_) | Err(_) => false,
        };
        if !goes_on {
            return answered;
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::value::RawValue;

    use super::*;

    #[test]
    fn a_count_of_tokens_that_is_none_leaves_the_others() {
        for (usage, tokens) in [
            (r#"{"prompt_tokens":7,"completion_tokens":12.0}"#, (7, 0)),
            (r#"{"prompt_tokens":"7","completion_tokens":12}"#, (0, 12)),
            (
                r#"{"prompt_tokens":-1,"input_tokens":3,"output_tokens":null}"#,
                (3, 0),
            ),
            (r#"{"prompt_tokens":{},"completion_tokens":1e400}"#, (0, 0)),
        ] {
            let line =
                format!(r#"{{"response":{{"status_code":200,"body":{{"usage":{usage}}}}}}}"#);
            let summary = LineSummary::read(&line).unwrap();
            assert_eq!(summary.tokens(), tokens, "{usage}");
        }
    }

    #[test]
    fn an_answer_that_is_no_value_here_is_written_as_it_came() {
        let folder = tempfile::tempdir().unwrap();
        let mut notes = BatchNotes::open(folder.path().join("part"), "input", 2, None).unwrap();
        let answers = [200, 500].map(|status| {
            format!(
                r#"{{"response":{{"status_code":{status},"body":{{"a":1e400,"b":"\ud800","usage":{{"input_tokens":3}}}}}},"error":null}}"#
            )
        });
        let mut tally = Tally::new(2);
        for (index, answer) in answers.iter().enumerate() {
            let fields = RawValue::from_string(answer.clone()).unwrap();
            let line = Line::try_new(&fields, false).unwrap();
            let summary = LineSummary::read(line.json.get()).unwrap();
            assert_eq!(summary.tokens(), (3, 0));
            tally.count(&summary, std::time::Duration::ZERO);
            notes.add(index, &line.json).unwrap();
        }
        let output = folder.path().join("output.jsonl");
        assert!(tally.summary(&output).contains("2, 1 without an answer"));
        assert_eq!(write_output(&mut notes, &output).unwrap(), 1);
        let written = std::fs::read_to_string(&output).unwrap();
        assert_eq!(written, answers.join("\n") + "\n");
    }
}
