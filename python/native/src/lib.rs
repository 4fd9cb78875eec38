//! `genset._native`: the runtime for Python programs. Names, discovery, request planes, clients and Workers are those of
//! `genset-runtime`; what is Python's (handlers, tasks, dictionaries) stays in Python.
//!
//! No thread of this module ever runs Python or takes the GIL. What happens for the program is put into an `inbox`, which wakes
//! the program's event loop once for all that is ready; the loop takes it in one call. Bodies cross as MessagePack bytes.
//!
//! It is not for Rust programs: `genset-runtime` is. The package `genset` is its one caller, in `_bridge.py` and the modules on
//! top of it.

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

/// What `genset` imports.
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
