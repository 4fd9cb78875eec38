//! `in=text`: a chat on the terminal, with a line editor, history and a few commands. Without a terminal, or on a dumb one, it
//! reads plain lines.

use std::ffi::OsString;
use std::fs::{DirBuilder, File, Permissions};
use std::io::{self, BufRead, IsTerminal, Read};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crossterm::event::DisableBracketedPaste;
use crossterm::execute;
use genset_backend_common::{EngineError, ErrorKind};
use genset_frontend::model::Models;
use genset_runtime::Signals;
use parking_lot::Mutex;
use reedline::{
    DefaultPrompt, DefaultPromptSegment, EditCommand, EditMode, Emacs, FileBackedHistory,
    PromptEditMode, Reedline, ReedlineEvent, ReedlineRawEvent, Signal, ValidationResult, Validator,
};
use tokio::sync::mpsc;

use super::chat::{CUT, Chat, Turn};
use super::commands::obey;
use super::screen::Screen;
use super::stdin::{MAX_BYTES, text_of, unreadable};
use super::{BYTE_ORDER_MARK, Ending, can_draw, escaped, print};

/// Lines kept in the history file.
const HISTORY_LINES: usize = 1000;

/// The person's input at the prompt.
enum Line {
    Text(String),
    /// Ctrl-C at the prompt drops the line. `is_fresh` says that no other key was pressed in it.
    Dropped {
        is_fresh: bool,
    },
    End,
    Failed(EngineError),
}

/// Reads lines on its own thread, one per request: the editor must not hold the terminal while an answer is printed.
struct Lines {
    requests: mpsc::Sender<()>,
    lines: mpsc::Receiver<Line>,
}

impl Lines {
    fn start() -> std::io::Result<Self> {
        let (requests, mut wanted) = mpsc::channel(1);
        let (sender, lines) = mpsc::channel(1);
        std::thread::Builder::new()
            .name("line-editor".into())
            .spawn(move || {
                let mut source = Source::open();
                while let Some(()) = wanted.blocking_recv() {
                    if sender.blocking_send(source.read()).is_err() {
                        return;
                    }
                }
            })?;
        Ok(Self { requests, lines })
    }

    async fn next(&mut self) -> Line {
        if self.requests.send(()).await.is_err() {
            return Line::End;
        }
        self.lines.recv().await.unwrap_or(Line::End)
    }
}

/// Whether a person types and sees the input.
fn is_watched() -> bool {
    std::io::stdin().is_terminal() && std::io::stdout().is_terminal()
}

/// Whether the input is edited where it is shown.
fn has_editor() -> bool {
    std::io::stdin().is_terminal() && can_draw()
}

enum Source {
    Editor(Box<Reedline>, DefaultPrompt, Arc<Mutex<Pressed>>),
    /// The lines of standard input, each after a prompt if a person types them.
    Plain {
        has_prompt: bool,
    },
}

impl Source {
    fn open() -> Self {
        if !has_editor() {
            return Self::Plain {
                has_prompt: is_watched(),
            };
        }
        let keys = Keys::default();
        let pressed = Arc::clone(&keys.pressed);
        // Pasted text arrives as one text, including its newlines.
        let mut editor = Reedline::create()
            .with_validator(Box::new(Whole))
            .with_edit_mode(Box::new(keys))
            .use_bracketed_paste(true)
            .with_ansi_colors(Screen::of_output() == Screen::Colored);
        let [state_home, home] = ["XDG_STATE_HOME", "HOME"].map(std::env::var_os);
        let history = history_file(state_home, home).map(|path| {
            let history = match make_private(&path)? {
                true => FileBackedHistory::with_file(HISTORY_LINES, path),
                false => FileBackedHistory::new(HISTORY_LINES),
            };
            history.map_err(io::Error::other)
        });
        match history {
            Some(Ok(history)) => editor = editor.with_history(Box::new(history)),
            Some(Err(error)) => tracing::warn!(%error, "the history file cannot be used"),
            None => {}
        }
        let prompt = DefaultPrompt::new(DefaultPromptSegment::Empty, DefaultPromptSegment::Empty);
        Self::Editor(Box::new(editor), prompt, pressed)
    }

