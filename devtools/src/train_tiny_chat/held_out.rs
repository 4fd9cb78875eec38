//! `held_out.json`: questions that the model has not seen, with their answers. The share of right answers measures its skill.

use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;

use genset_devtools::checkout::read_json;
use serde::Deserialize;

use crate::encode::{Encoder, Role, Sequence};
use crate::golden::{self, Case};
use crate::model::Model;
use crate::tools::{after_the_question, list};
use crate::train::Known;

/// The file's name in the model's folder.
const FILE: &str = "held_out.json";

/// The file.
#[derive(Debug, Deserialize)]
pub(crate) struct HeldOut {
    cases: Vec<HeldOutCase>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct HeldOutCase {
    /// The kind of question.
    kind: String,
    /// The lines of the tools, as in the prompt.
    #[serde(default)]
    tools: Vec<String>,
    messages: Vec<golden::Message>,
    /// The whole answer.
    answer: Option<String>,
    /// What the answer must contain, if its other words are free.
    #[serde(default)]
    contains: Vec<String>,
}

impl HeldOutCase {
    fn is_right(&self, given: &str) -> bool {
        let whole = self.answer.as_ref().is_none_or(|answer| answer == given);
        whole && self.contains.iter().all(|part| given.contains(part))
    }

    /// The messages, with the tools after the last question, as the chat template renders them.
    fn said(&self) -> Vec<(Role, String)> {
        let said = self.messages.iter().map(golden::Message::said);
        let mut said: Vec<(Role, String)> = said.collect();
        if !self.tools.is_empty() {
            said.insert(after_the_question(&said), (Role::System, list(&self.tools)));
        }
        said
    }

    /// The conversation with its answer; only the answer is marked as learned.
    fn with_answer(&self, encoder: &Encoder) -> anyhow::Result<Sequence> {
        let answer = self.answer.clone().unwrap_or_default();
        Case::answered(self.said(), answer, encoder)
    }
}

/// The results, by kind of question.
#[derive(Debug, Default)]
pub(crate) struct Shares {
    /// The numbers of right and of all questions.
    kinds: BTreeMap<String, (usize, usize)>,
    /// Kind, expected answer and actual answer of each wrong one.
    pub(crate) wrong: Vec<[String; 3]>,
}

impl Shares {
    /// The number of right answers of all kinds.
    pub(crate) fn right(&self) -> usize {
        self.kinds.values().map(|it| it.0).sum()
    }
}

impl fmt::Display for Shares {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let total: usize = self.kinds.values().map(|it| it.1).sum();
        write!(f, "{} of {total} held-out questions right", self.right())?;
        for (kind, (right, asked)) in &self.kinds {
            write!(f, ", {kind} {right}/{asked}")?;
        }
        Ok(())
    }
}

impl HeldOut {
    /// # Errors
    /// If the file is missing or has another format.
    pub(crate) fn read(model: &Path) -> anyhow::Result<Self> {
        read_json(&model.join(FILE))
    }

    /// Asks the model every question, with greedy decoding.
    ///
    /// # Errors
    /// If the model cannot be run.
    pub(crate) fn ask(&self, model: &Model, encoder: &Encoder) -> anyhow::Result<Shares> {
        let mut shares = Shares::default();
        for cases in self.cases.chunks(40) {
            // Most are checked in one step, with the answer given. Answers not known word for word are generated.
            let given = cases.iter().map(|it| it.with_answer(encoder));
            let given = given.collect::<anyhow::Result<Vec<_>>>()?;
            let known = Known::of(model, &given)?.sequences;
            let mut open = Vec::new();
            for (case, known) in cases.iter().zip(known) {
                let (right, asked) = shares.kinds.entry(case.kind.clone()).or_default();
                *asked += 1;
                if known && case.answer.is_some() {
                    *right += 1;
                } else {
                    open.push(case);
                }
            }
            let prompts = open.iter().map(|it| Case::prompt_of(&it.said(), encoder));
            let prompts = prompts.collect::<anyhow::Result<Vec<_>>>()?;
            let (answers, _) = golden::answer(prompts, model, encoder)?;
            for (case, answer) in open.into_iter().zip(answers) {
                if answer.as_ref().is_some_and(|it| case.is_right(it)) {
                    shares.kinds.entry(case.kind.clone()).or_default().0 += 1;
                } else {
                    let expected = match &case.answer {
                        Some(answer) => answer.clone(),
                        None => case.contains.join(" ... "),
                    };
                    let given = answer.unwrap_or_else(|| "(no end)".to_owned());
                    shares.wrong.push([case.kind.clone(), expected, given]);
                }
            }
        }
        Ok(shares)
    }
}
