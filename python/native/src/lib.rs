//! `genset._native`: the runtime for Python programs. Names, discovery, request planes, clients and Workers are those of
//! `genset-runtime`; handlers, tasks and dictionaries stay in Python.
//!
//! No thread of this module ever runs Python or takes the GIL. Events for the program are put into an `inbox`, which wakes
//! the program's event loop once; the loop takes all of them in one call. Bodies cross as MessagePack bytes.
//!
//! It is not for Rust programs, which use `genset-runtime`. Its only caller is the package `genset`, in `_bridge.py` and the modules
//! on top of it.

mod ask;
mod call;
mod engine;
mod error;
mod inbox;
mod model;
mod node;
mod served;
mod status;

use pyo3::prelude::*;

/// The module that `genset` imports.
#[pymodule]
fn _native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<node::Node>()?;
    module.add_class::<ask::Caller>()?;
    module.add_class::<ask::Asking>()?;
    module.add_class::<call::Call>()?;
    module.add_function(wrap_pyfunction!(node::start_logging, module)?)?;
    module.add_function(wrap_pyfunction!(node::end_logging, module)?)?;
    module.add("__version__", env!("CARGO_PKG_VERSION"))
}