    fn read(&mut self) -> Line {
        match self {
            Self::Editor(editor, prompt, pressed) => match editor.read_line(prompt) {
                Ok(Signal::Success(line)) => {
                    // Save now: a signal ends this thread while it waits for the next line.
                    if let Err(error) = editor.sync_history() {
                        tracing::warn!(%error, "the history file cannot be written");
                    }
                    let mut pressed = pressed.lock();
                    pressed.has_keys = false;
                    Line::Text(unfolded(&line, &pressed.pasted))
                }
                Ok(Signal::CtrlD) => Line::End,
                Ok(_) => Line::Dropped {
                    is_fresh: !std::mem::take(&mut pressed.lock().has_keys),
                },
                Err(error) => Line::Failed(EngineError::internal(format!(
                    "the terminal cannot be read: {error}"
                ))),
            },
            Self::Plain { has_prompt } => {
                if *has_prompt {
                    print("> ");
                }
                let mut line = Vec::new();
                let mut limited = std::io::stdin().lock().take(MAX_BYTES + 1);
                let text = match limited.read_until(b'\n', &mut line) {
                    Ok(0) => return Line::End,
                    Ok(_) => text_of("a line of standard input", line),
                    Err(error) => Err(unreadable(&error)),
                };
                match text {
                    // Without its line break: a backslash before that folds nothing.
                    Ok(text) => {
                        let line = text.trim_start_matches(BYTE_ORDER_MARK).trim();
                        Line::Text(unfolded(line, &[]))
                    }
                    Err(error) => Line::Failed(error),
                }
            }
        }
    }
}

/// Marks the beginning and the end of a multi-line text.
const BLOCK: &str = "\"\"\"";

/// Decides whether Enter completes the input.
struct Whole;

impl Validator for Whole {
    fn validate(&self, typed: &str) -> ValidationResult {
        let goes_on = match typed.strip_prefix(BLOCK) {
            Some(rest) => !rest.trim_end().ends_with(BLOCK),
            None => typed.ends_with('\\'),
        };
        match goes_on {
            true => ValidationResult::Incomplete,
            false => ValidationResult::Complete,
        }
    }
}

/// A backslash before a new line, which a person types to go on in another line.
const FOLD: &str = "\\\n";

/// The beginning of a typed message that begins with a `/` and is no command.
const ESCAPED: &str = "//";

/// A message as a person types it who means no command.
fn typed_message(text: &str) -> String {
    match text.starts_with('/') {
        true => format!("/{text}"),
        false => text.to_owned(),
    }
}

/// What the text of a line does not tell of its keys.
#[derive(Default)]
struct Pressed {
    /// Pasted texts with a [`FOLD`], which is part of the text: a shell command in several lines has some. Also those that begin as
    /// an [`ESCAPED`] message, such as code after a comment.
    pasted: Vec<String>,
    /// Whether the line had keys other than Ctrl-C.
    has_keys: bool,
}

/// The usual keys, and a record of them.
#[derive(Default)]
struct Keys {
    usual: Emacs,
    pressed: Arc<Mutex<Pressed>>,
}

impl EditMode for Keys {
    fn parse_event(&mut self, event: ReedlineRawEvent) -> ReedlineEvent {
        let event = self.usual.parse_event(event);
        let mut pressed = self.pressed.lock();
        if let ReedlineEvent::Edit(edits) = &event {
            for edit in edits {
                if let EditCommand::InsertString(text) = edit
                    && (text.contains(FOLD) || text.trim_start().starts_with(ESCAPED))
                {
                    pressed.pasted.push(text.clone());
                }
            }
        }
        // A changed window is no key.
        pressed.has_keys |= !matches!(
            event,
            ReedlineEvent::CtrlC | ReedlineEvent::None | ReedlineEvent::Resize(..)
        );
        drop(pressed);
        event
    }

    fn edit_mode(&self) -> PromptEditMode {
        self.usual.edit_mode()
    }
}

