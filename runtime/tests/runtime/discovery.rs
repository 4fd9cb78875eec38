//! Discovery backends: the common behaviour suite, and tests of each backend.

mod child;
#[cfg(feature = "etcd")]
mod etcd;
mod file;
mod file_faults;
mod memory;
mod suite;
