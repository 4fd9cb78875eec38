//! The rules of a stream that an engine can break at run time.

crate::named! {
    /// A broken rule of the output contract. Each one is a metric label and a log field.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
    pub enum Violation {
        /// The stream ended without `Finished` or an error.
        EndedWithoutTerminal = "ended_without_terminal",
        /// An item followed the terminal one.
        ItemAfterTerminal = "item_after_terminal",
        /// `usage.completion_tokens` differs from the tokens streamed.
        CompletionTokensMismatch = "completion_tokens_mismatch",
        /// `usage.prompt_tokens` differs from the prompt's length.
        PromptTokensMismatch = "prompt_tokens_mismatch",
        /// A token id is not below the vocabulary size.
        TokenOutOfRange = "token_out_of_range",
        /// More tokens than `max_tokens` were streamed.
        TooManyTokens = "too_many_tokens",
        /// A token item carries no token.
        EmptyChunk = "empty_chunk",
        /// The stream finished as cancelled although nobody cancelled it.
        FalseCancel = "false_cancel",
        /// The engine panicked.
        Panic = "panic",
        /// An item of a kind that the request did not ask for (such as text for a token request).
        WrongOutputKind = "wrong_output_kind",
    }
}

impl Violation {
    /// Describes the violation to the engine's author.
    #[must_use]
    pub const fn what(self) -> &'static str {
        match self {
            Self::EndedWithoutTerminal => "its stream ended without `Finished` or an error",
            Self::ItemAfterTerminal => "an item followed the terminal one",
            Self::CompletionTokensMismatch => {
                "`usage.completion_tokens` differs from the tokens that it streamed"
            }
            Self::PromptTokensMismatch => "`usage.prompt_tokens` differs from the prompt's length",
            Self::TokenOutOfRange => "it gave a token id that is not below `vocab_size`",
            Self::TooManyTokens => "it streamed more tokens than `max_tokens`",
            Self::EmptyChunk => "a token item carries no token",
            Self::FalseCancel => "it finished a request as cancelled that nobody had cancelled",
            Self::Panic => "it panicked",
            Self::WrongOutputKind => "an item is of a kind that the request did not ask for",
        }
    }
}
