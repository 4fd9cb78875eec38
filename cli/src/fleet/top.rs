//! `genset top`: shows the workers of a fleet and their current load.

use std::collections::BTreeMap;
use std::io::Write as _;
use std::time::Duration;

use clap::Args;
use crossterm::{cursor, execute, queue, style, terminal};
use futures_util::future::join_all;
use genset_backend_common::{EngineError, handles::Load};
use genset_runtime::{LoadClient, ModelDirectory, Runtime, Signals, WorkerLoad};
use serde_json::{Value, json};
use unicode_width::UnicodeWidthChar as _;

use super::{FAILED, FleetArgs, error_in_json, table, with_runtime};
use crate::input::{can_draw, escaped, print};

/// How wide the bar of a full KV cache is, in characters.
const BAR_WIDTH: u64 = 10;

#[derive(Debug, Args)]
pub(crate) struct TopArgs {
    /// Seconds between two looks
    #[arg(long, value_name = "SECONDS", default_value = "1", value_parser = clap::value_parser!(u32).range(1..=3600))]
    interval: u32,
    /// Look once, and end; the default where standard output is no terminal, or a dumb one (TERM)
    #[arg(long)]
    once: bool,
    /// Look once, and print JSON
    #[arg(long)]
    json: bool,
    #[command(flatten, next_help_heading = "Network")]
    pub(crate) fleet: FleetArgs,
}

/// A worker of a model, and its answer about its load.
#[derive(Debug)]
struct Seen {
    model: String,
    told: WorkerLoad,
}

/// Shows the fleet until Ctrl-C or SIGTERM, or once. The exit code of a single look says whether every worker answered.
///
/// # Errors
/// A network setting is wrong, discovery is unreachable, or the terminal cannot be written to.
pub(crate) fn top(args: &TopArgs) -> Result<u8, EngineError> {
    with_runtime(&args.fleet.network, async |runtime| {
        let fleet = Fleet::find(runtime).await?;
        if !args.json && !args.once && can_draw() {
            watch(&fleet, Duration::from_secs(args.interval.into())).await?;
            return Ok(0);
        }
        let seen = fleet.look().await;
        print(&match args.json {
            true => format!("{:#}\n", seen.iter().map(in_json).collect::<Value>()),
            false => escaped(&in_words(&seen)),
        });
        let did_all = seen.iter().all(|seen| seen.told.load.is_ok());
        Ok(if did_all { 0 } else { FAILED })
    })
}

/// Asks every worker for its load. Returns the number of workers, and the ids of those without an answer, by reason.
///
/// # Errors
/// Discovery is unreachable.
pub(crate) async fn unanswered(
    runtime: &Runtime,
) -> Result<(usize, BTreeMap<String, Vec<String>>), EngineError> {
    let seen = Fleet::find(runtime).await?.look().await;
    Ok((seen.len(), reasons(&seen)))
}

/// The reasons why workers did not answer, with their ids.
fn reasons(seen: &[Seen]) -> BTreeMap<String, Vec<String>> {
    let mut reasons: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for Seen { told, .. } in seen {
        if let Err(error) = &told.load {
            let workers = reasons.entry(error.to_string()).or_default();
            workers.push(told.worker.to_string());
        }
    }
    reasons
}

/// The models that discovery knows, and the client that asks their workers.
struct Fleet {
    directory: ModelDirectory,
    loads: LoadClient,
}

impl Fleet {
    async fn find(runtime: &Runtime) -> Result<Self, EngineError> {
        Ok(Self {
            directory: super::models::directory(runtime).await?,
            loads: LoadClient::new(runtime),
        })
    }

    /// Asks every worker for its load, all at once.
    async fn look(&self) -> Vec<Seen> {
        let models = self.directory.subscribe().borrow().clone();
        let looks = models
            .iter()
            .map(async |(name, model)| (name, self.loads.of_model(model).await));
        let mut seen = Vec::new();
        for (name, told) in join_all(looks).await {
            seen.extend(told.into_iter().map(|told| Seen {
                model: name.clone(),
                told,
            }));
        }
        seen
    }
}

