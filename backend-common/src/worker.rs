//! worker
mod lifecycle;
pub use lifecycle::*;
