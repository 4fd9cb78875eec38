//! `golden.json`: questions and the exact answers that greedy decoding must return.

use std::path::Path;
use std::sync::Arc;

use candle_core::IndexOp as _;
use genset_devtools::checkout::read_json;
use serde::Deserialize;

use crate::encode::{Encoder, Role, Sequence};
use crate::model::Model;
use crate::train::Known;

/// The file's name in the model's folder.
const FILE: &str = "golden.json";
/// An answer that has not ended by then is wrong.
const MAX_ANSWER_TOKENS: usize = 256;

/// The file.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Golden {
    /// Plain conversations, which tests also send over the API.
    cases: Vec<Case>,
    /// The conversations of the agent frameworks' tests, with the tools as the chat template renders them.
    agents: Vec<Case>,
}

/// A conversation that ends with a question, and the answer to it.
#[derive(Debug, Deserialize)]
pub(crate) struct Case {
    messages: Vec<Message>,
    answer: String,
}

/// One message of a conversation.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Message {
    role: MessageRole,
    content: String,
}

impl Message {
    /// Role and text.
    pub(crate) fn said(&self) -> (Role, String) {
        (self.role.into(), self.content.clone())
    }
}

#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(rename_all = "lowercase")]
enum MessageRole {
    System,
    User,
    Assistant,
    Tool,
}

impl From<MessageRole> for Role {
    fn from(role: MessageRole) -> Self {
        match role {
            MessageRole::System => Self::System,
            MessageRole::User => Self::User,
            MessageRole::Assistant => Self::Assistant,
            MessageRole::Tool => Self::Tool,
        }
    }
}

impl Case {
    fn prompt(&self, encoder: &Encoder) -> anyhow::Result<Vec<u32>> {
        let said: Vec<_> = self.messages.iter().map(Message::said).collect();
        Self::prompt_of(&said, encoder)
    }

    /// The tokens of these messages, up to the model's turn.
    pub(crate) fn prompt_of(
        said: &[(Role, String)],
        encoder: &Encoder,
    ) -> anyhow::Result<Vec<u32>> {
        let said = said.iter().map(|(role, text)| (*role, text.as_str()));
        encoder.prompt(&said.collect::<Vec<_>>())
    }

    /// The conversation with its answer; only the answer is marked as learned.
    fn with_answer(&self, encoder: &Encoder) -> anyhow::Result<Sequence> {
        let said = self.messages.iter().map(Message::said).collect();
        Self::answered(said, self.answer.clone(), encoder)
    }

    /// These messages with an answer; only the answer is marked as learned.
    pub(crate) fn answered(
        mut said: Vec<(Role, String)>,
        answer: String,
        encoder: &Encoder,
    ) -> anyhow::Result<Sequence> {
        let begin = Self::prompt_of(&said, encoder)?.len();
        said.push((Role::Assistant, answer));
        let mut sequence = encoder.messages(&said)?;
        sequence.learned[..begin].fill(false);
        Ok(sequence)
    }

    /// The user's last message.
    fn question(&self) -> &str {
        let mut messages = self.messages.iter().rev();
        let last = messages.find(|it| matches!(it.role, MessageRole::User));
        last.map_or("", |message| &message.content)
    }
}

/// The results.
#[derive(Debug)]
pub(crate) struct Outcome {
    pub(crate) right: usize,
    pub(crate) total: usize,
    /// The smallest margin, over all tokens, between the chosen token's logit and the next best.
    pub(crate) least_margin: f32,
    /// Question, expected answer and actual answer of each wrong one.
    pub(crate) wrong: Vec<[String; 3]>,
}

impl Outcome {
    pub(crate) fn is_right(&self) -> bool {
        self.wrong.is_empty()
    }
}

/// A sequence being generated.
struct Writing {
    tokens: Vec<u32>,
    prompt_tokens: usize,
    finished: bool,
}

impl Golden {
    /// # Errors
    /// If the file is missing or has another format.
    pub(crate) fn read(model: &Path) -> anyhow::Result<Self> {
        read_json(&model.join(FILE))
    }

    /// Asks the model every question, with greedy decoding.
    ///
    /// # Errors
    /// If the model cannot be run.
    pub(crate) fn ask(&self, model: &Model, encoder: &Encoder) -> anyhow::Result<Outcome> {
        let cases: Vec<&Case> = self.cases.iter().chain(&self.agents).collect();
        // Most are checked in one step, with the answer given. Answers that are not known word for word are generated.
        let given = cases.iter().map(|case| case.with_answer(encoder));
        let given = given.collect::<anyhow::Result<Vec<_>>>()?;
        let known = Known::of(model, &given)?;
        let open = cases.iter().zip(&known.sequences);
        let open = open.filter_map(|(case, known)| (!known).then_some(*case));
        let open: Vec<&Case> = open.collect();
        let prompts = open.iter().map(|case| case.prompt(encoder));
        let prompts = prompts.collect::<anyhow::Result<Vec<_>>>()?;
        let (answers, least_margin) = answer(prompts, model, encoder)?;
        let mut outcome = Outcome {
            right: known.count(),
            total: cases.len(),
            least_margin: least_margin.min(known.least_margin),
            wrong: Vec::new(),
        };
        for (case, answer) in open.into_iter().zip(answers) {
            if answer.as_ref() == Some(&case.answer) {
                outcome.right += 1;
            } else {
                let question = case.question().to_owned();
                let given = answer.unwrap_or_else(|| "(no end)".to_owned());
                outcome.wrong.push([question, case.answer.clone(), given]);
            }
        }
        Ok(outcome)
    }
}

