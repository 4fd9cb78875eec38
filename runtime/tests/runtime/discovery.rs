//! Discovery backends: the one behaviour suite they all pass, and what is particular to each.

mod child;
#[cfg(feature = "etcd")]
mod etcd;
mod file;
mod file_faults;
mod memory;
mod suite;
