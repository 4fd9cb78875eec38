//! `in=text`: a chat on the terminal, with a line editor, history and a few commands. Without a terminal it reads plain
//! lines.

use std::io::{BufRead, IsTerminal};
use std::path::PathBuf;

use genset_backend_common::EngineError;
use genset_runtime::Signals;
use reedline::{DefaultPrompt, DefaultPromptSegment, FileBackedHistory, Reedline, Signal};
use tokio::sync::mpsc;

use super::chat::{Chat, Turn};
use super::{Ending, print};

/// Lines kept in the history file.
const HISTORY_LINES: usize = 1000;

const HELP: &str = "\
/help         this list
/clear        forget the conversation
/system TEXT  set the system prompt and forget the conversation; without TEXT, remove it
/exit         leave (so does Ctrl-D)
Ctrl-C        stop an answer
";

/// What the person did at the prompt.
enum Line {
    Text(String),
    /// Ctrl-C at the prompt: the line is dropped.
    Dropped,
    End,
    Failed(String),
}

/// Reads lines on a thread of its own, one for each request: the editor must not hold the terminal while an answer is
/// printed.
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

enum Source {
    Editor(Box<Reedline>, DefaultPrompt),
    Plain,
}

impl Source {
    fn open() -> Self {
        if !(std::io::stdin().is_terminal() && std::io::stdout().is_terminal()) {
            return Self::Plain;
        }
        let mut editor = Reedline::create();
        let history = history_file().map(|path| FileBackedHistory::with_file(HISTORY_LINES, path));
        match history {
            Some(Ok(history)) => editor = editor.with_history(Box::new(history)),
            Some(Err(error)) => tracing::warn!(%error, "the history file cannot be used"),
            None => {}
        }
        let prompt = DefaultPrompt::new(DefaultPromptSegment::Empty, DefaultPromptSegment::Empty);
        Self::Editor(Box::new(editor), prompt)
    }

    fn read(&mut self) -> Line {
        match self {
            Self::Editor(editor, prompt) => match editor.read_line(prompt) {
                Ok(Signal::Success(line)) => Line::Text(line),
                Ok(Signal::CtrlD) => Line::End,
                Ok(_) => Line::Dropped,
                Err(error) => Line::Failed(error.to_string()),
            },
            Self::Plain => {
                let mut line = String::new();
                match std::io::stdin().lock().read_line(&mut line) {
                    Ok(0) => Line::End,
                    Ok(_) => Line::Text(line),
                    Err(error) => Line::Failed(error.to_string()),
                }
            }
        }
    }
}

/// `$XDG_STATE_HOME/genset/history`, or the same under `~/.local/state`.
fn history_file() -> Option<PathBuf> {
    let from_home =
        || std::env::var_os("HOME").map(|home| PathBuf::from(home).join(".local/state"));
    let state = std::env::var_os("XDG_STATE_HOME")
        .map(PathBuf::from)
        .filter(|path| path.is_absolute());
    Some(state.or_else(from_home)?.join("genset").join("history"))
}

pub(super) async fn run(mut chat: Chat, signals: &mut Signals) -> Result<Ending, EngineError> {
    if std::io::stdin().is_terminal() {
        print(&format!(
            "Chat with {}. /help lists the commands, Ctrl-D leaves.\n",
            chat.model_name()
        ));
    }
    let mut lines = Lines::start().map_err(|error| {
        EngineError::internal(format!("the line editor cannot be started: {error}"))
    })?;
    loop {
        let line = tokio::select! {
            biased;
            signal = signals.next() => {
                // At the prompt Ctrl-C is a key, so a signal comes from outside: the terminal is given back as it was.
                let _ = crossterm::terminal::disable_raw_mode();
                tracing::info!("{signal}: leaving");
                return Ok(Ending::Signalled);
            }
            line = lines.next() => line,
        };
        let text = match line {
            Line::Text(text) => text,
            Line::Dropped => continue,
            Line::End => return Ok(Ending::Done),
            Line::Failed(error) => {
                return Err(EngineError::internal(format!(
                    "the terminal cannot be read: {error}"
                )));
            }
        };
        match text.trim() {
            "" => {}
            "/exit" => return Ok(Ending::Done),
            command if command.starts_with('/') => obey(&mut chat, command),
            question => {
                if converse(&mut chat, question, signals).await == Turn::Terminated {
                    return Ok(Ending::Signalled);
                }
            }
        }
    }
}

fn obey(chat: &mut Chat, command: &str) {
    match command
        .split_once(' ')
        .map_or((command, ""), |(name, rest)| (name, rest.trim()))
    {
        ("/help", _) => print(HELP),
        ("/clear", _) => {
            chat.clear();
            print("The conversation is forgotten.\n");
        }
        ("/system", text) => {
            chat.set_system((!text.is_empty()).then(|| text.to_owned()));
            print("The system prompt is set; the conversation begins anew.\n");
        }
        (unknown, _) => print(&format!("{unknown} is no command; /help lists them.\n")),
    }
}

async fn converse(chat: &mut Chat, question: &str, signals: &mut Signals) -> Turn {
    match chat.ask(question, signals).await {
        Ok(Turn::Stopped) => {
            print("\n[stopped]\n");
            Turn::Stopped
        }
        Ok(turn) => {
            print("\n");
            turn
        }
        Err(error) => {
            print(&format!("\nerror: {error}\n"));
            Turn::Answered
        }
    }
}