/// The intended text: without the marks for line continuation, except in what was `pasted`. A block is a message, and so is what
/// was pasted with two slashes.
fn unfolded(typed: &str, pasted: &[String]) -> String {
    let block = typed.trim().strip_prefix(BLOCK);
    if let Some(text) = block.and_then(|rest| rest.strip_suffix(BLOCK)) {
        return typed_message(text.trim());
    }
    let places = pasted.iter().flat_map(|text| {
        let found = typed.match_indices(text.as_str());
        found.map(|(at, text)| at..at + text.len())
    });
    let kept: Vec<_> = places.collect();
    let mut text = String::with_capacity(typed.len());
    let mut rest = 0;
    for (at, _) in typed.match_indices(FOLD) {
        if !kept.iter().any(|place| place.contains(&at)) {
            text.push_str(&typed[rest..at]);
            rest = at + 1;
        }
    }
    text.push_str(&typed[rest..]);
    let text = text.trim();
    let mut beginnings = pasted.iter().map(|text| text.trim());
    match text.starts_with(ESCAPED) && beginnings.any(|pasted| text.starts_with(pasted)) {
        true => typed_message(text),
        false => text.to_owned(),
    }
}

/// `$XDG_STATE_HOME/genset/history`, or the same under `~/.local/state`. Ignores a variable that is not an absolute path.
fn history_file(state_home: Option<OsString>, home: Option<OsString>) -> Option<PathBuf> {
    let absolute = |path: OsString| Some(PathBuf::from(path)).filter(|path| path.is_absolute());
    let from_home = || Some(home.and_then(absolute)?.join(".local/state"));
    let state = state_home.and_then(absolute).or_else(from_home)?;
    Some(state.join("genset").join("history"))
}

/// Creates the history file, or restricts an existing one, so that only this user can read it: it contains the questions. Returns
/// whether it is a regular file: users who want no history link it to /dev/null.
fn make_private(path: &Path) -> io::Result<bool> {
    if let Some(folder) = path.parent() {
        let mut private = DirBuilder::new();
        private.recursive(true).mode(0o700).create(folder)?;
    }
    let mut options = File::options();
    let file = options.append(true).create(true).mode(0o600).open(path)?;
    let is_file = file.metadata()?.is_file();
    if is_file {
        file.set_permissions(Permissions::from_mode(0o600))?;
    }
    Ok(is_file)
}

/// Restores the terminal on drop, also when the chat ends at the prompt.
struct GivenBack;

impl Drop for GivenBack {
    fn drop(&mut self) {
        let _ = crossterm::terminal::disable_raw_mode();
        if has_editor() {
            let _ = execute!(std::io::stdout(), DisableBracketedPaste);
        }
    }
}

pub(super) async fn run(
    mut chat: Chat,
    models: &Models,
    signals: &mut Signals,
) -> Result<Ending, EngineError> {
    if is_watched() {
        print(&format!(
            "Chat with {}. /help lists the commands, Ctrl-D leaves.\n",
            escaped(chat.model_name())
        ));
    }
    let mut lines = Lines::start().map_err(|error| {
        EngineError::internal(format!("the line editor cannot be started: {error}"))
    })?;
    let _given_back = GivenBack;
    let mut has_dropped = false;
    let mut ending = Ending::Done;
    loop {
        let line = tokio::select! {
            biased;
            signal = signals.next() => {
                // At the prompt, Ctrl-C is a key, so this signal comes from outside.
                tracing::info!("{signal}: leaving");
                return Ok(Ending::Signalled);
            }
            line = lines.next() => line,
        };
        let text = match line {
            Line::Text(text) => text,
            Line::Dropped { is_fresh: true } if has_dropped => return Ok(Ending::Done),
            Line::Dropped { .. } => {
                has_dropped = true;
                print(&chat.screen().aside("Ctrl-C again leaves.\n"));
                continue;
            }
            Line::End => return Ok(ending),
            Line::Failed(error) => return Err(error),
        };
        has_dropped = false;
        chat.keep_up(models);
        let question = match text.as_str() {
            "" => continue,
            command if command.split_whitespace().next() == Some("/exit") => return Ok(ending),
            escaped if escaped.starts_with(ESCAPED) => escaped.split_at(1).1,
            command if command.starts_with('/') => {
                obey(&mut chat, models, command);
                continue;
            }
            question => question,
        };
        match converse(&mut chat, question, signals).await {
            Ok(Turn::Terminated) => return Ok(Ending::Signalled),
            Ok(Turn::Unread) => return Ok(ending),
            // The next question of a file or a pipe would begin at once.
            Ok(Turn::Stopped) if !std::io::stdin().is_terminal() => {
                return Ok(Ending::Signalled);
            }
            Ok(Turn::Answered | Turn::Cut | Turn::Stopped) => {}
            Err(_) if chat.screen() == Screen::Pipe => ending = Ending::Failed,
            // A person sees the error and may ask again.
            Err(_) => {}
        }
    }
}

