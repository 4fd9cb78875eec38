//! The written text: conversations and prose, read from files.
//!
//! A blank line followed by `Q: ` or `S: ` begins a conversation. `S: ` is its system message. `Q: ` is the user's message,
//! and a second `Q: ` line directly below it is another wording; `A: ` is the answer, which may have several lines. A `Q: `
//! directly below an answer continues the conversation. `{name}` is a name, the same within a conversation and a new one each
//! time. A file that begins in any other way is prose, one paragraph per block.

use std::fs;
use std::path::Path;

use anyhow::{Context as _, ensure};
use genset_devtools::corpus::text_files;

/// A user message, and the answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Turn {
    /// Wordings of the question; at least one, the usual one first.
    pub(crate) questions: Vec<String>,
    pub(crate) answer: String,
}

/// The turns of a conversation.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Conversation {
    pub(crate) system: Option<String>,
    pub(crate) turns: Vec<Turn>,
}

/// All training text.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Text {
    pub(crate) conversations: Vec<Conversation>,
    pub(crate) paragraphs: Vec<String>,
}

impl Text {
    /// Reads `corpus/*.txt` and `training/*.txt` in the model's folder, in the order of their names.
    ///
    /// # Errors
    /// If a file cannot be read, or a conversation in it lacks a question or an answer.
    pub(crate) fn read(model: &Path) -> anyhow::Result<Self> {
        let mut text = Self::default();
        for folder in ["corpus", "training"] {
            for path in text_files(&model.join(folder))? {
                let content = fs::read_to_string(&path)
                    .with_context(|| format!("cannot read {}", path.display()))?;
                text.add(&content)
                    .with_context(|| format!("in {}", path.display()))?;
            }
        }
        Ok(text)
    }

    /// # Errors
    /// If a conversation lacks a question or an answer.
    pub(crate) fn add(&mut self, content: &str) -> anyhow::Result<()> {
        if content.starts_with("Q: ") || content.starts_with("S: ") {
            self.conversations.extend(parse(content)?);
        } else {
            let blocks = content.split("\n\n").map(str::trim);
            let paragraphs = blocks.filter(|block| !block.is_empty());
            self.paragraphs.extend(paragraphs.map(str::to_owned));
        }
        Ok(())
    }
}

fn parse(content: &str) -> anyhow::Result<Vec<Conversation>> {
    let mut conversations: Vec<Conversation> = Vec::new();
    let mut after_blank = true;
    for line in content.lines() {
        let begins = line.starts_with("Q: ") || line.starts_with("S: ");
        if begins && after_blank {
            conversations.push(Conversation::default());
        }
        if let Some(conversation) = conversations.last_mut() {
            conversation.add_line(line)?;
        }
        after_blank = line.is_empty();
    }
    for turn in conversations.iter_mut().flat_map(|it| &mut it.turns) {
        turn.answer.truncate(turn.answer.trim_end().len());
        ensure!(!turn.answer.is_empty(), "no answer to {:?}", turn.questions);
    }
    Ok(conversations)
}

impl Conversation {
    fn add_line(&mut self, line: &str) -> anyhow::Result<()> {
        if let Some(system) = line.strip_prefix("S: ") {
            ensure!(self.turns.is_empty(), "{line:?} comes after a question");
            self.system = Some(system.to_owned());
        } else if let Some(question) = line.strip_prefix("Q: ") {
            self.add_question(question);
        } else {
            let turn = self.turns.last_mut();
            let turn = turn.with_context(|| format!("no question before {line:?}"))?;
            if let Some(answer) = line.strip_prefix("A: ") {
                ensure!(turn.answer.is_empty(), "a second answer: {line:?}");
                turn.answer = answer.to_owned();
            } else {
                turn.answer.push('\n');
                turn.answer.push_str(line);
            }
        }
        Ok(())
    }

    fn add_question(&mut self, question: &str) {
        match self.turns.last_mut() {
            Some(turn) if turn.answer.is_empty() => turn.questions.push(question.to_owned()),
            _ => self.turns.push(Turn {
                questions: vec![question.to_owned()],
                answer: String::new(),
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(content: &str) -> Text {
        let mut text = Text::default();
        text.add(content).unwrap();
        text
    }

    #[test]
    fn wordings_turns_and_answers_with_blank_lines_are_told_apart() {
        let text = parsed(
            "Q: One?\nQ: The first?\nA: Yes.\n\nStill yes.\n\nS: Be brief.\nQ: Two?\nA: No.\nQ: And three?\nA: No.\n",
        );
        let turn = |questions: &[&str], answer: &str| Turn {
            questions: questions.iter().map(|&it| it.to_owned()).collect(),
            answer: answer.to_owned(),
        };
        assert_eq!(
            text.conversations,
            [
                Conversation {
                    system: None,
                    turns: vec![turn(&["One?", "The first?"], "Yes.\n\nStill yes.")],
                },
                Conversation {
                    system: Some("Be brief.".to_owned()),
                    turns: vec![turn(&["Two?"], "No."), turn(&["And three?"], "No.")],
                },
            ]
        );
    }

    #[test]
    fn a_file_without_questions_is_prose() {
        let text = parsed("One paragraph\nof two lines.\n\nAnother.\n");
        assert_eq!(
            text.paragraphs,
            ["One paragraph\nof two lines.", "Another."]
        );
        assert_eq!(text.conversations, []);
    }

    #[test]
    fn a_question_without_an_answer_is_refused() {
        let error = Text::default()
            .add("Q: Why?\n\nQ: How?\nA: So.\n")
            .unwrap_err();
        assert_eq!(error.to_string(), "no answer to [\"Why?\"]");
    }
}
