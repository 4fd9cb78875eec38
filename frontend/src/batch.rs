//! Batches: requests in a file, each answered on a line of another. [`BatchInput`] reads them, [`answer_line`] answers one,
//! [`BatchNotes`] keep the answers until all have come, so that a run that was interrupted goes on where it stood.
//!
//! `genset run in=batch` is one user of these; the routes `/v1/files` and `/v1/batches` are the other: `store` keeps what they
//! know in a folder, `run` answers, each batch that is `open`.

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