/// Asks, and returns how the turn ended.
async fn converse(
    chat: &mut Chat,
    question: &str,
    signals: &mut Signals,
) -> Result<Turn, EngineError> {
    let asked = chat.ask(question, signals).await;
    print("\n");
    match &asked {
        Ok(Turn::Stopped) => chat.screen().tell("[stopped]\n"),
        Ok(Turn::Cut) => chat.screen().tell(CUT),
        Ok(Turn::Answered | Turn::Terminated | Turn::Unread) => {}
        Err(error) => {
            let is_too_long = error.kind() == ErrorKind::ContextLengthExceeded;
            let hint = match is_too_long && chat.messages() > 0 {
                true => "The conversation so far is part of the prompt; /clear forgets it.\n",
                false => "",
            };
            chat.screen().tell(&format!("error: {error}\n{hint}"));
        }
    }
    asked
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_variable_that_is_no_absolute_path_names_no_folder_for_the_history() {
        for (state_home, home, expected) in [
            ("/state", "/home/u", Some("/state/genset/history")),
            ("", "/home/u", Some("/home/u/.local/state/genset/history")),
            ("state", "", None),
            ("", "u", None),
        ] {
            let file = history_file(Some(state_home.into()), Some(home.into()));
            assert_eq!(file.as_deref(), expected.map(Path::new));
        }
        assert_eq!(history_file(None, None), None);
    }

    #[test]
    fn what_goes_on_in_another_line_is_not_whole() {
        for (typed, is_whole, meant) in [
            ("one line ", true, "one line"),
            ("one \\", false, "one \\"),
            ("one \\\ntwo", true, "one \ntwo"),
            ("pasted\nlines", true, "pasted\nlines"),
            ("\"\"\"one", false, "\"\"\"one"),
            ("\"\"\"\n/help\n\"\"\"", true, "//help"),
            ("//one", true, "//one"),
            ("\"\"\"\none \\\ntwo\n\"\"\" ", true, "one \\\ntwo"),
        ] {
            let whole = matches!(Whole.validate(typed), ValidationResult::Complete);
            assert_eq!(whole, is_whole, "{typed:?}");
            assert_eq!(unfolded(typed, &[]), meant);
        }
    }

    #[test]
    fn backslashes_and_slashes_in_pasted_text_are_part_of_it() {
        let mut keys = Keys::default();
        let code = "// note\nlet x = 1;";
        for text in ["docker run \\\r\n  image\r\n", "one line", code] {
            let paste = crossterm::event::Event::Paste(text.to_owned());
            let _ = keys.parse_event(ReedlineRawEvent::try_from(paste).unwrap());
        }
        let pasted = std::mem::take(&mut keys.pressed.lock().pasted);
        assert_eq!(pasted, ["docker run \\\n  image\n", code]);
        assert_eq!(unfolded(&format!("{code}\n"), &pasted), format!("/{code}"));
        assert_eq!(unfolded("//help", &pasted), "//help");
        let typed = "what \\\nis this: docker run \\\n  image\n";
        let meant = "what \nis this: docker run \\\n  image";
        assert_eq!(unfolded(typed, &pasted), meant);
    }
}