/// Answers the prompts; `None` for an answer that does not end. Also returns the smallest margin of all tokens.
///
/// # Errors
/// If the model cannot be run.
pub(crate) fn answer(
    prompts: Vec<Vec<u32>>,
    model: &Model,
    encoder: &Encoder,
) -> anyhow::Result<(Vec<Option<String>>, f32)> {
    let begin = |tokens: Vec<u32>| Writing {
        prompt_tokens: tokens.len(),
        tokens,
        finished: false,
    };
    let mut writings: Vec<Writing> = prompts.into_iter().map(begin).collect();
    let mut least_margin = f32::INFINITY;
    for _ in 0..MAX_ANSWER_TOKENS {
        if writings.iter().all(|writing| writing.finished) {
            break;
        }
        least_margin = least_margin.min(step(&mut writings, model, encoder)?);
    }
    let text = |writing: &Writing| {
        let tokens = &writing.tokens[writing.prompt_tokens..];
        let text = writing.finished.then(|| encoder.decode(tokens));
        text.transpose()
    };
    let answers = writings.iter().map(text).collect::<anyhow::Result<_>>()?;
    Ok((answers, least_margin))
}

/// Adds one token to every unfinished sequence and returns the smallest margin.
fn step(writings: &mut [Writing], model: &Model, encoder: &Encoder) -> anyhow::Result<f32> {
    let open: Vec<&mut Writing> = writings.iter_mut().filter(|it| !it.finished).collect();
    let tokens: Vec<u32> = open.iter().flat_map(|it| it.tokens.clone()).collect();
    let lengths: Vec<usize> = open.iter().map(|it| it.tokens.len()).collect();
    let mut rows = Vec::new();
    let mut end = 0;
    for length in &lengths {
        end += length;
        rows.push(u32::try_from(end - 1)?);
    }
    let logits = model.forward(&tokens, &Arc::new(lengths), &rows)?;
    let mut least_margin = f32::INFINITY;
    for (row, writing) in open.into_iter().enumerate() {
        let (token, margin) = likeliest(&logits.i(row)?.to_vec1::<f32>()?)?;
        least_margin = least_margin.min(margin);
        if token == encoder.message_end || token == encoder.end_of_text {
            writing.finished = true;
        } else {
            writing.tokens.push(token);
        }
    }
    Ok(least_margin)
}

/// The token with the greatest logit, and its margin to the next one.
pub(crate) fn likeliest(logits: &[f32]) -> anyhow::Result<(u32, f32)> {
    let (mut token, mut best, mut second) = (0, f32::NEG_INFINITY, f32::NEG_INFINITY);
    for (at, &logit) in logits.iter().enumerate() {
        if logit > best {
            (token, best, second) = (at, logit, best);
        } else if logit > second {
            second = logit;
        }
    }
    Ok((u32::try_from(token)?, best - second))
}

#[cfg(test)]
mod tests {
    use genset_devtools::checkout::{Config, read_weights};
    use genset_devtools::tiny_chat::folder;

    use super::*;

    /// The answers that [`Golden::ask`] does not generate, since the model knows them.
    #[test]
    fn an_answer_that_is_known_is_what_is_generated() {
        let encoder = Encoder::read(folder()).unwrap();
        let weights = read_weights(folder()).unwrap();
        let model = Model::from_tensors(Config::read(folder()).unwrap(), &weights).unwrap();
        let golden = Golden::read(folder()).unwrap();
        // Of different lengths.
        let cases = [&golden.cases[0], &golden.cases[12]];
        let prompts = cases.map(|case| case.prompt(&encoder).unwrap()).to_vec();
        let (answers, least_margin) = answer(prompts, &model, &encoder).unwrap();
        assert_eq!(answers, cases.map(|case| Some(case.answer.clone())));
        let given = cases.map(|case| case.with_answer(&encoder).unwrap());
        let known = Known::of(&model, &given).unwrap();
        assert_eq!(known.sequences, [true; 2]);
        let apart = (known.least_margin - least_margin).abs();
        assert!(apart < 1e-3, "{} and {least_margin}", known.least_margin);
    }

    #[test]
    fn the_margin_is_the_distance_to_the_second() {
        assert_eq!(likeliest(&[1.0, 4.0, 2.5, -3.0]).unwrap(), (1, 1.5));
        assert_eq!(likeliest(&[4.0, 1.0, 4.0]).unwrap(), (0, 0.0));
    }
}
