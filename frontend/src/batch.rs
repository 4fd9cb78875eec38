//! Batches: requests in a file, each answered on a line of another. [`BatchInput`] reads them, [`answer_line`] answers
//! one, [`BatchNotes`] records the answers until all have come, so that an interrupted run resumes where it stopped.
//!
//! `genset run in=batch` uses these directly. The routes `/v1/files` and `/v1/batches` use `store`, which keeps their
//! records in a folder, and `run`, which answers the batches; `open` holds a batch's input and answers.

mod input;
mod notes;
mod open;
mod pauses;
mod places;
pub(crate) mod records;
mod request;
pub(crate) mod run;
mod seen;
pub(crate) mod store;

pub use input::{BatchInput, InputError, LineAt};
pub use notes::{BatchNotes, NotesError, write_whole};
pub use pauses::Pauses;
pub use request::{BATCH_URLS, BadLine, BatchLine, OutputLine, answer_line};
pub use seen::SeenModels;
