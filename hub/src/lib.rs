//! Models by name: [`Hub`] fetches the files that an engine needs from the Hugging Face Hub, or a server with the same
//! protocol, into the cache that the Hub's own tools use.
//!
//! This crate does not interpret those files, and knows no engine: the caller says which kind of files it needs ([`Needs`]).
//! The `genset` command uses it for a `MODEL` that is not a path.
//!
//! # Source
//! The [cache](https://huggingface.co/docs/huggingface_hub/guides/manage-cache), its
//! [variables](https://huggingface.co/docs/huggingface_hub/package_reference/environment_variables) and the
//! [API](https://huggingface.co/docs/hub/api).

mod cache;
mod choice;
mod client;
mod download;
mod error;
mod fetch;
mod progress;
mod reference;
mod settings;
mod urls;

pub use cache::{Cache, CachedModel};
pub use choice::Needs;
pub use error::HubError;
pub use fetch::{Fetched, Hub};
pub use progress::{Event, PlannedFile, Progress, Silent, Wait};
pub use reference::{ModelRef, RepoId};
pub use settings::HubSettings;
pub use urls::without_password;
