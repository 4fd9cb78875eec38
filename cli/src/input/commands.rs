//! Commands to the chat itself: lines that begin with `/`.

use genset_frontend::model::Models;
use serde_json::Value;

use super::chat::Chat;
use super::saved::{self, Saved};

const HELP: &str = "\
/help             this list
/clear            forget the conversation
/system TEXT      set the system prompt and forget the conversation; without TEXT, remove it
/model [NAME]     list the models, or go on with another
/set [NAME VALUE] list the settings, or set one, as in /set temperature 0.2; without VALUE, leave it to the model
/tokens           what the last answer took
/save FILE        keep the conversation in a file
/load FILE        go on with one
/exit             leave (so does Ctrl-D)
//TEXT            ask something that begins with a /
Ctrl-C            stop an answer; at the prompt drop the line, and twice leave
Alt-Enter         go on in a new line; so does a line that ends with a backslash, and \"\"\" goes on to the next \"\"\"
";

/// Runs a command, and prints the result.
pub(super) fn obey(chat: &mut Chat, models: &Models, command: &str) {
    let (name, rest) = command
        .split_once(char::is_whitespace)
        .map_or((command, ""), |(name, rest)| (name, rest.trim()));
    let told = match name {
        "/help" => Ok(HELP.to_owned()),
        "/clear" => {
            chat.clear();
            Ok("The conversation is forgotten.\n".to_owned())
        }
        "/system" => {
            chat.set_system((!rest.is_empty()).then(|| rest.to_owned()));
            Ok(match rest {
                "" => "The system prompt is removed; the conversation begins anew.\n".to_owned(),
                _ => "The system prompt is set; the conversation begins anew.\n".to_owned(),
            })
        }
        "/model" if rest.is_empty() => Ok(list_models(chat, models)),
        "/model" => go_on_with(chat, models, rest),
        "/set" if rest.is_empty() => Ok(list_settings(chat)),
        "/set" => set(chat, rest),
        "/tokens" => Ok(match chat.figures() {
            Some(figures) => format!("{figures}\n"),
            None => "Nothing was answered yet.\n".to_owned(),
        }),
        "/save" | "/load" if rest.is_empty() => {
            Err(format!("{name} needs a file, as in {name} talk.json"))
        }
        "/save" => chat
            .saved()
            .write(&saved::path(rest))
            .map(|()| format!("{} messages are saved.\n", chat.messages())),
        "/load" => load(chat, rest),
        unknown => Ok(format!("{unknown} is no command; /help lists them.\n")),
    };
    let told = told.unwrap_or_else(|error| format!("error: {error}\n"));
    chat.screen().tell(&told);
}

fn list_models(chat: &Chat, models: &Models) -> String {
    let line = |name: &str| {
        let mark = if name == chat.model_name() { '*' } else { ' ' };
        format!("{mark} {name}\n")
    };
    models
        .all()
        .iter()
        .map(|model| line(&model.card.name))
        .collect()
}

fn go_on_with(chat: &mut Chat, models: &Models, name: &str) -> Result<String, String> {
    let Some(model) = models.get(name) else {
        return Err(format!("no model has the name {name:?}; /model lists them"));
    };
    chat.set_model(model);
    Ok(format!("{} answers from now on.\n", chat.model_name()))
}

fn list_settings(chat: &Chat) -> String {
    if chat.settings().is_empty() {
        return "All settings are the model's own. /set temperature 0.2 changes one.\n".to_owned();
    }
    let lines = chat.settings().iter();
    lines
        .map(|(name, value)| format!("{name} {value}\n"))
        .collect()
}

fn set(chat: &mut Chat, words: &str) -> Result<String, String> {
    let (name, value) = words
        .split_once(char::is_whitespace)
        .map_or((words, None), |(name, value)| (name, Some(value.trim())));
    // A value that is not JSON is a text.
    let read = |value: &str| serde_json::from_str(value).unwrap_or_else(|_| Value::from(value));
    let value = value.map(read);
    let told = match &value {
        Some(value) => format!("{name} is {value}.\n"),
        // It may be misspelt.
        None if !chat.settings().contains_key(name) => format!("{name} was not set.\n"),
        None => format!("{name} is the model's own.\n"),
    };
    chat.set(name, value).map_err(|error| error.to_string())?;
    Ok(told)
}

fn load(chat: &mut Chat, file: &str) -> Result<String, String> {
    let saved = Saved::read(&saved::path(file))?;
    let with = saved.model.clone();
    chat.restore(saved).map_err(|error| error.to_string())?;
    let count = chat.messages();
    Ok(match with == chat.model_name() {
        true => format!("{count} messages are loaded.\n"),
        false => format!(
            "{count} messages are loaded; they are {with}'s, and {} goes on.\n",
            chat.model_name()
        ),
    })
}
