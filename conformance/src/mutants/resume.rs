//! Faults that the checks of MG catch.

use genset_backend_common::config::Deviation;
use genset_backend_common::{EngineConfig, EngineError, Input, OutputStream};

use super::Mutant;
use super::capable::{Flaw, with_flaw};
use super::fault::{Call, Declares, Fault, asked, at_end, faulty, with_fault};

pub(super) const MUTANTS: &[Mutant] = &[
    Mutant {
        name: "resume-repeats-last-token",
        stands_for: "a resumed prompt cut by one, so that the last token is generated a second time",
        killed_by: &["MG01", "MG05", "MG06", "MG08"],
        build: |clean, scenario| with_fault(clean, scenario, ResumeFault::RepeatsLastToken),
    },
    Mutant {
        name: "variance-hides-a-repeated-last-token",
        stands_for: "a resumed prompt cut by one, in an engine whose answers may be others in a batch",
        killed_by: &["MG01", "MG05", "MG06", "MG08"],
        build: |clean, scenario| {
            let repeats = with_fault(clean, scenario, ResumeFault::RepeatsLastToken);
            let declares = Declares(|config| {
                let can = &mut config.capabilities;
                can.deviations.insert(Deviation::BatchVariant);
            });
            faulty(repeats, declares)
        },
    },
    Mutant {
        name: "resume-subtracts-twice",
        stands_for: "a router and an engine that both take the resumed tokens off max_tokens",
        killed_by: &["MG02", "MG03"],
        build: |clean, scenario| with_fault(clean, scenario, ResumeFault::SubtractsTwice),
    },
    Mutant {
        name: "resume-counts-twice",
        stands_for: "resumed tokens counted in the prompt and in the completion",
        killed_by: &["MG03", "RD02"],
        build: |clean, scenario| with_fault(clean, scenario, ResumeFault::CountsTwice),
    },
    Mutant {
        name: "resume-forgets-grammar",
        stands_for: "a grammar matcher that starts at its beginning on the new instance",
        killed_by: &["MG04", "MG10", "MG11"],
        build: |_, _| with_flaw(Flaw::GuideForgottenOnResume),
    },
    Mutant {
        name: "choice-forgotten-on-resume",
        stands_for: "choices that are matched as texts and not by the grammar's matcher, from their beginning",
        killed_by: &["MG04"],
        build: |_, _| with_flaw(Flaw::ChoiceForgottenOnResume),
    },
    Mutant {
        name: "resume-loses-stop-tokens",
        stands_for: "a request rebuilt from its tokens alone, without its stop conditions",
        killed_by: &["MG05"],
        build: |clean, scenario| with_fault(clean, scenario, ResumeFault::LosesStopTokens),
    },
    Mutant {
        name: "prompt-made-of-an-answer-repeats-its-last-token",
        stands_for: "an answer so far that is put behind the prompt without its last token, for an engine to which it is prompt",
        killed_by: &["MG01", "MG05", "MG08"],
        build: |clean, scenario| {
            let repeats = with_fault(clean, scenario, ResumeFault::RepeatsLastToken);
            faulty(repeats, Declares(resume_as_prompt))
        },
    },
];

/// Engines that treat another instance's tokens as prompt.
pub(super) const CONTROLS: &[Mutant] = &[Mutant {
    name: "answers-so-far-are-prompt",
    stands_for: "an API that takes a prompt, and is not told which of its tokens were generated",
    killed_by: &[],
    build: |clean, scenario| {
        let prompted = asked(clean, scenario, |request| request.resumed_tokens = 0);
        faulty(prompted, Declares(resume_as_prompt))
    },
}];

/// Declares that it takes another instance's tokens as prompt.
fn resume_as_prompt(config: &mut EngineConfig) {
    let can = &mut config.capabilities;
    (can.resume, can.resume_as_prompt) = (false, true);
}

/// The fault in a resumed request; other requests pass through.
#[derive(PartialEq, Eq)]
enum ResumeFault {
    RepeatsLastToken,
    SubtractsTwice,
    CountsTwice,
    LosesStopTokens,
}

impl Fault for ResumeFault {
    fn ask(&self, call: &mut Call) -> Result<(), EngineError> {
        let request = &mut call.request;
        let resumed = request.resumed_tokens;
        if resumed == 0 {
            return Ok(());
        }
        match self {
            Self::RepeatsLastToken => {
                if let Input::Tokens(tokens) = &mut request.input {
                    tokens.pop();
                }
            }
            Self::SubtractsTwice => {
                let max_tokens = &mut request.stop.max_tokens;
                *max_tokens = max_tokens.map(|max| max.saturating_sub(resumed).max(1));
            }
            Self::LosesStopTokens => request.stop.stop_token_ids.clear(),
            Self::CountsTwice => {}
        }
        Ok(())
    }

    fn answer(&self, call: &Call, outputs: OutputStream) -> OutputStream {
        if *self != Self::CountsTwice {
            return outputs;
        }
        let resumed = call.request.resumed_tokens;
        at_end(outputs, move |finished| {
            finished.usage.completion_tokens += resumed;
        })
    }
}