/// Redraws the fleet at every interval on the alternate screen, and restores the screen at the end.
async fn watch(fleet: &Fleet, interval: Duration) -> Result<(), EngineError> {
    let mut signals = Signals::install().map_err(|error| {
        EngineError::internal(format!("signals cannot be handled: {error}")).with_source(error)
    })?;
    crate::signals::take_both();
    let mut out = std::io::stdout();
    execute!(out, terminal::EnterAlternateScreen, cursor::Hide).map_err(unwritable)?;
    let shown = tokio::select! {
        shown = draw_on(fleet, interval) => shown,
        _ = signals.next() => Ok(()),
    };
    execute!(out, cursor::Show, terminal::LeaveAlternateScreen).map_err(unwritable)?;
    shown
}

async fn draw_on(fleet: &Fleet, interval: Duration) -> Result<(), EngineError> {
    let mut looks = tokio::time::interval(interval);
    loop {
        looks.tick().await;
        let text = escaped(&in_words(&fleet.look().await));
        draw(&text).map_err(unwritable)?;
    }
}

/// The beginning of a line that fits the columns.
fn cut(line: &str, columns: usize) -> &str {
    let mut width = 0;
    let beyond = line.char_indices().find(|(_, sign)| {
        width += sign.width().unwrap_or(0);
        width > columns
    });
    beyond.map_or(line, |(end, _)| line.split_at(end).0)
}

/// Draws what fits the screen.
fn draw(text: &str) -> std::io::Result<()> {
    let mut out = std::io::stdout().lock();
    let (columns, rows) = terminal::size()?;
    queue!(out, cursor::MoveTo(0, 0))?;
    for line in fitting(text, rows.saturating_sub(1).into()) {
        queue!(
            out,
            style::Print(cut(&line, columns.into())),
            terminal::Clear(terminal::ClearType::UntilNewLine),
            cursor::MoveToNextLine(1)
        )?;
    }
    queue!(out, terminal::Clear(terminal::ClearType::FromCursorDown))?;
    out.flush()
}

/// The lines that fit so many rows. If not all do, the last one says so.
fn fitting(text: &str, rows: usize) -> Vec<String> {
    let mut lines: Vec<String> = text.lines().map(str::to_owned).collect();
    if lines.len() > rows {
        let cut = lines.split_off(rows.saturating_sub(1));
        lines.push(format!(
            "... and {} lines more: --once prints all",
            cut.len()
        ));
    }
    lines
}

fn unwritable(error: std::io::Error) -> EngineError {
    EngineError::internal(format!("the terminal cannot be written to: {error}")).with_source(error)
}

fn in_words(seen: &[Seen]) -> String {
    if seen.is_empty() {
        return super::models::NONE_SERVED.into();
    }
    let rows: Vec<[String; 8]> = seen.iter().map(row).collect();
    let total = |of: fn(&Load) -> u32| -> u64 {
        let loads = seen.iter().filter_map(|seen| seen.told.load.as_ref().ok());
        loads.map(|load| u64::from(of(load))).sum()
    };
    let mut text = format!(
        "{} worker{}, {} requests running, {} waiting\n\n{}",
        seen.len(),
        if seen.len() == 1 { "" } else { "s" },
        total(|load| load.running_requests),
        total(|load| load.waiting_requests),
        table(
            [
                "MODEL", "ROLE", "WORKER", "RUNNING", "WAITING", "HITS", "TTFT", "KV CACHE",
            ],
            &rows
        )
    );
    for (reason, workers) in reasons(seen) {
        let workers = workers.join(" ");
        text.push_str(&format!("\n{workers} gave no answer: {reason}\n"));
    }
    text
}

fn row(Seen { model, told }: &Seen) -> [String; 8] {
    let dash = || "-".to_owned();
    let [running, waiting, hits, ttft, kv] = match &told.load {
        Err(_) => [dash(), dash(), dash(), dash(), "gave no answer".into()],
        Ok(load) => [
            load.running_requests.to_string(),
            load.waiting_requests.to_string(),
            hits(load).unwrap_or_else(dash),
            ttft(load).unwrap_or_else(dash),
            bar(load),
        ],
    };
    [
        model.clone(),
        told.role.to_string(),
        told.worker.to_string(),
        running,
        waiting,
        hits,
        ttft,
        kv,
    ]
}

/// A worker's load in one line.
pub(super) fn load_in_words(load: &Load) -> String {
    let (running, waiting) = (load.running_requests, load.waiting_requests);
    let mut text = format!(
        "{running} running, {waiting} waiting, KV cache {}",
        bar(load)
    );
    if let Some(hits) = hits(load) {
        text.push_str(&format!(", hits {hits}"));
    }
    if let Some(ttft) = ttft(load) {
        text.push_str(&format!(", TTFT {ttft}"));
    }
    text
}

/// The cached share of the recent prompts; `None` if there were none.
fn hits(load: &Load) -> Option<String> {
    let prompts = u128::from(load.recent_prompt_tokens);
    let percent = (u128::from(load.recent_cached_tokens) * 100).checked_div(prompts)?;
    Some(format!("{percent} %"))
}

/// The median time to the first token of the recent requests.
fn ttft(load: &Load) -> Option<String> {
    let after_us = load.recent_ttft_us?;
    Some(match after_us {
        0..10_000 => format!("{}.{} ms", after_us / 1000, after_us / 100 % 10),
        10_000..10_000_000 => format!("{} ms", after_us / 1000),
        _ => format!("{} s", after_us / 1_000_000),
    })
}

/// A bar for the KV cache's usage.
fn bar(load: &Load) -> String {
    let (used, total) = (
        load.kv_used_blocks.min(load.kv_total_blocks),
        load.kv_total_blocks,
    );
    if total == 0 {
        return "none".into();
    }
    let part = |of: u64| u128::from(used) * u128::from(of) / u128::from(total);
    let full = usize::try_from(part(BAR_WIDTH)).unwrap_or(0);
    let width = usize::try_from(BAR_WIDTH).unwrap_or(0);
    let bar = "#".repeat(full) + &".".repeat(width.saturating_sub(full));
    format!("{bar} {:>3} %  {used} of {total} blocks", part(100))
}

fn in_json(Seen { model, told }: &Seen) -> Value {
    json!({
        "model": model,
        "role": told.role.to_string(),
        "worker": told.worker.to_string(),
        "load": told.load.as_ref().ok(),
        "error": told.load.as_ref().err().map(error_in_json),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_cut_where_the_columns_end() {
        for (columns, expected) in [(1, ""), (2, "通"), (3, "通"), (5, "通义a"), (9, "通义ab")]
        {
            assert_eq!(cut("通义ab", columns), expected);
        }
    }

    #[test]
    fn lines_that_do_not_fit_are_counted() {
        let text = "one\ntwo\nthree\n";
        assert_eq!(fitting(text, 3), ["one", "two", "three"]);
        let cut = "... and 2 lines more: --once prints all";
        assert_eq!(fitting(text, 2), ["one", cut]);
    }

    #[test]
    fn what_recent_requests_were_like_is_said_where_there_were_any() {
        let idle = Load::default();
        assert_eq!((hits(&idle), ttft(&idle)), (None, None));
        assert_eq!(load_in_words(&idle), "0 running, 0 waiting, KV cache none");
        let shown = |recent_ttft_us, cached| {
            let load = Load {
                recent_ttft_us: Some(recent_ttft_us),
                recent_prompt_tokens: 300,
                recent_cached_tokens: cached,
                ..Load::default()
            };
            (hits(&load).unwrap(), ttft(&load).unwrap())
        };
        assert_eq!(shown(1_250, 0), ("0 %".into(), "1.2 ms".into()));
        assert_eq!(shown(25_999, 299), ("99 %".into(), "25 ms".into()));
        assert_eq!(shown(61_000_000, 300), ("100 %".into(), "61 s".into()));
    }
}
